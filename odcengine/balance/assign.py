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

It ends within :data:`TOLERANCE` of the lower bound, or when its allowance is used up. Integers only, and the
same on every machine: see ``exchange.py``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from odcengine.balance.exchange import Exchange, Pair, Ranks, best_exchanges

TOLERANCE = 1e-4
"""The search ends at that much above the lower bound, as a share of it: far below the noise of real times."""

PACE = 1024
"""Pace of the fastest rank."""

_MAX_SLOWNESS = 64
_RANK_BITS = 20
_STEERED_SWEEPS = 3  # in which the last rank's partner is the first, and so on; random ones later
_TOLERANCES = (1e-3, 3e-4, TOLERANCE)  # one after the other
_PAIRS_PER_RANK = 16  # that are looked at, on average
_MAX_PARTNERS = 16  # of a rank in a sweep
_PATIENCE, _PATIENCE_AFTER_KICK = 12, 3  # sweeps in which the last rank stays as it is
_KICKS = 16
_KICKED_SAMPLES = 256  # no kicks with more

FindExchanges = Callable[[Ranks, Sequence[Pair], int], "list[Exchange | None]"]


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
    num_ranks = len(speeds)
    crowded = [
        math.fsum(falling[j * num_ranks - j : j * num_ranks + 1])
        for j in range(1, (len(falling) - 1) // num_ranks + 1)
    ]
    total = math.fsum(falling) + per_micro_batch * num_micro_batches
    return max(total / math.fsum(speeds), (max([falling[0], *crowded]) + per_micro_batch) / max(speeds))


def assign(
    weights: Sequence[int], paces: Sequence[int], find: FindExchanges = best_exchanges
) -> list[list[int]]:
    """Deal samples to ranks.

    Args:
        weights: of the samples, falling; 1 to 2**24.
        paces: of the ranks, by :func:`paces_of`.
        find: the implementation that finds exchanges.

    Returns:
        For each rank its samples, heaviest first.
    """
    ranks = longest_first(weights, paces)
    if weights:
        _Search(ranks, find).run()
    return _rotated(ranks)


def _rotated(ranks: Ranks) -> list[list[int]]:
    """Shares of samples, passed on among ranks of one pace.

    Else the first ranks would have the longest samples in every minibatch, and what those cost more or less
    than predicted would look like a difference between ranks.
    """
    shift = sum(ranks.weights)
    shares = ranks.samples.copy()
    of_pace: dict[int, list[int]] = {}
    for rank, pace in enumerate(ranks.paces):
        of_pace.setdefault(pace, []).append(rank)
    for alike in of_pace.values():
        for place, rank in enumerate(alike):
            shares[alike[(place + shift) % len(alike)]] = ranks.samples[rank]
    return shares


def longest_first(weights: Sequence[int], paces: Sequence[int]) -> Ranks:
    """The heaviest sample that is left goes to the rank that would be done with it first."""
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
    ranks = Ranks(list(weights), list(paces), samples, [0] * len(paces), [0] * len(paces))
    for rank, share in enumerate(samples):
        ranks.give(rank, share)
    return ranks


class _Search:
    """Improves an assignment in place."""

    def __init__(self, ranks: Ranks, find: FindExchanges) -> None:
        self._ranks = ranks
        self._find = find
        speeds = [1 / pace for pace in ranks.paces]
        self._bound = lower_bound(ranks.weights, speeds)
        self._target = self._bound * (1 + TOLERANCE)
        # Two ranks are dealt their samples anew in the best of all ways if they have few.
        self._max_pool = 12 if len(ranks.paces) <= 128 else 10
        self._dice = 1

    def run(self) -> None:
        ranks = self._ranks
        self._improve(ranks, _PATIENCE)
        if len(ranks.weights) > _KICKED_SAMPLES or len(ranks.paces) < 3:
            return
        for _ in range(_KICKS):
            if max(ranks.times) <= self._bound * (1 + _TOLERANCES[0]):
                return
            other = ranks.copy()
            self._kick(other)
            self._improve(other, _PATIENCE_AFTER_KICK)
            if max(other.times) <= max(ranks.times):
                ranks.samples, ranks.loads, ranks.times = other.samples, other.loads, other.times

    def _improve(self, ranks: Ranks, patience: int) -> None:
        """Sweep until all ranks are done by the bound, the last one cannot be helped, or it was enough."""
        self._allowance = _PAIRS_PER_RANK * len(ranks.paces)
        for tolerance in _TOLERANCES:
            self._target = self._bound * (1 + tolerance)
            best, idle_sweeps, sweep = math.inf, 0, 0
            while max(ranks.times) > self._target:
                last = max(ranks.times)
                idle_sweeps = 0 if last < best else idle_sweeps + 1
                if idle_sweeps > patience or self._allowance <= 0:
                    return
                best = last
                if not self._sweep(ranks, shuffled=sweep >= _STEERED_SWEEPS):
                    return
                sweep += 1

    def _sweep(self, ranks: Ranks, shuffled: bool) -> bool:
        """Every late rank makes its best exchange with one of its partners; False where all was tried."""
        order = sorted(range(len(ranks.paces)), key=ranks.times.__getitem__)
        num_late = sum([time > self._target for time in ranks.times])
        early, late = order[: len(order) - num_late], order[: -num_late - 1 : -1]
        late = late[: len(early)]
        if not late:
            return False
        shift = self._random(len(early)) if shuffled else 0
        num_partners = min(_MAX_PARTNERS, len(early) // len(late))
        partners = [early[(place + shift) % len(early)] for place in range(num_partners * len(late))]
        pairs = list(zip(late * num_partners, partners, strict=True))
        self._allowance -= len(pairs)
        found = self._find(ranks, pairs, self._max_pool)
        for place in range(len(late)):
            choices = [
                (exchange.time, choice)
                for choice, exchange in enumerate(found[place :: len(late)])
                if exchange is not None
            ]
            if choices:
                choice = place + min(choices)[1] * len(late)
                self._apply(ranks, pairs[choice], found[choice])
        everybody_asked = len(late) == 1 and num_partners == len(early)
        return not everybody_asked or any(found)

    @staticmethod
    def _apply(ranks: Ranks, pair: Pair, exchange: Exchange | None) -> None:
        if exchange is not None:
            ranks.give(pair[0], exchange.first)
            ranks.give(pair[1], exchange.second)

    def _kick(self, ranks: Ranks) -> None:
        """Pass one sample each on around a ring of the last rank and one to three others."""
        num_ranks = len(ranks.paces)
        ring = [max(range(num_ranks), key=ranks.times.__getitem__)]
        for _ in range(1 + self._random(3)):
            ring.append(self._random(num_ranks))
        ring = [rank for rank in dict.fromkeys(ring) if ranks.samples[rank]]
        picked = [ranks.samples[rank][self._random(len(ranks.samples[rank]))] for rank in ring]
        for place, rank in enumerate(ring):
            kept = [sample for sample in ranks.samples[rank] if sample != picked[place]]
            ranks.give(rank, sorted([*kept, picked[place - 1]]))

    def _random(self, below: int) -> int:
        """Pseudo-random numbers (a linear congruential generator): always the same sequence."""
        self._dice = (self._dice * 1103515245 + 12345) % (1 << 31)
        return (self._dice >> 8) % below
