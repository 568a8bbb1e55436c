"""Costs from a run that was measured: what the monitor's JSON lines tell about seconds.

A line has the seconds and tokens of every rank and the number of micro-batches, but not the length of every
sequence. So what is fitted is how much time the model's shape takes (its ratio of the cost of tokens to that
of attention is kept) and what a micro-batch takes beside its sequences. Where plans are at hand,
:class:`~odcengine.balance.OnlineCost` fits more exactly.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from odcengine.balance import CostModel
from odcengine.errors import ConfigError
from odcengine.simulate.minibatch import Array

_WARM_UP = 2  # steps, whose allocations and first calls are slow
_LEAST_STEPS = 4
_KEYS = ("step", "busy_s", "tokens", "num_micro_batches", "num_samples", "boundary_s", "step_s")


@dataclass(frozen=True)
class RunFit:
    """What a measured run teaches.

    Attributes:
        cost: in seconds, on a rank as fast as those of the run on average.
        boundary_s: median of the boundary.
        num_steps: steps that were used.
        error: median relative error of the ranks' seconds of work a step, summed over ranks.
    """

    cost: CostModel
    boundary_s: float
    num_steps: int
    error: float


@dataclass(frozen=True)
class MeasuredRun:
    """Steps of a run.

    Attributes:
        path: the file.
        busy_s: seconds of work of each rank, shape ``[steps, ranks]``.
        tokens: of each rank, same shape.
        num_micro_batches: of all ranks, shape ``[steps]``.
        num_samples: of all ranks, shape ``[steps]``.
        boundary_s: seconds of the boundary, shape ``[steps]``.
        step_s: seconds of the whole step, shape ``[steps]``.
    """

    path: str
    busy_s: Array
    tokens: Array
    num_micro_batches: Array
    num_samples: Array
    boundary_s: Array
    step_s: Array

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.busy_s[0])

    @property
    def mean_length(self) -> float:
        """Tokens of a sequence on average."""
        return float(self.tokens.sum() / self.num_samples.sum())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> MeasuredRun:
        """The steps in a file of ``monitor.jsonl``, without the first ones, which are slow.

        Of a step that occurs twice the last line counts. Steps without tokens are left out.

        Args:
            path: the file.

        Raises:
            ConfigError: it cannot be read, is no such file, or has too few steps.
        """
        name = os.fspath(path)
        try:
            with open(path, encoding="utf-8") as file:
                lines = [line for line in file if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"{name} cannot be read: {reason or error}") from None
        by_step: dict[int, dict[str, Any]] = {}
        for number, line in enumerate(lines, 1):
            facts = _parse(name, number, line)
            if all(facts[key] is not None for key in _KEYS) and facts["num_samples"] > 0:
                by_step[facts["step"]] = facts
        steps = [by_step[step] for step in sorted(by_step)][_WARM_UP:]
        if len(steps) < _LEAST_STEPS:
            raise ConfigError(
                f"{name} has {len(by_step)} steps with tokens and times; {_WARM_UP + _LEAST_STEPS} are "
                f"needed, of which the first {_WARM_UP} are left out as warm-up"
            )
        if len(counts := {len(facts["busy_s"]) for facts in steps}) > 1:
            raise ConfigError(
                f"{name} has steps of {' and of '.join(map(str, sorted(counts)))} ranks; give a run on one "
                "number of ranks"
            )
        columns = {key: np.array([facts[key] for facts in steps], dtype=np.float64) for key in _KEYS[1:]}
        return cls(name, **columns)

    def fit(self, shape: CostModel, lengths: Sequence[int] | npt.NDArray[np.int64]) -> RunFit:
        """The shape's cost in seconds of this run.

        Args:
            shape: cost of the model's sequences in any unit; its ``per_micro_batch`` is ignored.
            lengths: of the sequences of the run's data, or some of them; they tell how much of the time
                attention takes.

        Raises:
            ConfigError: the times have nothing to do with the work.
        """
        sizes = np.asarray(lengths, dtype=np.float64)
        per_token = shape.linear + shape.quadratic * float((sizes * sizes).sum() / sizes.sum())
        seconds = self.busy_s.sum(axis=1)
        columns = np.stack([self.num_micro_batches, self.tokens.sum(axis=1) * per_token], axis=1)
        valid = (seconds > 0) & (columns > 0).all(axis=1)
        if valid.sum() < _LEAST_STEPS:
            raise ConfigError(f"{self.path} has fewer than {_LEAST_STEPS} steps that took any time")
        rows = columns[valid] / seconds[valid, None]
        keep = np.ones(len(rows), dtype=np.bool_)
        for _ in range(3):  # without the steps that something else slowed down
            theta = _fit_two(rows[keep])
            residuals = np.abs(rows @ theta - 1.0)
            keep = residuals <= 4 * 1.4826 * max(float(np.median(residuals)), 1e-3)
        fixed, unit = theta.tolist()
        if not (0 < unit < math.inf and 0 <= fixed < math.inf):
            raise ConfigError(f"{self.path}: no costs can be fitted to its times")
        return RunFit(
            CostModel(linear=shape.linear * unit, quadratic=shape.quadratic * unit, per_micro_batch=fixed),
            boundary_s=float(np.median(self.boundary_s)),
            num_steps=len(rows),
            error=float(np.median(residuals)),
        )


def _parse(name: str, number: int, line: str) -> dict[str, Any]:
    try:
        facts = json.loads(line)
    except ValueError:
        facts = None
    known = isinstance(facts, dict) and all(key in facts and _is_value(key, facts[key]) for key in _KEYS)
    if not known or (facts["tokens"] is not None and len(facts["tokens"]) != len(facts["busy_s"])):
        raise ConfigError(
            f"{name}, line {number}: no step of a run; expected a file of monitor.jsonl, whose lines have "
            f"{', '.join(_KEYS)}"
        )
    return dict(facts)


def _is_value(key: str, value: Any) -> bool:
    if value is None:  # unknown
        return key not in ("step", "busy_s")
    if key in ("busy_s", "tokens"):
        return isinstance(value, list) and bool(value) and all(map(_is_number, value))
    return isinstance(value, int) if key == "step" else _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _fit_two(rows: Array) -> Array:
    """Coefficients >= 0 of two columns with ``rows @ theta`` near 1; the first is 0 unless it is significant.

    The number of micro-batches often follows the number of tokens. What the steps cannot tell apart then
    counts as cost of tokens.
    """
    scales = rows.mean(axis=0)
    rows = rows / scales
    only_second: Array = np.array([0.0, float(rows[:, 1].sum() / (rows[:, 1] ** 2).sum())]) / scales
    solution = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=1e-6)
    theta: Array = np.asarray(solution[0], dtype=np.float64)
    if solution[2] < 2 or (theta <= 0).any():
        return only_second
    residuals = rows @ theta - 1.0
    variance = float((residuals**2).sum()) / max(1, len(rows) - 2)
    error = math.sqrt(variance * float(np.linalg.inv(rows.T @ rows)[0, 0]))
    return theta / scales if theta[0] > 2 * error else only_second
