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
    Each rank begins with its own first micro-batch and draws the others, bundles of samples, while it works
    (``odcengine.balance.dynamic``). So of these the plan only says what they are, and who draws which if all
    costs are right. It needs on-demand communication.

With the first two, a rank that has too few samples gets **empty micro-batches** ``()`` at the end, so that
the counts are equal. Where communication is collective, a rank has to run a forward and backward for an
empty micro-batch as well (on a dummy input, with zero loss), since the other ranks wait for it; where
communication is on demand it can be skipped.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from odcengine.balance.assign import TOLERANCE, lower_bound, paces_of
from odcengine.balance.cost import CostModel
from odcengine.balance.dynamic import cost_of_a_cut
from odcengine.balance.packing import Group, Limits
from odcengine.balance.strategies import dynamic, lb_micro, lb_mini, local_sort

EQUAL_COUNT_STRATEGIES = ("local_sort", "lb_micro")
STRATEGIES = (*EQUAL_COUNT_STRATEGIES, "lb_mini", "dynamic")

Costs = Callable[[Sequence[int]], "npt.NDArray[np.float64]"]

_JSON_VERSION = 2
_LARGEST_WEIGHT = 1 << 24
_MOST_OVERHEAD = 1e6  # of a micro-batch, in costs of the costliest sample; more makes no other plan
_LINES_IN_STR = 16


@dataclass(frozen=True)
class Plan:
    """The assignment of one minibatch to ranks and micro-batches.

    Args:
        strategy: one of :data:`STRATEGIES`.
        num_ranks: number of ranks.
        micro_batches: for each rank its micro-batches in order of execution; a micro-batch is a tuple of
            positions in the list of lengths that the plan was made from, rising. ``()`` is an empty
            micro-batch.
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

    @functools.cached_property
    def drawn(self) -> tuple[tuple[int, ...], ...]:
        """What ranks draw with ``dynamic``, in this order: all but the first micro-batch of each.

        They come as the plan begins them, the costliest first of those that begin together.
        """
        begun: list[tuple[float, float, tuple[int, ...]]] = []
        for costs, groups, speed in zip(self.costs, self.micro_batches, self._speeds, strict=True):
            starts = itertools.accumulate(costs, initial=0.0)
            begun += [
                (start / speed, -cost, group)
                for start, cost, group in list(zip(starts, costs, groups, strict=False))[1:]
                if group
            ]
        return tuple([group for _, _, group in sorted(begun)])

    def begins_with(self, rank: int) -> tuple[int, ...]:
        """With ``dynamic`` the micro-batch that ``rank`` does not draw; ``()`` for none."""
        return self.micro_batches[rank][0] if self.micro_batches[rank] else ()

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
    squares: npt.NDArray[np.float64] | None = None,
    tolerance: float = TOLERANCE,
    use_numpy: bool | None = None,
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
        squares: of samples that hold several sequences, the sum of their squared lengths; None where each is
            one. A ``cost`` that is no :class:`CostModel` takes no notice.
        tolerance: how far above the bound is near enough for ``lb_mini``, as a share of it.
        use_numpy: whether ``lb_mini`` searches and packs with numpy; None for where that is faster. The plan
            is the same.

    Returns:
        The plan; every position of ``lengths`` is in it exactly once.

    Raises:
        ValueError: an argument out of range, or a sample longer than ``max_tokens``, which no plan can place.
    """
    lengths = list(map(int, lengths))
    _check_arguments(lengths, num_ranks, strategy, max_tokens, max_samples, speeds)
    cost = cost or CostModel.default()
    per_micro_batch = cost.overhead if isinstance(cost, CostModel) else 0.0
    costs = np.asarray(_costs_of(cost, lengths, squares), dtype=np.float64) if lengths else np.zeros(0)
    limits = Limits(lengths, max_tokens, max_samples)
    weights = _integer_weights(costs + per_micro_batch * limits.share_of_group())
    paces = paces_of(speeds or [1.0] * num_ranks)

    def scaled(value: float) -> int:
        return round(min(value / float(costs.max()), _MOST_OVERHEAD) * _LARGEST_WEIGHT) if lengths else 0

    if strategy == "local_sort":
        ranks = local_sort(weights, limits, num_ranks)
    elif strategy == "lb_micro":
        ranks = lb_micro(weights, limits, paces)
    elif strategy == "dynamic":
        ranks = dynamic(
            weights,
            limits,
            paces,
            costs=_integer_weights(costs),
            per_micro_batch=scaled(per_micro_batch),
            per_cut=scaled(cost_of_a_cut(cost, limits)),
            tolerance=tolerance,
            use_numpy=use_numpy,
        )
    else:
        ranks = lb_mini(weights, limits, paces, tolerance=tolerance, use_numpy=use_numpy)
    cost_of: list[float] = costs.tolist()

    def cost_of_group(group: Group) -> float:
        alone = cost_of[group[0]] if len(group) == 1 else math.fsum(map(cost_of.__getitem__, group))
        return alone + per_micro_batch if group else 0.0

    return Plan(
        strategy=strategy,
        num_ranks=num_ranks,
        micro_batches=tuple([tuple([tuple(group) for group in rank]) for rank in ranks]),
        costs=tuple([tuple([cost_of_group(group) for group in rank]) for rank in ranks]),
        bound=lower_bound(
            np.sort(costs)[::-1].tolist(),
            speeds or [1.0] * num_ranks,
            per_micro_batch=per_micro_batch,
            num_micro_batches=limits.min_groups(),
        ),
        speeds=() if speeds is None or set(speeds) == {1.0} else tuple(map(float, speeds)),
        lengths=tuple(lengths),
    )


def _costs_of(
    cost: Costs, lengths: list[int], squares: npt.NDArray[np.float64] | None
) -> npt.NDArray[np.float64]:
    if squares is None or not isinstance(cost, CostModel):
        return cost(lengths)
    return cost.of(np.asarray(lengths, dtype=np.float64), squares)


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
