"""Softmax and cross entropy of rows of logits in one launch, in Triton: read twice, written once, in place.

With torch's own operations, each of which reads and writes all logits in float32, this would take longer than
the matrix products around it.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

# A row is done by one program. Few large programs keep few rows under way, and so more of a row in the cache
# until it is read again.
_MAX_BLOCK = 16384
_MAX_WARPS = 32
_ELEMENTS_PER_WARP = 512


@triton.jit
def capped(values, cap):
    """``cap * tanh(values / cap)``; by the sigmoid, which Triton's interpreter has, too."""
    return cap * (2.0 * tl.sigmoid(2.0 / cap * values) - 1.0)


@triton.jit
def slope_of_cap(values, cap):
    """``1 - tanh(values / cap) ** 2``."""
    sigmoid = tl.sigmoid(2.0 / cap * values)
    return 4.0 * sigmoid * (1.0 - sigmoid)


@triton.jit
def _softmax_kernel(
    logits,  # [rows, COLUMNS] with contiguous rows; becomes the gradient
    targets,  # int64 [rows]
    losses,  # float32 [rows]
    row_stride,  # elements between rows of logits
    scale,  # done to the logits first: logit_transform.py
    cap,
    CAPPED: tl.constexpr,
    COLUMNS: tl.constexpr,  # the vocabulary: a model has one
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    known = (target >= 0) & (target < COLUMNS)
    # Read before the first reduction, behind which no thread of the program writes: it is overwritten below.
    chosen = tl.load(logits + target, mask=known, other=float("nan")).to(tl.float32) * scale
    if CAPPED:
        chosen = capped(chosen, cap)

    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        inside = start + columns < COLUMNS
        values = tl.load(logits + start + columns, mask=inside, other=0.0).to(tl.float32) * scale
        if CAPPED:
            values = capped(values, cap)
        values = tl.where(inside, values, float("-inf"))
        higher = tl.maximum(largest, tl.max(values, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # nothing yet: no infinity minus infinity
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(values - shift), 0)
        largest = higher
    # Never largest plus log(total): next to a large number the digits of a small loss would be lost.
    tl.store(losses + row, tl.log(total) - (chosen - largest))

    if WITH_GRADIENT:
        tl.debug_barrier()
        share = 1.0 / total
        blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
        for index in range(blocks):
            # Backwards: what was read last is still in the cache.
            places = (blocks - 1 - index) * BLOCK + columns
            inside = places < COLUMNS
            values = tl.load(logits + places, mask=inside, other=0.0).to(tl.float32) * scale
            slope = scale
            if CAPPED:
                slope = scale * slope_of_cap(values, cap)
                values = capped(values, cap)
            gradient = slope * (tl.exp(values - largest) * share - tl.where(places == target, 1.0, 0.0))
            tl.store(logits + places, gradient.to(logits.dtype.element_ty), mask=inside)


def softmax_minus_target_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    with_gradient: bool,
    scale: float = 1.0,
    cap: float | None = None,
) -> torch.Tensor:
    """Cross entropy of each row; the logits become its gradient.

    Args:
        logits: ``[rows, V]``, 16 or 32 bits, contiguous rows; the softmax is taken in float32. Overwritten
            with ``softmax - one_hot(target)``, times the slope of scale and cap, if ``with_gradient``.
        targets: int64 ``[rows]``.
        with_gradient: whether to overwrite the logits.
        scale: of the logits, as :class:`~odcengine.losses.logit_transform.LogitTransform` has it.
        cap: the same.

    Returns:
        float32 ``[rows]``; NaN where a target is outside of the vocabulary.
    """
    num_rows, num_columns = logits.shape
    losses = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    block = min(_MAX_BLOCK, triton.next_power_of_2(num_columns))
    _softmax_kernel[(num_rows,)](
        logits,
        targets,
        losses,
        logits.stride(0),
        float(scale),
        1.0 if cap is None else float(cap),
        CAPPED=cap is not None,
        COLUMNS=num_columns,
        WITH_GRADIENT=with_gradient,
        BLOCK=block,
        num_warps=min(_MAX_WARPS, max(1, block // _ELEMENTS_PER_WARP)),
    )
    return losses
