"""Whether the head of a model may compute the loss; see ``odcengine/losses/fused_head.py``."""

from __future__ import annotations

import logging

import torch
from torch import nn

from odcengine.data.batch import MicroBatch
from odcengine.data.pack import pack_samples
from odcengine.errors import UsageError
from odcengine.losses.fused_head import (
    fused_loss_sum,
    head_returning,
    is_what_was_returned,
    logits_of,
    loss_head,
    mark_change,
    mark_fused,
)
from odcengine.losses.logit_change import LogitChange, possible_changes
from odcengine.losses.token_loss import token_cross_entropy_sum
from odcengine.models._probe import PROBE_SAMPLES, evaluating

logger = logging.getLogger(__name__)


@torch.no_grad()
def prepare_loss(model: nn.Module, tolerance: float = 1e-5) -> bool:
    """Let the head of a model compute the loss if that is the loss of its logits.

    Tried on a tiny input with the model's own weights: the model must return what its head returns, or that
    with the scale or the cap that one of its attributes says (Gemma 2, Cohere, Granite), and both losses must
    agree. A model that does anything else to its logits, or whose head is more than a linear layer, is
    trained through all its logits, and a notice with the reason is logged.

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
        known, change = _change_of(model, head, batch)
        if not known:
            return (
                "the model does not return what its output embedding returns, nor that with a scale or a cap "
                "that one of its attributes says"
            )
        mark_change(model, change)
        logits = logits_of(model(**batch.model_inputs(), use_cache=False))
        expected = float(token_cross_entropy_sum(logits, batch.labels))
        try:
            loss = float(fused_loss_sum(model, head, batch))
        except UsageError:
            return "the model does not return what its output embedding returns"
    if not abs(loss - expected) <= tolerance * abs(expected):
        return f"its head computes the loss {loss:.6g} where its logits give {expected:.6g}"
    return None


def _change_of(model: nn.Module, head: nn.Linear, batch: MicroBatch) -> tuple[bool, LogitChange | None]:
    """Whether it is known what the model does to what its head returns, and what that is; None for nothing.

    Known numbers in the place of logits show it, whatever the weights and their precision are.
    """
    dtype = torch.float64 if head.weight.dtype == torch.float64 else torch.float32
    ramp = torch.linspace(-50.0, 50.0, len(head.weight), dtype=dtype, device=batch.input_ids.device)
    numbers = ramp.expand(*batch.input_ids.shape, -1)
    with head_returning(head, lambda hidden: numbers) as returned:
        logits = logits_of(model(**batch.model_inputs(), use_cache=False))
    if is_what_was_returned(logits, returned):
        return True, None
    for change in possible_changes(model):
        expected = numbers.clone()
        change.transform.apply_(expected, keep=False)
        if logits.shape == expected.shape and torch.allclose(
            logits.to(dtype), expected, rtol=1e-5, atol=1e-6
        ):
            return True, change
    return False, None
