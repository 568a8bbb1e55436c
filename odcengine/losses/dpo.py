"""Losses of preference pairs: the model is to prefer the chosen answer more than the reference model does.

A pair is one sample of two sequences, the chosen answer first:
``{"sequences": [{"input_ids": ..., "loss_mask": ...}, {"input_ids": ..., "loss_mask": ...}]}``. So loader and
planner never part it, both answers are in one micro-batch, and ``train_batch_size`` counts pairs.

With ``h = (log p(chosen) - log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected))`` the loss of a pair
is

- ``sigmoid``: ``-(1 - label_smoothing) log sigmoid(beta h) - label_smoothing log sigmoid(-beta h)``; DPO,
  arXiv 2305.18290. Smoothing takes that share of the pairs for labelled the wrong way round (conservative
  DPO).
- ``ipo``: ``(h - 1 / (2 beta))**2``; arXiv 2310.12036, equation 17.

The loss of a minibatch is the mean over all of its pairs.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from odcengine.data.batch import IGNORE_INDEX, MicroBatch
from odcengine.errors import UsageError
from odcengine.losses.linear_logprobs import TokenLogprobs
from odcengine.losses.logprobs import causal_lm_logprobs
from odcengine.losses.loss_sum import LossSum

DPO_METRICS = ("pairs", "accuracy", "margin", "chosen_reward", "rejected_reward")
"""Sums over pairs, so divided by the first they are means: of 1; of 1 where ``h > 0``; of ``beta h``; of
``beta (log p - log p_ref)`` of the chosen and of the rejected answers."""
_KINDS = ("sigmoid", "ipo")


@dataclass(frozen=True)
class DpoLoss:
    """The loss of preference pairs; a ``loss_fn`` for ``odcengine.initialize``.

    It needs the reference model, or micro-batches with the field ``ref_logprobs`` of it: of each token, or
    for each sequence the sum over its tokens with a target. An answer without such tokens has a
    log-probability of 0.

    Args:
        beta: how near the model is kept to the reference.
        kind: ``sigmoid`` or ``ipo``.
        label_smoothing: share of pairs that are taken for wrong, from 0 to below 0.5; with ``sigmoid``.
        average: log-probabilities of answers are means over their tokens instead of sums, so that length
            does not count; what some libraries do with ``ipo``.

    Raises:
        UsageError: an argument out of range.
    """

    beta: float = 0.1
    kind: Literal["sigmoid", "ipo"] = "sigmoid"
    label_smoothing: float = 0.0
    average: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise UsageError(f"DpoLoss: kind is {self.kind!r}; choose one of {', '.join(_KINDS)}")
        if not 0 < self.beta < math.inf:
            raise UsageError(f"DpoLoss: beta is {self.beta}, but must be a number above 0")
        if not 0 <= self.label_smoothing < 0.5 or (self.label_smoothing and self.kind != "sigmoid"):
            raise UsageError(
                f"DpoLoss: label_smoothing is {self.label_smoothing} with kind {self.kind}; it must be from "
                "0 to below 0.5, and 0 but for sigmoid"
            )

    def __call__(
        self, model: nn.Module, micro_batch: MicroBatch, reference: nn.Module | None = None
    ) -> LossSum:
        """The loss of a micro-batch, from a forward of the model.

        Args:
            model: the model that is trained.
            micro_batch: with the field ``ref_logprobs``, unless there is a ``reference``.
            reference: the reference model (``engine.reference``), which is evaluated here.
        """
        if reference is not None:
            with torch.no_grad():
                known = causal_lm_logprobs(reference, micro_batch).logprobs
            micro_batch = dataclasses.replace(
                micro_batch, fields={**micro_batch.fields, "ref_logprobs": known}
            )
        return self.of(causal_lm_logprobs(model, micro_batch), micro_batch)

    def of(self, found: TokenLogprobs, micro_batch: MicroBatch) -> LossSum:
        """The loss of log-probabilities that are there already.

        Args:
            found: of the micro-batch's labels.
            micro_batch: with the field ``ref_logprobs``.

        Returns:
            Its count is the number of pairs; metrics: :data:`DPO_METRICS`.

        Raises:
            UsageError: a sample is no pair, or the field is missing or has another shape.
        """
        numbers = micro_batch.sequences_per_sample
        for sample, number in zip(micro_batch.sample_ids, numbers, strict=True):
            if number != 2:
                raise UsageError(
                    f"DpoLoss: sample {sample} has {number} sequences, but a pair has two; give samples as "
                    '{"sequences": [chosen, rejected]}'
                )
        gains = self._answers(found.logprobs, micro_batch) - self._reference(found.logprobs, micro_batch)
        chosen, rejected = gains.view(-1, 2).unbind(1)
        difference = chosen - rejected
        if self.kind == "ipo":
            losses = (difference - 1 / (2 * self.beta)).square()
        else:
            log_sigmoid = nn.functional.logsigmoid
            losses = -(1 - self.label_smoothing) * log_sigmoid(self.beta * difference)
            if self.label_smoothing:
                losses = losses - self.label_smoothing * log_sigmoid(-self.beta * difference)
        with torch.no_grad():
            sums = torch.stack(
                [
                    torch.ones_like(chosen).sum(),
                    (difference > 0).to(chosen.dtype).sum(),
                    self.beta * difference.sum(),
                    self.beta * chosen.sum(),
                    self.beta * rejected.sum(),
                ]
            )
        metrics = dict(zip(DPO_METRICS, sums, strict=True))
        return LossSum(losses.sum(), float(len(numbers)), metrics, unit="pairs")

    def _answers(self, logprobs: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """Log-probabilities of answers from those of tokens, ``[num_sequences]``."""
        sums = micro_batch.sum_per_sequence(torch.where(micro_batch.labels != IGNORE_INDEX, logprobs, 0))
        return self._averaged(sums, micro_batch)

    def _reference(self, like: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        if micro_batch.is_dummy:
            return like.new_zeros(0)
        field = micro_batch.field("ref_logprobs", "DpoLoss").to(like.dtype)
        if field.ndim == 2:
            return self._answers(field, micro_batch)
        return self._averaged(field, micro_batch)

    def _averaged(self, sums: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        if not self.average:
            return sums
        targets = micro_batch.sum_per_sequence((micro_batch.labels != IGNORE_INDEX).to(sums.dtype))
        return sums / targets.clamp(min=1)
