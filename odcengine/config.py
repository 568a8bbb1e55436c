"""The configuration: one schema for YAML and JSON, with DeepSpeed's names where DeepSpeed has the key.

``load_config`` reads a file or a mapping and either returns a frozen :class:`Config` or raises one
:class:`~odcengine.errors.ConfigError` that lists every mistake with file, line, path and the right form.
``python -m odcengine.config FILE`` does the same on the command line. The reference page
``docs/configuration.md`` is generated from the classes below. This module imports no torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
)

from odcengine.errors import ConfigError

MAX_INT = 2**31 - 1
MAX_SECONDS = 1e7

SIGNALS = ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2")
AUTO_SAMPLES_PER_RANK = 8
"""Samples a rank and accumulation step if every batch size is ``auto``: Hugging Face's default."""


def _whole(value: Any) -> Any:
    """Takes ``1e3`` for 1000, as DeepSpeed does."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_INT:
        return int(value)
    return value


def _number(value: Any) -> Any:
    """Makes a float of an int of any size; pydantic refuses the infinite ones."""
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return float("inf")
    return value


Int = Annotated[int, BeforeValidator(_whole), Field(le=MAX_INT)]
Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Beta = Annotated[Float, Field(ge=0, lt=1)]


def _block_classes(value: Any) -> Any:
    """Checks ``odc.wrap``."""
    names = value if isinstance(value, tuple) else ()
    if value == "auto" or (names and all(isinstance(n, str) and n.isidentifier() for n in names)):
        return value
    if isinstance(value, str) and value.isidentifier() and value.isascii():
        raise ValueError(f"got one name; expected auto or a list of class names: [{value}]")
    raise ValueError("expected auto or a list of class names such as [LlamaDecoderLayer]")


def _assignments(value: Any) -> Any:
    """Checks ``launch.env``."""
    for item in value if isinstance(value, tuple) else ():
        name, equals, _ = item.partition("=") if isinstance(item, str) else ("", "", "")
        if not equals or not name.isascii() or not name.isidentifier():
            raise ValueError(f"expected a list of NAME=VALUE, found {item!r}")
    return value


def _signals(value: Any) -> Any:
    """Checks ``launch.signals``; SIGTERM and TERM are the same."""
    if not isinstance(value, tuple):
        raise ValueError(f"expected a list of signal names out of {', '.join(SIGNALS)}")
    names = []
    for name in value:
        short = name.upper().removeprefix("SIG") if isinstance(name, str) else ""
        if short not in SIGNALS:
            shown = name if isinstance(name, (str, int)) else type(name).__name__
            reason = " cannot be caught" if short in ("KILL", "STOP") else " is no signal"
            names_text = ", ".join(SIGNALS)
            raise ValueError(f"{ascii(shown)[:40]}{reason}; expected names out of {names_text}")
        names.append(short)
    return tuple(dict.fromkeys(names))


def _names(value: Any) -> Any:
    """Checks a list of names in ``model.lora`` and ``model.freeze``."""
    if value is None or (isinstance(value, tuple) and all(isinstance(n, str) and n for n in value) and value):
        return value
    if isinstance(value, str) and value:
        raise ValueError(f"got one name; expected a list of names: [{value}]")
    raise ValueError("expected a list of names such as [q_proj, v_proj]")


def _target_modules(value: Any) -> Any:
    """Checks ``model.lora.target_modules``."""
    return value if value == "all-linear" else _names(value)


def _duration(value: Any) -> Any:
    """Checks ``preemption.max_time``; seconds."""
    seconds: Any = value
    if isinstance(value, str):
        found = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]?\d):([0-5]?\d)", value)
        if found is None:
            raise ValueError(
                f"expected seconds, or a time such as '03:50:00' or '1-12:00:00', found {value!r}"
            )
        days, hours, minutes, rest = (int(part or 0) for part in found.groups())
        seconds = float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"expected a time above 0 in seconds, or text such as '03:50:00', found {value!r}")
    return float(seconds)


def _reshard(value: Any) -> Any:
    """Checks ``odc.reshard_after_forward``."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        raise ValueError(
            "resharding to a smaller group is not supported (those shards are in no window, so they could "
            "only be gathered by a collective in lock-step); expected true or false"
        )
    raise ValueError("expected true or false")


