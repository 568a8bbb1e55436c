"""Bundles that ranks draw while they work (``dynamic``).

Nobody says beforehand who computes what. The samples of a minibatch are cut into bundles of falling cost, and
whoever is free takes the next one, so that wrong costs and slow devices even out by themselves. How far apart
the ranks end is at most the cost of a bundle that is drawn late, so the late ones are small.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from odcengine.balance.packing import Limits

_SHARE = 2  # a bundle is at most this part, times the ranks, of the work that is left
_MOST_PER_RANK = 32  # more and smaller bundles cost more than they even out
_TIMES_FIXED_COST = 8  # a bundle of several samples hides what every micro-batch costs besides them
# A micro-batch of so many tokens computes for as long as its parameters and gradients travel over NVLink:
# some 8 bytes and 8 FLOP a token for each parameter, at 0.2 to 0.3 TB/s and 400 TFLOP/s, whatever the model.
_HIDING_TOKENS = 2048


def make_bundles(
    costs: Sequence[int],
    lengths: Sequence[int],
    limits: Limits,
    num_ranks: int,
    per_micro_batch: int = 0,
    max_tokens: int | None = None,
) -> list[list[int]]:
    """Cut the samples of a minibatch into bundles, in the order in which they are drawn.

    Guided self-scheduling (Polychronopoulos and Kuck, 1987): a bundle takes at most 1 / (2 ranks) of the
    cost that is left, the heaviest samples first; a heavier sample is a bundle of its own.

    Args:
        costs: of each sample, whole numbers: all ranks must cut alike.
        lengths: tokens of each sample.
        limits: of a micro-batch; a sample alone fits.
        num_ranks: number of ranks.
        per_micro_batch: what a micro-batch costs besides its samples.
        max_tokens: limit of tokens in a micro-batch, or None. Samples that are shorter are put together up to
            2,048 tokens or half the limit, so that computation hides what the micro-batch moves.

    Returns:
        Positions of samples, each in exactly one bundle; the costliest bundle first.
    """
    left = sum(costs)
    smallest = max(_TIMES_FIXED_COST * per_micro_batch, left // (num_ranks * _MOST_PER_RANK))
    hiding = _HIDING_TOKENS if max_tokens is None else min(_HIDING_TOKENS, max_tokens // 2)
    bundles: list[tuple[int, list[int]]] = []
    members: list[int] = []
    cost, tokens = 0, 0
    for sample in sorted(range(len(costs)), key=lambda position: (-costs[position], position)):
        cap = max(smallest, left // (_SHARE * num_ranks))
        small = cost + costs[sample] <= cap or tokens + lengths[sample] <= hiding
        fits = small and limits.allow(tokens + lengths[sample], len(members) + 1)
        if members and not fits:
            bundles.append((cost, members))
            left -= cost
            members, cost, tokens = [], 0, 0
        members.append(sample)
        cost += costs[sample]
        tokens += lengths[sample]
    if members:
        bundles.append((cost, members))
    return [members for _, members in sorted(bundles, key=lambda bundle: (-bundle[0], bundle[1]))]


def deal_out(costs: Sequence[int], speeds: Sequence[float]) -> list[list[int]]:
    """Who draws which bundle if all costs are right: each goes to the rank that is free first.

    Args:
        costs: of the bundles, in the order in which they are drawn.
        speeds: of the ranks.

    Returns:
        For each rank the bundles that it draws.
    """
    free_at = [(0.0, rank) for rank in range(len(speeds))]  # a heap
    drawn: list[list[int]] = [[] for _ in speeds]
    for bundle, cost in enumerate(costs):
        time, rank = free_at[0]
        heapq.heapreplace(free_at, (time + cost / speeds[rank], rank))
        drawn[rank].append(bundle)
    return drawn
