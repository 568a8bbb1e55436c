"""Signals of ``preemption`` that come before any rank can save: the job ends with 75, to be run again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch_helpers import Launcher, finish, once_told
from odc_launcher.failure import ErrorRecord, Outcome, RankEnd, asked_by, preempted
from odc_launcher.report import report
from odc_launcher.restart import why_not

CONFIG = "train_batch_size: 8\ncheckpoint: {dir: saved}\nlaunch: {log_dir: logs, nproc_per_node: 2}\n"
LOADING = """
open(f"part{rank}", "w").write(str(os.getpid()))
os.rename(f"part{rank}", f"ready{rank}")
time.sleep(600)
"""
SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1})


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_ranks_that_still_load_are_run_again(launcher: Launcher, name: str) -> None:
    launcher.write(LOADING)
    (launcher.folder / "c.yaml").write_text(CONFIG)
    process = launcher.start("--config", "c.yaml", "--max-restarts", "3", "script.py")
    launcher.wait_for("ready*", 2)
    process.send_signal(signal.Signals[f"SIG{name}"])
    code, _, err = finish(process)
    assert code == 75, err
    assert f"SIG{name} ended the job while it had no engine that could save" in err
    assert "restart" not in err
    assert "last lines" not in err


def test_one_rank_alone_is_signalled(launcher: Launcher) -> None:
    """As by `kill` on its node; the launcher has not been told."""
    launcher.write(LOADING)
    (launcher.folder / "c.yaml").write_text(CONFIG)
    process = launcher.start("--config", "c.yaml", "--grace-s", "0.1", "script.py")
    launcher.wait_for("ready*", 2)
    os.kill(int(launcher.wait_for("ready1")[0].read_text()), signal.SIGUSR1)
    code, _, err = finish(process)
    assert code == 75, err


def test_without_a_place_for_checkpoints_signals_have_their_usual_effect(launcher: Launcher) -> None:
    launcher.write(LOADING)
    (launcher.folder / "c.yaml").write_text(CONFIG.replace("checkpoint: {dir: saved}\n", ""))
    process = launcher.start("--config", "c.yaml", "script.py")
    launcher.wait_for("ready*", 2)
    process.send_signal(signal.SIGUSR1)
    assert finish(process)[0] == 128 + signal.SIGUSR1


def test_before_the_ranks_start(launcher: Launcher) -> None:
    """The launcher has said what it starts, and waits for somebody who reads its log: a named pipe."""
    launcher.write("open('started', 'w')")
    (launcher.folder / "c.yaml").write_text(CONFIG.replace("2}", "1}"))
    launcher.logs.mkdir()
    os.mkfifo(launcher.logs / "rank0.log")
    process = launcher.start("--config", "c.yaml", "script.py")
    assert process.stderr is not None
    while b"odc-launch: 1 rank on" not in (line := process.stderr.readline()):
        assert line
    process.send_signal(signal.SIGUSR1)
    reader = os.open(launcher.logs / "rank0.log", os.O_RDONLY | os.O_NONBLOCK)
    code, _, err = finish(process)
    os.close(reader)
    assert code == 75, err
    assert "SIGUSR1 came before the ranks were started" in err
    assert not (launcher.folder / "started").exists()


@pytest.mark.parametrize(
    ("actions", "code"),
    [
        ("send(USR1); early.keep([USR1]); sys.exit(0 if early.came == USR1 else 1)", 0),
        ("early.keep([XCPU]); send(XCPU); sys.exit(0 if early.came == XCPU else 1)", 0),
        ("send(TERM); early.keep([USR1]); sys.exit(1)", -signal.SIGTERM),  # it does not count after all
        ("early.keep([USR1]); send(TERM); sys.exit(1)", -signal.SIGTERM),
        ("send(USR1); send(USR1); sys.exit(1)", -signal.SIGUSR1),
        ("send(USR1); early.keep([USR1, TERM]); send(TERM); sys.exit(1)", -signal.SIGTERM),
        ("early.__exit__(None, None, None); send(USR1); sys.exit(1)", -signal.SIGUSR1),
    ],
)
def test_what_is_remembered(launcher: Launcher, actions: str, code: int) -> None:
    script = (
        "import os, sys\n"
        "from signal import SIGTERM as TERM, SIGUSR1 as USR1, SIGXCPU as XCPU\n"
        "from odc_launcher.early import EarlySignals\n"
        "send = lambda number: os.kill(os.getpid(), number)\n"
        f"with EarlySignals() as early:\n    {actions}\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=launcher.env, timeout=100)
    assert done.returncode == code


def test_before_mpirun_starts(launcher: Launcher) -> None:
    """With a program in mpirun's place that takes its time to say which it is."""
    launcher.write("")
    (launcher.folder / "c.yaml").write_text(CONFIG)
    for name in ("asked", "told"):
        os.mkfifo(launcher.folder / name)
    mpirun = launcher.folder / "mpirun"
    mpirun.write_text("#!/bin/sh\n[ $1 = --version ] || exit 9\necho > asked\ncat < told\necho Open MPI\n")
    mpirun.chmod(0o755)
    launcher.env["PATH"] = f"{launcher.folder}{os.pathsep}{launcher.env['PATH']}"
    process = launcher.start("--launcher", "mpi", "--config", "c.yaml", "script.py")
    (launcher.folder / "asked").read_text()
    process.send_signal(signal.SIGUSR1)
    (launcher.folder / "told").write_text("")
    code, _, err = finish(process)
    assert code == 75, err
    assert "SIGUSR1 came before the ranks were started" in err


