"""Ranks that failed are started again, on the nodes that are left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from odc_launcher import restart
from odc_launcher.failure import ErrorRecord, Outcome, RankEnd

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import os, pathlib, sys
rank, again = os.environ["RANK"], int(os.environ.get("ODC_RESTART_COUNT", "0"))
print("start", again, "of rank", rank, flush=True)
print("after", float(os.environ.get("ODC_LAUNCH_ELAPSED_S", "nan")) >= 0, flush=True)
if rank == "1" and again < int(sys.argv[1]):
    os.kill(os.getpid(), 9)
"""


def launch(folder: Path, *words: str, config: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    (folder / "c.yaml").write_text(
        "train_batch_size: 8\nlaunch: {log_dir: logs, nproc_per_node: 2}\n" + config
    )
    path = os.pathsep.join(str(ROOT / part) for part in ("", "launcher"))
    return subprocess.run(
        [sys.executable, "-m", "odc_launcher", "--config", "c.yaml", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_until_it_works(tmp_path: Path) -> None:
    done = launch(tmp_path, "--max-restarts", "3", "script.py", "2")
    assert done.returncode == 0, done.stderr
    assert "restart 2 of 3: the ranks go on from the newest checkpoint" in done.stderr
    assert "restart 3" not in done.stderr
    assert "start 2 of rank 1" in (tmp_path / "logs" / "restart-2" / "rank1.log").read_text()
    assert "after True" in (tmp_path / "logs" / "restart-2" / "rank1.log").read_text()
    assert "after False" in (tmp_path / "logs" / "rank1.log").read_text()
    assert "start 0 of rank 1" in (tmp_path / "logs" / "rank1.log").read_text()


def test_no_more_often_than_allowed(tmp_path: Path) -> None:
    done = launch(tmp_path, "--max-restarts", "1", "script.py", "9")
    assert done.returncode == 137, done.stderr
    assert "not started again: 1 restarts were allowed (launch.max_restarts)" in done.stderr


def test_not_unless_asked(tmp_path: Path) -> None:
    done = launch(tmp_path, "script.py", "9")
    assert done.returncode == 137, done.stderr
    assert "started again" not in done.stderr


def ended(code: int, kind: str | None = None, *, stopped: bool = False) -> Outcome:
    record = None if kind is None else ErrorRecord(kind, "", False, None, None)
    return Outcome(code, RankEnd(1, "n1", code, time.time(), "log", record), stopped)


@pytest.mark.parametrize(
    ("outcome", "done", "reason"),
    [
        (ended(0), 0, ""),
        (ended(75), 0, ""),
        (ended(137), 0, None),
        (ended(124, "DeadlineError"), 1, None),
        (ended(1, "OutOfMemoryError"), 1, None),
        (ended(137), 2, "2 restarts were allowed (launch.max_restarts)"),
        (ended(1, "ConfigError"), 0, "another start would meet the same ConfigError"),
        (ended(143, stopped=True), 0, "the job was told to stop"),
    ],
)
def test_when(outcome: Outcome, done: int, reason: str | None) -> None:
    assert restart.why_not(outcome, done, 2) == reason
    assert restart.why_not(outcome, done, 0) == ""


def test_nodes_that_are_left() -> None:
    environ = {
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_NNODES": "3",
        "SLURM_NTASKS": "10",
        "SLURM_TASKS_PER_NODE": "4(x2),2",
        "SLURM_GPUS": "10",
        "OTHER": "x",
    }
    hosts = ("n1", "n2", "n3")
    states = {"n1": "allocated", "n2": "down*", "n3": "mixed"}
    left, missing = restart.healthy_environ(environ, hosts, states)
    assert missing == ("n2",)
    assert left == {
        "SLURM_JOB_NODELIST": "n1,n3",
        "SLURM_NODELIST": "n1,n3",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "6",
        "SLURM_TASKS_PER_NODE": "4,2",
        "OTHER": "x",
    }
    for healthy in ({}, dict.fromkeys(hosts, "allocated"), dict.fromkeys(hosts, "down")):
        assert restart.healthy_environ(environ, hosts, healthy) == (environ, ())


@pytest.mark.parametrize("state", ["down", "DOWN*", "fail", "failing", "idle*", "unknown", "allocated*"])
def test_nodes_that_do_not_work(state: str) -> None:
    environ = {"SLURM_JOB_NODELIST": "n[1-2]"}
    _, missing = restart.healthy_environ(environ, ("n1", "n2"), {"n1": "mixed", "n2": state})
    assert missing == ("n2",)


def test_submitted_jobs_outlive_a_node(tmp_path: Path) -> None:
    words = ["--nodes", "2", "--dry-run", "script.py", "0"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{path}"
    try:
        shown = launch(tmp_path, "--max-restarts", "2", *words)
        plain = launch(tmp_path, *words, config="data: {path: gone}\n")
    finally:
        os.environ["PATH"] = path
    assert shown.returncode == 0, shown.stderr
    assert "#SBATCH --no-kill\n" in shown.stdout
    assert "--max-restarts=2" in shown.stdout
    assert "--no-kill" not in plain.stdout
    assert "odc-launch: warning: c.yaml:3: data.path: gone does not exist (looked for" in plain.stderr


def test_nodes_that_a_job_has_lost() -> None:
    shown = "JobId=7 ReqNodeList=(null) ExcNodeList=(null)\n NodeList=n[1,3] BatchHost=n1 NumNodes=2"
    assert restart.lost_nodes(("n1", "n2", "n3"), shown) == {"n2": "failed"}
    assert restart.lost_nodes(("n1", "n2"), "NodeList=(null)") == {}
    assert restart.lost_nodes(("n1", "n2"), "") == {}


def test_srun_of_a_restart_has_a_limit_of_its_own() -> None:
    assert restart.srun_args(("--mpi=none",), {}) == ("--immediate=300", "--mpi=none")  # the user's come last
    assert restart.srun_args((), {"SLURM_IMMEDIATE": "9"}) == ()
