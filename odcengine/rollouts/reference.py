"""The reference model: frozen, and sharded beside the model that is trained.

Its groups stand behind those of the model in the same windows, under the same control block: ranks pull it as
they pull the model, it is published once, and nothing is ever pushed. It is only evaluated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from odcengine.config import Config
from odcengine.errors import ConfigError, UsageError
from odcengine.models import (
    check_isolation,
    is_transformers_model,
    load_model,
    open_model,
    prepare_loss,
    prepare_model,
)
from odcengine.models.stored import StoredModel
from odcengine.sharding.layout import ParamGroup, find_groups

ReferenceSource = nn.Module | str | os.PathLike[str] | Mapping[str, Any]
"""A model, its directory, or values of a configuration with ``model_type`` for random weights."""


@dataclass(frozen=True)
class Reference:
    """A reference model that is not sharded yet.

    Attributes:
        model: it, frozen and in evaluation mode.
        stored: where its weights still are, if they are read when it has been sharded.
    """

    model: nn.Module
    stored: StoredModel | None

    @classmethod
    def open(cls, source: ReferenceSource, config: Config, model: nn.Module) -> Reference:
        """Freeze a model, or make one.

        Args:
            source: a model with its weights, or what ``model.path`` or ``model.config`` take.
            config: the configuration.
            model: the model that is trained.

        Raises:
            ConfigError: it is the model itself, or there is no such directory.
        """
        dtype = torch.bfloat16 if config.bf16.enabled else None  # nothing is added up in it
        if isinstance(source, nn.Module):
            own = {id(parameter) for parameter in model.parameters()}
            if any(id(parameter) in own for parameter in source.parameters()):
                raise ConfigError(
                    "reference: it shares parameters with the trained model; give copy.deepcopy(model), or "
                    "for a model with adapters of peft odcengine.models.WithoutAdapters(model)"
                )
            found = cls(source if dtype is None else source.to(dtype), None)
        else:
            stored = None if isinstance(source, Mapping) else open_model(source, dtype=dtype)
            found = cls(load_model(source, dtype=dtype) if stored is None else stored.model, stored)
        found.model.requires_grad_(False)
        found.model.eval()
        return found

    def prepare(self, *, low_precision: bool, sharded: bool) -> None:
        """See to it that samples of a packed row do not see each other.

        Args:
            low_precision: it computes in bf16.
            sharded: it is sharded by now; weights in files are there only then.
        """
        if sharded == (self.stored is not None):
            prepare_for_packing(self.model, low_precision=low_precision)

    def groups(self, first: int, param_dtype: torch.dtype | None) -> list[ParamGroup]:
        """The groups of the sharded model, numbered from ``first`` on."""
        found = find_groups(self.model, param_dtype)
        for number, group in enumerate(found, first):
            group.index = number
            group.name = f"reference.{group.name}" if group.name else "reference"
            for entry in group.entries:
                entry.name = f"reference.{entry.name}"
        return found


def prepare_for_packing(model: nn.Module, *, low_precision: bool) -> None:
    """Make a model of transformers, also a sharded one, attend to packed rows, and prove it with its weights.

    Other models honour the boundaries themselves.

    Args:
        model: the model.
        low_precision: it computes in bf16.

    Raises:
        UsageError: its boundaries cannot be honoured.
    """
    if is_transformers_model(model):
        prepare_model(model, probe=False)
        check_isolation(model, 0.05 if low_precision else 1e-5)
        prepare_loss(model, 0.01 if low_precision else 1e-5)


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Give a sharded model the weights of another that is sharded alike; each rank copies its own part.

    Raises:
        UsageError: the models differ in names or shapes; names the first difference.
    """
    theirs, own = (
        {**dict(model.named_parameters()), **dict(model.named_buffers())} for model in (source, target)
    )
    odd = next((name for name in {**theirs, **own} if _shape(theirs, name) != _shape(own, name)), None)
    if odd is not None:
        raise UsageError(
            f"update_reference: {odd} has shape {_shape(theirs, odd)} in the model and {_shape(own, odd)} in "
            "the reference; only a reference of the model's own architecture can take its weights"
        )
    for name, tensor in own.items():
        _local(tensor).copy_(_local(theirs[name]))


def _shape(tensors: dict[str, torch.Tensor], name: str) -> list[int] | None:
    return list(tensors[name].shape) if name in tensors else None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