MPIRUN = """\
#!{python}
import os, signal, sys, time
sys.path[:0] = {path!r}
if sys.argv[1:] == ["--version"]:
    sys.exit(print("mpirun (Open MPI) 4.1"))
from odc_launcher.failure import RankEnd, write_end
def ended(number, frame):
    with open("got", "w") as file:
        file.write(f"{{signal.Signals(number).name}} {{os.path.exists('logs/step')}}")
    if number == signal.SIGINT:  # as Open MPI does: the ranks get TERM, and tell
        for rank in range(2):
            log = f"logs/rank{{rank}}.log"
            end = RankEnd(rank, "n1", -signal.SIGTERM, time.time(), log, asked_by="SIGTERM")
            write_end(end, f"logs/rank{{rank}}.error.json")
    os._exit(138 if number == signal.SIGUSR1 else 143)
for number in (signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, ended)
open("running", "w")
time.sleep(600)
"""


@pytest.mark.parametrize(("name", "code"), [("USR1", 75), ("INT", 143)])
def test_signals_through_mpirun(launcher: Launcher, name: str, code: int) -> None:
    """USR1 reaches nobody while no task is there; INT reaches ranks as TERM, which asks for nothing."""
    launcher.write("")
    (launcher.folder / "c.yaml").write_text(CONFIG)
    mpirun = launcher.folder / "mpirun"
    path = launcher.env["PYTHONPATH"].split(os.pathsep)
    mpirun.write_text(MPIRUN.format(python=sys.executable, path=path))
    mpirun.chmod(0o755)
    launcher.env["PATH"] = f"{launcher.folder}{os.pathsep}{launcher.env['PATH']}"
    process = launcher.start("--launcher", "mpi", "--config", "c.yaml", "script.py")
    launcher.wait_for("running")
    process.send_signal(signal.Signals[f"SIG{name}"])
    assert process.stderr is not None
    while b"passed on" not in (line := process.stderr.readline()):
        assert line
    if name == "USR1":
        (launcher.logs / "part").touch()
        (launcher.logs / "part").rename(launcher.logs / "step")  # rank 0's task tells that it runs
    found, _, err = finish(process)
    assert found == code, err
    assert (launcher.folder / "got").read_text() == f"SIG{name} {name == 'USR1'}"


def test_ranks_that_fail_after_a_signal_go_on_in_a_new_run(launcher: Launcher) -> None:
    """Started again here they would train until the allocation ends, without a checkpoint."""
    source = once_told("USR1", "sys.exit(3)")
    launcher.write(source)
    (launcher.folder / "c.yaml").write_text(CONFIG)
    process = launcher.start("--config", "c.yaml", "--max-restarts", "3", "script.py")
    launcher.wait_for("ready*", 2)
    process.send_signal(signal.SIGUSR1)
    code, _, err = finish(process)
    assert code == 75, err
    assert "exit code 3" in err
    assert "not started again: SIGUSR1 came" in err


