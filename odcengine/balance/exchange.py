"""Exchanges of samples between ranks: what the search in ``assign.py`` is made of, in plain Python.

``exchange_numpy.py`` does the same for many ranks at once, with equal results to the last sample. All numbers
are integers, so that neither the order of additions nor the CPU can change a result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

RankNumbers = Sequence[int] | npt.NDArray[np.int64]


class Shares(ABC):
    """Which rank has which samples, and when each is done.

    Samples are numbered heaviest first, so that a rising list of numbers is a list of falling weights.

    Args:
        weights: of all samples, falling; 1 to 2**24.
        paces: of each rank the time per weight; slow ranks have more.
        samples: of each rank, rising.
    """

    @abstractmethod
    def __init__(
        self, weights: Sequence[int], paces: Sequence[int], samples: Sequence[Sequence[int]]
    ) -> None: ...

    @abstractmethod
    def samples(self) -> list[list[int]]:
        """Of each rank its samples, rising."""

    @abstractmethod
    def times(self) -> list[int]:
        """Of each rank when it is done: the sum of its weights by its pace."""

    @abstractmethod
    def latest(self) -> int:
        """When the last rank is done."""

    @abstractmethod
    def divide(self, target: float) -> tuple[RankNumbers, RankNumbers]:
        """Ranks that are done after ``target``, the last first; and the others, the first first."""

    @abstractmethod
    def exchange(
        self, late: RankNumbers, early: RankNumbers, *, shift: int, num_partners: int, max_pool: int
    ) -> int:
        """Each late rank makes the best exchange with one of its partners.

        The best is the one after which the later of the two is done earliest. Two ranks with at most
        ``max_pool`` samples together are dealt these anew, in the best of all ways. Of others one sample
        moves, or two swap. Where no exchange is better than what there is, none is made.

        Args:
            late: the ranks to be helped.
            early: of whom others, from place ``shift`` on and around, are their partners. Each is the
                partner of one late rank at most.
            shift: see there.
            num_partners: of each late rank.
            max_pool: see above; the work doubles with every sample.

        Returns:
            How many exchanges were made.
        """


class Exchange(NamedTuple):
    """Two ranks' samples after an exchange, rising, and when the later of the two is done."""

    time: int
    first: list[int]
    second: list[int]


class ListShares(Shares):
    """:class:`Shares` in plain Python: the one to read, and the faster one for few ranks."""

    def __init__(
        self, weights: Sequence[int], paces: Sequence[int], samples: Sequence[Sequence[int]]
    ) -> None:
        self._weights = weights
        self._paces = paces
        self._samples = [list(share) for share in samples]
        self._loads = [self._sum(share) for share in samples]
        self._times = [load * pace for load, pace in zip(self._loads, paces, strict=True)]

    def samples(self) -> list[list[int]]:
        return self._samples

    def times(self) -> list[int]:
        return self._times

    def latest(self) -> int:
        return max(self._times)

    def divide(self, target: float) -> tuple[list[int], list[int]]:
        order = sorted(range(len(self._times)), key=self._times.__getitem__)
        num_early = sum([time <= target for time in self._times])
        return order[num_early:][::-1], order[:num_early]

    def exchange(self, late: Any, early: Any, *, shift: int, num_partners: int, max_pool: int) -> int:
        num_exchanges = 0
        for place, first in enumerate(late):
            best, partner = None, -1
            for turn in range(num_partners):
                second = early[(shift + turn * len(late) + place) % len(early)]
                exchange = self.best_exchange(first, second, max_pool)
                if exchange is not None and (best is None or exchange.time < best.time):
                    best, partner = exchange, second
            if best is not None:
                self._give(first, best.first)
                self._give(partner, best.second)
                num_exchanges += 1
        return num_exchanges

    def best_exchange(self, first: int, second: int, max_pool: int) -> Exchange | None:
        """The best exchange of two ranks (see :meth:`exchange`); None where none is better than what is."""
        small = len(self._samples[first]) + len(self._samples[second]) <= max_pool
        found = (self._best_split if small else self._best_swap)(first, second)
        return found if found.time < max(self._times[first], self._times[second]) else None

    def _sum(self, samples: Iterable[int]) -> int:
        return sum([self._weights[sample] for sample in samples])

    def _give(self, rank: int, samples: list[int]) -> None:
        self._samples[rank] = samples
        self._loads[rank] = self._sum(samples)
        self._times[rank] = self._loads[rank] * self._paces[rank]

    def _best_split(self, first: int, second: int) -> Exchange:
        """Of all subsets of the two ranks' samples the one for the first rank."""
        pool = sorted(self._samples[first] + self._samples[second])
        first_pace, second_pace = self._paces[first], self._paces[second]
        sums = [0]  # of the subset whose binary digits are the index
        for sample in pool:
            weight = self._weights[sample]
            sums += [weight + smaller for smaller in sums]
        total = sums[-1]
        # With this sum for the first rank both would be done at the same time; the best is a neighbour of it.
        ideal = total * second_pace // (first_pace + second_pace)
        neighbours = [max([value for value in sums if value <= ideal])]
        neighbours += [min([value for value in sums if value > ideal], default=0)]
        time, subset = min(
            (max(value * first_pace, (total - value) * second_pace), sums.index(value))
            for value in neighbours
        )
        kept = [sample for digit, sample in enumerate(pool) if subset >> digit & 1]
        given = [sample for digit, sample in enumerate(pool) if not subset >> digit & 1]
        return Exchange(time, kept, given)

    def _best_swap(self, first: int, second: int) -> Exchange:
        """Of all pairs of samples the one to swap; one of the two may be nothing, which makes it a move."""
        mine, theirs = self._samples[first], self._samples[second]
        first_pace, second_pace = self._paces[first], self._paces[second]
        first_load, second_load = self._loads[first], self._loads[second]
        # With that much less for the first rank both would be done at the same time.
        surplus = (self._times[first] - self._times[second]) // (first_pace + second_pace)
        rising = [-self._weights[sample] for sample in theirs] + [0]  # "nothing" is the last
        best_time, best_give, best_take = max(self._times[first], self._times[second]), 0, 0
        for give, gives in enumerate([self._weights[sample] for sample in mine] + [0]):
            # The first that is lighter than the ideal, rounded up, and the one before it.
            lighter = bisect_right(rising, -max(1, gives - surplus))
            for take in (max(0, lighter - 1), lighter):
                change = gives + rising[take]
                time = max((first_load - change) * first_pace, (second_load + change) * second_pace)
                if time < best_time:
                    best_time, best_give, best_take = time, give, take
        kept = mine[:best_give] + mine[best_give + 1 :] + theirs[best_take : best_take + 1]
        given = theirs[:best_take] + theirs[best_take + 1 :] + mine[best_give : best_give + 1]
        return Exchange(best_time, sorted(kept), sorted(given))
