"""Where models keep the scale or the cap of their logits, and how to leave it out of a forward.

Such a model changes what its head returns. Where the head returns a loss instead, the change belongs before
the softmax, so the head applies it, and the model must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from odcengine.errors import UsageError
from odcengine.losses.logit_transform import LogitTransform


class _NoFactor:
    """Stands in for a factor: a tensor multiplied or divided by it is that tensor, not a copy."""

    def _same(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    __mul__ = __rmul__ = __rtruediv__ = _same


_NO_FACTOR = _NoFactor()

# Name of the attribute, what its value means, what leaves it out. A name may have two meanings: which one a
# model has is tried on it (odcengine/models/head.py). A model that has none of them makes all its logits.
_KNOWN: tuple[tuple[str, Callable[[float], LogitTransform], Any], ...] = (
    ("final_logit_softcapping", lambda value: LogitTransform(cap=value), None),  # Gemma 2, 3n and 4, nanochat
    ("logits_scaling", lambda value: LogitTransform(scale=1 / value), _NO_FACTOR),  # Granite
    ("logits_scaling", lambda value: LogitTransform(scale=value), _NO_FACTOR),  # HyperCLOVA X
    ("logit_scale", lambda value: LogitTransform(scale=value), _NO_FACTOR),  # Cohere
)


@dataclass(frozen=True)
class LogitChange:
    """What a model does to what its head returns.

    Attributes:
        name: of the attribute that says it.
        value: of the attribute.
        transform: what it means.
        off: the value with which the model leaves it out.
    """

    name: str
    value: float
    transform: LogitTransform
    off: Any


def possible_changes(model: nn.Module) -> Iterator[LogitChange]:
    """What a model may do to its logits by the names of its attributes.

    Args:
        model: a model of transformers, or a wrapper of one.
    """
    for name, meaning, off in _KNOWN:
        values = {vars(owner)[name] for owner in _owners(model, name)}
        if len(values) == 1:
            (value,) = values
            try:
                yield LogitChange(name, value, meaning(value), off)
            except (UsageError, ZeroDivisionError):  # a value that means something else
                continue


@contextmanager
def left_out(model: nn.Module, change: LogitChange | None) -> Iterator[None]:
    """While it lasts, the model returns what its head returns.

    Args:
        model: the model.
        change: what it does otherwise; None for nothing.

    Raises:
        UsageError: the model's value is another one than that of the change.
    """
    if change is None:
        yield
        return
    owners = _owners(model, change.name)
    for owner in owners:
        if vars(owner)[change.name] != change.value:
            raise UsageError(
                f"{type(model).__name__}: {change.name} is {vars(owner)[change.name]}, but was "
                f"{change.value} when the model was prepared; call odcengine.models.prepare_model again"
            )
    # Past the configuration's own checks, which know nothing of stand-ins.
    for owner in owners:
        vars(owner)[change.name] = change.off
    try:
        yield
    finally:
        for owner in owners:
            vars(owner)[change.name] = change.value


def _owners(model: nn.Module, name: str) -> list[Any]:
    """The model inside of wrappers and its configurations, those that have a number of that name."""
    for module in model.modules():
        if hasattr(type(module), "get_output_embeddings") and hasattr(module, "config"):
            config: Any = module.config
            found = {id(owner): owner for owner in (module, config, config.get_text_config())}
            return [owner for owner in found.values() if _is_number(vars(owner).get(name))]
    return []


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
