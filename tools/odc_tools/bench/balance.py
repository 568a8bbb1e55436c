"""``odc bench balance``: how near to the bound the planner comes, and how long it takes, against its peers.

Each planner plans the same minibatches, in turn, some times over. "Above the bound" is the predicted
duration, with the communication that the strategy is for, over the lower bound
(:func:`odcengine.balance.assign.lower_bound`). Times are those of the thread on its CPU, so that other work
on the machine matters less, and the least of the repeats. No GPU, no other process, no torch.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from odc_tools.bench.figures import Verdict, table
from odc_tools.bench.peers import Peer, peers_at
from odc_tools.bench.record import describe, write
from odc_tools.bench.workloads import WORKLOADS
from odcengine.balance import CostModel, Plan, make_plan

PLAIN_TOLERANCE = 0.005
"""Without numpy the search ends at that much above the bound."""

_LARGEST_DIFFERENCING = 1 << 18  # ranks by sequences; above, Karmarkar-Karp plans one minibatch, once
_COST = CostModel.default()

Planner = Callable[[list[int], int, int], "tuple[float, Plan | None]"]
"""Lengths, number of ranks, limit of tokens -> duration, and the plan where there is one."""


def _plan(
    strategy: str, lengths: list[int], num_ranks: int, max_tokens: int, **how: Any
) -> tuple[float, Plan]:
    plan = make_plan(
        lengths, num_ranks=num_ranks, strategy=strategy, max_tokens=max_tokens, cost=_COST, **how
    )
    return plan.predicted_cost, plan


def _differencing(lengths: list[int], num_ranks: int, _max_tokens: int) -> tuple[float, None]:
    return karmarkar_karp(_COST(lengths).tolist(), num_ranks), None


def karmarkar_karp(costs: list[float], num_ranks: int) -> float:
    """Largest load of the multi-way differencing method (Karmarkar and Karp 1982; Korf 2009).

    Loads only, not who has what: that flatters its time.
    """
    # A state is the falling loads of all ranks. The two of widest spread are merged, largest on smallest.
    states = [(-cost, index, [cost] + [0.0] * (num_ranks - 1)) for index, cost in enumerate(costs)]
    heapq.heapify(states)
    while len(states) > 1:
        _, _, first = heapq.heappop(states)
        _, index, second = heapq.heappop(states)
        loads = sorted([a + b for a, b in zip(first, reversed(second), strict=True)], reverse=True)
        heapq.heappush(states, (loads[-1] - loads[0], index, loads))
    return states[0][2][0]


_DIFFERENCING = "karmarkar-karp"
PLANNERS: dict[str, Planner] = {
    "lb_mini": partial(_plan, "lb_mini"),
    "lb_mini-plain": partial(_plan, "lb_mini", use_numpy=False, tolerance=PLAIN_TOLERANCE),
    "lb_micro": partial(_plan, "lb_micro"),
    "local_sort": partial(_plan, "local_sort"),
    _DIFFERENCING: _differencing,
}


def add_arguments(parser: argparse.ArgumentParser, list_of_numbers: Callable[[str], list[int]]) -> None:
    """Declares the options.

    Args:
        parser: of the sub-command.
        list_of_numbers: parses "8,32".
    """
    names = [name for name, workload in WORKLOADS.items() if not workload.balanced]
    add = parser.add_argument
    add("--workloads", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}")
    add("--planners", nargs="+", choices=list(PLANNERS), default=list(PLANNERS), metavar="NAME",
        help=f"of {', '.join(PLANNERS)} (default: all)")  # fmt: skip
    numbers: dict[str, Any] = {"type": list_of_numbers, "metavar": "LIST"}
    add("--ranks", default=[8, 32, 128, 1024], help="(default: 8,32,128,1024)", **numbers)
    add("--samples", default=[4, 16], help="a rank and minibatch (default: 4,16)", **numbers)
    add("--minibatches", type=int, default=10, metavar="N", help="of each size (default: 10)")
    add("--repeats", type=int, default=3, metavar="N", help="plans of each minibatch (default: 3)")
    add("--max-tokens", type=int, default=65536, metavar="N", help="limit of a micro-batch (default: 65536)")
    add("--json", default="bench-balance.json", metavar="FILE", help="raw results (default: %(default)s)")
    add("--commit", metavar="HASH", help="for the results, where the code is no git checkout")


def problems_of(options: argparse.Namespace) -> list[str]:
    """What cannot be planned."""
    return [
        f"--max-tokens {options.max_tokens}: sequences of {name} have up to {longest} tokens"
        for name in options.workloads
        if (longest := WORKLOADS[name].longest) > options.max_tokens
    ]


@dataclass
class Row:
    """A planner's results on the minibatches of one size.

    Attributes:
        workload: the distribution of lengths.
        ranks: number of ranks.
        samples: sequences a rank and minibatch.
        planner: one of :data:`PLANNERS`.
        idle_at_bound: share of the ranks' time that no plan can save, mean of all minibatches.
        above: for each minibatch its duration over the bound, less 1.
        ms: for each minibatch the milliseconds of all repeats.
    """

    workload: str
    ranks: int
    samples: int
    planner: str
    idle_at_bound: float
    above: list[float] = field(default_factory=list)
    ms: list[list[float]] = field(default_factory=list)

    @property
    def mean_above(self) -> float:
        """Mean over the minibatches."""
        return statistics.mean(self.above)

    @property
    def least_ms(self) -> float:
        """Of each minibatch the least, of these the median."""
        return statistics.median(map(min, self.ms))

    @property
    def median_ms(self) -> float:
        """Of all."""
        return statistics.median([ms for repeats in self.ms for ms in repeats])

    def cells(self) -> list[str]:
        """The row of the table."""
        return [
            f"{self.workload} {self.ranks}x{self.samples}",
            self.planner,
            f"{100 * self.idle_at_bound:.1f}",
            f"{100 * self.mean_above:.3f}",
            f"{100 * max(self.above):.3f}",
            f"{self.least_ms:.2f}",
            f"{self.median_ms:.2f}",
        ]


_HEAD = [
    "workload, ranks x sequences",
    "planner",
    "idle at the bound %",
    "above it %",
    "worst",
    "ms",
    "median",
]


def run(options: argparse.Namespace) -> int:
    """Measures and prints.

    Returns:
        0 if all plans were right, 1 if not.
    """
    gc.collect()
    gc.freeze()  # what is there already would be looked through while plans are made
    rows: list[Row] = []
    wrong: list[str] = []
    sizes = [(w, n, k) for w in options.workloads for n in options.ranks for k in options.samples]
    for workload, num_ranks, samples in sizes:
        print(f"odc bench: {workload} {num_ranks}x{samples}", file=sys.stderr, flush=True)
        rows += _measure(options, workload, num_ranks, samples, wrong)
    verdicts = goals(rows)
    record = describe(options, ["numpy"])
    record["rows"] = [vars(row) for row in rows]
    record["peers"] = [vars(peer) | {"size": list(size)} for size in sizes for peer in peers_at(*size)]
    record["goals"] = [verdict.to_json() for verdict in verdicts]
    record["wrong"] = wrong
    write(record, options.json)
    print(table([_HEAD, *[row.cells() for row in rows]]))
    print("\nBeside the planners of other trainers (measured elsewhere; see docs/benchmarking.md):")
    print(table(_beside_peers(rows)))
    for line in (*verdicts, *[f"WRONG: {problem}" for problem in wrong]):
        print(line)
    print(f"results: {options.json}")
    return 1 if wrong else 0


def _measure(
    options: argparse.Namespace, workload: str, num_ranks: int, samples: int, wrong: list[str]
) -> list[Row]:
    count = num_ranks * samples
    minibatches = [
        WORKLOADS[workload].lengths(num_ranks, number, count) for number in range(options.minibatches)
    ]
    max_tokens = options.max_tokens
    simple = [_plan("local_sort", lengths, num_ranks, max_tokens)[1] for lengths in minibatches]
    idle = statistics.mean(plan.idle_share_of_bound for plan in simple)
    rows = [Row(workload, num_ranks, samples, planner, idle) for planner in options.planners]
    for number, lengths in enumerate(minibatches):
        measured: list[list[float]] = [[] for _ in rows]
        for repeat in range(options.repeats):
            for row, ms in zip(rows, measured, strict=True):
                slow = row.planner == _DIFFERENCING and num_ranks * count > _LARGEST_DIFFERENCING
                if slow and (number or repeat):
                    continue
                start = time.thread_time()
                duration, plan = PLANNERS[row.planner](lengths, num_ranks, max_tokens)
                ms.append(1e3 * (time.thread_time() - start))
                if not repeat:
                    row.above.append(max(0.0, duration / simple[number].bound - 1))
                    if plan is not None and (problem := _mistake(plan, max_tokens)):
                        wrong.append(f"{row.planner}, {workload} {num_ranks}x{samples}: {problem}")
        for row, ms in zip(rows, measured, strict=True):
            if ms:
                row.ms.append(ms)
    return rows


def _mistake(plan: Plan, max_tokens: int) -> str | None:
    """What is wrong with a plan, if anything is."""
    groups = [group for rank in plan.micro_batches for group in rank]
    if sorted(sample for group in groups for sample in group) != list(range(len(plan.lengths))):
        return "a sequence is missing, or there twice"
    most = max((sum(plan.lengths[sample] for sample in group) for group in groups), default=0)
    return f"a micro-batch of {most} tokens, with a limit of {max_tokens}" if most > max_tokens else None


def goals(rows: list[Row]) -> list[Verdict]:
    """What the planner should reach, where it was measured: ``benchmarks/balance.md``."""
    verdicts = []
    for row in rows:
        size = f"{row.planner}, {row.workload} {row.ranks}x{row.samples}"
        near, fast = None, None
        if row.planner == "lb_mini" and row.ranks == 1024 and row.samples in (4, 16):
            near, fast = 0.1, 25.0
        elif row.planner == "lb_mini" and row.workload in ("longalign", "swesmith"):
            near = 0.15 if (row.ranks, row.samples) in ((32, 4), (8, 4)) else None
        elif row.planner == "lb_mini-plain" and (row.ranks, row.samples) == (1024, 16):
            near, fast = 0.5, 30.0
        if near is not None:
            verdicts.append(Verdict(f"{size}: % above the bound", 100 * row.mean_above, near, at_most=True))
        if fast is not None:
            verdicts.append(Verdict(f"{size}: ms", row.least_ms, fast, at_most=True))
    return verdicts


def _beside_peers(rows: list[Row]) -> list[list[str]]:
    """The second table: above the bound in %, and ms, of lb_mini and of each peer."""
    lines = [["workload, ranks x sequences", "lb_mini %", "ms", "verl %", "ms", "sail-sg %", "ms"]]
    for row in rows:
        peers = peers_at(row.workload, row.ranks, row.samples)
        if row.planner != "lb_mini" or not peers:
            continue
        cells = [row.cells()[0], f"{100 * row.mean_above:.3f}", f"{row.least_ms:.2f}"]
        lines.append([*cells, *[text for peer in peers for text in _cells_of(peer)]])
    return lines


def _cells_of(peer: Peer) -> tuple[str, str]:
    above = "-" if peer.above is None else f"{100 * peer.above:.2f}"
    return above, "-" if peer.ms is None else f"{peer.ms:g}"
