"""Cross entropy of rows of logits with its gradient, written over the logits.

On a GPU one kernel does it (``_softmax_kernel.py``) where Triton works, elsewhere torch's operations, a few
rows at a time.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from odcengine.losses.logit_transform import UNCHANGED, LogitTransform

logger = logging.getLogger(__name__)

# Logits widened at a time: 64 MiB in float32 on a CPU, 256 MiB on a GPU, which launches each operation.
_WIDE_ELEMENTS = {"cpu": 2**24, "cuda": 2**26}

Kernel = Callable[[torch.Tensor, torch.Tensor, bool, float, float | None], torch.Tensor]


def softmax_loss_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    with_gradient: bool,
    transform: LogitTransform = UNCHANGED,
) -> torch.Tensor:
    """The summed cross entropy of rows of logits; the logits become its gradient.

    Args:
        logits: ``[rows, V]``, contiguous; the softmax is taken in float32 (float64 for float64). Changed in
            any case: if ``with_gradient`` to the loss's gradient, ``softmax - one_hot(target)`` times the
            transform's slope.
        targets: ``[rows]``, int64, all in the vocabulary. (On a GPU the loss is NaN where one is not, or the
            device reports an error.)
        with_gradient: whether the gradient is wanted.
        transform: done to the logits first.

    Returns:
        Scalar, float32 (float64 for float64 logits).
    """
    if logits.is_cuda and logits.dtype != torch.float64:
        kernel = _kernel(logits.device)
        if kernel is not None:
            with torch.cuda.device(logits.device):
                return kernel(logits, targets, with_gradient, transform.scale, transform.cap).sum()
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    total = torch.zeros((), dtype=dtype, device=logits.device)
    step = wide_rows(logits)
    for rows_, targets_ in zip(torch.split(logits, step), torch.split(targets[:, None], step), strict=True):
        rows = rows_.to(dtype)
        kept = transform.apply_(rows, with_gradient)
        rows -= rows.amax(dim=-1, keepdim=True)
        total -= rows.gather(1, targets_).sum()
        sums = rows.exp_().sum(dim=-1, keepdim=True)
        total += sums.log().sum()
        if with_gradient:
            rows /= sums
            rows.scatter_add_(1, targets_, torch.full_like(sums, -1.0))
            transform.chain_(rows, kept)
            if rows is not rows_:
                rows_.copy_(rows)
    return total


def wide_rows(logits: torch.Tensor) -> int:
    """Rows of logits that are widened at a time."""
    return max(1, _WIDE_ELEMENTS.get(logits.device.type, 2**24) // logits.shape[1])


@functools.cache
def _kernel(device: torch.device) -> Kernel | None:
    """The kernel, once it has worked on this GPU: Triton needs a C compiler on the machine, for example."""
    try:
        from odcengine.losses._softmax_kernel import softmax_minus_target_

        with torch.cuda.device(device):
            trial = torch.zeros(1, 16, dtype=torch.bfloat16, device=device)
            softmax_minus_target_(trial, torch.zeros(1, dtype=torch.int64, device=device), True)
    except Exception as error:  # whatever Triton fails with, torch can do it too
        logger.warning(
            "the loss is computed by torch's operations, which is slower, because Triton does not work here: "
            "%s: %s",
            type(error).__name__,
            str(error).partition("\n")[0],
        )
        return None
    return softmax_minus_target_
