"""The adapter to FSDP2's memory layout: which parameters form a group, in which order, where each one lies.

FSDP2 hands its hooks flat buffers and does not say what is in them. The order of parameters is read from
FSDP2's own list where that (private) list exists and otherwise derived with public means; both are only
assumptions until :func:`prove_layout` has seen FSDP2 itself lay out known bytes in the same way. Private
attributes of torch are used in this file and, for models that others have sharded, in ``fsdp2/guard.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

try:  # the documented base classes of the hooks; torch has not moved them to a public module yet
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
except ImportError as error:  # pragma: no cover - depends on the installed torch
    raise ImportError(
        f"odcengine needs torch >= 2.11 (FSDP2 with custom communication), found {torch.__version__}"
    ) from error
# torch.compiler.disable does the same, but imports dynamo at once, which takes seconds.
from torch._compile import _disable_dynamo as without_dynamo

from odcengine.errors import ConfigError, OdcError

__all__ = [
    "AllGather",
    "ParamEntry",
    "ParamGroup",
    "PlainMemory",
    "ReduceScatter",
    "find_groups",
    "padding_notice",
    "prove_layout",
    "without_dynamo",
    "write_shard",
]


@dataclass
class ParamEntry:
    """One parameter in its group.

    Attributes:
        name: qualified name in the model.
        param: the sharded parameter, a DTensor.
        dtype: dtype in which it is pulled.
        numel: elements of one rank's shard, padded: equal on all ranks.
        byte_offset: where the shard starts in the group's shard, in bytes.
        grad_offset: where its gradient starts in the group's gradient shard, in elements; None if frozen.
    """

    name: str
    param: nn.Parameter
    dtype: torch.dtype
    numel: int
    byte_offset: int
    grad_offset: int | None = None

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, unpadded, in the parameter's own dtype."""
        return _as_dtensor(self.param, self.name).to_local()


@dataclass
class ParamGroup:
    """The parameters that FSDP2 gathers and reduces together.

    Attributes:
        index: position among the model's groups, equal on all ranks.
        name: qualified name of the module.
        module: the module on which the hooks are set.
        entries: all parameters, in FSDP2's order.
        nbytes: bytes of one rank's shard of all parameters.
        trainable: those of ``entries`` that require a gradient.
        grad_numel: elements of one rank's shard of all gradients.
    """

    index: int
    name: str
    module: FSDPModule
    entries: list[ParamEntry]
    nbytes: int
    trainable: list[ParamEntry] = field(init=False)
    grad_numel: int = field(init=False)

    def __post_init__(self) -> None:
        self.trainable, self.grad_numel = [], 0
        for entry in self.entries:
            if entry.param.requires_grad:
                entry.grad_offset = self.grad_numel
                self.grad_numel += entry.numel
                self.trainable.append(entry)

    @property
    def label(self) -> str:
        """Name for messages."""
        return self.name or "the root"


def find_groups(
    model: nn.Module, param_dtype: torch.dtype | Callable[[FSDPModule], torch.dtype | None] | None
) -> list[ParamGroup]:
    """List the groups of a model that ``fully_shard`` has sharded on a 1-D mesh.

    Args:
        model: the sharded model.
        param_dtype: ``MixedPrecisionPolicy.param_dtype`` with which it was sharded; a function where modules
            differ.

    Returns:
        The groups in the order of ``model.modules()``. Modules without parameters of their own have none.

    Raises:
        ConfigError: a 2-D mesh, a placement other than ``Shard``, a tensor subclass with gather hooks of its
            own, or several groups in one module.
    """
    names = {id(param): name for name, param in model.named_parameters(remove_duplicate=False)}
    groups: list[ParamGroup] = []
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        params = _own_params(module, module_name, seen)
        if not params:
            continue
        entries, offset = [], 0
        computed_in = param_dtype(module) if callable(param_dtype) else param_dtype
        for param in params:
            name = names.get(id(param), "?")
            dtype = computed_in or param.dtype
            numel = _padded_numel(_as_dtensor(param, name), name)
            entries.append(ParamEntry(name, param, dtype, numel, offset))
            offset += numel * dtype.itemsize
        groups.append(ParamGroup(len(groups), module_name, module, entries, offset))
    return groups


def padding_notice(groups: Sequence[ParamGroup], world_size: int) -> str | None:
    """What to tell of a model whose windows are padding for a large part.

    FSDP2 cuts parameters along the first dimension, into parts of equal size.

    Args:
        groups: all groups of the model.
        world_size: number of shards.

    Returns:
        One sentence, or None where padding is less than a quarter.
    """
    whole = sum(entry.param.numel() for group in groups for entry in group.entries)
    padded = {entry.name: entry.numel * world_size for group in groups for entry in group.entries}
    if sum(padded.values()) <= 1.25 * whole:
        return None
    sizes = {entry.name: entry.param.numel() for group in groups for entry in group.entries}
    worst = max(padded, key=lambda name: padded[name] - sizes[name])
    shape = next(list(e.param.shape) for group in groups for e in group.entries if e.name == worst)
    return (
        f"with padding its shards have {sum(padded.values()) / whole:.2f} times its parameters: {worst} of "
        f"shape {shape} is cut along its first dimension into {world_size} parts of equal size"
    )


