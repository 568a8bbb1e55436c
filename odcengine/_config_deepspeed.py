"""What odcengine does with the keys of a DeepSpeed configuration that are not its own.

The rule that separates the two tables: a key may be ignored (and reported) if the run still trains the same
model in about the same memory; if ignoring it would change what is trained, or whether it fits, the key is
refused unless its value switches the feature off.

Sources: deepspeed/runtime/{config,constants,zero/config,lr_schedules,precision_config}.py of 0.19 and
docs/_pages/config-json.md; what ``auto`` stands for: the defaults of Hugging Face's TrainingArguments, which
fill these files in elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AUTO = "auto"
OPTIMIZER_LR = "the optimizer's lr"

RENAMED = {
    "bfloat16": "bf16",
    "dataloader_drop_last": "data.drop_last",
}
"""Keys that DeepSpeed calls differently, and their names here."""

_MEASURED = "the engine has its own measurements"
_FETCH = "each group of parameters is pulled when it is needed"
_PUSH = "gradients are pushed group by group as they are produced"

NO_EFFECT = {
    "activation_checkpointing": "set model.gradient_checkpointing",
    "aio": "used by NVMe offload only",
    "comms_logger": _MEASURED,
    "communication_data_type": "gradients are accumulated in fp32 or wider",
    "csv_monitor": "here it is monitor: {jsonl: FILE}, one JSON object a step",
    "comet": _MEASURED,
    "data_types": "gradients are accumulated in fp32 or wider",
    "disable_allgather": _FETCH,
    "dump_state": _MEASURED,
    "flops_profiler": _MEASURED,
    "gradient_allreduce_op": "a minibatch has one loss, divided by its global count",
    "gradient_predivide_factor": "a minibatch has one loss, divided by its global count",
    "graph_harvesting": "no graphs are captured",
    "log_level": "configure Python's logging in the script",
    "managed_gradient_accumulation": "every engine.step() is a boundary",
    "memory_breakdown": _MEASURED,
    "nebula": "checkpoints are written to the file system",
    "prescale_gradients": "a minibatch has one loss, divided by its global count",
    "seq_parallel_comm_data_type": "one sequence stays on one rank",
    "sparse_gradients": "gradients are pushed densely; the result is the same",
    "tensorboard": "here it is monitor: {tensorboard: DIRECTORY}",
    "timers": _MEASURED,
    "use_data_before_expert_parallelism": "there is no expert parallelism",
    "vocabulary_size": "the model knows it",
    "wall_clock_breakdown": _MEASURED,
    "wandb": "here it is monitor: {wandb_project: NAME}",
    "zero_allow_untested_optimizer": "every optimizer of this page is tested",
    "zero_force_ds_cpu_optimizer": "optimizer states are not offloaded",
    "bf16.check_grad_overflow": "gradients are always checked",
    "bf16.immediate_grad_update": _PUSH,
    "checkpoint.load_universal": "checkpoints load on any number of ranks",
    "checkpoint.parallel_write": "every rank writes a file of its own",
    "checkpoint.tag_validation": "ranks always have to agree on the tag",
    "optimizer.legacy_fusion": "torch's optimizers are used",
    "zero_optimization.allgather_bucket_size": _FETCH,
    "zero_optimization.allgather_partitions": _FETCH,
    "zero_optimization.contiguous_gradients": _PUSH,
    "zero_optimization.elastic_checkpoint": "checkpoints load on any number of ranks",
    "zero_optimization.enable_sanity_checks": "checks are always on",
    "zero_optimization.ignore_unused_parameters": "parameters without gradient are supported",
    "zero_optimization.leaf_module": "use odc.wrap for the classes to shard",
    "zero_optimization.legacy_stage1": "only stage 3 exists",
    "zero_optimization.load_from_fp32_weights": "the masters are loaded as they were saved",
    "zero_optimization.log_trace_cache_warnings": "there is no trace cache",
    "zero_optimization.memory_efficient_linear": "torch's own linear layers are used",
    "zero_optimization.mics_hierarchical_params_gather": "see odc.sharding",
    "zero_optimization.override_module_apply": "nn.Module.apply is left as it is",
    "zero_optimization.overlap_comm": "pulls and pushes always overlap with computation",
    "zero_optimization.pipeline_loading_checkpoint": "there is no pipeline",
    "zero_optimization.reduce_bucket_size": _PUSH,
    "zero_optimization.reduce_scatter": _PUSH,
    "zero_optimization.round_robin_gradients": _PUSH,
    "zero_optimization.save_muon_momentum_buffer_in_memory": "there is no NVMe offload",
    "zero_optimization.stage3_allgather_sequential": _FETCH,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "saving gathers what it needs",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "saving gathers what it needs",
    "zero_optimization.stage3_max_live_parameters": "see odc.reshard_after_forward",
    "zero_optimization.stage3_max_reuse_distance": "see odc.reshard_after_forward",
    "zero_optimization.stage3_model_persistence_threshold": "every parameter is sharded",
    "zero_optimization.stage3_module_granularity_threshold": "see odc.wrap",
    "zero_optimization.stage3_param_persistence_threshold": "every parameter is sharded",
    "zero_optimization.stage3_partition_stream_chunk_size": "parameters are sharded one by one",
    "zero_optimization.stage3_prefetch_bucket_size": "the next group is pulled ahead",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _FETCH,
    "zero_optimization.sub_group_size": "the optimizer steps over the whole shard",
    "zero_optimization.use_multi_rank_bucket_allreduce": _PUSH,
}
"""DeepSpeed keys accepted with any value and reported as without effect, with the reason."""

STAGE3_PREFIX = "zero_optimization.stage3_"
NO_EFFECT |= {
    key.replace("stage3_", ""): reason for key, reason in NO_EFFECT.items() if key.startswith(STAGE3_PREFIX)
}
# DeepSpeed takes the names without the prefix as well.

_BF16 = "use `bf16: {enabled: true}`, which needs no loss scaling"
_OFFLOAD = "the shards live where the ranks compute; use more ranks, or remove it"
_QUANTIZED = "parameters and gradients travel in their own dtype; remove it"
_BF16_STATES = "masters and optimizer states keep the model's dtype; load it in bfloat16, or remove it"
_NO_MOE = "there is no expert parallelism; remove it"

REFUSED = {
    "bf16.bf16_master_weights_and_grads": _BF16_STATES,
    "bf16.bf16_optimizer_states": _BF16_STATES,
    "amp": f"Apex mixed precision is not supported; {_BF16}",
    "autotuning": "there is no autotuner; remove it",
    "checkpoint.use_node_local_storage": "all ranks write to one directory (checkpoint.dir); remove it",
    "compile": "graph compilation by DeepSpeed is not supported; set model.compile",
    "compression_training": "compression is not supported; remove it",
    "curriculum_learning": "the planner orders the samples; prepare a curriculum in the data",
    "data_efficiency": "the planner orders the samples; prepare a curriculum in the data",
    "datastates_ckpt": "this checkpoint writer is not supported; remove it",
    "eigenvalue": "it serves quantized training only, which is not supported; remove it",
    "elasticity": "the batch size is fixed; set train_batch_size",
    "expert_parallel": _NO_MOE,
    "fp16": f"fp16 training is not supported; {_BF16}",
    "hybrid_engine": "the generation engine is not supported; remove it",
    "moe": _NO_MOE,
    "pipeline": "there is no pipeline parallelism; remove it",
    "progressive_layer_drop": "it would change the model; remove it",
    "quantize_training": "quantization is not supported; remove it",
    "sequence_parallel_size": "one sequence stays on one rank; remove it",
    "sparse_attention": "choose the attention in the model; remove it",
    "tensor_parallel": "there is no tensor parallelism; remove it",
    "torch_autocast": f"autocast is not supported; {_BF16}",
    "weight_quantization": "quantization is not supported; remove it",
    "zero_optimization.cpu_offload": f"offload is not supported: {_OFFLOAD}",
    "zero_optimization.cpu_offload_param": f"offload is not supported: {_OFFLOAD}",
    "zero_optimization.cpu_offload_use_pin_memory": f"offload is not supported: {_OFFLOAD}",
    "zero_optimization.mics_shard_size": "use `odc.sharding: hybrid` and odc.node_size",
    "zero_optimization.offload_optimizer": f"offload is not supported: {_OFFLOAD}",
    "zero_optimization.offload_param": f"offload is not supported: {_OFFLOAD}",
    "zero_optimization.zenflow": f"offload is not supported: {_OFFLOAD}",
    "zero_optimization.zero_hpz_partition_size": "use `odc.sharding: hybrid` and odc.node_size",
    "zero_optimization.zero_quantized_gradients": f"not supported: {_QUANTIZED}",
    "zero_optimization.zero_quantized_nontrainable_weights": f"not supported: {_QUANTIZED}",
    "zero_optimization.zero_quantized_weights": f"not supported: {_QUANTIZED}",
    "zero_optimization.zeropp_loco_param": f"not supported: {_QUANTIZED}",
}
"""DeepSpeed keys refused with the reason, unless their value means "off"."""

_OFF_VALUES: dict[str, tuple[object, ...]] = {
    "sequence_parallel_size": (1,),
    "tensor_parallel": ({"autotp_size": 0}, {"autotp_size": 1}),
    "zero_optimization.mics_shard_size": (-1,),
    "zero_optimization.zero_hpz_partition_size": (1,),
}

_AUTO_IS_OFF = ("amp", "fp16")
"""Sections whose ``enabled: auto`` is filled in by Hugging Face's Trainer; here it means off."""

