"""Memory that is lent for pushes is not used again before they have read it, in any order of calls.

Streams and events are fakes that know what has happened before what: each stream counts its work, and how
much of the other streams' work it has waited for. So this needs no GPU, and does not depend on its speed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from odcengine.sharding.hooks import PushHook
from odcengine.transport._sources import PushSources

SHAPE = (2, 12)


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: dict[str, int] = {name: 0}  # work of each stream that is done before what comes next here

    def work(self) -> tuple[str, int]:
        self.seen[self.name] += 1
        return self.name, self.seen[self.name]

    def wait(self, seen: dict[str, int]) -> None:
        for name, count in seen.items():
            self.seen[name] = max(self.seen.get(name, 0), count)

    def wait_event(self, event: Event) -> None:
        self.wait(event.seen)

    def is_after(self, work: tuple[str, int]) -> bool:
        return self.seen.get(work[0], 0) >= work[1]


class Event:
    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def record(self, stream: Stream) -> None:
        self.seen = dict(stream.seen)


@dataclass(eq=False)
class Block:
    """Memory of torch's allocator: whoever takes it next on ``stream`` writes there at once."""

    memory: torch.Tensor
    stream: Stream
    held_by_fsdp: bool = True
    recorded: bool = False  # Tensor.record_stream: the allocator looks by itself
    reads: list[tuple[str, int]] = field(default_factory=list)
    reduced: dict[str, int] = field(default_factory=dict)  # FSDP2's event


class Gpu:
    """What FSDP2 and the transport do with lent memory, step by step."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.compute, self.reduce, self.push_stream = Stream("compute"), Stream("reduce"), Stream("push")
        self.current = self.compute
        self.sources = PushSources(self.push_stream)  # type: ignore[arg-type]
        self.events = [Event(), Event()]
        self.blocks: list[Block] = []
        self.num_freed = 0
        patch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self._record(tensor))

    def _block_of(self, tensor: torch.Tensor) -> Block:
        storage = tensor.untyped_storage().data_ptr()
        return next(block for block in self.blocks if block.memory.data_ptr() == storage)

    def _record(self, tensor: torch.Tensor) -> None:
        self._block_of(tensor).recorded = True

    def allocate(self) -> Block:
        """Memory of gradients, filled on the computing stream."""
        self.current = self.compute
        memory = self.sources.lend((SHAPE[0] * SHAPE[1],), torch.float32, torch.device("cpu"))
        block = Block(memory, self.compute)
        self.blocks.append(block)
        self.compute.work()
        self.reduce.wait(self.compute.seen)
        self.current = self.reduce
        return block

    def push(self, block: Block, start: int, stop: int) -> None:
        """As the transport does it: the events of the last two pushes are used in turn."""
        rows = block.memory.view(SHAPE)[:, start:stop]
        done = self.events.pop(0)
        self.events.append(done)
        if not self.sources.holds(rows):
            self.current.wait_event(done)
        self.push_stream.wait(self.current.seen)
        block.reads.append(self.push_stream.work())
        done.record(self.push_stream)
        self.sources.pushed(rows, done)  # type: ignore[arg-type]

    def barrier(self, stream: Stream) -> None:
        stream.wait(self.push_stream.seen)
        self.sources.reclaim()

    def check(self) -> None:
        """What nobody holds any more is free: its stream must have waited for all that reads it."""
        for block in [*self.blocks]:
            if not block.held_by_fsdp and not self.sources.holds(block.memory):
                if not block.recorded:
                    assert all(map(block.stream.is_after, block.reads)), "used again before it was read"
                self.blocks.remove(block)
                self.num_freed += 1


def one_reduction(gpu: Gpu, dice: random.Random, kept: list[Block]) -> None:
    """A group's post-backward, as FSDP2 calls it, with what may come between."""
    block = gpu.allocate()
    gpu.check()
    if dice.random() < 0.15:  # an exception: FSDP2 drops the memory, nothing is pushed
        block.held_by_fsdp = False
        return
    if dice.random() < 0.2:  # lock-step: all ranks meet before the push
        gpu.barrier(gpu.reduce)
        gpu.check()
    kind = dice.choice(["whole", "parts", "nothing"])  # nothing: no expert was chosen
    if kind == "whole":
        gpu.push(block, 0, SHAPE[1])
    block.reduced = dict(gpu.reduce.seen)
    if kind == "parts":  # by the hooks of parameters, after FSDP2 has recorded its event
        cuts = sorted(dice.sample(range(1, SHAPE[1]), dice.randrange(4)))
        for start, stop in zip([0, *cuts], [*cuts, SHAPE[1]], strict=True):
            gpu.push(block, start, stop)
    gpu.check()
    kept.append(block)
    while len(kept) > dice.randrange(1, 3):  # FSDP2 keeps one or two, and knows nothing of the pushes
        gpu.compute.wait(kept[0].reduced)
        kept.pop(0).held_by_fsdp = False
        gpu.check()


