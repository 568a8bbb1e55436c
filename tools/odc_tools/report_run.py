"""``odc report run``: what a run's metrics and timelines look like, as pictures and a few lines."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from odcengine.errors import ConfigError
from odcengine.monitor.figure import new_figure, save
from odcengine.monitor.timeline import Timeline, draw_timelines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]

_LINE_START = '{"step":'  # of the monitor's JSON lines
_CURVES = 16  # ranks; more are drawn as a map
_POINTS = 400  # steps side by side; more are drawn as means
_BINS = 60


@dataclass(frozen=True)
class Run:
    """What a run has written.

    Attributes:
        name: of its folder.
        steps: facts of each step, rising; of a step that was done twice the last.
        timelines: recorded minibatches, by step.
        evaluations: of each held-out data set the losses, by step.
    """

    name: str
    steps: list[dict[str, Any]]
    timelines: dict[int, Path]
    evaluations: dict[str, dict[int, float]]

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read a run.

        Args:
            path: its folder, in which the monitor's JSON lines and timelines lie (or in folders in it); or
                the file of JSON lines.

        Raises:
            ConfigError: there is no such file, several, or none with a step in it.
        """
        metrics = path if path.is_file() else _metrics_in(path)
        steps: dict[int, dict[str, Any]] = {}
        evaluations: dict[str, dict[int, float]] = {}
        with open(metrics, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    facts = json.loads(line)
                    step = int(facts["step"])
                    if not any("/" in key for key in facts):  # an evaluation, or numbers of the script
                        steps[step] = facts
                    for name, _, key in (key.rpartition("/") for key in facts):
                        loss = facts[f"{name}/loss"] if key == "loss" and name else None
                        if loss is not None:
                            evaluations.setdefault(name, {})[step] = float(loss)
                except (ValueError, KeyError, TypeError) as error:
                    if not line.endswith("\n"):
                        break  # of a run that is writing it, or was cut off
                    raise ConfigError(f"{metrics}:{number}: is no line of monitor.jsonl ({error})") from None
        if not steps:
            raise ConfigError(f"{metrics}: there is no step in it yet")
        folder = metrics.parent if path.is_file() else path
        found = [*folder.glob("step[0-9]*.json"), *folder.glob("*/step[0-9]*.json")]
        timelines = {int(file.stem.removeprefix("step")): file for file in found if file.stem[4:].isdigit()}
        return cls(folder.resolve().name, [steps[step] for step in sorted(steps)], timelines, evaluations)

    @property
    def idle_shares(self) -> Array:
        """Share of each minibatch that each rank waited, ``[steps, ranks]``; NaN where unknown."""
        rows = [facts.get("idle_shares") or [] for facts in self.steps]
        shares = np.full((len(rows), max(map(len, rows))), math.nan)
        for row, values in zip(shares, rows, strict=True):
            row[: len(values)] = [math.nan if value is None else value for value in values]
        return shares

    def numbers(self, key: str) -> Array:
        """One number of each step; NaN where it is unknown."""
        values = [facts.get(key) for facts in self.steps]
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64)

    def summary(self) -> list[str]:
        """The run in a few lines."""
        shares = self.idle_shares
        speed = self.numbers("tokens_per_s")
        known = speed[~np.isnan(speed)]
        per_rank = np.nanmean(shares, axis=0) if shares.size else np.zeros(0)
        lines = [f"{self.name}: {len(self.steps)} steps, {self.steps[0]['step']} to {self.steps[-1]['step']}"]
        if known.size:
            lines.append(f"  median {np.median(known):,.0f} tokens/s")
        if per_rank.size:
            worst = int(per_rank.argmax())
            lines.append(
                f"  idle {per_rank.mean():.1%} on average, most on rank {worst}: {per_rank[worst]:.1%}"
            )
        for name, losses in self.evaluations.items():
            last, best = max(losses), min(losses, key=losses.__getitem__)
            lines.append(
                f"  {name}/loss {losses[last]:.4f} after {last} steps; lowest of {len(losses)}: "
                f"{losses[best]:.4f} after {best}"
            )
        return lines


