"""What is known when a rank shows no sign of life: where all ranks are, and what their threads are doing."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

DEADLINE_EXIT_CODE = 124
"""Exit code of a rank that gave up waiting for another, as of ``timeout``."""

_STDERR = 2
_DUMP_SIGNAL = getattr(signal, "SIGRTMIN", 34) + 7  # nobody's: USR1 and USR2 belong to the user


@dataclass(frozen=True)
class RankState:
    """A rank, as the control block shows it.

    Attributes:
        rank: global rank.
        place: step, micro-batch and phase, in words.
        waits_for: the rank that it waits for, or None.
        silent_s: seconds since it made progress itself.
    """

    rank: int
    place: str
    waits_for: int | None
    silent_s: float


def report(states: Iterable[RankState], blamed: Sequence[int], elsewhere: int) -> str:
    """Ranks grouped by what they do, the ones to blame first.

    Args:
        states: of the ranks of this node.
        blamed: global ranks.
        elsewhere: ranks of other nodes, whose places are not known here.
    """
    groups: dict[tuple[bool, str, int | None], list[RankState]] = {}
    for state in states:
        key = (state.rank not in blamed, state.place, state.waits_for)
        groups.setdefault(key, []).append(state)
    lines = ["where the ranks are:"]
    for (follows, place, waits_for), members in sorted(groups.items(), key=lambda item: item[0][0]):
        many = "ranks" if len(members) > 1 else "rank"
        silent = max(state.silent_s for state in members)
        line = f"  {many} {ranges([state.rank for state in members])}: {place}"
        line += f", waiting for rank {waits_for}" if waits_for is not None and follows else ""
        line += f", no progress for {silent:.1f} s"
        lines.append(line + ("" if follows else "   <- the odd one" + ("s" if len(members) > 1 else "")))
    if elsewhere:
        lines.append(f"  {elsewhere} ranks of other nodes: see the reports there")
    return "\n".join(lines)


def ranges(numbers: Iterable[int]) -> str:
    """``0-3, 5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


class StackFile:
    """Where this process writes the Python stacks of its threads when a peer asks for them.

    A signal makes it do so, in C, also while Python is stuck in a call; no code of the script runs.

    Args:
        path: the file; None: stderr.

    Attributes:
        active: whether the signal is taken: else it would end the process.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self.active = False
        if signal.getsignal(_DUMP_SIGNAL) is not signal.SIG_DFL:
            return
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # no stderr, say
            self._file = None if path is None else path.open("w")
            faulthandler.register(_DUMP_SIGNAL, file=self._file or _STDERR, all_threads=True)
            self.active = True

    def close(self) -> None:
        """Write no more to the file, which stays if something is in it."""
        if self.active:
            self.active = False
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                # A late signal must not end the process, and another engine may count on it.
                faulthandler.register(_DUMP_SIGNAL, file=_STDERR, all_threads=True)
        if self._file is not None:
            self._file.close()
            self._file = None
            with contextlib.suppress(OSError):
                if self._path is not None and not self._path.stat().st_size:
                    self._path.unlink()


def ask_for_stack(pid: int) -> None:
    """Make a process with an active :class:`StackFile` write its stacks."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, _DUMP_SIGNAL)
