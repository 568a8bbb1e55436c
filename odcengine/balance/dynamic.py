"""Bundles that ranks draw while they work (``dynamic``).

Nobody says beforehand who computes what. The samples of a minibatch are cut into bundles of falling cost, and
whoever is free takes the next one, so that wrong costs and slow devices even out by themselves. How far apart
the ranks end is at most the cost of a bundle that is drawn late, so the late ones are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_SHARE = 2  # a bundle is at most this part, times the ranks, of the work that is left
_MOST_PER_RANK = 32  # more and smaller bundles cost more than they even out
_TIMES_FIXED_COST = 8  # a bundle of several samples hides what every micro-batch costs besides them


class Limits(Protocol):
    """Limits of a micro-batch."""

    def allow(self, num_tokens: int, num_samples: int) -> bool:
        """Whether a micro-batch may be so large."""
        ...


def make_bundles(
    costs: Sequence[int],
    lengths: Sequence[int],
    limits: Limits,
    num_ranks: int,
    per_micro_batch: int = 0,
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

    Returns:
        Positions of samples, each in exactly one bundle; the costliest bundle first.
    """
    left = sum(costs)
    smallest = max(_TIMES_FIXED_COST * per_micro_batch, left // (num_ranks * _MOST_PER_RANK))
    bundles: list[tuple[int, list[int]]] = []
    members: list[int] = []
    cost, tokens = 0, 0
    for sample in sorted(range(len(costs)), key=lambda position: (-costs[position], position)):
        cap = max(smallest, left // (_SHARE * num_ranks))
        fits = limits.allow(tokens + lengths[sample], len(members) + 1) and cost + costs[sample] <= cap
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
    free_at = [0.0] * len(speeds)
    drawn: list[list[int]] = [[] for _ in speeds]
    for bundle, cost in enumerate(costs):
        rank = min(range(len(speeds)), key=lambda r: (free_at[r], r))
        free_at[rank] += cost / speeds[rank]
        drawn[rank].append(bundle)
    return drawn
