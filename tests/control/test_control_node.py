"""The control block inside a node: signs of life, blame, abort, records, locks, and who may join."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
from distributed import RankResult, run_ranks, values
from transport.conformance import MARGIN_S, Report, end_stopped, report_of, state, survivors

from odcengine._memory import share_descriptors
from odcengine._slots import _SLOT_LOCK
from odcengine._words import Word
from odcengine.control import ControlBlock, Meeting, Phase
from odcengine.errors import DeadlineError, OdcError, PeerError, UsageError
from odcengine.topology import Topology


def block(rank: int, world: int, token: str, **options: Any) -> ControlBlock:
    """A control block of one node."""
    topology = Topology(rank, ("testhost",) * world, ("machine",) * world, (tuple(range(world)),))
    settings = {"timeout_s": 60.0, "startup_timeout_s": 60.0, **options}
    return ControlBlock(topology, token=token, **settings)


def launch(function: Callable[..., Any], world: int, *args: Any, **options: Any) -> list[RankResult]:
    return run_ranks(function, world, secrets.token_hex(8), *args, **options)


# -- blame -------------------------------------------------------------------------------------------------


def _chain(rank: int, world: int, token: str) -> Report:
    """Rank 0 waits for 1, which waits for 2, ..., and the last one is stopped."""
    control = block(rank, world, token, timeout_s=1.5)
    control.barrier(Meeting.ALLOCATE)
    control.enter(Phase.BACKWARD, step=5, micro_batch=2)
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)
    time.sleep(0.1 * rank)  # the rank at the far end is the first to reach its limit
    return report_of(lambda: control.wait_epoch(rank + 1, 0), control=control)


def test_victims_are_not_blamed() -> None:
    reports = values(launch(_chain, 4, during=end_stopped)[:3])
    for report in reports:
        assert report.culprit == 3, report
        assert "rank 3 (host testhost, pid " in report.message, report
        assert "step 5, micro-batch 2, backward" in report.message, report
        assert report.seconds < 1.5 + 0.5 + MARGIN_S, report
    assert any(report.error_type == "DeadlineError" for report in reports)


def _circle(rank: int, world: int, token: str) -> Report:
    control = block(rank, world, token, timeout_s=1.0)
    control.barrier(Meeting.ALLOCATE)
    return report_of(lambda: control.wait_epoch((rank + 1) % world, 0), control=control)


def test_circle_of_waiting_ranks_ends() -> None:
    """Each waits for the next and passes its sign of life on: that must not keep the circle alive."""
    reports = values(launch(_circle, 3))
    assert any(report.error_type == "DeadlineError" for report in reports)
    for report in reports:
        assert 0.9 < report.seconds < 1.0 + 0.5 + MARGIN_S, report
        assert "parameters of epoch 0 of rank" in report.message, report


class _Hanging:
    """A collective that never ends."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> bool:
        return True


def _stopped_while_waiting(rank: int, world: int, token: str) -> Report:
    control = block(rank, world, token, timeout_s=1.5)
    control.barrier(Meeting.ALLOCATE)
    if rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    if rank == 2:
        time.sleep(0.8)
    control.barrier(Meeting.END_OF_STEP)  # rank 1 has entered it, and will never leave it
    return report_of(lambda: control.wait_work(_Hanging(), "a collective"), control=control)


def test_rank_that_is_stopped_while_it_waits_is_blamed() -> None:
    """It looks like a victim, but for that it does not look around any more."""
    results = launch(_stopped_while_waiting, 3, during=end_stopped)
    for report in survivors(results):
        assert report.culprit == 1, report
        blamed = report.message.partition(" waited in ")[0].rpartition(". ")[0]
        assert "from rank 1 (host testhost, pid " in blamed, report
        assert "rank 0 (" not in blamed, report
        assert "rank 2 (" not in blamed, report


def _held_up(rank: int, world: int, token: str) -> Report:
    control = block(rank, world, token)
    control.barrier(Meeting.ALLOCATE)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 0:  # waits for rank 1, and gets no time from some moment on
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        control.wait_epoch(1, 0)
    while any(state(int(control._words[other, Word.PID])) != "T" for other in (0, 1)):
        time.sleep(0.01)
    control.timeout_s = 1.5
    return report_of(lambda: control.wait_epoch(0, 0))


