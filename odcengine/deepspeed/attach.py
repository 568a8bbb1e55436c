"""Attach on-demand communication to an engine that ``deepspeed.initialize`` has made, and let go of it."""

from __future__ import annotations

import atexit
import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from odcengine._attach import on_device, settings_of
from odcengine.config import Config
from odcengine.control import Meeting, Phase
from odcengine.deepspeed.guard import check_engine, check_version
from odcengine.deepspeed.stage3 import OnDemand, layout_of, move_into_windows, move_out_of_windows
from odcengine.deepspeed.windows import ZeroWindows
from odcengine.errors import ConfigError, OdcError, UsageError
from odcengine.ranks import read_rank_info
from odcengine.start import Job, join, make_transport
from odcengine.transport.base import Grid, Transport

logger = logging.getLogger(__name__)

OPTIONS = (
    "allow_untested",
    "grad_reduce",
    "node_size",
    "sharding",
    "startup_timeout_s",
    "timeout_s",
    "transport",
    "unmapped",
)
"""Keys of the ``odc`` section that an attached engine knows."""


class AttachedDeepSpeed:
    """A DeepSpeed engine on demand; from ``odcengine.attach``. The engine itself is used as before.

    Attributes:
        engine: DeepSpeed's.
        transport: one-sided access to other ranks; None with one rank.
    """

    def __init__(
        self, engine: DeepSpeedEngine, transport: Transport | None, job: Job | None, odc: OnDemand | None
    ) -> None:
        self.engine = engine
        self.transport = transport
        self._job = job
        self._odc = odc
        self._left_in_order = False
        if job is not None:
            engine.odc_attached = self  # lives as long as the engine
            atexit.register(functools.partial(_leave_at_exit, weakref.ref(self)))

    @property
    def num_boundaries(self) -> int:
        """Optimizer steps since the engine was attached, skipped ones included; equal on all ranks."""
        return 0 if self._odc is None else self._odc.num_boundaries

    @property
    def waited_s(self) -> float:
        """Seconds that this rank waited for others in the last minibatch and at its end, on the host."""
        return 0.0 if self._odc is None else self._odc.waited_s

    def boundary(self) -> None:
        """End a minibatch on a rank that has no micro-batch left: see ``odcengine.boundary``."""
        boundary(self.engine)

    def close(self) -> None:
        """Leave the job: wait for all ranks, then let go of the windows. Collective.

        The engine keeps its weights and the optimizer's states, but it cannot compute or train any more.

        Raises:
            PeerError: another rank failed before it came here.
        """
        self._close(Meeting.CLOSE)

    def _close(self, meeting: Meeting) -> None:
        odc, job = self._odc, self._job
        if odc is None or job is None or odc.closed:
            return
        odc.closed = True
        if odc.num_micro_batches:
            logger.warning("rank %d: %s", job.topology.rank, _unused_gradients(self.engine, odc))
        try:
            with job.control.phase(Phase.CLOSING):
                if meeting is Meeting.CLOSE:
                    move_out_of_windows(self.engine.optimizer)
                odc.windows.close(meeting)
        finally:
            job.control.close()
        job.leave()
        self._left_in_order = True


def attach_deepspeed(
    engine: DeepSpeedEngine, config: Config | Mapping[str, Any] | None = None, **options: Any
) -> AttachedDeepSpeed:
    """Take the collectives out of an engine's minibatches. Collective; before the first forward.

    Args:
        engine: from ``deepspeed.initialize``, ZeRO stage 3.
        config: a configuration whose ``odc`` section counts, or such a section as a mapping.
        options: keys of that section instead; see :data:`OPTIONS`.

    Returns:
        A handle; the engine itself is changed.

    Raises:
        ConfigError: what cannot work, each with its reason; nothing has changed then.
        UsageError: the engine is attached already, or has gradients that wait for a step.
        PeerError: another rank failed or did not come in time.
    """
    settings = settings_of(config, options, OPTIONS, "DeepSpeed", "engine")
    check_engine(engine)
    warning = check_version(allow_untested=settings.odc.allow_untested)
    info = read_rank_info()
    if warning and info.rank == 0:
        logger.warning("%s", warning)
    if info.world_size == 1:
        logger.info("odcengine.attach: one rank has nobody to communicate with; the engine stays as it is")
        return AttachedDeepSpeed(engine, None, None, None)
    settings = on_device(settings, _device_of(engine).type, "engine")
    job = join(info, settings)
    job.control.install_excepthook()
    try:
        return _attach(engine, settings, job)[0]
    except BaseException:
        job.control.close()  # the others have been told
        raise


def attach_in_job(engine: DeepSpeedEngine, settings: Config, job: Job) -> tuple[AttachedDeepSpeed, OnDemand]:
    """The same for ranks that have met already."""
    check_engine(engine)
    warning = check_version(allow_untested=settings.odc.allow_untested)
    if warning and job.topology.rank == 0:
        logger.warning("%s", warning)
    return _attach(engine, settings, job)


