"""Lets the head of a language model return a loss or log-probabilities instead of logits, for one forward.

Under FSDP the head's weight is whole only inside the forward of the group that owns it, so they have to be
computed there. transformers' models call their head as a module, and its forward can be exchanged for one
call on the instance: names of parameters, hooks, tied weights and the model's class stay as they are.

That is right only for models that return what their head returns, or that scale or cap it as one of their
attributes says (``logit_change.py``). :func:`odcengine.models.prepare_model` finds out on a tiny input and
marks the models that do; others (heads that are no plain linear layer) keep returning logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from odcengine.data.batch import MicroBatch
from odcengine.errors import UsageError
from odcengine.losses.linear_logprobs import Entropy, TokenLogprobs, linear_logprobs
from odcengine.losses.linear_loss import linear_cross_entropy_sum
from odcengine.losses.logit_change import LogitChange, left_out
from odcengine.losses.logit_transform import UNCHANGED, LogitTransform

_MARK = "_odc_fuses_loss"
_CHANGE = "_odc_logit_change"


def mark_fused(model: nn.Module, fuses: bool) -> None:
    """Note on a model whether its head may compute the loss; see :func:`odcengine.models.prepare_model`."""
    setattr(model, _MARK, fuses)


def fuses_loss(model: nn.Module) -> bool:
    """Whether the model was marked as one whose head may compute the loss."""
    return bool(getattr(model, _MARK, False))


def mark_change(model: nn.Module, change: LogitChange | None) -> None:
    """Note on a model what it does to what its head returns; None for nothing."""
    setattr(model, _CHANGE, change)


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

    transform = _transform_of(model)

    def loss_of(hidden: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy_sum(
            hidden,
            head.weight,
            head.bias,
            micro_batch.labels,
            transform=transform,
            num_targets=micro_batch.num_targets,
        ).reshape(1, 1, 1)

    return _through_head(model, head, micro_batch, loss_of).reshape(())


def fused_logprobs(
    model: nn.Module, head: nn.Linear, micro_batch: MicroBatch, temperature: float, entropy: Entropy
) -> TokenLogprobs:
    """Log-probabilities of a micro-batch's labels, computed by the model's head.

    Args:
        model: returns what its head returns.
        head: its :func:`loss_head`.
        micro_batch: on the model's device.
        temperature: logits are divided by it.
        entropy: as :func:`~odcengine.losses.linear_logprobs` has it.

    Raises:
        UsageError: as for :func:`fused_loss_sum`.
    """

    transform = _transform_of(model)

    def logprobs_of(hidden: torch.Tensor) -> torch.Tensor:
        found = linear_logprobs(
            hidden,
            head.weight,
            head.bias,
            micro_batch.labels,
            transform=transform,
            temperature=temperature,
            entropy=entropy,
            num_targets=micro_batch.num_targets,
        )
        return torch.stack([values for values in found if values is not None], dim=-1)

    found = _through_head(model, head, micro_batch, logprobs_of)
    if entropy == "none":
        return TokenLogprobs(found[..., 0])
    entropies = found[..., 1]
    return TokenLogprobs(found[..., 0], entropies if entropy == "differentiable" else entropies.detach())


def _change_of(model: nn.Module) -> LogitChange | None:
    change: LogitChange | None = getattr(model, _CHANGE, None)
    return change


def _transform_of(model: nn.Module) -> LogitTransform:
    change = _change_of(model)
    return UNCHANGED if change is None else change.transform


def _through_head(
    model: nn.Module,
    head: nn.Linear,
    micro_batch: MicroBatch,
    compute: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """What ``compute`` makes of the hidden states within the head's forward; three dimensions, as logits."""
    with head_returning(head, compute) as returned, left_out(model, _change_of(model)):
        logits = logits_of(model(**micro_batch.model_inputs(), use_cache=False))
    if not is_what_was_returned(logits, returned):
        raise UsageError(
            f"{type(model).__name__} does not return what its head returns, so the head cannot compute the "
            "loss; if it was changed since odcengine.models.prepare_model, call that again"
        )
    return logits


Returned = list[tuple[torch.Tensor, int]]
"""What a head has returned, each with the version that it had then."""


def is_what_was_returned(logits: torch.Tensor, returned: Returned) -> bool:
    """Whether a model's logits are what its head has returned in its only call, as it was then."""
    # The same memory, not the same tensor: DeepSpeed's hooks hand on an alias of what the head returns.
    same = len(returned) == 1 and returned[0][0].data_ptr() == logits.data_ptr()
    return same and returned[0][1] == returned[0][0]._version and logits.shape == returned[0][0].shape


@contextmanager
def head_returning(head: nn.Linear, compute: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Returned]:
    """While it lasts, the head returns what ``compute`` does; yields what it has returned."""
    returned: Returned = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        computed = compute(hidden).clone()  # FSDP2 warns about views
        returned.append((computed, computed._version))
        return computed

    head.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield returned
    finally:
        del head.forward
