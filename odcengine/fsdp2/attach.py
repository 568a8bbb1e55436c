"""Attach on-demand communication to a model that ``fully_shard`` was applied to, and let go of it.

The trainer keeps its loop: forwards and backwards, any number of them on each rank, then ``collect()``, which
is barrier A and puts the summed gradients where FSDP2 would have put them, clipping and the optimizer's step,
after which the new parameters are published.
"""

from __future__ import annotations

import atexit
import enum
import functools
import logging
import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from odcengine._attach import on_device
from odcengine.config import Config
from odcengine.control import Meeting, Phase
from odcengine.errors import ConfigError, OdcError, UsageError
from odcengine.fsdp2.guard import Before, check, has_unsynced, param_dtype_of, roots
from odcengine.fsdp2.sharding import AttachedSharding
from odcengine.fsdp2.steps import NONE_YET, check_alike, way_of
from odcengine.ranks import read_rank_info
from odcengine.sharding.base import Changed
from odcengine.sharding.layout import find_groups
from odcengine.sharding.on_demand import plan_windows, slots_of
from odcengine.start import Job, join, make_transport
from odcengine.transport.base import Grid, Transport

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_odc_attached"


class _State(enum.Enum):
    WORK = "micro-batches"
    COLLECTED = "collected"
    CLOSED = "closed"


