"""What a person sees of a run: a bar or a line now and then, and a summary at the end."""

from __future__ import annotations

import logging
import math
import statistics
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from odcengine.metrics import StepMetrics

logger = logging.getLogger(__name__)

_RANKS_SHOWN = 8


@dataclass(frozen=True)
class Outlook:
    """What is known about a step beside its metrics; None where it is unknown.

    Attributes:
        mfu: model FLOP utilisation, 0 to 1.
        num_steps: steps of the whole run.
        left_s: seconds until its end.
    """

    mfu: float | None = None
    num_steps: int | None = None
    left_s: float | None = None


def describe_step(metrics: StepMetrics, outlook: Outlook) -> str:
    """One line about a step, without its number; a narrow terminal cuts off its end."""
    parts = [f"loss {metrics.loss:.4f}" + ("" if metrics.applied else " (skipped)")]
    if metrics.tokens_per_s is not None:
        parts.append(f"{count(metrics.tokens_per_s)} tokens/s")
    parts.append(f"idle {shares(metrics.idle_shares)}")
    if outlook.left_s is not None:
        parts.append(f"{duration(outlook.left_s)} left")
    if outlook.mfu is not None:
        parts.append(f"MFU {outlook.mfu:.1%}")
    parts += [f"grad norm {metrics.grad_norm:.3g}", f"lr {metrics.lr:.3g}"]
    return ", ".join(parts)


def shares(values: Sequence[float]) -> str:
    """Shares of all ranks in words: each of a few, mean and worst of many."""
    if len(values) <= _RANKS_SHOWN:
        return " ".join(f"{value:.1%}" for value in values)
    worst = max(range(len(values)), key=values.__getitem__)
    return f"{statistics.fmean(values):.1%} (rank {worst}: {values[worst]:.1%})"


def count(value: float) -> str:
    """A number with a unit that a person can read: ``12.3k``."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * limit:  # what three digits round up to it has the unit, too
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """``1:02:03``, or ``2 d 1:02:03``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hour}:{minute:02}:{second:02}"


class Progress(Protocol):
    """Shows how the run goes."""

    def show(self, metrics: StepMetrics, outlook: Outlook) -> None:
        """After every step."""

    def note(self, line: str) -> None:
        """A line between two steps."""

    def close(self, lines: Sequence[str]) -> None:
        """At the end, with the summary's lines."""


class Lines:
    """A line through logging after this run's first step, a sign of life, and then every ``every`` steps."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._has_begun = False

    def show(self, metrics: StepMetrics, outlook: Outlook) -> None:
        """Log the step if it is its turn."""
        if not self._has_begun or (metrics.step + 1) % self._every == 0:
            self._has_begun = True
            total = "" if outlook.num_steps is None else f"/{outlook.num_steps}"
            logger.info("step %d%s: %s", metrics.step + 1, total, describe_step(metrics, outlook))

    def note(self, line: str) -> None:
        """Log the line."""
        logger.info("%s", line)

    def close(self, lines: Sequence[str]) -> None:
        """Log the summary."""
        for line in lines:
            logger.info("%s", line)


class Bar:
    """A bar on the terminal, drawn by rich on stderr after every step (no thread)."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = Console(file=sys.stderr)
        self._bar = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            auto_refresh=False,
        )
        self._task: Any = None

    def show(self, metrics: StepMetrics, outlook: Outlook) -> None:
        """Draw the bar anew."""
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", total=outlook.num_steps)
        self._bar.update(
            self._task,
            completed=metrics.step + 1,
            total=outlook.num_steps,
            description=describe_step(metrics, outlook),
            refresh=True,
        )

    def note(self, line: str) -> None:
        """Print the line above the bar."""
        self._console.print(line, highlight=False, markup=False)

    def close(self, lines: Sequence[str]) -> None:
        """Leave the bar as it is and print the summary under it."""
        if self._task is not None:
            self._bar.stop()
        for line in lines:
            self._console.print(line, highlight=False, markup=False)


def make_progress(choice: str, steps_per_print: int | None) -> Progress | None:
    """The progress for a value of ``monitor.progress``; None for none.

    ``auto`` is a bar where rich is installed and stderr is a terminal, else lines. Lines come every
    ``steps_per_print`` steps; with 0 or None, ``auto`` and ``lines`` show nothing.
    """
    if choice == "bar" or (choice == "auto" and steps_per_print and sys.stderr.isatty()):
        try:
            return Bar()
        except ImportError:
            if choice == "bar":
                logger.warning(
                    "monitor.progress: bar needs rich (pip install 'odcengine[monitor]'); lines instead"
                )
    return Lines(steps_per_print) if choice != "off" and steps_per_print else None


def _sums(totals: Sequence[float], values: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(totals or [0.0] * len(values), values, strict=True)]


class Summary:
    """Adds up what a run did."""

    def __init__(self) -> None:
        self.num_steps = self.num_skipped = self.num_tokens = self.num_samples = 0
        self.num_without_targets: int | None = None
        self._speeds = array("d")
        self._busy: list[float] = []
        self._wait: list[float] = []
        self._boundary_s = self._step_s = 0.0
        self._last_loss = math.nan

    def add(self, metrics: StepMetrics, num_without_targets: int | None) -> None:
        """Count a step.

        Args:
            metrics: of the step.
            num_without_targets: samples of its minibatch that have nothing to learn; None where unknown.
        """
        self.num_steps += 1
        self.num_skipped += not metrics.applied
        self.num_tokens += metrics.num_tokens or 0
        self._last_loss = metrics.loss
        self.num_samples += metrics.num_samples or 0
        if num_without_targets is not None:
            self.num_without_targets = (self.num_without_targets or 0) + num_without_targets
        if metrics.tokens_per_s is not None:
            self._speeds.append(metrics.tokens_per_s)
        self._busy = _sums(self._busy, metrics.busy_s)
        self._wait = _sums(self._wait, metrics.wait_s)
        self._boundary_s += metrics.boundary_s
        self._step_s += metrics.step_s

    def lines(self) -> list[str]:
        """The summary; nothing if there was no step."""
        if not self.num_steps:
            return []
        words = f"summary: {self.num_steps} steps in {duration(self._step_s)}, {self.num_skipped} skipped"
        if self.num_samples:
            words += f"; {self.num_samples} samples"
        if self.num_tokens:
            words += f", {count(self.num_tokens)} tokens"
        words += f"; last loss {self._last_loss:.4f}"
        idle = [w / (b + w) if b + w else 0.0 for b, w in zip(self._busy, self._wait, strict=True)]
        where = f"idle {shares(idle)}; {self._boundary_s / self._step_s:.1%} of the time at the boundary"
        if self._speeds:
            where = f"median {count(statistics.median(self._speeds))} tokens/s; {where}"
        lines = [words, f"summary: {where}"]
        if self.num_without_targets:
            lines.append(
                f"summary: {self.num_without_targets} samples had no token with a target and taught nothing"
            )
        return lines
