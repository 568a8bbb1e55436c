"""Log-probabilities of the tokens of a micro-batch: of a model, and of logits without copies of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from odcengine.data.batch import IGNORE_INDEX, MicroBatch
from odcengine.errors import UsageError
from odcengine.losses.fused_head import fused_logprobs, logits_of
from odcengine.losses.linear_logprobs import Entropy, TokenLogprobs, check_options
from odcengine.losses.rows import RowLogprobs, row_gradients_, row_logprobs, wide_dtype
from odcengine.losses.token_loss import check_num_targets, head_in_use


def causal_lm_logprobs(
    model: nn.Module, micro_batch: MicroBatch, *, temperature: float = 1.0, entropy: Entropy = "none"
) -> TokenLogprobs:
    """Log-probabilities of the labels of a packed micro-batch, differentiable.

    Where :func:`odcengine.models.prepare_model` has proved that the model ends with its head, the head
    computes them, a chunk of tokens at a time, and the logits of the row never exist at once. Other models
    return all their logits.

    Call it through the engine, which has the parameters there when they are needed:
    ``engine(micro_batch, loss_fn=causal_lm_logprobs)``; or in a ``loss_fn`` of your own.

    Args:
        model: a causal language model with the keywords of transformers, prepared by
            :func:`odcengine.models.prepare_model`; returns the logits ``[1, T, V]`` or an object with them.
        micro_batch: on the model's device.
        temperature: logits are divided by it: that with which the tokens were sampled.
        entropy: whether entropies are wanted: ``none``, ``detached`` (to be reported) or ``differentiable``.

    Returns:
        ``[1, T]`` each, aligned with the labels; 0 where there is no target.

    Raises:
        UsageError: an argument out of range, no model, ``num_targets`` of the micro-batch is not that of its
            labels, or the model is not the one that was proved.
    """
    if model is None:  # engine.reference of an engine without one
        raise UsageError(
            "causal_lm_logprobs: the model is None; engine.reference is one if reference=... was given to "
            "odcengine.initialize"
        )
    check_options("causal_lm_logprobs", temperature, entropy)
    check_num_targets("causal_lm_logprobs", micro_batch)
    head = head_in_use(model, micro_batch)
    if head is not None:
        return fused_logprobs(model, head, micro_batch, temperature, entropy)
    output = model(**micro_batch.model_inputs(), use_cache=False)
    return token_logprobs(logits_of(output), micro_batch.labels, temperature=temperature, entropy=entropy)


def token_logprobs(
    logits: torch.Tensor, labels: torch.Tensor, *, temperature: float = 1.0, entropy: Entropy = "none"
) -> TokenLogprobs:
    """``log_softmax(logits / temperature)[label]``, with little memory beside the logits and their gradient.

    Rows without a target get a zero gradient whatever they hold.

    Args:
        logits: ``[..., V]``, any floating dtype.
        labels: ``[...]``, int64, already shifted; :data:`~odcengine.data.IGNORE_INDEX` where nothing is
            wanted.
        temperature: logits are divided by it.
        entropy: whether entropies are wanted: ``none``, ``detached`` (to be reported) or ``differentiable``.

    Returns:
        Of the shape of the labels, float32 (float64 for float64 logits); 0 where there is no target.

    Raises:
        UsageError: shapes that do not fit, or an argument out of range.
    """
    check_options("token_logprobs", temperature, entropy)
    if logits.shape[:-1] != labels.shape:
        raise UsageError(
            f"token_logprobs: logits of shape {list(logits.shape)}, labels of {list(labels.shape)}: labels "
            "must have the shape of the logits without the last dimension"
        )
    logprobs, entropies = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        logits.reshape(-1, logits.shape[-1]).contiguous(), labels.reshape(-1), temperature, entropy
    )
    return TokenLogprobs(
        logprobs.view(labels.shape), None if entropies is None else entropies.view(labels.shape)
    )


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, temperature: float, entropy: Entropy
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        has_target = labels != IGNORE_INDEX
        targets = torch.where(has_target, labels, 0)
        known = row_logprobs(logits, targets, temperature, entropy != "none")
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        ctx.save_for_backward(logits, targets, has_target, *known)
        logprobs = torch.where(has_target, known.logprobs, 0)
        entropies = None if known.entropies is None else torch.where(has_target, known.entropies, 0)
        if entropy == "detached":
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropies: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        logits, targets, has_target, *known = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(targets, dtype=wide_dtype(logits))
        grad_logits = logits.clone()
        row_gradients_(
            grad_logits, targets, ctx.temperature, RowLogprobs(*known), grad_logprobs, grad_entropies
        )
        # Filled, not multiplied: 0 times a NaN of a row without a target would be NaN.
        return grad_logits.masked_fill_(~has_target[:, None], 0.0), None, None, None