def test_lent_memory_is_read_before_it_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    num_freed = 0
    for seed in range(150):
        dice = random.Random(seed)
        gpu = Gpu(monkeypatch)
        kept: list[Block] = []
        for _ in range(30):
            one_reduction(gpu, dice, kept)
            if dice.random() < 0.2:  # the next forward, or an evaluation
                gpu.current = gpu.compute
                gpu.sources.reclaim()
                gpu.check()
            if dice.random() < 0.1:
                gpu.barrier(gpu.compute)
                gpu.check()
            assert len(gpu.blocks) <= 4  # lent 2, and FSDP2's 2: never what all layers need
        for block in kept:
            block.held_by_fsdp = False
        gpu.barrier(gpu.compute)
        gpu.check()
        assert not gpu.blocks
        num_freed += gpu.num_freed
    assert num_freed == 150 * 30


def test_the_fakes_notice_memory_that_is_given_back_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait of the stream that it was lent on."""
    monkeypatch.setattr(Stream, "wait_event", lambda stream, event: None)
    gpu = Gpu(monkeypatch)

    def reduce_again() -> None:
        block = gpu.allocate()
        gpu.check()
        gpu.push(block, 0, SHAPE[1])
        block.held_by_fsdp = False

    reduce_again()
    reduce_again()
    with pytest.raises(AssertionError, match="before it was read"):
        reduce_again()


class _Mover:
    """Notes what is lent and pushed."""

    def __init__(self) -> None:
        self.transport = self
        self.lent: list[int] = []
        self.pushed: list[int] = []

    def lend_source(self, size: tuple[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if size[0] > 1000:
            raise torch.OutOfMemoryError("no memory")
        self.lent.append(size[0])
        return torch.empty(*size, dtype=dtype, device=device)

    def enter_push(self, group: Any) -> None:
        """No experts."""

    def push(self, group: Any, rows: torch.Tensor, entries: Any, chosen: Any) -> None:
        self.pushed.append(rows.numel())


def test_only_gradients_are_lent_also_after_a_failure() -> None:
    """FSDP2 asks one hook for two kinds of memory, and an exception may come between them."""
    mover, ranks = _Mover(), SimpleNamespace(size=lambda: 2)
    group = SimpleNamespace(grad_numel=6, trainable=[], label="a group")
    hook = PushHook(mover, group, torch.zeros(1))  # type: ignore[arg-type]

    def allocate(numel: int) -> torch.Tensor:
        return hook.allocate((numel,), dtype=torch.float32, device=torch.device("cpu"))

    def reduce() -> None:
        rows, total = allocate(12), allocate(6)
        hook(total, rows, ranks, dist.ReduceOp.SUM)  # type: ignore[arg-type]

    reduce()
    with pytest.raises(torch.OutOfMemoryError):
        allocate(2000)
    reduce()
    assert mover.lent == [12, 12]
    allocate(12)  # and what follows fails
    reduce()  # from memory of its own, which is as right
    reduce()
    assert mover.lent == [12, 12, 12, 12]
    assert mover.pushed == [12] * 4
