"""Failures of the ranks of a node: what a rank says when it stops, and how the others find out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from odcengine._slots import Slots
from odcengine._words import ACTIVE, LEFT, Word
from odcengine.errors import PeerError, UsageError
from odcengine.topology import Topology

_GIVE_UP_S = 1.0  # then a failure is told or read without the lock of its slot
_PRIMARY, _SECONDARY = 1, 2


class Failures:
    """Tells the ranks of this node of this rank's failure, and this rank of theirs.

    Args:
        topology: ranks and nodes.
        slots: what the ranks of this node say.
    """

    def __init__(self, topology: Topology, slots: Slots) -> None:
        self._topology = topology
        self._slots = slots
        self._me = topology.local_rank

    @property
    def told(self) -> bool:
        """Whether this rank has told the others that it stops."""
        return bool(self._slots.mine[Word.ABORT])

    def tell(self, message: str, culprit: int | None, *, secondary: bool) -> None:
        """Tell the others that this rank stops.

        Args:
            message: why, for them to show.
            culprit: global rank to blame; None where nobody knows.
            secondary: this rank stops because of another one, which may say more.
        """
        with self._slots.locked(self._me, _GIVE_UP_S, or_without=True):
            self._slots.write_message(message)
            self._slots.mine[Word.CULPRIT] = 0 if culprit is None else culprit + 1
            self._slots.mine[Word.ABORT] = _SECONDARY if secondary else _PRIMARY

    def check(self) -> None:
        """Raise if a rank has told that it stops.

        Raises:
            PeerError: names the rank, its host, the step and the cause.
            UsageError: it was this rank itself.
        """
        codes = self._slots.words[:, Word.ABORT]
        if not codes.any():
            return
        index = int(np.argmax(codes == _PRIMARY)) if (codes == _PRIMARY).any() else int(codes.argmax())
        if index == self._me:
            raise UsageError(
                f"{self._slots.describe(index)} goes on after a failure in this job; "
                f"the engine cannot: {self._slots.message(index)}"
            )
        with self._slots.locked(index, _GIVE_UP_S, or_without=True):
            message = self._slots.message(index)
            culprit = int(self._slots.words[index, Word.CULPRIT]) - 1
        raise PeerError(message, culprit if culprit >= 0 else None)

    def check_lives(self) -> None:
        """Raise if the process of a rank has ended, which may have said nothing.

        Raises:
            PeerError: names the rank, and where it was.
        """
        for index, rank in enumerate(self._topology.peers):
            words = self._slots.words[index]
            if index == self._me or words[Word.STATE] != ACTIVE or self._slots.is_alive(index):
                continue
            self.check()  # it may have said why
            if words[Word.STATE] != LEFT:
                raise PeerError(
                    f"{self._slots.describe(index)} died or left without close() in "
                    f"{self._slots.where(index)}",
                    rank,
                )

    def check_nobody_left(self, awaited: Sequence[int], what: str) -> None:
        """Raise if an awaited rank has left in good order: it will never come.

        Args:
            awaited: local indices.
            what: what is awaited, for the message.

        Raises:
            PeerError: names the rank.
        """
        for index in awaited:
            if self._slots.words[index, Word.STATE] == LEFT:
                self.check()  # it may have failed before it left
                describe = self._slots.describe
                raise PeerError(
                    f"{describe(index)} has closed its engine, but {describe(self._me)} waits in "
                    f"{self._slots.where(self._me)} for: {what}",
                    self._topology.peers[index],
                )
