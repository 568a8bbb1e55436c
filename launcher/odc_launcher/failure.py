"""How ranks end, and which of them failed first."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace

_RECORD_BYTES = 16 * 1024 * 1024
HANG = "DeadlineError"
"""What a rank ends with that has given up another one."""
_ERROR, _END = ".error.json", ".end.json"


@dataclass(frozen=True)
class ErrorRecord:
    """What a failing rank wrote about itself into its ``ODC_ERROR_FILE``.

    Attributes:
        kind: the exception's class.
        message: its text.
        secondary: it only follows the failure of another rank.
        time: when, in unix seconds.
        step: the optimizer step.
        culprit: the rank that is to blame, this one or another; None where that is not known.
    """

    kind: str
    message: str
    secondary: bool
    time: float | None
    step: int | None
    culprit: int | None = None


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    Attributes:
        rank: its number.
        host: where it ran.
        returncode: exit code, or minus the signal's number.
        time: when the launcher saw it end, in unix seconds.
        log_path: its log.
        record: what it wrote about its failure, if anything.
        ended_by_launcher: the launcher had already told it to end by a signal of its own.
        stopped_by: the signal by which the scheduler had already told the ranks of its step to end.
        asked_by: the signal of ``preemption`` that the launcher of the rank had been sent.
        log_start: bytes of the log that earlier launches wrote.
    """

    rank: int
    host: str
    returncode: int
    time: float
    log_path: str
    record: ErrorRecord | None = None
    ended_by_launcher: bool = False
    stopped_by: str | None = None
    asked_by: str | None = None
    log_start: int = 0


@dataclass(frozen=True)
class Outcome:
    """How a launch ended.

    Attributes:
        code: exit code of the launch.
        first: the end of the rank that failed first; None where none failed, or none told.
        stopped: whether the launcher was told to stop.
        asked_by: the signal of ``preemption`` that has come to the job, and no second one: what fails is not
            started again then.
    """

    code: int
    first: RankEnd | None
    stopped: bool
    asked_by: str | None = None


def write_end(end: RankEnd, error_path: str) -> None:
    """Stores a rank's end beside its error file, for the launch that started the step.

    Raises:
        OSError: it cannot be written.
    """
    fields = {key: value for key, value in asdict(end).items() if key != "record"}
    path = _end_path(error_path)
    with open(path + ".part", "w") as file:
        json.dump(fields, file)
    os.replace(path + ".part", path)


def read_ends(log_dir: str) -> list[RankEnd]:
    """The ends that the launchers of a step stored, in the order of ranks."""
    ends = []
    for entry in os.scandir(log_dir):
        if not entry.name.endswith(_END):
            continue
        try:
            with open(entry.path) as file:
                end = RankEnd(**json.load(file))
        except (OSError, ValueError, TypeError):
            continue
        record = read_error_record(entry.path.removesuffix(_END) + _ERROR) if end.returncode else None
        ends.append(replace(end, record=record))
    return sorted(ends, key=lambda end: end.rank)


def count_ends(log_dir: str) -> int:
    """How many ranks have ended, as far as the launchers of a step have stored it."""
    try:
        return sum(entry.name.endswith(_END) for entry in os.scandir(log_dir))
    except OSError:
        return 0


def remove_ends(log_dir: str) -> None:
    """Removes what an earlier launch left of ends and errors.

    Raises:
        OSError: a file cannot be removed.
    """
    for entry in os.scandir(log_dir):
        if entry.name.endswith((_END, _ERROR)):
            os.unlink(entry.path)


def _end_path(error_path: str) -> str:
    return error_path.removesuffix(_ERROR) + _END


def read_error_record(path: str) -> ErrorRecord | None:
    """Reads a rank's error file; None where there is none or it is not the agreed JSON object."""
    try:
        with open(path, "rb") as file:
            fields = json.loads(file.read(_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    time, step, culprit = fields.get("time"), fields.get("step"), fields.get("culprit")
    return ErrorRecord(
        kind=str(fields.get("type", "error")),
        message=str(fields.get("message", "")),
        secondary=fields.get("secondary") is True,
        time=float(time) if isinstance(time, int | float) else None,
        step=step if isinstance(step, int) else None,
        culprit=culprit if isinstance(culprit, int) else None,
    )


def primary(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The failure that is to blame: the earliest that is not the consequence of another.

    Ranks that say themselves that they only follow another (``secondary``), and ranks that the launcher
    ended, come last. A rank's own time of failure counts where it wrote one: it may take longer to leave
    than those that follow it.
    """

    def order(end: RankEnd) -> tuple[bool, bool, float, int]:
        record = end.record
        time = end.time
        if record is not None and record.time is not None:
            time = min(time, record.time)
        told = end.ended_by_launcher or end.stopped_by is not None
        return told, record is not None and record.secondary, time, end.rank

    return min((end for end in ends if end.returncode != 0), key=order, default=None)


def blamed_rank(end: RankEnd) -> int | None:
    """The other rank to which a rank that failed owes its end: one that it saw die, or gave up; else None."""
    record = end.record
    if record is None or record.culprit in (None, end.rank):
        return None
    return record.culprit if record.secondary or record.kind == HANG else None


def preempted(
    ends: Sequence[RankEnd], world_size: int, signals: Collection[signal.Signals], sent: str | None = None
) -> str | None:
    """The signal to save and to go on later that ended a rank by its default action; None: another failure.

    A rank that has no engine yet, or no longer, cannot act on the signal, and has nothing to save either.

    Args:
        ends: how ranks ended.
        world_size: number of ranks of the job.
        signals: those of ``preemption``.
        sent: one of them that somebody has sent to the launch of the whole job.
    """
    first = primary(ends)
    if first is None or first.record is not None or first.ended_by_launcher:
        return None
    if first.returncode >= 0 or -first.returncode not in signals:
        return None
    name = signal.Signals(-first.returncode).name
    if name == "SIGTERM" and len(ends) < world_size and sent != name:
        return None  # SLURM and MPI end a rank so, too, whose neighbour has failed without a word
    return name


def asked_by(ends: Sequence[RankEnd]) -> str | None:
    """The signal of ``preemption`` that ranks had been sent; not TERM, which also follows a failure."""
    return next((end.asked_by for end in ends if end.asked_by not in (None, "SIGTERM")), None)


def exit_code(returncode: int) -> int:
    """A shell's exit code: 128 + N for signal N."""
    return returncode if returncode >= 0 else 128 - returncode


def describe(returncode: int) -> str:
    """``exit code 3`` or ``SIGKILL``."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
