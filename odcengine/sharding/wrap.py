"""Which modules of a model are sharded as one group each, and the call to ``fully_shard`` that does it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from odcengine.errors import ConfigError
from odcengine.sharding.experts import expert_modules

logger = logging.getLogger(__name__)


def group_modules(model: nn.Module, wrap: str | Sequence[str], experts: str) -> list[nn.Module]:
    """:func:`block_modules`, and the layers of experts where these are pulled apart from their blocks.

    Args:
        model: the model.
        wrap: see :func:`block_modules`.
        experts: ``all``: experts are pulled with their block; ``chosen``: only those that tokens chose.

    Returns:
        The modules in the order of ``model.modules()``.

    Raises:
        ConfigError: a class name is not in the model, or it has no experts that could be pulled apart.
    """
    found = set(block_modules(model, wrap))
    if experts == "chosen":
        found.update(expert_modules(model))
    return [module for module in model.modules() if module in found]


def block_modules(model: nn.Module, wrap: str | Sequence[str] = "auto") -> list[nn.Module]:
    """Choose the modules that become a group of their own (their parameters are pulled together).

    Args:
        model: the model.
        wrap: class names of the blocks, or "auto": the model's own ``_no_split_modules`` (transformers), else
            what its ``nn.ModuleList`` s hold, else none (the whole model is one group).

    Returns:
        The modules in the order of ``model.modules()``, parents before children; the model itself is never
        among them.

    Raises:
        ConfigError: a class name is not in the model; names the classes that are.
    """
    modules = [module for module in model.modules() if module is not model]
    if wrap == "auto":
        names = _no_split_names(model)
        found = [module for module in modules if type(module).__name__ in names]
        if found:
            return found
        lists = [module for module in modules if isinstance(module, (nn.ModuleList, nn.ModuleDict))]
        blocks = {child for module in lists for child in module.children() if not _is_container(child)}
        if not blocks:
            logger.info("wrap: no block classes known for %s; it is one group", type(model).__name__)
        return [m for m in modules if m in blocks and any(True for _ in m.parameters())]
    wanted = [wrap] if isinstance(wrap, str) else list(wrap)
    classes = {type(module).__name__ for module in modules}
    unknown = [name for name in wanted if name not in classes]
    if unknown:
        raise ConfigError(
            f"odc.wrap: {', '.join(unknown)}: no module of {type(model).__name__} has this class; "
            f"its classes are {', '.join(sorted(classes))}"
        )
    found = [module for module in modules if type(module).__name__ in wanted]
    containers = sorted({type(module).__name__ for module in found if _is_container(module)})
    if containers:
        raise ConfigError(
            f"odc.wrap: {', '.join(containers)} only holds modules and is never called itself; name the "
            "classes of the modules in it"
        )
    return found


def _is_container(module: nn.Module) -> bool:
    """Whether a module has no forward of its own (a ModuleList, say), so that FSDP2 cannot hook into it."""
    return type(module).forward is nn.Module.forward


def _no_split_names(model: nn.Module) -> set[str]:
    names = getattr(model, "_no_split_modules", None)
    if isinstance(names, str):
        return {names}
    return set(names) if isinstance(names, Iterable) else set()


def check_model(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    device_type: str,
    *,
    stored: bool = False,
    frozen: bool = False,
) -> None:
    """Refuse what cannot be sharded, before anything is changed.

    Args:
        model: the model, not sharded yet.
        blocks: the modules that become groups.
        device_type: where the ranks compute, "cpu" or "cuda"; parameters may be there or on the CPU.
        stored: parameters may be on the meta device too: those of a stored model, which are filled when
            they are sharded (an adapter's own are made on the CPU).
        frozen: nothing of it is to be trained.

    Raises:
        ConfigError: a model that is wrapped or sharded already, no parameters, parameters on another device
            or in float16, or one tied across groups.
    """
    _check_wrapped(model)
    if not any(True for _ in model.parameters()):
        raise ConfigError(f"model: {type(model).__name__} has no parameters; there is nothing to train")
    if not frozen and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"model: no parameter of {type(model).__name__} requires a gradient; there is nothing to train"
        )
    _check_quantised(model)
    allowed = {"cpu", device_type} | ({"meta"} if stored else set())
    for name, parameter in model.named_parameters():
        if parameter.device.type not in allowed:
            raise ConfigError(
                f"model: parameter {name} is on {parameter.device}; the ranks of this job train on "
                f"{device_type} (materialise or move the model before odcengine.initialize)"
            )
        if parameter.dim() == 0 or parameter.numel() == 0:
            raise ConfigError(
                f"model: parameter {name} has shape {list(parameter.shape)}; FSDP2 shards parameters of "
                "one or more dimensions with at least one element (give a scalar the shape [1])"
            )
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ConfigError(
                f"model: parameter {name} has dtype {parameter.dtype}; what is trained must be floating point"
            )
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise ConfigError(
                f"model: parameter {name} has dtype torch.float16, in which small gradients and the "
                "optimizer's eps become 0; there is no loss scaling. Load it with dtype=torch.bfloat16 or "
                "torch.float32 (`model: {dtype: ...}` where the configuration names the model), or set "
                "`bf16: {enabled: true}`, which makes float32 masters"
            )
    groups = _groups_of_modules(model, blocks)
    _check_ties(model, groups)
    _check_dtypes(model, groups)


_WRAPPERS = {
    "DistributedDataParallel": "give the model itself (.module); odcengine sums up gradients",
    "DataParallel": "give the model itself (.module)",
    "FullyShardedDataParallel": "give the model itself; odcengine shards it",
    "DeepSpeedEngine": "give the model itself, or keep DeepSpeed's engine and call odcengine.attach(engine)",
    "OptimizedModule": "give the model that torch.compile was called with, and set `model: {compile: true}`",
}


def _check_wrapped(model: nn.Module) -> None:
    """Wrappers bring communication or a forward of their own, which would run beside odcengine's."""
    for name, module in model.named_modules():
        if (kind := type(module).__name__) in _WRAPPERS:
            what = f"its part {name}" if name else "it"
            raise ConfigError(f"model: {what} is wrapped in {kind}; {_WRAPPERS[kind]}")
    sharded = next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None)
    if sharded is not None:
        raise ConfigError(
            f"model: parameter {sharded} is a DTensor, so the model is sharded already (fully_shard?); "
            "odcengine.initialize shards it itself. Give it unsharded, or keep your own sharding and loop "
            "with odcengine.attach(model, optimizer) (docs/integration.md)"
        )


