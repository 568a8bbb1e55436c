"""Models: attention over packed rows for causal language models of transformers."""

from __future__ import annotations

from odcengine.models.head import prepare_loss
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
    "check_isolation",
    "is_transformers_model",
    "packed_attention",
    "prepare_config",
    "prepare_loss",
    "prepare_model",
]