def _attach(engine: DeepSpeedEngine, settings: Config, job: Job) -> tuple[AttachedDeepSpeed, OnDemand]:
    control, optimizer = job.control, engine.optimizer
    with control.phase(Phase.STARTING):
        if job.device.torch_device != _device_of(engine):
            raise ConfigError(
                f"odcengine.attach: the engine is on {engine.device}, but this rank's device is "
                f"{job.device.torch_device}; call torch.cuda.set_device(LOCAL_RANK) before"
            )
        layout, params = layout_of(optimizer)
        transport = make_transport(job, settings, layout.plan(Grid.of(job.topology).num_nodes))
        windows = ZeroWindows(layout, transport, control, job.between_nodes)
        scale = 1.0 if settings.odc.grad_reduce == "sum" else 1.0 / job.topology.world_size
        odc = move_into_windows(optimizer, windows, layout, params, lambda: scale)
    engine.load_checkpoint = functools.partial(_load_checkpoint, odc, engine.load_checkpoint)
    control.enter(Phase.BETWEEN, step=0, micro_batch=0)
    if job.topology.rank == 0:
        logger.info(
            "DeepSpeed ZeRO-3 on demand: %d ranks, %d nodes, %s, gradients: %s",
            job.topology.world_size,
            job.topology.num_nodes,
            type(transport).__name__,
            settings.odc.grad_reduce,
        )
    return AttachedDeepSpeed(engine, transport, job, odc), odc


def _device_of(engine: DeepSpeedEngine) -> Any:
    return engine.optimizer.lp_param_buffer.device


def _load_checkpoint(odc: OnDemand, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``engine.load_checkpoint``, after which all ranks see what was loaded."""
    odc.loading = True
    try:
        with odc.control.phase(Phase.LOADING):
            return load(*args, **kwargs)
    finally:
        odc.loading = False


def boundary(engine: Any) -> None:
    """End the minibatch on a rank that has no micro-batch, or none left, whatever DeepSpeed counts.

    Every rank ends every minibatch once: by the ``engine.step()`` of its last micro-batch, or by this.

    Args:
        engine: DeepSpeed's engine, attached or not, or a wrapper that has it as ``engine``.
    """
    found = engine if isinstance(engine, DeepSpeedEngine) else getattr(engine, "engine", None)
    if not isinstance(found, DeepSpeedEngine):
        raise UsageError(
            f"odcengine.boundary: got a {type(engine).__name__}; expected the engine of deepspeed.initialize"
        )
    if not found.managed_gradient_accumulation():
        found.step()
        return
    before = found._is_gradient_accumulation_boundary
    found.set_gradient_accumulation_boundary(True)
    try:
        found.step()
    finally:
        found._is_gradient_accumulation_boundary = before


def _unused_gradients(engine: Any, odc: OnDemand) -> str:
    """What was left undone with the gradients that no boundary has followed, and why."""
    by_hand = engine._is_gradient_accumulation_boundary
    steps = engine.gradient_accumulation_steps()
    if engine.managed_gradient_accumulation() and by_hand is False:
        reason = "engine.step() does nothing while set_gradient_accumulation_boundary(False) holds"
    elif engine.managed_gradient_accumulation() and by_hand is None and steps > 1:
        reason = f"engine.step() only counts until it was called {steps} times (gradient_accumulation_steps)"
    else:
        reason = "engine.step() was not called after them"
    done = "the run had no boundary at all: it has trained nothing"
    if odc.num_boundaries:
        done = f"the last boundary was that of minibatch {odc.num_boundaries - 1}"
    return (
        f"{odc.num_micro_batches} micro-batches had a backward and no boundary after it: their gradients are "
        f"lost, no optimizer step has used them ({done}; {reason}). Call odcengine.boundary(engine) on every "
        "rank at the end of each minibatch"
    )


def _leave_at_exit(reference: weakref.ref[AttachedDeepSpeed]) -> None:
    """Let go of an engine that the script left open, if the run went well so far, and end the process groups.

    DeepSpeed never ends them. A thread of gloo that still gives back the tensors of its last collective when
    Python shuts down is ended by force while it waits for Python's lock, and that aborts the process
    ("terminate called without an active exception"). Ending the groups joins these threads before.
    """
    attached = reference()
    if attached is None or attached._odc is None:
        return
    control = attached._odc.control
    if not control.is_owner:
        return
    if not attached._odc.closed:
        if control.failed:
            attached._odc.closed = True
            return
        try:
            attached._close(Meeting.EXIT)
        except OdcError as error:
            logger.error("at exit: %s", error)
    if attached._left_in_order and dist.is_initialized():
        dist.destroy_process_group()
