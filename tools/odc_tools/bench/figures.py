"""Numbers from measurements: spreads, goals and whether they are met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

PULL_GOAL, PUSH_GOAL = 1.5, 1.35
"""Times as fast as all-gather and reduce-scatter, at shards of :data:`GOAL_SIZES_MIB`."""
GOAL_SIZES_MIB = (16.0, 128.0)
OVERLAP_GOAL = 1.10
"""Time of a matrix product beside a push, at most, over its time alone."""
SHARE_GOAL = 0.98
"""Share of the limit's speed with equal lengths."""
UTILISATION_GOAL = 0.95
PLAN_TOLERANCE = 0.97
MEMORY_TOLERANCE = 1.02


@dataclass(frozen=True)
class Spread:
    """Median and the range of the middle four fifths.

    Attributes:
        median: half of the values are below.
        p10: a tenth of the values is below.
        p90: a tenth of the values is above.
    """

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value or more."""
        p10, median, p90 = np.percentile(np.asarray(values, dtype=np.float64), [10, 50, 90]).tolist()
        return cls(median, p10, p90)

    def scaled(self, factor: float) -> Spread:
        """In another unit."""
        return Spread(self.median * factor, self.p10 * factor, self.p90 * factor)


@dataclass(frozen=True)
class Verdict:
    """A goal, and what came out.

    Attributes:
        goal: in words.
        value: what was measured.
        target: what it is compared with.
        at_most: whether the target is the largest value allowed, not the smallest.
        factors: what the target was computed from, by name.
    """

    goal: str
    value: float
    target: float
    at_most: bool = False
    factors: tuple[tuple[str, float], ...] = ()

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        return self.value <= self.target if self.at_most else self.value >= self.target

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self) | {"met": self.met, "factors": dict(self.factors)}

    def __str__(self) -> str:
        parts = "".join(f"; {name} {value:.3f}" for name, value in self.factors)
        sign = "at most" if self.at_most else "at least"
        return (
            f"{'met   ' if self.met else 'NOT MET'} {self.goal}: {self.value:.3f}, {sign} {self.target:.3f}"
            f"{parts}"
        )


def plan_verdict(
    *,
    plan: str,
    base_s: float,
    plan_s: float,
    same_plan_s: float,
    base_predicted: float,
    plan_predicted: float,
    prediction: str,
) -> Verdict:
    """Whether a plan on demand gains what it should over collectives with ``lb_micro``.

    The gain is that of communication on demand, measured with the same plan, times that of the plan,
    predicted by the planner; 3% may be lost::

        base_s / plan_s >= 0.97 * (base_predicted / plan_predicted) * (base_s / same_plan_s)

    Args:
        plan: name of the plan.
        base_s: measured time of FSDP2 with ``lb_micro``.
        plan_s: measured time of the plan on demand.
        same_plan_s: measured time of ``lb_micro`` on demand.
        base_predicted: predicted time of ``lb_micro``, in the planner's unit.
        plan_predicted: predicted time of the plan, in the same unit.
        prediction: how ``base_predicted`` was predicted.
    """
    predicted, same_plan = base_predicted / plan_predicted, base_s / same_plan_s
    return Verdict(
        f"{plan} over fsdp2/lb_micro ({prediction})",
        base_s / plan_s,
        PLAN_TOLERANCE * predicted * same_plan,
        factors=(("predicted gain of the plan", predicted), ("speed-up with the same plan", same_plan)),
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned text, the first column to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
