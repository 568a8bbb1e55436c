"""Costs and speeds learned while a run goes on, from the seconds that each rank was busy in each step.

The model is that a rank of speed ``s`` is busy for ::

    seconds * s = per_micro_batch * micro_batches + linear * tokens + quadratic * sum of squared lengths

with three numbers for all ranks and one speed for each. They are fitted to the last steps by alternating
between the numbers (weighted least squares of the *relative* error) and the speeds (a median for each rank),
so that a step that took ten times as long as it should has next to no weight. What measured steps leave
open (samples of one length cannot tell ``linear`` from ``quadratic``) is decided by the model's shape, which
enters as a prior.

Every rank computes the fit for itself, from numbers that all ranks have agreed on, and plans with it. So it
has to be the same on all ranks to the last bit, whatever CPU they run on: numpy computes element by element,
in operations that IEEE 754 defines exactly; sums are made of integers.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from odcengine.balance.cost import CostModel
from odcengine.balance.plan import Plan

Array = npt.NDArray[np.float64]
Coefficients = tuple[float, float, float]
Work = Sequence[Sequence[int]]
"""Of each rank its micro-batches, tokens and sum of squared lengths."""

SLOW = 0.9
"""A rank below this share of the median speed is reported as slow."""

_STATE_VERSION = 1
_ROUNDS = 8
_PRIOR_WIDTH = 0.5  # how far off, as a share, the shape of the model may well be
_SHORTEST_S = 1e-6  # nothing can be done in less
_USUAL_RATIO = 60_000  # of linear to quadratic, in tokens, at 7B parameters
_LEAST_ERROR = 0.01
_SIGNIFICANT = 4.0  # standard errors: by chance less than one of ten thousand ranks
_FIXED_POINT = 1 << 18
_LARGEST_ENTRY = 32.0  # squares of 2**15 of them, in fixed point, add up to less than 2**63
_RANKS_NAMED = 8


@dataclass(frozen=True)
class Fit:
    """What some steps have taught.

    Attributes:
        cost: cost of sequences and micro-batches, in seconds on a rank of speed 1; the one to begin with, in
            its own unit, where there were too few steps.
        speeds: of each rank, as a share of the median rank's. 1 where the difference is not significant.
        num_steps: steps that were fitted; 0 where there were too few.
        error: typical relative error of the predicted seconds.
    """

    cost: CostModel
    speeds: tuple[float, ...]
    num_steps: int
    error: float

    @property
    def slow_ranks(self) -> tuple[int, ...]:
        """Ranks that are slower than :data:`SLOW`."""
        return tuple(rank for rank, speed in enumerate(self.speeds) if speed < SLOW)


class OnlineCost:
    """Learns costs of sequences and speeds of ranks from measured steps.

    Costs nothing while training: :meth:`update` only keeps the numbers, the fit is made where plans are made.

    Args:
        initial: the cost model to begin with, of the model's shape.
        num_ranks: number of ranks.
        hosts: host name of each rank, for reports; and a saved state is only believed about speeds if its
            ranks were on the same hosts.
        window: steps that are remembered.
        min_steps: with fewer steps nothing is concluded.
    """

    def __init__(
        self,
        initial: CostModel,
        *,
        num_ranks: int,
        hosts: Sequence[str] = (),
        window: int = 32,
        min_steps: int = 8,
    ) -> None:
        self.num_ranks = num_ranks
        self.hosts = tuple(hosts)
        self._initial = initial
        self._prior = initial  # the same, or what was learned on other hosts
        self._window = window
        self._min_steps = min_steps
        self._steps: deque[_Step] = deque(maxlen=window + 1)  # of which the last may be skipped
        self._newest = Fit(initial, (1.0,) * num_ranks, 0, 0.0)
        self._reported: tuple[int, ...] = ()

    def update(self, done: Plan | Work, busy_s: Sequence[float]) -> None:
        """Remember a step.

        Args:
            done: what its ranks did: the plan that they followed; or for each rank its micro-batches, tokens,
                and sum of squared lengths.
            busy_s: seconds of each rank at work, without waiting for others; the same on all ranks.
        """
        num_ranks = done.num_ranks if isinstance(done, Plan) else len(done)
        if len(busy_s) != self.num_ranks or num_ranks != self.num_ranks:
            raise ValueError(
                f"the work of {num_ranks} ranks and the times of {len(busy_s)}, but costs of "
                f"{self.num_ranks} ranks"
            )
        self._steps.append(_Step(done, tuple(busy_s)))

    def freeze(self, *, skip_last: int = 0) -> Callable[[], Fit]:
        """The steps up to now, to be fitted later and in another thread.

        Args:
            skip_last: newest steps to leave out, 0 or 1.

        Returns:
            A function that makes the fit.
        """
        steps = list(self._steps)[: max(0, len(self._steps) - skip_last)][-self._window :]
        prior = self._prior

        def fit() -> Fit:
            if len(steps) < self._min_steps:
                return Fit(prior, (1.0,) * self.num_ranks, 0, 0.0)
            result = _fit(prior, steps, self.num_ranks, self._min_steps)
            if skip_last == 0:
                self._newest = result
            return result

        return fit

    def fit(self) -> Fit:
        """What the steps up to now teach."""
        return self.freeze()()

    @property
    def cost_model(self) -> CostModel:
        """The cost model of :meth:`fit`."""
        return self.fit().cost

    @property
    def speeds(self) -> tuple[float, ...]:
        """The speeds of :meth:`fit`."""
        return self.fit().speeds

    def report(self) -> str | None:
        """A line for the log if other ranks are slow than when this was last called; by the newest fit."""
        fit = self._newest
        slow = fit.slow_ranks
        if slow == self._reported:
            return None
        recovered = sorted(set(self._reported) - set(slow))
        self._reported = slow
        parts = []
        if slow:
            named = [f"{self._name(rank)} at {fit.speeds[rank]:.0%}" for rank in slow[:_RANKS_NAMED]]
            more = f" and {len(slow) - _RANKS_NAMED} more" if len(slow) > _RANKS_NAMED else ""
            parts.append(
                f"slow, of the median speed over the last {fit.num_steps} steps: {', '.join(named)}{more}; "
                "plans give them less work"
            )
        if recovered:
            more = " and more" if len(recovered) > _RANKS_NAMED else ""
            parts.append(f"no longer slow: {', '.join(map(self._name, recovered[:_RANKS_NAMED]))}{more}")
        return "balance: " + "; ".join(parts)

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts[rank]}" if self.hosts else f"rank {rank}"

    def state_dict(self) -> dict[str, Any]:
        """The remembered steps as plain lists and numbers; after loading it the fit is the same."""
        return {
            "version": _STATE_VERSION,
            "num_ranks": self.num_ranks,
            "hosts": list(self.hosts),
            "initial": _numbers_of(self._initial),
            "prior": _numbers_of(self._prior),
            "learned": _numbers_of(self.cost_model),
            "steps": [step.to_lists() for step in self._steps],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what was learned.

        Of a run on other ranks or hosts only the costs are taken over, as what to begin with; of one with
        another model (another ``initial``) nothing.

        Raises:
            ValueError: it is no such state.
        """
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"a state of OnlineCost has version {_STATE_VERSION}, not {state.get('version')!r}"
            )
        self._steps.clear()
        self._prior = self._initial
        if state["initial"] != _numbers_of(self._initial):
            return
        if (state["num_ranks"], tuple(state["hosts"])) == (self.num_ranks, self.hosts):
            self._prior = CostModel(*state["prior"])
            self._steps.extend(_Step.from_lists(lists) for lists in state["steps"])
        else:
            self._prior = CostModel(*state["learned"])
        self._newest = Fit(self._prior, (1.0,) * self.num_ranks, 0, 0.0)


