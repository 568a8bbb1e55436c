"""The best exchange of samples between two ranks: what the search in ``assign.py`` is made of.

There are two implementations with equal results to the last sample: plain Python, which is the one to read,
and numpy, which looks at many pairs of ranks at once and is faster from a few pairs on. All numbers are
integers, so that neither the order of additions nor the CPU can change a result.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]

_PAIRS_FOR_NUMPY = 4
_SUMS_AT_ONCE = 1 << 17
_SUMS_ANYWAY = 1 << 13  # so few that it does not matter how many there are


@dataclass
class Ranks:
    """What each rank has to do.

    Samples are numbered heaviest first, so that a rising list of numbers is a list of falling weights.

    Attributes:
        weights: of all samples, falling; 0 to 2**24.
        paces: of each rank the time per weight; slow ranks have more.
        samples: of each rank, rising.
        loads: of each rank the sum of its samples' weights.
        times: of each rank the load by the pace.
    """

    weights: list[int]
    paces: list[int]
    samples: list[list[int]]
    loads: list[int]
    times: list[int]

    def give(self, rank: int, samples: list[int]) -> None:
        """Replace the samples of a rank."""
        self.samples[rank] = samples
        self.loads[rank] = load = sum([self.weights[sample] for sample in samples])
        self.times[rank] = load * self.paces[rank]

    def copy(self) -> Ranks:
        """The same, to be changed independently."""
        return Ranks(self.weights, self.paces, self.samples.copy(), self.loads.copy(), self.times.copy())


class Exchange(NamedTuple):
    """Two ranks' samples after an exchange, rising, and when the later of the two is done."""

    time: int
    first: list[int]
    second: list[int]


Pair = tuple[int, int]


def best_exchanges(ranks: Ranks, pairs: Sequence[Pair], max_pool: int) -> list[Exchange | None]:
    """For each pair of ranks the exchange after which the later one is done earliest.

    Two ranks with at most ``max_pool`` samples together are dealt these anew, in the best of all ways.
    Of others one sample moves, or two swap.

    Args:
        ranks: what they have; not changed.
        pairs: two ranks each. They need not be disjoint: each pair is looked at for itself.
        max_pool: see above; the work doubles with every sample.

    Returns:
        For each pair its exchange; None where no exchange is better than what there is.
    """
    if len(pairs) < _PAIRS_FOR_NUMPY:
        return best_exchanges_python(ranks, pairs, max_pool)
    return best_exchanges_numpy(ranks, pairs, max_pool)


# ---- plain Python --------------------------------------------------------------------------------------


def best_exchanges_python(ranks: Ranks, pairs: Sequence[Pair], max_pool: int) -> list[Exchange | None]:
    """:func:`best_exchanges` without numpy."""
    found = []
    for first, second in pairs:
        small = len(ranks.samples[first]) + len(ranks.samples[second]) <= max_pool
        exchange = (_best_split if small else _best_swap)(ranks, first, second)
        found.append(exchange if exchange.time < max(ranks.times[first], ranks.times[second]) else None)
    return found


def _best_split(ranks: Ranks, first: int, second: int) -> Exchange:
    """Of all subsets of the two ranks' samples the one for the first rank."""
    pool = ranks.samples[first] + ranks.samples[second]
    first_pace, second_pace = ranks.paces[first], ranks.paces[second]
    sums = [0]  # of the subset whose binary digits are the index
    for sample in pool:
        weight = ranks.weights[sample]
        sums += [weight + smaller for smaller in sums]
    total = sums[-1]
    # With this sum for the first rank both would be done at the same time; the best is one of its neighbours.
    ideal = total * second_pace // (first_pace + second_pace)
    neighbours = [max([value for value in sums if value <= ideal])]
    neighbours += [min([value for value in sums if value > ideal], default=0)]
    time, subset = min(
        (max(value * first_pace, (total - value) * second_pace), sums.index(value)) for value in neighbours
    )
    return _split(time, pool, subset)


def _split(time: int, pool: list[int], subset: int) -> Exchange:
    kept = [sample for digit, sample in enumerate(pool) if subset >> digit & 1]
    given = [sample for digit, sample in enumerate(pool) if not subset >> digit & 1]
    return Exchange(time, sorted(kept), sorted(given))


