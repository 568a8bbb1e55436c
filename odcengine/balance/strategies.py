"""How samples become micro-batches of ranks, one function a strategy; ``plan.py`` says what they are for.

Each takes integer weights of the samples, so that all ranks decide alike, and returns for each rank its
micro-batches in their order of execution; the samples of each are rising.
"""

from __future__ import annotations

import heapq

import numpy as np

from odcengine.balance.assign import assign, heaviest_first
from odcengine.balance.dynamic import deal_out, make_bundles
from odcengine.balance.packing import Group, Limits, pack


def _weight(weights: list[int], group: Group) -> int:
    return sum([weights[sample] for sample in group])


def _rising(ranks: list[list[Group]]) -> list[list[Group]]:
    return [[sorted(group) for group in groups] for groups in ranks]


# ---- local_sort ----------------------------------------------------------------------------------------


def local_sort(weights: list[int], limits: Limits, num_ranks: int) -> list[list[Group]]:
    """Shares of equal count, each sorted by length and cut as it comes."""
    share, rest = divmod(len(limits.lengths), num_ranks)
    ranks: list[list[Group]] = []
    start = 0
    for rank in range(num_ranks):
        stop = start + share + (rank < rest)
        ordered = sorted(range(start, stop), key=lambda sample: (-limits.lengths[sample], sample))
        ranks.append(_cut_in_order(ordered, limits))
        start = stop
    count = max(len(groups) for groups in ranks)
    return _rising([_split_to_count(groups, count, weights) for groups in ranks])


def _cut_in_order(samples: Group, limits: Limits) -> list[Group]:
    """Cut a list of samples into micro-batches without changing its order."""
    groups: list[Group] = []
    num_tokens = 0
    for sample in samples:
        length = limits.lengths[sample]
        if groups and limits.allow(num_tokens + length, len(groups[-1]) + 1):
            groups[-1].append(sample)
            num_tokens += length
        else:
            groups.append([sample])
            num_tokens = length
    return groups


def _split_to_count(groups: list[Group], count: int, weights: list[int]) -> list[Group]:
    """Split the heaviest micro-batches until there are ``count``; fill up with empty ones at the end."""
    groups = list(groups)
    while len(groups) < count:
        splittable = [index for index, group in enumerate(groups) if len(group) > 1]
        if not splittable:
            groups.append([])
            continue
        index = max(splittable, key=lambda index: (_weight(weights, groups[index]), -index))
        group = groups[index]
        total = np.cumsum([weights[sample] for sample in group])
        cut = 1 + int(np.argmin(np.abs(2 * total[:-1] - total[-1])))
        groups[index : index + 1] = [group[:cut], group[cut:]]
    return groups


# ---- lb_micro ------------------------------------------------------------------------------------------


def lb_micro(weights: list[int], limits: Limits, paces: list[int]) -> list[list[Group]]:
    """Micro-batches of similar weight; those of one step are of neighbouring weight."""
    num_ranks = len(paces)
    num_steps = -(-limits.min_groups() // num_ranks)
    groups = _balanced_groups(weights, limits, paces * num_steps)
    while groups is None:
        num_steps += 1
        groups = _balanced_groups(weights, limits, paces * num_steps)
    ranks: list[list[Group]] = [[] for _ in paces]
    for pace in sorted(set(paces)):
        # Among ranks of one pace the heaviest micro-batches, one for each, make up the first step, and so on.
        alike = [rank for rank in range(num_ranks) if paces[rank] == pace]
        theirs = [groups[step * num_ranks + rank] for step in range(num_steps) for rank in alike]
        theirs.sort(key=lambda group: (-_weight(weights, group), group))
        loads = dict.fromkeys(alike, 0)
        for step in range(num_steps):
            by_load = sorted(alike, key=lambda rank: (loads[rank], rank))
            of_step = theirs[step * len(alike) : (step + 1) * len(alike)]
            for rank, group in zip(by_load, of_step, strict=True):
                ranks[rank].append(group)
                loads[rank] += _weight(weights, group)
    return _rising(ranks)


def _balanced_groups(weights: list[int], limits: Limits, paces: list[int]) -> list[Group] | None:
    """A micro-batch for each of ``paces``, of similar time; None where a sample fits into none of them.

    The heaviest sample first, into the one that is done earliest and has room.
    """
    groups: list[Group] = [[] for _ in paces]
    num_tokens = [0] * len(paces)
    loads = [0] * len(paces)
    by_time = [(0, pace, index) for index, pace in enumerate(paces)]
    heapq.heapify(by_time)
    # Those that had no room for a sample wait here, the emptiest first, until a sample is short enough.
    parked: list[tuple[int, int]] = []
    for sample in heaviest_first(weights):
        length = limits.lengths[sample]
        while parked and limits.allow(parked[0][0] + length, 1):
            index = heapq.heappop(parked)[1]
            heapq.heappush(by_time, (loads[index] * paces[index], paces[index], index))
        while by_time:
            index = by_time[0][2]
            if limits.allow(num_tokens[index] + length, len(groups[index]) + 1):
                break
            heapq.heappop(by_time)
            if limits.allow(1, len(groups[index]) + 1):
                heapq.heappush(parked, (num_tokens[index], index))
        if not by_time:
            return None
        groups[index].append(sample)
        num_tokens[index] += length
        loads[index] += weights[sample]
        heapq.heapreplace(by_time, (loads[index] * paces[index], paces[index], index))
    return groups


# ---- lb_mini and dynamic -------------------------------------------------------------------------------


def lb_mini(
    weights: list[int],
    limits: Limits,
    paces: list[int],
    *,
    tolerance: float,
    use_numpy: bool | None,
) -> list[list[Group]]:
    """The sum of each rank is balanced; then each packs its own micro-batches."""
    shares = assign(weights, paces, tolerance=tolerance, use_numpy=use_numpy)
    return pack(shares, weights, limits, use_numpy=use_numpy)


def dynamic(
    weights: list[int],
    limits: Limits,
    paces: list[int],
    *,
    costs: list[int],
    per_micro_batch: int,
    per_cut: int,
    tolerance: float,
    use_numpy: bool | None,
) -> list[list[Group]]:
    """The bundle with which each rank begins, and those that it draws if all costs are right.

    ``costs`` are those of the samples alone, ``weights`` with a part of their micro-batch's; ``per_cut`` is
    what one more micro-batch is taken to cost.
    """
    shares = assign(weights, paces, tolerance=tolerance, use_numpy=use_numpy)
    first, later = make_bundles(shares, costs, limits, paces, per_micro_batch, per_cut)

    def costs_of(bundles: list[Group]) -> list[int]:
        return [_weight(costs, bundle) + per_micro_batch if bundle else 0 for bundle in bundles]

    drawn = deal_out(costs_of(first), costs_of(later), paces)
    return _rising(
        [
            ([own] if own else []) + [later[number] for number in numbers]
            for own, numbers in zip(first, drawn, strict=True)
        ]
    )
