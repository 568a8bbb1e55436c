"""odcengine's loop around a DeepSpeed engine: ``odc.backend: deepspeed``.

The same calls as :class:`odcengine.OdcEngine`: summed losses, a loader that plans, one ``step()`` a minibatch
that divides by the minibatch's global count. Sharding, optimizer and checkpoints are DeepSpeed's.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from odcengine._summed_loss import LossFn, SummedLoss
from odcengine._sums import sum_over_ranks
from odcengine.config import Config
from odcengine.control import EventRecorder, Phase
from odcengine.data import MinibatchLoader
from odcengine.data.minibatch import warn_of_unused
from odcengine.deepspeed.attach import AttachedDeepSpeed
from odcengine.deepspeed.stage3 import OnDemand
from odcengine.errors import UsageError
from odcengine.losses import LossSum
from odcengine.metrics import StepMetrics, whole_or_none, work_of_ranks
from odcengine.models import find_vocabulary
from odcengine.monitor import Monitor
from odcengine.start import Job

logger = logging.getLogger(__name__)


class NoGroups:
    """What the monitor asks of a sharding: DeepSpeed has no groups, and nothing but waits is recorded."""

    def __init__(self) -> None:
        self.groups: tuple[Any, ...] = ()
        self.recorder: EventRecorder | None = None


class ZeroEngine:
    """A DeepSpeed engine with odcengine's calls; made by ``odcengine.initialize``.

    Attributes:
        deepspeed: DeepSpeed's engine.
        module: the model.
        optimizer: DeepSpeed's.
        scheduler: the learning rate scheduler, or None.
        config: the configuration.
        global_steps: optimizer steps done, skipped ones included.
    """

    def __init__(
        self,
        attached: AttachedDeepSpeed,
        odc: OnDemand,
        job: Job,
        config: Config,
        monitor: Monitor,
        loader: MinibatchLoader | None,
        loss_fn: LossFn | None,
    ) -> None:
        self.deepspeed: Any = attached.engine
        self.module: nn.Module = self.deepspeed.module
        self.optimizer = self.deepspeed.optimizer
        self.scheduler = self.deepspeed.lr_scheduler
        self.config = config
        self.topology = job.topology
        self.transport = attached.transport
        self.global_steps = 0
        self._attached = attached
        self._odc = odc
        self._job = job
        self._control = job.control
        self._monitor = monitor
        self._loader = loader
        self._summed_loss = SummedLoss(
            loss_fn,
            config.odc.normalize_by,
            job.device.torch_device,
            vocab_size=find_vocabulary(self.module),
            warns=job.topology.rank == 0,
        )
        odc.scale = self._agree
        odc.after_meeting = self._met
        self._start_minibatch()

    # -- a micro-batch ---------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward: the summed loss of a micro-batch of the loader, else the model's outputs."""
        self._odc.require_open()
        with self._control.phase(Phase.FORWARD):
            trains = torch.is_grad_enabled()
            if trains:
                self._begin()
                self._monitor.tally.forward(args[0] if args else None, training=self.module.training)
            else:
                self._monitor.tally.evaluated()
            if self._summed_loss.is_known(args, kwargs):
                return self._summed_loss(self.deepspeed, *args, **kwargs, trains=trains)
            return self.deepspeed(*args, **kwargs)

    def backward(self, loss: torch.Tensor | LossSum, *, count: float | None = None) -> None:
        """Backward of a *summed* loss.

        Args:
            loss: scalar, the sum of the losses of the micro-batch; or a
                :class:`~odcengine.losses.LossSum`, which says its count itself.
            count: what it adds to the number that the minibatch's loss is divided by; needed where the engine
                did not compute the loss itself.
        """
        self._odc.require_open()
        with self._control.phase(Phase.BACKWARD):
            self._begin()
            loss, count = self._summed_loss.of_backward(loss, count)
            self.deepspeed.backward(loss)
            self._summed_loss.pending.clear()
            self._monitor.tally.backward()
            self._count += count
            self._loss_sum += loss.detach().reshape(()).double()
            self._num_micro_batches += 1
        self._control.enter(Phase.BETWEEN)

    # -- the minibatch's end ---------------------------------------------------------------------------

    def step(self) -> StepMetrics:
        """End the minibatch: sum gradients over all ranks, clip, update, publish. Every rank calls it."""
        self._odc.require_open()
        self._begin()
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.deepspeed.step()
        norm, windows = float(self.deepspeed.get_global_grad_norm()), self._boundary
        sums, (busy, wait, *rows) = self._agreed
        work = work_of_ranks(rows)
        loss_sum, count, micro_batches, samples, flops, left = sums
        metrics = StepMetrics(
            step=self.global_steps,
            loss=loss_sum / count if count else math.nan,
            count=count,
            grad_norm=norm,
            applied=bool(self.deepspeed.was_step_applied()),
            lr=lr,
            num_micro_batches=round(micro_batches),
            busy_s=tuple(busy),
            wait_s=tuple(wait),
            boundary_s=time.perf_counter() - self._met_at,
            gather_s=windows["fetch_s"],
            push_s=windows["push_s"],
            num_samples=whole_or_none(samples),
            tokens=None if work is None else tuple(tokens for _, tokens, _ in work),
            flops=None if math.isnan(flops) else flops,
            load_s=self._monitor.tally.load_s,
            crossed_bytes=int(windows["crossed_bytes"]),
        )
        if self._loader is not None:
            warn_of_unused(
                self._loader.in_step,
                "the loader's minibatch",
                step=self.global_steps,
                num_left=round(left),
                num_samples=metrics.num_samples,
            )
            self._loader.measured(metrics.busy_s, metrics.num_samples, work)
        if not metrics.applied and self.topology.rank == 0:
            reason = "its gradient is not finite" if count else "it has nothing to learn"
            logger.warning("step %d is skipped on all ranks: %s", self.global_steps, reason)
        self.global_steps += 1
        self._monitor.end_step(metrics, self._started)
        self._start_minibatch()
        return metrics

    def sum_over_ranks(self, values: Mapping[str, torch.Tensor | float]) -> dict[str, float]:
        """Sum numbers of the script over all ranks; every rank calls it, between minibatches.

        Args:
            values: scalars, by name; the same names on all ranks.

        Returns:
            The sums, on every rank.

        Raises:
            UsageError: other ranks have other names.
            PeerError: another rank failed, died or gave no sign of life.
        """
        self._odc.require_open()
        with self._control.phase(Phase.AGREE):
            return sum_over_ranks(values, self._job)

    def _met(self) -> None:
        """All ranks have passed barrier A."""
        windows = self._odc.windows
        self._met_at = time.perf_counter()
        self._boundary = {
            "fetch_s": windows.fetch_s,
            "push_s": windows.push_s,
            "crossed_bytes": windows.crossed_bytes,
        }

    def _agree(self) -> float:
        """Sum what the hosts know; returns what sums of gradients are multiplied by, nan to skip the step."""
        tally, size = self._monitor.tally, self.topology.world_size
        minibatch = None if self._loader is None else self._loader.in_step
        known = [float(self._loss_sum), self._count, float(self._num_micro_batches)]
        known += [tally.samples, tally.flops, float(minibatch is not None and minibatch.left_early)]
        wait_s = self._odc.waited_s
        busy_s = self._met_at - self._started - wait_s
        mine = torch.tensor([busy_s, wait_s, *tally.work], dtype=torch.float64)
        table = torch.zeros(len(mine), size, dtype=torch.float64)
        table[:, self.topology.rank] = mine
        message = torch.cat([torch.tensor(known, dtype=torch.float64), table.view(-1)])
        work = dist.all_reduce(message, group=self._job.host_group, async_op=True)
        self._control.wait_work(work, "the agreement on counts")
        sums: list[float] = message[: len(known)].tolist()
        rows: list[list[float]] = message[len(known) :].view(table.shape).tolist()
        self._agreed = (sums, rows)
        return 1.0 / sums[1] if sums[1] else math.nan

    def _start_minibatch(self) -> None:
        self._monitor.begin_step(self.global_steps)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._job.device.torch_device)
        self._count = 0.0
        self._summed_loss.pending.clear()
        self._num_micro_batches = 0
        self._begun = False
        self._ended_at = time.perf_counter()

    def _begin(self) -> None:
        if not self._begun:
            self._begun, self._started = True, time.perf_counter()
            if self._loader is not None and self._loader.asked_at > self._ended_at:
                self._started = self._loader.asked_at

    # -- the rest --------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> ZeroEngine:
        """Switch the model to training (or evaluation); returns the engine."""
        if mode and not self.module.training:
            self._summed_loss.evaluation_ended()
            self._monitor.tally.evaluation_ended()
        self.deepspeed.train(mode)
        return self

    def eval(self) -> ZeroEngine:
        """Switch the model to evaluation."""
        return self.train(False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's parameters."""
        return self.module.parameters()

    def save_checkpoint(
        self, save_dir: str | os.PathLike[str], tag: str | None = None, **options: Any
    ) -> bool:
        """DeepSpeed's ``save_checkpoint``, between two minibatches. Collective."""
        self._require_between("save_checkpoint")
        return bool(self.deepspeed.save_checkpoint(os.fspath(save_dir), tag, **options))

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: str | None = None, **options: Any
    ) -> tuple[str | None, Any]:
        """DeepSpeed's ``load_checkpoint``, between two minibatches. Collective."""
        self._require_between("load_checkpoint")
        path, state = self.deepspeed.load_checkpoint(os.fspath(load_dir), tag, **options)
        if path is not None and not options.get("load_module_only"):
            self.global_steps = int(self.deepspeed.global_steps)
        self._start_minibatch()
        return path, state

    def _require_between(self, call: str) -> None:
        if self._num_micro_batches:
            raise UsageError(f"{call}: call it between minibatches, after step() and before a backward")

    def close(self) -> None:
        """Leave the job: wait for all ranks, then let go of the windows. Collective."""
        try:
            self._attached.close()
        finally:
            self._monitor.close()

    def __enter__(self) -> ZeroEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self._control.fail(error)
            self._monitor.close(failed=True)
