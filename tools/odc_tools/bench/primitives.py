"""``odc bench primitives``: pulls and pushes against all-gather and reduce-scatter.

All ways take turns within a round, each from a common start on the device, and the slowest rank counts. A
transport may push on a stream of its own, so pushes end with a barrier, when all of them have landed. What
was pulled and pushed is whole numbers, compared exactly once all is measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from odc_tools.bench import ranks as bench
from odc_tools.bench.figures import (
    GOAL_SIZES_MIB,
    OVERLAP_GOAL,
    PULL_GOAL,
    PUSH_GOAL,
    Spread,
    Verdict,
    table,
)
from odc_tools.bench.ranks import Ranks
from odcengine._collectives import all_gather, reduce_scatter
from odcengine.control import ControlBlock, Meeting
from odcengine.errors import ConfigError
from odcengine.transport.base import Transport, Window, WindowPlan, WindowSpec

_WARM_UP = 3  # rounds
_VALUES = 4  # gradients are 0 to 3: exact in bf16, and their sums in fp32 up to 2**24
_OWNER = 0  # of the shard that all ranks want at once

Call = Callable[[], Any]


def run(options: argparse.Namespace, ranks: Ranks) -> int:
    """Measure, print a table and write the result.

    Returns:
        0 if everything that was pulled and pushed was right, else 1.
    """
    rounds = options.rounds or (30 if ranks.on_gpu else 5)
    repeats = [options.repeats or _repeats(ranks, mib) for mib in options.sizes_mib]
    if (rounds + _WARM_UP) * max(repeats) * 3 * ranks.world_size * _VALUES >= 2**24:
        raise ConfigError(f"--rounds {rounds} --repeats {max(repeats)}: sums would not be exact; use fewer")
    record = bench.describe(options, ranks) | {"rounds": rounds}
    with ranks.control() as control:
        transport = bench.make_transport(options.transport, control, ranks.device)
        record["transport"] = type(transport).__name__
        suite = _Suite(ranks, control, transport, options.sizes_mib, rounds, repeats)
        record["sizes"] = [suite.measure(index) for index in range(len(options.sizes_mib))]
        if ranks.on_gpu:
            record["overlap"] = suite.overlap(options.matrix)
        del suite
        transport.close()
    record["wrong"] = [problem for size in record["sizes"] for problem in size["wrong"]]
    verdicts = _verdicts(record) if ranks.on_gpu else []
    record["verdicts"] = [verdict.to_json() for verdict in verdicts]
    bench.write(record, options.json, ranks)
    if ranks.rank == 0:
        print(_format(record, verdicts), flush=True)
    dist.destroy_process_group()
    return 1 if record["wrong"] else 0


def _repeats(ranks: Ranks, mib: float) -> int:
    """Calls in one measurement: enough that its own start and end do not count."""
    return max(10, min(100, round(512 / mib))) if ranks.on_gpu else 1


class _Suite:
    """Windows and buffers, and the measurements on them.

    Args:
        ranks: this rank.
        control: the node's control block.
        transport: what is measured, without windows.
        sizes_mib: MiB of a shard.
        rounds: measured rounds.
        repeats: calls in one measurement, for each size.
    """

    def __init__(
        self,
        ranks: Ranks,
        control: ControlBlock,
        transport: Transport,
        sizes_mib: list[float],
        rounds: int,
        repeats: list[int],
    ) -> None:
        self.ranks, self.control, self.transport = ranks, control, transport
        self.rounds, self.repeats = rounds, repeats
        self.sizes_mib = sizes_mib
        # Whole blocks of 64 bytes, so that every size holds both dtypes.
        self._nbytes = [max(64, round(size * 2**20) // 64 * 64) for size in sizes_mib]
        # As the engine has them: whole rows are pushed, which may go another way than parts.
        specs = [WindowSpec(f"parameters of {n} bytes", (1, n), torch.uint8) for n in self._nbytes]
        specs += [WindowSpec(f"accumulator of {n} bytes", (1, n // 4), torch.float32) for n in self._nbytes]
        windows = transport.allocate(WindowPlan.of(specs))
        self._params: list[Window] = windows[: len(self._nbytes)]
        self._accumulators: list[Window] = windows[len(self._nbytes) :]
        self._start = torch.zeros(1, device=ranks.device)
        self._epoch = -1
        self._barriers = 0

    # -- one size --------------------------------------------------------------------------------------

    def measure(self, index: int) -> dict[str, Any]:
        """All ways at one size: times, and what was wrong."""
        ranks, rank = self.ranks, self.ranks.rank
        nbytes = self._nbytes[index]
        self.ranks.say(f"{self.sizes_mib[index]:g} MiB a shard")
        self._publish(index)
        buffers = _Buffers(ranks, nbytes)
        calls = self._calls(index, buffers)
        samples = self._take_turns(calls, self.repeats[index])
        self._land()
        ranks.sync()
        number = (self.rounds + _WARM_UP) * self.repeats[index]
        wrong = [
            f"{self.sizes_mib[index]:g} MiB: {what}"
            for what, right in (
                ("a pulled shard", self._pulled(buffers.pulled)),
                ("an all-gathered shard", self._pulled(buffers.gathered)),
                ("the shard that all pulled", self._pulled_from_owner(buffers.incast)),
                ("the sum of what was pushed", self._summed(index, buffers, number)),
                (
                    "the reduce-scattered sum",
                    bool(torch.equal(buffers.reduced, buffers.expected(rank))),
                ),
            )
            if ranks.total([float(not right)]) != [0.0]
        ]
        ways = {name: self._figures(name, values, nbytes) for name, values in samples.items()}
        medians = {name: way["seconds"]["median"] for name, way in ways.items()}
        return {
            "mib": self.sizes_mib[index],
            "repeats": self.repeats[index],
            "ways": ways,
            "ratios": {
                "pull": medians["all_gather"] / medians["pull"],
                "push_fp32": medians["reduce_scatter"] / medians["push_fp32"],
                "push_bf16": medians["reduce_scatter"] / medians["push_bf16"],
            },
            "wrong": wrong,
        }

    def _publish(self, index: int) -> None:
        """Parameters of this rank, an empty accumulator, and flag B of all ranks."""
        window = self._params[index]
        window.local[0].copy_(_parameters(self.ranks.rank, window.spec.shape[1], self.ranks.device))
        self._accumulators[index].local.zero_()
        self._epoch += 1
        self.transport.signal_published(self._epoch)
        for peer in self.transport.grid.visits():
            self.transport.wait_published(peer, self._epoch)

    def _calls(self, index: int, buffers: _Buffers) -> dict[str, Call]:
        transport, rank, epoch = self.transport, self.ranks.rank, self._epoch
        window, sums = self._params[index], self._accumulators[index]
        # In place, as FSDP2 calls both: the own shard lies in the output already.
        own_shard = buffers.gathered[rank]
        calls: dict[str, Call] = {
            "pull": lambda: transport.gather(window, buffers.pulled, epoch),
            "all_gather": lambda: all_gather(buffers.gathered.view(-1), own_shard),
            "push_fp32": lambda: transport.scatter_add(sums, buffers.rows),
            "push_bf16": lambda: transport.scatter_add(sums, buffers.rows_bf16),
            "reduce_scatter": lambda: reduce_scatter(buffers.reduced, buffers.rows.view(-1)),
            "incast_pull": lambda: transport.pull(window, _OWNER, 0, buffers.incast),
            "incast_push": lambda: transport.push_add(sums, _OWNER, 0, buffers.rows[_OWNER]),
        }
        if rank == _OWNER:
            calls["incast_pull"] = calls["incast_push"] = lambda: None
        return calls

    def _land(self) -> None:
        """Barrier A: what was pushed by any rank is there, in the order of the current stream."""
        self.transport.barrier(Meeting.END_OF_STEP, self._barriers)
        self._barriers += 1

    def _take_turns(self, calls: dict[str, Call], repeats: int) -> dict[str, list[float]]:
        """Seconds of each call in every round; the order moves on by one a round."""
        names = list(calls)
        samples: dict[str, list[float]] = {name: [] for name in names}
        for number in range(_WARM_UP + self.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                self.control.beat()
                seconds = self._time(calls[name], repeats, pushes="push" in name)
                if number >= _WARM_UP:
                    samples[name].append(seconds)
        return samples

    def _time(self, call: Call, repeats: int, *, pushes: bool) -> float:
        ranks = self.ranks
        ranks.meet()
        if not ranks.on_gpu:
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            return (time.perf_counter() - start) / repeats
        begin, end = _events(2)
        dist.all_reduce(self._start)  # the devices begin together, not the hosts
        begin.record()
        for _ in range(repeats):
            call()
        if pushes:
            self._land()
        end.record()
        ranks.sync()
        return float(begin.elapsed_time(end)) / 1e3 / repeats

    def _figures(self, name: str, samples: list[float], nbytes: int) -> dict[str, Any]:
        """Spread and speed of one way; in each round the slowest rank counts."""
        seconds = self.ranks.largest(samples)
        spread = Spread.of(seconds)
        moved = nbytes if name.startswith("incast") else nbytes * (self.ranks.world_size - 1)
        return {
            "seconds": asdict(spread),
            "gb_per_s": moved / spread.median / 1e9,
            "samples_s": seconds,
        }

    # -- whether it is right ---------------------------------------------------------------------------

    def _pulled(self, rows: torch.Tensor) -> bool:
        return all(
            bool(torch.equal(row, _parameters(shard, row.numel(), row.device)))
            for shard, row in enumerate(rows)
        )

    def _pulled_from_owner(self, row: torch.Tensor) -> bool:
        if self.ranks.rank == _OWNER:
            return True
        return bool(torch.equal(row, _parameters(_OWNER, row.numel(), row.device)))

    def _summed(self, index: int, buffers: _Buffers, number: int) -> bool:
        """The accumulator holds ``number`` pushes of each kind from every rank."""
        rank = self.ranks.rank
        expected = buffers.expected(rank) * (2 * number)
        if rank == _OWNER:
            own = _gradients(_OWNER, _OWNER, expected.numel(), expected.device)
            expected += (buffers.expected(_OWNER) - own) * number
        return bool(torch.equal(self._accumulators[index].local[0], expected))

    # -- beside a matrix product -----------------------------------------------------------------------

    def overlap(self, size: int) -> dict[str, Any]:
        """A bf16 matrix product on a stream of high priority beside each way, at the largest size.

        Args:
            size: rows and columns of both matrices.
        """
        index = self._nbytes.index(max(self._nbytes))
        device = self.ranks.device
        self.ranks.say(f"{size}^3 matrix product beside {self.sizes_mib[index]:g} MiB a shard")
        self._publish(index)
        calls = self._calls(index, _Buffers(self.ranks, self._nbytes[index]))
        kept = ("pull", "push_fp32", "push_bf16", "all_gather", "reduce_scatter")
        beside: dict[str, Call] = {"alone": lambda: None} | {name: calls[name] for name in kept}
        left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        product = torch.empty_like(left)
        compute, move = (torch.cuda.Stream(device, priority=p) for p in (-1, 0))  # type: ignore[no-untyped-call]
        totals: dict[str, list[float]] = {name: [] for name in beside}
        products: dict[str, list[float]] = {name: [] for name in beside}
        repeats = self.repeats[index]
        for number in range(_WARM_UP + self.rounds):
            for name, call in beside.items():
                self.control.beat()
                self.ranks.meet()
                marks = [_events(2) for _ in range(repeats)]
                begin, end = _events(2)
                with torch.cuda.stream(compute):
                    dist.all_reduce(self._start)
                    begin.record()
                    for product_begin, product_end in marks:
                        move.wait_stream(compute)
                        with torch.cuda.stream(move):
                            call()
                        product_begin.record()
                        torch.mm(left, right, out=product)
                        product_end.record()
                        compute.wait_stream(move)
                    if "push" in name:
                        self._land()
                    end.record()
                self.ranks.sync()
                if number >= _WARM_UP:
                    totals[name].append(float(begin.elapsed_time(end)) / 1e3 / repeats)
                    products[name].append(sum(a.elapsed_time(b) for a, b in marks) / 1e3 / repeats)
        self._land()
        self.ranks.sync()
        result = {}
        for name in beside:
            total_s = self.ranks.largest(totals[name])
            product_s = self.ranks.largest(products[name])
            result[name] = {
                "total_s": asdict(Spread.of(total_s)),
                "product_s": asdict(Spread.of(product_s)),
                "total_samples_s": total_s,
                "product_samples_s": product_s,
            }
        return {"matrix": size, "mib": self.sizes_mib[index], "beside": result}


class _Buffers:
    """What is moved at one size: parameters of ``nbytes`` a shard, gradients of as many bytes in fp32."""

    def __init__(self, ranks: Ranks, nbytes: int) -> None:
        world_size, device, numel = ranks.world_size, ranks.device, nbytes // 4
        self._world_size = world_size
        self.pulled = torch.zeros(world_size, nbytes, dtype=torch.uint8, device=device)
        self.pulled[ranks.rank] = _parameters(ranks.rank, nbytes, device)
        self.gathered = self.pulled.clone()
        self.incast = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.rows = torch.stack([_gradients(ranks.rank, shard, numel, device) for shard in range(world_size)])
        self.rows_bf16 = self.rows.bfloat16()
        self.reduced = torch.zeros(numel, device=device)

    def expected(self, shard: int) -> torch.Tensor:
        """The sum over all ranks of what each has for a shard."""
        total = torch.zeros_like(self.reduced)
        for worker in range(self._world_size):
            total += _gradients(worker, shard, total.numel(), total.device)
        return total


def _events(count: int) -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]  # type: ignore[no-untyped-call]


def _parameters(shard: int, nbytes: int, device: torch.device) -> torch.Tensor:
    index = torch.arange(nbytes, device=device, dtype=torch.int32)
    return ((index % 251 * 3 + shard * 31) % 251).to(torch.uint8)


def _gradients(worker: int, shard: int, numel: int, device: torch.device) -> torch.Tensor:
    index = torch.arange(numel, device=device)
    return ((index * 3 + index // 7 + worker * 5 + shard * 2) % _VALUES).float()


def _verdicts(record: dict[str, Any]) -> list[Verdict]:
    """The goals for GPUs."""
    verdicts = []
    for size in record["sizes"]:
        if size["mib"] in GOAL_SIZES_MIB:
            ratios, at = size["ratios"], f"at {size['mib']:g} MiB"
            verdicts.append(Verdict(f"pull over all-gather {at}", ratios["pull"], PULL_GOAL))
            for name in ("push_fp32", "push_bf16"):
                verdicts.append(Verdict(f"{name} over reduce-scatter {at}", ratios[name], PUSH_GOAL))
    beside = record["overlap"]["beside"]
    alone = beside["alone"]["total_s"]["median"]
    for name in ("push_fp32", "push_bf16"):
        value = beside[name]["total_s"]["median"] / alone
        goal = f"matrix product beside {name}, until both are done"
        verdicts.append(Verdict(goal, value, OVERLAP_GOAL, at_most=True))
    return verdicts


def _format(record: dict[str, Any], verdicts: list[Verdict]) -> str:
    head = f"{record['transport']}, {record['ranks']} ranks, {record['device']}, {record['rounds']} rounds"
    rows = [["MiB a shard", "way", "median us", "p10", "p90", "GB/s", "against"]]
    for size in record["sizes"]:
        for name, way in size["ways"].items():
            spread = Spread(**way["seconds"]).scaled(1e6)
            ratio = size["ratios"].get(name)
            rows.append(
                [
                    f"{size['mib']:g}",
                    name,
                    *(f"{value:.1f}" for value in (spread.median, spread.p10, spread.p90)),
                    f"{way['gb_per_s']:.1f}",
                    "" if ratio is None else f"{ratio:.2f}x",
                ]
            )
    lines = [head, table(rows)]
    if "overlap" in record:
        lines.append(_format_overlap(record["overlap"]))
    lines += [str(verdict) for verdict in verdicts]
    lines += [f"WRONG: {problem}" for problem in record["wrong"]]
    return "\n".join(lines)


def _format_overlap(overlap: dict[str, Any]) -> str:
    rows = [["beside", "product ms", "both ms", "p10", "p90", "over alone"]]
    alone = overlap["beside"]["alone"]["total_s"]["median"]
    for name, times in overlap["beside"].items():
        total = Spread(**times["total_s"]).scaled(1e3)
        product = times["product_s"]["median"] * 1e3
        figures = [f"{value:.3f}" for value in (product, total.median, total.p10, total.p90)]
        rows.append([name, *figures, f"{times['total_s']['median'] / alone:.3f}"])
    return f"{overlap['matrix']}^3 bf16 matrix product, {overlap['mib']:g} MiB a shard\n{table(rows)}"
