"""Lets the head of a language model return the loss instead of the logits, for the length of one forward.

Under FSDP the head's weight is whole only inside the forward of the group that owns it, so the loss has to be
computed there. transformers' models call their head as a module, and its forward can be exchanged for one
call on the instance: names of parameters, hooks, tied weights and the model's class stay as they are.

That is right only for models that return what their head returns. :func:`odcengine.models.prepare_model`
finds out on a tiny input and marks the models that do; others (logits that are scaled or capped, heads that
are no plain linear layer) keep returning logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from odcengine.data.batch import MicroBatch
from odcengine.errors import UsageError
from odcengine.losses.linear_loss import linear_cross_entropy_sum

_MARK = "_odc_fuses_loss"


def mark_fused(model: nn.Module, fuses: bool) -> None:
    """Note on a model whether its head may compute the loss; see :func:`odcengine.models.prepare_model`."""
    setattr(model, _MARK, fuses)


def fuses_loss(model: nn.Module) -> bool:
    """Whether the model was marked as one whose head may compute the loss."""
    return bool(getattr(model, _MARK, False))


def loss_head(model: nn.Module) -> nn.Linear | None:
    """The output embedding of a model, if it is a linear layer and nothing else; None otherwise.

    Args:
        model: a model of transformers, or a wrapper of one.
    """
    for module in model.modules():
        get = getattr(module, "get_output_embeddings", None)
        head = get() if callable(get) else None
        if head is not None:
            plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
            return head if plain and "forward" not in vars(head) else None
    return None


def logits_of(output: Any) -> torch.Tensor:
    """The logits in what a model returns: a tensor, or an object that has them."""
    logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    return logits


def fused_loss_sum(model: nn.Module, head: nn.Linear, micro_batch: MicroBatch) -> torch.Tensor:
    """The summed token loss of a micro-batch, computed by the model's head.

    Args:
        model: returns what its head returns.
        head: its :func:`loss_head`.
        micro_batch: on the model's device.

    Returns:
        Scalar; float32 (float64 for float64 weights).

    Raises:
        UsageError: the model changes what its head returns, or calls it more than once or not at all.
    """
    with _returning_loss(head, micro_batch) as returned:
        logits = logits_of(model(**micro_batch.model_inputs(), use_cache=False))
    # The same memory, not the same tensor: DeepSpeed's hooks hand on an alias of what the head returns.
    same = len(returned) == 1 and returned[0][0].data_ptr() == logits.data_ptr()
    if not same or returned[0][1] != returned[0][0]._version or logits.numel() != 1:
        raise UsageError(
            f"{type(model).__name__} does not return what its head returns, so the head cannot compute the "
            "loss; if it was changed since odcengine.models.prepare_model, call that again"
        )
    return logits.reshape(())


@contextmanager
def _returning_loss(head: nn.Linear, micro_batch: MicroBatch) -> Iterator[list[tuple[torch.Tensor, int]]]:
    """While it lasts, the head returns the summed loss as ``[1, 1, 1]``; yields what it has returned."""
    returned: list[tuple[torch.Tensor, int]] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        loss = (
            linear_cross_entropy_sum(
                hidden, head.weight, head.bias, micro_batch.labels, num_targets=micro_batch.num_targets
            )
            .reshape(1, 1, 1)
            .clone()
        )  # FSDP2 warns about views
        returned.append((loss, loss._version))
        return loss

    head.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield returned
    finally:
        del head.forward
