"""The end of a minibatch: what ranks agree on, and the update that follows from it.

Between barrier A and flag B of ``docs/protocol.md``: collect, agree, clip, step, empty the accumulators,
publish. Where the optimizer lets a device decide, the host runs ahead of it (:meth:`Boundary.end`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from odcengine._garbage import QuietGarbage
from odcengine.balance.online import Work
from odcengine.control import Phase
from odcengine.metrics import whole_or_none, work_of_ranks
from odcengine.sharding.base import Changed, Sharding
from odcengine.start import Job

logger = logging.getLogger(__name__)

_CLIP_EPS = 1e-6  # of torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class Times:
    """What a rank's minibatch took, up to barrier A.

    Attributes:
        busy_s, wait_s: seconds of computing, and of waiting for others.
        met_at: when barrier A ended, as ``time.perf_counter`` tells it.
    """

    busy_s: float
    wait_s: float
    met_at: float


@dataclass(frozen=True)
class Own:
    """What one rank brings to the end of a minibatch.

    Attributes:
        loss_sum: float64 scalar on the device.
        count: what this rank's part of the loss is to be divided by.
        num_micro_batches: that it has run.
        samples, flops: NaN where they are not known.
        left_early: whether it left the loop over its minibatch before the end.
        votes: on the checkpoint that is being saved.
        stops: 1.0 if it was asked to stop.
        work: of the rank, from the monitor's tally.
        times: called when the device has passed barrier A.
    """

    loss_sum: torch.Tensor
    count: float
    num_micro_batches: int
    samples: float
    flops: float
    left_early: bool
    votes: list[float]
    stops: float
    work: list[float]
    times: Callable[[], Times]

    @property
    def known(self) -> list[float]:
        """What the host knows without its device; all ranks' are summed. See :meth:`Agreed.of`."""
        micro_batches, left = float(self.num_micro_batches), float(self.left_early)
        return [self.count, micro_batches, self.samples, self.flops, left, *self.votes, self.stops]


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after the agreement; see :class:`StepMetrics` for most fields.

    Attributes:
        used: bool, one a trainable parameter: some rank has a gradient.
        odd_losses: ranks whose loss is not finite.
        num_left: ranks that left the loop over their minibatch early.
        votes: on the checkpoint that is being saved.
        stops: ranks that were asked to stop.
    """

    loss_sum: float
    count: float
    grad_norm: float
    num_micro_batches: int
    busy_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    num_samples: int | None
    tokens: tuple[int, ...] | None
    work: Work | None
    flops: float | None
    used: torch.Tensor
    odd_losses: tuple[int, ...]
    num_left: int
    votes: list[float]
    stops: int

    @classmethod
    def of(cls, sums: list[float], of_ranks: list[list[float]], used: torch.Tensor) -> Agreed:
        """From the sums and the table that the ranks have put together."""
        loss_sum, squared_norm, count, micro_batches, samples, flops, left, *votes, stops = sums
        busy, wait, odd, *rows = of_ranks
        work = work_of_ranks(rows)
        return cls(
            loss_sum=loss_sum,
            count=count,
            grad_norm=math.sqrt(squared_norm) / count if count else math.nan,
            num_micro_batches=round(micro_batches),
            busy_s=tuple(busy),
            wait_s=tuple(wait),
            num_samples=whole_or_none(samples),
            tokens=None if work is None else tuple(tokens for _, tokens, _ in work),
            work=work,
            flops=None if math.isnan(flops) else flops,
            used=used,
            odd_losses=tuple(rank for rank, is_odd in enumerate(odd) if is_odd),
            num_left=round(left),
            votes=votes,
            stops=round(stops),
        )


class Boundary:
    """Ends minibatches of one engine.

    Attributes:
        updates: whether the optimizer's step that runs is the engine's own.

    Args:
        sharding: where gradients are summed and parameters are published.
        job: the ranks.
        optimizer: of the trainable parameters.
        clipping: ``gradient_clipping``, the largest norm of a gradient; 0 for none.
        garbage: collects while the device is at the update.
    """

    def __init__(
        self,
        sharding: Sharding,
        job: Job,
        optimizer: Optimizer,
        clipping: float,
        garbage: QuietGarbage,
    ) -> None:
        self.updates = False
        self._sharding = sharding
        self._job = job
        self._control = job.control
        self._device = job.device
        self._optimizer = optimizer
        self._clipping = clipping
        self._garbage = garbage

    def end(self, own: Own, step: int) -> tuple[Agreed, bool, Times]:
        """From barrier A to flag B. Collective.

        Args:
            own: what this rank brings.
            step: number of the optimizer step, for messages.

        Returns:
            What all ranks agreed on; whether the optimizer stepped; what this rank's minibatch took.
        """
        end = self._end_ahead if self._runs_ahead() else self._end_in_turn
        return end(own, step)

    def _runs_ahead(self) -> bool:
        """Torch's fused optimizers can be told on the device to leave everything as it is."""
        return self._device.type == "cuda" and getattr(self._optimizer, "_step_supports_amp_scaling", False)

    def _end_in_turn(self, own: Own, step: int) -> tuple[Agreed, bool, Times]:
        """Fetch this rank's sums, agree, update, publish: each when the one before is done."""
        control = self._control
        with control.phase(Phase.COLLECT):
            loss_sum, squared_norm, *faults = self._device.start_fetch(self._device_sums(own))(control)
            self._sharding.raise_faults(faults)
        times = own.times()
        with control.phase(Phase.AGREE):
            sums, of_ranks, used = self._sum_over_ranks(
                [loss_sum, squared_norm, *own.known],
                [times.busy_s, times.wait_s, not math.isfinite(loss_sum), *own.work],
            )
            agreed = Agreed.of(sums, of_ranks, used)
        with control.phase(Phase.UPDATE):
            applied = self._reports_learning(agreed, step)
            if applied:
                self._sharding.expose(agreed.used, self._scale(agreed))
                self._step_optimizer()
        self._publish(applied)
        return agreed, applied, times

    def _end_ahead(self, own: Own, step: int) -> tuple[Agreed, bool, Times]:
        """The same with the host ahead of the GPU, which then never waits for the host.

        What all ranks' devices have summed decides on the device: it makes the scale of the gradients, and
        whether the optimizer's kernels change anything (``found_inf``, as ``torch.amp.GradScaler`` uses it).
        The host learns of it while the GPU is at the update.
        """
        control, device = self._control, self._device
        with control.phase(Phase.COLLECT):
            mine = self._device_sums(own)
        with control.phase(Phase.AGREE):
            known, work, used = self._sum_over_ranks(own.known, own.work)
            device.sum_over_ranks(mine)
            fetch = device.start_fetch(torch.cat([mine, own.loss_sum[None]]))
        count = known[0]
        with control.phase(Phase.UPDATE):
            if count:
                norm = mine[1].sqrt() / count
                skip = ~norm.isfinite() | mine[2:].any()
                scale = torch.ones_like(norm) / count
                if self._clipping > 0:
                    scale *= (self._clipping / (norm + _CLIP_EPS)).clamp(max=1.0)
                self._sharding.expose(used, scale)
                self._step_optimizer(skip.float())
        self._publish(bool(count))
        with control.phase(Phase.FETCH):
            loss_sum, squared_norm, *faults, own_loss_sum = fetch(control)
            self._sharding.raise_faults(faults)
            times = own.times()
            _, (busy, wait, odd), _ = self._sum_over_ranks(
                [], [times.busy_s, times.wait_s, not math.isfinite(own_loss_sum)]
            )
            agreed = Agreed.of([loss_sum, squared_norm, *known], [busy, wait, odd, *work], used)
            applied = self._reports_learning(agreed, step)
        return agreed, applied, times

    def _device_sums(self, own: Own) -> torch.Tensor:
        """Loss sum, squared norm of the gradient's shard, and faults, on the device."""
        squared_norm = self._sharding.collect()
        return torch.cat([own.loss_sum[None], squared_norm[None], self._sharding.faults()])

    def _sum_over_ranks(
        self, sums: list[float], of_rank: list[float]
    ) -> tuple[list[float], list[list[float]], torch.Tensor]:
        """One small all-reduce of the hosts.

        Args:
            sums: numbers to be summed.
            of_rank: numbers that each rank has of its own.

        Returns:
            The sums; for each of ``of_rank`` those of all ranks; bool for each trainable parameter, whether
            some rank has a gradient.
        """
        world_size, rank = self._job.topology.world_size, self._job.topology.rank
        table = torch.zeros(len(of_rank), world_size, dtype=torch.float64)
        table[:, rank] = torch.tensor(of_rank, dtype=torch.float64)
        message = torch.cat([torch.tensor(sums, dtype=torch.float64), table.view(-1), self._sharding.used()])
        if world_size > 1:
            work = dist.all_reduce(message, group=self._job.host_group, async_op=True)
            self._control.wait_work(work, "the agreement on norm and counts")
        rest = message[len(sums) :]
        rows: list[list[float]] = rest[: table.numel()].view(table.shape).tolist()
        return message[: len(sums)].tolist(), rows, rest[table.numel() :] > 0

    def _reports_learning(self, agreed: Agreed, step: int) -> bool:
        """Whether there is something to learn; all ranks skip what is not finite, and rank 0 says so."""
        if agreed.count and math.isfinite(agreed.grad_norm):
            return True
        if self._job.topology.rank == 0:
            reason = "its gradient is not finite" if agreed.count else "it has nothing to learn"
            odd = ", ".join(map(str, agreed.odd_losses[:8])) + ", ..." * (len(agreed.odd_losses) > 8)
            reason += f", nor is the loss of rank {odd}" if odd and agreed.count else ""
            logger.warning("step %d is skipped on all ranks: %s", step, reason)
        return False

    def _scale(self, agreed: Agreed) -> float:
        """One over the count, times the clipping coefficient of ``torch.nn.utils.clip_grad_norm_``."""
        limit = self._clipping
        factor = min(1.0, limit / (agreed.grad_norm + _CLIP_EPS)) if limit > 0 else 1.0
        return factor / agreed.count

    def _step_optimizer(self, skip: torch.Tensor | None = None) -> None:
        """Step; where the device decides whether it counts, ``skip`` is 1.0 there if it does not."""
        optimizer: Any = self._optimizer
        self.updates = True
        try:
            if skip is not None:
                optimizer.found_inf = skip
            optimizer.step()
        finally:
            self.updates = False
            if skip is not None:
                del optimizer.found_inf

    def _publish(self, changed: bool) -> None:
        """Empty the accumulators and raise flag B."""
        with self._control.phase(Phase.PUBLISH):
            self._sharding.release()
            self._sharding.publish(Changed.TRAINABLE if changed else Changed.NONE)
        self._garbage.collect()
