"""odc report: pictures of what a run has written."""

from __future__ import annotations

import argparse
from pathlib import Path

from odcengine.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands."""
    commands = parser.add_subparsers(dest="report", metavar="REPORT", required=True)
    text = "draw timelines of minibatches one above the other, on a common time axis"
    timeline = commands.add_parser("timeline", help=text, description=text, allow_abbrev=False)
    timeline.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="JSON file of monitor.timeline_dir"
    )
    timeline.add_argument("-o", "--out", type=Path, required=True, help="the picture (.png)")
    timeline.add_argument(
        "--names", nargs="+", metavar="NAME", default=[], help="a title for each file, in the same order"
    )


def run(options: argparse.Namespace) -> int:
    """Draw.

    Args:
        options: what :func:`add_arguments` declared.

    Returns:
        0.

    Raises:
        ConfigError: a file is no timeline, the picture cannot be written, or matplotlib is missing.
    """
    from odcengine.monitor.timeline import draw_files

    if options.out.suffix != ".png":
        raise ConfigError(f"--out: {options.out} must end in .png")
    try:
        draw_files(options.files, options.out, options.names)
    except OSError as error:
        raise ConfigError(f"{options.out} cannot be written: {error.strerror or error}") from None
    print(f"drew {options.out}")
    return 0