def test_victim_that_gets_no_time_to_look_is_not_blamed() -> None:
    (report,) = values(launch(_held_up, 3, during=end_stopped)[2:])
    assert report.culprit == 1, report
    blamed = report.message.partition(" waited in ")[0].rpartition(". ")[0]
    assert "from rank 1 (host testhost, pid " in blamed, report
    assert "rank 0 (" not in blamed, report


def _gives_up(rank: int, world: int, token: str) -> tuple[str, bool]:
    control = block(rank, world, token)
    control.barrier(Meeting.ALLOCATE)
    told, waits = "", False
    if rank == 1:
        error = report_of(lambda: control.wait_until(lambda: False, "rank 0", lambda: (0,), timeout_s=0.3))
        with mock.patch("odcengine._slots._STOPPED_S", 60.0):  # whenever this process gets to ask
            told, waits = error.error_type, control._slots.is_waiting(1)
    control.barrier(Meeting.END_OF_STEP)
    return told, waits


def test_rank_that_has_just_given_up_still_counts_as_waiting() -> None:
    """Else another one that gives up before it has heard of that would blame it."""
    assert values(launch(_gives_up, 2))[1] == ("DeadlineError", True)


class _Late:
    """A collective whose last bytes come when the rank that sent them has failed."""

    def __init__(self, control: ControlBlock, after_s: float) -> None:
        self.control, self.after_s, self.failed_at = control, after_s, 0.0

    def is_completed(self) -> bool:
        try:
            self.control.check()
        except PeerError:
            self.failed_at = self.failed_at or time.monotonic()
        return bool(self.failed_at) and time.monotonic() - self.failed_at > self.after_s

    def wait(self) -> bool:
        return True


def _last_bytes(rank: int, world: int, token: str) -> list[str]:
    control = block(rank, world, token)
    control.barrier(Meeting.ALLOCATE)
    if rank == 1:
        control.fail(UsageError("what the collective said is bad"))
        return []
    control.wait_work(_Late(control, 0.05), "news")
    return [report_of(lambda: control.wait_work(_Hanging(), "more news")).message]


def test_collective_that_arrives_after_a_failure_counts() -> None:
    """All ranks learn what it says, so that they refuse it alike; the next one does fail."""
    (told,), _ = values(launch(_last_bytes, 2))
    assert "what the collective said is bad" in told


class _Failing(_Hanging):
    """A collective that fails in the backend."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        raise RuntimeError("connection closed by peer")


def _work_errors(rank: int, world: int, token: str) -> list[Report]:
    control = block(rank, world, token)
    control.barrier(Meeting.ALLOCATE)
    if rank == 1:
        control.wait_epoch(0, 0)
        os.kill(os.getpid(), signal.SIGKILL)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise UsageError("the rank's own error")

    def interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        control.wait_work(_Hanging(), "a collective")

    signal.signal(signal.SIGALRM, interrupt)
    # Not taken for the backend's error, whose cause would be looked for.
    with mock.patch.object(control, "raise_cause", side_effect=AssertionError):
        own = report_of(interrupted)
    control.set_epoch(0)
    return [own, report_of(lambda: control.wait_work(_Failing(), "a collective"))]


def test_backend_error_is_traced_to_its_cause_and_own_errors_stay_own() -> None:
    own, foreign = values(launch(_work_errors, 2)[:1])[0]
    assert (own.error_type, own.message) == ("UsageError", "the rank's own error")
    assert (foreign.error_type, foreign.culprit) == ("PeerError", 1)
    assert "rank 1 (host testhost, pid " in foreign.message
    assert "died" in foreign.message


def _slow_chain(rank: int, world: int, token: str) -> float:
    control = block(rank, world, token, timeout_s=3.5)
    control.barrier(Meeting.ALLOCATE)
    if rank == world - 1:
        for micro_batch in range(25):  # for longer than the limit, with signs of life far closer than that
            time.sleep(0.2)
            control.enter(Phase.BACKWARD, micro_batch=micro_batch)
    else:
        control.wait_epoch(rank + 1, 0)
    control.set_epoch(0)
    seconds = control.barrier(Meeting.CLOSE)
    control.close()
    return seconds


def test_waiting_for_a_rank_that_waits_for_a_slow_one_is_no_failure() -> None:
    values(launch(_slow_chain, 4))


def _suspended(rank: int, world: int, token: str, folder: str) -> None:
    control = block(rank, world, token, timeout_s=3.0)
    control.barrier(Meeting.ALLOCATE)
    Path(folder, f"ready{rank}").touch()
    if rank == 0:  # works before, while and after the job is suspended; a sign of life now and then
        micro_batches_after = 0
        while micro_batches_after < 5:
            micro_batches_after += Path(folder, "suspended").exists()
            time.sleep(0.1)
            control.enter(Phase.BACKWARD)
    control.barrier(Meeting.CLOSE)
    control.close()


def test_suspended_job_goes_on(tmp_path: Path) -> None:
    """A scheduler, or Ctrl-Z, stops all ranks for longer than the limit: that is nobody's failure."""

    def suspend(pids: list[int]) -> None:
        while len(list(tmp_path.glob("ready*"))) < 3:
            time.sleep(0.01)
        time.sleep(0.3)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        (tmp_path / "suspended").touch()
        time.sleep(4.0)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)

    values(launch(_suspended, 3, str(tmp_path), during=suspend))


