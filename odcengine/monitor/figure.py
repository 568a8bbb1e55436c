"""Figures of matplotlib that need no display."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from odcengine.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of constrained layout.

    Args:
        width: inches.
        height: inches.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "drawing a picture needs matplotlib; install it with pip install 'odcengine[monitor]'"
        ) from None
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    figure.savefig(path, format="png")
