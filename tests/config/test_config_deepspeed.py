"""DeepSpeed's own files: what loads, what is reported, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from odcengine import _config_deepspeed as deepspeed
from odcengine.config import Config, load_config
from odcengine.errors import ConfigError

AUTO = "auto"


def zero3(**more: Any) -> dict[str, Any]:
    return {"stage": 3, **more}


def without_effect(config: Config) -> set[str]:
    return {line.split(": ")[0] for line in config.notices if "accepted without effect" in line}


def refused(mapping: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(mapping)
    return list(caught.value.problems)


# The shapes in which ZeRO-3 files are found: Hugging Face's documentation, Accelerate, alignment recipes,
# DeepSpeed's own examples, hand-written ones.
WILD: dict[str, dict[str, Any]] = {
    "hf_trainer": {
        "fp16": {"enabled": AUTO, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2},
        "bf16": {"enabled": AUTO},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO},
        },
        "zero_optimization": zero3(
            overlap_comm=True,
            contiguous_gradients=True,
            sub_group_size=1e9,
            reduce_bucket_size=AUTO,
            stage3_prefetch_bucket_size=AUTO,
            stage3_param_persistence_threshold=AUTO,
            stage3_max_live_parameters=1e9,
            stage3_max_reuse_distance=1e9,
            stage3_gather_16bit_weights_on_model_save=True,
        ),
        "gradient_accumulation_steps": AUTO,
        "gradient_clipping": AUTO,
        "steps_per_print": 2000,
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "wall_clock_breakdown": False,
    },
    "no_offload_sections": {
        "bf16": {"enabled": True},
        "zero_optimization": zero3(
            offload_optimizer={"device": "none", "pin_memory": True},
            offload_param={"device": "none"},
            gather_16bit_weights_on_model_save=True,
            max_live_parameters=1e9,
        ),
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
    },
    "zero_allow_untested": {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": AUTO,
        "gradient_clipping": AUTO,
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": AUTO, "auto_cast": False},
        "bf16": {"enabled": AUTO},
        "zero_optimization": zero3(stage3_prefetch_bucket_size=AUTO, round_robin_gradients=True),
    },
    "deepspeed_examples": {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": zero3(
            stage3_param_persistence_threshold=1e4,
            stage3_max_live_parameters=3e7,
            memory_efficient_linear=False,
        ),
        "fp16": {"enabled": False},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "everything_off": {
        "train_micro_batch_size_per_gpu": 1,
        "bfloat16": {"enabled": True},
        "amp": {"enabled": AUTO, "opt_level": AUTO},
        "flops_profiler": {"enabled": False},
        "activation_checkpointing": {"partition_activations": False, "profile": False},
        "elasticity": {"enabled": False},
        "curriculum_learning": {"enabled": False},
        "compression_training": {},
        "sequence_parallel_size": 1,
        "tensorboard": {"enabled": True, "output_path": "x"},
        "dataloader_drop_last": True,
        "zero_optimization": zero3(
            zero_hpz_partition_size=1, zero_quantized_weights=False, mics_shard_size=-1
        ),
        "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "torch_adam": True, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": AUTO, "warmup_num_steps": 10, "last_batch_iteration": -1},
        },
    },
}


@pytest.mark.parametrize("name", WILD)
def test_file_found_in_the_wild_loads(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(WILD[name], indent=2))
    config = load_config(path)
    assert config.zero_optimization.stage == 3
    assert config.notices
    assert all(line.startswith(f"{path}:") for line in config.notices)
    assert load_config(config.resolved()).resolved() == config.resolved()


def test_hugging_face_file_is_resolved_and_reported() -> None:
    config = load_config(WILD["hf_trainer"])
    assert config.bf16.enabled
    assert config.gradient_clipping == 1.0
    assert config.optimizer is not None
    assert config.scheduler is not None
    assert config.optimizer.params.model_dump(include={"lr", "betas", "eps", "weight_decay"}) == {
        "lr": 5e-5,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    assert config.scheduler.params.model_dump() == {
        "warmup_num_steps": 0,
        "warmup_type": "log",
        "warmup_min_lr": 0.0,
        "warmup_max_lr": None,
    }
    assert without_effect(config) == {
        "wall_clock_breakdown",
        *(f"zero_optimization.{key}" for key in WILD["hf_trainer"]["zero_optimization"] if key != "stage"),
    }
    resolved = {line for line in config.notices if "auto ->" in line}
    assert "bf16.enabled: auto -> true" in resolved
    assert "fp16.enabled: auto -> false" in resolved
    assert "optimizer.params.lr: auto -> 5e-5" in resolved
    assert "scheduler.params.warmup_max_lr: auto -> the optimizer's lr, 5e-05" in resolved
    assert len(resolved) == 13
    assert len(config.notices) == 13 + 10


def test_what_is_off_is_not_reported_and_what_is_renamed_is() -> None:
    config = load_config(WILD["everything_off"])
    assert config.bf16.enabled
    assert config.data.drop_last
    assert without_effect(config) == {
        "activation_checkpointing",
        "flops_profiler",
        "optimizer.params.torch_adam",
        "tensorboard",
    }
    others = [line for line in config.notices if "accepted without effect" not in line]
    assert others == [
        "bfloat16: taken as bf16",
        "dataloader_drop_last: taken as data.drop_last",
        "amp.enabled: auto -> false",
        "optimizer.params.weight_decay: decoupled, as by DeepSpeed's Adam; `adam_w_mode: false` gives "
        "torch's L2 term",
        "scheduler.params: warmup_max_lr is the optimizer's lr (in DeepSpeed it would be 0.001)",
        "scheduler.params.total_num_steps: auto -> the optimizer steps of the run",
    ]


@pytest.mark.parametrize("path", sorted(deepspeed.NO_EFFECT))
def test_key_without_effect(path: str) -> None:
    mapping = nested(path, AUTO)
    config = load_config(mapping)
    assert without_effect(config) == {path}
    plain = load_config({key: mapping[key] for key in ("train_batch_size",)})
    expected = plain.resolved() | (
        {"optimizer": config.resolved()["optimizer"]} if "optimizer" in path else {}
    )
    assert config.resolved() == expected


def nested(path: str, value: Any) -> dict[str, Any]:
    """Returns a valid configuration with ``value`` at ``path``."""
    mapping: dict[str, Any] = {"train_batch_size": 8}
    *sections, key = path.split(".")
    node = mapping
    for section in sections:
        node[section] = {"type": "AdamW"} if section == "optimizer" else {}
        node = node[section]
    node[key] = value
    return mapping


ON: dict[str, Any] = {
    "compile": {"deepcompile": True},
    "zero_optimization.offload_optimizer": {"device": "cpu"},
    "zero_optimization.offload_param": {"device": "nvme", "nvme_path": "x"},
    "zero_optimization.zero_hpz_partition_size": 8,
    "zero_optimization.mics_shard_size": 8,
    "sequence_parallel_size": 2,
    "tensor_parallel": {"autotp_size": 2},
    "sparse_attention": {"mode": "fixed"},
    "pipeline": {"stages": 2},
    "weight_quantization": {"quantized_initialization": {}},
    "compression_training": {"weight_quantization": {}},
}


@pytest.mark.parametrize("path", sorted(deepspeed.REFUSED))
def test_refused_key(path: str) -> None:
    """Refused with the reason when on, accepted when off."""
    section = "." not in path and path not in ("sequence_parallel_size",)
    value = ON.get(path, {"enabled": True} if section else True)
    assert refused(nested(path, value)) == [f"{path}: {deepspeed.REFUSED[path]}"]
    for off in (None, False, {}, {"enabled": False} if section else 0):
        assert load_config(nested(path, off)).notices == ()


@pytest.mark.parametrize("value", [True, 1, "yes", {"enabled": 1}, {"enabled": "true"}, [1]])
def test_fp16_is_off_only_where_that_is_clear(value: Any) -> None:
    assert refused(nested("fp16", value))[0].startswith("fp16: fp16 training is not supported; use `bf16")


def test_all_refusals_of_a_file_come_at_once() -> None:
    mapping = {
        "train_batch_size": 8,
        "fp16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "zero_quantized_gradients": True,
        },
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}},
    }
    assert sorted(line.split(":")[0] for line in refused(mapping)) == [
        "fp16",
        "optimizer.type",
        "zero_optimization.offload_optimizer",
        "zero_optimization.stage",
        "zero_optimization.zero_quantized_gradients",
    ]


@pytest.mark.parametrize("path", sorted(set(deepspeed.AUTO_VALUES) - {"amp.enabled", "fp16.enabled"}))
def test_auto_is_accepted_where_documented(path: str) -> None:
    kind = {
        "cos_min_ratio": "WarmupCosineLR",
        "warmup_min_ratio": "WarmupCosineLR",
        "T_max": "CosineAnnealingLR",
    }
    mapping = nested(path, AUTO)
    if path.startswith("scheduler"):
        mapping["scheduler"]["type"] = kind.get(path.split(".")[-1], "WarmupDecayLR")
    config = load_config(mapping)
    assert sum(line.startswith(f"{path}: auto -> ") for line in config.notices) == 1


@pytest.mark.parametrize(
    "path",
    [
        "zero_optimization.stage",
        "seed",
        "steps_per_print",
        "optimizer.params.amsgrad",
        "odc.timeout_s",
        "odc.lockstep",
        "balance.strategy",
        "data.shuffle",
        "launch.show",
        "launch.nproc_per_node",
    ],
)
def test_auto_is_refused_elsewhere(path: str) -> None:
    assert refused(nested(path, AUTO))[0].startswith(f"{path}: `auto` is not accepted here; expected ")


def test_both_names_of_a_renamed_key_are_refused() -> None:
    mapping = {"train_batch_size": 8, "bf16": {"enabled": True}, "bfloat16": {"enabled": False}}
    assert refused(mapping) == ["bfloat16: is DeepSpeed's name of bf16, which is given as well; keep one"]


def test_adam_means_what_it_means_in_deepspeed() -> None:
    def params(**given: Any) -> dict[str, Any]:
        optimizer = {"type": "Adam", "params": given}
        config = load_config({"train_batch_size": 8, "optimizer": optimizer})
        assert config.optimizer is not None
        return config.optimizer.params.model_dump()

    assert params()["adam_w_mode"] is True
    assert params(adam_w_mode=False, bias_correction=True)["adam_w_mode"] is False
    wrong = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"bias_correction": False}}}
    assert "bias" in refused(wrong)[0]
    wrong = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}
    assert "use `type: Adam`" in refused(wrong)[0]
