"""What the demo's steps say: tables, ratios, the check of the losses, the prediction beside the measurement.

Everything is computed from the lines of ``steps.jsonl``:

    python examples/demo/report.py demo_out/steps.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from odcengine.balance import Plan

COLLECTIVE, LOCK_STEP, ON_DEMAND = METHODS = ("collective", "lock-step", "on demand")
PACKED, SINGLE = CUTS = ("packed", "single")
TITLES = {
    PACKED: "packed: as few micro-batches as hold the tokens",
    SINGLE: "single: one sequence a micro-batch",
}
LOSS_TOLERANCE = 1e-4
QUIET = 0.05
# What the demo is to show, pooled over at least 3 data orders x 5 minibatches.
COLLECTIVE_GOALS = {PACKED: 1.10, SINGLE: 1.35}
BELOW_PREDICTION = 0.03
IDLE_GOAL = 0.05
RELATIVE_LOSS_GOAL = 1e-6
LOAD_GOAL = 0.01
# Folders of the recorded timelines.
TIMELINES = {COLLECTIVE: "timelines/collective", ON_DEMAND: "timelines/on_demand"}

Line = dict[str, Any]
Minibatch = dict[str, Line]  # by method


@dataclass(frozen=True)
class Spread:
    """A median with the smallest and the largest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def show(self, form: str) -> str:
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


@dataclass(frozen=True)
class Ratio(Spread):
    """How many times the tokens/s of another method: of each minibatch, and pooled.

    Args:
        pooled: all tokens by all time of the one, divided by the same of the other.
        by_seed: the same for each data order.
    """

    pooled: float
    by_seed: list[float]

    @classmethod
    def between(cls, minibatches: Sequence[Minibatch], fast: str, slow: str) -> Ratio:
        """Both did the same tokens, so only the times count."""
        times = [
            (one[slow]["seed"], max(one[slow]["wall_s"]), max(one[fast]["wall_s"])) for one in minibatches
        ]
        ratios = [slow_s / fast_s for _, slow_s, fast_s in times]

        def pool(which: Sequence[tuple[int, float, float]]) -> float:
            return sum(slow_s for _, slow_s, _ in which) / sum(fast_s for _, _, fast_s in which)

        seeds = sorted({seed for seed, _, _ in times})
        return cls(
            statistics.median(ratios),
            min(ratios),
            max(ratios),
            pooled=pool(times),
            by_seed=[pool([time for time in times if time[0] == seed]) for seed in seeds],
        )

    def show_pooled(self) -> str:
        orders = ", ".join(f"{ratio:.3f}" for ratio in self.by_seed)
        return f"{self.pooled:.3f} (data orders {orders}; minibatches {self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Goal:
    """Something that the demo is to show.

    Args:
        what: its name.
        measured: as text.
        limit: as text.
        reached: whether it is.
    """

    what: str
    measured: str
    limit: str
    reached: bool


@dataclass(frozen=True)
class Prediction:
    """What the plans say without running anything, over all minibatches; only work counts, no overhead.

    Args:
        ratio: tokens/s of on demand over lock-step: the sum of the lock-step plans' predicted durations by
            that of the on-demand plans.
        limit: the same with the sum of the bounds instead, which no plan can beat.
        idle: for each method the share of all ranks' time that is spent waiting for slower ranks.
    """

    ratio: float
    limit: float
    idle: dict[str, float]

    @classmethod
    def of(cls, lock_step: Sequence[Line], on_demand: Sequence[Line]) -> Prediction:
        """From the :func:`plan_costs` of the same minibatches."""
        slow, fast = (sum(plan["predicted_cost"] for plan in plans) for plans in (lock_step, on_demand))
        bound = sum(plan["bound"] for plan in on_demand)
        mean_load = sum(statistics.mean(plan["loads"]) for plan in on_demand)
        waiting = 1 - mean_load / slow
        idle = {COLLECTIVE: waiting, LOCK_STEP: waiting, ON_DEMAND: 1 - mean_load / fast}
        return cls(ratio=slow / fast, limit=slow / bound, idle=idle)

    def __str__(self) -> str:
        return f"the plans predict {self.ratio:.2f}, no plan gives more than {self.limit:.2f}"