# -- abort -------------------------------------------------------------------------------------------------


def _abort(rank: int, world: int, token: str, folder: str) -> Report | None:
    control = block(rank, world, token, error_file=f"{folder}/error{rank}.json")
    control.barrier(Meeting.ALLOCATE)
    control.enter(Phase.FORWARD, step=3, micro_batch=1)
    if rank == 1:
        time.sleep(0.2)
        with control.phase(Phase.BACKWARD):
            raise KeyError("weight \u00e9")  # no ASCII
    if rank == 2:  # fails because of rank 1, and says so before rank 0 looks
        report = report_of(lambda: control.barrier(Meeting.END_OF_STEP, 3), control=control)
        Path(folder, "second").touch()
        return report
    control.record_end(RuntimeError("a signal"))  # for the launcher alone: nobody else hears of it
    assert json.loads(Path(folder, f"error{rank}.json").read_text())["message"] == "a signal"
    assert not control.failed
    deadline = time.monotonic() + 60
    while not Path(folder, "second").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    report = report_of(control.check, control=control)
    control.record_end(RuntimeError("too late"))  # the failure was first
    again = report_of(control.check)
    assert again.culprit == 1, again
    return report


def test_first_failure_is_reported_not_those_it_causes(tmp_path: Path) -> None:
    start = time.time()
    results = launch(_abort, 3, str(tmp_path))
    assert results[1].error_type == "KeyError"
    for report in values([results[0], results[2]]):
        assert report.error_type == "PeerError"
        assert report.culprit == 1
        assert "rank 1 (host testhost, pid " in report.message
        assert "step 3, micro-batch 1, backward: KeyError: 'weight \u00e9'" in report.message
    for rank in range(3):
        record = json.loads((tmp_path / f"error{rank}.json").read_text(encoding="utf-8"))
        assert sorted(record) == sorted(
            ("rank", "host", "pid", "time", "type", "message", "secondary", "culprit", "step", "traceback")
        )
        assert record["culprit"] == 1
        assert (record["rank"], record["host"], record["step"]) == (rank, "testhost", 3)
        assert record["secondary"] is (rank != 1)
        assert record["type"] == ("KeyError" if rank == 1 else "PeerError")
        assert start - 1 < record["time"] < time.time() + 1
        assert isinstance(record["pid"], int)
        assert record["traceback"].startswith("Traceback (most recent call last)")
        assert ("_abort" in record["traceback"]) or rank != 1
    assert not list(tmp_path.glob("error*.json.*"))  # written whole, then renamed


def _lock_left(rank: int, world: int, token: str) -> Report | float:
    control = block(rank, world, token)
    control.barrier(Meeting.ALLOCATE)
    if rank == 1:
        return report_of(lambda: control.wait_epoch(0, 0))
    deadline = time.monotonic() + MARGIN_S
    slots = control._slots
    while not slots.locks.try_acquire(slots._offset(_SLOT_LOCK, 0)):  # as if Ctrl-C came right after it
        assert time.monotonic() < deadline  # rank 1 holds it for a moment at the end of the barrier
    start = time.monotonic()
    control.fail(KeyboardInterrupt())
    seconds = time.monotonic() - start
    time.sleep(1.5)
    return seconds


def test_failure_is_told_although_a_lock_was_left_behind() -> None:
    seconds, report = values(launch(_lock_left, 2))
    assert seconds < MARGIN_S
    assert "KeyboardInterrupt" in report.message
    assert report.culprit == 0
    assert report.seconds < 2 * MARGIN_S


