"""The engine: joins transport, sharding and data, and runs the protocol of a minibatch.

``odcengine.initialize`` (in ``build.py``) makes an :class:`OdcEngine`, which is then called from the user's
own loop. ``OdcEngine.step`` ends a minibatch: barrier A, and from there to flag B ``_boundary.py``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import math
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from odcengine._boundary import Boundary, Own, Times
from odcengine._garbage import QuietGarbage
from odcengine._summed_loss import LossFn, SummedLoss
from odcengine._sums import sum_over_ranks
from odcengine.balance.online import Work
from odcengine.checkpoint.calls import CheckpointCalls
from odcengine.checkpoint.checkpoints import Checkpoints
from odcengine.checkpoint.state import Trained
from odcengine.config import Config
from odcengine.control import Meeting, Phase
from odcengine.data import Minibatch, MinibatchLoader
from odcengine.data.minibatch import warn_of_unused
from odcengine.device import Mark
from odcengine.errors import CheckpointError, OdcError, UsageError
from odcengine.evaluation import Evaluation, EvaluationCalls, MakeLoader
from odcengine.losses import LossSum
from odcengine.metrics import StepMetrics
from odcengine.models import WithoutAdapters, find_vocabulary
from odcengine.monitor import Monitor
from odcengine.preemption import Preempted, StopRequests
from odcengine.rollouts.balance import Balanced, Balancer
from odcengine.rollouts.calls import RolloutCalls
from odcengine.sharding.base import Blocked, Changed, Sharding
from odcengine.sharding.collective import CollectiveSharding
from odcengine.start import Job
from odcengine.transport.base import Transport

logger = logging.getLogger(__name__)


class OdcEngine(CheckpointCalls, RolloutCalls, EvaluationCalls):
    """A sharded model with its optimizer; made by ``odcengine.initialize``.

    ``engine(micro_batch)`` and ``engine.backward(loss)`` any number of times, also never, then
    ``engine.step()`` on every rank. Usable as a context manager that closes it.

    Attributes:
        module: the sharded model.
        reference: the sharded reference model, frozen; or the model without its adapters; or None.
        optimizer: its optimizer.
        scheduler: its learning rate scheduler, or None.
        config: the configuration.
        topology: ranks and nodes.
        transport: one-sided access to other ranks; None where collectives are used, or with one rank.
        global_steps: optimizer steps done, skipped ones included.
        evaluation: the result of the last :meth:`evaluate`, or None.
        client_state: what the script wants to find again after resuming; saved with every checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        sharding: Sharding,
        transport: Transport | None,
        job: Job,
        config: Config,
        *,
        monitor: Monitor,
        balancer: Balancer,
        scheduler: LRScheduler | None,
        loader: MinibatchLoader | None,
        loss_fn: LossFn | None,
        make_held_out: MakeLoader,
        reference: nn.Module | None = None,
        steps_of_schedule: int | None = None,
    ) -> None:
        self.module = model
        self.reference = reference
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._steps_of_schedule = steps_of_schedule
        self.config = config
        self.topology = job.topology
        self.transport = transport
        self.global_steps = 0
        self.evaluation: Evaluation | None = None
        self.client_state: dict[str, Any] = {}
        self._job = job
        self._device = job.device
        self._control = job.control
        self._host_group = job.host_group
        self._sharding = sharding
        self._monitor = monitor
        self._balancer = balancer
        self._balanced: Balanced | None = None
        self._draw_serials = itertools.count(1)  # of whatever ranks draw from; the same on all ranks
        packs = loader is not None and loader.packs
        parts = [model, None if isinstance(reference, WithoutAdapters) else reference]
        self._unprepared = [] if packs else [part for part in parts if part is not None]
        self._loader = loader
        self._held_out: MinibatchLoader | None = None
        self._make_held_out = make_held_out
        self._checkpoints = Checkpoints(Trained(model, optimizer, scheduler, loader), job, config)
        saves = config.checkpoint.dir is not None
        if hasattr(model, "save_pretrained"):  # it would end in an error of a storage without memory
            model.save_pretrained = _refuse_save_pretrained  # type: ignore[assignment]
        self._stop = StopRequests(
            config.preemption.signals if saves else (),
            config.preemption.max_time if saves else None,
            self._control.record_end,
        )
        if self._stop.foreign and job.topology.rank == 0:
            logger.warning(
                "preemption.signals: %s: the script's own handlers stay; no checkpoint is saved for them",
                ", ".join(self._stop.foreign),
            )
        self._summed_loss = SummedLoss(
            loss_fn,
            config.odc.normalize_by,
            job.device.torch_device,
            vocab_size=find_vocabulary(model),
            warns=job.topology.rank == 0,
        )
        self._equal_counts = job.topology.world_size > 1 and isinstance(sharding, CollectiveSharding)
        self._garbage = QuietGarbage(config.odc.manage_gc)
        self._boundary = Boundary(sharding, job, optimizer, config.gradient_clipping, self._garbage)
        self._closed = False
        self._first_minibatch: Minibatch | None = None
        self._has_warned_of_step = False
        self._optimizer_hook = optimizer.register_step_pre_hook(
            functools.partial(_refuse_step, weakref.ref(self))
        )
        if loader is not None:
            loader.next_serial = self._next_serial
        self._sharding.publish(Changed.ALL)
        if config.model.compile:  # the first step: a rank that compiles makes no progress
            self._control.timeout_s = max(config.odc.timeout_s, config.odc.startup_timeout_s)
        self._start_minibatch()
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    # -- a micro-batch ---------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward.

        With one micro-batch of the loader returns its summed loss, and so with any one argument where a
        ``loss_fn`` was given. With ``engine(micro_batch, loss_fn=...)`` that function is called in the place
        of the engine's own, as ``loss_fn(model, micro_batch)``, and may return anything (log-probabilities).
        With anything else calls the model and returns its outputs; the loss is then the caller's. An
        exception in here ends the job on all ranks: others may wait for what this rank had to do.
        """
        self._require_open()
        with self._control.phase(Phase.FORWARD):
            self._begin()
            if self._equal_counts:
                self._control.check_equal_counts(self.global_steps, self._micro_batches + 1)
            trains = torch.is_grad_enabled()  # in eval mode too: dropout is the script's choice
            if trains:
                self._monitor.tally.forward(args[0] if args else None, training=self.module.training)
            else:
                self._monitor.tally.evaluated()
            with self._device.computing():
                if self._summed_loss.is_known(args, kwargs):
                    return self._summed_loss(self.module, *args, **kwargs, trains=trains)
                return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor | LossSum, *, count: float | None = None) -> None:
        """Backward of a *summed* loss; gradients add up in their owners' accumulators.

        Args:
            loss: scalar, the sum of the losses of the micro-batch (not their mean); or a
                :class:`~odcengine.losses.LossSum`, which says its count itself.
            count: what the micro-batch adds to the number that the minibatch's loss is divided by: tokens
                with a target, or sequences. Needed where the engine did not compute the loss itself.

        Raises:
            UsageError: the count is missing or is no number of 0 or more, or the loss is no scalar.
        """
        self._require_open()
        with self._control.phase(Phase.BACKWARD):
            self._begin()
            self._notice_minibatch()
            loss, count = self._summed_loss.of_backward(loss, count)
            source = self._loader if self._balanced is None else self._balanced
            if source is not None and source.is_dummy:
                # A stand-in that keeps collectives in step: run it, but let it add nothing.
                loss, count = loss * 0.0, 0.0
            self._garbage.pause()  # an evaluation may be long and need it
            with self._device.computing(), self._sharding.counted_backward():
                loss.backward()  # type: ignore[no-untyped-call]
            self._summed_loss.pending.clear()
            self._monitor.tally.backward()
            self._count += count
            self._loss_sum += loss.detach().reshape(()).to(self._device.torch_device, torch.float64)
            self._micro_batches += 1
            self._device.micro_batch_enqueued()
        self._control.enter(Phase.BETWEEN, micro_batch=self._micro_batches)

    def draw(self, total: int | None = None) -> int:
        """Draw work, in a loop of the script's own: a number that no rank has drawn in this minibatch.

        Every rank draws until it gets a number for which there is no work, then calls :meth:`step`. On a GPU
        it waits until the device is nearly done with what was drawn before, so that no rank draws what
        another one could begin earlier. With the engine's loader set ``balance.strategy: dynamic`` instead.

        Args:
            total: numbers from this one on stand for no work. Where it is given, and all is drawn, nobody
                waits any more.

        Returns:
            From 0 in every minibatch.
        """
        self._require_open()
        if self._loader is not None and self._loader.strategy == "dynamic":
            raise UsageError("draw: the loader draws already (balance.strategy: dynamic)")
        if self._balanced is not None and self._balanced.planned is None:
            raise UsageError("draw: what engine.balance() gave draws already (balance.strategy: dynamic)")
        return self._job.draw(self._draw_serial, total)

    # -- the minibatch's end ---------------------------------------------------------------------------

    def step(self) -> StepMetrics:
        """End the minibatch: sum gradients over all ranks, clip, update, publish. Every rank calls it.

        Returns:
            What the step did, and how long it took.

        Raises:
            UsageError: ranks are at different places of the program.
            PeerError: another rank failed, died or gave no sign of life.
            Preempted: the job was asked to stop (``preemption``), and a checkpoint of this step is complete.
        """
        self._require_open()
        control, step = self._control, self.global_steps
        with control.phase(Phase.BARRIER):
            self._begin()
            self._sharding.check_parameters()
            if self._summed_loss.pending:
                logger.warning("step %d: a forward without backward; its count is left out", step)
            arrived = self._device.mark()
            self._meet(step)
            met = self._device.mark()
        lr = float(self.optimizer.param_groups[0]["lr"])
        agreed, applied, times = self._boundary.end(self._own(arrived, met), step)
        if applied and self.scheduler is not None:
            with control.phase(Phase.UPDATE):
                self._notice_end_of_schedule(self.scheduler, lr)
                self.scheduler.step()
        blocked = self._sharding.blocked
        metrics = StepMetrics(
            step=step,
            loss=agreed.loss_sum / agreed.count if agreed.count else math.nan,
            count=agreed.count,
            grad_norm=agreed.grad_norm,
            applied=applied,
            lr=lr,
            num_micro_batches=agreed.num_micro_batches,
            busy_s=agreed.busy_s,
            wait_s=agreed.wait_s,
            boundary_s=time.perf_counter() - times.met_at,
            gather_s=blocked.gather_s,
            push_s=blocked.push_s,
            num_samples=agreed.num_samples,
            tokens=agreed.tokens,
            flops=agreed.flops,
            load_s=self._monitor.tally.load_s,
            crossed_bytes=blocked.crossed_bytes,
            exchanged_bytes=blocked.exchanged_bytes,
            exchange_s=self._exchange_s(blocked),
        )
        minibatch, source = self._minibatch()
        warn_of_unused(minibatch, source, step=step, num_left=agreed.num_left, num_samples=agreed.num_samples)
        self._learn(metrics, agreed.work)
        self._control.timeout_s = self.config.odc.timeout_s
        self.global_steps += 1
        self._monitor.end_step(metrics, self._started)
        self._start_minibatch()
        self._checkpoints.after_step(agreed.votes, self.global_steps, self.client_state)
        control.enter(Phase.BETWEEN, step=self.global_steps, micro_batch=0)
        if agreed.stops:
            self._save_and_stop(agreed.stops)
        if self._evaluates_now():
            self.evaluate()
        return metrics

    def _notice_end_of_schedule(self, scheduler: LRScheduler, lr: float) -> None:
        """Warn once of a step behind the end of a schedule whose length follows from ``data.num_epochs``."""
        if scheduler.last_epoch != self._steps_of_schedule or self.topology.rank != 0:
            return
        logger.warning(
            "step %d has lr %.3g and is behind the end of the schedule %s, which was made for the %d steps "
            "of data.num_epochs: %d. Set data.num_epochs to the number of epochs that the script makes, or "
            "give the schedule its length in scheduler.params",
            self.global_steps,
            lr,
            type(scheduler).__name__,
            self._steps_of_schedule,
            self.config.data.num_epochs,
        )

    def _minibatch(self) -> tuple[Minibatch | None, str]:
        """What the present step is over, as far as the engine has made it, and who gave it."""
        if self._balanced is not None:
            return self._balanced, "engine.balance()"
        return (None if self._loader is None else self._loader.in_step), "the loader's minibatch"

    def _evaluates_now(self) -> bool:
        """Whether the held-out data is due: every so many steps, and at the end of an epoch."""
        if self._held_out is None:
            return False
        every, loader = self.config.data.eval_every_n_steps, self._loader
        at_end = loader is not None and loader.at_epoch_end
        return at_end or (every > 0 and self.global_steps % every == 0)

    def _learn(self, metrics: StepMetrics, work: Work | None) -> None:
        """Costs and speeds follow from what was computed in which time."""
        if self._balanced is not None:
            line = self._balancer.measured(self._balanced, metrics.busy_s, metrics.num_samples, work)
            if line is not None and self.topology.rank == 0:
                logger.warning("%s", line)
        elif self._loader is not None:
            self._loader.measured(metrics.busy_s, metrics.num_samples, work)

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
        self._require_open()
        with self._control.phase(Phase.AGREE):
            return sum_over_ranks(values, self._job)

    def _save_and_stop(self, stops: int) -> NoReturn:
        """All ranks leave here in the same step, since a signal or the clock has asked some of them to."""
        reason = self._stop.reason or f"{stops} of {self.topology.world_size} ranks were asked to"
        if self.topology.rank == 0:
            logger.warning("stopping after %d steps: %s", self.global_steps, reason)
        self._checkpoints.save_last(self.global_steps, self.client_state)
        raise Preempted(reason, self.global_steps)

    def _meet(self, step: int) -> None:
        """Barrier A: all pushes have landed, all pulls have completed."""
        if self.transport is not None:
            self.transport.barrier(Meeting.END_OF_STEP, step)
            return
        if self._equal_counts:
            self._control.end_micro_batches(step, self._micro_batches)
        self._control.barrier(Meeting.END_OF_STEP, step)
        if self._equal_counts:
            self._control.check_equal_counts(step, self._micro_batches)

    def _own(self, arrived: Mark, met: Mark) -> Own:
        """What this rank brings to the agreement, which began at ``arrived``; all had met at ``met``."""
        tally, (minibatch, _) = self._monitor.tally, self._minibatch()
        return Own(
            loss_sum=self._loss_sum,
            count=self._count,
            num_micro_batches=self._micro_batches,
            samples=tally.samples,
            flops=tally.flops,
            left_early=minibatch is not None and minibatch.left_early,
            votes=self._checkpoints.votes(),
            stops=self._stop.vote(),
            work=tally.work,
            times=functools.partial(self._times, arrived, met),
        )

    def _times(self, arrived: Mark, met: Mark) -> Times:
        """What the minibatch took; the marks have passed."""
        device = self._device
        wait_s = device.seconds(arrived, met) + self._sharding.blocked.wait_s
        until_met = self._lead_s + device.seconds(self._start_mark, met)
        return Times(until_met - wait_s, wait_s, self._started + until_met)

    def _exchange_s(self, blocked: Blocked) -> float:
        for _, end in blocked.exchanges:  # the host has seen each end; its mark follows at once
            self._device.wait_for(end, self._control)
        return sum(self._device.seconds(start, end) for start, end in blocked.exchanges)

    def _start_minibatch(self) -> None:
        self._draw_serial = self._next_serial()
        self._balanced = None
        self._monitor.begin_step(self.global_steps)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._device.torch_device)
        self._count = 0.0
        self._summed_loss.pending.clear()
        self._micro_batches = 0
        self._begun = False
        self._ended_at = time.perf_counter()

    def _begin(self) -> None:
        """Start the minibatch at its first forward, backward or step.

        Its time counts from when the loader was asked for it, or from here where the loader was not; never
        from the end of the last step: a checkpoint or another engine's minibatch in between is no part of it.
        """
        if not self._begun:
            self._started = time.perf_counter()
            if self._loader is not None and self._loader.asked_at > self._ended_at:
                self._started = self._loader.asked_at
            self._start_mark = self._device.mark()
            self._lead_s = time.perf_counter() - self._started
            self._sharding.begin()
            self._begun = True
        if not self._micro_batches:  # evaluations may come before, and loads between them
            self._sharding.check_parameters()

    def _notice_minibatch(self) -> None:
        """Warn once where a step goes on over a second minibatch of the loader: was step() forgotten?"""
        current = None if self._loader is None else self._loader.in_step
        if not self._micro_batches:
            self._first_minibatch = current
        elif self._first_minibatch not in (None, current) and not self._has_warned_of_step:
            self._has_warned_of_step = True
            logger.warning(
                "rank %d, step %d: the loader has given another minibatch and engine.step() was not called "
                "in between, so their gradients add up; every rank calls engine.step() after each minibatch",
                self.topology.rank,
                self.global_steps,
            )

    def _forget_exit(self) -> None:
        atexit.unregister(self._at_exit)

    def _begin_anew(self) -> None:
        if not self._micro_batches:
            self._begun = False
            self._ended_at = time.perf_counter()  # what the loader was asked for before counts from here, too

    def _next_serial(self) -> int:
        return next(self._draw_serials)

    # -- the rest --------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> OdcEngine:
        """Switch the model to training (or evaluation); returns the engine.

        Drops full parameters that a forward without gradients may have left in the root, so that
        ``parameters()`` are shards on every rank, whichever ranks evaluated.
        """
        self._require_open()
        self._sharding.reshard()
        if mode and not self.module.training:
            self._summed_loss.evaluation_ended()
            self._monitor.tally.evaluation_ended()
        self.module.train(mode)
        return self

    def eval(self) -> OdcEngine:
        """Switch the model to evaluation; forwards then pull parameters as in training, at any time."""
        return self.train(False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's parameters."""
        return self.module.parameters()

    def publish(self) -> None:
        """Make parameters that the script has changed itself the ones that all ranks use. Collective.

        Call it on every rank, between minibatches, after loading or changing weights.
        """
        self._require_open()
        with self._control.phase(Phase.PUBLISH):
            if self._micro_batches:
                raise UsageError("publish: call it between minibatches, after step() and before a backward")
            barrier = self._control.barrier if self.transport is None else self.transport.barrier
            barrier(Meeting.PUBLISH, self.global_steps)
            self._sharding.publish(Changed.ALL)

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the job: wait for all ranks, then let go of shared memory. The model stays sharded.

        A checkpoint that is being written is finished first. Several engines of a process are closed in the
        same order on all ranks.

        Raises:
            PeerError: another rank failed before it came here.
            CheckpointError: the last checkpoint could not be written; the engine is closed all the same.
        """
        if not self._closed:
            self._close(Meeting.CLOSE)

    def _go_on_at(self, step: int) -> None:
        """Another state was loaded: let all ranks use it, from ``step`` on."""
        self.global_steps = step
        self.publish()
        self._start_minibatch()
        self._control.enter(Phase.BETWEEN, step=step, micro_batch=0)

    def _require_between(self, call: str) -> None:
        self._require_open()
        if self._micro_batches:
            raise UsageError(f"{call}: call it between minibatches, after step() and before a backward")
        self._sharding.reshard()  # an evaluation may have left full parameters

    def _close(self, meeting: Meeting) -> None:
        if self._micro_batches and self.topology.rank == 0:
            logger.warning(
                "close: %d micro-batches had a backward and no engine.step(); nothing was learned from them",
                self._micro_batches,
            )
        self._leave(keep_signals=True)
        try:
            unsaved = self._checkpoints.close(meeting)
            with self._control.phase(Phase.CLOSING):
                self._sharding.close()
                self._balancer.close()
                if self.transport is None:
                    self._control.barrier(meeting)
                else:
                    self.transport.close(meeting)
                self._control.part_from_nodes()
        finally:
            self._stop.close()  # not before: a signal must not end the process while the last save is written
            self._control.close()
            self._monitor.close()
            for loader in (self._loader, self._held_out):
                if loader is not None:
                    loader.close()
        self._job.leave()
        if unsaved is not None:
            raise CheckpointError(unsaved)

    def __enter__(self) -> OdcEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (
            error is None
            or isinstance(error, Preempted)
            or (isinstance(error, SystemExit) and not error.code)
        ):
            self.close()
        else:
            self._abandon(error)

    def _abandon(self, error: BaseException) -> None:
        """After a failure: tell the others and go, without meeting them."""
        if self._closed:
            return
        self._leave()
        self._control.fail(error)
        self._checkpoints.abandon()
        self._monitor.close(failed=True)
        for loader in (self._loader, self._held_out):
            if loader is not None:
                loader.close(timeout_s=1.0)
        with contextlib.suppress(Exception):  # FSDP2 may be in the middle of a pass; the error is what counts
            self._sharding.close()
        self._balancer.close()
        if self.transport is not None:
            self.transport.close(None)

    def _leave(self, *, keep_signals: bool = False) -> None:
        self._closed = True
        self._optimizer_hook.remove()
        self._garbage.close()
        if not keep_signals:
            self._stop.close()
        self._forget_exit()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            message = "the engine was dropped without close()"
            warnings.warn(message, ResourceWarning, source=self, stacklevel=2)
            self._abandon(UsageError(message))
            self._control.close()

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("the engine is closed; call initialize again for another run")


def _refuse_step(reference: weakref.ref[OdcEngine], *_: Any) -> None:
    """``optimizer.step()`` of the script's: it would find no gradients and change nothing, without a word."""
    engine = reference()
    if engine is None or engine._boundary.updates or not engine._micro_batches:
        return
    with engine._control.phase(Phase.UPDATE):
        raise UsageError(
            "optimizer.step() in the middle of a minibatch: the gradients are with the ranks that own them. "
            "Call engine.step() on every rank instead, which also clips, steps the scheduler and publishes"
        )


def _close_at_exit(reference: weakref.ref[OdcEngine]) -> None:
    """Close an engine that the script left open, if the run went well so far."""
    engine = reference()
    if engine is None or engine._closed or not engine._control.is_owner:
        return
    if engine._control.failed:
        engine._closed = True
        return
    try:
        engine._close(Meeting.EXIT)
    except OdcError as error:
        logger.error("at exit: %s", error)


def _refuse_save_pretrained(*args: Any, **kwargs: Any) -> None:
    raise UsageError(
        "save_pretrained() of a sharded model: this rank holds a part of each weight. Call "
        "engine.save_pretrained(folder) on all ranks instead, which writes what from_pretrained() loads"
    )
