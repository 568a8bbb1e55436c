"""DeepSpeed's stage-3 optimizer and parameter coordinator with the collectives of a minibatch taken out.

An engine is attached by changing the classes of its optimizer and coordinator to the ones below, and by
moving its flat buffers into windows. DeepSpeed's own code then does all the rest: hooks, prefetching,
clipping, loss scales, the optimizer's step, checkpoints. What is relied on is fingerprinted in ``guard.py``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from odcengine.control import ControlBlock, Meeting, Phase
from odcengine.deepspeed.layout import ParamSpec, Slot, ZeroLayout
from odcengine.deepspeed.windows import ZeroWindows
from odcengine.errors import ConfigError, UsageError

_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


class OnDemand:
    """What an attached optimizer has beyond DeepSpeed's.

    Attributes:
        windows: all ranks' parameters and sums.
        control: the node's control block.
        slots: parameter's ``ds_id`` -> where it lies.
        num_boundaries: optimizer steps since the engine was attached, skipped ones included.
        num_micro_batches: backwards of this rank since the last of them.
        waited_s: seconds that this rank waited for others in the minibatch before and at its end.
        scale: called after barrier A; what sums are multiplied by before the norm is taken.
        after_meeting: called when barrier A has been passed.
        loading: a checkpoint is being loaded.
        closed: the windows are gone.
    """

    def __init__(self, windows: ZeroWindows, slots: dict[int, Slot], scale: Callable[[], float]) -> None:
        self.windows = windows
        self.control: ControlBlock = windows.control
        self.slots = slots
        self.num_boundaries = 0
        self.num_micro_batches = 0
        self.waited_s = 0.0
        self.scale = scale
        self.after_meeting: Callable[[], None] = _nothing
        self.loading = False
        self.closed = False
        self._published = True

    def fetch(self, params: Sequence[Any]) -> list[torch.Tensor]:
        """Whole parameters, in their shapes."""
        self.require_open()
        flat = self.windows.fetch([self.slots[param.ds_id] for param in params])
        return [tensor.view(param.ds_shape) for param, tensor in zip(params, flat, strict=True)]

    def require_open(self) -> None:
        """Raise where :attr:`closed`."""
        if self.closed:
            raise UsageError("the attached DeepSpeed engine is closed; attach a new engine for another run")

    def finish(self) -> None:
        """The step is done, or skipped: empty the sums and raise flag B."""
        if not self._published:
            with self.control.phase(Phase.PUBLISH):
                self.windows.empty_sums()
                self.windows.publish_trained()
            self._published = True

    def begin_step(self) -> None:
        """From here on :meth:`finish` is due."""
        self._published = False


def _nothing() -> None:
    pass


class Fetched:
    """Parameters on their way, as DeepSpeed's coordinator keeps them.

    On a GPU the reads are enqueued on the stream on which this was made, the coordinator's, and :meth:`wait`
    is called under the same one; DeepSpeed then orders computation behind it.
    """

    def __init__(self, params: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        self._left = list(zip(params, tensors, strict=True))

    def wait(self, handle_dependency: bool = True, **_: Any) -> None:
        """Give the parameters what was read."""
        for param, tensor in self._left:
            param.data = tensor
            param.ds_status = ZeroParamStatus.AVAILABLE
        self._left = []


def _without_agreement(function: Any) -> Any:
    """The coordinator's ``reset_step`` without its comparison of traces between ranks, two broadcasts or six.

    A copy that finds another function under the comparison's name; DeepSpeed's own stays as it is.
    """
    plain = getattr(function, "__wrapped__", function)
    name = "assert_ints_same_as_other_ranks"
    if not isinstance(plain, types.FunctionType) or name not in plain.__globals__:
        raise ConfigError(
            "deepspeed: PartitionedParameterCoordinator.reset_step is not what odcengine was tested with"
        )
    names = {**plain.__globals__, name: lambda ints: None}
    return types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)


class OnDemandCoordinator(PartitionedParameterCoordinator):
    """Ranks run different modules in different orders, each with a trace and prefetches of its own."""

    odc: OnDemand
    _reset_step_alone = staticmethod(_without_agreement(PartitionedParameterCoordinator.reset_step))

    def reset_step(self) -> None:
        """A forward of the model begins."""
        self.odc.require_open()
        self.odc.control.enter(Phase.FORWARD)
        self._reset_step_alone(self)


class OnDemandStage3(DeepSpeedZeroOptimizer_Stage3):
    """DeepSpeed's stage-3 optimizer on windows."""

    odc_attached = True
    odc: OnDemand

    # -- inside a minibatch ----------------------------------------------------------------------------

    @torch.no_grad()
    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Any) -> None:
        """A gradient is ready: hand it to its owners, instead of to the bucket of the reduce-scatter."""
        self.odc.require_open()
        if not getattr(param, "ds_grad_is_ready", True):  # more of it comes: a computation in tiles
            return
        self.odc.windows.push(self.odc.slots[param.ds_id], param.grad)
        param.grad = None

    def independent_gradient_partition_epilogue(self) -> None:
        """A backward is over."""
        self.odc.windows.flush()
        super().independent_gradient_partition_epilogue()

    def backward_prologue(self) -> None:
        self.odc.control.enter(Phase.BACKWARD)
        super().backward_prologue()

    def backward_epilogue(self) -> None:
        super().backward_epilogue()
        self.odc.num_micro_batches += 1
        self.odc.control.enter(Phase.BETWEEN, micro_batch=self.odc.num_micro_batches)

    # -- the minibatch's end ---------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """Barrier A, DeepSpeed's step on the sums, flag B."""
        odc = self.odc
        odc.require_open()
        with odc.control.phase(Phase.BARRIER):
            self._partition_all_parameters()  # what is on its way arrives; nothing whole outlives the step
            waited = odc.windows.meet(Meeting.END_OF_STEP, odc.num_boundaries)
            odc.waited_s = odc.windows.wait_s + waited
            odc.after_meeting()
        with odc.control.phase(Phase.COLLECT):
            self._show_sums()
        odc.begin_step()
        with odc.control.phase(Phase.UPDATE):
            super().step(closure)
        odc.finish()
        odc.windows.start_minibatch()
        odc.num_boundaries += 1
        odc.num_micro_batches = 0
        odc.control.enter(Phase.BETWEEN, step=odc.num_boundaries, micro_batch=0)

    @torch.no_grad()
    def _show_sums(self) -> None:
        """Put the sums where DeepSpeed's step looks for gradients; without a backward none are there."""
        sums, scale = self.odc.windows.collect(), self.odc.scale()
        if sums and scale != 1.0:
            torch._foreach_mul_(sums, scale)
        for index, group in enumerate(self.fp16_groups):
            self.averaged_gradients[index] = [
                self.odc.windows.part_of(sums, self.odc.slots[param.ds_id]) for param in group
            ]
        if self.dtype == torch.float16:
            # Its check for overflow looks here: not finite where a sum is not.
            self.grad_partitions_flat_buffer = torch.stack([part.sum(dtype=torch.float64) for part in sums])
        if not get_accelerator().is_synchronized_device():
            self.reduce_and_partition_stream.wait_stream(get_accelerator().current_stream())

    def _post_step(self, timer_names: Any) -> None:
        self.odc.finish()  # before persistent parameters are read anew
        super()._post_step(timer_names)

    # -- between minibatches ---------------------------------------------------------------------------

    def checkpoint_event_prologue(self) -> None:
        super().checkpoint_event_prologue()
        if self.odc.loading:
            self.odc.windows.meet_to_write()

    def checkpoint_event_epilogue(self) -> None:
        if self.odc.loading:
            check_layout(self)
            self.odc.windows.empty_sums()
            self.odc.windows.publish()
        super().checkpoint_event_epilogue()

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> Any:
        raise UsageError(
            "safe_get_full_grad and its like: within a minibatch gradients are still being summed by their "
            "owners, and the step uses them up; not available on an attached engine"
        )

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        raise UsageError("offload_states: it would move the shards out of their windows")

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        raise UsageError("reload_states: states of an attached engine are never offloaded")


