"""Plans: which rank computes which samples of a minibatch, cut into which micro-batches.

A plan is a pure function of the sample lengths, the number of ranks, the limits, and costs and speeds. Every
rank computes the plan of all ranks for itself; nothing is communicated. That is only sound if all ranks get
the same plan to the last sample, whatever CPU they run on, so the search works on integer costs: sums of
floats may differ in the last bit between CPUs and would then break ties differently.

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

``dynamic``
    Ranks draw bundles of samples, the costliest first, while they work (``odcengine.balance.dynamic``), so
    the plan only says what the bundles are, and who draws which if all costs are right. It needs on-demand
    communication.

With the first two, a rank that has too few samples gets **empty micro-batches** ``()`` at the end, so that
the counts are equal. Where communication is collective, a rank has to run a forward and backward for an
empty micro-batch as well (on a dummy input, with zero loss), since the other ranks wait for it; where
communication is on demand it can be skipped.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from odcengine.balance.assign import FindExchanges, assign, lower_bound, paces_of
from odcengine.balance.cost import CostModel
from odcengine.balance.dynamic import deal_out, make_bundles
from odcengine.balance.exchange import best_exchanges

EQUAL_COUNT_STRATEGIES = ("local_sort", "lb_micro")
STRATEGIES = (*EQUAL_COUNT_STRATEGIES, "lb_mini", "dynamic")

Costs = Callable[[Sequence[int]], "npt.NDArray[np.float64]"]
Group = list[int]

_JSON_VERSION = 2
_LARGEST_WEIGHT = 1 << 24
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
        bound: no assignment of whole samples can be done earlier: the mean load or what the longest samples
            take, in the unit of the costs (``assign.lower_bound``).
        speeds: relative speed of each rank; ``()`` where all are 1.
        lengths: tokens of each sample: what the plan was made from.
    """

    strategy: str
    num_ranks: int
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    costs: tuple[tuple[float, ...], ...]
    bound: float
    speeds: tuple[float, ...] = ()
    lengths: tuple[int, ...] = ()

    @property
    def bundles(self) -> tuple[tuple[int, ...], ...]:
        """All micro-batches, the costliest first: the order in which ``dynamic`` draws them."""
        both = [
            (-cost, group)
            for costs, groups in zip(self.costs, self.micro_batches, strict=True)
            for cost, group in zip(costs, groups, strict=True)
            if group
        ]
        return tuple([group for _, group in sorted(both)])

    @property
    def loads(self) -> tuple[float, ...]:
        """Predicted cost of each rank over the minibatch."""
        return tuple(math.fsum(costs) for costs in self.costs)

    @property
    def times(self) -> tuple[float, ...]:
        """Predicted duration of each rank's own work: its load by its speed."""
        return tuple(load / speed for load, speed in zip(self.loads, self._speeds, strict=True))

    @property
    def _speeds(self) -> tuple[float, ...]:
        return self.speeds or (1.0,) * self.num_ranks

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
        """Predicted duration when ranks meet once a minibatch: the longest time of a rank."""
        return max(self.times, default=0.0)

    @property
    def lockstep_cost(self) -> float:
        """Predicted duration when ranks meet in every micro-batch: the sum of the steps' longest times.

        Defined for plans of equal counts; for others it is infinite, since such ranks would never meet.
        """
        if not self.equal_counts:
            return math.inf
        times = [
            [cost / speed for cost in costs] for costs, speed in zip(self.costs, self._speeds, strict=True)
        ]
        return math.fsum(max(step) for step in zip(*times, strict=True))

    @property
    def predicted_cost(self) -> float:
        """Duration with the communication that the strategy is made for, in the unit of the costs."""
        return self.lockstep_cost if self.strategy in EQUAL_COUNT_STRATEGIES else self.on_demand_cost

    @property
    def idle_share(self) -> float:
        """Predicted share of all ranks' time spent waiting, 0 to 1; the time of a fast rank counts more."""
        return self._idle_share(self.predicted_cost)

    @property
    def idle_share_of_bound(self) -> float:
        """The idle share that no plan can remove, because the longest samples set the step."""
        return self._idle_share(self.bound)

    def _idle_share(self, duration: float) -> float:
        if duration <= 0:
            return 0.0
        return max(0.0, 1.0 - math.fsum(self.loads) / math.fsum(self._speeds) / duration)

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
                speeds=tuple(data["speeds"]),
                lengths=tuple(data["lengths"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a plan: {error!r} in {text[:80]!r}") from error

    def __str__(self) -> str:
        times = self.times
        unavoidable = self.idle_share_of_bound
        reason = ": the longest samples set the step" if unavoidable >= 0.0005 else ""
        lines = [
            f"{self.strategy}: {self.num_samples} samples on {self.num_ranks} ranks, predicted idle share "
            f"{self.idle_share:.1%} ({unavoidable:.1%} with any plan{reason})"
        ]
        for rank, micro_batches in enumerate(self.micro_batches[:_LINES_IN_STR]):
            share = times[rank] / self.bound if self.bound else 0.0
            speed = f" at speed {self.speeds[rank]:.2f}" if self.speeds else ""
            groups = " ".join("[" + " ".join(map(str, samples)) + "]" for samples in micro_batches)
            lines.append(
                f"  rank {rank}: {share:.3f} of the bound{speed}, {len(micro_batches)} micro-batches {groups}"
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
    speeds: Sequence[float] | None = None,
    find: FindExchanges = best_exchanges,
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
        speeds: relative speed of each rank, > 0; None for equal ones. ``local_sort`` takes no notice.
        find: how ``lb_mini`` finds exchanges; ``exchange.best_exchanges_python`` does without numpy and gives
            the same plan.

    Returns:
        The plan; every position of ``lengths`` is in it exactly once.

    Raises:
        ValueError: an argument out of range, or a sample longer than ``max_tokens``, which no plan can place.
    """
    lengths = [int(length) for length in lengths]
    _check_arguments(lengths, num_ranks, strategy, max_tokens, max_samples, speeds)
    cost = cost or CostModel.default()
    per_micro_batch = cost.per_micro_batch if isinstance(cost, CostModel) else 0.0
    costs = np.asarray(cost(lengths), dtype=np.float64) if lengths else np.zeros(0)
    limits = _Limits(lengths, max_tokens, max_samples)
    weights = _integer_weights(costs + per_micro_batch * limits.share_of_group())
    paces = paces_of(speeds or [1.0] * num_ranks)
    if strategy == "local_sort":
        ranks = _local_sort(weights, limits, num_ranks)
    elif strategy == "lb_micro":
        ranks = _lb_micro(weights, limits, paces)
    elif strategy == "dynamic":
        fixed = round(per_micro_batch / costs.max() * _LARGEST_WEIGHT) if lengths else 0
        ranks = _dynamic(weights, limits, speeds or [1.0] * num_ranks, fixed)
    else:
        ranks = _lb_mini(weights, limits, paces, find)
    cost_of = costs.tolist()
    return Plan(
        strategy=strategy,
        num_ranks=num_ranks,
        micro_batches=tuple([tuple([tuple(sorted(group)) for group in rank]) for rank in ranks]),
        costs=tuple(
            [
                tuple(
                    [
                        math.fsum([cost_of[sample] for sample in group]) + (per_micro_batch if group else 0.0)
                        for group in rank
                    ]
                )
                for rank in ranks
            ]
        ),
        bound=lower_bound(
            sorted(cost_of, reverse=True),
            speeds or [1.0] * num_ranks,
            per_micro_batch=per_micro_batch,
            num_micro_batches=limits.min_groups(),
        ),
        speeds=() if speeds is None or set(speeds) == {1.0} else tuple(map(float, speeds)),
        lengths=tuple(lengths),
    )


def _check_arguments(
    lengths: list[int],
    num_ranks: int,
    strategy: str,
    max_tokens: int | None,
    max_samples: int | None,
    speeds: Sequence[float] | None,
) -> None:
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is unknown; choose one of {', '.join(STRATEGIES)}")
    for name, value in (("num_ranks", num_ranks), ("max_tokens", max_tokens), ("max_samples", max_samples)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, but must be at least 1")
    if speeds is not None:
        if len(speeds) != num_ranks:
            raise ValueError(f"speeds has {len(speeds)} numbers for {num_ranks} ranks")
        for rank, speed in enumerate(speeds):
            if not 0 < speed < math.inf:
                raise ValueError(f"the speed of rank {rank} is {speed}, but must be a positive number")
    if not lengths:
        return
    if min(lengths) < 1:
        position = lengths.index(min(lengths))
        raise ValueError(f"sample {position} has {lengths[position]} tokens, but must have at least 1")
    if max_tokens is not None and max(lengths) > max_tokens:
        position = next(index for index, length in enumerate(lengths) if length > max_tokens)
        raise ValueError(
            f"sample {position} has {lengths[position]} tokens, but a micro-batch holds at most "
            f"{max_tokens}; raise the limit to {lengths[position]} or more, or leave out or truncate the "
            "sample"
        )


def _integer_weights(costs: npt.NDArray[np.float64]) -> list[int]:
    """Costs scaled to 1..2**24: products of sums of them with paces stay below 2**63."""
    if not costs.size:
        return []
    if not (np.isfinite(costs).all() and costs.min() >= 0 and costs.max() > 0):
        raise ValueError(
            f"the cost model gave costs from {costs.min()} to {costs.max()}; they must be positive"
        )
    scaled = np.rint(costs / costs.max() * _LARGEST_WEIGHT)
    weights: list[int] = np.maximum(1, scaled).astype(np.int64).tolist()
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

    def share_of_group(self) -> npt.NDArray[np.float64]:
        """How much of a micro-batch each sample takes up; shape ``[n]``."""
        shares = np.zeros(len(self.lengths))
        if self.max_tokens is not None:
            shares = np.asarray(self.lengths, dtype=np.float64) / self.max_tokens
        if self.max_samples is not None:
            shares = np.maximum(shares, 1.0 / self.max_samples)
        return shares


def _heaviest_first(weights: list[int], samples: Iterable[int]) -> Group:
    # Sorting is stable: of equal ones the first comes first.
    return sorted(sorted(samples), key=weights.__getitem__, reverse=True)


def _weight(weights: list[int], group: Group) -> int:
    return sum([weights[sample] for sample in group])


# ---- local_sort ----------------------------------------------------------------------------------------


def _local_sort(weights: list[int], limits: _Limits, num_ranks: int) -> list[list[Group]]:
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


def _lb_micro(weights: list[int], limits: _Limits, paces: list[int]) -> list[list[Group]]:
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
    return ranks


def _balanced_groups(weights: list[int], limits: _Limits, paces: list[int]) -> list[Group] | None:
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
    for sample in _heaviest_first(weights, range(len(limits.lengths))):
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


# ---- lb_mini -------------------------------------------------------------------------------------------


def _lb_mini(weights: list[int], limits: _Limits, paces: list[int], find: FindExchanges) -> list[list[Group]]:
    order = _heaviest_first(weights, range(len(weights)))
    shares = assign([weights[sample] for sample in order], paces, find)
    ranks: list[list[Group]] = []
    for share in shares:
        groups = _first_fit_decreasing([order[number] for number in share], limits)
        ranks.append(sorted(groups, key=lambda group: (-_weight(weights, group), group)))
    return ranks


def _dynamic(
    weights: list[int], limits: _Limits, speeds: Sequence[float], per_micro_batch: int
) -> list[list[Group]]:
    bundles = make_bundles(weights, limits.lengths, limits, len(speeds), per_micro_batch, limits.max_tokens)
    drawn = deal_out([_weight(weights, bundle) for bundle in bundles], speeds)
    return [[bundles[number] for number in of_rank] for of_rank in drawn]


def _first_fit_decreasing(samples: Group, limits: _Limits) -> list[Group]:
    """Pack samples into few micro-batches: longest first, each into the first one that holds it."""
    groups: list[Group] = []
    num_tokens: list[int] = []
    has_room: list[int] = []
    max_tokens = math.inf if limits.max_tokens is None else limits.max_tokens
    max_samples = math.inf if limits.max_samples is None else limits.max_samples
    ordered = sorted(sorted(samples), key=limits.lengths.__getitem__, reverse=True)
    shortest = limits.lengths[ordered[-1]] if ordered else 0
    for sample in ordered:
        length = limits.lengths[sample]
        for index in has_room:
            if num_tokens[index] + length <= max_tokens:
                groups[index].append(sample)
                num_tokens[index] += length
                break
        else:
            index = len(groups)
            groups.append([sample])
            num_tokens.append(length)
            has_room.append(index)
        if num_tokens[index] + shortest > max_tokens or len(groups[index]) >= max_samples:
            has_room.remove(index)
    return groups
