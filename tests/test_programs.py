"""A command in a process that is forked ends and prints as with an interpreter of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import SOURCES, run_program

SCRIPT = """
import atexit, os, signal, sys, threading, time

atexit.register(print, "at the end")
print(__name__, sys.argv, sys.path[0], os.getcwd(), os.environ["OWN"], os.environ.get("RANK"))
print([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)], signal.pthread_sigmask(0, []))
how = sys.argv[1]
if how != "again":
    threading.Thread(target=lambda: (time.sleep(0.1), print("a thread"))).start()
if how == "raise":
    raise ValueError("broken")
if how == "hook":
    sys.excepthook = lambda *_: sys.exit(7)
    raise ValueError("broken")
if how in ("interrupt", "kill"):
    os.kill(os.getpid(), signal.SIGINT if how == "interrupt" else signal.SIGKILL)
    time.sleep(60)
if how == "again":
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, __file__, "number"])
sys.exit({"number": 3, "text": "no data"}.get(how))
"""


@pytest.mark.parametrize("how", ["fine", "number", "text", "raise", "hook", "interrupt", "kill", "again"])
def test_ends_as_a_real_one(how: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if name != "RANK"}
    real = subprocess.run(
        [sys.executable, "-u", "script.py", how],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": SOURCES, "OWN": "x"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    done = run_program("script.py", how, folder=tmp_path, timeout_s=100, OWN="x")
    assert (done.returncode, done.stdout) == (real.returncode, real.stdout)
    assert done.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


RANK = """
import os, signal, sys
print([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)], signal.pthread_sigmask(0, []))
print(__name__, sys.argv, os.getpgrp() == os.getpid(), os.environ["OMP_NUM_THREADS"], sorted(os.listdir()))
sys.stderr.write("unbuffered")
sys.exit(4 * int(os.environ["RANK"]))
"""


def test_ranks_of_odc_launch_are_as_real_ones(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RANK)
    words = ["-m", "odc_launcher", "--nproc-per-node", "2", "--log-dir", "logs", "script.py", "two words"]
    outputs = []
    for run in (
        lambda: run_program(*words, folder=tmp_path),
        lambda: subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": SOURCES},
            capture_output=True,
            text=True,
            timeout=100,
        ),
    ):
        done = run()
        outputs.append((done.returncode, sorted(done.stdout.splitlines())))
        shutil.rmtree(tmp_path / "logs")
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == 4
    assert len(outputs[0][1]) == 6


def test_what_does_not_end_is_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time\nprint('begun')\ntime.sleep(100)\n")
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run_program("script.py", folder=tmp_path, timeout_s=1)
    assert caught.value.timeout == 1
