"""A job that is asked to stop saves one checkpoint, ends with 75, and goes on where it was (user case 4)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from programs import Program

from odcengine.checkpoint.directory import read_mark
from odcengine.config import load_config
from odcengine.errors import ConfigError
from odcengine.preemption import Preempted, StopRequests, time_left_s

ROOT = Path(__file__).resolve().parents[2]

TRAIN = """
import os, sys, time
import torch
import odcengine

rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
engine, *_ = odcengine.initialize(model=model)
print("begins at", engine.global_steps, flush=True)
generator = torch.Generator().manual_seed(1)
while engine.global_steps < int(sys.argv[1]):
    # Ranks have different numbers of micro-batches.
    for micro_batch in range(1 + rank):
        loss = engine(torch.ones(2, 4) * (1 + engine.global_steps)).sum()
        if sys.argv[2] == str(rank) and engine.global_steps == 3 and micro_batch == 0:
            print("in the middle of step 3", os.getpid(), flush=True)
            while not os.path.exists("go on"):
                time.sleep(0.01)
        engine.backward(loss, count=2)
    engine.step()
print("done at", engine.global_steps, flush=True)
"""


def job(folder: Path, steps: int, middle: str, **preemption: Any) -> Program:
    (folder / "train.py").write_text(TRAIN)
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "checkpoint": {"dir": "saved"},
        "preemption": {"signals": ["USR1", "TERM"], **preemption},
        "odc": {"timeout_s": 100},
        "launch": {"nproc_per_node": 3},
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = ["-m", "odc_launcher", "--oversubscribe", "--config", "config.json", "train.py", steps, middle]
    return Program(*words, folder=folder, together=True)


def end(job: Program) -> tuple[int, str]:
    """Its exit code, and all that it has told."""
    done = job.end(timeout_s=200)
    return done.returncode, done.stdout


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "saved").glob("step_*"))


def test_one_rank_is_asked_in_the_middle_of_a_step_and_the_next_run_goes_on(tmp_path: Path) -> None:
    process = job(tmp_path, 8, "1")
    found = process.read_until(r"\[rank 1\] in the middle of step 3 (\d+)\n")
    os.kill(int(found.group(1)), signal.SIGUSR1)
    (tmp_path / "go on").touch()
    code, output = end(process)
    assert code == 75, output
    assert "SIGUSR1: this step is finished and a checkpoint saved" in output
    assert "stopping after 4 steps: 1 of 3 ranks were asked to" in output
    assert "all ranks were asked to stop, and ended with 75" in output
    assert "Traceback" not in output
    assert saved(tmp_path) == ["step_4"]
    assert (tmp_path / "saved" / "latest").read_text().strip() == "step_4"
    _, output = end(job(tmp_path, 8, "-"))
    assert len(re.findall(r"begins at 4$", output, re.MULTILINE)) == 3, output
    assert len(re.findall(r"done at 8$", output, re.MULTILINE)) == 3, output


def test_the_launcher_passes_it_on_and_a_second_one_ends_the_job_at_once(tmp_path: Path) -> None:
    process = job(tmp_path, 1_000_000, "1")  # it stays in the middle of a step
    process.read_until(r"in the middle of step 3")
    process.signal(signal.SIGTERM)
    process.read_until(r"TERM: passed on to the ranks, which have 300 s to end")
    process.signal(signal.SIGTERM)
    code, output = end(process)
    assert code not in (0, 75), output
    assert "killing all ranks" in output


def test_time_limit(tmp_path: Path) -> None:
    process = job(tmp_path, 1_000_000, "-", max_time=1)
    code, output = end(process)
    assert code == 75, output
    assert "preemption.max_time of 1 s has passed" in output
    (only,) = saved(tmp_path)
    assert read_mark(tmp_path / "saved" / only).automatic  # checkpoint.keep_last removes it one day


def test_second_signal_has_its_usual_effect() -> None:
    script = (
        "import os, signal, time\n"
        "from odcengine.preemption import StopRequests\n"
        "requests = StopRequests(['USR1'], None, lambda error: print(repr(error), flush=True))\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "assert requests.reason == 'SIGUSR1' and requests.vote() == 1.0\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "time.sleep(10)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGUSR1, done.stderr
    assert "a second one ends it at once" in done.stderr
    assert done.stdout.startswith("SecondSignal('SIGUSR1 after SIGUSR1")


def test_handlers_of_the_script_stay() -> None:
    mine = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        requests = StopRequests(["USR1", "USR2"], None)
        assert requests.foreign == ["USR1"]
        assert signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL
        requests.close()
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, mine)


def test_clock() -> None:
    assert StopRequests([], 1000.0).vote() == 0.0
    requests = StopRequests([], 0.05)
    time.sleep(0.06)
    assert requests.vote() == 1.0


def test_a_restart_has_what_is_left_of_the_time() -> None:
    assert time_left_s(100.0, {}) == 100.0
    assert time_left_s(100.0, {"ODC_LAUNCH_ELAPSED_S": "30.5"}) == 69.5
    assert time_left_s(100.0, {"ODC_LAUNCH_ELAPSED_S": "300"}) == 0.0
    assert time_left_s(None, {"ODC_LAUNCH_ELAPSED_S": "300"}) is None
    with pytest.raises(ConfigError, match="ODC_LAUNCH_ELAPSED_S is 'soon'"):
        time_left_s(100.0, {"ODC_LAUNCH_ELAPSED_S": "soon"})


def test_it_is_an_exit() -> None:
    stopped = Preempted("SIGTERM", 7)
    assert (stopped.code, str(stopped)) == (75, "stopped after 7 steps: SIGTERM")


BASE = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(90, 90.0), ("00:01:30", 90.0), ("1-02:00:00", 93600.0), ("03:50:00", 13800.0), (None, None)],
)
def test_times(value: Any, seconds: float | None) -> None:
    config = load_config({**BASE, "checkpoint": {"dir": "x"}, "preemption": {"max_time": value}})
    assert config.preemption.max_time == seconds


@pytest.mark.parametrize("value", ["3 hours", "1:2", 0, -5, True, "00:00:00"])
def test_wrong_times(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"preemption\.max_time"):
        load_config({**BASE, "checkpoint": {"dir": "x"}, "preemption": {"max_time": value}})


def test_nothing_to_save_to() -> None:
    with pytest.raises(ConfigError, match=r"give its directory in checkpoint\.dir"):
        load_config({**BASE, "preemption": {"signals": ["USR1"]}})
