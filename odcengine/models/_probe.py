"""What the proofs of a prepared model share: tiny samples, and evaluation mode for their length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

PROBE_SAMPLES = ((3, 1, 4, 1, 5), (9, 2, 6, 5), (8,))
"""Token ids of three samples, to be taken modulo the vocabulary."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout), undone at the end for every module by itself."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
