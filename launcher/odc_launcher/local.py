"""Starts the ranks of one host as subprocesses, watches them, and ends them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

from odc_launcher import failure, report
from odc_launcher.children import (
    ChildSetup,
    caught_signals,
    descriptors_of_mpi,
    group_members,
    read_signals,
)
from odc_launcher.early import EarlySignals
from odc_launcher.output import Screen
from odc_launcher.plan import LaunchPlan
from odc_launcher.rank_process import NEVER, RankProcess, open_logs
from odc_launcher.slurm import run_of
from odcengine.preemption import REQUEUE_EXIT_CODE

TERM_GRACE_S = 5.0  # between the launcher's SIGTERM and its SIGKILL
_GIVEN_UP_PATIENCE_S = 2.0  # for a rank that others gave up: to write its stacks, or why it ends itself
_LEFTOVER_PATIENCE_S = 1.0  # for processes that a rank left behind and that are just ending
_KILL_DEADLINE_S = 10.0
_POLL_S = 1.0
_LOOK_S = 0.5  # at a folder that all hosts share
_LEFTOVER_POLL_S = 0.05
_READ_BYTES = 64 * 1024
_DRAIN_BYTES = 4 * 1024 * 1024
_SCREEN_DEADLINE_S = 5.0


def run(plan: LaunchPlan, early: EarlySignals | None = None) -> failure.Outcome:
    """Runs a plan on this host until every rank has ended.

    Every rank is the leader of a session and process group of its own, is killed by the kernel when the
    launcher dies, and writes stdout and stderr into one pipe. The first failure gives the others
    ``plan.grace_s`` to end; then their groups get SIGTERM, and SIGKILL five seconds later. A rank that the
    others have given up, and that says nothing itself, gets them after two seconds. Signals in
    ``plan.signals`` are passed on to the ranks; a second INT or TERM kills at once. When the last rank
    has ended, what is left of the groups is ended too.

    Args:
        plan: the ranks.
        early: what has come before; a signal of ``preemption`` among it ends the job before it starts.

    Returns:
        With exit code 0, or that of the rank that failed first (128 + N for signal N), or 75 where a signal
        of ``preemption`` ended ranks that could not act on it, or 1 where a process could not be started.

    Raises:
        ConfigError: the logs cannot be written; no process was started.
    """
    ranks = open_logs(plan, _heading(plan))
    if ranks[0].plan.rank == 0 and ranks[0].log.shared:
        print(
            f"odc-launch: warning: another launch that runs writes into {plan.log_dir}, too: give each its "
            "own (--log-dir; members of a job array share launch.log_dir)",
            file=sys.stderr,
            flush=True,
        )
    with caught_signals(plan.signals) as (caught, wakeup):
        launch = _Launch(plan, ranks, wakeup)
        try:
            if early is not None and early.came is not None:
                launch.leave_out(early.came)
                return launch.conclude()
            if not launch.start(caught):
                return failure.Outcome(1, None, stopped=True)
            launch.watch()
            launch.wait_for_other_hosts()
            return launch.conclude()
        finally:
            launch.close()


class _Launch:
    def __init__(self, plan: LaunchPlan, ranks: list[RankProcess], wakeup: int) -> None:
        self._plan = plan
        self._ranks = ranks
        self._wakeup = wakeup
        self._out = Screen(_fileno(sys.stdout))
        self._err = Screen(_fileno(sys.stderr))
        self._out_error_told = False
        self._encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        self._term_at = self._kill_at = self._give_up_at = NEVER
        self._leftovers_since: float | None = None
        self._leftovers_told = False
        self._stop_signal: signal.Signals | None = None
        self._passed_on: signal.Signals | None = None  # before the first failure
        self._asked_by: list[signal.Signals] = []  # those of preemption
        self._hurried = False  # a second signal wants the end at once

    # Starting

    def start(self, caught: frozenset[signal.Signals]) -> bool:
        """Starts every rank; where the system refuses one, says so and returns False."""
        environ = {name: value for name, value in os.environ.items() if name not in self._plan.unset}
        for rank in self._ranks:
            try:
                self._start(rank, environ | rank.plan.env, caught)
            except (OSError, subprocess.SubprocessError) as error:
                self._note(f"rank {rank.plan.rank} cannot be started: {error}")
                return False
        if self._signals_reach_ranks:
            # SLURM has signalled those that there were: a rank that was not yet would never know.
            for number in read_signals(self._wakeup):
                self._pass_on(number)
                for rank in self._ranks if number in self._plan.preemption else ():
                    rank.signal(number, group=False)
        return True

    def leave_out(self, number: signal.Signals) -> None:
        """Starts no rank, since a signal of ``preemption`` has come before."""
        self._note(f"{number.name} came before the ranks were started")
        self._asked_by.append(number)
        for rank in self._ranks:
            self._end(rank, -number)

    def _start(self, rank: RankProcess, environ: dict[str, str], caught: frozenset[signal.Signals]) -> None:
        rank.pipe, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(rank.pipe, False)
        # A signal between fork and exec would run the launcher's handlers in the child: held back.
        signal.pthread_sigmask(signal.SIG_BLOCK, caught)
        try:
            rank.process = subprocess.Popen(
                rank.plan.argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,
                pass_fds=descriptors_of_mpi(environ) if len(self._ranks) == 1 else (),
                preexec_fn=ChildSetup(caught, cores=rank.plan.affinity.cores),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, caught)
            os.close(write_end)

    # Watching

    def watch(self) -> None:
        """Returns when all ranks and what they left in their groups have ended, or cannot be ended."""
        while True:
            self._wait_for_events(self._timeout())
            now = time.monotonic()
            alive = any(rank.alive for rank in self._ranks)
            if not alive and not self._has_leftovers(now):
                return
            if now >= self._term_at:
                self._end_all(signal.SIGTERM)
                self._term_at, self._kill_at = NEVER, min(self._kill_at, now + TERM_GRACE_S)
            if now >= self._kill_at:
                self._kill_all()
            if now >= self._give_up_at:
                self._give_up()
                return
            self._end_given_up(now)

    def _timeout(self) -> float:
        own = [min(rank.term_at, rank.kill_at) for rank in self._ranks if rank.alive]
        deadline = min(self._term_at, self._kill_at, self._give_up_at, *own)
        limit = _POLL_S if any(rank.alive for rank in self._ranks) else _LEFTOVER_POLL_S
        return max(0.0, min(limit, deadline - time.monotonic()))

    def _wait_for_events(self, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        readers: dict[int, RankProcess] = {}
        for rank in self._ranks:
            if rank.pipe is not None and not self._out.full:
                readers[rank.pipe] = rank
                poll.register(rank.pipe, select.POLLIN)
        for screen in (self._out, self._err):
            if screen.pending and screen.fd is not None:
                poll.register(screen.fd, select.POLLOUT)
        ready = {fd for fd, _ in poll.poll(timeout_s * 1000)}
        self._out.pump()
        self._err.pump()
        for pipe in ready & readers.keys():
            self._read(readers[pipe])
        if self._wakeup in ready:
            for number in read_signals(self._wakeup):
                self._pass_on(number)
        if self._wakeup in ready or not ready:
            for rank in self._ranks:
                if rank.alive:
                    self._check_end(rank)
        self._tell_output_errors()

    def _read(self, rank: RankProcess) -> int:
        """Moves one piece of a rank's output; returns its size, 0 when there is none now or ever."""
        assert rank.pipe is not None
        try:
            data = os.read(rank.pipe, _READ_BYTES)
        except BlockingIOError:
            return 0
        if data:
            rank.log.write(data)
            self._show(rank, rank.splitter.feed(data, time.monotonic()))
        else:
            self._close_pipe(rank)
        return len(data)

    def _close_pipe(self, rank: RankProcess) -> None:
        if rank.pipe is not None:
            os.close(rank.pipe)
            rank.pipe = None
            self._show(rank, rank.splitter.finish())

    def _drain(self, rank: RankProcess) -> None:
        """Takes what an ended rank left in its pipe; what its children still hold open is not waited for."""
        left = _DRAIN_BYTES
        while left > 0 and rank.pipe is not None:
            size = self._read(rank)
            if not size:
                return
            left -= size

    def _show(self, rank: RankProcess, lines: list[bytes]) -> None:
        if lines and rank.plan.rank in self._plan.shown:
            text = "".join(f"[rank {rank.plan.rank}] {line.decode('utf-8', 'replace')}\n" for line in lines)
            self._out.write(text.encode(self._encoding, "replace"))

    def _check_end(self, rank: RankProcess) -> None:
        returncode = rank.poll()
        if returncode is None:
            return
        self._drain(rank)
        first_failure = not any(other.end and other.end.returncode for other in self._ranks)
        self._end(rank, returncode)
        if returncode and first_failure:
            self._passed_on = self._stop_signal
            others = sum(other.alive for other in self._ranks)
            if others and self._stop_signal is None:
                first = self._first_known()
                if not (self._reported_above and first.record is not None and first.record.secondary):
                    self._note(
                        f"{report.brief(first)}; the ranks that still run ({others}) get "
                        f"{self._plan.grace_s:g} s to end by themselves"
                    )
                self._term_at = min(self._term_at, time.monotonic() + self._plan.grace_s)
        given_up = None if rank.end is None else failure.blamed_rank(rank.end)
        for other in self._ranks:
            if other.plan.rank == given_up and not other.given_up:
                other.given_up = True
                other.term_at = time.monotonic() + _GIVEN_UP_PATIENCE_S

    def _first_known(self) -> failure.RankEnd:
        """The failure to blame as far as ranks have ended, or have written why they will."""
        ends = [rank.end for rank in self._ranks if rank.end is not None]
        for rank in self._ranks:
            record = failure.read_error_record(rank.plan.error_path) if rank.alive else None
            if record is not None:
                ends.append(self._as_end(rank, 1, record))
        first = failure.primary(ends)
        assert first is not None  # called when a rank has failed
        return first

    def _end(self, rank: RankProcess, returncode: int) -> None:
        """Notes how a rank has ended, and stores it where the launch above collects that."""
        record = failure.read_error_record(rank.plan.error_path) if returncode else None
        rank.end = self._as_end(rank, returncode, record)
        if self._reported_above:
            try:
                failure.write_end(rank.end, rank.plan.error_path)
            except OSError as error:
                self._note(f"rank {rank.plan.rank}'s end cannot be stored: {error}")

    def _as_end(
        self, rank: RankProcess, returncode: int, record: failure.ErrorRecord | None
    ) -> failure.RankEnd:
        return failure.RankEnd(
            rank=rank.plan.rank,
            host=self._plan.host,
            returncode=returncode,
            time=time.time(),
            log_path=rank.plan.log_path,
            log_start=rank.log.start,
            record=record,
            ended_by_launcher=rank.told_to_end,
            stopped_by=self._stop_signal.name if self._signals_reach_ranks and self._stop_signal else None,
            asked_by=self._asked_once,
        )

    @property
    def _reported_above(self) -> bool:
        """Whether the launch that started this step tells its failures."""
        return self._plan.place is not None and self._plan.place.reported_above

    @property
    def _asked_once(self) -> str | None:
        """The signal of ``preemption`` that has come; None also where a second one took its place."""
        return self._asked_by[0].name if len(self._asked_by) == 1 and not self._hurried else None

    # Ending

    @property
    def _signals_reach_ranks(self) -> bool:
        """SLURM signals every process of a step itself: passed on, a signal would arrive twice."""
        return self._plan.place is not None and self._plan.place.signals_reach_ranks

    def _pass_on(self, number: signal.Signals) -> None:
        reach = self._signals_reach_ranks
        if number in self._plan.preemption:
            self._asked_by.append(number)
        if number in (signal.SIGINT, signal.SIGTERM):
            if self._stop_signal is not None:
                self._hurried = True
                self._note(f"{number.name} after {self._stop_signal.name}: killing all ranks")
                self._kill_all()
                return
            self._stop_signal = number
            grace_s = self._plan.term_grace_s if number == signal.SIGTERM else self._plan.grace_s
            if not reach:
                self._note(
                    f"{number.name}: passed on to the ranks, which have {grace_s:g} s to end; a second one "
                    "kills them"
                )
            deadline = time.monotonic() + grace_s
            if number == signal.SIGTERM:  # they have had theirs
                self._kill_at = min(self._kill_at, deadline)
            else:
                self._term_at = min(self._term_at, deadline)
        elif not reach:
            self._note(f"{number.name}: passed on to the ranks")
        if reach:
            return
        # Only the ranks themselves: their helpers (of data loaders, say) would die of it.
        for rank in self._ranks:
            rank.signal(number, group=False)
            if number in (signal.SIGINT, signal.SIGTERM):
                rank.signal(signal.SIGCONT, group=False)  # a stopped rank could not act on it

    def _end_given_up(self, now: float) -> None:
        """Ends ranks that others gave up, and that have not said since why they end themselves."""
        for rank in self._ranks:
            if not rank.alive:
                continue
            if now >= rank.term_at:
                rank.term_at = NEVER
                if failure.read_error_record(rank.plan.error_path) is None:
                    self._end_all(signal.SIGTERM, [rank], ", which the others have given up")
                    rank.kill_at = now + TERM_GRACE_S
            if now >= rank.kill_at:
                rank.kill_at = NEVER
                self._end_all(signal.SIGKILL, [rank])

    def _end_all(self, number: signal.Signals, ranks: list[RankProcess] | None = None, why: str = "") -> None:
        chosen = self._ranks if ranks is None else ranks
        for rank in chosen:
            rank.told_to_end = rank.told_to_end or rank.alive
            rank.signal(number, group=True)
            if number == signal.SIGTERM:
                rank.signal(signal.SIGCONT, group=True)  # a stopped process could not act on it
        alive = [rank.plan.rank for rank in chosen if rank.alive]
        if alive:
            self._note(f"{number.name} to {report.ranges(alive)}{why}")

    def _kill_all(self) -> None:
        self._end_all(signal.SIGKILL)
        self._term_at = self._kill_at = NEVER
        self._give_up_at = time.monotonic() + _KILL_DEADLINE_S

    def _has_leftovers(self, now: float) -> bool:
        """Whether ended ranks left processes in their groups; if so they are ended after a moment."""
        members = group_members({rank.process.pid for rank in self._ranks if rank.process is not None})
        if members and self._leftovers_since is None:
            self._leftovers_since = now
        waited = 0.0 if self._leftovers_since is None else now - self._leftovers_since
        if members and waited >= _LEFTOVER_PATIENCE_S and not self._leftovers_told:
            self._leftovers_told = True
            self._term_at = min(self._term_at, now)
            self._kill_at = min(self._kill_at, now + TERM_GRACE_S)
            self._note(
                "the ranks have ended but left processes behind, which are ended now: "
                + ", ".join(map(str, members))
            )
        return bool(members)

    def _give_up(self) -> None:
        """SIGKILL did not end a process: it hangs in the kernel, and waiting longer would not help."""
        for rank in self._ranks:
            if rank.alive:
                assert rank.process is not None
                self._note(
                    f"rank {rank.plan.rank} (process {rank.process.pid}) does not end after SIGKILL: "
                    "it hangs in the kernel (a device driver or a network file system)"
                )
                rank.end = failure.RankEnd(
                    rank=rank.plan.rank,
                    host=self._plan.host,
                    returncode=-signal.SIGKILL,
                    time=time.time(),
                    log_path=rank.plan.log_path,
                    log_start=rank.log.start,
                    ended_by_launcher=True,
                )

    def wait_for_other_hosts(self) -> None:
        """Lets ranks elsewhere end that were asked to stop, too, for as long as the grace time.

        SLURM and MPI end all tasks when one ends with another code than 0, as 75 is.
        """
        ends = [rank.end for rank in self._ranks if rank.end is not None]
        if not self._reported_above or any(e.returncode != REQUEUE_EXIT_CODE or e.record for e in ends):
            return
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        deadline = time.monotonic() + self._plan.grace_s
        while time.monotonic() < deadline and failure.count_ends(self._plan.log_dir) < self._plan.world_size:
            poll.poll(_LOOK_S * 1000)
            numbers = read_signals(self._wakeup)
            self._asked_by += [number for number in numbers if number in self._plan.preemption]
            if {signal.SIGINT, signal.SIGTERM} & set(numbers):
                return

    def conclude(self) -> failure.Outcome:
        """Shows the rest of the output, and tells the first failure."""
        for rank in self._ranks:
            self._drain(rank)
            self._close_pipe(rank)
        self._out.drain(_SCREEN_DEADLINE_S)
        self._tell_output_errors()
        for rank in self._ranks:
            if rank.log.lost_bytes:
                self._note(
                    f"{rank.log.lost_bytes} bytes of rank {rank.plan.rank}'s output are missing in "
                    f"{rank.log.path}"
                )
        if self._out.dropped_bytes:
            self._note(
                f"{self._out.dropped_bytes} bytes were not shown because nobody read them; "
                f"the logs in {self._plan.log_dir} are complete"
            )
        for number in read_signals(self._wakeup):  # meanwhile
            if number in self._plan.preemption:
                self._asked_by.append(number)
        ends = [rank.end for rank in self._ranks if rank.end is not None]
        signals, asked_by = self._plan.preemption, self._asked_once
        preempted = failure.preempted(ends, self._plan.world_size, signals)
        if not self._reported_above:
            everybody = len(self._ranks) == self._plan.world_size
            for line in report.report(ends, self._passed_on, preempted, everybody=everybody):
                self._note(line)
        first = failure.primary(ends)
        code = 0 if first is None else failure.exit_code(first.returncode)
        if preempted is not None:
            code = REQUEUE_EXIT_CODE
        return failure.Outcome(code, first, stopped=self._stop_signal is not None, asked_by=asked_by)

    def close(self) -> None:
        for rank in self._ranks:
            if rank.alive:  # only after an error of the launcher itself
                rank.signal(signal.SIGKILL, group=True)
            self._close_pipe(rank)
            rank.log.close()
            if rank.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(timeout=_KILL_DEADLINE_S if rank.alive else 0)
        self._err.drain(_SCREEN_DEADLINE_S)

    # Telling

    def _note(self, text: str) -> None:
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        self._err.write(f"odc-launch: {text}\n".encode(encoding, "replace"))

    def _tell_output_errors(self) -> None:
        for rank in self._ranks:
            if rank.log.error is not None and not rank.log_error_told:
                rank.log_error_told = True
                self._note(
                    f"cannot write {rank.log.path}: {rank.log.error.strerror}; training goes on, "
                    "output is lost from the log until there is room"
                )
        if self._out.error is not None and not self._out_error_told:
            self._out_error_told = True
            self._note(
                f"cannot write to stdout: {self._out.error.strerror}; training goes on, "
                f"see the logs in {self._plan.log_dir}"
            )


def _heading(plan: LaunchPlan) -> str:
    """When, what and where: for logs in which an earlier launch has written."""
    when = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return f"==== {when}: {run_of(os.environ)}, {plan.world_size} ranks, {plan.host} ===="


def _fileno(stream: object) -> int | None:
    try:
        return int(stream.fileno())  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return None