class _Section(BaseModel):
    """Frozen, strict about types, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Bf16(_Section):
    """Mixed precision."""

    enabled: bool = Field(
        default=False,
        description="Compute and pull parameters in bfloat16; masters keep the model's dtype, gradients are "
        "accumulated in fp32.",
    )


class ZeroOptimization(_Section):
    """DeepSpeed's section for sharding."""

    stage: Literal[3] = Field(
        default=3, description="ZeRO stage: parameters, gradients and optimizer states are sharded."
    )


# --- optimizers and schedulers ------------------------------------------------------------------


class AdamWParams(_Section):
    """Parameters of AdamW; the defaults are DeepSpeed's."""

    lr: Float = Field(default=1e-3, ge=0, description="Learning rate.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="Decay of the two running averages.")
    eps: Float = Field(default=1e-8, ge=0, description="Added to the denominator.")
    weight_decay: Float = Field(
        default=0.0, ge=0, description="Decoupled weight decay (torch's AdamW has 0.01 by default)."
    )
    amsgrad: bool = Field(default=False, description="Use the AMSGrad variant.")
    fused: bool | None = Field(
        default=None, description="torch's fused kernel; null: yes, unless foreach is set."
    )
    foreach: bool | None = Field(default=None, description="torch's multi-tensor code; null: torch decides.")


class AdamParams(AdamWParams):
    """Parameters of Adam; as in DeepSpeed it decouples the weight decay unless told otherwise."""

    weight_decay: Float = Field(default=0.0, ge=0, description="Weight decay; see adam_w_mode.")
    adam_w_mode: bool = Field(
        default=True, description="Decoupled weight decay (AdamW); false: an L2 term, torch's Adam."
    )


class SgdParams(_Section):
    """Parameters of SGD; the defaults are torch's."""

    lr: Float = Field(default=1e-3, ge=0, description="Learning rate.")
    momentum: Float = Field(default=0.0, ge=0, description="Momentum.")
    dampening: Float = Field(default=0.0, description="Dampening of the momentum.")
    weight_decay: Float = Field(default=0.0, ge=0, description="L2 weight decay.")
    nesterov: bool = Field(default=False, description="Nesterov momentum; needs momentum > 0, no dampening.")
    fused: bool | None = Field(default=None, description="torch's fused kernel; null lets torch decide.")
    foreach: bool | None = Field(default=None, description="torch's multi-tensor code; null: torch decides.")


class _WarmupParams(_Section):
    warmup_num_steps: Int = Field(
        default=1000, ge=0, description="Optimizer steps of warm-up; 0: none; 1 counts as 2, as in DeepSpeed."
    )
    warmup_type: Literal["log", "linear"] = Field(default="log", description="Shape of the warm-up.")


class WarmupLrParams(_WarmupParams):
    """Parameters of DeepSpeed's WarmupLR."""

    warmup_min_lr: Float = Field(default=0.0, ge=0, description="Learning rate of the first step.")
    warmup_max_lr: Float | None = Field(
        default=None, ge=0, description="Learning rate after the warm-up; null: the optimizer's lr."
    )


class WarmupDecayLrParams(WarmupLrParams):
    """Parameters of DeepSpeed's WarmupDecayLR."""

    total_num_steps: Int | None = Field(
        default=None, ge=1, description="Step at which the learning rate reaches 0; null: steps of the run."
    )


class WarmupCosineLrParams(_WarmupParams):
    """Parameters of DeepSpeed's WarmupCosineLR; ratios are relative to the optimizer's lr."""

    warmup_min_ratio: Float = Field(default=0.0, ge=0, le=1, description="Ratio of the first step.")
    cos_min_ratio: Float = Field(default=0.0001, ge=0, le=1, description="Ratio at the end.")
    total_num_steps: Int | None = Field(
        default=None, ge=1, description="Step at which the end is reached; null: steps of the run."
    )


class ConstantLrParams(_Section):
    """Parameters of torch's ConstantLR."""

    factor: Float = Field(default=1 / 3, ge=0, le=1, description="Factor on the lr until total_iters.")
    total_iters: Int = Field(default=5, ge=0, description="Steps with the factor.")


class LinearLrParams(_Section):
    """Parameters of torch's LinearLR."""

    start_factor: Float = Field(default=1 / 3, gt=0, le=1, description="Factor on the lr at the first step.")
    end_factor: Float = Field(default=1.0, ge=0, le=1, description="Factor on the lr at the end.")
    total_iters: Int = Field(default=5, ge=1, description="Steps until end_factor is reached.")


class CosineAnnealingLrParams(_Section):
    """Parameters of torch's CosineAnnealingLR."""

    T_max: Int | None = Field(
        default=None, ge=1, description="Steps from the lr to eta_min; null: steps of the run."
    )
    eta_min: Float = Field(default=0.0, ge=0, description="Smallest learning rate.")


class StepLrParams(_Section):
    """Parameters of torch's StepLR."""

    step_size: Int = Field(ge=1, description="Steps between two decays.")
    gamma: Float = Field(default=0.1, ge=0, description="Factor of a decay.")


class MultiStepLrParams(_Section):
    """Parameters of torch's MultiStepLR."""

    milestones: tuple[Annotated[Int, Field(ge=0)], ...] = Field(description="Steps of the decays.")
    gamma: Float = Field(default=0.1, ge=0, description="Factor of a decay.")


class ExponentialLrParams(_Section):
    """Parameters of torch's ExponentialLR."""

    gamma: Float = Field(ge=0, description="Factor on the lr of every step.")


class PolynomialLrParams(_Section):
    """Parameters of torch's PolynomialLR."""

    total_iters: Int = Field(default=5, ge=1, description="Steps until 0 is reached.")
    power: Float = Field(default=1.0, ge=0, description="Power of the polynomial.")


Name = TypeVar("Name", bound=str)
Params = TypeVar("Params", bound=_Section)


class Choice(_Section, Generic[Name, Params]):
    """An optimizer or schedule by its name, with the parameters that belong to it."""

    type: Name = Field(description="Name, by DeepSpeed's or torch's spelling; case does not matter.")
    params: Params = Field(description="Parameters of the type; {} for the defaults.")


OptimizerConfig = (
    Choice[Literal["Adam"], AdamParams]
    | Choice[Literal["AdamW"], AdamWParams]
    | Choice[Literal["SGD"], SgdParams]
)
SchedulerConfig = (
    Choice[Literal["WarmupLR"], WarmupLrParams]
    | Choice[Literal["WarmupDecayLR"], WarmupDecayLrParams]
    | Choice[Literal["WarmupCosineLR"], WarmupCosineLrParams]
    | Choice[Literal["ConstantLR"], ConstantLrParams]
    | Choice[Literal["LinearLR"], LinearLrParams]
    | Choice[Literal["CosineAnnealingLR"], CosineAnnealingLrParams]
    | Choice[Literal["StepLR"], StepLrParams]
    | Choice[Literal["MultiStepLR"], MultiStepLrParams]
    | Choice[Literal["ExponentialLR"], ExponentialLrParams]
    | Choice[Literal["PolynomialLR"], PolynomialLrParams]
)

PARAMS: dict[str, dict[str, type[BaseModel]]] = {
    section: {
        get_args(choice.model_fields["type"].annotation)[0]: choice.model_fields["params"].annotation
        for choice in get_args(union)
    }
    for section, union in (("optimizer", OptimizerConfig), ("scheduler", SchedulerConfig))
}
"""The parameters' class of every optimizer and scheduler type."""


# --- our own sections ---------------------------------------------------------------------------


DEVICE_OF_TRANSPORT = {"shm": "cpu", "mpi": "cpu", "cuda_p2p": "cuda", "nvshmem": "cuda"}
"""Where ranks compute with each transport; the others leave it open."""


class Odc(_Section):
    """On-demand communication."""

    backend: Literal["fsdp2", "deepspeed"] = Field(
        default="fsdp2",
        description="Who shards the model: torch's fully_shard, or DeepSpeed's ZeRO-3 (docs/deepspeed.md).",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where ranks compute; auto: one GPU a rank where there are any."
    )
    transport: Literal["auto", "shm", "mpi", "cuda_p2p", "nvshmem", "collective"] = Field(
        default="auto",
        description="shm: shared memory between CPU ranks of one host; mpi: CPU ranks of any hosts, by MPI's "
        "windows; cuda_p2p: GPUs of one node that "
        "address each other's memory (NVLink, PCIe); nvshmem: GPUs through NVSHMEM's heap; collective: "
        "FSDP2's own collectives, the baseline; auto: the best one-sided transport for the ranks, never "
        "collective.",
    )
    grad_reduce: Literal["mean", "sum"] = Field(
        default="mean",
        description="Of an attached DeepSpeed engine: mean: gradients of ranks are averaged, as DeepSpeed "
        "does; sum: they are added, for losses that are divided by the whole minibatch's count.",
    )
    allow_untested: bool = Field(
        default=False,
        description="Attach to a DeepSpeed whose sources differ from those that were tested, with a warning.",
    )
    unmapped: bool = Field(
        default=False,
        description="Test switch of nvshmem: treat every other rank as one whose memory is not mapped here.",
    )
    lockstep: bool = Field(
        default=False,
        description="Measuring switch: a barrier at every pull and push of a one-sided transport.",
    )
    sharding: Literal["auto", "full", "hybrid"] = Field(
        default="auto",
        description="full: windows over all ranks; hybrid: two-level windows, no traffic between nodes "
        "within a minibatch; auto: hybrid where a node size is given, else full.",
    )
    node_size: Int | None = Field(
        default=None, ge=1, description="Ranks a node for two-level windows; null: the real nodes."
    )
    deterministic: bool = Field(
        default=False,
        description="Gradients summed in the order of ranks, equal bit for bit from run to run, for as many "
        "accumulators as a node has ranks; see docs/reproducibility.md.",
    )
    timeout_s: Float = Field(
        default=600.0,
        gt=0,
        le=MAX_SECONDS,
        description="Longest time in seconds that an awaited rank may make no progress. In the first step of "
        "a model with model.compile it is startup_timeout_s where that is longer: who compiles makes none.",
    )
    startup_timeout_s: Float = Field(
        default=600.0,
        gt=0,
        le=MAX_SECONDS,
        description="Longest time in seconds until every rank has started.",
    )
    manage_gc: bool = Field(
        default=True,
        description="Python's cyclic garbage collector runs at the boundary of minibatches instead of inside "
        "of them, where a full collection would stop a rank for up to half a second.",
    )
    wrap: Annotated[tuple[str, ...] | Literal["auto"], BeforeValidator(_block_classes)] = Field(
        default="auto",
        description="Class names of the blocks that are sharded and pulled one by one; auto: the "
        "model's own (_no_split_modules).",
    )
    experts: Literal["all", "chosen"] = Field(
        default="all",
        description="What a micro-batch pulls of a mixture of experts: all experts, with their block; or "
        "those that its tokens chose, when the router has chosen them (docs/models.md).",
    )
    reshard_after_forward: Annotated[bool, BeforeValidator(_reshard)] = Field(
        default=True,
        description="Drop the pulled parameters after the forward pass and pull them again in the backward "
        "pass; false keeps them: more memory, fewer pulls.",
    )
    normalize_by: Literal["tokens", "sequences"] = Field(
        default="tokens", description="What the summed loss of a minibatch is divided by."
    )


Names = Annotated[tuple[str, ...] | None, BeforeValidator(_names)]


class Lora(_Section):
    """Low-rank adapters by peft, with everything else frozen; see docs/adapters.md."""

    r: Int = Field(default=16, ge=1, description="Rank of the adapters.")
    alpha: Float | None = Field(
        default=None, gt=0, description="Adapters are scaled by alpha / r; null: 2 r."
    )
    dropout: Float = Field(default=0.0, ge=0, lt=1, description="Dropout in front of the adapters.")
    target_modules: Annotated[
        tuple[str, ...] | Literal["all-linear"] | None, BeforeValidator(_target_modules)
    ] = Field(
        default="all-linear",
        description="Ends of the names of the modules that get adapters; all-linear: every linear layer but "
        "the head; null: what peft has for the architecture.",
    )
    exclude_modules: Names = Field(
        default=None, description="Ends of the names of modules that get none all the same."
    )
    modules_to_save: Names = Field(
        default=None,
        description="Ends of the names of modules that are trained whole, and saved with the adapter.",
    )
    bias: Literal["none", "all", "lora_only"] = Field(
        default="none", description="Which biases are trained: none, all, or those of the targets."
    )
    use_rslora: bool = Field(default=False, description="Scale by alpha / sqrt(r) (rank-stabilised LoRA).")
    use_dora: bool = Field(
        default=False, description="Train magnitudes of the weights' rows as well (DoRA); slower."
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        description="Directory of an adapter to go on from, as peft saves it. Its settings count then: no "
        "other key of this section may be given.",
    )


class Model(_Section):
    """The model, where the script gives none to odcengine.initialize; see docs/models.md."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="Directory of a model of transformers (only config.json in it: random weights), or a "
        "name on the Hugging Face Hub. Directories are relative to the working directory.",
    )
    config: dict[str, Any] | None = Field(
        default=None,
        description="Instead of path: values of a configuration with model_type, for random weights.",
    )
    dtype: Literal["float32", "bfloat16", "float64"] | None = Field(
        default=None, description="Type of the weights; null: as stored, float32 for random ones."
    )
    reference: str | None = Field(
        default=None,
        min_length=1,
        description="Directory or name of a frozen model that is sharded as well and only evaluated, as "
        "engine.reference (docs/rl.md); also for a model from the script. odc-launch --plan counts it.",
    )
    lora: Lora | None = Field(
        default=None, description="Train low-rank adapters by peft instead of the weights; null: no."
    )
    freeze: Names = Field(
        default=None,
        description="Parameters that are not trained: patterns of their names, * for anything, such as "
        "[model.embed_tokens.*, model.layers.0.*]; also for a model from the script.",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="Keep only the inputs of the blocks for the backward and compute the rest again; also "
        "for a model from the script.",
    )
    compile: bool = Field(
        default=False,
        description="Compile every block (the modules of odc.wrap) with torch.compile: fewer kernels and "
        "less work for the host, after minutes of compiling in the first minibatch; also for a model from "
        "the script.",
    )


class Balance(_Section):
    """How samples are dealt to ranks and micro-batches."""

    strategy: Literal["local_sort", "lb_micro", "lb_mini", "dynamic"] = Field(
        default="lb_mini",
        description="lb_mini: equal work a rank and minibatch; dynamic: ranks draw work while they compute, "
        "which evens out wrong costs and slow devices; lb_micro: also equal numbers of "
        "micro-batches (default for collective and lockstep, which need it); local_sort: sorted by length.",
    )
    max_tokens_per_micro_batch: Int = Field(
        default=8192, ge=1, description="Hard limit of tokens in a micro-batch."
    )
    learn_costs: bool = Field(
        default=True,
        description="Fit the costs of sequences and the speeds of ranks to measured times while training; "
        "false (default with odc.deterministic): costs from the model's shape, so that plans depend on "
        "nothing measured.",
    )
    sample_store_mib: Int = Field(
        default=1024,
        ge=1,
        description="With dynamic, largest size in MiB of the samples of one engine.balance(): each node "
        "holds a copy of all of them in shared memory.",
    )


class Data(_Section):
    """The data set, and what the loader does with it; see docs/data.md."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="Directory that odc prepare made, where the script gives no data set to "
        "odcengine.initialize. Relative to the working directory.",
    )
    shuffle: bool = Field(default=True, description="New order every epoch, from seed.")
    drop_last: bool = Field(default=False, description="Leave out a last minibatch that is not full.")
    num_epochs: Int = Field(
        default=1,
        ge=1,
        description="Loops over the loader that the script makes; the default length of schedules follows.",
    )
    max_length: Int = Field(
        default=8192, ge=1, description="Longest sample in tokens; by default max_tokens_per_micro_batch."
    )
    too_long: Literal["error", "truncate", "skip"] = Field(
        default="error", description="What happens to a sample over max_length."
    )
    fields: tuple[str, ...] = Field(
        default=(),
        description="What micro-batches take along of samples beside tokens and mask, by name: advantages, "
        "old_logprobs (docs/losses.md).",
    )
    prefetch: Int | None = Field(
        default=None,
        ge=0,
        description="Micro-batches that a thread reads ahead of the one in use; null: 2 for data sets that "
        "odc prepare made, 0 for others, whose code may not bear a thread. No effect with dynamic.",
    )


