"""How the end of a launch is told: first which rank failed first, where and why, then what followed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence

from odc_launcher.failure import HANG, RankEnd, blamed_rank, describe, primary
from odcengine.preemption import REQUEUE_EXIT_CODE

TAIL_LINES = 20
_STACK_LINES = 12
_GROUPS = 3  # of ranks that failed by themselves, each with an error of its own
_TAIL_BYTES = 64 * 1024
_LINE_CHARS = 1000
_CAUSE_CHARS = 200
_CURRENT = "Current thread "
_HINTS = {
    signal.SIGKILL: "killed from outside; the kernel does so when memory runs out (see dmesg)",
    signal.SIGBUS: "a mapped file or shared memory could not be backed: is /dev/shm full?",
    signal.SIGILL: "an instruction that this processor lacks",
}


def report(
    ends: Sequence[RankEnd],
    passed_on: signal.Signals | None = None,
    preempted: str | None = None,
    *,
    everybody: bool = True,
) -> list[str]:
    """Tells a launch's failure, line by line; nothing where every rank succeeded.

    Args:
        ends: the ends of ranks.
        passed_on: the signal that the launcher was sent and passed on before the first failure.
        preempted: what :func:`odc_launcher.failure.preempted` found.
        everybody: ``ends`` is of all ranks; else those that started the others tell of them.
    """
    first = primary(ends)
    if first is None:
        return []
    if all(end.returncode == REQUEUE_EXIT_CODE and end.record is None for end in ends):
        return [f"all ranks were asked to stop, and ended with {REQUEUE_EXIT_CODE} to go on in a new run"]
    if preempted is not None:
        return [
            f"{preempted} ended the job while it had no engine that could save; the newest checkpoint stays "
            f"as it is: ended with {REQUEUE_EXIT_CODE} to go on from there in a new run"
        ]
    blamed = blamed_rank(first)
    if blamed is not None and first.record is not None and first.record.kind != HANG and not everybody:
        failed = ranges(end.rank for end in ends if end.returncode != 0)
        told = _one_line(first.record.message)
        return [
            f"{failed} on {first.host} ended because of rank {blamed}: {told}; its log: "
            f"{_sibling(first.log_path, blamed)}"
        ]
    if blamed is not None:
        lines = _of_another(ends, first, blamed)
    else:
        blamed, lines = first.rank, _of_itself(ends, first, passed_on)
    return lines + _of_the_others([end for end in ends if end.returncode != 0 and end.rank != blamed])


def brief(first: RankEnd) -> str:
    """What is known when the first rank has ended, in a few words."""
    blamed, record = blamed_rank(first), first.record
    if record is None and first.returncode == REQUEUE_EXIT_CODE:
        return f"rank {first.rank} ended with {REQUEUE_EXIT_CODE}, to go on in a new run"
    if record is None:
        return f"rank {first.rank} failed ({describe(first.returncode)})"
    if blamed is None:
        return f"rank {first.rank} failed ({record.kind}: {_one_line(record.message)})"
    return f"rank {blamed} {'hangs' if record.kind == HANG else 'failed'}, as rank {first.rank} tells"


def log_tail(path: str, start: int = 0, count: int = TAIL_LINES) -> list[str]:
    """The last lines of a log as a terminal would show them: of a progress bar its last state.

    Args:
        path: the log.
        start: bytes at its beginning that do not count.
        count: lines at most.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _TAIL_BYTES))
            data = file.read(_TAIL_BYTES)
    except OSError as error:
        return [f"(cannot be read: {error.strerror})"]
    lines = []
    for line in data.removesuffix(b"\n").split(b"\n")[-count:] if data else []:
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")
        lines.append(text if len(text) <= _LINE_CHARS else text[:_LINE_CHARS] + " ...")
    return lines


def stack_path(log_path: str, rank: int) -> str:
    """Where the engine of a rank writes the Python stacks of its threads: beside its log."""
    return os.path.join(os.path.dirname(log_path), f"stack-rank{rank}.txt")


def stack(path: str) -> list[str]:
    """Where the main thread was when its stacks were written, innermost call first; empty: not known."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read(_TAIL_BYTES).splitlines()
    except OSError:
        return []
    starts = [number for number, line in enumerate(lines) if line.startswith(_CURRENT)]
    if not starts:
        return []
    frames = []
    for line in lines[starts[-1] + 1 :]:
        if not line.startswith("  "):
            break
        frames.append(line.strip())
    more = len(frames) - _STACK_LINES
    return frames[:_STACK_LINES] + ([f"... {more} more"] if more > 0 else [])


def ranges(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-3, 5``."""
    numbers, parts = sorted(ranks), []
    start = 0
    for index, number in enumerate(numbers):
        if index + 1 == len(numbers) or numbers[index + 1] != number + 1:
            first = numbers[start]
            parts.append(str(number) if first == number else f"{first}-{number}")
            start = index + 1
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(parts)}"


