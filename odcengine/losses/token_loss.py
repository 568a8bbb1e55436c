"""Cross entropy of tokens, summed: of a model, and of logits without a second copy of them.

The logits of a long row are the largest tensor of a training step: 64 thousand tokens with a vocabulary of
152 thousand are 20 GB in bfloat16 and 40 GB in float32. The loss needs float32, but only row by row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from odcengine.data.batch import IGNORE_INDEX, MicroBatch
from odcengine.errors import UsageError
from odcengine.losses.fused_head import fused_loss_sum, fuses_loss, logits_of, loss_head

# Logits converted at a time: 64 MiB in float32 on a CPU; 512 MiB on a GPU, which launches each operation.
_CHUNK_ELEMENTS = 2**24
_GPU_CHUNK_ELEMENTS = 2**27


def token_cross_entropy_sum(
    logits: torch.Tensor, labels: torch.Tensor, *, chunk_tokens: int | None = None
) -> torch.Tensor:
    """Sum over the tokens with a target of ``-log softmax(logits)[label]``.

    Beside the logits and, in the backward, their gradient (both in the logits' dtype), only ``chunk_tokens``
    rows are alive in float32. Rows without a target get a zero gradient whatever they hold. A row in which
    nothing has a target gives 0 with a graph, so its backward runs like any other.

    Args:
        logits: ``[..., V]``, any floating dtype.
        labels: ``[...]``, int64, already shifted; :data:`~odcengine.data.IGNORE_INDEX` where nothing is to
            be learned.
        chunk_tokens: rows converted at a time; chosen by the size of the vocabulary if None.

    Returns:
        Scalar, float32 (float64 for float64 logits).

    Raises:
        UsageError: shapes that do not fit.
    """
    if logits.shape[:-1] != labels.shape:
        raise UsageError(
            f"token_cross_entropy_sum: logits of shape {list(logits.shape)}, labels of {list(labels.shape)}: "
            "labels must have the shape of the logits without the last dimension"
        )
    vocab_size = logits.shape[-1]
    if chunk_tokens is None:
        elements = _GPU_CHUNK_ELEMENTS if logits.is_cuda else _CHUNK_ELEMENTS
        chunk_tokens = max(1, elements // vocab_size)
    loss: torch.Tensor = _TokenCrossEntropySum.apply(  # type: ignore[no-untyped-call]
        logits.reshape(-1, vocab_size), labels.reshape(-1), chunk_tokens
    )
    return loss


class _TokenCrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        log_sums = torch.zeros(len(labels), dtype=dtype, device=logits.device)
        total = torch.zeros((), dtype=dtype, device=logits.device)
        for start in range(0, len(labels), chunk_tokens):
            piece = slice(start, start + chunk_tokens)
            rows = logits[piece].to(dtype)
            has_target = labels[piece] != IGNORE_INDEX
            log_sums[piece] = torch.logsumexp(rows, dim=-1)
            chosen = rows.gather(1, torch.where(has_target, labels[piece], 0)[:, None])[:, 0]
            total += torch.where(has_target, log_sums[piece] - chosen, 0).sum()
        ctx.save_for_backward(logits, labels, log_sums)
        ctx.chunk_tokens = chunk_tokens
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, labels, log_sums = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for start in range(0, len(labels), ctx.chunk_tokens):
            piece = slice(start, start + ctx.chunk_tokens)
            has_target = labels[piece] != IGNORE_INDEX
            softmax = torch.exp(logits[piece].to(log_sums.dtype) - log_sums[piece, None])
            targets = torch.where(has_target, labels[piece], 0)[:, None]
            softmax.scatter_add_(1, targets, torch.full_like(softmax[:, :1], -1.0))
            # Filled, not multiplied: 0 times a NaN of a row without a target would be NaN.
            grad_logits[piece] = softmax.mul_(grad).masked_fill_(~has_target[:, None], 0.0)
        return grad_logits, None, None


def causal_lm_loss_sum(model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
    """The summed token loss of a packed micro-batch.

    Where :func:`odcengine.models.prepare_model` has proved that the model ends with its head, the head
    computes the loss itself, a chunk of tokens at a time, and the logits of the row never exist at once.
    Other models return all their logits.

    Args:
        model: a causal language model with the keywords of transformers, prepared by
            :func:`odcengine.models.prepare_model`; returns the logits ``[1, T, V]`` or an object with them.
        micro_batch: on the model's device.

    Returns:
        Scalar, float32 (float64 for float64 logits); 0 with a graph where nothing has a target.

    Raises:
        UsageError: ``num_targets`` of the micro-batch is not that of its labels, or the model is not the one
            that was proved.
    """
    check_num_targets("causal_lm_loss_sum", micro_batch)
    head = head_in_use(model, micro_batch)
    if head is not None:
        return fused_loss_sum(model, head, micro_batch)
    output = model(**micro_batch.model_inputs(), use_cache=False)
    return token_cross_entropy_sum(logits_of(output), micro_batch.labels)


def head_in_use(model: nn.Module, micro_batch: MicroBatch) -> nn.Linear | None:
    """The head that computes in the place of logits; None where the logits are needed."""
    if not fuses_loss(model) or torch.is_autocast_enabled(micro_batch.labels.device.type):
        return None
    return loss_head(model)


def check_num_targets(name: str, micro_batch: MicroBatch) -> None:
    """Raise a UsageError where ``num_targets`` is not that of the labels, as far as the host can see them."""
    labels = micro_batch.labels
    if labels.device.type == "cpu" and int((labels != IGNORE_INDEX).sum()) != micro_batch.num_targets:
        raise UsageError(
            f"{name}: the micro-batch says num_targets={micro_batch.num_targets}, but "
            f"{int((labels != IGNORE_INDEX).sum())} of its labels are targets; make it with pack_samples, or "
            "change both"
        )