def _as_dtensor(param: torch.Tensor, name: str) -> DTensor:
    if not isinstance(param, DTensor):
        raise OdcError(
            f"parameter {name} is not sharded right now; full parameters are only there inside a forward "
            "or backward"
        )
    return param


def _padded_numel(param: DTensor, name: str) -> int:
    if param.device_mesh.ndim != 1 or len(param.placements) != 1:
        raise ConfigError(
            f"model: parameter {name} lies on a {param.device_mesh.ndim}-D mesh; on-demand communication "
            "needs one mesh axis over all ranks (for hybrid sharding set `odc.sharding: hybrid` instead)"
        )
    placement = param.placements[0]
    if not isinstance(placement, Shard):
        raise ConfigError(f"model: parameter {name} is placed {placement}; it must be sharded by fully_shard")
    if hasattr(param.to_local(), "fsdp_pre_all_gather"):
        raise ConfigError(
            f"model: parameter {name} is a {type(param.to_local()).__name__}, which changes what is gathered "
            "(fsdp_pre_all_gather); this is not supported"
        )
    shape = list(param.shape)
    shape[placement.dim] = -(-shape[placement.dim] // param.device_mesh.size())
    return math.prod(shape)


def _own_params(module: FSDPModule, name: str, seen: set[int]) -> list[nn.Parameter]:
    """Parameters of the module's group in FSDP2's order; empty where another module has stated them."""
    get_state = getattr(module, "_get_fsdp_state", None)
    if get_state is None:
        unique = {id(param): param for param in _walk(module) if id(param) not in seen}
        seen.update(unique)
        return list(unique.values())
    state = get_state()
    if id(state) in seen:  # fully_shard([a, b]): both modules share one group
        return []
    seen.add(id(state))
    found: Any = getattr(state, "_fsdp_param_groups", None)
    if found is None:
        single = getattr(state, "_fsdp_param_group", None)
        found = [] if single is None else [single]
    if len(found) > 1:
        raise ConfigError(
            f"model: module {name or 'the root'} has {len(found)} parameter groups; one is supported"
        )
    return [fsdp_param.sharded_param for fsdp_param in found[0].fsdp_params] if found else []


def _walk(module: Any) -> Iterator[nn.Parameter]:
    """Depth first, children before the module's own parameters, not entering nested FSDP modules."""
    visited: set[int] = set()

    def visit(current: nn.Module) -> Iterator[nn.Parameter]:
        visited.add(id(current))
        for child in current.children():
            if id(child) not in visited and not isinstance(child, FSDPModule):
                yield from visit(child)
        for param in current.parameters(recurse=False):
            if isinstance(param, DTensor):
                yield param

    return visit(module)


class PlainMemory:
    """FSDP2 asks its hooks for memory; plain torch memory does. It must be fresh: FSDP2 may keep it."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Uninitialised tensor of ``size``."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Recorder(PlainMemory, AllGather):
    """Keeps what FSDP2 would send; sends nothing."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.seen.append(input_tensor.clone().view(torch.uint8))
        return None


@torch.no_grad()
def prove_layout(groups: Sequence[ParamGroup]) -> None:
    """Let FSDP2 lay out known values and compare with what :class:`ParamGroup` says; no communication.

    Each parameter gets random content for the moment, so that equal parameters cannot hide a swap.

    Args:
        groups: all groups of the model, on two or more ranks (with one rank FSDP2 gathers nothing).

    Raises:
        OdcError: the installed torch lays parameters out differently; names the group.
    """
    device = groups[0].entries[0].local.device
    generator = torch.Generator(device).manual_seed(0)
    for group in groups:
        kept = [entry.local.clone() for entry in group.entries]
        for entry in group.entries:
            noise = torch.rand(entry.local.shape, generator=generator, dtype=torch.float32, device=device)
            entry.local.copy_((noise * 100).to(entry.local.dtype))
        recorder = _Recorder()
        group.module.set_custom_all_gather(recorder)
        expected = torch.zeros(group.nbytes, dtype=torch.uint8, device=group.entries[0].local.device)
        write_shard(group, expected)
        group.module.unshard()
        group.module.reshard()
        for entry, content in zip(group.entries, kept, strict=True):
            entry.local.copy_(content)
        if len(recorder.seen) != 1 or not torch.equal(recorder.seen[0], expected):
            raise OdcError(
                f"torch {torch.__version__} lays out the parameters of {group.label} in a way this version "
                "of odcengine does not know; please report it with the model's class"
            )


@torch.no_grad()
def write_shard(group: ParamGroup, row: torch.Tensor, entries: Sequence[ParamEntry] | None = None) -> None:
    """Copy this rank's shard of parameters into place, cast to the dtype in which they are pulled.

    Args:
        group: the group.
        row: 1-D uint8 of ``group.nbytes``; padding is left as it is.
        entries: which parameters; all by default.
    """
    targets, sources = [], []
    for entry in group.entries if entries is None else entries:
        local = entry.local.reshape(-1)
        nbytes = local.numel() * entry.dtype.itemsize
        target = row[entry.byte_offset : entry.byte_offset + nbytes]
        if target.storage_offset() % entry.dtype.itemsize == 0:
            targets.append(target.view(entry.dtype))
            sources.append(local)
        else:  # mixed dtypes in one group: segments need not be aligned
            target.copy_(local.to(entry.dtype).view(torch.uint8))
    if targets:
        torch._foreach_copy_(targets, sources)
