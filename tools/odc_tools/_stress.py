"""Random operations on a transport, and the same operations replayed in one process.

Every rank can compute every rank's operations from the seed. Sources are small integers, so sums are exact in
any order, and a rank knows what its accumulators must hold when it has replayed what was pushed into them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from odcengine.control import Meeting
from odcengine.transport.base import Transport, Window, WindowPlan, WindowSpec

_PARAMETERS = (
    (4096, torch.uint8),
    (1, torch.uint8),
    (333, torch.uint8),
    (0, torch.uint8),
    (64, torch.float32),
)
_ACCUMULATORS = ((257, torch.float32), (4099, torch.float32), (1, torch.float32), (65, torch.float64))
_SOURCES = (torch.bfloat16, torch.float32)
_PULL, _PUSH, _GATHER, _SCATTER = range(4)
_SHARES = (0.45, 0.45, 0.05, 0.05)
_LONGEST = 4099


@dataclass(frozen=True)
class Stress:
    """What is to be done.

    Attributes:
        seed: of everything random.
        epochs: minibatches.
        operations: operations a rank and epoch, on average; some ranks have none in an epoch.
        delays: whether ranks sleep now and then.
    """

    seed: int
    epochs: int
    operations: int
    delays: bool = True


@dataclass
class StressResult:
    """What one rank did, all of it checked."""

    operations: int = 0
    pulled_bytes: int = 0
    pushed_bytes: int = 0
    checked_sums: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Operation:
    kind: int
    window: int
    peer: int
    node: int
    offset: int
    count: int
    value: int
    source: int


def run_stress(transport: Transport, stress: Stress) -> StressResult:
    """Run the operations of this rank and check every pull and every sum. Collective; leaves it open.

    Args:
        transport: a transport that has no windows yet.
        stress: equal on all ranks.

    Returns:
        What this rank did.

    Raises:
        AssertionError: a pull or a sum was wrong; says which.
    """
    return _Run(transport, stress).run()


class _Run:
    def __init__(self, transport: Transport, stress: Stress) -> None:
        self.transport = transport
        self.stress = stress
        self.grid = transport.grid
        self.rank = self.grid.shards[self.grid.node][self.grid.local]
        num_nodes = self.grid.num_nodes
        specs = [
            WindowSpec(f"stress window {i}", (num_nodes, n), dtype)
            for i, (n, dtype) in enumerate(_PARAMETERS + _ACCUMULATORS)
        ]
        windows = transport.allocate(WindowPlan.of(specs))
        self.parameters, self.accumulators = windows[: len(_PARAMETERS)], windows[len(_PARAMETERS) :]
        device = windows[0].local.device
        numbers = torch.arange(_LONGEST + 32) * 7 % 17 - 8
        self.sources = [numbers.to(device, dtype) for dtype in _SOURCES]
        self.numbers = numbers.numpy()
        world_size = sum(map(len, self.grid.shards))
        rows = numbers[: world_size * 33].view(world_size, 33)
        self.rows = [rows.to(device, dtype) for dtype in _SOURCES]
        self.contents = torch.arange(_LONGEST + 256, device=device) * 5 % 251

    def run(self) -> StressResult:
        result, start = StressResult(), time.perf_counter()
        naps = np.random.default_rng([self.stress.seed, 1, self.rank])
        for epoch in range(self.stress.epochs):
            self.publish(epoch)
            if self.stress.delays and naps.random() < 0.2:
                time.sleep(naps.random() * 0.004)
            for operation in self.operations(epoch, self.rank):
                if self.stress.delays and naps.random() < 0.002:
                    time.sleep(naps.random() * 0.002)
                self.do(operation, epoch)
                result.operations += 1
            self.transport.barrier(Meeting.END_OF_STEP, epoch)
            result.checked_sums += self.replay(epoch)
        result.seconds = time.perf_counter() - start
        result.pulled_bytes = self.transport.traffic.pulled_bytes
        result.pushed_bytes = self.transport.traffic.pushed_bytes
        return result

    def publish(self, epoch: int) -> None:
        for window in self.parameters:
            for node, row in enumerate(self.grid.shards):
                n = window.spec.shape[1]
                window.local[node].copy_(self.content(row[self.grid.local], epoch, 0, n))
        for window in self.accumulators:
            window.local.zero_()
        self.transport.signal_published(epoch)

    def content(self, shard: int, epoch: int, offset: int, count: int) -> torch.Tensor:
        """What a parameter window holds for a shard; differs between neighbouring epochs and shards."""
        start = offset + (epoch * 13 + shard * 29) % 251
        return self.contents[start : start + count]

    def operations(self, epoch: int, rank: int) -> Iterator[_Operation]:
        """The operations of any rank in an epoch."""
        dice = np.random.default_rng([self.stress.seed, 0, epoch, rank])
        if dice.random() < 0.1:
            return  # no work in this minibatch
        count = int(self.stress.operations * dice.uniform(0.4, 1.8))
        kinds = dice.choice(4, size=count, p=_SHARES)
        numbers = dice.integers(0, 2**31, size=(count, 7))
        for kind, (window, peer, node, offset, size, value, source) in zip(
            kinds.tolist(), numbers.tolist(), strict=True
        ):
            pool = _PARAMETERS if kind in (_PULL, _GATHER) else _ACCUMULATORS
            n = pool[window % len(pool)][0]
            offset %= n + 1
            yield _Operation(
                kind=kind,
                window=window % len(pool),
                peer=peer % self.grid.node_size,
                node=node % self.grid.num_nodes,
                offset=offset,
                count=min(size % (n + 1), n - offset) if kind in (_PULL, _PUSH) else min(33, n - offset),
                value=value % 32,
                source=source % len(_SOURCES),
            )

    def do(self, op: _Operation, epoch: int) -> None:
        transport = self.transport
        if op.kind == _PULL:
            window = self.parameters[op.window]
            out = window.local.new_empty(op.count)
            transport.wait_published(op.peer, epoch)
            transport.pull(window, op.peer, op.node, out, op.offset)
            self.check_pull(window, self.grid.shards[op.node][op.peer], out, op.offset, epoch)
        elif op.kind == _GATHER:
            window = self.parameters[op.window]
            out = window.local.new_empty(len(self.rows[0]), window.spec.shape[1])
            transport.gather(window, out, epoch)
            for shard, row in enumerate(out):
                if shard != self.rank:
                    self.check_pull(window, shard, row, 0, epoch)
        elif op.kind == _PUSH:
            source = self.sources[op.source][op.value : op.value + op.count]
            transport.wait_published(op.peer, epoch)  # its accumulator is empty
            transport.push_add(self.accumulators[op.window], op.peer, op.node, source, op.offset)
        else:
            for peer in range(self.grid.node_size):
                transport.wait_published(peer, epoch)
            rows = self.rows[op.source][:, : op.count]
            transport.scatter_add(self.accumulators[op.window], rows, op.offset)

    def check_pull(self, window: Window, shard: int, out: torch.Tensor, offset: int, epoch: int) -> None:
        expected = self.content(shard, epoch, offset, out.numel())
        if not torch.equal(out.to(torch.int64), expected):
            raise AssertionError(
                f"seed {self.stress.seed}: rank {self.rank} pulled wrong data of shard {shard} from "
                f"{window.spec} at {offset} in epoch {epoch}: {out[:8].tolist()}, not {expected[:8].tolist()}"
            )

    def replay(self, epoch: int) -> int:
        """Compare this rank's accumulators with what all ranks of the node have pushed into them."""
        sums = [np.zeros(window.spec.shape, dtype=np.int64) for window in self.accumulators]
        rows = self.rows[1].cpu().to(torch.int64).numpy()
        for rank in self.grid.shards[self.grid.node]:
            for op in self.operations(epoch, rank):
                part = slice(op.offset, op.offset + op.count)
                if op.kind == _PUSH and op.peer == self.grid.local:
                    sums[op.window][op.node, part] += self.numbers[op.value : op.value + op.count]
                elif op.kind == _SCATTER:
                    for node, row in enumerate(self.grid.shards):
                        sums[op.window][node, part] += rows[row[self.grid.local], : op.count]
        for window, expected in zip(self.accumulators, sums, strict=True):
            bad = np.argwhere(window.local.cpu().numpy() != expected)
            if len(bad):
                raise AssertionError(
                    f"seed {self.stress.seed}: rank {self.rank} has {len(bad)} wrong sums in {window.spec} "
                    f"in epoch {epoch}, the first at {bad[0].tolist()}"
                )
        return sum(expected.size for expected in sums)


def count_lost_updates(transport: Transport, window: Window, rounds: int) -> tuple[int, int]:
    """Add ones to one small buffer from all ranks of the node, with locks and then without. Collective.

    Args:
        transport: the transport; only shared memory can go without locks.
        window: a window of floats, zero on all ranks.
        rounds: additions a rank.

    Returns:
        How many additions were lost at the worst element, with locks and without; 0 on other ranks than the
        first of the node.
    """
    ones: Any = torch.ones(window.spec.shape[1], dtype=window.spec.dtype)
    lost = []
    for number, add in enumerate((transport.push_add, getattr(transport, "_add"))):  # noqa: B009
        transport.barrier(Meeting.END_OF_STEP, 3 * number)
        for _ in range(rounds):
            add(window, 0, 0, ones, 0)
        transport.barrier(Meeting.END_OF_STEP, 3 * number + 1)
        total = rounds * transport.grid.node_size
        lost.append(total - int(window.local[0].min()) if transport.grid.local == 0 else 0)
        window.local.zero_()
        transport.barrier(Meeting.END_OF_STEP, 3 * number + 2)
    return lost[0], lost[1]
