"""Ctrl-C while a rank waits in torch for one that has not come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, sys, time
from torch import nn
import odcengine.build
open("here" + os.environ["RANK"], "w")
if os.environ["RANK"] == sys.argv[1]:
    time.sleep(100)
odcengine.initialize(config={"train_batch_size": 2}, model=nn.Linear(4, 8))
"""


@pytest.mark.parametrize("late", ["0", "1"])
def test_interrupt_ends_ranks_that_wait_for_others(tmp_path: Path, late: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    others = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "OMP_", "ODC")
    env = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    env["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in ("", "launcher"))
    process = subprocess.Popen(
        [sys.executable, "-m", "odc_launcher", "--nproc-per-node", "2", "--grace-s", "60", "script.py", late],
        env=env,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not all((tmp_path / f"here{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)  # into the wait
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=90)
    assert time.monotonic() - start < 50, told  # not when ranks are made to end
    assert process.returncode == 130
    assert "SIGTERM" not in told
