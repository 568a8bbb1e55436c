"""Summed losses of micro-batches and the counts that they are over, alike for every engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from odcengine.data import MicroBatch, Minibatch
from odcengine.data.finite import check_fields_are_finite
from odcengine.data.vocabulary import check_micro_batch
from odcengine.errors import UsageError
from odcengine.losses import LossSum, causal_lm_loss_sum

logger = logging.getLogger(__name__)

LossFn = Callable[[nn.Module, Any], Any]


class Pending(NamedTuple):
    """A forward that a backward may follow.

    Attributes:
        summed_over: the count of its loss; None where the engine does not know it.
        training: whether the model was in training mode.
        divided: whether the loss function itself ends in a division.
    """

    summed_over: float | None
    training: bool
    divided: bool


class SummedLoss:
    """The loss of an engine's micro-batches, and what its forwards since the last backward count.

    Attributes:
        pending: the forwards since the last backward.

    Args:
        loss_fn: returns the summed loss, as a scalar or a :class:`~odcengine.losses.LossSum`; None: the token
            loss of a causal language model.
        normalize_by: ``odc.normalize_by``.
        device: where the engine computes.
        vocab_size: tokens of the model; None where unknown.
        warns: whether to say so where the script divides the loss: one rank of a job does.
    """

    def __init__(
        self,
        loss_fn: LossFn | None,
        normalize_by: str,
        device: torch.device,
        *,
        vocab_size: int | None = None,
        warns: bool = True,
    ) -> None:
        self._vocab_size = vocab_size
        self._warns = warns
        self.pending: list[Pending] = []
        self._loss_fn: LossFn = loss_fn or causal_lm_loss_sum
        self._count_name = "num_targets" if normalize_by == "tokens" else "num_samples"
        self._device = device

    def is_known(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        """Whether a call of the engine asks for a loss, rather than for the model's outputs.

        Raises:
            UsageError: the argument is a whole minibatch of the loader.
        """
        if any(isinstance(argument, Minibatch) for argument in arguments):
            raise UsageError(
                "engine(...) was given a minibatch, which is made of micro-batches; loop over it: "
                "for micro_batch in minibatch: engine.backward(engine(micro_batch)), then engine.step()"
            )
        if len(arguments) != 1 or keywords.keys() - {"loss_fn"}:
            return False
        if keywords:
            return callable(keywords["loss_fn"])
        return isinstance(arguments[0], MicroBatch) or self._loss_fn is not causal_lm_loss_sum

    def __call__(
        self, model: nn.Module, micro_batch: Any, loss_fn: LossFn | None = None, *, trains: bool
    ) -> Any:
        """What the loss function returns, which is counted where it ``trains``.

        Args:
            model: the sharded model.
            micro_batch: any one argument; a :class:`~odcengine.data.MicroBatch` is moved to the device.
            loss_fn: in the place of the engine's own, for this call.
            trains: whether a backward will follow.
        """
        moved = micro_batch
        if isinstance(micro_batch, MicroBatch):
            if self._vocab_size is not None:
                check_micro_batch(micro_batch, self._vocab_size)
            check_fields_are_finite(micro_batch)
        if isinstance(micro_batch, MicroBatch) and micro_batch.input_ids.device.type != self._device.type:
            moved = micro_batch.to(self._device)
        loss = (loss_fn or self._loss_fn)(model, moved)
        if trains:
            count = self.count_of(loss, micro_batch)
            self.pending.append(Pending(count, model.training, _is_quotient(loss)))
        return loss

    @property
    def is_own(self) -> bool:
        """Whether the loss is the engine's own, of tokens."""
        return self._loss_fn is causal_lm_loss_sum

    def count_of(self, loss: Any, micro_batch: Any) -> float | None:
        """What the loss of a micro-batch is summed over; None where unknown."""
        value = loss.count if isinstance(loss, LossSum) else getattr(micro_batch, self._count_name, None)
        return None if value is None else float(value)

    def evaluation_ended(self) -> None:
        """Forwards in evaluation mode that no backward has followed count for nothing.

        Without this, one whose script has forgotten ``torch.no_grad()`` would count in the next backward.
        """
        self.pending = [forward for forward in self.pending if forward.training]

    def of_backward(self, loss: torch.Tensor | LossSum, count: float | None) -> tuple[torch.Tensor, float]:
        """The scalar of a backward, and what it adds to the minibatch's count.

        Args:
            loss: as the script gives it.
            count: as the script says; None: that of the loss, or of the forwards since the last backward.

        Raises:
            UsageError: the count is missing, is there twice or is no number of 0 or more, or the loss is no
                scalar.
        """
        if isinstance(loss, LossSum):
            if count is not None:
                raise UsageError(
                    f"backward: count is {count}, but the loss is a LossSum, which says {loss.count}"
                )
            count, loss = loss.count, loss.loss_sum
        if not isinstance(loss, torch.Tensor):
            raise UsageError(
                f"backward: the loss is a {type(loss).__name__}; give a tensor with its graph: what "
                "engine(micro_batch) has returned, or the .loss of a model's output (not .item())"
            )
        if loss.numel() != 1:
            raise UsageError(f"backward: the loss has shape {list(loss.shape)}; give the sum of the losses")
        if count is None:
            self._notice_division(loss)
            count = self._sum_pending()
        count = float(count)
        if not 0 <= count < math.inf:
            raise UsageError(f"backward: count is {count}; it must be a number of 0 or more")
        return loss, count

    def _notice_division(self, loss: torch.Tensor) -> None:
        """Warn once of ``loss / accumulation_steps`` and the like, which scripts elsewhere need."""
        divided = len(self.pending) == 1 and not self.pending[0].divided and _is_quotient(loss)
        if divided and self._warns:
            self._warns = False
            logger.warning(
                "backward: the loss was divided after engine(micro_batch) had returned it. It is a sum, and "
                "engine.step() divides it by the count of the whole minibatch over all ranks: leave the "
                "division out, or the reported loss and the gradients are smaller by that factor"
            )

    def _sum_pending(self) -> float:
        # Only the sum over the minibatch matters, so a backward may cover several forwards.
        counts = [forward.summed_over for forward in self.pending if forward.summed_over is not None]
        if not counts or len(counts) < len(self.pending):
            raise UsageError(
                "backward: give count=..., the number of tokens (or sequences) that the summed loss is over; "
                "the engine knows it only for micro-batches of its loader"
            )
        return sum(counts)


def _is_quotient(loss: Any) -> bool:
    graph = getattr(loss, "grad_fn", None)
    return graph is not None and graph.name() == "DivBackward0"
