"""A minibatch of a plan as events: when each rank works on which micro-batch, and when it waits.

What is modelled: a micro-batch takes a rank ::

    max((per_micro_batch + sum over its sequences of linear * l + quadratic * l**2) / speed, traffic_s)

seconds, times its noise. With collectives the ranks meet in every micro-batch, so each step takes what its
slowest rank takes; on demand they meet once, at the end; where work is drawn, too, but after the first
micro-batch of each rank the next one goes to whoever is free first. A boundary follows (agreeing, the
optimizer, publishing).

What is not: contention (ranks that want the same owner's shard at once; a shared network), prefetching, which
lets ranks of a collective run ahead by a layer or so, the time of drawing, and memory.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from odcengine.balance import CostModel, Plan

Array = npt.NDArray[np.float64]
Communication = Literal["collective", "on_demand", "drawn"]


@dataclass(frozen=True)
class Machine:
    """How long the ranks take.

    Args:
        cost: of sequences and micro-batches, in seconds on a rank of speed 1.
        boundary_s: seconds from the ranks' meeting at the end of a minibatch to the start of the next one.
        traffic_s: a micro-batch takes at least this: a rank gets all parameters and hands over all gradients
            in each, whatever else it does in that time.
        speeds: relative speed of each rank; ``()`` where all are 1. More ranks than that have speed 1.
        noise: standard deviation of a micro-batch's time, relative; log-normal, of mean 1.
        meetings: with collectives, how often ranks meet in a micro-batch: layers, forward and backward. Only
            matters with ``jitter``.
        jitter: standard deviation of the time between two meetings, relative; log-normal, of mean 1.
    """

    cost: CostModel
    boundary_s: float = 0.0
    traffic_s: float = 0.0
    speeds: tuple[float, ...] = ()
    noise: float = 0.0
    meetings: int = 1
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for name in ("boundary_s", "traffic_s", "noise", "jitter"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"machine: {name} is {value}, but must be 0 or more")
        if self.meetings < 1:
            raise ValueError(f"machine: meetings is {self.meetings}, but must be 1 or more")
        for rank, speed in enumerate(self.speeds):
            if not 0 < speed < math.inf:
                raise ValueError(f"machine: the speed of rank {rank} is {speed}, but must be above 0")

    def speeds_of(self, num_ranks: int) -> Array:
        """Speed of each rank, shape ``[num_ranks]``."""
        speeds = np.ones(num_ranks)
        known = self.speeds[:num_ranks]
        speeds[: len(known)] = known
        return speeds

    def seconds(self, work_s: Array, speeds: Array) -> Array:
        """Time of micro-batches without noise.

        Args:
            work_s: seconds that their sequences take a rank of speed 1, any shape.
            speeds: of their ranks, same shape.
        """
        return np.maximum((work_s + self.cost.overhead) / speeds, self.traffic_s)


@dataclass(frozen=True)
class Outcome:
    """What happened in a simulated minibatch; seconds from its start.

    Ranks have different numbers of micro-batches. In the arrays of shape ``[ranks, columns]`` what is beyond
    a rank's last one starts, ends and lasts 0 seconds at the end of its work.

    Attributes:
        starts: when each rank began each of its micro-batches, shape ``[ranks, columns]``.
        ends: when it had done its own part of them, same shape; with collectives it may still wait then.
        busy: seconds of work within, same shape.
        counts: micro-batches of each rank, shape ``[ranks]``.
        met_s: when the last rank was done.
        boundary_s: how long the boundary takes that follows.
    """

    starts: Array
    ends: Array
    busy: Array
    counts: npt.NDArray[np.int64]
    met_s: float
    boundary_s: float

    @property
    def step_s(self) -> float:
        """Seconds of the minibatch with its boundary."""
        return self.met_s + self.boundary_s

    @property
    def busy_s(self) -> Array:
        """For each rank its seconds of work, shape ``[ranks]``."""
        return np.asarray(self.busy.sum(axis=1))

    @property
    def idle_shares(self) -> Array:
        """For each rank the share of the time until the meeting that it waited, shape ``[ranks]``.

        As ``StepMetrics.idle_shares`` counts it: the boundary is left out.
        """
        if self.met_s <= 0:
            return np.zeros(len(self.counts))
        return np.maximum(0.0, 1.0 - self.busy_s / self.met_s)

    @property
    def idle_share(self) -> float:
        """Mean of :attr:`idle_shares`."""
        return float(self.idle_shares.mean())


def simulate(plan: Plan, machine: Machine, *, communication: Communication, seed: int = 0) -> Outcome:
    """Run a plan on a machine.

    The times follow from the plan's lengths and the machine alone, not from what the plan assumed as costs.

    Args:
        plan: whose micro-batches run, in their order.
        machine: how long they take.
        communication: ``collective``: all ranks meet in every micro-batch, and run empty ones as well;
            ``on_demand``: they meet at the end, and leave empty ones out; ``drawn``: the same, but whoever is
            free takes the next micro-batch of the whole plan, as it begins them (``dynamic``).
        seed: of noise and jitter.

    Returns:
        What happened.

    Raises:
        ValueError: a plan of unequal counts with collectives, whose ranks would never meet.
    """
    if communication == "drawn":
        return _draw(plan, machine, np.random.Generator(np.random.PCG64(seed)))
    collective = communication == "collective"
    if collective and not plan.equal_counts:
        raise ValueError(
            f"a plan by {plan.strategy} gives ranks different numbers of micro-batches, with which "
            "collectives hang; simulate it on_demand"
        )
    dice = np.random.Generator(np.random.PCG64(seed))
    groups = [[group for group in rank if group or collective] for rank in plan.micro_batches]
    counts = np.array([len(rank) for rank in groups], dtype=np.int64)
    present = np.arange(counts.max(initial=0))[None, :] < counts[:, None]
    work_s = _work_of([group for rank in groups for group in rank], plan, machine.cost)
    speeds = np.broadcast_to(machine.speeds_of(plan.num_ranks)[:, None], present.shape)[present]
    busy: Array = np.zeros((present.shape[0], present.shape[1]))
    busy[present] = machine.seconds(work_s, speeds) * _lognormal(dice, machine.noise, len(work_s))
    if not collective:
        ends = np.cumsum(busy, axis=1)
        return Outcome(ends - busy, ends, busy, counts, float(ends.max(initial=0.0)), machine.boundary_s)
    if not machine.jitter:
        steps = busy.max(axis=0, initial=0.0)
    else:
        steps = np.zeros(busy.shape[1])
        for step in range(busy.shape[1]):
            between = busy[:, step, None] / machine.meetings
            between = between * _lognormal(dice, machine.jitter, plan.num_ranks, machine.meetings)
            busy[:, step] = between.sum(axis=1)
            steps[step] = between.max(axis=0).sum()
    starts = np.broadcast_to(np.cumsum(steps) - steps, busy.shape)
    return Outcome(starts, starts + busy, busy, counts, float(steps.sum()), machine.boundary_s)


def _draw(plan: Plan, machine: Machine, dice: np.random.Generator) -> Outcome:
    """Each rank begins with its own; the others go to whoever is free first. Drawing takes no time."""
    first = [plan.begins_with(rank) for rank in range(plan.num_ranks)]
    groups = [*first, *plan.drawn]
    work_s = _work_of(groups, plan, machine.cost)
    noise = _lognormal(dice, machine.noise, len(groups))
    speeds = machine.speeds_of(plan.num_ranks).tolist()
    seconds = {
        speed: (machine.seconds(work_s, np.full(len(groups), speed)) * noise).tolist()
        for speed in set(speeds)
    }
    drawn = [
        [seconds[speed][rank]] if group else []
        for rank, (speed, group) in enumerate(zip(speeds, first, strict=True))
    ]
    # On ties the fastest rank draws first, so that the numbering of ranks does not matter.
    free = [(sum(drawn[rank]), -speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(free)
    for number in range(len(first), len(groups)):
        time_s, negative, rank = free[0]
        duration = seconds[-negative][number]
        drawn[rank].append(duration)
        heapq.heapreplace(free, (time_s + duration, negative, rank))
    counts = np.array([len(durations) for durations in drawn], dtype=np.int64)
    busy: Array = np.zeros((plan.num_ranks, int(counts.max(initial=0))))
    for rank, durations in enumerate(drawn):
        busy[rank, : len(durations)] = durations
    ends = np.cumsum(busy, axis=1)
    return Outcome(ends - busy, ends, busy, counts, float(ends.max(initial=0.0)), machine.boundary_s)


def _work_of(groups: Sequence[tuple[int, ...]], plan: Plan, cost: CostModel) -> Array:
    """Seconds of the sequences of each micro-batch, shape ``[groups]``."""
    costs = cost(plan.lengths)
    samples = np.fromiter(itertools.chain.from_iterable(groups), dtype=np.int64)
    owner = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    return np.bincount(owner, weights=costs[samples], minlength=len(groups)).astype(np.float64)


def _lognormal(dice: np.random.Generator, spread: float, *shape: int) -> Array:
    """Factors of mean 1 and relative standard deviation ``spread``; ones where that is 0."""
    if not spread:
        return np.ones(shape)
    sigma = math.sqrt(math.log1p(spread * spread))
    return dice.lognormal(-0.5 * sigma * sigma, sigma, shape)