def _metrics_in(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder or file")
    found = []
    for file in sorted([*folder.glob("*.jsonl"), *folder.glob("*/*.jsonl")]):
        with open(file, encoding="utf-8", errors="replace") as lines:
            if lines.read(len(_LINE_START)) == _LINE_START:
                found.append(file)
    if len(found) != 1:
        what = "several: " + ", ".join(map(str, found)) + "; name one" if found else "no"
        raise ConfigError(f"{folder}: {what} file that monitor.jsonl wrote")
    return found[0]


def compare(run: Run, other: Run) -> str:
    """How much faster a run is than another one, in the steps that both have."""
    of_other = {facts["step"]: facts.get("tokens_per_s") for facts in other.steps}
    ratios = [
        ours / theirs
        for facts in run.steps
        if (ours := facts.get("tokens_per_s")) and (theirs := of_other.get(facts["step"]))
    ]
    if not ratios:
        return f"{run.name} and {other.name} have no step in common whose tokens are known"
    p10, median, p90 = np.percentile(ratios, [10, 50, 90]).tolist()
    return (
        f"{run.name} is {median:.3f} times as fast as {other.name}: tokens/s, median of the {len(ratios)} "
        f"steps that both have, p10 to p90 {p10:.3f} to {p90:.3f}"
    )


def draw_idle(runs: Sequence[Run], path: Path) -> None:
    """Draw the idle share of each rank over time, a panel a run.

    Args:
        runs: from the top.
        path: the picture (PNG).
    """
    figure = new_figure(11, 3.2 * len(runs) + 0.6)
    panels = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
    most = max([0.01, *[float(np.nanmax(run.idle_shares)) for run in runs if run.idle_shares.size]])
    for panel, run in zip(panels, runs, strict=True):
        steps, shares = _thinned(run.numbers("step"), run.idle_shares)
        if shares.shape[1] > _CURVES:
            _draw_map(figure, panel, steps, shares, most)
        else:
            for rank in range(shares.shape[1]):
                panel.plot(steps, 100 * shares[:, rank], linewidth=1, label=f"rank {rank}")
            panel.set_ylim(0, 105 * most)
            panel.set_ylabel("idle, % of the minibatch")
            panel.grid(color="#dddddd", linewidth=0.6)
            panel.legend(ncols=8, fontsize="small", frameon=False)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.set_title("; ".join(line.strip() for line in run.summary()), loc="left", fontsize="medium")
    panels[-1].set_xlabel("step")
    save(figure, path)


def _draw_map(figure: Figure, panel: Axes, steps: Array, shares: Array, most: float) -> None:
    image = panel.imshow(
        100 * shares.T,
        aspect="auto",
        interpolation="nearest",
        extent=(steps[0] - 0.5, steps[-1] + 0.5, shares.shape[1] - 0.5, -0.5),
        vmin=0,
        vmax=100 * most,
        cmap="magma_r",
    )
    panel.set_ylabel("rank")
    figure.colorbar(image, ax=panel, label="idle, % of the minibatch")


def _thinned(steps: Array, values: Array) -> tuple[Array, Array]:
    """Means of neighbouring steps, so that a picture has at most :data:`_POINTS` of them."""
    width = -(-len(steps) // _POINTS)
    starts = range(0, len(steps), width)
    with np.errstate(invalid="ignore"):
        count = [np.maximum(1, (~np.isnan(values[s : s + width])).sum(axis=0)) for s in starts]
        total = [np.nansum(values[s : s + width], axis=0) for s in starts]
        empty = [np.isnan(values[s : s + width]).all(axis=0) for s in starts]
    means = np.where(np.array(empty), math.nan, np.array(total) / np.array(count))
    return np.array([steps[s : s + width].mean() for s in starts]), means.reshape(len(starts), -1)


def draw_timeline(runs: Sequence[Run], path: Path, step: int | None = None) -> str:
    """Draw one minibatch of each run on a common time axis.

    Args:
        runs: from the top.
        path: the picture (PNG).
        step: which one; None for the newest that all of them have, or else the newest of each.

    Returns:
        What was drawn, or why nothing was.

    Raises:
        ConfigError: a run has no timeline of ``step``.
    """
    if not all(run.timelines for run in runs):
        missing = ", ".join(run.name for run in runs if not run.timelines)
        return f"no timeline: {missing} has none; set monitor.timeline_every and timeline_dir"
    common = set.intersection(*[set(run.timelines) for run in runs])
    if step is not None and step not in common:
        of_run = next(run for run in runs if step not in run.timelines)
        there = ", ".join(map(str, sorted(of_run.timelines)))
        raise ConfigError(f"--step {step}: {of_run.name} has timelines of the steps {there}")
    newest = step if step is not None else max(common, default=None)
    chosen = [run.timelines[max(run.timelines) if newest is None else newest] for run in runs]
    timelines = [Timeline.load(file) for file in chosen]
    names = [f"{run.name} ({timeline.label})" for run, timeline in zip(runs, timelines, strict=True)]
    draw_timelines(list(zip(names, timelines, strict=True)), path)
    return f"drew {path}"


def draw_lengths(lengths: npt.NDArray[np.int64], name: str, path: Path) -> None:
    """Draw how long samples are: how many there are of each length, and where the tokens are.

    Args:
        lengths: tokens of each sample, at least one.
        name: of the data set.
        path: the picture (PNG).
    """
    low, high = int(lengths.min()), int(lengths.max())
    edges = np.geomspace(max(1, low) * 0.999, high * 1.001, _BINS + 1)
    figure = new_figure(10, 4.6)
    panel = figure.subplots()
    of_samples = np.full(len(lengths), 100 / len(lengths))
    of_tokens = 100 * lengths / lengths.sum()
    panel.hist(lengths, bins=list(edges), weights=of_samples, color="#7fa8d6", label="samples")
    panel.hist(
        lengths,
        bins=list(edges),
        weights=of_tokens,
        histtype="step",
        linewidth=1.6,
        color="#d9413f",
        label="tokens",
    )
    if high > 4 * low:
        panel.set_xscale("log")
    for share in (50, 99):
        quantile = float(np.percentile(lengths, share, method="nearest"))
        panel.axvline(quantile, color="#555555", linewidth=0.9, linestyle="--")
        panel.annotate(
            f"p{share}: {quantile:,.0f}",
            (quantile, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -12),
            textcoords="offset points",
            fontsize="small",
        )
    mean = statistics.fmean(lengths.tolist())
    panel.set_title(
        f"{name}: {len(lengths):,} samples, mean {mean:,.0f} tokens, longest {high:,}", loc="left"
    )
    panel.margins(y=0.12)
    panel.set_xlabel("tokens of a sample")
    panel.set_ylabel("% of all")
    panel.legend(frameon=False)
    save(figure, path)
