"""The language-model head and the log-probabilities of tokens in one step, without all logits at once.

What a loss makes of the log-probabilities (ratios, clipping, pairs) is not known in the forward, so unlike
the cross entropy (``linear_loss.py``) this keeps no gradients: the backward computes the logits of each chunk
again. That is one more product of the head, and nothing but the hidden states waits for the backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from odcengine.data.batch import IGNORE_INDEX
from odcengine.errors import UsageError
from odcengine.losses.linear_loss import add_product, chunk_tokens_for
from odcengine.losses.logit_transform import UNCHANGED, LogitTransform
from odcengine.losses.rows import RowLogprobs, row_gradients_, row_logprobs, wide_dtype

Entropy = Literal["none", "detached", "differentiable"]
ENTROPIES = ("none", "detached", "differentiable")


class TokenLogprobs(NamedTuple):
    """Log-probabilities of labels, and entropies of the distributions that they are from.

    Both have the shape of the labels, float32 (float64 for float64 weights), and are 0 where there is no
    target.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor | None = None


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    transform: LogitTransform = UNCHANGED,
    temperature: float = 1.0,
    entropy: Entropy = "none",
    num_targets: int | None = None,
    chunk_tokens: int | None = None,
) -> TokenLogprobs:
    """``log_softmax(linear(hidden, weight, bias) / temperature)[label]``, without all its logits.

    Values and gradients are those of the plain computation up to rounding: logits have the dtype of the
    weight, the softmax float32 (float64 for float64 weights). Gradients of 16-bit weights are summed over
    chunks in float32 and rounded once.

    Args:
        hidden: ``[..., H]``, of the weight's dtype.
        weight: ``[V, H]``.
        bias: ``[V]``, or None.
        labels: ``[...]``, int64, already shifted; :data:`~odcengine.data.IGNORE_INDEX` where nothing is
            wanted.
        transform: what the model does to the logits, before the temperature.
        temperature: logits are divided by it; that of sampling, where samples are compared with their
        sampler.
        entropy: whether entropies are wanted: ``none``, ``detached`` (to be reported) or ``differentiable``.
        num_targets: labels that are targets, if known: the host need not wait for the device to tell then.
        chunk_tokens: targets computed at a time; chosen by the size of the vocabulary if None.

    Raises:
        UsageError: shapes that do not fit, or an argument out of range.
    """
    check_options("linear_logprobs", temperature, entropy)
    if hidden.shape[:-1] != labels.shape:
        raise UsageError(
            f"linear_logprobs: hidden of shape {list(hidden.shape)}, labels of {list(labels.shape)}: labels "
            "must have the shape of hidden without the last dimension"
        )
    if num_targets is None:
        num_targets = int((labels != IGNORE_INDEX).sum())
    logprobs, entropies = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        labels.reshape(-1),
        num_targets,
        chunk_tokens or chunk_tokens_for(weight),
        temperature,
        entropy,
        transform,
    )
    return TokenLogprobs(
        logprobs.view(labels.shape), None if entropies is None else entropies.view(labels.shape)
    )


def check_options(name: str, temperature: float, entropy: str) -> None:
    """Raise a UsageError for a temperature or a choice of entropies that cannot be."""
    if not 0 < temperature < math.inf:
        raise UsageError(f"{name}: temperature is {temperature}, but must be a number above 0")
    if entropy not in ENTROPIES:
        raise UsageError(f"{name}: entropy is {entropy!r}; choose one of {', '.join(ENTROPIES)}")


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        num_targets: int,
        chunk_tokens: int,
        temperature: float,
        entropy: Entropy,
        transform: LogitTransform,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Targets first, without asking the device how many there are.
        order = torch.sort((labels == IGNORE_INDEX).byte(), stable=True).indices[:num_targets]
        found = torch.zeros(4, num_targets, dtype=wide_dtype(weight), device=hidden.device)
        with_entropy = entropy != "none"
        with torch.autocast(hidden.device.type, enabled=False):
            for piece, positions in _chunks(order, chunk_tokens):
                logits = torch.nn.functional.linear(hidden.index_select(0, positions), weight, bias)
                rows = row_logprobs(logits, labels[positions], temperature, with_entropy, transform)
                for into, values in zip(found, rows, strict=True):
                    if values is not None:
                        into[piece] = values
                del logits  # before the next are made
        ctx.set_materialize_grads(False)
        ctx.chunk_tokens, ctx.temperature, ctx.transform = chunk_tokens, temperature, transform
        ctx.save_for_backward(hidden, weight, bias, labels, order, found)
        zeros = found.new_zeros(2, len(labels))
        logprobs = zeros[0].index_copy(0, order, found[0])
        entropies = zeros[1].index_copy(0, order, found[1]) if with_entropy else None
        if entropy == "detached":
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropies: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels, order, found = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        if grad_logprobs is None:
            grad_logprobs = found.new_zeros(len(labels))
        grad_hidden = torch.zeros_like(hidden) if for_hidden else None
        grad_weight: torch.Tensor | None = None
        grad_bias = torch.zeros_like(bias, dtype=found.dtype) if for_bias and bias is not None else None
        sum_dtype = found.dtype if len(order) > ctx.chunk_tokens else None
        with torch.autocast(hidden.device.type, enabled=False):
            for piece, positions in _chunks(order, ctx.chunk_tokens):
                inputs = hidden.index_select(0, positions)
                # One buffer of the size of the chunk's logits: it becomes their gradient.
                buffer = torch.nn.functional.linear(inputs, weight, bias)
                row_gradients_(
                    buffer,
                    labels[positions],
                    ctx.temperature,
                    RowLogprobs(*found[:, piece]),
                    grad_logprobs[positions],
                    None if grad_entropies is None else grad_entropies[positions],
                    ctx.transform,
                )
                if grad_bias is not None:
                    grad_bias += buffer.sum(dim=0, dtype=found.dtype)
                if grad_hidden is not None:
                    grad_hidden.index_copy_(0, positions, buffer @ weight)
                if for_weight:
                    grad_weight = add_product(grad_weight, buffer, inputs, sum_dtype)
                del buffer
        if for_weight:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


def _chunks(order: torch.Tensor, chunk_tokens: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Places among the targets, and positions in the row, of one chunk of targets after the other.

    Chunks of nearly equal size: a short last one would take as long to read the weight.
    """
    size = -(-len(order) // max(1, -(-len(order) // chunk_tokens)))
    for start in range(0, len(order), max(1, size)):
        yield slice(start, start + size), order[start : start + size]
