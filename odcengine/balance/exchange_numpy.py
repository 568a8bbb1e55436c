"""Exchanges of samples between many ranks at once: ``exchange.py`` with numpy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from odcengine.balance.exchange import Shares

Array = npt.NDArray[np.int64]
Samples = npt.NDArray[np.int32]

_SUMS_AT_ONCE = 1 << 18  # as many as a cache holds
_FEW_SUMS = 1 << 14  # that take no longer than the calls
_SPARE = 2  # columns; an exchange by swaps needs one


class ArrayShares(Shares):
    """:class:`Shares` for many ranks, as rows of an array.

    A row holds a rank's samples, rising, and is filled up with "nothing", a sample of weight 0 that is
    numbered behind all others. So a move is a swap with nothing, and rows stay sorted by falling weight.
    """

    def __init__(
        self, weights: Sequence[int], paces: Sequence[int], samples: Sequence[Sequence[int]]
    ) -> None:
        self._nothing = len(weights)
        self._weights: Array = np.array([*weights, 0], dtype=np.int64)
        self._paces: Array = np.array(paces, dtype=np.int64)
        self._equal_paces = bool((self._paces == self._paces[0]).all())
        self._counts: Array = np.array([len(share) for share in samples], dtype=np.int64)
        width = int(self._counts.max()) + _SPARE
        self._held: Samples = np.full((len(paces), width), self._nothing, dtype=np.int32)
        self._held[np.arange(width) < self._counts[:, None]] = np.fromiter(
            itertools.chain.from_iterable(samples), dtype=np.int32, count=len(weights)
        )
        self._loads: Array = self._weights[self._held].sum(axis=1)
        self._times: Array = self._loads * self._paces

    def samples(self) -> list[list[int]]:
        return [row[:count] for row, count in zip(self._held.tolist(), self._counts.tolist(), strict=True)]

    def times(self) -> list[int]:
        times: list[int] = self._times.tolist()
        return times

    def latest(self) -> int:
        return int(self._times.max())

    def divide(self, target: float) -> tuple[Array, Array]:
        order = np.argsort(self._times, kind="stable")
        num_early = int((self._times <= target).sum())
        return order[num_early:][::-1], order[:num_early]

    def exchange(self, late: Any, early: Any, *, shift: int, num_partners: int, max_pool: int) -> int:
        num_pairs = len(late) * num_partners
        first = np.tile(late, num_partners)
        second = np.take(early, np.arange(shift, shift + num_pairs), mode="wrap")
        self._widen(max_pool)
        # Of each pair: when it would be done, and what it would do (a subset, or what to give and to take).
        time, what = np.empty(num_pairs, dtype=np.int64), np.empty((num_pairs, 2), dtype=np.int64)
        sizes = self._counts[first] + self._counts[second]
        split = sizes <= max_pool
        sizes = self._merged(sizes, split)
        for size in np.unique(sizes[split]).tolist():
            of_size = np.flatnonzero(split & (sizes == size))
            step = max(1, _SUMS_AT_ONCE >> size)
            for start in range(0, len(of_size), step):
                pairs = of_size[start : start + step]
                time[pairs], what[pairs, 0] = self._best_splits(first[pairs], second[pairs], size)
        if not split.all():
            pairs = np.flatnonzero(~split)
            time[pairs], what[pairs] = self._best_swaps(first[pairs], second[pairs])
        # The best partner of each late rank, the first of equals.
        best = time.reshape(num_partners, -1).argmin(axis=0) * len(late) + np.arange(len(late))
        best = best[time[best] < np.maximum(self._times[first[best]], self._times[second[best]])]
        self._split(first, second, what[:, 0], best[split[best]])
        self._swap(first, second, what, best[~split[best]])
        return len(best)

    @staticmethod
    def _merged(sizes: Array, split: npt.NDArray[np.bool_]) -> Array:
        """Sizes of pools, all the largest where that is little work: nothing fills the smaller ones up."""
        largest = int(sizes.max(where=split, initial=0))
        return np.full_like(sizes, largest) if int(split.sum()) << largest <= _FEW_SUMS else sizes

    def _widen(self, max_pool: int) -> None:
        """Makes room for what an exchange can bring."""
        missing = max(max_pool, int(self._counts.max()) + 1) + 1 - self._held.shape[1]
        if missing > 0:
            self._held = np.pad(
                self._held, ((0, 0), (0, missing + _SPARE)), constant_values=np.int32(self._nothing)
            )

    def _give(self, ranks: Array, rows: Samples) -> None:
        rows.sort(axis=1)
        self._held[ranks] = rows
        self._counts[ranks] = (rows < self._nothing).sum(axis=1)
        self._loads[ranks] = self._weights[rows].sum(axis=1)
        self._times[ranks] = self._loads[ranks] * self._paces[ranks]

    def _pools(self, first: Array, second: Array) -> Samples:
        """The samples of both ranks of each pair, rising, nothing behind."""
        return np.sort(np.concatenate([self._held[first], self._held[second]], axis=1), axis=1)

    def _best_splits(self, first: Array, second: Array, size: int) -> tuple[Array, Array]:
        """Of all subsets of each pair's samples the one for the first rank; all pairs have ``size``.

        Returns:
            When each pair is done, and the subset as binary digits.
        """
        values = self._weights[self._pools(first, second)[:, :size]].astype(np.int32)
        total = values.sum(axis=1, dtype=np.int32)
        first_pace, second_pace = self._paces[first], self._paces[second]
        # With equal paces a subset is as good as the rest: the last sample stays with the second rank.
        digits = size - 1 if self._equal_paces else size
        # By how much the first rank has more than the second, for each subset: at most 2**6 samples of 2**24.
        surplus = np.empty((len(first), 1 << digits), dtype=np.int32)
        surplus[:, 0] = -total
        for digit in range(digits):
            half = 1 << digit
            np.add(surplus[:, :half], 2 * values[:, digit, None], out=surplus[:, half : 2 * half])
        if self._equal_paces:
            subsets = np.abs(surplus).argmin(axis=1)  # the first of equals, as in plain Python
        else:
            first_time = (total[:, None] + surplus) // 2 * first_pace[:, None]
            second_time = (total[:, None] - surplus) // 2 * second_pace[:, None]
            subsets = np.maximum(first_time, second_time).argmin(axis=1)
        more = surplus[np.arange(len(first)), subsets]
        return np.maximum((total + more) // 2 * first_pace, (total - more) // 2 * second_pace), subsets

    def _split(self, first: Array, second: Array, subsets: Array, pairs: Array) -> None:
        """Deal each of ``pairs`` its samples anew."""
        if not len(pairs):
            return
        pools = self._pools(first[pairs], second[pairs])
        digits = np.minimum(np.arange(pools.shape[1]), 62)  # what is behind is nothing
        to_first = subsets[pairs, None] >> digits & 1 == 1
        width = self._held.shape[1]
        kept, given = np.where(to_first, pools, self._nothing), np.where(to_first, self._nothing, pools)
        self._give(first[pairs], np.sort(kept, axis=1)[:, :width].astype(np.int32))
        self._give(second[pairs], np.sort(given, axis=1)[:, :width].astype(np.int32))

    def _best_swaps(self, first: Array, second: Array) -> tuple[Array, Array]:
        """Of each pair the two samples to swap; one of the two may be nothing, which makes it a move.

        Returns:
            When each pair is done; and the columns of the first's and of the second's sample, ``[pairs, 2]``.
        """
        mine, theirs = self._weights[self._held[first]], self._weights[self._held[second]]
        num_pairs, width = mine.shape
        first_pace, second_pace = self._paces[first], self._paces[second]
        first_load, second_load = self._loads[first], self._loads[second]
        surplus = (first_load * first_pace - second_load * second_pace) // (first_pace + second_pace)
        # One search in all rows: an offset for each, larger than any weight, keeps them apart.
        rows = np.arange(num_pairs)
        heaviest = int(self._weights[0])
        offset = rows[:, None] * (heaviest + 2)
        wanted = np.clip(mine - surplus[:, None], 1, heaviest + 1)
        # The first that is lighter than the ideal, rounded up, and the one before, in the flattened rows.
        place = np.searchsorted((offset - theirs).ravel(), (offset - wanted).ravel(), side="right")
        place = place.reshape(mine.shape)
        takes = np.stack([np.maximum(place - 1, rows[:, None] * width), place], axis=2)
        change = (mine[:, :, None] - theirs.ravel()[takes]).reshape(num_pairs, -1)
        if self._equal_paces:
            # The later one is later by half of what is left of the difference.
            best = np.abs(2 * change - (first_load - second_load)[:, None]).argmin(axis=1)
        else:
            first_time = (first_load[:, None] - change) * first_pace[:, None]
            second_time = (second_load[:, None] + change) * second_pace[:, None]
            best = np.maximum(first_time, second_time).argmin(
                axis=1
            )  # the first of equals, as in plain Python
        change = change[rows, best]
        time = np.maximum((first_load - change) * first_pace, (second_load + change) * second_pace)
        return time, np.stack([best // 2, takes.reshape(num_pairs, -1)[rows, best] % width], axis=1)

    def _swap(self, first: Array, second: Array, columns: Array, pairs: Array) -> None:
        """Make the swap of each of ``pairs``."""
        if not len(pairs):
            return
        mine, theirs = self._held[first[pairs]], self._held[second[pairs]]
        rows = np.arange(len(pairs))
        give, take = (rows, columns[pairs, 0]), (rows, columns[pairs, 1])
        mine[give], theirs[take] = theirs[take], mine[give]
        self._give(first[pairs], mine)
        self._give(second[pairs], theirs)
