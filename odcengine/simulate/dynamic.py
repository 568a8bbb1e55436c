"""Ranks that draw their work: bundles of sequences, the longest first, from a shared counter.

Not in the engine yet: the simulator tells what it would be worth. A bundle is a micro-batch. Each costs a
rank the parameters once, so sequences that are too short to hide that are put together; more than that would
only leave ranks with large bundles at the end.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from odcengine.balance import CostModel
from odcengine.simulate.minibatch import Array, Machine, Outcome, lognormal

_FIXED_SHARE = 0.1


def make_bundles(
    lengths: Sequence[int],
    cost: CostModel,
    *,
    least: float,
    max_tokens: int | None,
    max_samples: int | None = None,
) -> list[tuple[int, ...]]:
    """Put sequences together until a bundle costs enough, in the order in which they are drawn.

    Args:
        lengths: tokens of each sequence.
        cost: of a sequence.
        least: what the sequences of a bundle shall cost at least where limits permit, in the costs' unit.
        max_tokens: limit of a bundle; None for none.
        max_samples: limit of a bundle; None for none.

    Returns:
        Positions in ``lengths`` of each bundle, the costliest bundle first.
    """
    costs = cost(lengths).tolist()
    tokens = [int(length) for length in lengths]
    bundles: list[list[int]] = []
    loads: list[float] = []
    open_tokens = 0
    for sample in sorted(range(len(tokens)), key=lambda sample: (-costs[sample], sample)):
        fits = bool(bundles) and loads[-1] < least
        if fits and max_tokens is not None:
            fits = open_tokens + tokens[sample] <= max_tokens
        if fits and max_samples is not None:
            fits = len(bundles[-1]) < max_samples
        if not fits:
            bundles.append([])
            loads.append(0.0)
            open_tokens = 0
        bundles[-1].append(sample)
        loads[-1] += costs[sample]
        open_tokens += tokens[sample]
    order = sorted(range(len(bundles)), key=lambda index: (-loads[index], index))
    return [tuple(bundles[index]) for index in order]


def least_bundle_s(machine: Machine) -> float:
    """Seconds of work that hide the traffic of a micro-batch and ten times its fixed cost."""
    return max(machine.traffic_s, machine.cost.per_micro_batch / _FIXED_SHARE)


def simulate_dynamic(
    lengths: Sequence[int],
    machine: Machine,
    *,
    num_ranks: int,
    max_tokens: int | None,
    max_samples: int | None = None,
    seed: int = 0,
) -> Outcome:
    """Run a minibatch of bundles, each taken by the rank that is free first.

    Args:
        lengths: tokens of each sequence.
        machine: how long the ranks take; drawing takes no time.
        num_ranks: number of ranks.
        max_tokens: limit of a micro-batch; None for none.
        max_samples: limit of a micro-batch; None for none.
        seed: of the noise.

    Returns:
        What happened.
    """
    dice = np.random.Generator(np.random.PCG64(seed))
    bundles = make_bundles(
        lengths,
        machine.cost,
        least=least_bundle_s(machine),
        max_tokens=max_tokens,
        max_samples=max_samples,
    )
    costs = machine.cost(lengths).tolist()
    work = np.array([sum([costs[sample] for sample in bundle]) for bundle in bundles])
    speeds = machine.speeds_of(num_ranks)
    noise = lognormal(dice, machine.noise, len(bundles))
    # On ties the fastest rank draws first, so that the numbering of ranks does not matter.
    free = [(0.0, -speed, rank) for rank, speed in enumerate(speeds.tolist())]
    heapq.heapify(free)
    drawn: list[list[float]] = [[] for _ in range(num_ranks)]
    kinds = sorted(set(speeds.tolist()))
    seconds = {kind: (machine.seconds(work, np.full(len(work), kind)) * noise).tolist() for kind in kinds}
    for bundle in range(len(bundles)):
        time_s, negative, rank = free[0]
        duration = seconds[-negative][bundle]
        drawn[rank].append(duration)
        heapq.heapreplace(free, (time_s + duration, negative, rank))
    counts = np.array([len(durations) for durations in drawn], dtype=np.int64)
    busy: Array = np.zeros((num_ranks, counts.max(initial=0)))
    for rank, durations in enumerate(drawn):
        busy[rank, : len(durations)] = durations
    ends = np.cumsum(busy, axis=1)
    return Outcome(ends - busy, ends, busy, counts, float(ends.max(initial=0.0)), machine.boundary_s)
