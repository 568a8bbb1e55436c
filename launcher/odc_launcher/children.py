"""What a process needs that starts others: their signals, what they are given, and what is left of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def caught_signals(
    wanted: tuple[signal.Signals, ...],
) -> Iterator[tuple[frozenset[signal.Signals], int]]:
    """Turns signals into bytes on a pipe; yields the signals that are caught and the pipe's read end.

    INT and HUP stay ignored where they are at the start: that is how nohup and a shell's background jobs
    ask for it.
    """
    caught = {
        number
        for number in wanted
        if not (number in (signal.SIGINT, signal.SIGHUP) and signal.getsignal(number) == signal.SIG_IGN)
    }
    caught.add(signal.SIGCHLD)
    read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    old_wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    old_handlers = {number: signal.signal(number, _do_nothing) for number in caught}
    old_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, caught)
    try:
        yield frozenset(caught), read_end
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        for number, handler in old_handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(old_wakeup)
        os.close(read_end)
        os.close(write_end)


def read_signals(wakeup: int) -> list[signal.Signals]:
    """What has come since the last time, without SIGCHLD.

    Args:
        wakeup: the read end of the pipe of :func:`caught_signals`.
    """
    numbers = b""
    with contextlib.suppress(BlockingIOError):
        numbers = os.read(wakeup, 4096)
    return [signal.Signals(number) for number in numbers if number != signal.SIGCHLD]


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The byte on the wakeup pipe is what counts."""


class ChildSetup:
    """Runs in the child between fork and exec; the child gets ``death_signal`` when the launcher dies."""

    def __init__(
        self,
        caught: frozenset[signal.Signals],
        death_signal: signal.Signals = signal.SIGKILL,
        cores: tuple[int, ...] = (),
    ) -> None:
        self._caught = caught
        self._cores = cores
        self._death_signal = death_signal
        self._launcher = os.getpid()
        self._libc = ctypes.CDLL(None)

    def __call__(self) -> None:
        self._libc.prctl(_PR_SET_PDEATHSIG, int(self._death_signal), 0, 0, 0)
        if os.getppid() != self._launcher:  # it died before the line above
            os.kill(os.getpid(), signal.SIGKILL)
        if self._cores:  # before Python starts, so that every thread of the rank has them
            with contextlib.suppress(OSError):  # a core was switched off since: any is better than none
                os.sched_setaffinity(0, self._cores)
        signal.set_wakeup_fd(-1)
        for number in self._caught:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._caught)


def descriptors_of_mpi(environ: Mapping[str, str]) -> tuple[int, ...]:
    """What MPI's launcher has opened for its process (PMI-1 of Hydra, PMI-2 of SLURM): the rank is that."""
    try:
        number = int(environ.get("PMI_FD", ""))
        os.fstat(number)
    except (ValueError, OSError):
        return ()
    return (number,)


def group_members(groups: set[int]) -> list[int]:
    """Returns the process ids of the living members of process groups."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            stat = (entry / "stat").read_bytes()
        except OSError:
            continue
        # After the command's name in brackets, which may contain anything: state, parent, group.
        state, _, group = stat.rpartition(b")")[2].split()[:3]
        if int(group) in groups and state not in (b"Z", b"X"):
            members.append(int(entry.name))
    return sorted(members)
