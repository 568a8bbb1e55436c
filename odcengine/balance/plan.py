"""Plans: which rank computes which samples of a minibatch, cut into which micro-batches.

A plan is a pure function of the sample lengths, the number of ranks and the limits. Every rank computes
the plan of all ranks for itself; nothing is communicated. That is only sound if all ranks get the same
plan to the last sample, whatever CPU they run on, so the search works on integer costs: sums of floats
may differ in the last bit between CPUs and would then break ties differently.

Strategies:

``local_sort``
    Samples are dealt out as a distributed sampler would, in contiguous shares of (almost) equal count;
    each rank sorts its own by length. Every rank has the same number of micro-batches.
``lb_micro``
    Costs are balanced within every micro-batch step; every rank has the same number of micro-batches.
    This is all that collectives in every layer can use.
``lb_mini``
    The cost per rank is balanced over the whole minibatch; each rank packs its own micro-batches, so
    their number differs between ranks and may be 0. It needs on-demand communication.

With the first two, a rank that has too few samples gets **empty micro-batches** ``()`` at the end, so that
the counts are equal. Where communication is collective, a rank has to run a forward and backward for an
empty micro-batch as well (on a dummy input, with zero loss), since the other ranks wait for it; where
communication is on demand it can be skipped.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from odcengine.balance.cost import CostModel

EQUAL_COUNT_STRATEGIES = ("local_sort", "lb_micro")
STRATEGIES = (*EQUAL_COUNT_STRATEGIES, "lb_mini")

Costs = Callable[[Sequence[int]], "npt.NDArray[np.float64]"]
Group = list[int]

_JSON_VERSION = 1
# The refinement of lb_mini stops within this share of the bound, or after this many moves a rank.
_TOLERANCE = 1e-4
_MOVES_PER_RANK = 4
# Partners looked at in one refinement step: the ranks with the least work.
_PARTNER_RANKS = 64
# Samples looked at on either side of a swap; beyond that an evenly spaced choice of them.
_CANDIDATES = 2048
_LINES_IN_STR = 16


@dataclass(frozen=True)
class Plan:
    """The assignment of one minibatch to ranks and micro-batches.

    Args:
        strategy: one of :data:`STRATEGIES`.
        num_ranks: number of ranks.
        micro_batches: for each rank its micro-batches in order of execution; a micro-batch is a tuple of
            positions in the list of lengths that the plan was made from. ``()`` is an empty micro-batch.
        costs: for each rank the predicted cost of each of its micro-batches, same nesting.
        bound: ``max(mean load, largest single cost)``: no assignment of whole samples can finish earlier.
    """

    strategy: str
    num_ranks: int
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    costs: tuple[tuple[float, ...], ...]
    bound: float

    @property
    def loads(self) -> tuple[float, ...]:
        """Predicted cost of each rank over the minibatch."""
        return tuple(math.fsum(costs) for costs in self.costs)

    @property
    def num_samples(self) -> int:
        """Number of samples in the minibatch."""
        return sum(len(samples) for rank in self.micro_batches for samples in rank)

    @property
    def equal_counts(self) -> bool:
        """Whether every rank has the same number of micro-batches (what collectives need)."""
        return len({len(rank) for rank in self.micro_batches}) <= 1

    @property
    def on_demand_cost(self) -> float:
        """Predicted duration when ranks meet once a minibatch: the largest load."""
        return max(self.loads, default=0.0)

    @property
    def lockstep_cost(self) -> float:
        """Predicted duration when ranks meet in every micro-batch: the sum of the steps' largest costs.

        Defined for plans of equal counts; for others it is infinite, since such ranks would never meet.
        """
        if not self.equal_counts:
            return math.inf
        return math.fsum(max(step) for step in zip(*self.costs, strict=True))

    @property
    def predicted_cost(self) -> float:
        """Duration with the communication that the strategy is made for, in the unit of the costs."""
        return self.lockstep_cost if self.strategy in EQUAL_COUNT_STRATEGIES else self.on_demand_cost

    @property
    def idle_share(self) -> float:
        """Predicted share of all ranks' time spent waiting: ``1 - mean load / predicted cost``; 0 to 1."""
        return self._idle_share(self.predicted_cost)

    @property
    def idle_share_of_bound(self) -> float:
        """The idle share that no assignment of whole samples can remove (one long sample sets the step)."""
        return self._idle_share(self.bound)

    def _idle_share(self, duration: float) -> float:
        if duration <= 0:
            return 0.0
        return max(0.0, 1.0 - math.fsum(self.loads) / self.num_ranks / duration)

    def to_json(self) -> str:
        """The plan as one line of JSON, with sorted keys: equal plans give equal text."""
        return json.dumps({"version": _JSON_VERSION, **asdict(self)}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote.

        Raises:
            ValueError: the text is no plan, or one of another version.
        """
        data: Any = json.loads(text)
        if not isinstance(data, dict) or data.get("version") != _JSON_VERSION:
            raise ValueError(f"not a plan of version {_JSON_VERSION}: {text[:80]!r}")
        try:
            return cls(
                strategy=data["strategy"],
                num_ranks=data["num_ranks"],
                micro_batches=tuple(
                    tuple(tuple(samples) for samples in rank) for rank in data["micro_batches"]
                ),
                costs=tuple(tuple(rank) for rank in data["costs"]),
                bound=data["bound"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a plan: {error!r} in {text[:80]!r}") from error

    def __str__(self) -> str:
        loads = self.loads
        lines = [
            f"{self.strategy}: {self.num_samples} samples on {self.num_ranks} ranks, "
            f"predicted idle share {self.idle_share:.1%} ({self.idle_share_of_bound:.1%} at the bound)"
        ]
        for rank, micro_batches in enumerate(self.micro_batches[:_LINES_IN_STR]):
            share = loads[rank] / self.bound if self.bound else 0.0
            groups = " ".join("[" + " ".join(map(str, samples)) + "]" for samples in micro_batches)
            lines.append(
                f"  rank {rank}: load {share:.3f} of the bound, {len(micro_batches)} micro-batches {groups}"
            )
        if self.num_ranks > _LINES_IN_STR:
            lines.append(f"  ... and {self.num_ranks - _LINES_IN_STR} more ranks")
        return "\n".join(lines)


def make_plan(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    strategy: str,
    max_tokens: int | None,
    max_samples: int | None = None,
    cost: Costs | None = None,
) -> Plan:
    """Assign the samples of one minibatch to ranks and micro-batches.

    Deterministic, and the same on every machine. Fewer samples than ranks and an empty minibatch are fine.

    Args:
        lengths: tokens of each sample of the minibatch, all >= 1.
        num_ranks: number of ranks, >= 1.
        strategy: one of :data:`STRATEGIES`.
        max_tokens: limit of tokens in a micro-batch, never exceeded; None for no limit.
        max_samples: limit of samples in a micro-batch; None for no limit.
        cost: costs of sequences from their lengths; :meth:`CostModel.default` if None.

    Returns:
        The plan; every position of ``lengths`` is in it exactly once.

    Raises:
        ValueError: an argument out of range, or a sample longer than ``max_tokens``, which no plan can place.
    """
    lengths = [int(length) for length in lengths]
    _check_arguments(lengths, num_ranks, strategy, max_tokens, max_samples)
    costs = (cost or CostModel.default())(lengths) if lengths else np.zeros(0)
    weights = _integer_weights(costs)
    limits = _Limits(lengths, max_tokens, max_samples)
    if strategy == "local_sort":
        ranks = _local_sort(weights, limits, num_ranks)
    elif strategy == "lb_micro":
        ranks = _lb_micro(weights, limits, num_ranks)
    else:
        ranks = _lb_mini(weights, limits, num_ranks)
    return Plan(
        strategy=strategy,
        num_ranks=num_ranks,
        micro_batches=tuple(tuple(tuple(sorted(group)) for group in rank) for rank in ranks),
        costs=tuple(tuple(math.fsum(costs[sorted(group)]) for group in rank) for rank in ranks),
        bound=max(math.fsum(costs) / num_ranks, float(costs.max())) if lengths else 0.0,
    )


def _check_arguments(
    lengths: list[int], num_ranks: int, strategy: str, max_tokens: int | None, max_samples: int | None
) -> None:
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is unknown; choose one of {', '.join(STRATEGIES)}")
    for name, value in (("num_ranks", num_ranks), ("max_tokens", max_tokens), ("max_samples", max_samples)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, but must be at least 1")
    for position, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sample {position} has {length} tokens, but must have at least 1")
        if max_tokens is not None and length > max_tokens:
            raise ValueError(
                f"sample {position} has {length} tokens, but a micro-batch holds at most {max_tokens}; "
                f"raise the limit to {length} or more, or leave out or truncate the sample"
            )


def _integer_weights(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Costs scaled to 1..2**30: sums of up to 2**23 of them are exact, also as float64."""
    if not costs.size:
        return np.zeros(0, dtype=np.int64)
    if not (np.isfinite(costs).all() and costs.min() >= 0 and costs.max() > 0):
        raise ValueError(
            f"the cost model gave costs from {costs.min()} to {costs.max()}; they must be positive"
        )
    weights: npt.NDArray[np.int64] = np.maximum(1, np.rint(costs / costs.max() * 2.0**30)).astype(np.int64)
    return weights


@dataclass(frozen=True)
class _Limits:
    """What fits into one micro-batch."""

    lengths: list[int]
    max_tokens: int | None
    max_samples: int | None

    def allow(self, num_tokens: int, num_samples: int) -> bool:
        return (self.max_tokens is None or num_tokens <= self.max_tokens) and (
            self.max_samples is None or num_samples <= self.max_samples
        )

    def min_groups(self) -> int:
        """At least so many micro-batches are needed for all samples; 1 for no samples."""
        by_tokens = -(-sum(self.lengths) // self.max_tokens) if self.max_tokens else 1
        by_samples = -(-len(self.lengths) // self.max_samples) if self.max_samples else 1
        return max(1, by_tokens, by_samples)


def _heaviest_first(weights: npt.NDArray[np.int64], samples: Sequence[int]) -> Group:
    return sorted(samples, key=lambda sample: (-int(weights[sample]), sample))


def _weight(weights: npt.NDArray[np.int64], group: Group) -> int:
    return int(weights[group].sum()) if group else 0


# ---- local_sort ----------------------------------------------------------------------------------------


def _local_sort(weights: npt.NDArray[np.int64], limits: _Limits, num_ranks: int) -> list[list[Group]]:
    share, rest = divmod(len(limits.lengths), num_ranks)
    ranks: list[list[Group]] = []
    start = 0
    for rank in range(num_ranks):
        stop = start + share + (rank < rest)
        ordered = sorted(range(start, stop), key=lambda sample: (-limits.lengths[sample], sample))
        ranks.append(_cut_in_order(ordered, limits))
        start = stop
    count = max(len(groups) for groups in ranks)
    return [_split_to_count(groups, count, weights) for groups in ranks]


def _cut_in_order(samples: Group, limits: _Limits) -> list[Group]:
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


def _split_to_count(groups: list[Group], count: int, weights: npt.NDArray[np.int64]) -> list[Group]:
    """Split the heaviest micro-batches until there are ``count``; fill up with empty ones at the end."""
    groups = list(groups)
    while len(groups) < count:
        splittable = [index for index, group in enumerate(groups) if len(group) > 1]
        if not splittable:
            groups.append([])
            continue
        index = max(splittable, key=lambda index: (_weight(weights, groups[index]), -index))
        group = groups[index]
        total = np.cumsum(weights[group])
        cut = 1 + int(np.argmin(np.abs(2 * total[:-1] - total[-1])))
        groups[index : index + 1] = [group[:cut], group[cut:]]
    return groups


# ---- lb_micro ------------------------------------------------------------------------------------------


def _lb_micro(weights: npt.NDArray[np.int64], limits: _Limits, num_ranks: int) -> list[list[Group]]:
    num_steps = -(-limits.min_groups() // num_ranks)
    groups = _balanced_groups(weights, limits, num_steps * num_ranks)
    while groups is None:
        num_steps += 1
        groups = _balanced_groups(weights, limits, num_steps * num_ranks)
    # Micro-batches of similar cost share a step: the heaviest num_ranks of them are the first step.
    groups.sort(key=lambda group: (-_weight(weights, group), group))
    ranks: list[list[Group]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for step in range(num_steps):
        by_load = sorted(range(num_ranks), key=lambda rank: (loads[rank], rank))
        for rank, group in zip(by_load, groups[step * num_ranks : (step + 1) * num_ranks], strict=True):
            ranks[rank].append(group)
            loads[rank] += _weight(weights, group)
    return ranks


def _balanced_groups(weights: npt.NDArray[np.int64], limits: _Limits, count: int) -> list[Group] | None:
    """Exactly ``count`` micro-batches of similar cost (heaviest sample first, into the lightest with room).

    Returns None where a sample fits into none of them.
    """
    groups: list[Group] = [[] for _ in range(count)]
    num_tokens = [0] * count
    heap = [(0, index) for index in range(count)]
    for sample in _heaviest_first(weights, range(len(limits.lengths))):
        length = limits.lengths[sample]
        full: list[tuple[int, int]] = []
        while heap and not limits.allow(num_tokens[heap[0][1]] + length, len(groups[heap[0][1]]) + 1):
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, index = heap[0]
        groups[index].append(sample)
        num_tokens[index] += length
        heapq.heapreplace(heap, (load + int(weights[sample]), index))
        for entry in full:
            heapq.heappush(heap, entry)
    return groups


# ---- lb_mini -------------------------------------------------------------------------------------------


def _lb_mini(weights: npt.NDArray[np.int64], limits: _Limits, num_ranks: int) -> list[list[Group]]:
    owner = _longest_processing_time(weights, num_ranks)
    _refine(weights, owner, num_ranks)
    ranks: list[list[Group]] = [[] for _ in range(num_ranks)]
    shares: list[Group] = [[] for _ in range(num_ranks)]
    for sample, rank in enumerate(owner.tolist()):
        shares[rank].append(sample)
    for rank, share in enumerate(shares):
        groups = _first_fit_decreasing(share, limits)
        ranks[rank] = sorted(groups, key=lambda group: (-_weight(weights, group), group))
    return ranks


def _longest_processing_time(weights: npt.NDArray[np.int64], num_ranks: int) -> npt.NDArray[np.int64]:
    """Heaviest sample first to the rank with the least work (Graham 1969): the rank of each sample."""
    owner = np.zeros(len(weights), dtype=np.int64)
    heap = [(0, rank) for rank in range(num_ranks)]
    for sample in _heaviest_first(weights, range(len(weights))):
        load, rank = heap[0]
        owner[sample] = rank
        heapq.heapreplace(heap, (load + int(weights[sample]), rank))
    return owner


def _refine(weights: npt.NDArray[np.int64], owner: npt.NDArray[np.int64], num_ranks: int) -> None:
    """Lower the largest load by moving or swapping samples of that rank; changes ``owner`` in place.

    Every step takes the change after which the larger of the two ranks' loads is least. It ends at the
    bound, when no change helps, or when the allowance of steps is used up.
    """
    if not len(weights):
        return
    loads = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(loads, owner, weights)
    target = max(int(loads.sum()) / num_ranks, int(weights.max())) * (1 + _TOLERANCE)
    for _ in range(_MOVES_PER_RANK * num_ranks):
        top = int(np.argmax(loads))
        if loads[top] <= target:
            return
        partners = np.argsort(loads, kind="stable")[:_PARTNER_RANKS]
        partners = partners[partners != top]
        if not len(partners):
            return
        mine = _thin_out(np.flatnonzero(owner == top))
        theirs = _thin_out(np.flatnonzero(np.isin(owner, partners)))
        # A move is a swap with nothing: one more partner of weight 0 on every rank.
        their_weights = np.concatenate([weights[theirs], np.zeros(len(partners), dtype=np.int64)])
        their_ranks = np.concatenate([owner[theirs], partners])
        delta = weights[mine][:, None] - their_weights[None, :]
        larger = np.maximum(loads[top] - delta, loads[their_ranks][None, :] + delta)
        give, take = np.unravel_index(int(np.argmin(larger)), larger.shape)
        if larger[give, take] >= loads[top]:
            return
        rank = int(their_ranks[take])
        owner[mine[give]] = rank
        if take < len(theirs):
            owner[theirs[take]] = top
        loads[top] -= delta[give, take]
        loads[rank] += delta[give, take]


def _thin_out(samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return samples[:: -(-len(samples) // _CANDIDATES) or 1]


def _first_fit_decreasing(samples: Group, limits: _Limits) -> list[Group]:
    """Pack samples into few micro-batches: longest first, each into the first one that holds it."""
    groups: list[Group] = []
    num_tokens: list[int] = []
    for sample in sorted(samples, key=lambda sample: (-limits.lengths[sample], sample)):
        length = limits.lengths[sample]
        for index, group in enumerate(groups):
            if limits.allow(num_tokens[index] + length, len(group) + 1):
                group.append(sample)
                num_tokens[index] += length
                break
        else:
            groups.append([sample])
            num_tokens.append(length)
    return groups
