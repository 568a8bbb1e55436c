"""Model FLOPs of samples, for the model FLOPs utilisation (MFU)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from odcengine.balance import CostModel


def model_flops(
    config: Any, lengths: Sequence[int] | npt.NDArray[np.int64], *, trained: float = 1.0
) -> float:
    """FLOPs that a training step on samples takes by the model's own mathematics.

    As MFU is defined (Chowdhery et al., arXiv 2204.02311, appendix B): forward and backward, nothing that is
    computed a second time. A token costs 6 FLOPs a weight (of the active experts, and of the head), and
    ``6 * layers * heads * head_dim * l**2`` go to causal attention over a sample of ``l`` tokens: two
    products of ``2 * l**2 * heads * head_dim`` forward and twice that backward, half of it masked. Norms,
    softmax and embedding look-ups are left out, as is usual. Attention counts as full.

    Args:
        config: configuration of a model of transformers (``model.config``).
        lengths: tokens of each sample, shape ``[n]``; samples of one packed row count one by one.
        trained: share of the weights that are trained; of frozen ones no gradient is computed, 4 FLOPs a
            weight and token.

    Returns:
        FLOPs of all samples together.

    Raises:
        ValueError: the configuration does not tell the model's shape.
    """
    cost = CostModel.from_config(config, trained=trained)
    # CostModel counts the work done: FlashAttention's backward computes the scores again, seven products.
    cost = CostModel(linear=cost.linear, quadratic=cost.quadratic * 6 / 7)
    return float(cost(lengths).sum())
