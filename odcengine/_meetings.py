"""The places where ranks meet: their names, and a number for each by which ranks compare where they are."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from odcengine.errors import PeerError, UsageError

_RANGE = 1 << 48


class Meeting(enum.IntEnum):
    """Places where all ranks of a node meet; ranks at different places have run different programs."""

    ALLOCATE = 1
    END_OF_STEP = 2
    PUBLISH = 3
    CLOSE = 4
    LOCKSTEP_GATHER = 5
    LOCKSTEP_PUSH = 6
    EXIT = 7
    SAVE = 8
    LOAD = 9
    BALANCE = 10
    SAMPLES = 11
    REFERENCE = 12
    EVALUATE = 13

    def explain(self, number: int) -> str:
        """Words for messages: ``the end of step 3``.

        An attached model gives :attr:`CLOSE` and :attr:`EXIT` a number as well: how its last minibatch ended,
        1 for the end without an optimizer's step, more with one.
        """
        text = _LABELS[self].format(number)
        if self in (Meeting.CLOSE, Meeting.EXIT) and number:
            text += f", the last minibatch {'with' if number > 1 else 'without'} optimizer.step()"
        return text


_LABELS = {
    Meeting.ALLOCATE: "the allocation of windows",
    Meeting.END_OF_STEP: "the end of step {}",
    Meeting.PUBLISH: "publish() before step {}",
    Meeting.CLOSE: "close()",
    Meeting.EXIT: "the end of its script, without close()",
    Meeting.SAVE: "a save between steps, before step {}",
    Meeting.LOAD: "load_checkpoint() before step {}",
    Meeting.BALANCE: "plan(), exchange(), balance() or annotate() in step {}",
    Meeting.SAMPLES: "the filling of the sample store, number {}",
    Meeting.REFERENCE: "update_reference() before step {}",
    Meeting.EVALUATE: "the end of evaluate() before step {}",
    Meeting.LOCKSTEP_GATHER: "the lock-step gather of module group {}",
    Meeting.LOCKSTEP_PUSH: "the lock-step push of module group {}",
}


def make_tag(meeting: Meeting, number: int) -> int:
    """A meeting in one number, which ranks that meet compare."""
    return meeting * _RANGE + number


def compare_tags(tags: Mapping[int, int], rank: int, describe: Callable[[int], str]) -> None:
    """Raise where ranks that have met were at different places.

    Args:
        tags: of each global rank the place, from :func:`make_tag`; this rank's own among them.
        rank: this rank.
        describe: names a global rank in messages.

    Raises:
        UsageError: names who is where.
        PeerError: the same, where another rank has ended its script.
    """
    meetings = {other: Meeting(tag // _RANGE) for other, tag in tags.items()}
    leave = set(meetings.values()) <= {Meeting.CLOSE, Meeting.EXIT}
    if len({tag % _RANGE if leave else tag for tag in tags.values()}) == 1:
        return
    places = [
        f"{describe(other)} is at {meetings[other].explain(tag % _RANGE)}" for other, tag in tags.items()
    ]
    message = (
        f"ranks ran different programs: {'; '.join(places)}. Every rank must call step() the same number "
        "of times, also with no micro-batch, and close() after that; saves and other calls between steps "
        "are made by all ranks, not by rank 0 alone"
    )
    ended = [other for other, meeting in meetings.items() if meeting is Meeting.EXIT]
    if ended and rank not in ended:
        raise PeerError(message, ended[0])
    raise UsageError(message)
