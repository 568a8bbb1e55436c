"""Values of a configuration that are right by themselves and exclude each other."""

from __future__ import annotations

from collections.abc import Iterator

from odcengine.config import DEVICE_OF_TRANSPORT, Config, SgdParams


def _backend_contradictions(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """What DeepSpeed as the back end does otherwise, or not at all."""
    if config.odc.backend == "fsdp2":
        if config.deepspeed:
            yield (
                ("deepspeed", "odc.backend"),
                "is for odc.backend: deepspeed only; remove it, or set the backend",
            )
        return
    odc = config.odc
    wrong = {
        "odc.transport": (odc.transport == "collective", "collective is stock DeepSpeed; expected auto"),
        "data.eval_path": (config.data.eval_path is not None, "is for fsdp2; remove it"),
        "odc.lockstep": (odc.lockstep, "measures fsdp2 only; expected false"),
        "odc.deterministic": (odc.deterministic, "sums in rank order with fsdp2 only; expected false"),
        "odc.wrap": (odc.wrap != "auto", "DeepSpeed shards parameter by parameter; remove it"),
        "odc.experts": (odc.experts != "all", "DeepSpeed gathers whole tensors; expected all"),
        "odc.reshard_after_forward": (
            not odc.reshard_after_forward,
            "set deepspeed.zero_optimization.stage3_max_live_parameters and stage3_max_reuse_distance",
        ),
        "model.compile": (config.model.compile, "not with odc.backend: deepspeed; expected false"),
        "model.reference": (
            config.model.reference is not None,
            "not with odc.backend: deepspeed; expected null",
        ),
        "model.lora.reference": (
            config.model.lora is not None and config.model.lora.reference,
            "not with odc.backend: deepspeed; expected false",
        ),
        "checkpoint.dir": (
            config.checkpoint.dir is not None,
            "checkpoints are DeepSpeed's: call engine.save_checkpoint(dir) in the script, and remove it",
        ),
    }
    for path, (is_wrong, message) in wrong.items():
        if is_wrong:
            yield (path, "odc.backend"), message


def contradictions(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the keys and the message of every contradiction between valid values."""
    yield from _backend_contradictions(config)
    odc, balance = config.odc, config.balance
    strategy = ("balance.strategy", "odc.transport", "odc.lockstep")
    uneven = ("lb_mini", "dynamic")
    equal = "local_sort or lb_micro, which give every rank equally many micro-batches"
    if odc.transport == "collective":
        if odc.lockstep:
            yield (
                ("odc.lockstep", "odc.transport"),
                "measures a one-sided transport, but odc.transport is collective; expected false, or "
                "transport auto or shm",
            )
        if balance.strategy in uneven:
            yield strategy, f"{balance.strategy} cannot run with odc.transport: collective; expected {equal}"
        if odc.sharding == "hybrid":
            yield (
                ("odc.sharding", "odc.transport"),
                "hybrid needs the windows of a one-sided transport, but odc.transport is collective; "
                "expected full",
            )
        if odc.experts == "chosen":
            yield (
                ("odc.experts", "odc.transport"),
                "chosen needs a one-sided transport, but odc.transport is collective, where all ranks gather "
                "the same; expected all",
            )
        if odc.node_size is not None:
            yield (
                ("odc.node_size", "odc.transport"),
                "needs the windows of a one-sided transport, but odc.transport is collective; remove it",
            )
    elif odc.lockstep and balance.strategy in uneven:
        yield strategy, f"{balance.strategy} cannot run with odc.lockstep: true; expected {equal}"
    if odc.deterministic:
        if balance.strategy == "dynamic":
            yield (
                ("balance.strategy", "odc.deterministic"),
                "dynamic gives work to whoever is first, so which rank adds what differs from run to run; "
                "expected lb_mini, or odc.deterministic: false",
            )
        if balance.learn_costs:
            yield (
                ("balance.learn_costs", "odc.deterministic"),
                "plans with learned costs depend on measured times; expected false with "
                "odc.deterministic: true",
            )
    if odc.device not in ("auto", DEVICE_OF_TRANSPORT.get(odc.transport, odc.device)):
        yield (
            ("odc.device", "odc.transport"),
            f"ranks on {odc.device} cannot use odc.transport: {odc.transport}; expected auto",
        )
    if odc.unmapped and odc.transport != "nvshmem":
        yield ("odc.unmapped", "odc.transport"), "is a test switch of odc.transport: nvshmem; remove it"
    if odc.node_size is not None and odc.sharding == "full" and not odc.unmapped:  # a test of several hosts
        yield (
            ("odc.node_size", "odc.sharding"),
            "has no use with odc.sharding: full; remove it, or set sharding to hybrid",
        )
    every, folder = config.monitor.timeline_every, config.monitor.timeline_dir
    if (every > 0) != (folder is not None):
        paths = ("monitor.timeline_every", "monitor.timeline_dir")
        yield (
            paths if every else paths[::-1],
            f"has no effect without {paths[1] if every else paths[0]}; give both or neither",
        )
    checkpoint = config.checkpoint
    stopping = config.preemption
    asked = stopping.max_time is not None or stopping.signals != type(stopping)().signals
    if checkpoint.dir is None and asked:
        yield (
            ("preemption", "checkpoint.dir"),
            "saves a checkpoint before the job ends; give its directory in checkpoint.dir",
        )
    if checkpoint.every_n_steps and checkpoint.dir is None:
        yield (
            ("checkpoint.every_n_steps", "checkpoint.dir"),
            "has no effect without checkpoint.dir; give the directory of the checkpoints",
        )
    if config.model.path is not None and config.model.config is not None:
        yield (
            ("model.config", "model.path"),
            "is for random weights, but model.path names a model; keep one of the two",
        )
    lora = config.model.lora
    if lora is not None and lora.path is not None:
        # What has its default was perhaps not set: a configuration that was written out has all keys.
        defaults = {key: field.default for key, field in type(lora).model_fields.items()}
        others = sorted(key for key, default in defaults.items() if getattr(lora, key) != default)
        others = [key for key in others if key not in ("path", "reference")]
        if others:
            yield (
                ("model.lora.path", *(f"model.lora.{key}" for key in others)),
                f"the adapter's own settings count; remove {', '.join(others)}",
            )
    if lora is not None and lora.reference:
        if config.model.reference is not None:
            yield (
                ("model.lora.reference", "model.reference"),
                "makes the model without its adapters the reference, but model.reference names another; keep "
                "one of the two",
            )
        if lora.bias != "none":
            yield (
                ("model.lora.reference", "model.lora.bias"),
                f"needs bias: none, for biases ({lora.bias}) stay trained when the adapters are switched off",
            )
    limit = balance.max_tokens_per_micro_batch
    if config.data.max_length > limit:
        yield (
            ("data.max_length", "balance.max_tokens_per_micro_batch"),
            f"{config.data.max_length} is more than balance.max_tokens_per_micro_batch {limit}, so such a "
            f"sample fits into no micro-batch; expected at most {limit}",
        )
    micro, steps = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    total = config.train_batch_size
    if None not in (total, micro, steps) and total % (micro * steps):  # type: ignore[operator]
        yield (
            ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
            f"{total} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps} x "
            "ranks for any number of ranks; remove gradient_accumulation_steps, or make them agree",
        )
    optimizer = config.optimizer
    if optimizer is not None:
        params = optimizer.params
        if params.fused and params.foreach:
            yield (
                ("optimizer.params.foreach", "optimizer.params.fused"),
                "excludes fused: true; keep one of the two",
            )
        plain = isinstance(params, SgdParams) and (params.momentum == 0 or params.dampening != 0)
        if isinstance(params, SgdParams) and params.nesterov and plain:
            keys = ("nesterov", "momentum", "dampening")
            yield (
                tuple(f"optimizer.params.{key}" for key in keys),
                "needs momentum > 0 and dampening 0",
            )