class Checkpoint(_Section):
    """Saving and resuming; see docs/checkpoints.md."""

    dir: str | None = Field(
        default=None,
        min_length=1,
        description="Directory of the run's checkpoints, on a file system that all ranks share; null: none "
        "are saved but by the script. Relative to the working directory.",
    )
    every_n_steps: Int = Field(
        default=0, ge=0, description="Optimizer steps between two saves; 0: only the script saves."
    )
    keep_last: Int | None = Field(
        default=3,
        ge=1,
        description="How many of the checkpoints saved by every_n_steps are kept, the newest; null: all.",
    )
    keep_every: Int | None = Field(
        default=None,
        ge=1,
        description="Checkpoints of steps that are multiples of it are kept for good; null: none.",
    )
    resume: Literal["auto", "none"] | str = Field(
        default="auto",
        min_length=1,
        description="auto: go on from what latest in dir names, if there is anything; none: begin anew, "
        "refused where dir has checkpoints; a path: begin from that one, until dir has some of its own.",
    )
    background: bool = Field(
        default=True,
        description="Write while training goes on, from a copy in the host's memory; false: training waits.",
    )
    save_frozen: bool | None = Field(
        default=None,
        description="Save parameters that are not trained, too; false: resuming needs the same ones again, "
        "which is checked; null: true, but false for adapters of peft.",
    )
    deadline_s: Float = Field(
        default=1800.0, gt=0, le=MAX_SECONDS, description="Longest time in seconds that a save may take."
    )
    on_failure: Literal["warn", "stop"] = Field(
        default="warn",
        description="What a failed save of every_n_steps does: warn: an error in the log, and training goes "
        "on to the next; stop: an exception on all ranks.",
    )


