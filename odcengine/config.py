"""The configuration: one schema for YAML and JSON, with DeepSpeed's names where DeepSpeed has the key.

``load_config`` reads a file or a mapping and either returns a frozen :class:`Config` or raises one
:class:`~odcengine.errors.ConfigError` that lists every mistake with file, line, path and the right form.
``python -m odcengine.config FILE`` does the same on the command line. The reference page
``docs/configuration.md`` is generated from the classes. This module imports no torch.

Here is the whole; its sections are in ``_config_sections.py`` and ``_config_optim.py``, made of the kinds of
values in ``_config_values.py``. ``_config_check.py`` finds the mistakes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import Field, PrivateAttr

from odcengine._config_optim import (
    PARAMS,
    AdamParams,
    AdamWParams,
    Choice,
    ConstantLrParams,
    CosineAnnealingLrParams,
    ExponentialLrParams,
    LinearLrParams,
    MultiStepLrParams,
    OptimizerConfig,
    PolynomialLrParams,
    SchedulerConfig,
    SgdParams,
    StepLrParams,
    WarmupCosineLrParams,
    WarmupDecayLrParams,
    WarmupLrParams,
)
from odcengine._config_sections import (
    DEVICE_OF_TRANSPORT,
    Balance,
    Bf16,
    Checkpoint,
    Data,
    Launch,
    Lora,
    Model,
    Monitor,
    Odc,
    Preemption,
    ZeroOptimization,
)
from odcengine._config_values import MAX_INT, MAX_SECONDS, SIGNALS, Beta, Float, Int, Names, Section
from odcengine.errors import ConfigError

__all__ = [
    "AUTO_SAMPLES_PER_RANK",
    "DEVICE_OF_TRANSPORT",
    "MAX_INT",
    "MAX_SECONDS",
    "PARAMS",
    "SIGNALS",
    "AdamParams",
    "AdamWParams",
    "Balance",
    "Batch",
    "Beta",
    "Bf16",
    "Checkpoint",
    "Choice",
    "Config",
    "ConstantLrParams",
    "CosineAnnealingLrParams",
    "Data",
    "ExponentialLrParams",
    "Float",
    "Int",
    "Launch",
    "LinearLrParams",
    "Lora",
    "Model",
    "Monitor",
    "MultiStepLrParams",
    "Names",
    "Odc",
    "OptimizerConfig",
    "PolynomialLrParams",
    "Preemption",
    "SchedulerConfig",
    "SgdParams",
    "StepLrParams",
    "WarmupCosineLrParams",
    "WarmupDecayLrParams",
    "WarmupLrParams",
    "ZeroOptimization",
    "load_config",
]

AUTO_SAMPLES_PER_RANK = 8
"""Samples a rank and accumulation step if every batch size is ``auto``: Hugging Face's default."""


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


class Config(Section):
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
