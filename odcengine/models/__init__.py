"""Models: loading causal language models of transformers, and their attention over packed rows."""

from __future__ import annotations

from odcengine.models.adapter import WithoutAdapters
from odcengine.models.flops import model_flops
from odcengine.models.head import prepare_loss
from odcengine.models.limits import check_lengths
from odcengine.models.load import (
    check_tokenizer,
    enable_checkpointing,
    find_vocabulary,
    load_model,
    open_model,
    vocabulary_size,
)
from odcengine.models.packed import (
    PACKED_ATTENTION,
    check_isolation,
    is_transformers_model,
    packed_attention,
    prepare_config,
    prepare_model,
)

__all__ = [
    "PACKED_ATTENTION",
    "WithoutAdapters",
    "check_isolation",
    "check_lengths",
    "check_tokenizer",
    "enable_checkpointing",
    "find_vocabulary",
    "is_transformers_model",
    "load_model",
    "model_flops",
    "open_model",
    "packed_attention",
    "prepare_config",
    "prepare_loss",
    "prepare_model",
    "vocabulary_size",
]
