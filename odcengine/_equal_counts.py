"""Equal numbers of micro-batches on all ranks, where communication is collective: who runs more is told."""

from __future__ import annotations

import numpy as np

from odcengine._slots import Slots
from odcengine._words import Phase, Word
from odcengine.errors import UsageError


class EqualCounts:
    """Compares how many micro-batches the ranks of this node run in a minibatch.

    Args:
        slots: what the ranks of this node say.
        index: local index of this rank.
    """

    def __init__(self, slots: Slots, index: int) -> None:
        self._slots = slots
        self._me = index
        self._ended: tuple[int, int] | None = None

    def end(self, step: int, count: int, limit_s: float) -> None:
        """Say that this rank has run all ``count`` micro-batches of its share of minibatch ``step``.

        Args:
            step: optimizer step, from 0.
            count: micro-batches.
            limit_s: longest time in seconds to wait for the lock of this rank's slot.
        """
        with self._slots.locked(self._me, limit_s):
            self._slots.mine[Word.ENDED_COUNT] = count
            self._slots.mine[Word.ENDED_STEP] = step + 1
        self._ended = (step, count)

    def have_met(self) -> None:
        """All ranks have ended their shares: nobody runs more of the same minibatch."""
        self._ended = None

    def check_nobody_ended(self, step: int, count: int) -> None:
        """Raise where a rank ended minibatch ``step`` with fewer than ``count`` micro-batches.

        Raises:
            UsageError: names both ranks and counts.
        """
        words = self._slots.words
        ended = (words[:, Word.ENDED_STEP] == step + 1) & (words[:, Word.ENDED_COUNT] < count)
        if ended.any():
            fewer = int(ended.argmax())
            self._raise(step, self._me, count, fewer, int(words[fewer, Word.ENDED_COUNT]))

    def check_nobody_has_more(self, limit_s: float) -> None:
        """Raise where this rank has ended its share, and another one runs more micro-batches.

        Args:
            limit_s: longest time in seconds to wait for the lock of that one's slot.

        Raises:
            UsageError: names both ranks and counts.
        """
        if self._ended is None:
            return
        step, count = self._ended
        more = self._running_more(step, count)
        if more is not None:
            # Words of one moment: what was read before is not read again.
            self._slots.synchronize_with((more,), limit_s)
            if self._running_more(step, count) == more:
                at_least = int(self._slots.words[more, Word.MICRO_BATCH]) + 1
                self._raise(step, more, at_least, self._me, count)

    def _running_more(self, step: int, count: int) -> int | None:
        words = self._slots.words
        # In the opposite order of writing: a rank moves its micro-batch on before it enters the next one.
        beyond = (words[:, Word.STEP] == step) & (words[:, Word.MICRO_BATCH] >= count)
        beyond &= np.isin(words[:, Word.PHASE], (Phase.FORWARD, Phase.BACKWARD))
        return int(beyond.argmax()) if beyond.any() else None

    def _raise(self, step: int, more: int, at_least: int, fewer: int, count: int) -> None:
        describe = self._slots.describe
        raise UsageError(
            f"{describe(more)} has at least {at_least} micro-batches in step {step}, "
            f"{describe(fewer)} only {count}. odc.transport: collective and odc.lockstep need the same "
            "number on every rank (balance.strategy: lb_micro or local_sort); the on-demand transports do not"
        )
