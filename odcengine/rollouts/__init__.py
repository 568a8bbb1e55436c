"""Rollouts: samples that are born on one rank while training runs, and planned for another."""

from __future__ import annotations

from odcengine.rollouts.samples import Sample, TensorSample

__all__ = ["Sample", "TensorSample"]
