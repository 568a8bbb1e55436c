"""What an engine must be for on-demand communication to fit it, and what of DeepSpeed it relies on.

Three nets: the optimizer's exact type, a fingerprint of every function of DeepSpeed whose inside matters, and
features that cannot work, each with the reason. A fourth, the layout of its flat buffers, is checked when the
shards are moved (``stage3.py``).
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import (
    parameter_offload,
    partition_parameters,
    partitioned_param_coordinator,
    stage3,
)
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from odcengine.deepspeed.tested import TESTED
from odcengine.errors import ConfigError, UsageError

RELIED_ON: dict[ModuleType, tuple[str, ...]] = {
    stage3: tuple(
        f"DeepSpeedZeroOptimizer_Stage3.{name}"
        for name in (
            "_create_fp16_partitions_with_defragmentation",
            "_set_fp16_partitioned_groups_flat",
            "_setup_for_real_optimizer",
            "_create_fp32_partitions",
            "create_reduce_and_remove_grad_hooks",
            "reduce_ready_partitions_and_remove_grads",
            "reduce_independent_p_g_buckets_and_remove_grads",
            "independent_gradient_partition_epilogue",
            "_get_norm_groups",
            "get_grad_norm_direct",
            "_prepare_fp32_grad_for_sub_group",
            "_reassign_or_swap_out_partitioned_parameters",
            "_unflatten_partitioned_parameters",
            "_overflow_check_and_loss_scale_update",
            "_loss_scale_update_and_overflow_cleanup",
            "has_overflow",
            "step",
            "_post_step",
            "_pre_step",
            "zero_grad",
            "backward_prologue",
            "backward_epilogue",
            "_partition_all_parameters",
            "load_state_dict",
            "_rigid_load_state_dict",
            "checkpoint_event_prologue",
            "checkpoint_event_epilogue",
        )
    ),
    partitioned_param_coordinator: tuple(
        f"PartitionedParameterCoordinator.{name}"
        for name in (
            "reset_step",
            "fetch_sub_module",
            "_fetch_sub_module_impl",
            "__all_gather_params",
            "__all_gather_params_",
            "__release_param",
            "_clean_inflight_param_registry",
            "release_and_reset_all",
        )
    ),
    partition_parameters: (
        "Init._convert_to_deepspeed_param",
        "Init._all_gather",
        "Init._partition",
        "Init._partition_param",
        "GatheredParameters.__enter__",
        "GatheredParameters._exit",
        "free_param",
    ),
    parameter_offload: (
        "DeepSpeedZeRoOffload.setup_zero_stage3_hooks",
        "DeepSpeedZeRoOffload.partition_all_parameters",
    ),
}
"""Module -> functions whose inside the attached engine relies on."""


def fingerprints() -> dict[str, str]:
    """For each function relied on a hash of its source, comments and blank lines left out."""
    found = {}
    for module, names in RELIED_ON.items():
        source = inspect.getsource(module)
        lines, functions = source.splitlines(), dict(_functions(ast.parse(source)))
        for name in names:
            node = functions.get(name)
            text = "missing"
            if node is not None:
                first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
                kept = [line.strip() for line in lines[first - 1 : node.end_lineno]]
                text = "\n".join(line for line in kept if line and not line.startswith("#"))
            found[name] = hashlib.sha256(text.encode()).hexdigest()[:12]
    return found


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    yield f"{node.name}.{item.name}", item


def check_version(*, allow_untested: bool) -> str | None:
    """Refuse a DeepSpeed that was not tested, by its sources.

    Args:
        allow_untested: warn instead.

    Returns:
        What to warn of, or None.

    Raises:
        ConfigError: it was not tested.
    """
    found = fingerprints()
    differences = {
        version: [name for name, value in found.items() if tested.get(name) != value]
        for version, tested in TESTED.items()
    }
    nearest = min(differences, key=lambda version: len(differences[version]))
    if not differences[nearest]:
        return None
    message = (
        f"deepspeed {deepspeed.__version__} differs from {nearest}, which odcengine was tested with, in "
        f"functions that it relies on: {', '.join(differences[nearest])}"
    )
    if not allow_untested:
        raise ConfigError(
            f"{message}. Install a tested one (pip install 'odcengine[deepspeed]'), or set "
            "odc.allow_untested: true and compare a few losses with those of stock DeepSpeed"
        )
    return f"{message}; odc.allow_untested is set, so compare a few losses with those of stock DeepSpeed"


def check_engine(engine: DeepSpeedEngine) -> None:
    """Refuse an engine whose features cannot work on demand.

    Raises:
        ConfigError: every feature, each with the reason.
        UsageError: it is attached already, or in the middle of a minibatch.
    """
    optimizer = engine.optimizer
    if getattr(type(optimizer), "odc_attached", False):
        raise UsageError(
            "odcengine.attach: this engine is attached already, by odcengine.attach or by odcengine.auto; "
            "its handle is engine.odc_attached"
        )
    if type(optimizer) is not DeepSpeedZeroOptimizer_Stage3:
        raise ConfigError(_wrong_type(engine))
    if any(gradients is not None for gradients in optimizer.averaged_gradients.values()):
        raise UsageError(
            "odcengine.attach: the engine has gradients of backwards without a step, which would be lost; "
            "attach it before its first backward, or after engine.step() has updated the weights"
        )
    problems = list(_problems(engine, optimizer))
    if problems:
        raise ConfigError(*problems)


def _wrong_type(engine: DeepSpeedEngine) -> str:
    name = type(engine.optimizer).__name__
    if name == "SuperOffloadOptimizer_Stage3":
        return (
            "zero_optimization.offload_optimizer.super_offload: its shards move between host and device, "
            "where no window can hold them; remove offload_optimizer"
        )
    if name == "DeepSpeedZeRoOffload" or engine.optimizer is None:
        return (
            "odcengine.attach: the engine has no optimizer; give deepspeed.initialize one, or `optimizer` in "
            "the configuration"
        )
    return (
        f"odcengine.attach: the engine's optimizer is a {name}; expected that of ZeRO stage 3 "
        "(zero_optimization: {stage: 3})"
    )


_MOVES = "its shards move between host and device, where no window can hold them; remove it"
_IN_STEP = "it is a collective inside of the minibatch, which would keep ranks in step"


def _problems(engine: DeepSpeedEngine, optimizer: Any) -> Iterator[str]:
    offload = optimizer.parameter_offload
    if optimizer.offload_optimizer:
        yield f"zero_optimization.offload_optimizer: {_MOVES}"
    if optimizer.offload_param or offload.offload_device is not None:
        yield f"zero_optimization.offload_param (also to NVMe): {_MOVES}"
    if optimizer.zenflow:
        yield f"zero_optimization.zenflow: {_MOVES}"
    if optimizer.use_muon:
        yield (
            "optimizer.type Muon: it needs whole gradients of matrices in the backward, which on demand no "
            "rank has; use AdamW, Adam or SGD"
        )
    if optimizer.zero_hpz_partition_size > 1:
        yield (
            "zero_optimization.zero_hpz_partition_size: hpZ's second copy would not follow the windows; "
            "remove it (`odc.sharding: hybrid` keeps traffic inside of nodes)"
        )
    if offload.zero_quantized_weights or optimizer.zero_quantized_nontrainable_weights:
        yield (
            "zero_optimization.zero_quantized_weights, zero_quantized_nontrainable_weights: quantised shards "
            "are not what windows hold; remove them"
        )
    if optimizer.all2all_process_group is not None or engine.zero_quantized_gradients():
        yield ("zero_optimization.zero_quantized_gradients: sums are made in fp32 by their owners; remove it")
    if optimizer.sequence_parallel_size > 1:
        yield "sequence_parallel_size: one sequence stays on one rank; remove it"
    if engine.has_moe_layers or any(
        getattr(param, "ds_zero_placement_family", "replicated") != "replicated"
        for param in engine.module.parameters()
    ):
        yield "mixture of experts: its parameters are sharded over groups of their own; not supported"
    if optimizer.model_parallel_group is not None or engine.autotp_size() > 1:
        yield "tensor parallelism (mpu, tensor_parallel.autotp_size): not supported; remove it"
    if engine.is_deepcompile_enabled():
        yield "compile.deepcompile: it moves parameters by compiled collectives; remove it"
    if engine.torch_autocast_enabled():
        yield ("torch_autocast: it gathers in another precision than shards have; use bf16: {enabled: true}")
    if optimizer.enable_sanity_checks:
        yield f"zero_optimization.enable_sanity_checks: {_IN_STEP}; remove it"
    if engine.zero_module_granularity_threshold() > 0:
        yield (
            "zero_optimization.stage3_module_granularity_threshold: it frees parameters by rules of its own, "
            "which were not examined; remove it"
        )
    yield from _group_problems(engine, optimizer)


def _group_problems(engine: DeepSpeedEngine, optimizer: Any) -> Iterator[str]:
    world_size = dist.get_world_size()
    groups = {id(group): group for group in optimizer.sub_group_process_groups}
    groups[id(optimizer.dp_process_group)] = optimizer.dp_process_group
    for param in engine.module.parameters():
        groups[id(param.ds_process_group)] = param.ds_process_group
    for group in groups.values():
        if dist.get_world_size(group) != world_size or dist.get_rank(group) != dist.get_rank():
            yield (
                f"a process group of {dist.get_world_size(group)} of {world_size} ranks shards parameters "
                "(zero.Init with a group of its own, or an mpu); on demand all ranks share each parameter"
            )
            return
    dtypes = {param.ds_tensor.dtype for group in optimizer.fp16_groups for param in group}
    if len(dtypes) != 1:
        yield f"parameters that are trained have the dtypes {sorted(map(str, dtypes))}; expected one"
