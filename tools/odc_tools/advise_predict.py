"""What ``odc advise`` predicts, and what it concludes from that."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from odc_tools.advise_inputs import Sequences
from odcengine.balance import make_plan
from odcengine.simulate import Communication, Machine, Outcome, simulate

WORTH = 0.05
"""A larger minibatch is worth it where it gains more than this."""
NOTICED = 0.02
"""Less is not worth a sentence."""

_SEQUENCES_SIMULATED = 32768  # a size of minibatches, if that makes two of them or more
_LARGEST = 65536  # sequences in a minibatch
_PART_OF_TRAFFIC = 2  # that dynamic counts as the cost of a bundle: then few are too short to hide it
_PER_GPU = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        strategy: how sequences are dealt to ranks.
        communication: when ranks meet.
    """

    strategy: str
    communication: Communication

    def __str__(self) -> str:
        return f"{'collective' if self.communication == 'collective' else 'on demand'} {self.strategy}"


LOCAL_SORT = Method("local_sort", "collective")
LB_MICRO = Method("lb_micro", "collective")
LB_MINI = Method("lb_mini", "on_demand")
DYNAMIC = Method("dynamic", "drawn")
METHODS = (LOCAL_SORT, LB_MICRO, LB_MINI, DYNAMIC)


@dataclass(frozen=True)
class Prediction:
    """A method, over some minibatches.

    Attributes:
        step_s: mean seconds of a step.
        tokens_per_s: of all ranks.
        idle_share: share of the ranks' time until they meet that they wait.
        idle_shares: of each rank in each minibatch, shape ``[minibatches, ranks]``.
    """

    step_s: float
    tokens_per_s: float
    idle_share: float
    idle_shares: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Size:
    """Minibatches of one size on so many GPUs.

    Attributes:
        gpus: number of ranks.
        sequences: of a minibatch over all ranks.
        minibatches: how many were simulated.
        tokens: of a minibatch, on average.
        bound: what no plan of whole sequences can beat.
        longest_sets: share of the minibatches whose bound is above the mean load: a rank's longest sequences
            set the step.
        of: the prediction of each method.
    """

    gpus: int
    sequences: int
    minibatches: int
    tokens: float
    bound: Prediction
    longest_sets: float
    of: dict[Method, Prediction]

    @property
    def per_gpu(self) -> float:
        """Sequences a GPU."""
        return self.sequences / self.gpus

    def speed_up(self, method: Method) -> float:
        """Over collectives with ``lb_micro``."""
        return self.of[LB_MICRO].step_s / self.of[method].step_s

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "sequences": self.sequences,
            "sequences_per_gpu": self.per_gpu,
            "minibatches_simulated": self.minibatches,
            "tokens": self.tokens,
            "bound": {"step_s": self.bound.step_s, "idle_share": self.bound.idle_share},
            "longest_sets_share": self.longest_sets,
            "methods": [
                {
                    "strategy": method.strategy,
                    "communication": method.communication,
                    "step_s": prediction.step_s,
                    "tokens_per_s": prediction.tokens_per_s,
                    "idle_share": prediction.idle_share,
                    "speed_up": self.speed_up(method),
                }
                for method, prediction in self.of.items()
            ],
        }


@dataclass(frozen=True)
class Limits:
    """Of a micro-batch.

    Attributes:
        max_tokens: tokens.
        max_samples: sequences; None for any number.
    """

    max_tokens: int
    max_samples: int | None