def test_a_second_signal_asks_for_no_other_run(launcher: Launcher) -> None:
    source = once_told("TERM", 'open(f"told{rank}", "w")', "time.sleep(600)")
    launcher.write(source)
    (launcher.folder / "c.yaml").write_text(CONFIG)
    process = launcher.start("--config", "c.yaml", "--max-restarts", "3", "script.py")
    launcher.wait_for("ready*", 2)
    process.terminate()
    launcher.wait_for("told*", 2)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 137, err
    assert "not started again: the job was told to stop" in err


# -- which ends count ---------------------------------------------------------------------------------------


def end(rank: int, returncode: int, time: float = 1.0, **more: object) -> RankEnd:
    return RankEnd(rank, "n1", returncode, time, f"/none/rank{rank}.log", **more)  # type: ignore[arg-type]


def record(kind: str, *, secondary: bool = False) -> ErrorRecord:
    return ErrorRecord(kind, "", secondary, None, 3)


USR1, TERM = -signal.SIGUSR1, -signal.SIGTERM


@pytest.mark.parametrize(
    ("ends", "name"),
    [
        ([end(0, USR1), end(1, USR1)], "SIGUSR1"),
        ([end(0, TERM, stopped_by="SIGTERM"), end(1, TERM, stopped_by="SIGTERM")], "SIGTERM"),
        # One had its engine already, and leaves because of the other.
        ([end(0, 1, 0.5, record=record("PeerError", secondary=True)), end(1, USR1)], "SIGUSR1"),
        # The node of the other tells nothing: it may be lost, and SLURM ends with TERM what is left.
        ([end(0, TERM, stopped_by="SIGTERM")], None),
        ([end(0, USR1)], "SIGUSR1"),
        ([end(0, 1), end(1, TERM, 0.5, stopped_by="SIGTERM")], None),  # SLURM answers the failure so
        ([end(0, USR1, record=record("SecondSignal")), end(1, 1, 2.0)], None),
        ([end(0, TERM, ended_by_launcher=True), end(1, 0)], None),
        ([end(0, -signal.SIGKILL), end(1, USR1, 2.0)], None),
        ([end(0, -signal.SIGUSR2), end(1, -signal.SIGUSR2)], None),
        ([end(0, 75), end(1, 75)], None),
        ([end(0, 0), end(1, 0)], None),
    ],
)
def test_which_ends_are_preemption(ends: list[RankEnd], name: str | None) -> None:
    assert preempted(ends, 2, SIGNALS) == name
    lines = report(ends, preempted=name)
    assert ("had no engine that could save" in "".join(lines)) == (name is not None)


def test_term_that_the_whole_job_was_sent_counts_without_all_ends() -> None:
    assert preempted([end(0, TERM)], 2, SIGNALS, "SIGTERM") == "SIGTERM"
    assert preempted([end(0, TERM)], 2, SIGNALS, "SIGUSR1") is None


def test_what_ranks_were_asked() -> None:
    assert asked_by([end(0, 1), end(1, 1, asked_by="SIGUSR1")]) == "SIGUSR1"
    assert asked_by([end(0, 1, asked_by="SIGTERM"), end(1, 1)]) is None  # SLURM, after the failure


def test_a_second_signal_is_no_failure_to_start_again_from() -> None:
    ended = end(0, USR1, record=record("SecondSignal"))
    assert why_not(Outcome(138, ended, False), 0, 3) == "the job was told to stop"
    assert why_not(Outcome(143, end(0, TERM), True), 0, 3) == "the job was told to stop"
    assert why_not(Outcome(1, end(0, 1), True, asked_by="SIGTERM"), 0, 3) is None  # and run() ends with 75


def test_ends_carry_what_was_asked(tmp_path: Path) -> None:
    from odc_launcher.failure import read_ends, write_end

    write_end(end(1, USR1, asked_by="SIGUSR1"), str(tmp_path / "rank1.error.json"))
    (only,) = read_ends(str(tmp_path))
    assert (only.returncode, only.asked_by) == (USR1, "SIGUSR1")
