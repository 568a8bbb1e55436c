"""FSDP2's public hooks: where it would gather parameters and reduce gradients, they are pulled and pushed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from odcengine.errors import OdcError
from odcengine.sharding.layout import AllGather, ParamEntry, ParamGroup, PlainMemory, ReduceScatter
from odcengine.transport.base import Transport


class Mover(Protocol):
    """What the hooks hand over to: see :class:`~odcengine.sharding.on_demand.OnDemandSharding`."""

    transport: Transport

    def pull(self, group: ParamGroup, out: torch.Tensor) -> None: ...

    def enter_push(self, group: ParamGroup) -> frozenset[int] | None: ...

    def push(
        self,
        group: ParamGroup,
        rows: torch.Tensor,
        entries: Sequence[ParamEntry],
        chosen: frozenset[int] | None,
    ) -> None: ...


def set_hooks(
    mover: Mover, groups: Sequence[ParamGroup], world_size: int, used: torch.Tensor
) -> list[RemovableHandle]:
    """Have FSDP2 call ``mover`` for all groups of a model.

    Args:
        mover: pulls and pushes.
        groups: the model's groups.
        world_size: number of ranks.
        used: float64 ``[trainable parameters]``: set to 1 for those that gradients are pushed of.

    Returns:
        The hooks on parameters, to be removed with :meth:`~torch.utils.hooks.RemovableHandle.remove`.
    """
    handles, first = [], 0
    for group in groups:
        group.module.set_custom_all_gather(PullHook(mover, group, world_size))
        push = PushHook(mover, group, used[first : first + len(group.trainable)])
        group.module.set_custom_reduce_scatter(push)
        for position, entry in enumerate(group.trainable):
            hook = _AccumulateHook(push, position)
            handle = entry.param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            handles.append(handle)
        first += len(group.trainable)
    return handles


class PullHook(PlainMemory, AllGather):
    """Replaces the all-gather of one group."""

    def __init__(self, mover: Mover, group: ParamGroup, world_size: int) -> None:
        self._mover = mover
        self._group = group
        self._world_size = world_size

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        world_size = self._world_size
        out = output_tensor.view(torch.uint8)
        if group.size() != world_size or out.numel() != world_size * self._group.nbytes:
            raise OdcError(
                f"FSDP2 gathers {out.numel()} bytes of {self._group.label} over {group.size()} ranks; "
                f"expected {world_size * self._group.nbytes} over {world_size}. An integer "
                "reshard_after_forward or a second mesh axis does this; neither works on demand"
            )
        self._mover.pull(self._group, out.view(world_size, self._group.nbytes))
        return None


class PushHook(PlainMemory, ReduceScatter):
    """Replaces the reduce-scatter of one group.

    FSDP2 concatenates the gradients of only those parameters that have one. If all have, the whole buffer is
    pushed at once. Else its order tells nothing, so each parameter's post-accumulate hook, which FSDP2 runs
    in the buffer's order right after this one, pushes its own segment.
    """

    def __init__(self, mover: Mover, group: ParamGroup, used: torch.Tensor) -> None:
        self._mover = mover
        self._group = group
        self._used = used
        self._takes_rows = True  # FSDP2 asks for the memory of gradients first, then for that of their sum
        self._pending: torch.Tensor | None = None  # [W, k], what is not pushed yet
        self._chosen: frozenset[int] | None = None  # experts that it is for
        self._done = 0  # elements of each row seen by the post-accumulate hooks

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if not self._takes_rows:
            return super().allocate(size, dtype=dtype, device=device)
        rows = self._mover.transport.lend_source(size, dtype, device)
        self._takes_rows = False  # not where there was no memory
        return rows

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise OdcError(f"FSDP2 reduces {self._group.label} with {op}; on-demand gradients are sums")
        if self._pending is not None:
            raise OdcError(f"FSDP2 reduces {self._group.label} before its last gradients were taken")
        self._takes_rows = True
        rows = input_tensor.view(group.size(), output_tensor.numel())
        self._chosen = self._mover.enter_push(self._group)
        self._done = 0
        if rows.shape[1] == self._group.grad_numel:
            self._mover.push(self._group, rows, self._group.trainable, self._chosen)
            self._used.fill_(1)
        else:
            self._pending = rows

    def take(self, position: int) -> None:
        """Push the segment of one parameter, and check that FSDP2 visits parameters in the layout's order."""
        entry = self._group.trainable[position]
        assert entry.grad_offset is not None  # it is trainable
        if self._pending is None:
            if self._done != entry.grad_offset:
                raise OdcError(f"FSDP2 laid out the gradients of {self._group.label} in an unknown order")
            self._done += entry.numel
            return
        segment = self._pending[:, self._done : self._done + entry.numel]
        self._mover.push(self._group, segment, [entry], self._chosen)
        self._used[position] = 1
        self._done += entry.numel
        if self._done == self._pending.shape[1]:
            self._pending = None


class _AccumulateHook:
    """Called when FSDP2 has set a parameter's ``.grad``, which is dropped: the accumulator has the sum."""

    def __init__(self, push: PushHook, position: int) -> None:
        self._push = push
        self._position = position

    def __call__(self, param: torch.Tensor) -> None:
        param.grad = None
        self._push.take(self._position)
