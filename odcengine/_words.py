"""The words of a rank's slot in the control block, and the names of the phases that they hold."""

from __future__ import annotations

import enum


class Phase(enum.IntEnum):
    """What a rank is doing, as reports name it."""

    STARTING = 0
    BETWEEN = 1
    FORWARD = 2
    BACKWARD = 3
    BARRIER = 4
    COLLECT = 5
    AGREE = 6
    UPDATE = 7
    PUBLISH = 8
    CLOSING = 9
    REPORT = 10
    FETCH = 11
    SAVING = 12
    LOADING = 13
    BALANCING = 14
    GENERATING = 15
    EVALUATING = 16

    @property
    def label(self) -> str:
        """Words for messages."""
        return _PHASE_LABELS[self]


_PHASE_LABELS = {
    Phase.STARTING: "starting",
    Phase.BETWEEN: "the user's code between engine calls",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.BARRIER: "the barrier at the minibatch's end",
    Phase.COLLECT: "collecting gradients",
    Phase.AGREE: "agreeing on norm and counts",
    Phase.UPDATE: "the optimizer step",
    Phase.PUBLISH: "publishing parameters",
    Phase.CLOSING: "close()",
    Phase.REPORT: "handing in its timeline",
    Phase.FETCH: "waiting for its GPU at the end of the step",
    Phase.SAVING: "saving a checkpoint",
    Phase.LOADING: "loading a checkpoint",
    Phase.BALANCING: "planning and exchanging samples",
    Phase.GENERATING: "generating",
    Phase.EVALUATING: "evaluating",
}

ACTIVE, LEFT = 1, 2
"""Values of :attr:`Word.STATE`."""


class Word(enum.IntEnum):
    """Index of a word in a rank's slot."""

    PID = 0
    STATE = 1  # 0 not there yet, ACTIVE, or LEFT in good order
    ALIVE_NS = 2  # CLOCK_MONOTONIC of the last progress, its own or that of the rank it waits for
    PHASE = 3
    STEP = 4
    MICRO_BATCH = 5
    EPOCH = 6  # flag B: epoch + 1, so that 0 is none
    BARRIER = 7  # barriers entered
    TAG_EVEN = 8  # what the rank says it is at, for barriers with an even and an odd number
    TAG_ODD = 9
    ABORT = 10  # 0 none, 1 this rank failed, 2 it stopped because of another
    CULPRIT = 11  # global rank to blame, + 1
    WAITS_FOR = 12  # global rank, + 1
    ENDED_STEP = 13  # steps whose micro-batches this rank has finished
    ENDED_COUNT = 14  # micro-batches it had in the last of them
    PROGRESS_NS = 15  # CLOCK_MONOTONIC of its own last progress
    LOOKED_NS = 16  # CLOCK_MONOTONIC of its last look around while it waits
    DRAWN_FROM = 17  # in the first rank's slot: serial number of the minibatch that ranks draw from
    DRAWN = 18  # and how many numbers they have drawn from it
    DUMPS = 19  # 1: its process writes its stacks when it is asked to
