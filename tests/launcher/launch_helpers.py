"""Runs odc-launch on small scripts, in a clean environment."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_OTHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "MASTER_",
    "OMP_",
    "ODC",
    "SLURM",
    "OMPI_",
    "PMI",
    "PALS_",
)


class Launcher:
    """odc-launch with a folder of its own; ends what a failed test leaves running."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.script = folder / "script.py"
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}
        self.env["CUDA_VISIBLE_DEVICES"] = ""  # the same on a machine with GPUs
        self.env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "launcher")])
        self.started: list[subprocess.Popen[bytes]] = []

    def write(self, source: str) -> None:
        """Writes the script that the ranks run."""
        prelude = "import os, sys, time, signal, subprocess\nrank = int(os.environ['RANK'])\n"
        self.script.write_text(prelude + textwrap.dedent(source))

    def start(self, *words: str | bytes, **popen: Any) -> subprocess.Popen[bytes]:
        """Starts ``odc-launch`` with exactly these words."""
        settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": self.folder}
        process = subprocess.Popen(
            [sys.executable, "-m", "odc_launcher", *words], env=self.env, **(settings | popen)
        )
        self.started.append(process)
        return process

    def ranks(self, nproc: int, source: str, *words: str | bytes, **popen: Any) -> subprocess.Popen[bytes]:
        """Starts ranks of a script; ``words`` are options of the launcher."""
        self.write(source)
        options = ["--nproc-per-node", str(nproc), "--log-dir", str(self.logs)]
        return self.start(*options, *words, str(self.script), **popen)

    def log(self, rank: int) -> bytes:
        return (self.logs / f"rank{rank}.log").read_bytes()

    def wait_for(self, path: str, count: int = 1, timeout_s: float = 100.0) -> list[Path]:
        """Waits for files that the ranks write when they are ready, and returns them."""
        found: list[Path] = []

        def there() -> bool:
            found[:] = sorted(self.folder.glob(path))
            return len(found) >= count

        wait_until(there, timeout_s)
        return found


def once_told(name: str, *then: str) -> str:
    """The source of ranks that are ready, wait for a signal, and then do what these lines say."""
    lines = (
        "got = []",
        f"signal.signal(signal.SIG{name}, lambda *_: got.append(1))",
        'open(f"ready{rank}", "w")',
        "while not got:",
        "    time.sleep(0.1)",
        *then,
    )
    return "\n".join(lines)


def finish(process: subprocess.Popen[bytes], timeout_s: float = 120.0) -> tuple[int, str, str]:
    """Waits for the launcher; returns its exit code, stdout and stderr."""
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out.decode(), err.decode()


def wait_until(condition: Callable[[], bool], timeout_s: float = 100.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")