@dataclass(frozen=True)
class MethodSummary:
    """A method over the minibatches that count.

    Args:
        first_loss: of the warm-up, before any update.
        last_loss: of the last minibatch.
        tokens_per_s: real tokens by the time of the slowest rank, of each minibatch.
        pooled_tokens_per_s: all tokens by all time.
        to_collective: the same relative to the collective baseline on the same minibatch.
        idle_shares: for each rank the waiting by all time, both up to the end of barrier A.
        boundary_share: time from there to the end of the step (optimizer, publishing) by all time.
        load_share: time in the loader by all time. Both of the rank that takes longest.
    """

    first_loss: float
    last_loss: float
    tokens_per_s: Spread
    pooled_tokens_per_s: float
    to_collective: Ratio
    idle_shares: list[float]
    boundary_share: float
    load_share: float


@dataclass(frozen=True)
class Comparison:
    """The methods on minibatches that are cut into micro-batches in one way.

    Args:
        methods: by name.
        on_demand_to_lock_step: tokens/s by tokens/s on the same minibatch.
        lock_step_to_collective: the same.
        prediction: of the same minibatches.
    """

    methods: dict[str, MethodSummary]
    on_demand_to_lock_step: Ratio
    lock_step_to_collective: Ratio
    prediction: Prediction

    def __str__(self) -> str:
        ranks = range(len(self.methods[COLLECTIVE].idle_shares))
        idle = [f"idle, rank {rank}" for rank in ranks]
        rows = [["method", "loss", "tokens/s", *idle, "predicted", "to collective"]]
        for name, method in self.methods.items():
            rows.append(
                [
                    name,
                    f"{method.first_loss:.4f} -> {method.last_loss:.4f}",
                    method.tokens_per_s.show(",.0f"),
                    *(f"{share:.1%}" for share in method.idle_shares),
                    f"{self.prediction.idle[name]:.1%}",
                    "1" if name == COLLECTIVE else method.to_collective.show(".2f"),
                ]
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, ["-" * width for width in widths])
        return "\n".join(
            [
                *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
                f"on demand / lock-step   {self.on_demand_to_lock_step.show('.2f')}; {self.prediction}",
                f"lock-step / collective  {self.lock_step_to_collective.show('.2f')}; gloo's transport",
            ]
        )