def _numbers_of(cost: CostModel) -> list[float | None]:
    return [cost.linear, cost.quadratic, cost.per_micro_batch]


class _Step:
    """What each rank did in a step, and how long it took."""

    def __init__(self, done: Plan | Work, busy_s: tuple[float, ...]) -> None:
        self.busy_s = busy_s
        self._plan = done if isinstance(done, Plan) else None
        self._work = np.array(() if isinstance(done, Plan) else done, dtype=np.int64).reshape(-1, 3)

    def work(self) -> npt.NDArray[np.int64]:
        """Micro-batches, tokens and sum of squared lengths of each rank, shape ``[ranks, 3]``."""
        plan = self._plan
        if plan is not None:  # two threads may come here at once, with the same result
            rows = []
            for groups in plan.micro_batches:
                lengths = [plan.lengths[sample] for sample in itertools.chain(*groups)]
                squares = sum([length * length for length in lengths])
                rows.append((sum(map(bool, groups)), sum(lengths), squares))
            self._work = np.array(rows, dtype=np.int64)
            self._plan = None
        return self._work

    def to_lists(self) -> dict[str, Any]:
        return {"busy_s": list(self.busy_s), "work": self.work().tolist()}

    @classmethod
    def from_lists(cls, lists: dict[str, Any]) -> _Step:
        return cls(lists["work"], tuple(lists["busy_s"]))


