"""The trial at the start: is a rank served by MPI while it computes?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")

_SHARE_OF_LOOP = 0.8  # in which gets are begun; one that waits for the owner lasts until its loop's end


class ProgressTrial:
    """Ranks loop outside of MPI while others get from them.

    Each gets from its neighbour on its node and, with several nodes, from one on the next: inside a node MPI
    takes other ways than between nodes.

    Args:
        me: this peer.
        nodes: the peers of each node.
        meet: meets all peers with a number; returns those of all.
        get: gets from a peer, and returns when the data is there.
    """

    def __init__(
        self,
        me: int,
        nodes: Sequence[Sequence[int]],
        *,
        meet: Callable[[int], list[int]],
        get: Callable[[int], None],
    ) -> None:
        self._me = me
        self._nodes = [tuple(peers) for peers in nodes if peers]
        self._meet = meet
        self._get = get

    def is_served(self, loop_s: float) -> bool:
        """Whether no get took as long as its owner's loop of ``loop_s`` seconds. Collective; equal on all."""
        slow = 0
        for turns, owners in self._rounds():
            for turn in range(3):
                self._meet(0)
                owner = owners[self._me]
                if turns[self._me] == turn and owner != self._me:
                    slow |= self._longest_get_s(owner, loop_s) > loop_s / 2
                elif any(turns[peer] == turn and owners[peer] == self._me for peer in owners):
                    end = time.monotonic() + loop_s
                    while time.monotonic() < end:
                        pass
        return not any(self._meet(slow))

    def _longest_get_s(self, owner: int, loop_s: float) -> float:
        """The longest get; the owner is in its loop, or about to be."""
        begun, longest = time.monotonic(), 0.0
        while time.monotonic() - begun < _SHARE_OF_LOOP * loop_s:
            start = time.monotonic()
            self._get(owner)
            longest = max(longest, time.monotonic() - start)
        return longest

    def _rounds(self) -> Iterator[tuple[dict[int, int], dict[int, int]]]:
        """For each peer when it gets, and from whom; nobody gets while somebody gets from it."""
        places = {peer: (m, i) for m, peers in enumerate(self._nodes) for i, peer in enumerate(peers)}
        if any(len(peers) > 1 for peers in self._nodes):
            turns = {peer: _turn(i, len(self._nodes[m])) for peer, (m, i) in places.items()}
            yield turns, {peer: _pick(self._nodes[m], i + 1) for peer, (m, i) in places.items()}
        if len(self._nodes) > 1:
            turns = {peer: _turn(m, len(self._nodes)) for peer, (m, _) in places.items()}
            yield turns, {peer: _pick(_pick(self._nodes, m + 1), i) for peer, (m, i) in places.items()}


def _turn(position: int, size: int) -> int:
    """Neighbours in a ring of ``size`` have different ones."""
    return 2 if size % 2 and position == size - 1 else position % 2


def _pick(items: Sequence[Item], position: int) -> Item:
    """In a ring."""
    return items[position % len(items)]
