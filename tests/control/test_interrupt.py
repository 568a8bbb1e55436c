"""Ctrl-C while a rank waits in torch for one that has not come."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from programs import Program

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
    words = ["--nproc-per-node", "2", "--grace-s", "60", "script.py", late]
    process = Program("-m", "odc_launcher", *words, folder=tmp_path)
    deadline = time.monotonic() + 120
    while not all((tmp_path / f"here{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)  # into the wait
    start = time.monotonic()
    process.signal(signal.SIGINT)
    done = process.end(timeout_s=90)
    assert time.monotonic() - start < 50, done.stderr  # not when ranks are made to end
    assert done.returncode == 130
    assert "SIGTERM" not in done.stderr
