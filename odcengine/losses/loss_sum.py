"""What a loss of one micro-batch is made of, so that micro-batches of all ranks add up to one loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class LossSum:
    """A summed loss, and what it is to be divided by; ``engine.backward`` takes it as it is.

    The loss of a minibatch is the sum of its micro-batches' ``loss_sum`` over the sum of their ``count``.

    Args:
        loss_sum: scalar with a graph.
        count: what the micro-batch adds to the divisor of the minibatch.
        metrics: sums without a graph, by name; over ranks and micro-batches they are added up as well.
        unit: the name of the metric that counts what all others are sums over (``tokens``, ``pairs``):
            divided by it they are means. None: that is ``count``.
    """

    loss_sum: torch.Tensor
    count: float
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    unit: str | None = None
