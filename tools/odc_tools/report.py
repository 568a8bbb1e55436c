"""odc report: pictures of what a run has written."""

from __future__ import annotations

import argparse
from pathlib import Path

from odcengine.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands."""
    commands = parser.add_subparsers(dest="report", metavar="REPORT", required=True)
    text = "draw a run: idle shares over time, a minibatch of it, the lengths of its samples"
    run = commands.add_parser("run", help=text, description=text, allow_abbrev=False)
    run.add_argument(
        "run", type=Path, metavar="RUN", help="folder with the file of monitor.jsonl, or the file"
    )
    run.add_argument("--against", type=Path, metavar="RUN", help="another run, drawn above it and compared")
    run.add_argument("--data", type=Path, metavar="DIR", help="the data set, for a histogram of its lengths")
    run.add_argument("--step", type=int, metavar="N", help="which timeline (default: the newest)")
    run.add_argument("-o", "--out", type=Path, metavar="DIR", help="where pictures go (default: RUN/report)")
    text = "draw timelines of minibatches one above the other, on a common time axis"
    timeline = commands.add_parser("timeline", help=text, description=text, allow_abbrev=False)
    timeline.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="JSON file of monitor.timeline_dir"
    )
    timeline.add_argument("-o", "--out", type=Path, required=True, help="the picture (.png)")
    timeline.add_argument(
        "--names", nargs="+", metavar="NAME", default=[], help="a title for each file, in the same order"
    )
    text = "draw how long the samples of a data set are"
    lengths = commands.add_parser("lengths", help=text, description=text, allow_abbrev=False)
    lengths.add_argument("data", type=Path, metavar="DIR", help="a data set that odc prepare made")
    lengths.add_argument("-o", "--out", type=Path, required=True, help="the picture (.png)")


def run(options: argparse.Namespace) -> int:
    """Draw.

    Args:
        options: what :func:`add_arguments` declared.

    Returns:
        0.

    Raises:
        ConfigError: a file is not what it should be, a picture cannot be written, or matplotlib is missing.
    """
    if options.report != "run" and options.out.suffix != ".png":
        raise ConfigError(f"--out: {options.out} must end in .png")
    try:
        lines = {"run": _draw_run, "timeline": _draw_timeline, "lengths": _draw_lengths}[options.report](
            options
        )
    except OSError as error:
        place = options.out if error.filename is None else error.filename
        raise ConfigError(f"{place} cannot be written: {error.strerror or error}") from None
    print("\n".join(lines))
    return 0


def _draw_run(options: argparse.Namespace) -> list[str]:
    from odc_tools.report_run import Run, compare, draw_idle, draw_timeline

    runs = [Run.read(path) for path in (options.against, options.run) if path is not None]
    folder: Path = options.run.parent if options.run.is_file() else options.run
    out = options.out or folder / "report"
    out.mkdir(parents=True, exist_ok=True)
    lines = [line for one in runs for line in one.summary()]
    if options.against is not None:
        lines.append(compare(runs[1], runs[0]))
    draw_idle(runs, out / "idle.png")
    lines.append(f"drew {out / 'idle.png'}")
    lines.append(draw_timeline(runs, out / "timeline.png", options.step))
    if options.data is not None:
        lines += _draw_lengths(argparse.Namespace(data=options.data, out=out / "lengths.png"))
    return lines


def _draw_timeline(options: argparse.Namespace) -> list[str]:
    from odcengine.monitor.timeline import draw_files

    draw_files(options.files, options.out, options.names)
    return [f"drew {options.out}"]


def _draw_lengths(options: argparse.Namespace) -> list[str]:
    from odc_tools.report_run import draw_lengths
    from odcengine.data.dataset import TokenDataset

    dataset = TokenDataset.open(options.data)
    if not len(dataset):
        raise ConfigError(f"{options.data}: the data set has no samples")
    draw_lengths(dataset.lengths, options.data.resolve().name, options.out)
    return [f"drew {options.out}"]
