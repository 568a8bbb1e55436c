"""How the losses of tokens are weighted, so that micro-batches of any cut add up to the same loss.

Each way is a weight for every token and a count for every micro-batch, and the loss of the minibatch is
``sum of weight * token loss`` over ``sum of counts``, both over all micro-batches of all ranks. Sequences are
never cut, so weights depend on a token's own sequence only.
"""

from __future__ import annotations

from typing import Literal

import torch

from odcengine.data.batch import IGNORE_INDEX, MicroBatch
from odcengine.errors import UsageError

Normalization = Literal["token", "sequence", "dr_grpo"]
NORMALIZATIONS = ("token", "sequence", "dr_grpo")


def check_normalization(name: str, normalize_by: str, max_completion_length: int | None) -> None:
    """Raise a UsageError for a normalisation that is not known, or lacks its length."""
    if normalize_by not in NORMALIZATIONS:
        raise UsageError(
            f"{name}: normalize_by is {normalize_by!r}; choose one of {', '.join(NORMALIZATIONS)}"
        )
    if normalize_by == "dr_grpo" and (max_completion_length is None or max_completion_length < 1):
        raise UsageError(
            f"{name}: normalize_by dr_grpo divides by a length that is the same in all steps; give "
            f"max_completion_length (it is {max_completion_length}), the limit of tokens in sampling"
        )


def weighted_sum(
    losses: torch.Tensor,
    micro_batch: MicroBatch,
    normalize_by: Normalization,
    max_completion_length: int | None = None,
) -> tuple[torch.Tensor, float]:
    """The summed loss of a micro-batch, and its count.

    - ``token``: the mean over all tokens with a target of the minibatch; count: these tokens.
    - ``sequence``: the mean over each sequence's tokens, then over sequences; count: sequences with a target
      (the mean of no tokens is no number, so empty ones are left out).
    - ``dr_grpo``: the sum over each sequence's tokens divided by a constant, then the mean over sequences;
      count: sequences, empty ones included, times the constant.

    Args:
        losses: ``[1, T]``, 0 where there is no target.
        micro_batch: with the boundaries.
        normalize_by: one of :data:`NORMALIZATIONS`.
        max_completion_length: the constant of ``dr_grpo``.
    """
    if normalize_by == "token":
        return losses.sum(), float(micro_batch.num_targets)
    if normalize_by == "dr_grpo":
        return losses.sum(), float(micro_batch.num_sequences * (max_completion_length or 1))
    means = mean_per_sequence(losses, micro_batch)
    return means.sum(), float(sum(number > 0 for number in micro_batch.targets_per_sequence))


def mean_per_sequence(values: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    """Means over the tokens with a target of each sequence, ``[num_sequences]``; 0 where there is none.

    Args:
        values: ``[1, T]``, 0 where there is no target.
        micro_batch: with the boundaries.
    """
    targets = micro_batch.sum_per_sequence((micro_batch.labels != IGNORE_INDEX).to(values.dtype))
    return micro_batch.sum_per_sequence(values) / targets.clamp(min=1)