def _best_swap(ranks: Ranks, first: int, second: int) -> Exchange:
    """Of all pairs of samples the one to swap; one of the two may be nothing, which makes it a move."""
    mine, theirs = ranks.samples[first], ranks.samples[second]
    first_pace, second_pace = ranks.paces[first], ranks.paces[second]
    # With that much less for the first rank both would be done at the same time.
    surplus = (ranks.times[first] - ranks.times[second]) // (first_pace + second_pace)
    rising = [0] + [ranks.weights[sample] for sample in reversed(theirs)]
    best_time, best_give, best_take = max(ranks.times[first], ranks.times[second]), 0, 0
    for give, gives in enumerate([0] + [ranks.weights[sample] for sample in mine]):
        above = bisect_left(rising, gives - surplus)
        for take in (max(0, above - 1), min(above, len(rising) - 1)):
            change = gives - rising[take]
            time = max(
                (ranks.loads[first] - change) * first_pace, (ranks.loads[second] + change) * second_pace
            )
            if time < best_time:
                best_time, best_give, best_take = time, give, take
    return _swap(best_time, mine, theirs, best_give, best_take)


def _swap(time: int, mine: list[int], theirs: list[int], give: int, take: int) -> Exchange:
    """Swap my ``give``-th heaviest for their ``take``-th lightest sample; 0 is none."""
    kept, others = mine.copy(), theirs.copy()
    given = [kept.pop(give - 1)] if give else []
    taken = [others.pop(-take)] if take else []
    return Exchange(time, sorted(kept + taken), sorted(others + given))


# ---- numpy ---------------------------------------------------------------------------------------------


def best_exchanges_numpy(ranks: Ranks, pairs: Sequence[Pair], max_pool: int) -> list[Exchange | None]:
    """:func:`best_exchanges` for many pairs at once."""
    found: list[Exchange | None] = [None] * len(pairs)
    sizes = [len(ranks.samples[first]) + len(ranks.samples[second]) for first, second in pairs]
    places = sorted(range(len(pairs)), key=sizes.__getitem__)
    num_small = sum([size <= max_pool for size in sizes])
    start = 0
    while start < num_small:
        # Pools of about one size at once, as many as a cache holds the sums of.
        size = sizes[places[start]]
        stop = min(num_small, start + max(1, _SUMS_AT_ONCE >> size))
        while sizes[places[stop - 1]] > size + 1 and stop - start > _SUMS_ANYWAY >> sizes[places[stop - 1]]:
            stop -= 1
        _best_splits(ranks, pairs, places[start:stop], found)
        start = stop
    if num_small < len(pairs):
        _best_swaps(ranks, pairs, places[num_small:], found)
    return found


