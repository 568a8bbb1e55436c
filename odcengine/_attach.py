"""``odcengine.attach`` and ``odcengine.boundary``: on-demand communication for what others have sharded."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from odcengine._config_schema import did_you_mean
from odcengine.config import DEVICE_OF_TRANSPORT, Config, load_config
from odcengine.errors import ConfigError, UsageError

_OPTIONS = (
    "deterministic",
    "grad_reduce",
    "node_size",
    "sharding",
    "startup_timeout_s",
    "timeout_s",
    "transport",
    "unmapped",
)
"""Keys of the ``odc`` section that an attached FSDP2 model knows."""


def attach(
    target: Any,
    optimizer: Any = None,
    config: Config | Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Give what another library has sharded on-demand communication. Collective.

    Args:
        target: a model after ``fully_shard`` (PyTorch's FSDP2), sharded over all ranks; or the engine of
            ``deepspeed.initialize`` (ZeRO stage 3), before its first forward.
        optimizer: of an FSDP2 model, its optimizer or a list of all: parameters are published when each of
            them has stepped. None: the trainer calls ``publish()`` of the handle after its update.
        config: a configuration whose ``odc`` section counts, or such a section as a mapping. It may take the
            second place.
        options: keys of that section instead, such as ``transport`` or ``timeout_s``.

    Returns:
        A handle. Of an FSDP2 model :class:`odcengine.fsdp2.attach.AttachedModel`, whose ``collect()`` comes
        before clipping and the optimizer's step; of an engine
        :class:`odcengine.deepspeed.attach.AttachedDeepSpeed`. The target is used as before.

    Raises:
        ConfigError: what cannot work, with the reason; nothing has changed then.
        UsageError: the target is of no kind that can be attached, or is attached already.
        PeerError: another rank failed or did not come in time.
    """
    if config is None and isinstance(optimizer, (Config, Mapping)):
        optimizer, config = None, optimizer
    if _is_deepspeed(target):
        if optimizer is not None:
            raise UsageError("odcengine.attach: an engine of DeepSpeed has its optimizer; give none")
        from odcengine.deepspeed.attach import attach_deepspeed

        return attach_deepspeed(target, config, **options)
    from odcengine.fsdp2.guard import is_fsdp1, is_sharded

    if is_sharded(target):
        from odcengine.fsdp2.attach import attach_fsdp2

        settings = settings_of(config, options, _OPTIONS, "FSDP2", "model")
        return attach_fsdp2(target, optimizer, settings)
    if is_fsdp1(target):
        raise UsageError(
            "odcengine.attach: the model is wrapped by FullyShardedDataParallel (FSDP1), whose communication "
            "cannot be exchanged; use fully_shard (FSDP2). Trainers call it `fsdp2` or `fsdp_version: 2`"
        )
    raise UsageError(
        f"odcengine.attach: got a {type(target).__name__}; expected the engine that deepspeed.initialize "
        "returns first, or a model after fully_shard (for a model of your own, odcengine.initialize)"
    )


def settings_of(
    config: Config | Mapping[str, Any] | None,
    options: Mapping[str, Any],
    known: Collection[str],
    stock: str,
    kind: str,
) -> Config:
    """The configuration with this ``odc`` section, all other sections at their defaults.

    Args:
        config: a whole configuration, which is returned as it is, or the section.
        options: keys of the section that go before those of ``config``.
        known: keys that have a meaning.
        stock: the library whose object is attached.
        kind: what that is.

    Raises:
        ConfigError: a key is not known, or its value is wrong.
    """
    if isinstance(config, Config):
        if options:
            raise ConfigError(
                f"odcengine.attach: {', '.join(options)} beside a whole configuration; set it in there"
            )
        if config.odc.transport == "collective":
            raise ConfigError(f"odc.transport: collective is stock {stock}; do not attach it then")
        return config
    section = {**(config or {}), **options}
    unknown = sorted(set(section) - {*known, "enabled", "backend"})
    if unknown:
        raise ConfigError(
            *(
                f"odc.{key}: an attached {stock} {kind} does not know it; {did_you_mean(key, known)}it knows "
                f"{', '.join(known)}"
                for key in unknown
            )
        )
    if section.get("transport") == "collective":
        raise ConfigError(f"odc.transport: collective is stock {stock}; do not attach it then")
    chosen = {key: value for key, value in section.items() if key in known}
    return load_config({"train_batch_size": "auto", "odc": chosen})


def on_device(settings: Config, device_type: str, kind: str) -> Config:
    """The configuration for a target that is on the CPU or on GPUs.

    Args:
        settings: what was asked for.
        device_type: where the target's parameters are, "cpu" or "cuda".
        kind: what the target is, for the message.

    Raises:
        ConfigError: the transport that was asked for is for the other kind of device.
    """
    transport = settings.odc.transport
    needed = DEVICE_OF_TRANSPORT.get(transport, device_type)
    if needed != device_type:
        raise ConfigError(
            f"odc.transport: {transport} is for ranks on {needed}, but the {kind} is on {device_type}; "
            f"expected auto, or a {kind} on {needed}"
        )
    odc = settings.odc.model_copy(update={"device": device_type})
    return settings.model_copy(update={"odc": odc})


def boundary(engine: Any) -> None:
    """End the minibatch of a DeepSpeed engine on a rank that has no micro-batch, or none left.

    Args:
        engine: DeepSpeed's engine, or Accelerate's wrapper of it.
    """
    from odcengine.deepspeed.attach import boundary as end

    end(engine)


def _is_deepspeed(target: Any) -> bool:
    """Without importing DeepSpeed: who has one of its engines has imported it."""
    module = sys.modules.get("deepspeed.runtime.engine")
    return module is not None and isinstance(target, module.DeepSpeedEngine)