def _check_quantised(model: nn.Module) -> None:
    """Packed weights are bytes with a state beside them: cut into shards, and cast, they mean nothing."""
    packed = next(
        (name for name, p in model.named_parameters() if type(p).__name__ in ("Params4bit", "Int8Params")),
        None,
    )
    method = next((m for m in map(_quantisation, model.modules()) if m), None)
    if packed is None and method is None:
        return
    what = f"parameter {packed} is packed by bitsandbytes" if packed else f"it is quantised ({method})"
    raise ConfigError(
        f"model: {what}; quantised weights cannot be sharded. Load the model in bfloat16 instead: "
        "sharded over N ranks, its frozen weights take 4 / N bytes a parameter on each"
    )


def _quantisation(module: nn.Module) -> str | None:
    """How transformers has quantised a model, or None."""
    if not getattr(module, "is_quantized", False):
        return None
    return str(getattr(module, "quantization_method", None) or "unknown method")


def _groups_of_modules(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[int, str]:
    """For each module, by id, the name of the group that owns its parameters."""
    block_names = {id(module): name for name, module in model.named_modules()}
    owner = dict.fromkeys(map(id, model.modules()), "the root")
    for block in blocks:
        for module in block.modules():  # inner blocks come later and overwrite: the innermost group owns it
            owner[id(module)] = block_names[id(block)]
    return owner


def _check_dtypes(model: nn.Module, owner: dict[int, str]) -> None:
    """FSDP2 wants one dtype for all that is trained in a group, and says so only in the first forward."""
    first: dict[str, tuple[str, torch.dtype]] = {}
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            group, name = owner[id(module)], f"{module_name}.{parameter_name}".lstrip(".")
            other, dtype = first.setdefault(group, (name, parameter.dtype))
            if dtype != parameter.dtype:
                raise ConfigError(
                    f"model: {other} has dtype {dtype} and {name} {parameter.dtype} in one group ({group}); "
                    "what is trained together needs one dtype (`bf16: {enabled: true}` makes float32 of all "
                    "that is trained; or convert the model, or give one of the modules a group of its own "
                    "with odc.wrap)"
                )


def _check_ties(model: nn.Module, owner: dict[int, str]) -> None:
    """A parameter shared between groups would be sharded twice: its uses would drift apart."""
    uses: dict[int, dict[str, str]] = defaultdict(dict)
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            group = owner[id(module)]
            uses[id(parameter)].setdefault(group, f"{module_name}.{name}")
    for groups in uses.values():
        if len(groups) > 1:
            places = " and ".join(f"{name} (group {group})" for group, name in groups.items())
            raise ConfigError(
                f"model: {places} are one tied parameter in different groups; leave both to the root or "
                "put both into one group (odc.wrap)"
            )


def shard_model(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    reshard_after_forward: bool = True,
) -> None:
    """Shard ``model`` in place with FSDP2: one group a block, one for the rest.

    Args:
        model: the model; its parameters become DTensors sharded on dim 0 over the mesh.
        blocks: from :func:`block_modules`.
        mesh: 1-D mesh over all ranks.
        param_dtype: dtype of computation and of what is pulled; None keeps the parameters' own.
        reduce_dtype: dtype in which a gradient reaches the reduce hook; None keeps the computation's.
        reshard_after_forward: whether full parameters are dropped between forward and backward.
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for block in reversed(blocks):  # children before parents
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