def _best_splits(
    ranks: Ranks, pairs: Sequence[Pair], places: list[int], found: list[Exchange | None]
) -> None:
    """:func:`_best_split` for some of the pairs; writes what is better than before into ``found``."""
    pools = [ranks.samples[pairs[place][0]] + ranks.samples[pairs[place][1]] for place in places]
    width = max(map(len, pools))
    # Filled up with samples of weight 0 at the end: subsets without these come first.
    values = np.array(
        [[ranks.weights[sample] for sample in pool] + [0] * (width - len(pool)) for pool in pools],
        dtype=np.int32,
    ).reshape(len(pools), width)
    total = values.sum(axis=1, dtype=np.int32)
    first_pace, second_pace, before = _paces_and_times(ranks, pairs, places)
    equal = bool((first_pace == second_pace).all())
    # With equal paces a subset is as good as the rest: the last sample stays with the second rank.
    digits = max(0, width - 1) if equal else width
    # By how much the first rank has more than the second, for each subset: of 2**24 by at most 2**6 samples.
    surplus = np.empty((len(pools), 1 << digits), dtype=np.int32)
    surplus[:, 0] = -total
    for digit in range(digits):
        half = 1 << digit
        np.add(surplus[:, :half], 2 * values[:, digit, None], out=surplus[:, half : 2 * half])
    if equal:
        subsets = np.abs(surplus).argmin(axis=1)  # the first of equals, as in plain Python
    else:
        first_time = (total[:, None] + surplus) // 2 * first_pace[:, None]
        second_time = (total[:, None] - surplus) // 2 * second_pace[:, None]
        subsets = np.maximum(first_time, second_time).argmin(axis=1)
    more = surplus[np.arange(len(pools)), subsets]
    best = np.maximum((total + more) // 2 * first_pace, (total - more) // 2 * second_pace)
    for row in np.flatnonzero(best < before).tolist():
        found[places[row]] = _split(int(best[row]), pools[row], int(subsets[row]))


def _best_swaps(ranks: Ranks, pairs: Sequence[Pair], places: list[int], found: list[Exchange | None]) -> None:
    """:func:`_best_swap` for some of the pairs; writes what is better than before into ``found``."""
    mine = [ranks.samples[pairs[place][0]] for place in places]
    theirs = [ranks.samples[pairs[place][1]] for place in places]
    first_load = np.array([ranks.loads[pairs[place][0]] for place in places], dtype=np.int64)
    second_load = np.array([ranks.loads[pairs[place][1]] for place in places], dtype=np.int64)
    first_pace, second_pace, before = _paces_and_times(ranks, pairs, places)
    surplus = (first_load * first_pace - second_load * second_pace) // (first_pace + second_pace)
    # All lists of a side one behind the other, each with a sample of weight 0 in front.
    weights = np.array(ranks.weights, dtype=np.int64)
    gives, row_of, give_start = _joined(weights, mine)
    rising, take_row, take_start = _joined(weights, [samples[::-1] for samples in theirs])
    # One search in all lists: an offset for each, larger than any weight, keeps them apart.
    offset = int(weights[0]) + 2
    wanted = np.clip(gives - surplus[row_of], 0, offset - 1)
    above = np.searchsorted(rising + take_row * offset, wanted + row_of * offset)
    last = np.append(take_start[1:], len(rising)) - 1
    takes = np.stack([np.maximum(above - 1, take_start[row_of]), np.minimum(above, last[row_of])], axis=1)
    change = gives[:, None] - rising[takes]
    times = np.maximum(
        (first_load[row_of, None] - change) * first_pace[row_of, None],
        (second_load[row_of, None] + change) * second_pace[row_of, None],
    )
    best = np.minimum.reduceat(times.min(axis=1), give_start)
    # The first of equals in each list, as in plain Python.
    order = np.where(times == best[row_of, None], np.arange(times.size).reshape(times.shape), times.size)
    choice = np.minimum.reduceat(order.min(axis=1), give_start)
    for row in np.flatnonzero(best < before).tolist():
        give, side = divmod(int(choice[row]), 2)
        take = int(takes[give, side] - take_start[row])
        found[places[row]] = _swap(int(best[row]), mine[row], theirs[row], give - int(give_start[row]), take)


def _paces_and_times(ranks: Ranks, pairs: Sequence[Pair], places: list[int]) -> tuple[Array, Array, Array]:
    """Paces of both ranks, and when the later one is done; each of shape ``[len(places)]``."""
    rows = [pairs[place] for place in places]
    first = np.array([ranks.paces[first] for first, _ in rows], dtype=np.int64)
    second = np.array([ranks.paces[second] for _, second in rows], dtype=np.int64)
    later = [max(ranks.times[first], ranks.times[second]) for first, second in rows]
    return first, second, np.array(later, dtype=np.int64)


def _joined(weights: Array, lists: list[list[int]]) -> tuple[Array, Array, Array]:
    """Weights of lists of samples, one behind the other, each after a 0; the list of each; its start."""
    counts = np.array([len(samples) + 1 for samples in lists], dtype=np.int64)
    starts = np.cumsum(counts) - counts
    rows = np.repeat(np.arange(len(lists)), counts)
    values = np.zeros(len(rows), dtype=np.int64)
    is_sample = np.ones(len(rows), dtype=bool)
    is_sample[starts] = False
    flat = np.fromiter(itertools.chain.from_iterable(lists), dtype=np.int64, count=len(rows) - len(lists))
    values[is_sample] = weights[flat]
    return values, rows, starts