class Preemption(_Section):
    """Stopping with a checkpoint before the allocation ends; see docs/preemption.md."""

    signals: Annotated[tuple[str, ...], BeforeValidator(_signals)] = Field(
        default=("USR1", "TERM"),
        description="Signals after which all ranks finish the step, save a checkpoint and end with exit code "
        "75. Without checkpoint.dir they have their usual effect.",
    )
    grace_s: Float = Field(
        default=300.0,
        ge=0,
        le=MAX_SECONDS,
        description="Seconds that odc-launch gives the ranks after TERM to do so, where that is more than "
        "launch.grace_s.",
    )
    max_time: Annotated[float | None, BeforeValidator(_duration)] = Field(
        default=None,
        description="Time after odcengine.initialize when they do so without a signal: seconds, or text as "
        "SLURM writes it ([D-]HH:MM:SS); null: never. A restart by odc-launch (launch.max_restarts) has "
        "what is left of it.",
    )


class Monitor(_Section):
    """What a run shows and writes."""

    progress: Literal["auto", "bar", "lines", "off"] = Field(
        default="auto",
        description="What rank 0 shows: a bar (needs rich), or a log line every steps_per_print steps; auto: "
        "a bar on a terminal, else lines, and nothing where steps_per_print is 0; off: nothing.",
    )
    jsonl: str | None = Field(
        default=None, min_length=1, description="File to which rank 0 appends one JSON object a step."
    )
    tensorboard: str | None = Field(
        default=None, min_length=1, description="Folder of TensorBoard's event files."
    )
    wandb_project: str | None = Field(
        default=None, min_length=1, description="Project of Weights & Biases to log to; needs wandb."
    )
    peak_tflops: Float | None = Field(
        default=None, gt=0, description="Peak speed of a rank's device in TFLOP/s, for MFU; null: no MFU."
    )
    timeline_every: Int = Field(
        default=0, ge=0, description="Record what every rank does in every n-th step; 0: never."
    )
    timeline_dir: str | None = Field(
        default=None, min_length=1, description="Folder of the recorded timelines (JSON for Perfetto, PNG)."
    )


