"""Real ranks: output, failures, signals, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_helpers import Launcher, finish, once_told, running, wait_until

# A rank says that it is ready, and waits; every signal that it handles is written to its log. It ends outside
# of the handler: an exception from a handler is lost where it interrupts the closing of a file.
LISTEN = """
    got = []
    def heard(number, frame):
        print("heard", signal.Signals(number).name)
        got.append(number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, heard)
    open(f"ready{rank}", "w").write(str(os.getpid()))
    while not set(got) & set(ends):
        time.sleep(0.1)
"""
READY_AND_SLEEP = """
    open(f"ready{rank}", "w").write(str(os.getpid()))
    time.sleep(600)
"""


def pids(files: list[Path]) -> list[int]:
    wait_until(lambda: all(file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


# Output


def test_success_merges_output_and_keeps_logs(launcher: Launcher) -> None:
    code, out, err = finish(launcher.ranks(2, "print('out', rank); print('err', rank, file=sys.stderr)"))
    assert code == 0
    assert sorted(out.splitlines()) == [
        "[rank 0] err 0",
        "[rank 0] out 0",
        "[rank 1] err 1",
        "[rank 1] out 1",
    ]
    assert launcher.log(1) == b"out 1\nerr 1\n"
    assert err.startswith("odc-launch: 2 ranks on ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(("show", "expected"), [("rank0", "[rank 0] hi\n"), ("none", "")])
def test_show(launcher: Launcher, show: str, expected: str) -> None:
    assert finish(launcher.ranks(2, "print('hi')", "--show", show))[:2] == (0, expected)
    assert launcher.log(1) == b"hi\n"


def test_huge_output_is_whole_in_logs_and_line_by_line_on_screen(launcher: Launcher) -> None:
    source = """
        for n in range(40_000):
            print(rank, n, "x" * 200)
    """
    code, out, _ = finish(launcher.ranks(2, source))
    assert code == 0
    for rank in range(2):
        expected = [f"{rank} {n} {'x' * 200}" for n in range(40_000)]
        assert launcher.log(rank).decode().splitlines() == expected
        prefix = f"[rank {rank}] "
        shown = [line.removeprefix(prefix) for line in out.splitlines() if line.startswith(prefix)]
        assert shown == expected


def test_odd_output(launcher: Launcher) -> None:
    source = r"""
        raw = sys.stdout.buffer
        raw.write(b"bad \xff\xfe bytes\n")
        for step in range(0, 101):
            raw.write(b"\rstep %d%%" % step)
            raw.flush()
        raw.write(b"\n" + "gr\u00f6\u00dfe\n".encode())
        raw.write(b"z" * 100_000 + b"\n")
        raw.write(b"no line end")
    """
    code, out, _ = finish(launcher.ranks(1, source))
    assert code == 0
    log = launcher.log(0)
    assert log.startswith(b"bad \xff\xfe bytes\n\rstep 0%\rstep 1%\r")
    assert log.endswith(b"z\nno line end")
    lines = out.splitlines()
    assert all(line.startswith("[rank 0] ") for line in lines)
    assert lines[0] == "[rank 0] bad \ufffd\ufffd bytes"
    assert "[rank 0] step 100%" in lines
    assert sum("step" in line for line in lines) < 10
    assert "[rank 0] gr\u00f6\u00dfe" in lines
    assert out.count("z") == 100_000
    assert lines[-1] == "[rank 0] no line end"


def test_stdin_is_empty(launcher: Launcher) -> None:
    process = launcher.ranks(2, "print(repr(sys.stdin.read()))", stdin=subprocess.PIPE)
    wait_until(lambda: process.poll() is not None)  # although its own stdin is still open
    assert sorted(finish(process)[1].splitlines()) == ["[rank 0] ''", "[rank 1] ''"]


def test_full_disk_under_a_log_does_not_stop_the_rank(launcher: Launcher) -> None:
    launcher.logs.mkdir()
    (launcher.logs / "rank1.log").symlink_to("/dev/full")
    code, out, err = finish(launcher.ranks(2, "print('precious', rank)"))
    assert code == 0
    assert "[rank 1] precious 1" in out
    assert "rank1.log: No space left on device" in err
    assert "11 bytes of rank 1's output are missing" in err
    assert launcher.log(0) == b"precious 0\n"


def test_reader_that_leaves_does_not_stop_the_ranks(launcher: Launcher) -> None:
    source = """
        for n in range(20_000):
            print(n, "x" * 50)
        open(f"done{rank}", "w")
    """
    process = launcher.ranks(1, source)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert (launcher.folder / "done0").exists()
    assert process.stderr is not None
    assert b"cannot write to stdout: Broken pipe" in process.stderr.read()


def test_reader_that_does_not_read_does_not_keep_signals_away(launcher: Launcher) -> None:
    source = """
        open("ready0", "w")
        while True:
            print("x" * 1000)
    """
    process = launcher.ranks(1, source)
    launcher.wait_for("ready0")
    time.sleep(1)
    process.terminate()
    assert process.wait(timeout=100) == 143


def test_rank_that_closes_its_output(launcher: Launcher) -> None:
    source = """
        print("last words")
        os.close(1), os.close(2)
        time.sleep(0.5)
        os._exit(4)
    """
    code, out, err = finish(launcher.ranks(1, source))
    assert (code, out) == (4, "[rank 0] last words\n")
    assert "exit code 4" in err


def test_second_launch_appends_logs_and_forgets_old_errors(launcher: Launcher) -> None:
    launcher.logs.mkdir()
    (launcher.logs / "rank0.error.json").write_text(json.dumps({"type": "Old", "message": "old"}))
    (launcher.logs / "rank0.log").write_text("earlier\n")
    code, _, err = finish(launcher.ranks(1, "sys.exit('new')"))
    assert code == 1
    assert "Old" not in err
    first, heading, new = launcher.log(0).decode().splitlines()
    assert (first, new) == ("earlier", "new")
    assert re.fullmatch(
        rf"==== [-\d]+ [:\d]+ [-+\d]+: odc-launch, 1 ranks, {os.uname().nodename} ====", heading
    )
    assert "====" not in err
    assert "odc-launch:     new\n" in err
    assert "earlier" not in err


# Failures


def test_first_failing_rank_is_named_with_cause_and_tail(launcher: Launcher) -> None:
    source = """
        import json
        if rank == 1:
            for n in range(50):
                print("line", n)
            with open(os.environ["ODC_ERROR_FILE"], "w") as file:
                json.dump({"type": "ValueError", "message": "loss is nan", "step": 7}, file)
            sys.exit(3)
        time.sleep(1)
    """
    code, _, err = finish(launcher.ranks(2, source))
    assert code == 3
    assert f"rank 1 on {os.uname().nodename} failed first: exit code 3" in err
    assert "cause: ValueError: loss is nan (step 7)" in err
    assert "line 49" in err
    assert "line 29" not in err
    assert str(launcher.logs / "rank1.log") in err
    assert "SIGTERM" not in err


def test_rank_that_only_follows_is_not_blamed(launcher: Launcher) -> None:
    source = """
        import json
        if rank == 1:
            time.sleep(0.7)
            os.kill(os.getpid(), signal.SIGSEGV)
        with open(os.environ["ODC_ERROR_FILE"], "w") as file:
            json.dump({"type": "PeerError", "message": "rank 1 is gone", "secondary": True}, file)
        sys.exit(5)
    """
    code, _, err = finish(launcher.ranks(2, source))
    assert code == 128 + signal.SIGSEGV
    assert "rank 1 on" in err
    assert "failed first: SIGSEGV" in err
    assert "ended because of it: rank 0\n" in err


def test_rank_that_the_others_gave_up_is_ended_at_once_and_named_with_its_stack(launcher: Launcher) -> None:
    """The grace time is for those that can end by themselves."""
    source = """
        import json
        if rank == 1:
            signal.signal(signal.SIGTERM, lambda *_: open("told", "w"))  # as where it asks for a checkpoint
            open("ready", "w")
            while True:
                time.sleep(0.1)
        while not os.path.exists("ready"):
            time.sleep(0.05)
        if rank == 2:  # it ends by itself after all, and is waited for
            record = {"type": "PeerError", "message": "rank 1 hangs", "secondary": True, "culprit": 1}
            while not os.path.exists("told"):
                time.sleep(0.05)
        else:
            with open("logs/stack-rank1.txt", "w") as file:
                file.write('Current thread 0x7 (most recent call first):\\n  File "x.py", line 3 in loop\\n')
            record = {"type": "DeadlineError", "message": "no sign of life", "culprit": 1}
        with open(os.environ["ODC_ERROR_FILE"], "w") as file:
            json.dump(record, file)
        sys.exit(124 if rank == 0 else 1)
    """
    code, _, err = finish(launcher.ranks(3, source, "--grace-s", "3600", "--oversubscribe"))
    assert code == 124
    assert "rank 1 hangs, as rank 0 tells; the ranks that still run (2) get 3600 s" in err
    assert "SIGTERM to rank 1, which the others have given up" in err
    assert "SIGKILL to rank 1\n" in err
    assert f"rank 1 on {os.uname().nodename} hangs; rank 0 on" in err
    assert 'File "x.py", line 3 in loop\n' in err
    assert "ended because of it: ranks 0, 2\n" in err


def test_others_may_end_by_themselves(launcher: Launcher) -> None:
    source = """
        if rank == 1:
            while not os.path.exists("ready0"):
                time.sleep(0.05)
            sys.exit(9)
        open("ready0", "w")
        while not os.path.exists("told"):
            time.sleep(0.05)
        print("saved")
    """
    process = launcher.ranks(2, source, "--grace-s", "60")
    assert process.stderr is not None
    lines = [next(process.stderr)]
    while b"still run" not in lines[-1]:
        lines.append(next(process.stderr))
    (launcher.folder / "told").touch()
    code, out, _ = finish(process)
    assert code == 9
    assert "[rank 0] saved" in out
    assert b"rank 1 failed (exit code 9); the ranks that still run (1) get 60 s" in lines[-1]


def test_after_the_grace_time_groups_are_terminated_then_killed(launcher: Launcher) -> None:
    source = """
        if rank == 1:
            while not os.path.exists("ready0") or not os.path.exists("child0"):
                time.sleep(0.05)
            open("end1", "w").write(str(time.monotonic()))
            sys.exit(6)
        signal.signal(signal.SIGTERM, lambda *_: print("not now"))
        child = subprocess.Popen(["sh", "-c", "trap '' TERM; echo $$ > child0; sleep 600; sleep 600"])
        open("ready0", "w").write(str(os.getpid()))
        while True:
            time.sleep(0.1)
    """
    process = launcher.ranks(2, source, "--grace-s", "0.3")
    left = pids(launcher.wait_for("ready0") + launcher.wait_for("child0"))
    code, out, err = finish(process)
    end = float((launcher.folder / "end1").read_text())  # one clock for all processes
    assert 5 <= time.monotonic() - end < 100  # a slow machine takes long to end processes
    assert code == 6
    assert "[rank 0] not now" in out
    assert "SIGTERM to rank 0" in err
    assert "SIGKILL to rank 0" in err
    assert "ended because of it: rank 0 (SIGKILL by odc-launch)" in err
    assert not any(map(running, left))


def test_killed_rank_leaves_no_process(launcher: Launcher) -> None:
    source = """
        child = subprocess.Popen(["sleep", "600"])
        open(f"child{rank}", "w").write(str(child.pid))
        open(f"ready{rank}", "w").write(str(os.getpid()))
        time.sleep(600)
    """
    process = launcher.ranks(2, source, "--grace-s", "0.5")
    children = pids(launcher.wait_for("child*", 2))
    ranks = pids(launcher.wait_for("ready*", 2))
    os.kill(ranks[1], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 137
    assert "rank 1 on" in err
    assert "failed first: SIGKILL" in err
    assert "memory runs out" in err
    assert not any(map(running, ranks + children))


def test_helpers_that_outlive_their_rank_are_ended(launcher: Launcher) -> None:
    source = """
        child = subprocess.Popen(["sleep", "600"])
        open("child0", "w").write(str(child.pid))
        print("done")
    """
    code, out, err = finish(launcher.ranks(1, source))  # the child sleeps for 600 s
    (child,) = pids([launcher.folder / "child0"])
    assert (code, out) == (0, "[rank 0] done\n")
    assert f"left processes behind, which are ended now: {child}" in err
    assert not running(child)


def test_process_that_left_the_group_keeps_the_pipe_but_not_the_launcher(launcher: Launcher) -> None:
    source = """
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        open("child0", "w").write(str(child.pid))
        print("done")
    """
    code, out, _ = finish(launcher.ranks(1, source))
    (child,) = pids([launcher.folder / "child0"])
    assert running(child)
    os.kill(child, signal.SIGKILL)
    assert (code, out) == (0, "[rank 0] done\n")


def test_killed_launcher_takes_its_ranks_along(launcher: Launcher) -> None:
    process = launcher.ranks(2, READY_AND_SLEEP)
    ranks = pids(launcher.wait_for("ready*", 2))
    process.kill()
    wait_until(lambda: not any(map(running, ranks)))


def test_rank_that_cannot_be_started_ends_those_already_started(launcher: Launcher) -> None:
    launcher.write(READY_AND_SLEEP)
    patched = """