_NEEDS_ENABLED = frozenset(
    {
        "amp",
        "autotuning",
        "curriculum_learning",
        "data_efficiency",
        "eigenvalue",
        "elasticity",
        "fp16",
        "hybrid_engine",
        "progressive_layer_drop",
        "torch_autocast",
        "compile",
    }
)
"""Sections that DeepSpeed leaves off unless they say ``enabled: true``."""


def is_off(path: str, value: Any) -> bool:
    """Returns whether ``value`` leaves the feature of the refused key ``path`` off."""
    if isinstance(value, Mapping):
        if not value or value in _OFF_VALUES.get(path, ()):
            return True
        if "offload" in path:
            return value.get("device", "none") in (None, "none")
        if path == "compile":
            return not value.get("deepcompile", False)
        enabled = value.get("enabled", path not in _NEEDS_ENABLED)
        return enabled is False or (enabled == AUTO and path in _AUTO_IS_OFF)
    if value is None or value is False or value == "none":
        return True
    return value is not True and (value in (0, ()) or value in _OFF_VALUES.get(path, ()))


AUTO_VALUES: dict[str, tuple[Any, str]] = {
    "train_batch_size": (
        None,
        "derived from the other two and the world size; without them the script's own",
    ),
    "train_micro_batch_size_per_gpu": (None, "no limit of samples beside the token limit"),
    "gradient_accumulation_steps": (None, "1"),
    "gradient_clipping": (1.0, "1.0"),
    "bf16.enabled": (True, "true"),
    "fp16.enabled": (False, "false"),
    "amp.enabled": (False, "false"),
    "optimizer.params.lr": (5e-5, "5e-5"),
    "optimizer.params.betas": ((0.9, 0.999), "[0.9, 0.999]"),
    "optimizer.params.eps": (1e-8, "1e-8"),
    "optimizer.params.weight_decay": (0.0, "0.0"),
    "scheduler.params.warmup_min_lr": (0.0, "0.0"),
    "scheduler.params.warmup_max_lr": (None, OPTIMIZER_LR),
    "scheduler.params.warmup_min_ratio": (0.0, "0.0"),
    "scheduler.params.warmup_num_steps": (0, "0, no warm-up"),
    "scheduler.params.total_num_steps": (None, "the optimizer steps of the run"),
    "scheduler.params.cos_min_ratio": (0.0001, "0.0001"),
    "scheduler.params.T_max": (None, "the optimizer steps of the run"),
}
"""Where ``auto`` is accepted: the value it stands for (None: the engine fills it in) and its text."""

