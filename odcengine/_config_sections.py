"""The sections of the configuration whose keys depend on no ``type``, key by key."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from odcengine._config_values import (
    MAX_SECONDS,
    Assignments,
    BlockClasses,
    Duration,
    Float,
    Int,
    Names,
    Reshard,
    Section,
    Signals,
    TargetModules,
)


class Bf16(Section):
    """Mixed precision."""

    enabled: bool = Field(
        default=False,
        description="Compute and pull parameters in bfloat16; masters keep the model's dtype, gradients are "
        "accumulated in fp32.",
    )


class ZeroOptimization(Section):
    """DeepSpeed's section for sharding."""

    stage: Literal[3] = Field(
        default=3, description="ZeRO stage: parameters, gradients and optimizer states are sharded."
    )


DEVICE_OF_TRANSPORT = {"shm": "cpu", "mpi": "cpu", "cuda_p2p": "cuda", "nvshmem": "cuda"}
"""Where ranks compute with each transport; the others leave it open."""


class Odc(Section):
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
    wrap: BlockClasses = Field(
        default="auto",
        description="Class names of the blocks that are sharded and pulled one by one; auto: the "
        "model's own (_no_split_modules).",
    )
    experts: Literal["all", "chosen"] = Field(
        default="all",
        description="What a micro-batch pulls of a mixture of experts: all experts, with their block; or "
        "those that its tokens chose, when the router has chosen them (docs/models.md).",
    )
    reshard_after_forward: Reshard = Field(
        default=True,
        description="Drop the pulled parameters after the forward pass and pull them again in the backward "
        "pass; false keeps them: more memory, fewer pulls.",
    )
    normalize_by: Literal["tokens", "sequences"] = Field(
        default="tokens", description="What the summed loss of a minibatch is divided by."
    )


class Lora(Section):
    """Low-rank adapters by peft, with everything else frozen; see docs/adapters.md."""

    r: Int = Field(default=16, ge=1, description="Rank of the adapters.")
    alpha: Float | None = Field(
        default=None, gt=0, description="Adapters are scaled by alpha / r; null: 2 r."
    )
    dropout: Float = Field(default=0.0, ge=0, lt=1, description="Dropout in front of the adapters.")
    target_modules: TargetModules = Field(
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
        "other key of this section may be given but reference.",
    )
    reference: bool = Field(
        default=False,
        description="engine.reference is the model with its adapters switched off, without a second copy of "
        "the weights (docs/dpo.md).",
    )


class Model(Section):
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


class Balance(Section):
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


class Data(Section):
    """The data set, and what the loader does with it; see docs/data.md."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="Directory that odc prepare made, where the script gives no data set to "
        "odcengine.initialize. Relative to the working directory.",
    )
    eval_path: str | None = Field(
        default=None,
        min_length=1,
        description="Directory of held-out data that odc prepare made, where the script gives no eval_data "
        "to odcengine.initialize; engine.step() evaluates it at the end of each epoch. Relative to the "
        "working directory.",
    )
    eval_every_n_steps: Int = Field(
        default=0,
        ge=0,
        description="Optimizer steps between two further evaluations of the held-out data; 0: none.",
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
        "odc prepare made, 0 for others, whose code may not bear a thread. With dynamic it is one.",
    )


class Checkpoint(Section):
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


class Preemption(Section):
    """Stopping with a checkpoint before the allocation ends; see docs/preemption.md."""

    signals: Signals = Field(
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
    max_time: Duration = Field(
        default=None,
        description="Time after odcengine.initialize when they do so without a signal: seconds, or text as "
        "SLURM writes it ([D-]HH:MM:SS); null: never. A restart by odc-launch (launch.max_restarts) has "
        "what is left of it.",
    )


class Monitor(Section):
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


class Launch(Section):
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
    signals: Signals = Field(
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
    env: Assignments = Field(default=(), description="NAME=VALUE that every rank gets, byte for byte.")
    env_expand: Assignments = Field(
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
