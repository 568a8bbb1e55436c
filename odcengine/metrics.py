"""What one optimizer step tells about itself, and how a rank counts what it computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from odcengine.data.batch import MicroBatch

Lengths = npt.NDArray[np.int64]
FlopsOf = Callable[[Lengths], float]


@dataclass(frozen=True)
class StepMetrics:
    """Result and times of one optimizer step; equal on all ranks but for the fields named "this rank's".

    Attributes:
        step: number of the step, from 0.
        loss: sum of the losses over all ranks divided by ``count``; nan if there was nothing to count.
        count: what the loss is normalised by: tokens with a target (or sequences) over all ranks.
        grad_norm: 2-norm of the whole gradient before clipping.
        applied: whether the optimizer stepped; not with a non-finite gradient or with nothing to learn.
        lr: learning rate of the first parameter group during the step.
        num_micro_batches: run by all ranks together.
        busy_s: for each rank the seconds from the start of the minibatch (the loader was asked for it, or the
            first forward, backward or ``step()``) to the barrier A, without waiting.
        wait_s: for each rank the seconds it waited for others: at A, for flags, in lock-step barriers; with
            collectives all time inside them, moving data included.
        boundary_s: this rank's seconds from the end of A to the end of ``step()``; a GPU may still be at the
            optimizer's last kernels then.
        gather_s: this rank's seconds getting parameters, waiting included; on a GPU those of the host.
        push_s: this rank's seconds handing over gradients, waiting included; on a GPU those of the host.
        num_samples: samples computed by all ranks together, without stand-ins for empty micro-batches; None
            where a rank got its batches neither from the engine's loader nor as ``MicroBatch``.
        tokens: for each rank the tokens of its samples, padding and stand-ins not counted; None where unknown
            (as ``num_samples``, and where the loader knows no lengths).
        flops: floating-point operations that the model needs for them, forward and backward, over all ranks;
            None where the model's shape is unknown.
        load_s: this rank's seconds in the loader: planning, reading and packing.
        crossed_bytes: this rank's bytes pulled and pushed over node boundaries within the minibatch; 0 with
            hybrid sharding; None with collectives, which nobody counts.
        exchanged_bytes: bytes that this rank sent to other nodes at the boundary; it received as many.
        exchange_s: this rank's seconds in these exchanges between nodes, waiting for other nodes included.
    """

    step: int
    loss: float
    count: float
    grad_norm: float
    applied: bool
    lr: float
    num_micro_batches: int
    busy_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    boundary_s: float
    gather_s: float
    push_s: float
    num_samples: int | None
    tokens: tuple[int, ...] | None
    flops: float | None
    load_s: float
    crossed_bytes: int | None = None
    exchanged_bytes: int = 0
    exchange_s: float = 0.0

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """For each rank the share of the minibatch, up to the end of A, that it waited."""
        return tuple(
            wait / (busy + wait) if busy + wait else 0.0
            for busy, wait in zip(self.busy_s, self.wait_s, strict=True)
        )

    @property
    def step_s(self) -> float:
        """Seconds of the whole step: the longest rank up to the end of A, and the boundary."""
        longest = max(busy + wait for busy, wait in zip(self.busy_s, self.wait_s, strict=True))
        return longest + self.boundary_s

    @property
    def num_tokens(self) -> int | None:
        """Tokens of all ranks together; None where unknown."""
        return None if self.tokens is None else sum(self.tokens)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all ranks together by :attr:`step_s`; None where unknown."""
        return None if self.num_tokens is None or not self.step_s else self.num_tokens / self.step_s


