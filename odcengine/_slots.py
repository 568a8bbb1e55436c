"""The memory of the control block: for every rank of the node a slot of words, a message, and locks."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from odcengine._memory import FileLocks, create_memory, map_memory
from odcengine._words import Phase, Word
from odcengine.errors import DeadlineError, UsageError
from odcengine.topology import Topology

_MESSAGE_BYTES = 4096
_NAP_S = 2e-5
_STOPPED_S = 1.0  # a waiting rank that has not looked around for so long is not waiting but stopped
_WORDS_PER_SLOT = 32
_ALIVE_LOCK, _SLOT_LOCK, _FIRST_USER_LOCK = 0, 1, 2  # each times the group's size, plus the local index


def create_slots(count: int) -> int:
    """Create memory for the slots of ``count`` ranks; returns its descriptor."""
    return create_memory("odc-control", count * (_WORDS_PER_SLOT * 8 + _MESSAGE_BYTES))


class Slots:
    """The slots of this node's ranks, by local index. What they say is known here, never what follows of it.

    Attributes:
        words: (ranks of the node, words of a slot) int64, by :class:`Word`; a view of the memory.
        mine: the words of this rank.
        locks: which processes of the node hold; one for each sign of life, slot and number.

    Args:
        topology: ranks and nodes.
        fd: the memory, made by :func:`create_slots` on one rank of the node. Closed by :meth:`close`.
    """

    def __init__(self, topology: Topology, fd: int) -> None:
        self._topology = topology
        self._fd = fd
        self._size = len(topology.peers)
        self._me = topology.local_rank
        self._map: mmap.mmap = map_memory(fd)
        self.locks = FileLocks(fd)
        shape = (self._size, _WORDS_PER_SLOT)
        self.words = np.ndarray(shape, dtype=np.int64, buffer=self._map)
        self.mine = self.words[self._me]
        self._messages = np.ndarray(
            (self._size, _MESSAGE_BYTES), dtype=np.uint8, buffer=self._map, offset=self.words.nbytes
        )

    def close(self) -> None:
        """Let go of the memory and of all locks, the one that says "alive" included."""
        del self.words, self.mine, self._messages
        with contextlib.suppress(BufferError):  # a traceback still holds a view; unmapped when it goes
            self._map.close()
        os.close(self._fd)

    # -- life ------------------------------------------------------------------------------------------

    def claim(self) -> bool:
        """Show that this rank's process lives, as long as it does; False where another has its slot."""
        return self.locks.try_acquire(self._offset(_ALIVE_LOCK, self._me))

    def is_alive(self, index: int) -> bool:
        """Whether the process of a rank that has claimed its slot still lives."""
        return index == self._me or self.locks.holder(self._offset(_ALIVE_LOCK, index)) is not None

    def is_waiting(self, index: int) -> bool:
        """Whether a rank waits for another one, and is not stopped itself."""
        looked = int(self.words[index, Word.LOOKED_NS])
        return bool(self.words[index, Word.WAITS_FOR]) and time.monotonic_ns() - looked < _STOPPED_S * 1e9

    # -- messages --------------------------------------------------------------------------------------

    def write_message(self, text: str) -> None:
        """Leave this rank's message, cut where it is too long; under the lock of its slot."""
        encoded = text.encode(errors="replace")[: _MESSAGE_BYTES - 1]
        self._messages[self._me, : len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)
        self._messages[self._me, len(encoded)] = 0

    def message(self, index: int) -> str:
        """What a rank has left; under the lock of its slot."""
        raw: bytes = self._messages[index].tobytes()
        return raw[: raw.index(0)].decode(errors="replace")

    # -- locks -----------------------------------------------------------------------------------------

    def try_lock(self, number: int) -> bool:
        """Take the node-wide lock ``number`` (from 0) if it is free; returns whether it was."""
        return self.locks.try_acquire(self._offset(_FIRST_USER_LOCK, 0) + number)

    def unlock(self, number: int) -> None:
        """Give up lock ``number``."""
        self.locks.release(self._offset(_FIRST_USER_LOCK, 0) + number)

    def holders(self, number: int) -> Sequence[int]:
        """Who holds lock ``number``; all other ranks where nobody can tell."""
        return self._holders(self._offset(_FIRST_USER_LOCK, 0) + number)

    @contextlib.contextmanager
    def locked(self, index: int, limit_s: float, *, or_without: bool = False) -> Iterator[None]:
        """Hold the lock of a slot.

        An exception from a signal handler (Ctrl-C) can come between taking a lock and releasing it. Who
        tells or reads of a failure must get through all the same.

        Args:
            index: whose slot.
            limit_s: longest time in seconds to wait for the lock.
            or_without: after that go on without it.

        Raises:
            DeadlineError: somebody held it for longer.
        """
        offset, taken = self._offset(_SLOT_LOCK, index), True
        if not self.locks.try_acquire(offset):
            deadline = time.monotonic() + limit_s
            while not self.locks.try_acquire(offset):
                if time.monotonic() < deadline:
                    time.sleep(_NAP_S)
                elif or_without:
                    taken = False
                    break
                else:
                    holders = self._holders(offset) or [self._me]
                    raise DeadlineError(
                        f"the control slot of {self.describe(index)} was locked for {limit_s:g} s "
                        f"(odc.timeout_s) by {'; '.join(map(self.describe, holders))}",
                        self._topology.peers[holders[0]],
                    )
        try:
            yield
        finally:
            if taken:
                self.locks.release(offset)

    def synchronize_with(self, indices: Iterable[int], limit_s: float) -> None:
        """See what these ranks wrote before they last gave up the locks of their slots."""
        for index in indices:
            if index != self._me:
                with self.locked(index, limit_s):
                    pass

    def _holders(self, offset: int) -> Sequence[int]:
        pid = self.locks.holder(offset)
        found = np.flatnonzero(self.words[:, Word.PID] == pid).tolist() if pid else []
        return found or [index for index in range(self._size) if index != self._me]

    def _offset(self, kind: int, index: int) -> int:
        return kind * self._size + index

    # -- drawing work ----------------------------------------------------------------------------------

    def draw(self, serial: int, limit_s: float) -> int:
        """The next number of minibatch ``serial`` that no rank of the node has drawn, from 0.

        Args:
            serial: number of the minibatch.
            limit_s: longest time in seconds to wait for the lock of the slot that counts.

        Raises:
            UsageError: another rank draws from a later minibatch already.
            DeadlineError: the slot was locked for longer.
        """
        shared = self.words[0]
        with self.locked(0, limit_s):
            if shared[Word.DRAWN_FROM] > serial:
                raise UsageError(
                    f"{self.describe(self._me)}: minibatch {serial} of the loader is over, another rank is "
                    f"at minibatch {shared[Word.DRAWN_FROM]}; every rank iterates over every minibatch and "
                    "calls step() after each"
                )
            if shared[Word.DRAWN_FROM] < serial:
                shared[Word.DRAWN] = 0  # before its minibatch: see num_drawn
                shared[Word.DRAWN_FROM] = serial
            number = int(shared[Word.DRAWN])
            shared[Word.DRAWN] = number + 1
        return number

    def note_drawn(self, serial: int, count: int, limit_s: float) -> None:
        """Leave for this node's ranks that ``count`` numbers of minibatch ``serial`` are drawn, at least."""
        shared = self.words[0]
        with self.locked(0, limit_s):
            if (shared[Word.DRAWN_FROM], shared[Word.DRAWN]) < (serial, count):
                shared[Word.DRAWN] = count
                shared[Word.DRAWN_FROM] = serial

    def num_drawn(self, serial: int) -> int:
        """How many numbers of minibatch ``serial`` are known to be drawn.

        Without the lock: who sees the minibatch sees a count of it, as that is stored first.
        """
        shared = self.words[0]
        return int(shared[Word.DRAWN]) if shared[Word.DRAWN_FROM] == serial else 0

    # -- words for messages ----------------------------------------------------------------------------

    def describe(self, index: int) -> str:
        """Name a rank, with host and process id."""
        text = self._topology.describe(self._topology.peers[index])
        pid = int(self.words[index, Word.PID])
        return f"{text[:-1]}, pid {pid})" if pid else text

    def where(self, index: int) -> str:
        """Where a rank is in its program, and whom another rank than this one waits for itself."""
        text, waits_for = self.place(index), int(self.words[index, Word.WAITS_FOR]) - 1
        return (
            f"{text} (itself waiting for rank {waits_for})" if waits_for >= 0 and index != self._me else text
        )

    def place(self, index: int) -> str:
        """Where a rank is in its program."""
        words = self.words[index]
        text = f"step {words[Word.STEP]}"
        phase = Phase(int(words[Word.PHASE]))
        if phase in (Phase.FORWARD, Phase.BACKWARD, Phase.BETWEEN):
            text += f", micro-batch {words[Word.MICRO_BATCH]}"
        return f"{text}, {phase.label}"