def layout_of(optimizer: Any) -> tuple[ZeroLayout, list[Any]]:
    """Where the parameters of an optimizer will lie.

    Returns:
        The layout, and the parameters in its order.

    Raises:
        ConfigError: DeepSpeed's flat buffer is not what is expected.
    """
    trained = [param for group in optimizer.fp16_groups for param in group]
    ids = {param.ds_id for param in trained}
    if len(ids) < len(trained):
        raise ConfigError("odcengine.attach: a parameter is in two groups of the optimizer; name each once")
    frozen = {p.ds_id: p for p in optimizer.module.parameters() if p.ds_id not in ids}
    params = trained + [frozen[ds_id] for ds_id in sorted(frozen)]
    names = {param.ds_id: name for name, param in optimizer.module.named_parameters()}
    specs = [
        ParamSpec(
            names.get(param.ds_id, f"parameter {param.ds_id}"),
            param.ds_numel,
            param.partition_numel(),
            param.ds_tensor.dtype,
            param.ds_id in ids,
        )
        for param in params
    ]
    layout = ZeroLayout.of(specs)
    buffer = optimizer.lp_param_buffer
    if layout.trained_nbytes != buffer.numel() * buffer.element_size():
        raise ConfigError(
            f"deepspeed: its flat buffer has {buffer.numel()} elements, the shards of what is trained "
            f"{layout.trained_nbytes // buffer.element_size()}; this layout is not known"
        )
    return layout, params


