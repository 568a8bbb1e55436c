"""What a result file says besides the results, and how it is written."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from odcengine._version import __version__


def describe(options: argparse.Namespace, packages: Sequence[str]) -> dict[str, Any]:
    """The head of a result file: when, with which arguments, on which code and machine.

    Args:
        options: of the command line.
        packages: whose versions matter.
    """
    versions: dict[str, str | None] = {"odcengine": __version__, "python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        "task": options.task,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "arguments": {name: value for name, value in vars(options).items() if name != "task"},
        "commit": options.commit or _commit(),
        "versions": versions,
        "device": platform.machine() + " CPU",
    }


def _commit() -> str | None:
    """The commit of the code, with a plus where it was changed since; None where git cannot tell."""

    def git(*words: str) -> str:
        folder = Path(__file__).resolve().parent
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def write(record: dict[str, Any], file: str) -> None:
    """Write a result, whole or not at all."""
    path = Path(file).absolute()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