@dataclass(frozen=True)
class Report:
    """The whole demo.

    Args:
        comparisons: by the way in which minibatches are cut.
        loss_difference: largest difference between any two losses at an equal step, warm-up included.
        relative_loss_difference: the same, relative to the loss.
        stolen_share: of the time in which ranks could have computed, what other programs took from them.
        num_minibatches: that count; the warm-up does not.
        num_seeds: data orders that they are from.
    """

    comparisons: dict[str, Comparison]
    loss_difference: float
    relative_loss_difference: float
    stolen_share: float
    num_minibatches: int
    num_seeds: int

    @property
    def losses_agree(self) -> bool:
        return self.loss_difference <= LOSS_TOLERANCE

    def goals(self) -> list[Goal]:
        """What is to be shown beside what was measured."""
        goals = []
        for cut, comparison in self.comparisons.items():
            ratio, least = comparison.methods[ON_DEMAND].to_collective, COLLECTIVE_GOALS[cut]
            goals.append(
                Goal(
                    f"{cut}: on demand / collective",
                    ratio.show_pooled(),
                    f"at least {least:.2f}",
                    ratio.pooled >= least,
                )
            )
            ratio, predicted = comparison.on_demand_to_lock_step, comparison.prediction.ratio
            least = predicted * (1 - BELOW_PREDICTION)
            goals.append(
                Goal(
                    f"{cut}: on demand / lock-step",
                    ratio.show_pooled(),
                    f"at least {least:.3f}, the predicted {predicted:.3f} less {BELOW_PREDICTION:.0%}",
                    ratio.pooled >= least,
                )
            )
            idle = comparison.methods[ON_DEMAND].idle_shares
            goals.append(
                Goal(
                    f"{cut}: idle on demand",
                    ", ".join(f"{share:.2%}" for share in idle),
                    f"at most {IDLE_GOAL:.0%} a rank",
                    max(idle) <= IDLE_GOAL,
                )
            )
        load = max(method.load_share for cut in self.comparisons.values() for method in cut.methods.values())
        goals.append(
            Goal("the loader's share", f"{load:.3%}", f"less than {LOAD_GOAL:.0%}", load < LOAD_GOAL)
        )
        difference = self.relative_loss_difference
        goals.append(
            Goal(
                "relative difference of losses",
                f"{difference:.1e}",
                f"at most {RELATIVE_LOSS_GOAL:.0e} at every step",
                difference <= RELATIVE_LOSS_GOAL,
            )
        )
        return goals

    def __str__(self) -> str:
        packed = self.comparisons[PACKED].methods[ON_DEMAND]
        trust = "" if self.stolen_share < QUIET else ": the speeds are not to be trusted"
        verdict = "the same training" if self.losses_agree else "NOT THE SAME TRAINING"
        return "\n".join(
            [
                *(f"{TITLES[cut]}\n{comparison}\n" for cut, comparison in self.comparisons.items()),
                f"Values are medians (smallest to largest) of {self.num_minibatches} minibatches; ratios "
                "compare a minibatch with itself.",
                "on demand / lock-step: what decoupling and balance give, as transport and samples are the",
                "  same. Predicted from the work alone: sum of work in the plans, and its lower bound.",
                "lock-step / collective: both meet at every layer, so this is only gloo being slow on CPUs,",
                "  no merit of on-demand communication. Do not expect it on GPUs, where NCCL is fast.",
                f"Packed, on demand: {packed.boundary_share:.1%} of the time goes to the optimizer step and "
                f"publishing, {packed.load_share:.1%} to the loader.",
                f"Other programs took {self.stolen_share:.1%} of the time that the processes could have "
                f"computed{trust}.",
                f"Losses at equal steps differ by at most {self.loss_difference:.1e} "
                f"(allowed: {LOSS_TOLERANCE:g}), relative {self.relative_loss_difference:.1e}: {verdict}.",
                "\nGoals (set for 3 data orders x 5 minibatches on a quiet machine) and this run, over",
                f"{self.num_seeds} data order{'s' * (self.num_seeds != 1)} and {self.num_minibatches} "
                "minibatches in all, pooled (sum of tokens by sum of time):",
                *(
                    f"  {'reached    ' if goal.reached else 'NOT REACHED'}  {goal.what}: {goal.measured}; "
                    f"goal: {goal.limit}"
                    for goal in self.goals()
                ),
            ]
        )


def plan_costs(plan: Plan) -> Line:
    """What a plan predicts, as plain data; in the unit of its cost model, FLOP."""
    return {
        "strategy": plan.strategy,
        "predicted_cost": plan.predicted_cost,
        "on_demand_cost": plan.on_demand_cost,
        "lockstep_cost": plan.lockstep_cost if plan.equal_counts else None,
        "bound": plan.bound,
        "loads": plan.loads,
    }


def describe(line: Line) -> str:
    """A step in a line of text."""
    idle = " ".join(f"{share:6.1%}" for share in line["idle_shares"])
    stolen = stolen_share([line])
    remarks = "  (warm-up)" * line["warm_up"] + f"  (other programs took {stolen:.0%})" * (stolen > QUIET)
    return (
        f"minibatch {line['step']:2}  {line['cut']} {line['method']:<10}  loss {line['loss']:.4f}  "
        f"{line['tokens_per_s']:6,.0f} tokens/s  idle {idle}{remarks}"
    )


