"""What one optimizer step tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


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
        boundary_s: this rank's seconds from the end of A to the end of ``step()``.
        gather_s: this rank's seconds getting parameters, waiting included.
        push_s: this rank's seconds handing over gradients, waiting included.
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

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """For each rank the share of the minibatch, up to the end of A, that it waited."""
        return tuple(
            wait / (busy + wait) if busy + wait else 0.0
            for busy, wait in zip(self.busy_s, self.wait_s, strict=True)
        )
