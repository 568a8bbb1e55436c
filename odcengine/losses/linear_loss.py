"""The language-model head and the cross entropy in one step, so that a long row's logits never exist at once.

The loss ends the forward, so its gradient is computed there as well: each chunk of tokens gets its logits,
its loss, and its part of the gradients, and then its logits are gone. Nothing is computed twice, and what
waits for the backward is as large as what the backward returns. Tokens without a target (prompts, usually)
are left out altogether.

Chunks are small on a CPU, to stay near its caches. On a GPU they are large: each chunk's part of the weight's
gradient is added to a sum in float32, as large as the weight, and there should be few of these passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from odcengine.data.batch import IGNORE_INDEX
from odcengine.errors import UsageError
from odcengine.losses.logit_transform import UNCHANGED, LogitTransform
from odcengine.losses.softmax import softmax_loss_

# Logits alive at a time on a CPU: 64 MiB in float32, but no fewer than these tokens, below which a large
# vocabulary would make the matrix products of a chunk wait for memory: they read the weight once a chunk.
_CHUNK_ELEMENTS = 2**24
_MIN_CHUNK_TOKENS = 512
# On a GPU: 4096 tokens of bfloat16 logits for a vocabulary of 152 thousand. By an H200's peaks, the three
# products with a hidden size of 1536 take 7 ms then, the softmax 1 ms, adding the weight's gradient 0.7 ms.
_GPU_CHUNK_BYTES = 5 * 2**28
# Logits and parts of the weight's gradient that are widened to float32 at a time on a GPU.
_GPU_WIDE_ELEMENTS = 2**26


def linear_cross_entropy_sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    transform: LogitTransform = UNCHANGED,
    num_targets: int | None = None,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """``token_cross_entropy_sum(linear(hidden, weight, bias), labels)``, without all its logits.

    Loss and gradients are those of the two steps up to rounding: logits have the dtype of the weight, the
    softmax float32 (float64 for float64 weights). Gradients of 16-bit weights are summed over chunks in
    float32 and rounded once.

    Args:
        hidden: ``[..., H]``, of the weight's dtype.
        weight: ``[V, H]``.
        bias: ``[V]``, or None.
        labels: ``[...]``, int64, already shifted; :data:`~odcengine.data.IGNORE_INDEX` where nothing is to
            be learned.
        transform: what the model does to the logits, in the softmax's precision.
        num_targets: labels that are targets, if known: the host need not wait for the device to tell then.
        chunk_tokens: targets computed at a time; chosen by the size of the vocabulary if None.

    Returns:
        Scalar, float32 (float64 for float64 weights); 0 with a graph where nothing has a target.

    Raises:
        UsageError: shapes that do not fit; in a second backward through one forward.
    """
    if hidden.shape[:-1] != labels.shape:
        raise UsageError(
            f"linear_cross_entropy_sum: hidden of shape {list(hidden.shape)}, labels of "
            f"{list(labels.shape)}: labels must have the shape of hidden without the last dimension"
        )
    if num_targets is None:
        num_targets = int((labels != IGNORE_INDEX).sum())
    if chunk_tokens is None:
        chunk_tokens = chunk_tokens_for(weight)
    loss: torch.Tensor = _LinearCrossEntropySum.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        labels.reshape(-1),
        num_targets,
        chunk_tokens,
        torch.is_grad_enabled(),
        transform,
    )
    return loss


class _LinearCrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        num_targets: int,
        chunk_tokens: int,
        with_gradients: bool,
        transform: LogitTransform,
    ) -> torch.Tensor:
        for_hidden, for_weight, for_bias = (with_gradients and need for need in ctx.needs_input_grad[:3])
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden) if for_hidden else None
        grad_weight: torch.Tensor | None = None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if for_bias and bias is not None else None
        # Targets first, without asking the device how many there are.
        order = torch.sort((labels == IGNORE_INDEX).byte(), stable=True).indices[:num_targets]
        sum_dtype = dtype if num_targets > chunk_tokens else None
        for positions in order.chunk(max(1, -(-num_targets // chunk_tokens))):
            inputs = hidden.index_select(0, positions)
            # One buffer of the size of the chunk's logits: it becomes their gradient.
            buffer = torch.nn.functional.linear(inputs, weight, bias)
            total += softmax_loss_(buffer, labels[positions], for_hidden or for_weight or for_bias, transform)
            if grad_bias is not None:
                grad_bias += buffer.sum(dim=0, dtype=dtype)
            if grad_hidden is not None:
                grad_hidden.index_copy_(0, positions, buffer @ weight)
            if for_weight:
                grad_weight = add_product(grad_weight, buffer, inputs, sum_dtype)
            del buffer  # before the next one is made
        ctx.ended = False
        ctx.save_for_backward(
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.ended:
            raise UsageError(
                "linear_cross_entropy_sum: a second backward through one forward; its gradients went to the "
                "first. Run the forward again"
            )
        ctx.ended = True
        # In place: the buffers are as large as the weight.
        scaled = [None if saved is None else saved.mul_(grad) for saved in ctx.saved_tensors]
        return (*scaled, None, None, None, None, None)


def chunk_tokens_for(weight: torch.Tensor) -> int:
    """Tokens of which the logits are computed at a time, by a head ``[V, H]``."""
    if not weight.is_cuda:
        return max(_MIN_CHUNK_TOKENS, _CHUNK_ELEMENTS // len(weight))
    tokens = _GPU_CHUNK_BYTES // (len(weight) * weight.element_size())
    return max(_MIN_CHUNK_TOKENS, tokens // 256 * 256)  # whole tiles of the matrix products


def add_product(
    total: torch.Tensor | None, grad_logits: torch.Tensor, inputs: torch.Tensor, dtype: torch.dtype | None
) -> torch.Tensor:
    """``total + grad_logits.T @ inputs``, summed in ``dtype`` (None: there is only this one product)."""
    if dtype is None:
        return grad_logits.t() @ inputs
    if total is None:
        total = torch.zeros(grad_logits.shape[1], inputs.shape[1], dtype=dtype, device=inputs.device)
    if dtype == inputs.dtype:
        return total.addmm_(grad_logits.t(), inputs)
    # A 16-bit product is widened before it is added: some rows at a time, for it is as large as the weight.
    step = max(1, (_GPU_WIDE_ELEMENTS if inputs.is_cuda else _CHUNK_ELEMENTS) // inputs.shape[1])
    for start in range(0, len(total), step):
        total[start : start + step] += grad_logits[:, start : start + step].t() @ inputs
    return total
