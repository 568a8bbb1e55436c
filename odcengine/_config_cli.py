"""``python -m odcengine.config``: checks a configuration file, or prints the reference page."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from odcengine._config_paths import path_problems
from odcengine._config_reference import reference
from odcengine._config_source import read_source
from odcengine.config import Config, load_config
from odcengine.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Checks a file.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        the exit code: 0, or 2 where the configuration has mistakes.
    """
    parser = argparse.ArgumentParser(
        prog="python -m odcengine.config",
        description="Checks a configuration file. Prints it resolved, as YAML (exit code 0), or all its "
        "mistakes (exit code 2). Files and folders in it that are not there, or not writable, are told.",
    )
    parser.add_argument("file", nargs="?", help="YAML or JSON file")
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="also work out the batch sizes for N ranks"
    )
    parser.add_argument(
        "--paths", action="store_true", help="files and folders that are not there are mistakes (exit code 2)"
    )
    parser.add_argument("--reference", action="store_true", help="print the reference of all keys (Markdown)")
    args = parser.parse_args(argv)
    if args.reference == (args.file is not None):
        parser.error("expected either FILE or --reference")
    try:
        sys.stdout.write(reference() if args.reference else _check(args.file, args.world_size, args.paths))
        sys.stdout.flush()
    except ConfigError as error:
        for problem in error.problems:
            sys.stderr.write(f"{problem}\n")
        return 2
    except BrokenPipeError:
        # The reader (head, less) left; keep the interpreter from flushing into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _check(file: str, world_size: int | None, paths: bool) -> str:
    """Returns the file resolved, after writing its notices to stderr."""
    config = load_config(file)
    missing = read_source(file).report(path_problems(config))
    if missing and paths:
        raise ConfigError(*missing)
    notices = config.notices
    if world_size is not None:
        batch = config.resolve_batch(world_size)
        notices += tuple(f"{file}: {notice}" for notice in batch.notices)
        config = _with_batch(config, batch.train_batch_size)
    for notice in notices:
        sys.stderr.write(f"note: {notice}\n")
    for line in missing:
        sys.stderr.write(f"warning: {line}\n")
    return config.to_yaml()


def _with_batch(config: Config, train_batch_size: int) -> Config:
    return config.model_copy(update={"train_batch_size": train_batch_size})