class Launch(_Section):
    """What odc-launch does."""

    nproc_per_node: Int | None = Field(
        default=None, ge=1, description="Ranks to start on a node; null: 1, or what the command line says."
    )
    grace_s: Float = Field(
        default=30.0,
        ge=0,
        le=MAX_SECONDS,
        description="Seconds between asking the ranks to stop and killing them.",
    )
    signals: Annotated[tuple[str, ...], BeforeValidator(_signals)] = Field(
        default=("INT", "TERM", "HUP", "USR1", "USR2"), description="Signals passed on to the ranks."
    )
    log_dir: str | None = Field(
        default=None, min_length=1, description="Folder of one log file a rank; null: odc_logs/DATE-TIME-PID."
    )
    show: Literal["all", "rank0", "none"] = Field(
        default="all", description="Whose output appears on the launcher's own output."
    )
    launcher: Literal["auto", "local", "slurm", "mpi"] = Field(
        default="auto", description="How ranks get to their nodes; auto: by the environment and nodes."
    )
    nodes: Int | None = Field(
        default=None, ge=1, description="Nodes; from outside of an allocation a job for them is submitted."
    )
    env: Annotated[tuple[str, ...], BeforeValidator(_assignments)] = Field(
        default=(), description="NAME=VALUE that every rank gets, byte for byte."
    )
    env_expand: Annotated[tuple[str, ...], BeforeValidator(_assignments)] = Field(
        default=(), description="The same, with $NAME and ${NAME} replaced by what the rank inherits."
    )
    interface: str | None = Field(
        default=None,
        min_length=1,
        description="Network interface for gloo, NCCL and NVSHMEM's start; null: they choose.",
    )
    affinity: Literal["auto", "none"] = Field(
        default="auto",
        description="auto: each rank runs on the cores near its GPU, shared out between the ranks there; "
        "none: where it is started.",
    )
    container_image: str | None = Field(
        default=None, min_length=1, description="Passed to srun as --container-image (pyxis)."
    )
    hostfile: str | None = Field(
        default=None, min_length=1, description="Passed to mpirun: the hosts, that of rank 0 first."
    )
    sbatch_args: tuple[str, ...] = Field(
        default=(), description="Further options of the submitted job, such as --time=02:00:00."
    )
    srun_args: tuple[str, ...] = Field(default=(), description="Further options of srun.")
    mpirun_args: tuple[str, ...] = Field(default=(), description="Further options of mpirun.")
    max_restarts: Int = Field(
        default=0,
        ge=0,
        description="How often ranks that failed are started again, by the launch that started all of them, "
        "on the nodes that are left.",
    )
    max_requeues: Int = Field(
        default=0, ge=0, description="How often a SLURM job that ends with exit code 75 is requeued."
    )


