"""Deal samples to ranks so that the slowest rank is done as early as possible.

The problem is makespan scheduling; the search is a greedy start and exchanges between pairs of ranks:

1. Longest first: the heaviest sample that is left goes to the rank that is done with it earliest (Graham
   1969).
2. Sweeps: the ranks that are done later than some share of the bound are late. Each has some of the other
   ranks as partners, all to itself, and makes the best exchange with one of them. So while many ranks are
   late, many exchanges are made at once; the last ones try many partners. The share is lowered in a few
   steps, since little is to be had from partners that are at the bound themselves.
3. Few samples leave few ways to balance: a kick passes samples around between the last rank and some others,
   and sweeps follow; what is not better is forgotten.

It ends within a tolerance of the lower bound, or when its allowance is used up. Integers only, and the same
on every machine: see ``exchange.py``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from odcengine.balance.exchange import ListShares, Shares
from odcengine.balance.exchange_numpy import ArrayShares

TOLERANCE = 1e-4
"""The search ends at that much above the lower bound, as a share of it: far below the noise of real times."""

PACE = 1024
"""Pace of the fastest rank."""

_MAX_SLOWNESS = 64
_RANK_BITS = 20
_POSITION_BITS = 32
_STEERED_SWEEPS = 3  # in which the last rank's partner is the first, and so on; random ones later
_FIRST_TOLERANCES = (8e-4, 3e-4)  # one after the other, before the last one
_PAIRS_PER_RANK = (24, 2, 4)  # that are looked at, on average, until each of them
_MAX_PARTNERS, _MAX_PARTNERS_OF_MANY = 16, 8  # of a rank in a sweep, if ranks have few or many samples
_PATIENCE, _PATIENCE_AFTER_KICK = 24, 2  # sweeps in which the last rank stays as it is
_KICKS = 48
_KICKED_SAMPLES = 256  # no kicks with more
_RANKS_FOR_ARRAYS, _RANKS_FOR_BLOCKS = 8, 64
_LEAST_BLOCK = 16
_SAMPLES_FOR_NUMPY = 256
_LARGEST_ARRAY = 1 << 22


def paces_of(speeds: Sequence[float]) -> list[int]:
    """Time per weight of ranks with given speeds; whoever is more than 64 times slower counts as that."""
    fastest = max(speeds)
    return [round(PACE * min(_MAX_SLOWNESS, fastest / speed)) for speed in speeds]


def lower_bound(
    falling: Sequence[float],
    speeds: Sequence[float],
    *,
    per_micro_batch: float = 0.0,
    num_micro_batches: int = 0,
) -> float:
    """No assignment of whole samples is done earlier than this.

    The largest of: the mean; the longest sample; and, since one of N ranks has to take ``j + 1`` of the
    heaviest ``j * N + 1`` samples, the sum of the ``j + 1`` lightest of those. The latter two on the fastest
    rank.

    Args:
        falling: costs of the samples, falling.
        speeds: of the ranks.
        per_micro_batch: cost of a micro-batch beside its samples.
        num_micro_batches: at least so many are needed.
    """
    if not falling:
        return 0.0
    num_ranks, fastest = len(speeds), max(speeds)
    total = math.fsum(falling) + per_micro_batch * num_micro_batches
    bound = max(total / math.fsum(speeds), (falling[0] + per_micro_batch) / fastest)
    for j in range(1, (len(falling) - 1) // num_ranks + 1):
        first = j * num_ranks - j
        if ((j + 1) * falling[first] + per_micro_batch) / fastest > bound:  # seldom: the sum may be longer
            crowded = math.fsum(falling[first : first + j + 1])
            bound = max(bound, (crowded + per_micro_batch) / fastest)
    return bound


def assign(
    weights: Sequence[int],
    paces: Sequence[int],
    *,
    tolerance: float = TOLERANCE,
    use_numpy: bool | None = None,
) -> list[list[int]]:
    """Deal samples to ranks.

    Args:
        weights: of the samples; 1 to 2**24.
        paces: of the ranks, by :func:`paces_of`.
        tolerance: how far above the lower bound is near enough, as a share of it.
        use_numpy: None to use it where that is faster. The result is the same.

    Returns:
        For each rank its samples, heaviest first.
    """
    order = heaviest_first(weights, use_numpy=use_numpy)
    falling = [weights[sample] for sample in order]
    in_blocks = len(set(paces)) == 1 and (len(paces) >= _RANKS_FOR_BLOCKS if use_numpy is None else use_numpy)
    numbers = longest_first_numpy(falling, len(paces)) if in_blocks else longest_first(falling, paces)
    if weights and len(paces) > 1:
        fast = _arrays_are_faster(numbers) if use_numpy is None else use_numpy
        search = _Search(falling, paces, tolerance, ArrayShares if fast else ListShares)
        numbers = search.improved(numbers)
    return _rotated([[order[number] for number in share] for share in numbers], sum(weights), paces)


def _arrays_are_faster(samples: list[list[int]]) -> bool:
    """Whether there are many ranks, and none with so many samples that the rows would be mostly empty."""
    return len(samples) >= _RANKS_FOR_ARRAYS and len(samples) * max(map(len, samples)) <= _LARGEST_ARRAY


def heaviest_first(weights: Sequence[int], *, use_numpy: bool | None = None) -> list[int]:
    """Positions of the weights, those of the heaviest first; of equal ones in their order."""
    if use_numpy is False or (use_numpy is None and len(weights) < _SAMPLES_FOR_NUMPY):
        return sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
    # Sorting one number made of both is several times faster than a stable sort.
    keys = np.arange(len(weights), dtype=np.int64) - (np.array(weights, dtype=np.int64) << _POSITION_BITS)
    keys.sort()
    positions: list[int] = (keys & ((1 << _POSITION_BITS) - 1)).tolist()
    return positions


def _rotated(samples: list[list[int]], shift: int, paces: Sequence[int]) -> list[list[int]]:
    """Shares of samples, passed on among ranks of one pace.

    Else the first ranks would have the longest samples in every minibatch, and what those cost more or less
    than predicted would look like a difference between ranks.
    """
    rotated = samples.copy()
    of_pace: dict[int, list[int]] = {}
    for rank, pace in enumerate(paces):
        of_pace.setdefault(pace, []).append(rank)
    for alike in of_pace.values():
        for place, rank in enumerate(alike):
            rotated[alike[(place + shift) % len(alike)]] = samples[rank]
    return rotated


def longest_first(weights: Sequence[int], paces: Sequence[int]) -> list[list[int]]:
    """The heaviest sample that is left goes to the rank that would be done with it first.

    Args:
        weights: of the samples, falling.
        paces: of the ranks.

    Returns:
        For each rank its samples, heaviest first.
    """
    samples: list[list[int]] = [[] for _ in paces]
    # A heap for all ranks of (about) one pace, with entries load * 2**20 + rank.
    heaps: dict[int, list[int]] = {}
    for rank, pace in enumerate(paces):
        heaps.setdefault(pace * 64 // PACE, []).append(rank)
    mask = (1 << _RANK_BITS) - 1
    choices = list(heaps.values())
    heap = choices[0]
    for sample, weight in enumerate(weights):
        if len(choices) > 1:
            heap = min(choices, key=lambda heap: ((heap[0] >> _RANK_BITS) + weight) * paces[heap[0] & mask])
        entry = heap[0]
        samples[entry & mask].append(sample)
        heapq.heapreplace(heap, entry + (weight << _RANK_BITS))
    return samples


def longest_first_numpy(weights: Sequence[int], num_ranks: int) -> list[list[int]]:
    """:func:`longest_first` for ranks of one pace: the same, for many ranks at once.

    In the order in which ranks are free, each takes one of the next samples, as long as none that has taken
    one is free again before.
    """
    entries = np.arange(num_ranks, dtype=np.int64)  # as in the heap, rising
    steps = np.array(weights, dtype=np.int64) << _RANK_BITS
    owners = np.empty(len(steps), dtype=np.int64)
    start = 0
    while start < len(steps):
        after = entries[: len(steps) - start] + steps[start : start + num_ranks]
        again = np.minimum.accumulate(after)[:-1] < entries[1 : len(after)]
        count = 1 + int(again.argmax()) if again.any() else len(after)
        owners[start : start + count] = entries[:count]
        entries[:count] = after[:count]
        entries.sort()
        start += count
        if count < _LEAST_BLOCK:  # a few ranks take all that is left: one at a time
            heap = entries.tolist()
            for sample, step in enumerate(steps[start : start + num_ranks].tolist(), start):
                owners[sample] = heap[0]
                heapq.heapreplace(heap, heap[0] + step)
            entries = np.sort(np.array(heap, dtype=np.int64))
            start += num_ranks
    owners &= (1 << _RANK_BITS) - 1
    samples = np.argsort(owners, kind="stable").tolist()
    stops = np.cumsum(np.bincount(owners, minlength=num_ranks)).tolist()
    return [samples[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


class _Search:
    """Improves who has which samples."""

    def __init__(
        self,
        weights: Sequence[int],
        paces: Sequence[int],
        tolerance: float,
        shares_type: type[Shares],
    ) -> None:
        self._weights = weights
        self._paces = paces
        self._shares_type = shares_type
        self._bound = lower_bound(weights, [1 / pace for pace in paces])
        self._tolerances = [first for first in _FIRST_TOLERANCES if first > tolerance] + [tolerance]
        # Two ranks are dealt their samples anew in the best of all ways if they have few.
        self._max_pool = 12 if len(paces) <= 128 else 10
        few = 2 * len(weights) <= self._max_pool * len(paces)
        self._max_partners = _MAX_PARTNERS if few else _MAX_PARTNERS_OF_MANY
        self._dice = 1

    def improved(self, samples: list[list[int]]) -> list[list[int]]:
        """Samples of each rank, better ones than these."""
        best = self._shares(samples)
        self._improve(best, _PATIENCE)
        if len(self._weights) <= _KICKED_SAMPLES and len(self._paces) > 2:
            for _ in range(_KICKS):
                if best.latest() <= self._bound * (1 + self._tolerances[0]):
                    break
                other = self._kicked(best)
                self._improve(other, _PATIENCE_AFTER_KICK)
                if other.latest() <= best.latest():
                    best = other
        return best.samples()

    def _shares(self, samples: list[list[int]]) -> Shares:
        return self._shares_type(self._weights, self._paces, samples)

    def _improve(self, shares: Shares, patience: int) -> None:
        """Sweep until all ranks are done by the bound, the last one cannot be helped, or it was enough."""
        for tolerance, pairs_per_rank in zip(self._tolerances, _PAIRS_PER_RANK, strict=False):
            target = self._bound * (1 + tolerance)
            allowance = pairs_per_rank * len(self._paces)
            best, idle_sweeps, sweep = math.inf, 0, 0
            while (last := shares.latest()) > target:
                idle_sweeps = 0 if last < best else idle_sweeps + 1
                if idle_sweeps > patience or allowance <= 0:
                    return
                best = last
                num_pairs = self._sweep(shares, target, shuffled=sweep >= _STEERED_SWEEPS)
                if not num_pairs:
                    return
                allowance -= num_pairs
                sweep += 1

    def _sweep(self, shares: Shares, target: float, *, shuffled: bool) -> int:
        """Every late rank makes its best exchange with one of its partners.

        Returns:
            How many pairs were looked at; 0 where nothing is left to try.
        """
        late, early = shares.divide(target)
        late = late[: len(early)]
        if not len(late):
            return 0
        num_partners = min(self._max_partners, len(early) // len(late))
        num_exchanges = shares.exchange(
            late,
            early,
            shift=self._random(len(early)) if shuffled else 0,
            num_partners=num_partners,
            max_pool=self._max_pool,
        )
        everybody_asked = len(late) == 1 and num_partners == len(early)
        return 0 if everybody_asked and not num_exchanges else num_partners * len(late)

    def _kicked(self, shares: Shares) -> Shares:
        """One sample each passed on around a ring of the last rank and one to three others."""
        samples, times = shares.samples(), shares.times()
        num_ranks = len(samples)
        ring = [max(range(num_ranks), key=times.__getitem__)]
        for _ in range(1 + self._random(3)):
            ring.append(self._random(num_ranks))
        ring = [rank for rank in dict.fromkeys(ring) if samples[rank]]
        picked = [samples[rank][self._random(len(samples[rank]))] for rank in ring]
        kicked = samples.copy()
        for place, rank in enumerate(ring):
            kept = [sample for sample in samples[rank] if sample != picked[place]]
            kicked[rank] = sorted([*kept, picked[place - 1]])
        return self._shares(kicked)

    def _random(self, below: int) -> int:
        """Pseudo-random numbers (a linear congruential generator): always the same sequence."""
        self._dice = (self._dice * 1103515245 + 12345) % (1 << 31)
        return (self._dice >> 8) % below