def _long_message(rank: int, world: int, token: str) -> Report | None:
    control = block(rank, world, token)
    control.barrier(Meeting.ALLOCATE)
    if rank == 0:
        control.fail(ValueError("start " + "\u00fc" * 10_000))
        time.sleep(1.0)
        control.fail(ValueError("the first one counts"))
        return None
    return report_of(lambda: control.barrier(Meeting.END_OF_STEP))


def test_long_messages_are_cut() -> None:
    message = values(launch(_long_message, 2))[1].message
    assert "ValueError: start \u00fc\u00fc" in message
    assert 1000 < len(message.encode()) <= 4200


def _hooks(rank: int, world: int, token: str) -> list[str]:
    called: list[str] = []
    sys.excepthook = lambda kind, error, trace: called.append(f"before: {error}")
    first, second = block(rank, world, f"{token}a"), block(rank, world, f"{token}b")
    outermost = sys.excepthook
    first.install_excepthook()
    second.install_excepthook()
    for control in (first, second):
        control.barrier(Meeting.ALLOCATE)
    if rank == 1:
        error = ValueError("outside of the engine")
        sys.excepthook(type(error), error, None)
        called += [str(first.failed), str(second.failed)]
    else:
        for control in (first, second):
            report = report_of(lambda control=control: control.barrier(Meeting.END_OF_STEP))  # type: ignore[misc]
            assert "ValueError: outside of the engine" in report.message
            assert report.culprit == 1
    first.close()  # not the outermost: its hook stays in the chain and does nothing
    error = ValueError("later")
    sys.excepthook(type(error), error, None)
    second.close()
    sys.excepthook(type(error), error, None)
    assert outermost is not None
    return called


def test_excepthooks_of_two_blocks_are_chained() -> None:
    zero, one = values(launch(_hooks, 2))
    assert one == ["before: outside of the engine", "True", "True", "before: later", "before: later"]
    assert zero == ["before: later", "before: later"]


def _dropped_block(rank: int, world: int, token: str) -> None:
    import gc
    import weakref

    control = block(rank, world, token)
    control.install_excepthook()
    alive = weakref.ref(control)
    control.barrier(Meeting.CLOSE)
    control.close()
    del control
    gc.collect()
    assert alive() is None
    sys.excepthook(ValueError, ValueError("nobody listens"), None)


def test_hook_does_not_keep_a_block_alive() -> None:
    values(launch(_dropped_block, 2))


def _forked_child(rank: int, world: int, token: str, how: str) -> float:
    """A child that the user's script forks has the block's memory, but must not speak for the rank."""
    control = block(rank, world, token)
    control.install_excepthook()
    control.barrier(Meeting.ALLOCATE)
    if rank == 0:
        child = os.fork()
        if child == 0:
            error = ValueError("in the child")
            if how == "raise":
                sys.excepthook(type(error), error, None)
            elif how == "phase":
                with contextlib.suppress(ValueError), control.phase(Phase.BACKWARD):
                    raise error
            elif how == "close":
                control.close()
            os._exit(0)
        os.waitpid(child, 0)
    seconds = control.barrier(Meeting.END_OF_STEP)
    control.barrier(Meeting.CLOSE)
    control.close()
    return seconds


@pytest.mark.parametrize("how", ["raise", "phase", "close"])
def test_forked_child_does_not_speak_for_its_rank(how: str) -> None:
    values(launch(_forked_child, 2, how))


def _orphan(rank: int, world: int, token: str, folder: str) -> Report:
    control = block(rank, world, token)
    control.barrier(Meeting.ALLOCATE)
    if rank == 1:
        child = os.fork()
        if child == 0:
            Path(folder, "part").write_text(str(os.getpid()))
            Path(folder, "part").rename(Path(folder, "child"))
            time.sleep(100)
            os._exit(0)
        while not Path(folder, "child").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return report_of(lambda: control.barrier(Meeting.END_OF_STEP), control=control)


def test_death_is_noticed_although_a_forked_child_lives_on(tmp_path: Path) -> None:
    try:
        for report in survivors(launch(_orphan, 3, str(tmp_path))):
            assert report.error_type == "PeerError"
            assert report.culprit == 1
            assert report.seconds < MARGIN_S
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def _left(rank: int, world: int, token: str) -> Report | None:
    control = block(rank, world, token)
    control.barrier(Meeting.ALLOCATE)
    if rank == 1:
        control.close()  # without a meeting
        return None
    return report_of(lambda: control.wait_epoch(1, 0))