def _of_itself(ends: Sequence[RankEnd], first: RankEnd, passed_on: signal.Signals | None) -> list[str]:
    """A rank that failed and is to blame itself."""
    after = f" after {passed_on.name} was passed on" if passed_on else ""
    lines = [f"rank {first.rank} on {first.host} failed first{after}: {describe(first.returncode)}"]
    record = first.record
    if record is not None:
        lines += _cause(first)
    elif first.stopped_by is not None:
        lines += _indent(f"cause: {first.stopped_by} was sent to its step (scancel, or the time limit)")
    elif first.ended_by_launcher:
        lines += _indent("cause: odc-launch ended it, for it did not end by itself in time")
    elif -first.returncode in _HINTS:
        lines += _indent(f"cause: {_HINTS[signal.Signals(-first.returncode)]}")
    if record is None:  # the others may know where it was
        seen = next((end for end in ends if blamed_rank(end) == first.rank), None)
        if seen is not None and seen.record is not None:
            lines += _indent(f"rank {seen.rank} saw: {_one_line(seen.record.message)}")
    if passed_on is not None and first.returncode == -passed_on and record is None:
        return lines + _indent(f"log: {first.log_path}")
    return lines + _log(first.log_path, first.log_start)


def _of_another(ends: Sequence[RankEnd], first: RankEnd, blamed: int) -> list[str]:
    """A rank that hangs or is gone without a word, as ``first`` tells of it."""
    end = next((end for end in ends if end.rank == blamed), None)
    where = f"rank {blamed}" if end is None else f"rank {blamed} on {end.host}"
    witness = f"rank {first.rank} on {first.host}"
    assert first.record is not None  # it names the rank
    path = end.log_path if end is not None else _sibling(first.log_path, blamed)
    start = end.log_start if end is not None else 0
    if first.record.kind == HANG:
        lines = [f"{where} hangs; {witness} has given it up: {describe(first.returncode)}", *_cause(first)]
        written = stack_path(path, blamed)
        frames = stack(written)
        if frames:
            lines += _indent(f"where rank {blamed} hangs ({written}, the innermost call first):")
            lines += [f"    {line}" for line in frames]
    else:
        told = f"failed first, without a word of its own; {witness} tells: {describe(first.returncode)}"
        lines = [f"{where} {told}", *_cause(first)]
    return lines + _log(path, start)


def _sibling(log_path: str, rank: int) -> str:
    return os.path.join(os.path.dirname(log_path), f"rank{rank}.log")


def _cause(end: RankEnd) -> list[str]:
    record = end.record
    assert record is not None
    step = "" if record.step is None or "\n" in record.message else f" (step {record.step})"
    return _indent(f"cause: {record.kind}: {record.message}{step}")


def _log(path: str, start: int) -> list[str]:
    tail = log_tail(path, start)
    told = f"last lines of its log {path}:" if tail else f"it printed nothing (log: {path})"
    return _indent(told) + [f"    {line}" for line in tail]


def _of_the_others(ends: Sequence[RankEnd]) -> list[str]:
    """What followed: ranks with errors of their own, then in one line those that only ended."""
    own: dict[str, list[int]] = {}
    followed: dict[str, list[int]] = {}
    for end in ends:
        record, code = end.record, describe(end.returncode)
        if end.ended_by_launcher:
            followed.setdefault(f" ({code} by odc-launch)", []).append(end.rank)
        elif record is not None and (record.secondary or record.kind == HANG):
            followed.setdefault("", []).append(end.rank)
        elif record is not None:
            own.setdefault(f"{record.kind}: {_one_line(record.message)}", []).append(end.rank)
        else:
            by = "" if end.stopped_by is None else f"; their step was sent {end.stopped_by}"
            followed.setdefault(f" ({code}{by})", []).append(end.rank)
    lines = [f"  failed as well: {ranges(ranks)}: {why}" for why, ranks in list(own.items())[:_GROUPS]]
    left = [rank for ranks in list(own.values())[_GROUPS:] for rank in ranks]
    lines += [f"  failed as well, with errors of their own: {ranges(left)}"] if left else []
    if followed:
        told = "; ".join(f"{ranges(ranks)}{how}" for how, ranks in sorted(followed.items()))
        lines.append(f"  ended because of it: {told}")
    return lines


def _one_line(message: str) -> str:
    line = message.partition("\n")[0]
    return line if len(line) <= _CAUSE_CHARS else line[:_CAUSE_CHARS] + " ..."


def _indent(text: str) -> list[str]:
    return [f"  {line}" for line in text.split("\n")]