# ---- the fit -------------------------------------------------------------------------------------------


def _fit(prior: CostModel, steps: Sequence[_Step], num_ranks: int, min_steps: int) -> Fit:
    work = np.stack([step.work() for step in steps]).astype(np.float64)  # [steps, ranks, 3]
    seconds = np.array([step.busy_s for step in steps])  # [steps, ranks]
    measured = (work[:, :, 0] > 0) & np.isfinite(seconds) & (seconds >= _SHORTEST_S)
    if not measured.any():
        return Fit(prior, (1.0,) * num_ranks, 0, 0.0)
    columns, scales = _columns(prior, work, seconds, measured)
    expected = np.array([prior.overhead, prior.linear, prior.quadratic]) / scales[:3]
    theta: Coefficients = tuple(expected.tolist())
    speeds = np.ones(num_ranks)
    error = 1.0
    for _ in range(_ROUNDS):
        speeds = _speeds(_predict(columns, theta), measured)
        entries = columns / np.where(speeds > 0, speeds, 1.0)[None, :, None]
        residuals = np.abs(_predict(entries, theta) - 1.0)[measured]
        error = max(_LEAST_ERROR, 1.4826 * _median(residuals))
        theta = _least_squares(entries[measured], theta, error, expected.tolist())
    cost = [share * scale * scales[3] for share, scale in zip(theta, scales[:3], strict=True)]
    if not (cost[1] + cost[2] > 0 and all(map(math.isfinite, cost))):
        return Fit(prior, (1.0,) * num_ranks, 0, 0.0)
    return Fit(
        CostModel(linear=cost[1], quadratic=cost[2], per_micro_batch=cost[0]),
        _significant(speeds, measured.sum(axis=0), error, min_steps),
        len(steps),
        error,
    )


def _columns(
    prior: CostModel, work: Array, seconds: Array, measured: npt.NDArray[np.bool_]
) -> tuple[Array, tuple[float, float, float, float]]:
    """Work in units in which all numbers are about 1, divided by the measured seconds.

    Returns:
        Shape ``[steps, ranks, 3]``, 0 where nothing was measured; what 1 means in each column in the unit of
        the prior, and the seconds that a unit of the prior takes.
    """
    linear = prior.linear or prior.quadratic * _USUAL_RATIO
    quadratic = prior.quadratic or prior.linear / _USUAL_RATIO
    cost = work[:, :, 1] * linear + work[:, :, 2] * quadratic
    done = np.where(measured, work[:, :, 0], 1.0)
    per_micro_batch = _median((cost / done)[measured])
    duration = np.where(measured, seconds, math.inf)
    unit_s = 1.0 / _median((cost / duration)[measured])
    scales = (per_micro_batch, linear, quadratic)
    columns = work * np.array(scales) * unit_s / duration[:, :, None]
    return columns, (*scales, unit_s)


def _predict(entries: Array, theta: Coefficients) -> Array:
    # Not a matrix product: its order of additions depends on the CPU.
    return entries[..., 0] * theta[0] + entries[..., 1] * theta[1] + entries[..., 2] * theta[2]