def test_waiting_for_a_rank_that_has_left_fails_at_once() -> None:
    report = values(launch(_left, 2))[0]
    assert report.culprit == 1, report
    assert report.seconds < MARGIN_S, report


# -- counts, epochs, barriers ------------------------------------------------------------------------------


def _counts(rank: int, world: int, token: str) -> str | None:
    control = block(rank, world, token)
    control.end_micro_batches(0, 2)  # equal in step 0
    control.barrier(Meeting.END_OF_STEP, 0)
    control.check_equal_counts(0, 2)
    control.barrier(Meeting.PUBLISH, 1)
    if rank == 1:
        control.end_micro_batches(1, 2)
        control.barrier(Meeting.PUBLISH, 2)
        return None
    control.check_equal_counts(1, 2)  # as many as rank 1 has
    control.barrier(Meeting.PUBLISH, 2)
    try:
        control.check_equal_counts(1, 3)
    except UsageError as error:
        return str(error)
    raise AssertionError


def test_unequal_counts_are_named() -> None:
    message = values(launch(_counts, 2))[0]
    assert message.startswith("rank 0 (host testhost, pid ")
    assert "has at least 3 micro-batches in step 1, rank 1 (host testhost, pid " in message
    assert " only 2. " in message


def _epoch_order(rank: int, world: int, token: str) -> list[tuple[int, float]]:
    control = block(rank, world, token)
    seen = []
    for epoch in range(3):
        if rank == 1:
            time.sleep(0.2)
            control.enter(Phase.PUBLISH, micro_batch=10 + epoch)
        control.set_epoch(epoch)
        control.wait_epoch(1, epoch)
        before_it = int(control._words[1, Word.MICRO_BATCH])  # what rank 1 said right before it published
        seen.append((before_it, control.wait_epoch(1, epoch - 1)))
        control.barrier(Meeting.END_OF_STEP, epoch)
    return seen


def test_wait_epoch_waits_for_that_epoch_only() -> None:
    """Epoch 0 as well: fresh memory is no published epoch."""
    assert values(launch(_epoch_order, 2))[0] == [(10, 0.0), (11, 0.0), (12, 0.0)]


def _program(rank: int, world: int, token: str) -> str:
    control = block(rank, world, token)
    for step in range(200):  # fast ranks are one barrier ahead, with tags of their own
        control.barrier(Meeting.END_OF_STEP, step)
        control.barrier(Meeting.PUBLISH, step)
    try:
        control.barrier(Meeting.END_OF_STEP, 200 + (rank == 2))
    except UsageError as error:
        return str(error)
    except PeerError as error:
        return str(error)
    raise AssertionError


def test_barriers_of_different_steps_are_told_apart() -> None:
    for message in values(launch(_program, 3)):
        assert "rank 2 (host testhost, pid" in message
        assert "is at the end of step 200" in message
        assert "is at the end of step 201" in message


# -- locks -------------------------------------------------------------------------------------------------


def _locks(rank: int, world: int, token: str) -> None:
    control = block(rank, world, token)
    number = 4
    control.barrier(Meeting.ALLOCATE)
    if rank == 0:
        assert control.try_lock(number)
        taken: list[bool] = []
        thread = threading.Thread(target=lambda: taken.append(control.try_lock(number)))
        thread.start()
        thread.join()
        assert taken == [False]  # another thread of the same process
        assert control.try_lock(number + 1)  # locks are independent
        control.unlock(number + 1)
    control.barrier(Meeting.PUBLISH)
    if rank == 1:
        assert not control.try_lock(number)
    control.barrier(Meeting.END_OF_STEP)
    if rank == 0:
        time.sleep(0.3)
        control.enter(Phase.BACKWARD, micro_batch=7)
        control.unlock(number)
    else:
        control.lock(number, "it")
        assert control._words[0, Word.MICRO_BATCH] == 7  # not before rank 0 has given it up
        control.unlock(number)
    control.barrier(Meeting.CLOSE)
    control.close()


def test_locks_exclude_processes_and_threads() -> None:
    values(launch(_locks, 2))


# -- joining -----------------------------------------------------------------------------------------------


