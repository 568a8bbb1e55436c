"""What a model was sharded with: what does not go with on-demand communication, and what has to be restored.

FSDP2 tells only its private attributes how a module was set up; all reading of them is here. What they say of
the layout is proved all the same (``sharding/layout.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from odcengine.errors import ConfigError, UsageError
from odcengine.sharding.layout import PlainMemory

_WHERE = "odcengine.attach"


def is_sharded(model: Any) -> bool:
    """Whether ``fully_shard`` was applied to a model, or to a part of it."""
    return isinstance(model, nn.Module) and any(isinstance(module, FSDPModule) for module in model.modules())


def is_fsdp1(model: Any) -> bool:
    """Whether a model, or a part of it, is wrapped by the older ``FullyShardedDataParallel``."""
    return isinstance(model, nn.Module) and any(
        isinstance(module, FullyShardedDataParallel) for module in model.modules()
    )


def roots(model: nn.Module) -> list[FSDPModule]:
    """The outermost modules that ``fully_shard`` was applied to."""
    found: list[FSDPModule] = []
    inner: set[int] = set()
    for module in model.modules():  # parents before children
        if isinstance(module, FSDPModule) and id(module) not in inner:
            found.append(module)
            inner.update(map(id, module.modules()))
    return found


def group_of(module: FSDPModule) -> Any | None:
    """FSDP2's own record of a module's group; None for a module without parameters of its own."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        single = getattr(state, "_fsdp_param_group", None)
        groups = [] if single is None else [single]
    return groups[0] if groups else None


def param_dtype_of(module: FSDPModule) -> torch.dtype | None:
    """``MixedPrecisionPolicy.param_dtype`` of a module."""
    group = group_of(module)
    dtype: torch.dtype | None = None if group is None else group.mp_policy.param_dtype
    return dtype


def check(model: nn.Module, world_size: int) -> None:
    """Refuse what cannot work, all of it at once, before anything has changed.

    Args:
        model: the model, resharded.
        world_size: number of ranks.

    Raises:
        ConfigError: the problems, each with its reason.
        UsageError: the model belongs to an engine, or is attached already; or gradients are pending.
    """
    problems: dict[str, None] = {}
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        group = group_of(module)
        if group is None:
            continue
        if isinstance(group._all_gather_comm, PlainMemory):
            raise UsageError(
                f"{_WHERE}: the model is attached already, or belongs to an engine of odcengine.initialize"
            )
        for problem in _problems_of(group, world_size):
            problems.setdefault(f"{_WHERE}: {problem} (found at {name or 'the root'})")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and parameter.is_meta:
            problems.setdefault(f"{_WHERE}: parameter {name} is on the meta device; load the weights before")
            break
    unique = {problem.rpartition(" (found at")[0] or problem: problem for problem in reversed(problems)}
    if unique:
        raise ConfigError(*reversed(unique.values()))
    waiting = next((name for name, p in model.named_parameters() if p.grad is not None), None)
    if waiting is not None or has_unsynced(model):
        raise UsageError(
            f"{_WHERE}: {waiting or 'the model'} has a gradient of a backward that no step has used; attach "
            "before the first backward, or after optimizer.step() and optimizer.zero_grad()"
        )


def _problems_of(group: Any, world_size: int) -> Iterator[str]:
    mesh = group.mesh_info.mesh
    if mesh.ndim != 1:
        yield (
            f"the mesh has {mesh.ndim} axes. HSDP keeps whole copies between nodes and adds gradients up by "
            "a collective in every backward, so all ranks would have to run equally many; tensor parallelism "
            "is not supported. Shard over a mesh of one axis with all ranks: sharding='hybrid' then keeps "
            "all traffic of a minibatch inside of nodes as well, in less memory"
        )
    elif mesh.size() != world_size:
        yield (
            f"the mesh has {mesh.size()} of the {world_size} ranks; windows are between all of the job. "
            "Shard over all of them"
        )
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        yield "CPUOffloadPolicy keeps shards on the host, where no window of a GPU can hold them; remove it"
    smaller = group.post_forward_mesh_info
    if smaller is not None and smaller.shard_mesh_size != group.mesh_info.shard_mesh_size:
        yield (
            "reshard_after_forward is a number: those shards are in no window, and only a collective could "
            "gather them; use True or False"
        )
    if getattr(group, "_all_reduce_hook", None) is not None:
        yield "set_all_reduce_hook: there is no all-reduce any more that it could follow; remove it"


def has_unsynced(model: nn.Module) -> bool:
    """Whether gradients wait in a module because of ``set_requires_gradient_sync(False)``."""
    for module in model.modules():
        group = group_of(module) if isinstance(module, FSDPModule) else None
        for param in () if group is None else group.fsdp_params:
            whole = getattr(param, "_unsharded_param", None)
            if param.unsharded_accumulated_grad is not None or getattr(whole, "grad", None) is not None:
                return True
    return False


@dataclass(frozen=True)
class Before:
    """How a group communicated before it was attached.

    Attributes:
        group: FSDP2's.
        divide_factor: set by ``set_gradient_divide_factor``; None: the mean over ranks.
    """

    group: Any
    all_gather: Any
    reduce_scatter: Any
    divide_factor: float | None
    force_sum: bool

    @classmethod
    def of(cls, module: FSDPModule) -> Before:
        """Of a module with parameters of its own."""
        group: Any = group_of(module)
        return cls(
            group,
            group._all_gather_comm,
            group._reduce_scatter_comm,
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
        )

    def restore(self) -> None:
        """Let the group communicate as it did."""
        self.group._all_gather_comm = self.all_gather
        self.group._reduce_scatter_comm = self.reduce_scatter
        self.group.gradient_divide_factor = self.divide_factor
        self.group.force_sum_reduction_for_comms = self.force_sum
