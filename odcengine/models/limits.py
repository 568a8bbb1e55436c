"""How long samples may be for a model, found before the first step and not in the middle of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from odcengine.errors import ConfigError
from odcengine.models._probe import evaluating
from odcengine.models.packed import _attention, _packed_mask, _transformers_modules, packed_attention

_RECORDING = "odc_packed_recording"


@torch.no_grad()
def check_lengths(model: nn.Module, longest: int, *, shared_rows: bool = True) -> None:
    """Refuse samples that a model cannot read, or not without changing how it reads others of their row.

    Args:
        model: causal language model of transformers, prepared by :func:`prepare_model`, with its weights, not
            sharded.
        longest: tokens of the longest sample.
        shared_rows: whether several samples may share a row.

    Raises:
        ConfigError: a sample is too long; names the limit.
    """
    for limit, why in _limits(model, shared_rows):
        if longest > limit:
            raise ConfigError(
                f"data: the longest sample has {longest} tokens, but {type(model).__name__} {why}; set "
                f"data.max_length to at most {limit}, and data.too_long to truncate or skip what is longer"
            )


def _limits(model: nn.Module, shared_rows: bool) -> list[tuple[int, str]]:
    """Limits of tokens in a sample, each with its reason."""
    found = []
    for window in _windows(model):
        found.append((window, f"has a sliding window of {window}, and packed attention sees whole samples"))
    for part in _transformers_modules(model):
        config = part.config
        most = getattr(config, "max_position_embeddings", None)
        for name, module in part.named_modules():
            leaf = name.rpartition(".")[2]
            if isinstance(module, nn.Embedding) and ("position" in leaf or leaf == "wpe"):
                rows = module.num_embeddings  # some keep a few rows for padding
                limit = most if isinstance(most, int) and most <= rows else rows
                found.append((limit, f"has embeddings for {limit} positions"))
        # Both choose the frequencies of a whole row by its longest sample; dynamic ones also by earlier rows.
        rope = _rope_of(config)
        original = rope.get("original_max_position_embeddings")
        if original is None:
            original = getattr(config, "original_max_position_embeddings", None)
        if rope.get("rope_type") == "longrope" and isinstance(original, int) and shared_rows:
            why = f"has longrope, which reads a whole row otherwise if one of its samples has over {original}"
            found.append((original, f"{why} (with train_micro_batch_size_per_gpu: 1 there is one a row)"))
        if rope.get("rope_type") == "dynamic" and isinstance(most, int):
            found.append((most, f"has dynamic RoPE, which depends on earlier rows if one has over {most}"))
    return found


def _rope_of(config: Any) -> dict[str, Any]:
    """The parameters of rotary positions; transformers 4 calls them rope_scaling."""
    rope: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    return dict(rope) if isinstance(rope, Mapping) else {}


def _windows(model: nn.Module) -> set[int]:
    """The sliding windows that its layers ask attention for, seen in a forward of one token."""
    from transformers import AttentionInterface, AttentionMaskInterface

    windows: set[int] = set()

    def record(*args: Any, **kwargs: Any) -> Any:
        if (window := kwargs.get("sliding_window")) is not None:
            windows.add(window)
        return packed_attention(*args, **kwargs)

    AttentionInterface.register(_RECORDING, record)
    AttentionMaskInterface.register(_RECORDING, _packed_mask)
    token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    with evaluating(model), _attention(model, _RECORDING):
        model(token, use_cache=False)
    return windows
