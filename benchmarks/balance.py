"""How near to the bound the planner comes, and how long it takes: one process, no GPU.

    python benchmarks/balance.py                          # all workloads, 8x4 to 1024x16: some minutes
    python benchmarks/balance.py --ranks 8 32 --samples 4 --workloads swesmith --repeats 20

Each line is a strategy on some minibatches of a workload (``odc_tools/bench/workloads.py``), planned for a 7B
model with micro-batches of at most 65,536 tokens. "Above the bound" is the predicted duration, with the
communication that the strategy is for, over the lower bound (``odcengine.balance.assign.lower_bound``).
Karmarkar-Karp is what the peers plan with (verl's unequal variant): the same costs, on demand. Times are
those of the CPU, the median over minibatches, so that other load on the machine matters less.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from odc_tools.bench.workloads import WORKLOADS

from odcengine.balance import CostModel, make_plan
from odcengine.balance.exchange import best_exchanges_python

MAX_TOKENS = 65536
COST = CostModel.default()

Result = tuple[float, float, float]
"""Duration, bound, idle share at the bound."""


def plan(strategy: str, lengths: list[int], num_ranks: int, **options: object) -> Result:
    """Plan with odcengine."""
    made = make_plan(
        lengths,
        num_ranks=num_ranks,
        strategy=strategy,
        max_tokens=MAX_TOKENS,
        cost=COST,
        **options,  # type: ignore[arg-type]
    )
    return made.predicted_cost, made.bound, made.idle_share_of_bound


def karmarkar_karp(costs: list[float], num_ranks: int) -> float:
    """Largest load of the multi-way differencing method (Karmarkar and Karp 1982; Korf 2009)."""
    # A state is the falling loads of all ranks. The two of widest spread are merged, largest on smallest.
    states = [(-cost, index, [cost] + [0.0] * (num_ranks - 1)) for index, cost in enumerate(costs)]
    heapq.heapify(states)
    while len(states) > 1:
        _, _, first = heapq.heappop(states)
        _, index, second = heapq.heappop(states)
        loads = sorted([a + b for a, b in zip(first, reversed(second), strict=True)], reverse=True)
        heapq.heappush(states, (loads[-1] - loads[0], index, loads))
    return states[0][2][0]


def differencing(lengths: list[int], num_ranks: int) -> Result:
    """Plan with Karmarkar-Karp: loads only, which flatters its time."""
    return karmarkar_karp(COST(lengths).tolist(), num_ranks), 0.0, 0.0


STRATEGIES: dict[str, Callable[[list[int], int], Result]] = {
    "lb_mini": partial(plan, "lb_mini"),
    "lb_mini without numpy": partial(plan, "lb_mini", find=best_exchanges_python),
    "lb_micro": partial(plan, "lb_micro"),
    "local_sort": partial(plan, "local_sort"),
    "Karmarkar-Karp": differencing,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Quality and speed of the planner.")
    parser.add_argument("--workloads", nargs="+", default=["longalign", "swesmith", "grpo", "sharegpt"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 32, 128, 1024])
    parser.add_argument("--samples", nargs="+", type=int, default=[4, 16], help="a rank and minibatch")
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--repeats", type=int, default=10, help="minibatches (default: 10)")
    parser.add_argument(
        "--kk-limit", type=int, default=1 << 18, help="no Karmarkar-Karp where ranks * sequences is more"
    )
    options = parser.parse_args()
    print("| strategy | workload | ranks x sequences | idle at the bound % | above it %, mean | worst | ms |")
    print("|---|---|---|---|---|---|---|")
    for name in options.workloads:
        for num_ranks in options.ranks:
            for samples in options.samples:
                _rows(options, name, num_ranks, samples)


def _rows(options: argparse.Namespace, workload: str, num_ranks: int, samples: int) -> None:
    draw = WORKLOADS[workload].draw
    assert draw is not None, f"{workload} has sequences of one length: nothing to balance"
    count = num_ranks * samples
    minibatches = [
        draw(np.random.default_rng([num_ranks, samples, repeat]), count).tolist()
        for repeat in range(options.repeats)
    ]
    bounds = [plan("local_sort", lengths, num_ranks)[1:] for lengths in minibatches]
    idle = statistics.mean(share for _, share in bounds)
    for strategy in options.strategies:
        if strategy == "Karmarkar-Karp" and num_ranks * count > options.kk_limit:
            continue
        above, seconds = [], []
        for lengths, (bound, _) in zip(minibatches, bounds, strict=True):
            start = time.thread_time()
            duration = STRATEGIES[strategy](lengths, num_ranks)[0]
            seconds.append(time.thread_time() - start)
            above.append(100 * (duration / bound - 1))
        print(
            f"| {strategy} | {workload} | {num_ranks}x{samples} | {100 * idle:.1f} | "
            f"{statistics.mean(above):.3f} | {max(above):.3f} | {1e3 * statistics.median(seconds):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