import errno, os, subprocess, sys, time
from odc_launcher import cli

class Popen(subprocess.Popen):
    def __init__(self, argv, env=None, **more):
        if env is not None and env.get("RANK") == "1":
            while not os.path.exists("ready0"):
                time.sleep(0.05)
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        super().__init__(argv, env=env, **more)

subprocess.Popen = Popen
sys.exit(cli.main(["--nproc-per-node", "2", "script.py"]))
"""
    command = [sys.executable, "-c", patched]
    done = subprocess.run(command, env=launcher.env, cwd=launcher.folder, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert b"rank 1 cannot be started: [Errno 11] Resource temporarily unavailable" in done.stderr
    assert not any(map(running, pids([launcher.folder / "ready0"])))


# Signals


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "USR1", "USR2"])
def test_signals_reach_every_rank_once(launcher: Launcher, name: str) -> None:
    number = signal.Signals["SIG" + name]
    process = launcher.ranks(2, f"\nends = [{int(number)}]\n" + LISTEN.replace("\n    ", "\n"))
    launcher.wait_for("ready*", 2)
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == 0, err
    assert launcher.log(0) == launcher.log(1) == f"heard SIG{name}\n".encode()
    assert f"SIG{name}: passed on" in err


def test_several_signals_while_training_goes_on(launcher: Launcher) -> None:
    process = launcher.ranks(2, f"\nends = [{int(signal.SIGTERM)}]\n" + LISTEN.replace("\n    ", "\n"))
    launcher.wait_for("ready*", 2)
    for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR1):
        process.send_signal(number)
        last = f"heard {number.name}\n".encode()
        wait_until(lambda last=last: launcher.log(0).endswith(last) and launcher.log(1).endswith(last))  # type: ignore[misc]
    process.terminate()
    assert finish(process)[0] == 0
    assert launcher.log(1).split()[1::2] == [b"SIGUSR1", b"SIGHUP", b"SIGUSR1", b"SIGTERM"]


def test_signals_that_kill(launcher: Launcher) -> None:
    process = launcher.ranks(2, READY_AND_SLEEP)
    launcher.wait_for("ready*", 2)
    process.terminate()
    code, _, err = finish(process)
    assert code == 143
    assert "failed first after SIGTERM was passed on: SIGTERM" in err
    assert "last lines" not in err


def test_rank_that_fails_after_a_signal_gives_its_code(launcher: Launcher) -> None:
    source = once_told("TERM", 'sys.exit("no space for the checkpoint" if rank else 0)')
    process = launcher.ranks(2, source)
    launcher.wait_for("ready*", 2)
    process.terminate()
    code, _, err = finish(process)
    assert code == 1
    assert "rank 1 on" in err
    assert "no space for the checkpoint" in err


@pytest.mark.parametrize(("first", "second"), [("SIGINT", "SIGINT"), ("SIGTERM", "SIGINT")])
def test_second_signal_kills_at_once(launcher: Launcher, first: str, second: str) -> None:
    process = launcher.ranks(2, "\nends = []\n" + LISTEN.replace("\n    ", "\n"))
    ranks = pids(launcher.wait_for("ready*", 2))
    process.send_signal(signal.Signals[first])
    wait_until(lambda: b"heard" in launcher.log(0) and b"heard" in launcher.log(1))
    start = time.monotonic()
    process.send_signal(signal.Signals[second])
    code, _, err = finish(process)
    assert time.monotonic() - start < 25  # the grace is 30 s
    assert code == 137
    assert f"{second} after {first}: killing all ranks" in err
    assert not any(map(running, ranks))


def test_ranks_that_ignore_term_are_killed_after_the_grace_time(launcher: Launcher) -> None:
    process = launcher.ranks(1, "\nends = []\n" + LISTEN.replace("\n    ", "\n"), "--grace-s", "1")
    launcher.wait_for("ready0")
    start = time.monotonic()
    process.terminate()
    assert finish(process)[0] == 137
    assert 1 <= time.monotonic() - start < 25  # the usual grace is 30 s
    assert b"heard SIGTERM\n".startswith(launcher.log(0))  # once, unless it was killed before it came to that


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_stopped_rank_acts_on_a_passed_on_signal(launcher: Launcher, name: str) -> None:
    process = launcher.ranks(1, f"\nends = [{int(signal.Signals[name])}]\n" + LISTEN.replace("\n    ", "\n"))
    (rank,) = pids(launcher.wait_for("ready0"))
    os.kill(rank, signal.SIGSTOP)
    process.send_signal(signal.Signals[name])
    start = time.monotonic()
    code, _, err = finish(process)
    assert time.monotonic() - start < 25  # the grace is 30 s
    assert code == 0, err
    assert launcher.log(0) == f"heard {name}\n".encode()


def test_stopped_rank_ends_with_term_after_another_failed(launcher: Launcher) -> None:
    source = """
        open(f"ready{rank}", "w").write(str(os.getpid()))
        time.sleep(600)
    """
    process = launcher.ranks(2, source, "--grace-s", "0.3")
    stopped, failing = pids(launcher.wait_for("ready*", 2))
    os.kill(stopped, signal.SIGSTOP)
    os.kill(failing, signal.SIGUSR1)
    start = time.monotonic()
    code, _, err = finish(process)
    assert time.monotonic() - start < 25
    assert code == 128 + signal.SIGUSR1
    assert "ended because of it: rank 0 (SIGTERM by odc-launch)" in err
    assert "SIGKILL" not in err


def test_passed_on_signals_spare_the_ranks_helpers(launcher: Launcher) -> None:
    source = """
        got = []
        signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
        child = subprocess.Popen(["sleep", "600"])
        open("ready0", "w")
        while not got:
            time.sleep(0.1)
        time.sleep(0.2)
        print("child", child.poll())
        child.kill()
    """
    process = launcher.ranks(1, source)
    launcher.wait_for("ready0")
    process.send_signal(signal.SIGUSR1)
    assert finish(process)[:2] == (0, "[rank 0] child None\n")


def test_nohup_is_respected(launcher: Launcher) -> None:
    def ignore_hup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    source = """
        print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)
        open("ready0", "w")
        time.sleep(1)
    """
    process = launcher.ranks(1, source, preexec_fn=ignore_hup)
    launcher.wait_for("ready0")
    process.send_signal(signal.SIGHUP)
    assert finish(process)[:2] == (0, "[rank 0] True\n")


def test_ranks_start_with_default_signal_handling(launcher: Launcher) -> None:
    source = """
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)]
        print(blocked, handlers == [signal.SIG_DFL] * 3, os.getpgid(0) == os.getpid() == os.getsid(0))
    """
    assert finish(launcher.ranks(1, source))[1] == "[rank 0] set() True True\n"


def test_descriptor_of_mpis_launcher_reaches_the_rank(launcher: Launcher) -> None:
    """MPICH's mpiexec and SLURM's PMI-2 talk to MPI over one that they have opened."""
    read_end, write_end = os.pipe()
    launcher.env["PMI_FD"] = str(write_end)
    process = launcher.ranks(1, "os.write(int(os.environ['PMI_FD']), b'cmd=init')", pass_fds=(write_end,))
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert finish(process)[0] == 0
        assert pipe.read() == b"cmd=init"