@torch.no_grad()
def move_into_windows(
    optimizer: Any,
    windows: ZeroWindows,
    layout: ZeroLayout,
    params: Sequence[Any],
    scale: Callable[[], float],
) -> OnDemand:
    """Move shards into windows and change the classes. Collective.

    Args:
        optimizer: one that ``guard.check_engine`` has accepted.
        windows: allocated for ``layout``.
        layout: from :func:`layout_of`.
        params: in the layout's order.
        scale: see :class:`OnDemand`.
    """
    optimizer._partition_all_parameters()
    slots = {param.ds_id: slot for param, slot in zip(params, layout.slots, strict=True)}
    odc = OnDemand(windows, slots, scale)
    _move_parameters(optimizer, odc, params)
    _move_gradients(optimizer, odc, params)
    for param in params:
        param.all_gather_coalesced = functools.partial(_all_gather_coalesced, odc)
        param.all_gather = functools.partial(_all_gather, odc, param)
        param.partition = functools.partial(_partition, odc, param, param.partition)
    coordinator = optimizer.parameter_offload.param_coordinator
    coordinator.odc = odc
    coordinator.__class__ = OnDemandCoordinator
    optimizer.odc = odc
    optimizer.__class__ = OnDemandStage3
    check_layout(optimizer)
    windows.publish()
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    return odc


def _move_parameters(optimizer: Any, odc: OnDemand, params: Sequence[Any]) -> None:
    """Copy the shards into their windows, and let DeepSpeed's tensors show the copies."""
    flat = odc.windows.trained_shards()
    flat.copy_(optimizer.lp_param_buffer)
    _show(optimizer, flat)
    for param in params:
        slot = odc.slots[param.ds_id]
        if not slot.spec.trained:
            shard = odc.windows.shard(slot)
            shard.copy_(param.ds_tensor)
            param.ds_tensor.data = shard


@torch.no_grad()
def move_out_of_windows(optimizer: Any) -> None:
    """Give the shards memory of their own again; the windows are about to go."""
    _show(optimizer, optimizer.lp_param_buffer.clone())
    for param in optimizer.module.parameters():
        if not optimizer.odc.slots[param.ds_id].spec.trained:
            param.ds_tensor.data = param.ds_tensor.clone()
    getattr(optimizer, _PARTITIONS).clear()
    optimizer.averaged_gradients.clear()


