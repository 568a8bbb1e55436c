"""Log-probabilities and entropies of rows of logits, and their gradient, a few rows at a time.

Logits ``z`` of a row, divided by the temperature, are shifted by the largest of them before anything else:
next to a large number the digits of a small log-probability would be lost.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from odcengine.losses.softmax import wide_rows

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
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, with_entropy: bool
) -> RowLogprobs:
    """Log-probabilities of the targets of rows of logits.

    Args:
        logits: ``[rows, V]``; left as they are.
        targets: int64 ``[rows]``, all in the vocabulary.
        temperature: the logits are divided by it.
        with_entropy: whether entropies are wanted.
    """
    dtype = wide_dtype(logits)
    found = torch.empty(4, len(logits), dtype=dtype, device=logits.device)
    start = 0
    step = wide_rows(logits)
    for rows_, targets_ in zip(torch.split(logits, step), torch.split(targets[:, None], step), strict=True):
        rows = rows_.to(dtype, copy=True).div_(temperature)
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
) -> None:
    """Overwrite rows of logits with the gradient of a loss with respect to them.

    With ``d log p_t / d z_v = ([v = t] - p_v) / temperature`` and, for the entropy ``H``,
    ``d H / d z_v = -p_v (log p_v + H) / temperature``.

    Args:
        logits: ``[rows, V]``; overwritten.
        targets: int64 ``[rows]``.
        temperature: as in the forward.
        known: of the same logits, with entropies if these have a gradient.
        grad_logprobs: ``[rows]``, the loss's gradient with respect to the log-probabilities.
        grad_entropies: ``[rows]``, the same for entropies, or None.
    """
    dtype = wide_dtype(logits)
    start, step = 0, wide_rows(logits)
    for rows_, targets_ in zip(torch.split(logits, step), torch.split(targets[:, None], step), strict=True):
        piece = slice(start, start + len(rows_))
        start += len(rows_)
        grad = grad_logprobs[piece, None].to(dtype)
        # In place where they are as wide already.
        rows = rows_.div_(temperature) if rows_.dtype == dtype else rows_.to(dtype).div_(temperature)
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
        if rows is not rows_:
            rows_.copy_(rows)


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """What sums over the vocabulary are taken in: float32, or float64 for float64."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
