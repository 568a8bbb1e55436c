"""Losses: summed over tokens, so that any split of a minibatch adds up to the same gradient."""

from __future__ import annotations

from odcengine.losses.advantages import group_advantages, informative_groups
from odcengine.losses.dpo import DPO_METRICS, DpoLoss
from odcengine.losses.grpo import GRPO_METRICS, GrpoLoss
from odcengine.losses.kl import kl_estimates
from odcengine.losses.linear_logprobs import TokenLogprobs, linear_logprobs
from odcengine.losses.linear_loss import linear_cross_entropy_sum
from odcengine.losses.logit_transform import LogitTransform
from odcengine.losses.logprobs import causal_lm_logprobs, token_logprobs
from odcengine.losses.loss_sum import LossSum
from odcengine.losses.token_loss import causal_lm_loss_sum, token_cross_entropy_sum

__all__ = [
    "DPO_METRICS",
    "GRPO_METRICS",
    "DpoLoss",
    "GrpoLoss",
    "LogitTransform",
    "LossSum",
    "TokenLogprobs",
    "causal_lm_logprobs",
    "causal_lm_loss_sum",
    "group_advantages",
    "informative_groups",
    "kl_estimates",
    "linear_cross_entropy_sum",
    "linear_logprobs",
    "token_cross_entropy_sum",
    "token_logprobs",
]