def _show(optimizer: Any, flat: torch.Tensor) -> None:
    """Let DeepSpeed's tensors of trained shards be views of ``flat``: the same tensors, other memory."""
    optimizer.lp_param_buffer.data = flat
    start = 0
    for index, group in enumerate(optimizer.fp16_groups):
        low = optimizer.fp16_partitioned_groups_flat[index]
        master = optimizer.fp32_partitioned_groups_flat[index]
        shared = low.numel() and master.data_ptr() == low.data_ptr()
        low.data = flat.narrow(0, start, low.numel())
        if shared and master is not low:
            master.data = low.data
        for param in group:
            param.ds_tensor.data = flat.narrow(0, start, param.partition_numel())
            start += param.partition_numel()


def _move_gradients(optimizer: Any, odc: OnDemand, params: Sequence[Any]) -> None:
    """Free DeepSpeed's own accumulator and its bucket: sums lie in windows, in fp32."""
    partitions: dict[int, torch.Tensor] = getattr(optimizer, _PARTITIONS)
    trained = {param.ds_id for param in params if odc.slots[param.ds_id].spec.trained}
    if partitions.keys() != trained:
        raise ConfigError("deepspeed: its gradients are not those of the trained parameters; unknown layout")
    for ds_id in trained:
        partitions[ds_id] = odc.windows.own_sum(odc.slots[ds_id])
    optimizer.grad_partitions_flat_buffer = torch.zeros(
        1, device=optimizer.grad_partitions_flat_buffer.device
    )
    for bucket in optimizer.ipg_buckets.values():
        bucket.buffer = None


def check_layout(optimizer: Any) -> None:
    """See that every shard still lies in its window.

    Raises:
        ConfigError: one has moved.
    """
    odc: OnDemand = optimizer.odc
    for param in optimizer.module.parameters():
        slot = odc.slots[param.ds_id]
        if param.ds_tensor.data_ptr() != odc.windows.shard(slot).data_ptr() and slot.nbytes:
            raise ConfigError(
                f"deepspeed: the shard of {slot.spec.name} was moved out of its window; this way of loading "
                "or offloading is not supported on an attached engine"
            )


def _all_gather_coalesced(
    odc: OnDemand, params: Iterable[Any], safe_mode: bool = False, quantize: bool = False
) -> Fetched:
    """``param.all_gather_coalesced``: begin to fetch."""
    wanted = list(params)
    for param in wanted:
        if param.ds_status is not ZeroParamStatus.NOT_AVAILABLE:
            raise RuntimeError(param.ds_summary())
        param.ds_status = ZeroParamStatus.INFLIGHT
    return Fetched(wanted, odc.fetch(wanted))


def _all_gather(
    odc: OnDemand,
    own: Any,
    param_list: Iterable[Any] | None = None,
    async_op: bool = False,
    hierarchy: int = 0,
) -> list[Fetched] | None:
    """``param.all_gather``: fetch what is neither there nor on its way."""
    params = [own] if param_list is None else param_list
    fetched = _all_gather_coalesced(
        odc, [param for param in params if param.ds_status is ZeroParamStatus.NOT_AVAILABLE]
    )
    if async_op:
        return [fetched]
    fetched.wait()
    return None


def _partition(
    odc: OnDemand,
    own: Any,
    partition: Callable[..., None],
    param_list: Iterable[Any] | None = None,
    hierarchy: int = 0,
    has_been_updated: bool = False,
    free_data: bool = True,
) -> None:
    """``param.partition``: drop the whole parameter; write its shard where it was changed, with all ranks."""
    if not has_been_updated:
        partition(param_list, hierarchy, has_been_updated, free_data)
        return
    params = [own] if param_list is None else list(param_list)
    slots = [odc.slots[param.ds_id] for param in params]
    odc.windows.meet_to_write()
    partition(params, hierarchy, has_been_updated, free_data)
    odc.windows.publish(min(slot.offset for slot in slots), max(slot.end for slot in slots))


__all__ = [
    "OnDemand",
    "OnDemandStage3",
    "check_layout",
    "layout_of",
    "move_into_windows",
    "move_out_of_windows",
]