def predict(
    sequences: Sequences, machine: Machine, *, gpus: int, count: int, minibatches: int, limits: Limits
) -> Size:
    """Simulate minibatches with all methods.

    Plans know the speeds of the ranks, as those of a run do after some steps.

    Args:
        sequences: where they are drawn from.
        machine: how fast the ranks are.
        gpus: number of ranks.
        count: sequences of a minibatch.
        minibatches: how many at most; fewer of large ones.
        limits: of a micro-batch.
    """
    minibatches = max(2, min(minibatches, _SEQUENCES_SIMULATED // count))
    speeds = machine.speeds_of(gpus).tolist()
    outcomes: dict[Method, list[Outcome]] = {method: [] for method in METHODS}
    bounds: list[float] = []
    tokens, crowded = 0, 0
    fixed_s = max(machine.cost.overhead, machine.traffic_s / _PART_OF_TRAFFIC)
    bundled = dataclasses.replace(machine.cost, per_micro_batch=fixed_s)
    for number in range(minibatches):
        lengths = sequences.draw(number, count)
        tokens += sum(lengths)
        for method in METHODS:
            plan = make_plan(
                lengths,
                num_ranks=gpus,
                strategy=method.strategy,
                max_tokens=limits.max_tokens,
                max_samples=limits.max_samples,
                cost=bundled if method is DYNAMIC else machine.cost,
                speeds=speeds,
            )
            outcome = simulate(plan, machine, communication=method.communication, seed=number)
            if method is LB_MINI:
                bounds.append(max(plan.bound, machine.traffic_s))
                crowded += bounds[-1] > 1.001 * sum(plan.loads) / sum(speeds)
            outcomes[method].append(outcome)
    bound_s = sum(bounds) + minibatches * machine.boundary_s
    busy_s = sum(float(outcome.busy_s.mean()) for outcome in outcomes[LB_MINI])
    idle = max(0.0, 1 - busy_s / sum(bounds))
    bound = Prediction(bound_s / minibatches, tokens / bound_s, idle, np.zeros((0, gpus)))
    of = {method: _summarize(outcomes[method], tokens) for method in METHODS}
    return Size(gpus, count, minibatches, tokens / minibatches, bound, crowded / minibatches, of)


def _summarize(outcomes: Sequence[Outcome], tokens: int) -> Prediction:
    total = sum(outcome.step_s for outcome in outcomes)
    met = sum(outcome.met_s for outcome in outcomes)
    busy = float(np.mean([outcome.busy_s for outcome in outcomes])) * len(outcomes)
    return Prediction(
        step_s=total / len(outcomes),
        tokens_per_s=tokens / total,
        idle_share=max(0.0, 1 - busy / met),
        idle_shares=np.stack([outcome.idle_shares for outcome in outcomes]),
    )


def sizes_to_try(gpus: int, count: int, available: int | None) -> list[int]:
    """Sequences a minibatch: powers of two a GPU up to 32, and the one asked for."""
    most = min(_LARGEST, available or _LARGEST)
    return sorted({count, *(gpus * each for each in _PER_GPU if gpus * each <= most)})


# ---- conclusions ---------------------------------------------------------------------------------------


def advise(asked: Size, sizes: Sequence[Size], machine: Machine, limits: Limits) -> list[str]:
    """What to do, with the reasons.

    Args:
        asked: minibatches of the size that was asked for.
        sizes: the same GPUs with minibatches of several sizes.
        machine: what they were simulated on.
        limits: of a micro-batch.
    """
    if asked.gpus == 1:
        return ["One GPU waits for nobody: neither the plan nor the communication matters for its speed."]
    return [
        _on_strategy(asked),
        *_on_traffic(machine, limits),
        *_on_dynamic(asked),
        *_on_size(asked, sizes),
    ]


def _on_strategy(asked: Size) -> str:
    gain = asked.speed_up(LB_MINI) - 1
    waiting, left = asked.of[LB_MICRO].idle_share, asked.of[LB_MINI].idle_share
    if gain >= NOTICED:
        text = (
            f"Use lb_mini on demand: {1 + gain:.2f}x the speed of collectives with lb_micro, whose ranks "
            f"meet in every micro-batch and wait {waiting:.0%} of the time; with lb_mini they wait "
            f"{left:.0%}."
        )
        if asked.bound.idle_share > WORTH:
            text += f" {_longest(asked)}"
        return text
    if gain <= -NOTICED:
        return (
            f"Stay with lb_micro at these limits: lb_mini on demand is {-gain:.0%} slower, since it fills "
            "micro-batches one after the other, and those that are not full take as long as their traffic."
        )
    if asked.bound.idle_share > WORTH:
        return (
            f"The strategy hardly matters at this size (lb_mini on demand {gain:+.1%} over collectives with "
            f"lb_micro). {_longest(asked)}"
        )
    return (
        f"Collectives with lb_micro are near the bound (idle {waiting:.1%}): lb_mini on demand gains "
        f"{gain:+.1%}, so it is worth it only if its communication is the faster one on your machine (odc "
        "bench)."
    )


def _longest(asked: Size) -> str:
    if asked.longest_sets > 0.5:
        return (
            f"The longest sequence sets the step: {asked.bound.idle_share:.0%} of the time is idle with any "
            "plan of whole sequences; only larger minibatches or shorter sequences help."
        )
    return f"{asked.bound.idle_share:.0%} of the time is idle with any plan of whole sequences."


def _on_traffic(machine: Machine, limits: Limits) -> list[str]:
    """Micro-batches that are too short for what they have to move."""
    linear = machine.cost.linear
    full_s = linear * limits.max_tokens
    if not machine.traffic_s or limits.max_samples is not None or full_s >= 2 * machine.traffic_s:
        return []
    tokens = -(-round(4 * machine.traffic_s / linear) // 1024) * 1024
    return [
        f"Micro-batches are short: {limits.max_tokens:,} tokens compute for {full_s:.2g} s, and their "
        f"parameters and gradients take {machine.traffic_s:.2g} s. Raise --max-tokens "
        f"(max_tokens_per_micro_batch), to {tokens:,} if memory permits."
    ]


def _on_dynamic(asked: Size) -> list[str]:
    gain = asked.of[LB_MINI].step_s / asked.of[DYNAMIC].step_s - 1
    if gain < NOTICED:
        return []
    return [
        f"dynamic gains {gain:.0%} over lb_mini: ranks draw work while they compute, which evens out what "
        "plans cannot know beforehand."
    ]


def _on_size(asked: Size, sizes: Sequence[Size]) -> list[str]:
    best = max(size.of[LB_MINI].tokens_per_s for size in sizes)
    enough = next(size for size in sizes if size.of[LB_MINI].tokens_per_s >= best / (1 + WORTH))
    largest = sizes[-1]
    gain = enough.of[LB_MINI].tokens_per_s / asked.of[LB_MINI].tokens_per_s - 1
    if enough.sequences > asked.sequences:
        text = (
            f"Minibatches of {_words(enough)} are worth it for speed: {gain:+.0%} tokens/s with lb_mini over "
            f"{_words(asked)}. Larger ones gain less than {WORTH:.0%}."
        )
    elif enough.sequences < asked.sequences:
        text = (
            f"Minibatches need not be larger for speed: {_words(enough)} give within {WORTH:.0%} of the "
            "tokens/s of any size tried."
        )
    else:
        text = f"Minibatches of {_words(asked)} are large enough: no size gains {WORTH:.0%} with lb_mini."
    near = next((size for size in sizes if size.of[LB_MICRO].tokens_per_s >= best / (1 + WORTH)), None)
    if near is None:
        text += f" Collectives with lb_micro do not come within {WORTH:.0%} of that at any size tried."
    elif near.sequences > enough.sequences:
        text += f" Collectives with lb_micro need {_words(near)} to come within {WORTH:.0%} of that."
    if enough is largest and enough.sequences > asked.sequences:
        text = text.replace(f" Larger ones gain less than {WORTH:.0%}.", " No larger ones were tried.")
    text += " (The size of a minibatch is also a matter of learning; this only looks at speed.)"
    texts = [text]
    if (left := largest.of[LB_MINI].idle_share) > 2 * WORTH:
        texts.append(
            f"Even {_words(largest)} leave {left:.0%} idle: a few sequences are far longer than the others. "
            "Cut or leave out the longest (data.max_length), or use fewer GPUs."
        )
    return texts


def _words(size: Size) -> str:
    return f"{size.sequences:,} sequences ({size.per_gpu:.3g} a GPU)"
