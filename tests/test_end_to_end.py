"""odc-launch, engine and transport together, as a user runs them: one script, many ways to end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from programs import SOURCES, Program

pytestmark = pytest.mark.alone  # what a run leaves behind is looked for on the whole machine

SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
import odcengine

how = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
engine, *_ = odcengine.initialize(model=model)
rank = engine.topology.rank
for step in range(5):
    for number in range(1 + (rank + step) % 3):
        if step == 2 and number == 1 and rank == 0:
            if how == "raise": raise ValueError("sample 17 is broken")
            if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit": sys.exit(5)
            if how == "stop": time.sleep(1e6)
        x = torch.randn(3, 4)
        engine.backward(engine(x).square().sum(), count=3)
    metrics = engine.step()
    if how == "wait" and step == 2:
        print("ready", flush=True)
        time.sleep(60)
if how != "no close":
    engine.close()
print("last loss", metrics.loss)
"""
CONFIG = """
train_batch_size: auto
optimizer: {type: AdamW, params: {lr: 1.0e-3}}
odc: {timeout_s: 60, startup_timeout_s: 120}
launch: {nproc_per_node: 2, grace_s: 30}
"""
STOPPED_S = 6  # longer than a busy machine stops a rank that is well


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "tmp").mkdir()
    return tmp_path


WORDS = ("-m", "odc_launcher", "--config", "config.yaml", "train.py")


def environment(job: Path) -> dict[str, str]:
    """What keeps the files of a run apart."""
    return {
        "PYTHONPATH": SOURCES,
        "TMPDIR": str(job / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(job / "inductor"),  # torch's own, made on import
    }


def run(job: Path, how: str) -> tuple[int, str]:
    """Its exit code and all that it has told; a job that goes well begins with Python's own start."""
    if how != "fine":
        done = Program(*WORDS, how, folder=job, together=True, **environment(job)).end(timeout_s=240)
        return done.returncode, done.stdout
    real = subprocess.run(
        [sys.executable, *WORDS, how],
        cwd=job,
        env={**os.environ, **environment(job)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return real.returncode, real.stdout


def traces(job: Path) -> set[str]:
    """What a run could leave behind: processes, sockets and files outside of its log folder."""
    found = set(os.listdir("/dev/shm")) | set(os.listdir(job / "tmp"))
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(job):
                found.add(f"process {process.pid}")
        except psutil.Error:  # gone, or another user's
            continue
    return found | set(re.findall(r"@odc-\S+", Path("/proc/net/unix").read_text()))


def left(job: Path, before: set[str]) -> set[str]:
    """What was there when the run had ended, and stays: others of this machine come and go."""
    found = traces(job) - before
    deadline = time.monotonic() + 60
    while found and time.monotonic() < deadline:
        time.sleep(0.1)
        found &= traces(job)
    return found


@pytest.mark.parametrize(
    ("how", "code", "patterns"),
    [
        ("fine", 0, ["last loss"]),
        ("no close", 0, ["last loss"]),
        ("raise", 1, ["rank 0 .*failed first: exit code 1", "cause: ValueError: sample 17 is broken"]),
        ("kill", 137, ["rank 0 .*failed first: SIGKILL", "rank 1 saw: rank 0 .* died", "of it: rank 1\n"]),
        ("exit", 5, ["rank 0 .*failed first: exit code 5", "the end of its script, without close"]),
        (
            "stop",
            124,
            [
                rf"no sign of life for {STOPPED_S} s .* from rank 0 .* step 2, micro-batch 1",
                "SIGTERM to rank 0, which the others have given up",
                "rank 0 .*hangs; rank 1 .*has given it up: exit code 124",
            ],
        ),
    ],
)
def test_how_a_job_ends(job: Path, how: str, code: int, patterns: list[str]) -> None:
    if how == "stop":
        text = CONFIG.replace("timeout_s: 60", f"timeout_s: {STOPPED_S}")
        (job / "config.yaml").write_text(text)
    before = traces(job)
    found, output = run(job, how)
    assert found == code, output
    for pattern in patterns:
        assert re.search(pattern, output), f"{pattern!r} is not in:\n{output}"
    if code == 0:
        losses = re.findall(r"\[rank (\d)\] last loss (\S+)", output)
        assert {rank for rank, _ in losses} == {"0", "1"}
        assert len({loss for _, loss in losses}) == 1
    assert (job / "odc_logs").is_dir()
    assert left(job, before) == set()


def test_killed_launcher_takes_its_ranks_along(job: Path) -> None:
    before = traces(job)
    launcher = Program(*WORDS, "wait", folder=job, together=True, **environment(job))
    launcher.read_until("ready")
    launcher.signal(signal.SIGKILL)
    launcher.end(timeout_s=60)
    assert left(job, before) == set()
