"""Whether the head of a model may compute the loss; see ``odcengine/losses/fused_head.py``."""

from __future__ import annotations

import logging

import torch
from torch import nn

from odcengine.data.pack import pack_samples
from odcengine.errors import UsageError
from odcengine.losses.fused_head import fused_loss_sum, logits_of, loss_head, mark_fused
from odcengine.losses.token_loss import token_cross_entropy_sum
from odcengine.models._probe import PROBE_SAMPLES, evaluating

logger = logging.getLogger(__name__)


@torch.no_grad()
def prepare_loss(model: nn.Module, tolerance: float = 1e-5) -> bool:
    """Let the head of a model compute the loss if that is the loss of its logits.

    Tried on a tiny input with the model's own weights: the model must return what its head returns, and both
    losses must agree. A model that scales or caps its logits (Gemma 2, Cohere, Granite) does not qualify, nor
    one whose head is more than a linear layer; it is trained through all its logits, and a notice is logged.

    Args:
        model: causal language model of transformers with its weights, also wrapped, not sharded.
        tolerance: largest relative difference of the two losses; for 16-bit weights at least 0.01.

    Returns:
        Whether the head computes the loss from now on.
    """
    reason = _why_not(model, tolerance)
    mark_fused(model, reason is None)
    if reason is not None:
        logger.info(
            "%s: the loss needs the logits of whole micro-batches in memory, because %s",
            type(model).__name__,
            reason,
        )
    return reason is None


def _why_not(model: nn.Module, tolerance: float) -> str | None:
    head = loss_head(model)
    if head is None:
        return "its output embedding is not a plain linear layer"
    if head.weight.is_meta:
        return "its weights are on the meta device, so nothing can be tried on it"
    if head.weight.dtype in (torch.bfloat16, torch.float16):
        tolerance = max(tolerance, 0.01)
    samples = [{"input_ids": [token % len(head.weight) for token in tokens]} for tokens in PROBE_SAMPLES]
    batch = pack_samples(samples).to(head.weight.device)
    with evaluating(model):
        logits = logits_of(model(**batch.model_inputs(), use_cache=False))
        expected = float(token_cross_entropy_sum(logits, batch.labels))
        try:
            loss = float(fused_loss_sum(model, head, batch))
        except UsageError:
            return "the model does not return what its output embedding returns"
    if not abs(loss - expected) <= tolerance * abs(expected):
        return f"its head computes the loss {loss:.6g} where its logits give {expected:.6g}"
    return None
