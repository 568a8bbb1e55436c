"""One rank's share of a minibatch: its micro-batches, as planned or as it draws them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator
from typing import Any

from odcengine.balance.plan import Plan

logger = logging.getLogger(__name__)


class Minibatch:
    """One rank's share of the samples of one optimizer step: an iterable of micro-batches.

    ``len(minibatch)`` is the number of micro-batches that iterating gives on this rank; other ranks may have
    more or fewer, also none. Each iteration reads the samples anew, so it can be repeated. With ``dynamic``
    ranks draw micro-batches until none is left: their number is not known before, and iterating again gives
    none.

    Args:
        plan: the plan of all ranks; its positions index ``sample_ids``.
        rank: this rank.
        sample_ids: data set indices of the samples of all ranks.
        index: number of this minibatch within its epoch.
        epoch: the epoch.
        num_targets_global: positions with a target over the samples of all ranks, or None where the data
            set does not tell (then it has to be counted while working, and agreed on).
        num_samples_without_targets: samples, over all ranks, that have nothing to learn; None as above.
        load: gives the micro-batches of this minibatch, each behind the data set indices of its samples.
        run_empty: also give a dummy for every empty micro-batch.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        rank: int,
        sample_ids: tuple[int, ...],
        index: int,
        epoch: int,
        num_targets_global: int | None,
        num_samples_without_targets: int | None,
        load: Callable[[Minibatch], Generator[tuple[tuple[int, ...], Any], None, None]],
        run_empty: bool,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.sample_ids = sample_ids
        self.index = index
        self.epoch = epoch
        self.num_targets_global = num_targets_global
        self.num_samples_without_targets = num_samples_without_targets
        self._load = load
        self._planned = tuple(self._ids_of(group) for group in plan.micro_batches[rank] if group or run_empty)
        self._handed_out: tuple[int, ...] | None = None
        self._num_handed_out = 0  # in the last iteration
        self._ended = False  # it, too
        # In the thread that plans: on many ranks it takes a while.
        self.num_to_draw = len(plan.drawn) if plan.strategy == "dynamic" else 0
        self._draw: Callable[[], int] | None = None
        self.drawn_last = -2  # number of the bundle; -1: the one that is not drawn; -2: none yet

    def draw_from(self, draw: Callable[[], int]) -> None:
        """Have iterating give the bundles that this rank draws instead of its share of the plan.

        Args:
            draw: the next number that no rank has drawn yet, from 0; they count ``plan.drawn``.
        """
        self._draw = draw

    @property
    def num_samples_global(self) -> int:
        """Number of samples over all ranks."""
        return len(self.sample_ids)

    @property
    def handed_out(self) -> tuple[int, ...]:
        """Data set indices of the samples of the micro-batch given last; none for a stand-in."""
        return self._handed_out or ()

    @property
    def is_dummy(self) -> bool:
        """Whether the micro-batch given last stands for an empty one: its loss must not count.

        A packed dummy (:class:`~odcengine.data.MicroBatch` without samples) has no targets, so its summed
        loss is 0 anyway. The dummy of a ``collate_fn`` of the user's is the minibatch's first sample; whoever
        runs it multiplies its loss by 0.
        """
        return self._handed_out == ()

    def __len__(self) -> int:
        if self._draw is not None:
            raise TypeError(
                "how many micro-batches a rank draws (balance.strategy: dynamic) is not known before"
            )
        return len(self._planned)

    @property
    def share(self) -> tuple[tuple[int, ...], ...]:
        """Data set indices of the samples of each micro-batch that the plan gives this rank."""
        return self._planned

    @property
    def planned(self) -> tuple[tuple[int, ...], ...] | None:
        """Data set indices of the samples of each micro-batch of this rank; None where they are drawn."""
        return self._planned if self._draw is None else None

    def drawn(self) -> Iterator[tuple[int, ...]]:
        """Data set indices of the micro-batch with which this rank begins, and of each that it draws then.

        Each is drawn when it is asked for. A second time there is only what nobody has drawn.
        """
        own, bundles = self.plan.begins_with(self.rank), self.plan.drawn
        if own and self.drawn_last < -1:
            self.drawn_last = -1
            yield self._ids_of(own)
        while self._draw is not None and (number := self._draw()) < len(bundles):
            self.drawn_last = number
            yield self._ids_of(bundles[number])

    def expected(self) -> list[tuple[int, tuple[int, ...]]]:
        """What this rank computes if all costs are right: numbers, rising, and data set indices.

        Numbers as in ``drawn_last``. Those up to that one are with other ranks, or done.
        """
        own = set(self.plan.micro_batches[self.rank][1:])
        first = self.plan.begins_with(self.rank)
        expected = [(number, bundle) for number, bundle in enumerate(self.plan.drawn) if bundle in own]
        return [
            (number, self._ids_of(bundle))
            for number, bundle in ([(-1, first)] if first else []) + expected
            if number > self.drawn_last
        ]

    @property
    def left_early(self) -> bool:
        """Whether the last iteration was left before samples of its end, or there was none at all."""
        return not self._ended and (self._draw is not None or any(self._planned[self._num_handed_out :]))

    def explain_left(self) -> str:
        """Words for messages on how far the last iteration came, where it was left early."""
        count = self._num_handed_out
        if self._draw is not None:
            return f"after {count} micro-batches, before all {self.num_samples_global} samples were drawn"
        left = sum(map(len, self._planned[count:]))
        return f"after {count} of {len(self._planned)} micro-batches, with {left} samples left"

    def _ids_of(self, positions: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([self.sample_ids[position] for position in positions])

    def __iter__(self) -> Iterator[Any]:
        self._num_handed_out, self._ended = 0, False
        with contextlib.closing(self._load(self)) as batches:
            for sample_ids, batch in batches:
                self._handed_out = sample_ids
                self._num_handed_out += 1
                yield batch
        self._handed_out, self._ended = None, True

    def __repr__(self) -> str:
        return (
            f"Minibatch(epoch={self.epoch}, index={self.index}, rank={self.rank}, "
            f"micro_batches={'drawn' if self._draw else len(self)}, samples={self.num_samples_global})"
        )


def warn_of_unused(
    minibatch: Minibatch | None, source: str, *, step: int, num_left: int, num_samples: int | None
) -> None:
    """Log a warning where samples of a step's minibatch are not in it, since the loop over it was left early.

    Args:
        minibatch: that the step was over; None where the script made its own.
        source: who gave it, for the message.
        step: number of the step.
        num_left: ranks that left their loops early. Others compute what is drawn, if there are any.
        num_samples: computed by all ranks together; None where unknown.
    """
    if minibatch is None or not minibatch.left_early:
        return
    drawn, total = minibatch.planned is None, minibatch.num_samples_global
    lost = f"they are in no step, {'no rank has drawn the rest' if drawn else 'no other rank has them'}"
    if drawn and num_left < minibatch.plan.num_ranks:  # others have drawn the rest
        if num_samples is None or num_samples >= total:
            return
        lost = f"{total - num_samples} of them are in no step, as they were drawn before and not computed"
    elif drawn and num_samples == total:
        return
    logger.warning(
        "step %d: rank %d left its loop over %s %s: %s. Go through the loop to its end; "
        "leave samples out before they are planned",
        step,
        minibatch.rank,
        source,
        minibatch.explain_left(),
        lost,
    )


class LocalCounter:
    """Counts draws in one process; ranks of a job share a counter in the control block instead."""

    def __init__(self) -> None:
        self._serial, self._next = 0, 0

    def __call__(self, serial: int, total: int) -> int:
        """The next number of minibatch ``serial``, from 0; ``total`` and later ones stand for no work."""
        if serial != self._serial:
            self._serial, self._next = serial, 0
        self._next += 1
        return self._next - 1
