"""What drawing work (`dynamic`) costs where a plan is right and saves where it is not: a simulation.

    python benchmarks/drawing.py

Costs are seconds of a 1.5B model: 2e-5 a token, 1.2e-9 a squared token, and several costs of a micro-batch
besides its sequences. For each of these and 4, 8 and 16 sequences a rank: mean over longalign, swesmith and
grpo, 2, 8 and 32 ranks, micro-batches of at most the longest sequence and twice that, and `--minibatches` of
each. Printed is the time of `dynamic` over that of `lb_mini`:

- right: as planned (in brackets the worst minibatch);
- 15%: the time of every micro-batch is off by 15% (log-normal);
- slow: one rank is 20% slower, which neither knows;
- known: one rank has half the speed, and both know it;

then how many micro-batches it has for each one of `lb_mini`, and the CPU time of planning on 1024 ranks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np
from odc_tools.bench.workloads import WORKLOADS

from odcengine.balance import CostModel, Plan, make_plan
from odcengine.simulate import Machine, simulate

NAMES = ("longalign", "swesmith", "grpo")
FIXED_S = (0.0, 0.02, 0.05, 0.12)
SEQUENCES = (4, 8, 16)
DRAWS = 4  # of the noise, and of who is slow


def seconds(plan: Plan, machine: Machine, seed: int = 0) -> float:
    drawn = plan.strategy == "dynamic"
    return simulate(plan, machine, communication="drawn" if drawn else "on_demand", seed=seed).met_s


def ratios(drawn: Plan, planned: Plan, cost: CostModel) -> list[float]:
    noisy = Machine(cost, noise=0.15)
    ranks = drawn.num_ranks
    slow = [
        Machine(cost, speeds=tuple(0.8 if rank == other else 1.0 for rank in range(ranks)))
        for other in range(min(ranks, DRAWS))
    ]
    by_machine = [
        [seconds(plan, Machine(cost)) for plan in (drawn, planned)],
        [sum(seconds(plan, noisy, seed) for seed in range(DRAWS)) for plan in (drawn, planned)],
        [sum(seconds(plan, machine) for machine in slow) for plan in (drawn, planned)],
        [sum(map(len, plan.micro_batches)) for plan in (drawn, planned)],
    ]
    return [over / under for over, under in by_machine]


def cases(each: int, minibatches: int, cost: CostModel) -> Iterator[list[float]]:
    for name in NAMES:
        for ranks in (2, 8, 32):
            for max_tokens in (WORKLOADS[name].token_limit(), 2 * WORKLOADS[name].token_limit()):
                for number in range(minibatches):
                    lengths = WORKLOADS[name].lengths(number, 0, ranks * each)
                    options = {"num_ranks": ranks, "max_tokens": max_tokens, "cost": cost}
                    drawn = make_plan(lengths, strategy="dynamic", **options)
                    planned = make_plan(lengths, strategy="lb_mini", **options)
                    speeds = tuple(0.5 if rank == number % ranks else 1.0 for rank in range(ranks))
                    known = [
                        seconds(
                            make_plan(lengths, strategy=strategy, speeds=speeds, **options),
                            Machine(cost, speeds=speeds),
                        )
                        for strategy in ("dynamic", "lb_mini")
                    ]
                    yield [*ratios(drawn, planned, cost), known[0] / known[1]]


def planning_ms(name: str, each: int, cost: CostModel, strategy: str) -> float:
    lengths, best = WORKLOADS[name].lengths(0, 0, 1024 * each), float("inf")
    for _ in range(3):
        start = time.process_time()
        make_plan(
            lengths,
            num_ranks=1024,
            strategy=strategy,
            max_tokens=WORKLOADS[name].token_limit(),
            cost=cost,
        )
        best = min(best, time.process_time() - start)
    return best * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minibatches", type=int, default=20, help="of each case")
    arguments = parser.parse_args()
    print(
        "| a micro-batch, s | sequences a rank | right (worst) | 15% | slow | known (worst) | micro-batches |"
    )
    print("|---|---|---|---|---|---|---|")
    for fixed_s in FIXED_S:
        cost = CostModel(linear=2e-5, quadratic=1.2e-9, per_micro_batch=fixed_s)
        for each in SEQUENCES:
            rows = np.array(list(cases(each, arguments.minibatches, cost)))
            right, noisy, slow, count, known = rows.mean(axis=0)
            worst, known_worst = rows[:, 0].max(), rows[:, -1].max()
            ends = f"{right:.3f} ({worst:.3f}) | {noisy:.3f} | {slow:.3f} | {known:.3f} ({known_worst:.3f})"
            print(f"| {fixed_s} | {each} | {ends} | {count:.1f} |")
    print("\n| 1024 ranks | a micro-batch, s | `lb_mini`, ms | `dynamic`, ms |\n|---|---|---|---|")
    for name in NAMES:
        for each in (4, 16):
            for fixed_s in (0.0, 0.05):
                cost = CostModel(linear=2e-5, quadratic=1.2e-9, per_micro_batch=fixed_s)
                times = [planning_ms(name, each, cost, strategy) for strategy in ("lb_mini", "dynamic")]
                print(f"| {name} x {each} | {fixed_s} | {times[0]:.1f} | {times[1]:.1f} |")


if __name__ == "__main__":
    main()