TYPE_ALIASES = {"fusedadam": "AdamW"}
"""Other names of optimizer types, in lower case: FusedAdam is the class behind DeepSpeed's AdamW."""

REFUSED_TYPES = frozenset(
    {
        "adadelta",
        "adafactor",
        "adagrad",
        "adamax",
        "adamw8bit",
        "deepspeedcpuadam",
        "lamb",
        "lion",
        "muadam",
        "muadamw",
        "musgd",
        "muon",
        "nadam",
        "onebitadam",
        "onebitlamb",
        "radam",
        "rmsprop",
        "zerooneadam",
        "onecycle",
        "onecyclelr",
        "lrrangetest",
        "cycliclr",
        "reducelronplateau",
        "cosineannealingwarmrestarts",
        "lambdalr",
        "sequentiallr",
    }
)
"""Optimizers and schedulers of DeepSpeed and torch that are known and not supported, in lower case."""

PARAMS: dict[str, dict[str, tuple[object, str]]] = {
    "optimizer": {
        "adam_w_mode": (True, "AdamW always decouples the weight decay; use `type: Adam`"),
        "bias_correction": (True, "Adam always corrects the bias; remove it"),
        "max_grad_norm": (0, "use the top-level key gradient_clipping"),
        "set_grad_none": (..., "gradients are dropped after every step"),
        "torch_adam": (..., "torch's optimizers are always used"),
    },
    "scheduler": {
        "last_batch_iteration": (-1, "a schedule starts at 0 and is resumed from a checkpoint; remove it"),
        "last_epoch": (-1, "a schedule starts at 0 and is resumed from a checkpoint; remove it"),
    },
}
"""Parameters that ours lack: the only value they may have (``...``: any, without effect), and the reason."""


def known_keys(prefix: str) -> list[str]:
    """Returns the last parts of the DeepSpeed keys right below ``prefix`` ("" for the top level)."""
    keys = []
    for path in [*NO_EFFECT, *REFUSED, *RENAMED]:
        parent, _, name = path.rpartition(".")
        if parent == prefix:
            keys.append(name)
    return keys