class _Dumper(yaml.SafeDumper):
    """Writes lists on one line."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        return super().represent_sequence(tag, sequence, flow_style=True)


class Batch(NamedTuple):
    """The batch sizes for a given number of ranks.

    Args:
        train_batch_size: samples of one optimizer step over all ranks.
        max_samples_per_micro_batch: upper limit of samples in a micro-batch; None: no limit.
        notices: what was derived and what has no effect, one line each.
    """

    train_batch_size: int
    max_samples_per_micro_batch: int | None
    notices: tuple[str, ...]


class Config(_Section):
    """A valid configuration. Build it with :func:`load_config`."""

    train_batch_size: Int | None = Field(
        default=None, ge=1, description="Samples of one optimizer step over all ranks (a minibatch)."
    )
    train_micro_batch_size_per_gpu: Int | None = Field(
        default=None,
        ge=1,
        description="Upper limit of samples in a micro-batch (the token limit holds as well); null: none.",
    )
    gradient_accumulation_steps: Int | None = Field(
        default=None,
        ge=1,
        description="Only derives a missing train_batch_size: micro-batch size x steps x ranks.",
    )
    gradient_clipping: Float = Field(
        default=0.0, ge=0, description="Largest norm of the whole gradient; 0: no clipping."
    )
    steps_per_print: Int | None = Field(
        default=10, ge=0, description="Optimizer steps between two log lines; 0 or null: none."
    )
    seed: Int = Field(
        default=0, ge=0, description="Seed of the data order, and of random weights made from model."
    )
    bf16: Bf16 = Field(default=Bf16(), description="Mixed precision.")
    optimizer: Annotated[OptimizerConfig, Field(discriminator="type")] | None = Field(
        default=None, description="Optimizer; null: the script passes its own."
    )
    scheduler: Annotated[SchedulerConfig, Field(discriminator="type")] | None = Field(
        default=None, description="Learning rate schedule, counted in optimizer steps; null: constant."
    )
    zero_optimization: ZeroOptimization = Field(
        default=ZeroOptimization(), description="DeepSpeed's section for sharding."
    )
    odc: Odc = Field(default=Odc(), description="On-demand communication.")
    model: Model = Field(
        default=Model(), description="The model, where the script gives none to odcengine.initialize."
    )
    balance: Balance = Field(default=Balance(), description="Load balancing.")
    data: Data = Field(default=Data(), description="The loader.")
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="Saving and resuming.")
    preemption: Preemption = Field(
        default=Preemption(), description="Stopping with a checkpoint before the allocation ends."
    )
    monitor: Monitor = Field(default=Monitor(), description="What a run shows and writes.")
    launch: Launch = Field(default=Launch(), description="odc-launch.")
    deepspeed: dict[str, Any] | None = Field(
        default=None,
        description="With odc.backend: deepspeed, keys of DeepSpeed's own configuration; those that are "
        "given in their usual places are taken here.",
    )

    _notices: tuple[str, ...] = PrivateAttr(default=())

    @property
    def notices(self) -> tuple[str, ...]:
        """What the caller should log: keys without effect and resolved ``auto`` values, a line each."""
        return self._notices

    def with_notices(self, notices: tuple[str, ...]) -> Config:
        """Returns this configuration with other notices."""
        other = self.model_copy()
        other._notices = notices
        return other

    def resolve_batch(self, world_size: int) -> Batch:
        """Works out the batch sizes for ``world_size`` ranks.

        As in DeepSpeed, three given values must satisfy train_batch_size = train_micro_batch_size_per_gpu x
        gradient_accumulation_steps x ranks, and a missing train_batch_size is that product. Unlike there
        the micro-batch size is an upper limit and the accumulation steps have no other effect.

        Args:
            world_size: number of ranks.

        Returns:
            the batch sizes and what to report about them.

        Raises:
            ConfigError: the three values contradict each other at this world size.
        """
        if world_size < 1:
            raise ConfigError(f"world size is {world_size}; expected at least 1")
        total = self.train_batch_size
        micro = self.train_micro_batch_size_per_gpu
        steps = self.gradient_accumulation_steps
        notices = []
        if total is None:
            per_rank = micro if micro is not None else AUTO_SAMPLES_PER_RANK
            total = per_rank * (steps or 1) * world_size
            source = "" if micro is not None else " (Hugging Face's default for auto)"
            notices.append(
                f"train_batch_size: {total} = {per_rank} samples{source} x {steps or 1} accumulation steps x "
                f"{world_size} ranks"
            )
        elif micro is not None and steps is not None and total != micro * steps * world_size:
            raise ConfigError(
                f"train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} x "
                f"gradient_accumulation_steps {steps} x {world_size} ranks = {micro * steps * world_size}; "
                "remove gradient_accumulation_steps, or make the four agree"
            )
        elif steps is not None:
            notices.append(
                f"gradient_accumulation_steps: {steps} has no effect: train_batch_size is given, and the "
                "planner forms the micro-batches"
            )
        if total < world_size:
            notices.append(
                f"train_batch_size: {total} samples for {world_size} ranks: some ranks have no work"
            )
        return Batch(total, micro, tuple(notices))

    def resolved(self) -> dict[str, Any]:
        """Returns every key with its value as plain data; :func:`load_config` takes it back."""
        data: dict[str, Any] = self.model_dump(mode="json")
        if self.train_batch_size is None and self.train_micro_batch_size_per_gpu is None:
            data["train_batch_size"] = "auto"
        return data

    def to_yaml(self) -> str:
        """Returns :meth:`resolved` as YAML text (ASCII)."""
        return yaml.dump(self.resolved(), Dumper=_Dumper, sort_keys=False, width=100)


def load_config(source: str | os.PathLike[str] | Mapping[str, Any] | Config) -> Config:
    """Reads and checks a configuration.

    Args:
        source: path of a YAML or JSON file, or a mapping of the same shape; a Config is returned as it is.

    Returns:
        the configuration, every key resolved; :attr:`Config.notices` holds what to report.

    Raises:
        ConfigError: every mistake at once, ``FILE:LINE: path.to.key: what is wrong; the right form``.
    """
    from odcengine._config_check import build

    return source if isinstance(source, Config) else build(source)


if __name__ == "__main__":
    from odcengine._config_cli import main

    sys.exit(main())
