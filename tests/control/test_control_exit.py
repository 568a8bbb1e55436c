"""Ranks end by themselves after a failure, as whole jobs under odc-launch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from programs import Program
from transport.conformance import state

SCRIPT = """
import os, pathlib, signal, torch, odcengine
from odcengine._boundary import Boundary

mine = pathlib.Path("pid" + os.environ["RANK"])
mine.with_suffix(".part").write_text(str(os.getpid()))
mine.with_suffix(".part").rename(mine)

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
config = {
    "train_batch_size": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "odc": {"transport": "shm", "timeout_s": 60, "wrap": ["Linear"]},
}
engine, *_ = odcengine.initialize(config=config, model=model)
agree = Boundary._sum_over_ranks

def stop(self, *args):
    if os.environ["RANK"] == "1" and engine.global_steps == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    if engine.global_steps == 2:  # a short limit from here on: before, all must come along on any machine
        self._control.timeout_s = 2.5
    return agree(self, *args)

Boundary._sum_over_ranks = stop
for _ in range(5):
    engine.backward(engine(torch.ones(1, 4)).sum(), count=1)
    engine.step()
"""


def test_pending_collective_does_not_keep_a_failed_rank_alive(tmp_path: Path) -> None:
    """One rank is stopped before a collective: the others are in it, fail at the deadline, and must end."""
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["--nproc-per-node", "3", "--log-dir", "logs", "--grace-s", "60", "--oversubscribe", "script.py"]
    launcher = Program("-m", "odc_launcher", *words, folder=tmp_path, together=True)
    try:
        _wait(lambda: all((tmp_path / f"pid{rank}").exists() for rank in range(3)))
        pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(3)]
        _wait(lambda: state(pids[0]) in "ZX" and state(pids[2]) in "ZX")
        os.kill(pids[1], signal.SIGKILL)  # the launcher would need some seconds to do so
        done = launcher.end(timeout_s=60)
    finally:
        launcher.kill()
    output = done.stdout
    assert done.returncode != 0, output
    assert "no sign of life for 2.5 s (odc.timeout_s) from rank 1 (host " in output
    for rank in (0, 2):
        assert f"rank {rank} SIG" not in output, output  # it ended by itself


def _wait(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)