class AttachedModel:
    """An FSDP2 model on demand; from ``odcengine.attach``. Usable as a context manager that closes it.

    Attributes:
        model: the model, which is used as before.
        transport: one-sided access to other ranks; None with one rank.
        num_minibatches: how many have been ended; equal on all ranks.
        waited_s: seconds that this rank's host waited for others in the last minibatch and at its end.

    Args:
        model: sharded by ``fully_shard``.
        optimizers: after whose steps the parameters are published.
        job: the ranks; None with one.
        settings: the configuration.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], job: Job | None, settings: Config
    ) -> None:
        self.model = model
        self.transport: Transport | None = None
        self.num_minibatches = 0
        self.waited_s = 0.0
        self._optimizers = list(optimizers)
        self._job = job
        self._state = _State.WORK
        self._begun = False  # this rank computed something in this minibatch
        self._pushed = False
        self._micro_batches = self._enqueued = 0
        self._stepped: set[int] = set()  # indices of optimizers, in this minibatch
        self._way = NONE_YET  # how the last minibatch ended
        self._hooks: list[RemovableHandle] = []
        if job is None:
            return
        self._control = job.control
        groups = find_groups(model, param_dtype_of)
        self._before = [Before.of(group.module) for group in groups]
        grid, deterministic = Grid.of(job.topology), settings.odc.deterministic
        num_slots = slots_of(grid, deterministic=deterministic)
        self.transport = make_transport(job, settings, plan_windows(groups, grid.num_nodes, num_slots))
        mean = 1.0 / job.topology.world_size
        try:
            self._sharding = AttachedSharding(
                model,
                groups,
                self.transport,
                job.control,
                between_nodes=job.between_nodes,
                mark=job.device.mark,
                gradients_enqueued=job.device.gradients_enqueued,
                deterministic=deterministic,
                scales=[
                    1.0
                    if settings.odc.grad_reduce == "sum"
                    else mean
                    if before.divide_factor is None
                    else 1.0 / before.divide_factor
                    for before in self._before
                ],
                on_pull=self._check_pull,
                on_push=self._check_push,
            )
        except BaseException:
            for before in self._before:
                before.restore()
            raise
        self._parameters = {id(entry.param) for entry in self._sharding.trainable}
        for root in roots(model):
            assert isinstance(root, nn.Module)  # FSDP2 makes such classes only
            self._hooks.append(root.register_forward_pre_hook(self._before_forward, prepend=True))
        self._hooks.append(register_optimizer_step_pre_hook(self._before_step))
        self._hooks.append(register_optimizer_step_post_hook(self._after_step))
        self._sharding.publish(Changed.ALL)
        setattr(model, _ATTRIBUTE, self)
        self._at_exit = functools.partial(_leave_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    # -- a minibatch -----------------------------------------------------------------------------------

    def draw(self, total: int | None = None) -> int:
        """Draw work: a number, from 0 in every minibatch, that no rank has drawn yet.

        Every rank draws until it gets a number for which there is no work, then calls :meth:`collect`. On a
        GPU it waits until the device is nearly done with what was drawn before.

        Args:
            total: numbers from this one on stand for no work. Where it is given, and all is drawn, nobody
                waits any more.
        """
        self._require_open()
        if self._state is _State.COLLECTED:
            self._end_without_step()
        if self._job is None:
            self._micro_batches += 1
            return self._micro_batches - 1
        if self._micro_batches > self._enqueued:
            self._enqueued = self._micro_batches
            self._job.device.micro_batch_enqueued()
        return self._job.draw(self.num_minibatches + 1, total)

    def collect(self) -> None:
        """End the minibatch's micro-batches: all ranks' gradients are in ``.grad`` of the shards. Collective.

        Every rank calls it once a minibatch, also with no micro-batch, before clipping and the optimizer's
        step. ``.grad`` is what FSDP2 would have left there: the mean over ranks, summed over micro-batches,
        or what ``set_gradient_divide_factor`` or ``grad_reduce`` says. It is None for parameters that no
        rank has used. The gradients are gone after the step.

        Raises:
            UsageError: ranks are at different places of the program, have ended the last minibatch in
                different ways (with the optimizer's step and without), or gradients were held back.
            PeerError: another rank failed, died or gave no sign of life.
        """
        self._require_open()
        if self._job is None:
            self._micro_batches = 0
            self.num_minibatches += 1
            return
        again = self._state is _State.COLLECTED
        if again:
            self._end_without_step()
        control, sharding = self._control, self._sharding
        assert self.transport is not None  # there is a job
        with control.phase(Phase.BARRIER):
            self._begin()
            sharding.check_parameters()
            if has_unsynced(self.model):
                raise UsageError(
                    "collect: gradients were held back by set_requires_gradient_sync(False); set it to True "
                    "before the backward of each rank's last micro-batch, or leave it away"
                )
            waited = self.transport.barrier(Meeting.END_OF_STEP, self.num_minibatches)
            self.waited_s = sharding.blocked.wait_s + waited
        with control.phase(Phase.COLLECT):
            sharding.add_up()
            faults = sharding.faults()
            if faults.numel():
                sharding.raise_faults(self._job.device.start_fetch(faults)(control))
        with control.phase(Phase.AGREE):
            sharding.show_gradients(self._agree(again=again))
        self._state = _State.COLLECTED
        self._stepped.clear()

    def _agree(self, *, again: bool) -> torch.Tensor:
        """All ranks have ended the last minibatch alike; returns which parameters have gradients, as bool."""
        assert self._job is not None
        topology, used = self._job.topology, self._sharding.used()
        ways = torch.zeros(2, topology.world_size, dtype=used.dtype)
        ways[:, topology.rank] = torch.tensor([self._way, again], dtype=used.dtype)
        message = torch.cat([ways.view(-1), used])
        work = dist.all_reduce(message, group=self._job.host_group, async_op=True)
        self._control.wait_work(work, "the agreement on which parameters have gradients")
        told, used = message[: ways.numel()].view(ways.shape).long(), message[ways.numel() :] > 0
        check_alike(
            told[0].tolist(),
            told[1].bool().tolist(),
            used=bool(used.any()),
            minibatch=self.num_minibatches - 1,
            describe=self._control.describe_rank,
        )
        if not used.any() and topology.rank == 0:
            logger.warning("collect: minibatch %d has no gradient on any rank", self.num_minibatches)
        return used

    def publish(self) -> None:
        """Make the present parameters the ones that all ranks use. Collective.

        Needed after loading or changing parameters between minibatches, and after the update where ``attach``
        was given no optimizer.
        """
        self._require_open()
        if self._job is None:
            return
        if self._state is _State.COLLECTED:
            self._end_minibatch()
            return
        with self._control.phase(Phase.PUBLISH):
            if self._pushed:
                raise UsageError("publish: call it between minibatches; gradients of this one are under way")
            assert self.transport is not None  # there is a job
            self.transport.barrier(Meeting.PUBLISH, self.num_minibatches)
            self._sharding.publish(Changed.ALL)

    def _end_without_step(self) -> None:
        """The trainer has skipped the step (a norm that is not finite, say), or changed parameters itself."""
        if self._sharding.has_changed and not (self._optimizers and self._stepped):
            what = (
                "by something else than the optimizer that attach was given; give it all of them"
                if self._optimizers
                else "and not published; give attach the optimizer, or call publish() after the update"
            )
            self._refuse(f"parameters were changed after collect() {what}")
        self._end_minibatch()

    def _end_minibatch(self) -> None:
        if not self._optimizers and self._sharding.has_changed:
            self._stepped.add(0)  # an update without an optimizer of torch's
        self._way = way_of(self._stepped)
        with self._control.phase(Phase.PUBLISH):
            self._sharding.release()
            self._sharding.publish(Changed.TRAINABLE)
        self._state = _State.WORK
        self._begun = self._pushed = False
        self._micro_batches = self._enqueued = 0
        self.num_minibatches += 1
        self._control.enter(Phase.BETWEEN, step=self.num_minibatches, micro_batch=0)

    # -- what the trainer does, as hooks see it --------------------------------------------------------

    def _begin(self) -> None:
        if not self._begun:
            self._sharding.begin()
            self._begun = True

    def _before_forward(self, *_: Any) -> None:
        self._require_open()
        if self._state is _State.COLLECTED:
            self._end_without_step()
        self._begin()
        if not self._pushed:
            try:
                self._sharding.check_parameters()
            except UsageError as error:
                self._control.fail(error)
                raise
        if torch.is_grad_enabled():
            self._control.enter(Phase.FORWARD, micro_batch=self._micro_batches)
            self._micro_batches += 1

    def _check_pull(self) -> None:
        self._require_open()
        if self._state is _State.COLLECTED:
            self._refuse(
                "a part of the model runs between collect() and optimizer.step(), whose parameters are about "
                "to change; run it before collect() or after the step"
            )

    def _check_push(self) -> None:
        if self._state is _State.COLLECTED:
            self._refuse("a backward between collect() and optimizer.step(); its gradients would be lost")
        self._pushed = True

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._holds(optimizer):
            return
        if self._state is _State.COLLECTED:
            if self._optimizers and all(optimizer is not known for known in self._optimizers):
                self._refuse(
                    f"a {type(optimizer).__name__} that attach was not given steps the model's parameters; "
                    "give attach all optimizers: optimizer=[first, second]"
                )
            self._control.enter(Phase.UPDATE)
        elif self._pushed or not any(p.grad is not None for p in _parameters_of(optimizer)):
            # With gradients of its own and none of ours it is somebody who lets an optimizer make its states.
            self._refuse(
                "optimizer.step() without collect(): the gradients are still with the ranks that own them. "
                "Call collect() on every rank once a minibatch, before clipping and the step (and no forward "
                "in between)"
            )

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._holds(optimizer):
            return
        if self._state is _State.WORK:
            self._sharding.accept_unchanged()
            return
        if not self._optimizers:  # the trainer calls publish()
            self._stepped.add(0)
            return
        self._stepped.add(next(at for at, known in enumerate(self._optimizers) if known is optimizer))
        if len(self._stepped) == len(self._optimizers):
            self._end_minibatch()

    def _holds(self, optimizer: Optimizer) -> bool:
        if self._state is _State.CLOSED:
            return False
        return any(id(parameter) in self._parameters for parameter in _parameters_of(optimizer))

    def _refuse(self, message: str) -> NoReturn:
        """End the job on all ranks: they may wait for what this one had to do."""
        error = UsageError(message)
        self._control.fail(error)
        raise error

    def _require_open(self) -> None:
        if self._state is _State.CLOSED:
            raise UsageError("the handle is closed; attach the model again")

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go: the model trains with FSDP2's own collectives again. Collective, between minibatches.

        Raises:
            UsageError: ranks are at different places of the program, or have ended the last minibatch in
                different ways.
            PeerError: another rank failed before it came here.
        """
        if self._state is not _State.CLOSED:
            self._close(Meeting.CLOSE)

    def _close(self, meeting: Meeting) -> None:
        if self._pushed and self._state is _State.WORK:
            logger.warning(
                "rank %d: gradients of minibatch %d were handed over but never collected; they are lost",
                dist.get_rank(),
                self.num_minibatches,
            )
        if self._state is _State.COLLECTED:
            self._way = way_of(self._stepped)
        job = self._let_go()
        if job is None:
            return
        try:
            with job.control.phase(Phase.CLOSING):
                self._sharding.close()
                assert self.transport is not None  # there is a job
                self.transport.barrier(meeting, self._way)  # the last minibatch has ended alike on all ranks
                self.transport.close(meeting)
                job.control.part_from_nodes()
        finally:
            job.control.close()
        job.leave()

    def _abandon(self, error: BaseException) -> None:
        """After a failure: tell the others and go, without meeting them."""
        if self._state is _State.CLOSED:
            return
        if self._job is not None:
            self._control.fail(error)
        job = self._let_go()
        if job is not None and self.transport is not None:
            self._sharding.close()
            self.transport.close(None)

    def _let_go(self) -> Job | None:
        self._state = _State.CLOSED
        if self._job is None:
            return None
        for hook in self._hooks:
            hook.remove()
        for before in self._before:
            before.restore()
        delattr(self.model, _ATTRIBUTE)
        atexit.unregister(self._at_exit)
        return self._job

    def __enter__(self) -> AttachedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self._abandon(error)


def _parameters_of(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def attach_fsdp2(model: nn.Module, optimizer: Any | Sequence[Any] | None, settings: Config) -> AttachedModel:
    """Take the collectives out of a model's minibatches. Collective; see ``odcengine.attach``.

    Args:
        model: what ``fully_shard`` was applied to.
        optimizer: the optimizer, or all of them.
        settings: the configuration; its ``odc`` section counts.

    Raises:
        ConfigError: what cannot work, each with its reason; nothing has changed then.
        UsageError: the model is attached already, or has gradients.
        PeerError: another rank failed or did not come in time.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation may have left full parameters
    info = read_rank_info()
    check(model, info.world_size)
    optimizers = _optimizers(model, optimizer)
    if info.world_size == 1:
        logger.info("odcengine.attach: one rank has nobody to communicate with; the model stays as it is")
        return AttachedModel(model, optimizers, None, settings)
    device = next(model.parameters()).device
    settings = on_device(settings, device.type, "model")
    job = join(info, settings)
    job.control.install_excepthook()
    try:
        with job.control.phase(Phase.STARTING):
            if job.device.torch_device != device:
                raise ConfigError(
                    f"odcengine.attach: the model is on {device}, but this rank's device is "
                    f"{job.device.torch_device}; call torch.cuda.set_device(LOCAL_RANK) before"
                )
            ignored = [
                name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)
            ]
            if ignored and info.rank == 0:
                logger.warning(
                    "odcengine.attach: %s is not sharded (of %d); the trainer sums its gradients itself, "
                    "which must not be inside of a minibatch",
                    ignored[0],
                    len(ignored),
                )
            attached = AttachedModel(model, optimizers, job, settings)
    except BaseException:
        job.control.close()  # the others have been told
        raise
    job.control.enter(Phase.BETWEEN, step=0, micro_batch=0)
    return attached


def _optimizers(model: nn.Module, given: Any | Sequence[Any] | None) -> list[Optimizer]:
    """Torch's optimizers in what was given, which may wrap them (Accelerate does)."""
    known = {id(parameter) for parameter in model.parameters()}
    found = []
    for wrapped in given if isinstance(given, (list, tuple)) else () if given is None else (given,):
        optimizer = wrapped
        while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = optimizer.optimizer
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"odcengine.attach: optimizer is a {type(wrapped).__name__}; expected torch's, or a list"
            )
        strange = sum(id(parameter) not in known for parameter in _parameters_of(optimizer))
        if strange:
            raise ConfigError(
                f"odcengine.attach: {strange} parameters of the {type(optimizer).__name__} are none of the "
                "model's; make it after fully_shard, from model.parameters()"
            )
        found.append(optimizer)
    return found


def _leave_at_exit(reference: weakref.ref[AttachedModel]) -> None:
    """Let go of a model that the script left attached, if the run went well so far."""
    attached = reference()
    if attached is None or attached._job is None or attached._state is _State.CLOSED:
        return
    control = attached._control
    if not control.is_owner:
        return
    if control.failed:
        attached._state = _State.CLOSED
        return
    try:
        attached._close(Meeting.EXIT)
    except OdcError as error:
        logger.error("at exit: %s", error)
