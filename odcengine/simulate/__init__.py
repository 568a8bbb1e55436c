"""Simulation of minibatches: how long a plan takes, and how long ranks wait, without running it."""

from __future__ import annotations

from odcengine.simulate.measured import MeasuredRun, RunFit
from odcengine.simulate.minibatch import Communication, Machine, Outcome, simulate

__all__ = [
    "Communication",
    "Machine",
    "MeasuredRun",
    "Outcome",
    "RunFit",
    "simulate",
]
