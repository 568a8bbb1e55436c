"""The demo in one picture: losses, speeds, and what the ranks did in one minibatch.

    python examples/demo/picture.py demo_out

draws ``demo_out/demo.png`` again from what a run has left.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from report import (
    COLLECTIVE,
    CUTS,
    LOCK_STEP,
    METHODS,
    ON_DEMAND,
    SINGLE,
    TIMELINES,
    Line,
    Report,
    read_lines,
    summarize,
)

from odcengine.monitor.timeline import Timeline, height_of, plot_timelines

_COLOURS = {COLLECTIVE: "#f0953b", LOCK_STEP: "#9a9a9a", ON_DEMAND: "#34659d"}
# The curves lie on each other, so those below are wider.
_STYLES = {COLLECTIVE: ("-", 9.0), LOCK_STEP: ("-", 5.0), ON_DEMAND: ("-", 1.6)}
_CUT_NAMES = {cut: cut if cut != SINGLE else "one sequence a micro-batch" for cut in CUTS}
_TOP_INCHES = 4.6


def draw(report: Report, lines: Sequence[Line], out: Path) -> None:
    """Draw ``out/demo.png``.

    Args:
        report: of the lines.
        lines: of ``steps.jsonl``.
        out: the run's folder, with the recorded timelines.
    """
    timelines = [
        (f"{method}, {_CUT_NAMES[SINGLE]}", Timeline.load(path))
        for method, folder in TIMELINES.items()
        for path in sorted((out / folder).glob("step*.json"))[-1:]
    ]
    below = height_of(timelines)
    figure = Figure(figsize=(13, _TOP_INCHES + below), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    parts = figure.subfigures(2, 1, squeeze=False, height_ratios=[_TOP_INCHES, below], hspace=0.03)
    top, bottom = parts[:, 0]
    losses, speeds = top.subplots(1, 2)
    _draw_losses(losses, report, lines)
    _draw_speeds(speeds, report, lines)
    bottom.suptitle(
        "One minibatch, recorded after the measurement: the same samples with both methods",
        x=0.01,
        ha="left",
    )
    plot_timelines(timelines, bottom)
    figure.savefig(out / "demo.png")


def _draw_losses(panel: Axes, report: Report, lines: Sequence[Line]) -> None:
    for method in METHODS:
        of_method = [line for line in lines if (line["cut"], line["method"]) == (SINGLE, method)]
        style, width = _STYLES[method]
        panel.plot(
            [line["step"] for line in of_method],
            [line["loss"] for line in of_method],
            style,
            color=_COLOURS[method],
            linewidth=width,
            label=method,
        )
    curves = "lie on each other" if report.losses_agree else "DIFFER"
    panel.set_title(
        f"Losses of the three methods {curves}:\nlargest difference {report.loss_difference:.1e}, "
        f"relative {report.relative_loss_difference:.1e}",
        loc="left",
    )
    panel.set_xlabel("minibatch")
    panel.set_ylabel("loss")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.legend(frameon=False)
    _clean(panel)


def _draw_speeds(panel: Axes, report: Report, lines: Sequence[Line]) -> None:
    for place, cut in enumerate(CUTS):
        for index, method in enumerate(METHODS):
            summary = report.comparisons[cut].methods[method]
            x = place + 0.27 * (index - 1)
            panel.bar(
                x,
                summary.pooled_tokens_per_s,
                width=0.25,
                color=_COLOURS[method],
                label=None if place else method,
            )
            speeds = [
                line["tokens_per_s"]
                for line in lines
                if (line["cut"], line["method"]) == (cut, method) and not line["warm_up"]
            ]
            panel.plot([x] * len(speeds), speeds, "o", color="black", markersize=2.5, alpha=0.6)
            ratio = "1" if method == COLLECTIVE else f"{summary.to_collective.pooled:.2f}"
            panel.annotate(
                ratio, (x, 0), (0, 4), textcoords="offset points", ha="center", color="white", weight="bold"
            )
    panel.set_xticks(range(len(CUTS)), [_CUT_NAMES[cut] for cut in CUTS])
    orders = f"{report.num_seeds} data order{'s' * (report.num_seeds != 1)}"
    panel.set_title(
        f"Tokens/s over {report.num_minibatches} minibatches, {orders}\n"
        f"(dots: each minibatch; in the bars: ratio to {COLLECTIVE})",
        loc="left",
    )
    panel.set_ylabel("tokens/s")
    panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.set_ylim(0, panel.get_ylim()[1] * 1.15)
    panel.legend(frameon=False, ncols=len(METHODS), loc="upper right")
    _clean(panel)


def _clean(panel: Axes) -> None:
    panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the picture of a run of the demo.")
    parser.add_argument("out", type=Path, help="folder of the run")
    out = parser.parse_args().out
    lines = read_lines(out / "steps.jsonl")
    draw(summarize(lines), lines, out)


if __name__ == "__main__":
    main()
