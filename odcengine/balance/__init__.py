"""Load balancing: which rank computes which samples of a minibatch, and in which micro-batches."""

from __future__ import annotations

from odcengine.balance.cost import CostModel
from odcengine.balance.online import Fit, OnlineCost
from odcengine.balance.plan import EQUAL_COUNT_STRATEGIES, STRATEGIES, Plan, make_plan

__all__ = ["EQUAL_COUNT_STRATEGIES", "STRATEGIES", "CostModel", "Fit", "OnlineCost", "Plan", "make_plan"]
