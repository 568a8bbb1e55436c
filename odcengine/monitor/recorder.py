"""Records what a rank did when, in the minibatches that are asked for."""

from __future__ import annotations

import math

KINDS = (
    "load",
    "forward",
    "backward",
    "gather",
    "push",
    "all_gather",
    "reduce_scatter",
    "wait",
    "barrier",
    "collect",
    "agree",
    "update",
    "publish",
    "fetch",
)
"""What an event may be. ``forward``, ``backward`` and those from ``barrier`` on are phases of the protocol;
the others lie inside of them. ``wait`` lies inside any other."""

MAX_EVENTS = 200_000
"""Events kept of a minibatch and rank: bounds memory, about 30 MiB."""

Event = tuple[str, float, float, int]
"""Kind, start and end in seconds of CLOCK_MONOTONIC, index of the group of parameters (-1 for none)."""

NumberedEvent = tuple[str, float, float, int, int]
"""The same with the index of the rank's micro-batch (-1 for none) before the group."""


class Recorder:
    """Keeps the events of one rank while it is on; while it is off nobody calls :meth:`add`.

    Times are those of ``time.perf_counter()``, which on Linux reads CLOCK_MONOTONIC: one clock for all
    processes of a host.

    Attributes:
        num_dropped: events that found no room.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self._events: list[Event] = []

    def add(self, kind: str, start: float, end: float, group: int = -1) -> None:
        """Record that this rank did ``kind`` from ``start`` to ``end``."""
        if len(self._events) < MAX_EVENTS:
            self._events.append((kind, start, end, group))
        else:
            self.num_dropped += 1

    def take(self, since: float) -> list[NumberedEvent]:
        """The events that ended after ``since`` in the order of their start; forgets all.

        A micro-batch begins where the backward of the one before has ended; the boundary belongs to none.
        """
        events = sorted((e for e in self._events if e[2] >= since), key=lambda e: (e[1], -e[2]))
        self.num_dropped, self._events = 0, []
        ends = sorted(end for kind, _, end, _ in events if kind == "backward")
        boundary = min((start for kind, start, _, _ in events if kind == "barrier"), default=math.inf)
        numbered, number = [], 0
        for kind, start, end, group in events:
            while number < len(ends) and ends[number] <= start:
                number += 1
            numbered.append((kind, start, end, -1 if start >= boundary else number, group))
        return numbered