def _joins(rank: int, world: int, token: str, who: tuple[int, ...], folder: str) -> str:
    message, control = "", None
    try:
        control = block(who[rank], max(who) + 1, token, startup_timeout_s=2.0)
    except OdcError as error:
        message = f"{type(error).__name__}: {error}"
    Path(folder, f"joined{rank}").touch()
    while len(list(Path(folder).glob("joined*"))) < world:  # the peers are to see a process that lives
        time.sleep(0.01)
    assert message or control is not None
    return message


def test_two_processes_as_one_local_rank_are_refused(tmp_path: Path) -> None:
    """The second of them finds the place taken, or comes too late for the exchange."""
    messages = values(launch(_joins, 4, (0, 1, 1, 2), str(tmp_path)))
    refused = ("two processes run as the same local rank", "the first local rank did not offer it")
    assert any(text in message for text in refused for message in messages[1:3]), messages


def test_two_processes_as_first_local_rank_are_refused(tmp_path: Path) -> None:
    messages = values(launch(_joins, 3, (0, 0, 1), str(tmp_path)))
    refused = ("two processes of this host run as local rank 0", "local ranks [1] did not come for it")
    assert any(text in message for text in refused for message in messages[:2]), messages


def _stranger(rank: int, world: int, token: str) -> str:
    try:
        block(rank, world, token if rank == 0 else "guess", startup_timeout_s=0.7)
    except DeadlineError as error:
        return str(error)
    raise AssertionError


def test_process_with_another_token_cannot_join() -> None:
    messages = values(launch(_stranger, 2))
    assert "local ranks [1] did not come for it within 0.7 s" in messages[0]
    assert "the first local rank did not offer it within 0.7 s" in messages[1]


def _stale_connections(rank: int, world: int, token: str) -> None:
    if rank == 0:
        control = block(rank, world, token)
    else:
        name = hashlib.sha256(f"{token}-0-1".encode()).hexdigest()[:32]
        address = f"\0odc-{name}"
        deadline = time.monotonic() + 60
        for how in ("silent", "closes", "nonsense", "resets"):
            client = socket.socket(socket.AF_UNIX)
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    client.connect(address)
                    break
            if how == "nonsense":
                client.sendall(b"\xff\xff\xff\xff")
            elif how == "resets":
                client.sendall(b"\x63\x00")
            if how != "silent":
                client.close()
        control = block(rank, world, token)
    control.barrier(Meeting.CLOSE)
    control.close()


def test_stale_connections_to_the_exchange_are_ignored() -> None:
    values(launch(_stale_connections, 2))


def test_many_descriptors_are_shared() -> None:
    """More than the kernel passes in one message."""
    name, count = f"odc-{secrets.token_hex(8)}", 600
    pipes = [os.pipe() for _ in range(2)]
    given = [pipes[i % 2][1] for i in range(count)]
    options: dict[str, Any] = {"name": name, "count": 2, "timeout_s": 60.0}
    thread = threading.Thread(target=share_descriptors, args=(given,), kwargs=options | {"index": 0})
    thread.start()
    received = share_descriptors(None, index=1, **options)
    thread.join()
    assert len(received) == count
    for i in (0, 1, 251, 500, 599):
        os.write(received[i], bytes([i % 200]))
        assert os.read(pipes[i % 2][0], 1) == bytes([i % 200])
        assert not os.get_inheritable(received[i])
    for fd in [*received, *pipes[0], *pipes[1]]:
        os.close(fd)


def test_giver_that_dies_in_the_middle_is_an_error_in_time() -> None:
    name = f"odc-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen(1)

        def serve() -> None:
            connection, _ = server.accept()
            connection.recv(4)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(DeadlineError, match=r"did not offer it within 0\.5 s"):
            share_descriptors(None, name=name, index=1, count=2, timeout_s=0.5)
        thread.join()
    assert len(os.listdir("/proc/self/fd")) < before + 1


def _fork_with_engine(rank: int, world: int) -> int:
    import weakref

    import torch

    import odcengine
    from odcengine.engine import _close_at_exit

    config = {
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "odc": {"transport": "shm", "timeout_s": 60, "wrap": ["Linear"]},
    }
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    engine, *_ = odcengine.initialize(config=config, model=model)
    if rank == 0:
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            _close_at_exit(weakref.ref(engine))  # what sys.exit() runs in a child of os.fork()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    engine.backward(engine(torch.ones(1, 4)).sum(), count=1)
    engine.step()
    engine.close()
    return engine.global_steps


def test_forked_child_does_not_close_the_engine() -> None:
    assert values(run_ranks(_fork_with_engine, 2)) == [1, 1]
