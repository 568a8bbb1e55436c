"""How long samples may be for a model, found before the first step and not in the middle of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from odcengine.errors import ConfigError
from odcengine.models.packed import _transformers_modules


def check_lengths(model: nn.Module, longest: int, *, shared_rows: bool = True) -> None:
    """Refuse samples that a model cannot read, or not without changing how it reads others of their row.

    Args:
        model: causal language model of transformers.
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
    parts = _transformers_modules(model)
    # Of a model that also sees or hears: those towers have positions of patches, not of tokens.
    others = {
        id(module)
        for part in parts
        if not hasattr(part.config.get_text_config(), "vocab_size")
        for module in part.modules()
    }
    for part in parts:
        config = part.config
        most = getattr(config, "max_position_embeddings", None)
        for name, module in part.named_modules():
            leaf = name.rpartition(".")[2]
            if id(module) in others:
                continue
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