def _speeds(ratios: Array, measured: npt.NDArray[np.bool_]) -> Array:
    """Of each rank the median of predicted by measured seconds over steps, by that of the median rank."""
    rising = np.sort(np.where(measured, ratios, math.inf), axis=0)
    counts = measured.sum(axis=0)
    ranks = np.arange(ratios.shape[1])
    low = rising[np.maximum(counts - 1, 0) // 2, ranks]
    high = rising[np.minimum(counts // 2, len(rising) - 1), ranks]
    medians = np.where(counts > 0, (low + high) / 2, math.nan)
    known = np.sort(medians[counts > 0])
    return np.where(counts > 0, medians / known[len(known) // 2], 1.0)


def _median(values: Array) -> float:
    return float(np.sort(values)[len(values) // 2])


def _least_squares(entries: Array, theta: Coefficients, error: float, expected: list[float]) -> Coefficients:
    """Coefficients >= 0 with ``entries @ theta`` near 1; rows that are far off have little weight.

    Args:
        entries: shape ``[rows, 3]``.
        theta: the coefficients that tell which rows are far off.
        error: the typical distance.
        expected: the coefficients where the rows leave them open.
    """
    entries = entries[(entries < _LARGEST_ENTRY).all(axis=1)]
    off = (_predict(entries, theta) - 1.0) / (2.0 * error)
    root_of_weight = 1.0 / np.sqrt(1.0 + off * off)
    rows = np.concatenate([entries, np.ones((len(entries), 1))], axis=1) * root_of_weight[:, None]
    fixed = np.rint(rows * _FIXED_POINT).astype(np.int64)
    squares = [[value / _FIXED_POINT**2 for value in row] for row in (fixed.T @ fixed).tolist()]
    ridge = (error / _PRIOR_WIDTH) ** 2
    matrix = [[squares[i][j] + (ridge if i == j else 0.0) for j in range(3)] for i in range(3)]
    right = [squares[i][3] + ridge * expected[i] for i in range(3)]
    return _solve_non_negative(matrix, right)


def _solve_non_negative(matrix: list[list[float]], right: list[float]) -> Coefficients:
    """Minimum of ``x @ matrix @ x - 2 * right @ x`` over ``x >= 0``: the best of all choices of what is 0."""
    best, best_value = (0.0, 0.0, 0.0), 0.0
    for count in range(1, 4):
        for free in itertools.combinations(range(3), count):
            values = _solve([[matrix[i][j] for j in free] for i in free], [right[i] for i in free])
            if min(values) < 0:
                continue
            # At the minimum over the free ones the value is -right @ x.
            value = -math.fsum(right[i] * x for i, x in zip(free, values, strict=True))
            if value < best_value:
                full = [0.0, 0.0, 0.0]
                for i, x in zip(free, values, strict=True):
                    full[i] = x
                best, best_value = (full[0], full[1], full[2]), value
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solution of a positive definite system (Gaussian elimination)."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [value - factor * above for value, above in zip(rows[j], rows[i], strict=True)]
    values = [0.0] * size
    for i in reversed(range(size)):
        known = math.fsum(rows[i][j] * values[j] for j in range(i + 1, size))
        values[i] = (rows[i][size] - known) / rows[i][i]
    return values


def _significant(
    speeds: Array, counts: npt.NDArray[np.int64], error: float, min_steps: int
) -> tuple[float, ...]:
    """Speeds, with 1 for those that chance may explain: plans should not follow noise."""
    result = []
    for speed, count in zip(speeds.tolist(), counts.tolist(), strict=True):
        # The standard error of a median is that of a mean times 1.2533.
        doubt = _SIGNIFICANT * 1.2533 * error * speed / math.sqrt(max(1, count))
        trusted = count >= min_steps and abs(speed - 1.0) > max(doubt, _LEAST_ERROR)
        result.append(round(min(4.0, max(1 / 16, speed)), 3) if trusted else 1.0)
    return tuple(result)
