"""Bundles that ranks draw while they work (``dynamic``).

The samples of a minibatch are cut into bundles. Each rank begins with one of its own; who computes the others
nobody says beforehand. Whoever is free takes the next one, so that wrong costs and slow devices even out by
themselves. How far apart the ranks end is at most the cost of a bundle that is drawn late, so the late ones
are small.

Where the costs are right after all, drawing must not be worse than a plan. So bundles are made from one: the
share of each rank in the plan of ``lb_mini`` is cut, and bundles are drawn in the order in which the plan
begins them. Then ranks end as planned, whatever their speeds: who is done with a bundle is so when its plan
begins the next one, and that is the one to be drawn. The first bundles are the largest, and all of them begin
at once; were they drawn, too, a rank that is known to be slow could get one that was cut for a fast one.
(Costliest first, the usual order, may end a third later than the best plan (Graham, 1969); it ended 3% later
with 4 samples a rank: ``benchmarks/balance.md``.)

Every bundle costs what a micro-batch costs besides its samples. A share is cut as finely as its rank still
ends within 2% of the plan; where that allows no cut, it stays in micro-batches as full as the limits allow.
While that cost is not known yet, that of tokens which hide a micro-batch's traffic is assumed: on GPUs with
a slow host, cuts that were taken to be free made steps up to 2.9 times as long (``benchmarks/gpu.md``).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from odcengine.balance.cost import CostModel
from odcengine.balance.packing import Group, Limits, first_fit

_LATER = 50  # ranks may end by this part of the plan's time later than planned
_PARTS = (32, 16, 8, 4, 2)  # of a rank's mean load: the smallest bundle, from the finest cut to the coarsest
# A micro-batch of so many tokens computes for as long as its parameters and gradients travel over NVLink:
# some 8 bytes and 8 FLOP a token for each parameter, at 0.2 to 0.3 TB/s and 400 TFLOP/s, whatever the model.
_HIDING_TOKENS = 2048


def make_bundles(
    shares: Sequence[Group],
    costs: Sequence[int],
    limits: Limits,
    paces: Sequence[int],
    per_micro_batch: int,
    per_cut: int,
) -> tuple[list[Group], list[Group]]:
    """Cut the shares of a plan into bundles.

    Whole numbers only: all ranks must cut alike.

    Args:
        shares: of each rank its samples in the plan, heaviest first.
        costs: of each sample.
        limits: of a micro-batch; a sample alone fits.
        paces: time per cost of each rank.
        per_micro_batch: what a micro-batch costs besides its samples.
        per_cut: what one more micro-batch is taken to cost, ``per_micro_batch`` or more.

    Returns:
        For each rank the bundle with which it begins, ``[]`` where its share is empty; and the others in the
        order in which they are drawn. Positions of samples, each in exactly one bundle.
    """
    loads = [sum([costs[sample] for sample in share]) for share in shares]
    fewest = [first_fit(share, limits) for share in shares]
    planned_end = max(
        (load + len(bundles) * per_cut) * pace
        for load, bundles, pace in zip(loads, fewest, paces, strict=True)
    )
    end = planned_end + planned_end // _LATER
    mean = sum(loads) // len(shares)
    first: list[Group] = []
    later: list[tuple[int, int, Group]] = []
    for share, bundles, load, pace in zip(shares, fewest, loads, paces, strict=True):
        if len(bundles) < len(share):
            for parts in _PARTS:
                finer = _cut(share, costs, limits, mean // parts)
                if (load + len(finer) * per_cut) * pace <= end:
                    bundles = finer
                    break
        with_costs = [(sum([costs[sample] for sample in bundle]), bundle) for bundle in bundles]
        with_costs.sort(key=lambda both: (-both[0], both[1]))
        first.append(with_costs[0][1] if with_costs else [])
        start = 0
        for number, (cost, bundle) in enumerate(with_costs):
            if number:
                later.append((start * pace, -cost, bundle))
            start += cost + per_micro_batch
    return first, [bundle for _, _, bundle in sorted(later)]


def _cut(share: Group, costs: Sequence[int], limits: Limits, smallest: int) -> list[Group]:
    """Cut a rank's samples into bundles of falling cost.

    Guided self-scheduling (Polychronopoulos and Kuck, 1987): a bundle takes at most half of the cost that is
    left, the heaviest samples first; a heavier sample is a bundle of its own. Up to ``smallest``, and up to
    2,048 tokens, samples are put together in any case; the latter so that computation hides what the
    micro-batch moves. With a limit below that nothing hides it, and a third of the limit is enough.
    """
    hiding = _hiding_tokens(limits)
    left = sum([costs[sample] for sample in share])
    bundles: list[Group] = []
    cost, tokens, before = 0, 0, 0  # of the last bundle, and tokens of the one before
    for sample in share:
        cap = max(smallest, left // 2)
        small = cost + costs[sample] <= cap or tokens + limits.lengths[sample] <= hiding
        if bundles and small and limits.allow(tokens + limits.lengths[sample], len(bundles[-1]) + 1):
            bundles[-1].append(sample)
        else:
            bundles.append([sample])
            left -= cost
            before, cost, tokens = tokens, 0, 0
        cost += costs[sample]
        tokens += limits.lengths[sample]
    if len(bundles) > 1 and tokens < hiding:  # a rest that does not hide its traffic
        merged = bundles[-2] + bundles[-1]
        if limits.allow(before + tokens, len(merged)):
            bundles[-2:] = [merged]
    return bundles


def cost_of_a_cut(cost: object, limits: Limits) -> float:
    """What one more micro-batch is taken to cost, in the unit of ``cost``.

    Where a cost model does not know it, as much as the tokens that hide a micro-batch's traffic.
    """
    if not isinstance(cost, CostModel):
        return 0.0
    return cost.linear * _hiding_tokens(limits) if cost.per_micro_batch is None else cost.per_micro_batch


def _hiding_tokens(limits: Limits) -> int:
    """Tokens of a micro-batch that hide its traffic; with a lower limit nothing does, a third is enough."""
    return _HIDING_TOKENS if limits.most_tokens > _HIDING_TOKENS else limits.most_tokens // 3


def deal_out(first: Sequence[int], costs: Sequence[int], paces: Sequence[int]) -> list[list[int]]:
    """Who draws which bundle if all costs are right: each goes to the rank that is free first.

    Args:
        first: cost of the bundle with which each rank begins, 0 for none.
        costs: of the others, in the order in which they are drawn.
        paces: time per cost of each rank.

    Returns:
        For each rank the bundles that it draws.
    """
    free_at = [(cost * pace, rank) for rank, (cost, pace) in enumerate(zip(first, paces, strict=True))]
    heapq.heapify(free_at)
    drawn: list[list[int]] = [[] for _ in paces]
    for bundle, cost in enumerate(costs):
        time, rank = free_at[0]
        heapq.heapreplace(free_at, (time + cost * paces[rank], rank))
        drawn[rank].append(bundle)
    return drawn
