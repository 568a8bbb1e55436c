"""Losses: summed over tokens, so that any split of a minibatch adds up to the same gradient."""

from __future__ import annotations

from odcengine.losses.linear_loss import linear_cross_entropy_sum
from odcengine.losses.token_loss import causal_lm_loss_sum, token_cross_entropy_sum

__all__ = ["causal_lm_loss_sum", "linear_cross_entropy_sum", "token_cross_entropy_sum"]