def stolen_share(lines: Sequence[Line]) -> float:
    """Of the time in which ranks were not waiting for others, the share without a core to run on."""
    cpu = sum(sum(line["cpu_s"]) for line in lines)
    return max(0.0, 1 - cpu / sum(sum(line["wall_s"]) - sum(line["wait_s"]) for line in lines))


def read_lines(path: Path) -> list[Line]:
    """The lines of ``steps.jsonl``."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def summarize(lines: Sequence[Line]) -> Report:
    """Compute the report.

    Args:
        lines: a line for each step, cut and method, in any order.

    Raises:
        ValueError: a step that not all methods have done on the same samples, or nothing that counts.
    """
    steps: dict[int, list[Line]] = {}
    for line in lines:
        steps.setdefault(line["step"], []).append(line)
    expected = sorted((cut, method) for cut in CUTS for method in METHODS)
    differences, relative = [], []
    for step, of_step in steps.items():
        done = sorted((line["cut"], line["method"]) for line in of_step)
        if done != expected or any(line["samples"] != of_step[0]["samples"] for line in of_step):
            raise ValueError(f"minibatch {step} was not run by every method on the same samples")
        losses = [line["loss"] for line in of_step]
        differences.append(max(losses) - min(losses) if all(map(math.isfinite, losses)) else math.inf)
        relative.append(differences[-1] / max(map(abs, losses)) if differences[-1] else 0.0)
    num_minibatches = sum(not of_step[0]["warm_up"] for of_step in steps.values())
    if not num_minibatches:
        raise ValueError("no minibatch beside the warm-up")
    comparisons = {}
    for cut in CUTS:
        minibatches = [
            {line["method"]: line for line in steps[step] if line["cut"] == cut} for step in sorted(steps)
        ]
        comparisons[cut] = _compare(minibatches)
    return Report(
        comparisons,
        loss_difference=max(differences),
        relative_loss_difference=max(relative),
        stolen_share=stolen_share([line for line in lines if not line["warm_up"]]),
        num_minibatches=num_minibatches,
        num_seeds=len({line["seed"] for line in lines if not line["warm_up"]}),
    )


def _compare(minibatches: Sequence[Minibatch]) -> Comparison:
    counted = [minibatch for minibatch in minibatches if not minibatch[COLLECTIVE]["warm_up"]]
    plans = ([minibatch[name]["plan"] for minibatch in counted] for name in (LOCK_STEP, ON_DEMAND))
    return Comparison(
        methods={name: _summarize(name, minibatches, counted) for name in METHODS},
        on_demand_to_lock_step=Ratio.between(counted, ON_DEMAND, LOCK_STEP),
        lock_step_to_collective=Ratio.between(counted, LOCK_STEP, COLLECTIVE),
        prediction=Prediction.of(*plans),
    )


def _summarize(name: str, minibatches: Sequence[Minibatch], counted: Sequence[Minibatch]) -> MethodSummary:
    lines = [minibatch[name] for minibatch in counted]
    boundary, load, wall = (
        sum(max(line[key]) for line in lines) for key in ("boundary_s", "load_s", "wall_s")
    )
    busy, wait = (
        [sum(of_rank) for of_rank in zip(*(line[key] for line in lines), strict=True)]
        for key in ("busy_s", "wait_s")
    )
    return MethodSummary(
        first_loss=minibatches[0][name]["loss"],
        last_loss=minibatches[-1][name]["loss"],
        tokens_per_s=Spread.of([line["tokens_per_s"] for line in lines]),
        pooled_tokens_per_s=sum(line["tokens"] for line in lines) / wall,
        to_collective=Ratio.between(counted, name, COLLECTIVE),
        idle_shares=[w / (b + w) for b, w in zip(busy, wait, strict=True)],
        boundary_share=boundary / wall,
        load_share=load / wall,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the tables of a run of the demo.")
    parser.add_argument("steps", type=Path, help="steps.jsonl of a run")
    report = summarize(read_lines(parser.parse_args().steps))
    print(report)
    return 0 if report.losses_agree else 1


if __name__ == "__main__":
    sys.exit(main())
