"""What ``odc advise`` shows: tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from odc_tools.advise_predict import LB_MICRO, LB_MINI, METHODS, Prediction, Size
from odc_tools.bench.figures import table
from odcengine.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from odc_tools.advise_inputs import Lengths

NOT_MODELLED = (
    "the speed of transports: communication on demand and collectives move the same bytes at the same speed",
    "ranks that want the same owner's shard at once, and traffic of other jobs",
    "layers: a rank of a collective may be a layer ahead of the others, which makes up for a little",
    "how well short rows fill a GPU; and memory: whether --max-tokens fit",
    "how the size of a minibatch changes what is learned",
)

_COLOURS = dict(zip(METHODS, ("#c8c8c8", "#f0953b", "#34659d", "#7fb069"), strict=True))


def format_size(size: Size) -> str:
    """The methods at one size of minibatches as a table."""
    gpus = "1 GPU" if size.gpus == 1 else f"{size.gpus} GPUs"
    rows = [["", "step s", "tokens/s", "idle", "speed-up"]]
    rows += [
        [str(method), *_cells(prediction), f"{size.speed_up(method):.2f}x"]
        for method, prediction in size.of.items()
    ]
    bound = "longest sequence" if size.longest_sets > 0.5 else "mean load"
    best = size.of[LB_MICRO].step_s / size.bound.step_s
    rows.append([f"bound: {bound}", *_cells(size.bound), f"{best:.2f}x"])
    return (
        f"{gpus}, minibatches of {size.sequences:,} sequences ({size.per_gpu:.3g} a GPU, "
        f"{_short(size.tokens)} tokens), {size.minibatches} simulated\n{table(rows)}"
    )


def format_sizes(sizes: Sequence[Size]) -> str:
    """Sizes of minibatches as a table."""
    rows = [["sequences (a GPU)", "tokens/s", "idle", "least idle", "idle with collectives", "speed-up"]]
    for size in sizes:
        mini = size.of[LB_MINI]
        rows.append(
            [
                f"{size.sequences:,} ({size.per_gpu:.3g})",
                _short(mini.tokens_per_s),
                f"{mini.idle_share:.1%}",
                f"{size.bound.idle_share:.1%}",
                f"{size.of[LB_MICRO].idle_share:.1%}",
                f"{size.speed_up(LB_MINI):.2f}x",
            ]
        )
    return f"Sizes of minibatches, on demand with lb_mini (speed-up over collective lb_micro)\n{table(rows)}"


def _cells(prediction: Prediction) -> list[str]:
    return [
        f"{prediction.step_s:.4g}",
        _short(prediction.tokens_per_s),
        f"{prediction.idle_share:.1%}",
    ]


def _short(number: float) -> str:
    """``8.39M`` for 8,388,608."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"


def check_drawing() -> None:
    """Refuses a picture where matplotlib is missing.

    Raises:
        ConfigError: it is.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--png needs matplotlib; install it with pip install 'odcengine[monitor]'"
        ) from None


def draw(path: Path, title: str, lengths: Lengths, asked: Sequence[Size], sizes: Sequence[Size]) -> None:
    """Draw lengths, predictions by number of GPUs and size, and what each rank waits.

    Args:
        path: the picture.
        title: above it.
        lengths: of the sequences, shape ``[n]``.
        asked: for each number of GPUs the size that was asked for.
        sizes: several sizes on the largest number of GPUs.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 8.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplots(2, 3)
    _draw_lengths(panels[0, 0], lengths)
    _draw_lines(panels[0, 1], asked, "GPUs")
    _draw_speed_ups(panels[0, 2], asked)
    _draw_lines(panels[1, 0], sizes, "sequences a GPU")
    largest = asked[-1]
    for panel, method in ((panels[1, 1], LB_MICRO), (panels[1, 2], LB_MINI)):
        shares = largest.of[method].idle_shares
        image = panel.imshow(
            shares.T * 100, aspect="auto", interpolation="nearest", vmin=0, vmax=100, cmap="magma_r"
        )
        mean = largest.of[method].idle_share
        panel.set(title=f"{method}, {largest.gpus} GPUs: idle {mean:.1%}", xlabel="minibatch", ylabel="rank")
        if len(shares) <= 20:
            panel.set_xticks(range(len(shares)))
    figure.colorbar(image, ax=panels[1, 2], label="idle share of a rank (%)")
    handles, labels = panels[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path)


def _draw_lengths(panel: Axes, lengths: Lengths) -> None:
    shortest, longest = int(lengths.min()), int(lengths.max())
    edges = np.unique(np.geomspace(shortest, longest + 1, 60).round()) if longest > shortest else 1
    weights = np.full(len(lengths), 100 / len(lengths))
    panel.hist(lengths, bins=edges, weights=weights, color="#34659d", label="of the sequences")  # type: ignore[arg-type]
    panel.hist(
        lengths,
        bins=edges,  # type: ignore[arg-type]
        weights=lengths * (100 / lengths.sum()),
        histtype="step",
        color="#f0953b",
        label="of the tokens",
    )
    if longest > 4 * shortest:
        panel.set_xscale("log")
    panel.axvline(float(lengths.mean()), color="#555555", linewidth=0.8)
    panel.annotate(
        f"mean {lengths.mean():,.0f}",
        (float(lengths.mean()), 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(3, -10),
        textcoords="offset points",
        fontsize=8,
    )
    panel.set(title="lengths of sequences", xlabel="tokens", ylabel="%")
    panel.legend(frameon=False, fontsize=8)


def _draw_lines(panel: Axes, sizes: Sequence[Size], by: str) -> None:
    """Idle share by number of GPUs or sequences a GPU."""
    places = [size.gpus if by == "GPUs" else size.per_gpu for size in sizes]
    for method in METHODS:
        shares = [size.of[method].idle_share * 100 for size in sizes]
        panel.plot(places, shares, "o-", color=_COLOURS[method], label=str(method), markersize=4)
    least = [size.bound.idle_share * 100 for size in sizes]
    panel.plot(places, least, "k--", linewidth=0.9, label="with any plan")
    panel.set_xscale("log", base=2)
    panel.set_xticks(places, [f"{place:.3g}" if place < 1000 else f"{place:.0f}" for place in places])
    where = "" if by == "GPUs" else f", {sizes[0].gpus} GPUs"
    panel.set(title=f"idle share{where}", xlabel=by, ylabel="%")
    panel.set_ylim(bottom=0)


def _draw_speed_ups(panel: Axes, asked: Sequence[Size]) -> None:
    width = 0.8 / len(METHODS)
    for number, method in enumerate(METHODS):
        places = np.arange(len(asked)) + (number - 1.5) * width
        speed_ups = [size.speed_up(method) for size in asked]
        bars: Any = panel.bar(places, speed_ups, width, color=_COLOURS[method], label=str(method))
        panel.bar_label(bars, fmt="%.2f", fontsize=7)
    panel.axhline(1.0, color="#555555", linewidth=0.8)
    panel.set_xticks(range(len(asked)), [str(size.gpus) for size in asked])
    panel.set(title="speed-up over collective lb_micro", xlabel="GPUs")
