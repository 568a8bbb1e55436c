"""Log-probabilities and entropies of rows of logits, and their gradient.

On a GPU one kernel does each (``_logprob_kernel.py``) where Triton works, elsewhere torch's operations, a few
rows at a time.

Logits ``z`` of a row, changed as the model does (``logit_transform.py``) and divided by the temperature, are
shifted by the largest of them before anything else: next to a large number the digits of a small
log-probability would be lost.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from odcengine.losses.logit_transform import UNCHANGED, LogitTransform
from odcengine.losses.softmax import wide_rows

logger = logging.getLogger(__name__)

# Below it a probability is zero: in a sum of p log p, 0 times minus infinity has to be 0.
_LOWEST = -1e30


class RowLogprobs(NamedTuple):
    """What is known of rows of logits; all ``[rows]``, float32 (float64 for float64 logits).

    ``log p_v = z_v / temperature - largest - log_total`` for every token ``v`` of the vocabulary.
    """

    logprobs: torch.Tensor
    """Of the targets."""
    entropies: torch.Tensor | None
    """``-sum_v p_v log p_v``; None where not asked for."""
    largest: torch.Tensor
    log_total: torch.Tensor


def row_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    with_entropy: bool,
    transform: LogitTransform = UNCHANGED,
) -> RowLogprobs:
    """Log-probabilities of the targets of rows of logits.

    Args:
        logits: ``[rows, V]``; left as they are.
        targets: int64 ``[rows]``, all in the vocabulary.
        temperature: the logits are divided by it.
        with_entropy: whether entropies are wanted.
        transform: done to the logits first.
    """
    if _uses_kernels(logits):
        values_of, _ = _kernels(logits.device)
        with _on(logits.device):
            values = values_of(logits, targets, temperature, with_entropy, transform.scale, transform.cap)
        return RowLogprobs(values[0], values[1] if with_entropy else None, values[2], values[3])
    dtype = wide_dtype(logits)
    found = torch.empty(4, len(logits), dtype=dtype, device=logits.device)
    start = 0
    step = wide_rows(logits)
    for rows_, targets_ in zip(torch.split(logits, step), torch.split(targets[:, None], step), strict=True):
        rows = rows_.to(dtype, copy=True)
        transform.apply_(rows, False)
        rows /= temperature
        piece = found[:, start : start + len(rows)]
        largest = rows.amax(dim=-1, keepdim=True)
        rows -= largest
        chosen = rows.gather(1, targets_)
        if with_entropy:
            powers = rows.exp()
            total = powers.sum(dim=-1, keepdim=True)
            mean = powers.mul_(rows.clamp_(min=_LOWEST)).sum(dim=-1, keepdim=True) / total
        else:
            total = rows.exp_().sum(dim=-1, keepdim=True)
            mean = total
        log_total = total.log()
        piece.copy_(torch.cat([chosen - log_total, log_total - mean, largest, log_total], dim=1).t())
        start += len(rows)
    return RowLogprobs(found[0], found[1] if with_entropy else None, found[2], found[3])


def row_gradients_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    known: RowLogprobs,
    grad_logprobs: torch.Tensor,
    grad_entropies: torch.Tensor | None,
    transform: LogitTransform = UNCHANGED,
) -> None:
    """Overwrite rows of logits with the gradient of a loss with respect to them.

    With ``d log p_t / d z_v = ([v = t] - p_v) / temperature`` and, for the entropy ``H``,
    ``d H / d z_v = -p_v (log p_v + H) / temperature``, times the transform's slope.

    Args:
        logits: ``[rows, V]``; overwritten.
        targets: int64 ``[rows]``.
        temperature: as in the forward.
        known: of the same logits, with entropies if these have a gradient.
        grad_logprobs: ``[rows]``, the loss's gradient with respect to the log-probabilities.
        grad_entropies: ``[rows]``, the same for entropies, or None.
        transform: as in the forward.
    """
    if _uses_kernels(logits):
        _, gradients_of_ = _kernels(logits.device)
        _, entropies, largest, log_total = known
        slopes = [
            None if grad is None else grad.float().contiguous() for grad in (grad_logprobs, grad_entropies)
        ]
        with _on(logits.device):
            gradients_of_(
                logits,
                targets,
                temperature,
                entropies,
                largest,
                log_total,
                *slopes,
                transform.scale,
                transform.cap,
            )
        return
    dtype = wide_dtype(logits)
    start, step = 0, wide_rows(logits)
    for rows_, targets_ in zip(torch.split(logits, step), torch.split(targets[:, None], step), strict=True):
        piece = slice(start, start + len(rows_))
        start += len(rows_)
        grad = grad_logprobs[piece, None].to(dtype)
        # In place where they are as wide already.
        rows = rows_.to(dtype)
        kept = transform.apply_(rows, True)
        rows /= temperature
        rows -= known.largest[piece, None]
        rows -= known.log_total[piece, None]
        if grad_entropies is not None and known.entropies is not None:
            rows.clamp_(min=_LOWEST)
            factor = (rows + known.entropies[piece, None]).mul_(grad_entropies[piece, None]).add_(grad)
            rows.exp_().mul_(factor).neg_()
        else:
            rows.exp_().mul_(-grad)
        rows.scatter_add_(1, targets_, grad)
        rows /= temperature
        transform.chain_(rows, kept)
        if rows is not rows_:
            rows_.copy_(rows)


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """What sums over the vocabulary are taken in: float32, or float64 for float64."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _uses_kernels(logits: torch.Tensor) -> bool:
    return logits.is_cuda and logits.dtype != torch.float64 and bool(_kernels(logits.device))


def _on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def _kernels(device: torch.device) -> tuple[Callable[..., Any], ...]:
    """The kernels, once they have worked on this GPU; none where Triton does not work."""
    try:
        from odcengine.losses._logprob_kernel import gradients_of_rows_, logprobs_of_rows

        with torch.cuda.device(device):
            trial = torch.zeros(1, 16, dtype=torch.bfloat16, device=device)
            targets = torch.zeros(1, dtype=torch.int64, device=device)
            _, entropies, largest, log_total = logprobs_of_rows(trial, targets, 1.0, True)
            gradients_of_rows_(trial, targets, 1.0, entropies, largest, log_total, entropies, entropies)
    except Exception as error:  # whatever Triton fails with, torch can do it too
        logger.warning(
            "log-probabilities are computed by torch's operations, which is slower, because Triton does not "
            "work here: %s: %s",
            type(error).__name__,
            str(error).partition("\n")[0],
        )
        return ()
    return logprobs_of_rows, gradients_of_rows_