class Tally:
    """Counts what this rank has computed in a minibatch; nan stands for "unknown".

    What the loader has handed out, or a forward has got, counts once a backward follows. What was only
    evaluated (a forward without gradients, or handed out where there are none) does not: a script may go
    through a minibatch before it trains on it.

    Attributes:
        samples: samples, without stand-ins for empty micro-batches.
        micro_batches: with samples in them.
        tokens: tokens of the samples.
        squares: sum of the squares of the lengths of their sequences.
        flops: model FLOP of their forward and backward.
        load_s: seconds in the loader.

    Args:
        lengths: tokens of each sample of the loader's data set; None where it knows none.
        sequences: tokens of each sequence, and the number of each sample's first one and the end, where
            samples hold several.
        has_loader: whether micro-batches come from the engine's loader. Without one, only a ``MicroBatch``
            tells what is in it.
        flops_of: model FLOP of sequences given by their lengths, or None.
    """

    def __init__(
        self,
        lengths: Lengths | None,
        *,
        sequences: tuple[Lengths, Lengths] | None = None,
        has_loader: bool,
        flops_of: FlopsOf | None,
    ) -> None:
        self._lengths = lengths
        self._sequences = sequences
        self._has_loader = has_loader
        self._flops_of = flops_of
        self.reset()

    def reset(self) -> None:
        """Start a minibatch."""
        self.samples = self.micro_batches = self.tokens = self.squares = self.flops = self.load_s = 0.0
        self._handed: list[tuple[int, Lengths | None]] = []  # by the loader, since the last forward
        self._is_evaluated = False  # it, so far
        self._pending: list[tuple[int, Lengths | None]] = []
        self._doubtful: list[tuple[int, Lengths | None]] = []  # the same, of forwards in evaluation mode
        self._balanced: tuple[int, Lengths | None] | None = None
        self._counts_balanced = False

    def loaded(self, seconds: float, sample_ids: Sequence[int] | None, *, has_gradients: bool = True) -> None:
        """The loader was busy, and hands out these samples: none for a stand-in, None for no micro-batch.

        Args:
            seconds: so long it was.
            sample_ids: indices in the data set.
            has_gradients: whether forwards keep them where the samples are handed out.
        """
        self.load_s += seconds
        if sample_ids is None:
            return
        if self._is_evaluated:
            self._handed.clear()
        self._handed.append((len(sample_ids), self._lengths_of(sample_ids)))
        self._is_evaluated = not has_gradients

    def _lengths_of(self, sample_ids: Sequence[int]) -> Lengths | None:
        if self._lengths is None:
            return None
        if self._sequences is None:
            return self._lengths[list(sample_ids)]
        lengths, firsts = self._sequences
        none = np.zeros(0, dtype=np.int64)
        return np.concatenate([none, *(lengths[firsts[index] : firsts[index + 1]] for index in sample_ids)])

    def balanced(self, seconds: float, num_samples: int, lengths: Lengths) -> None:
        """``engine.balance`` hands out a micro-batch, which counts if it is trained on, not only evaluated.

        Args:
            seconds: so long it was packed.
            num_samples: samples in it; 0 for a stand-in.
            lengths: tokens of each of their sequences.
        """
        self.load_s += seconds
        self._balanced, self._counts_balanced = (num_samples, lengths), True

    def evaluated(self) -> None:
        """A forward without gradients got what was handed out last, which may still be trained on."""
        self._is_evaluated = True

    def evaluation_ended(self) -> None:
        """Forwards in evaluation mode that no backward has followed were none of the training's."""
        self._doubtful.clear()
        self._is_evaluated = True

    def forward(self, batch: Any, *, training: bool = True) -> None:
        """A forward with gradients got ``batch``, in training mode or in evaluation mode."""
        pending = self._pending if training else self._doubtful
        self._take_handed(pending)
        if self._balanced is not None:
            pending.append(self._balanced)
            self._balanced = None
        if self._has_loader or self._counts_balanced:
            return
        segments = batch.segments if isinstance(batch, MicroBatch) else None
        if segments is None:
            self.samples = self.micro_batches = self.tokens = self.squares = self.flops = math.nan
        else:  # the host's copy: reading the batch itself would wait for the GPU
            boundaries = segments.boundaries[: batch.num_sequences + 1]
            lengths = np.array([stop - start for start, stop in itertools.pairwise(boundaries)], np.int64)
            pending.append((batch.num_samples, lengths))

    def backward(self) -> None:
        """A backward covers everything since the last one."""
        self._take_handed(self._pending)  # a script may call the model itself
        for samples, lengths in (*self._pending, *self._doubtful):
            self.samples += samples
            self.micro_batches += samples > 0
            self.tokens += math.nan if lengths is None else float(lengths.sum())
            self.squares += math.nan if lengths is None else float(np.square(lengths, dtype=np.float64).sum())
            known = lengths is not None and self._flops_of is not None
            self.flops += self._flops_of(lengths) if known else math.nan  # type: ignore[misc,arg-type]
        self._pending.clear()
        self._doubtful.clear()

    def _take_handed(self, pending: list[tuple[int, Lengths | None]]) -> None:
        pending += self._handed
        self._handed.clear()
        self._is_evaluated = False

    @property
    def work(self) -> list[float]:
        """What costs are learned from: micro-batches, tokens and squares."""
        return [self.micro_batches, self.tokens, self.squares]


def work_of_ranks(rows: Sequence[Sequence[float]]) -> tuple[tuple[int, ...], ...] | None:
    """:attr:`Tally.work` of each rank, from the work of all ranks by kind; None where unknown."""
    if not all(math.isfinite(value) for row in rows for value in row):
        return None
    return tuple(tuple(map(round, of_rank)) for of_rank in zip(*rows, strict=True))


def whole_or_none(value: float) -> int | None:
    """The count behind a sum in which nan stands for "unknown"."""
    return None if math.isnan(value) else round(value)
