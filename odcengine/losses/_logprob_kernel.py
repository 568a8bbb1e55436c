"""Log-probabilities and entropies of rows of logits, and their gradient, in one launch each, in Triton.

The same as ``rows.py`` does with torch's operations, each of which reads and writes all logits in float32.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from odcengine.losses._softmax_kernel import capped, slope_of_cap

# A row is done by one program; see _softmax_kernel.py.
_MAX_BLOCK = 16384
_MAX_WARPS = 32
_ELEMENTS_PER_WARP = 512


@triton.jit
def _logprob_kernel(
    logits,  # [rows, COLUMNS] with contiguous rows
    targets,  # int64 [rows]
    found,  # float32 [4, rows]: log-probability, entropy, largest, log_total
    num_rows,
    row_stride,  # elements between rows of logits
    temperature,
    scale,  # done to the logits first: logit_transform.py
    cap,
    CAPPED: tl.constexpr,
    COLUMNS: tl.constexpr,  # the vocabulary: a model has one
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    known = (target >= 0) & (target < COLUMNS)
    chosen = tl.load(logits + target, mask=known, other=float("nan")).to(tl.float32) * scale
    if CAPPED:
        chosen = capped(chosen, cap)
    chosen /= temperature

    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    weighted = tl.zeros([], tl.float32)  # sum of exp(z - largest) (z - largest)
    for start in range(0, COLUMNS, BLOCK):
        inside = start + columns < COLUMNS
        values = tl.load(logits + start + columns, mask=inside, other=0.0).to(tl.float32) * scale
        if CAPPED:
            values = capped(values, cap)
        values = tl.where(inside, values / temperature, float("-inf"))
        higher = tl.maximum(largest, tl.max(values, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # nothing yet: no infinity minus infinity
        shrink = tl.exp(largest - shift)
        powers = tl.exp(values - shift)
        if WITH_ENTROPY:
            moved = tl.where(largest == float("-inf"), 0.0, largest - shift)
            # Bounded below: what has no probability adds 0 times a number, not 0 times infinity.
            offsets = tl.maximum(values - shift, -1e30)
            weighted = (weighted + moved * total) * shrink + tl.sum(powers * offsets, 0)
        total = total * shrink + tl.sum(powers, 0)
        largest = higher
    log_total = tl.log(total)
    found += row
    tl.store(found, chosen - largest - log_total)
    if WITH_ENTROPY:
        tl.store(found + num_rows, log_total - weighted / total)
    tl.store(found + 2 * num_rows, largest)
    tl.store(found + 3 * num_rows, log_total)


@triton.jit
def _gradient_kernel(
    logits,  # [rows, COLUMNS] with contiguous rows; becomes the gradient
    targets,  # int64 [rows]
    entropies,  # float32 [rows] each, from here
    largest,
    log_total,
    grad_logprobs,
    grad_entropies,
    row_stride,  # elements between rows of logits
    temperature,
    scale,  # as in the forward
    cap,
    CAPPED: tl.constexpr,
    COLUMNS: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    top = tl.load(largest + row)
    rest = tl.load(log_total + row)
    slope = tl.load(grad_logprobs + row)
    for start in range(0, COLUMNS, BLOCK):
        places = start + columns
        inside = places < COLUMNS
        values = tl.load(logits + places, mask=inside, other=0.0).to(tl.float32) * scale
        slope_of_logit = scale / temperature
        if CAPPED:
            slope_of_logit *= slope_of_cap(values, cap)
            values = capped(values, cap)
        logps = values / temperature - top - rest
        gradient = tl.where(places == target, slope, 0.0) - tl.exp(logps) * slope
        if WITH_ENTROPY:
            entropy = tl.load(entropies + row)
            slope_of_entropy = tl.load(grad_entropies + row)
            gradient -= tl.exp(logps) * (tl.maximum(logps, -1e30) + entropy) * slope_of_entropy
        tl.store(logits + places, (gradient * slope_of_logit).to(logits.dtype.element_ty), mask=inside)


def logprobs_of_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    with_entropy: bool,
    scale: float = 1.0,
    cap: float | None = None,
) -> torch.Tensor:
    """Log-probabilities of the targets of rows of logits, and what the gradient needs.

    Args:
        logits: ``[rows, V]``, 16 or 32 bits, contiguous rows; the softmax is taken in float32.
        targets: int64 ``[rows]``.
        temperature: the logits are divided by it.
        with_entropy: whether entropies are wanted.
        scale: of the logits, as :class:`~odcengine.losses.logit_transform.LogitTransform` has it.
        cap: the same.

    Returns:
        float32 ``[4, rows]``: log-probabilities (NaN where a target is outside of the vocabulary), entropies,
        largest logits, logarithms of the sums; see :class:`~odcengine.losses.rows.RowLogprobs`.
    """
    num_rows, num_columns = logits.shape
    found = torch.empty(4, num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        block, warps = _shape(num_columns)
        _logprob_kernel[(num_rows,)](
            logits,
            targets,
            found,
            num_rows,
            logits.stride(0),
            float(temperature),
            float(scale),
            1.0 if cap is None else float(cap),
            CAPPED=cap is not None,
            COLUMNS=num_columns,
            WITH_ENTROPY=with_entropy,
            BLOCK=block,
            num_warps=warps,
        )
    return found


def gradients_of_rows_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    entropies: torch.Tensor | None,
    largest: torch.Tensor,
    log_total: torch.Tensor,
    grad_logprobs: torch.Tensor,
    grad_entropies: torch.Tensor | None,
    scale: float = 1.0,
    cap: float | None = None,
) -> None:
    """Overwrite rows of logits with the gradient of a loss with respect to them.

    Args:
        logits: as in the forward; overwritten.
        targets: int64 ``[rows]``.
        temperature: as in the forward.
        entropies: of the forward; only with ``grad_entropies``.
        largest: of the forward.
        log_total: of the forward.
        grad_logprobs: float32 ``[rows]``, contiguous as all of these.
        grad_entropies: float32 ``[rows]``, or None.
        scale: as in the forward.
        cap: as in the forward.
    """
    num_rows, num_columns = logits.shape
    if not num_rows:
        return
    block, warps = _shape(num_columns)
    with_entropy = grad_entropies is not None and entropies is not None
    _gradient_kernel[(num_rows,)](
        logits,
        targets,
        entropies if with_entropy else largest,
        largest,
        log_total,
        grad_logprobs,
        grad_entropies if with_entropy else largest,
        logits.stride(0),
        float(temperature),
        float(scale),
        1.0 if cap is None else float(cap),
        CAPPED=cap is not None,
        COLUMNS=num_columns,
        WITH_ENTROPY=with_entropy,
        BLOCK=block,
        num_warps=warps,
    )


def _shape(num_columns: int) -> tuple[int, int]:
    block = min(_MAX_BLOCK, triton.next_power_of_2(num_columns))
    return block, min(_MAX_WARPS, max(1, block // _ELEMENTS_PER_WARP))
