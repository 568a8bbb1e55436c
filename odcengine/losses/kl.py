"""Estimators of the divergence from a reference model, a token each."""

from __future__ import annotations

from typing import Literal

import torch

from odcengine.errors import UsageError

KlEstimator = Literal["k1", "k2", "k3"]
KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_estimates(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Estimates of ``KL(model || reference)`` from the log-probabilities of tokens that the model drew.

    With ``d = log p - log p_ref``: ``k1 = d``, without bias, negative at times; ``k2 = d**2 / 2``, of small
    variance; ``k3 = exp(-d) - 1 + d``, without bias and never negative, GRPO's. (J. Schulman, "Approximating
    KL divergence", 2020.) In a loss it is the gradient that counts: that of k1 is 0 in the mean, so k1 holds
    nothing back; that of k2 is the divergence's own in the mean.

    Args:
        logprobs: of the model, any shape.
        ref_logprobs: of the reference, same shape.
        estimator: ``k1``, ``k2`` or ``k3``.

    Returns:
        Same shape, differentiable.

    Raises:
        UsageError: an estimator that is not known.
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1(-difference) + difference
    raise UsageError(f"KL estimator {estimator!r} is unknown; choose one of {', '.join(KL_ESTIMATORS)}")
