"""The gradient of a minibatch is that of one process, whatever the ranks and the split (20 minibatches)."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from distributed import RankResult, run_ranks, values

from engine.toy import STEPS, Case, compare, reference, train

# Plain SGD: Adam divides by tiny second moments and blows the last bits of fp32 up.
FP32 = {"dtype": torch.float32, "grad_tolerance": 5e-6, "weight_tolerance": 5e-6, "optimizer": "SGD"}
CASES = [
    Case("tied"),
    Case("untied", {"tied": False}),
    Case("checkpointing", {"checkpointing": True}),
    Case("called_twice", {"twice": True}),
    Case("twice_and_checkpointing", {"twice": True, "checkpointing": True}),
    Case("frozen", {"frozen": True}),
    Case("lora", {"lora": True}),
    Case("conditional", {"experts": True}),
    Case("conditional_wrapped", {"experts": True}, {"odc": {"wrap": ["Block", "Expert"]}}),
    Case("never_used", {"unused": True}),
    Case("one_group", {}, {"odc": {"wrap": "auto"}}),
    Case("keep_after_forward", {}, {"odc": {"reshard_after_forward": False}}),
    Case("evaluation_between", {"experts": True}, evaluate=True),
    Case("fp32", {"experts": True}, **FP32),
    Case("bf16", {}, {"bf16": {"enabled": True}}, torch.float32, 1e-5, 2e-2, exact_steps=2),
]
LAYOUTS = {
    "1": (1, {}),
    "2": (2, {}),
    "3": (3, {}),
    "4": (4, {}),
    "2x2": (4, {"sharding": "hybrid", "node_size": 2}),
    "4x1": (4, {"sharding": "hybrid", "node_size": 1}),
}
BY_NAME = {case.name: case for case in CASES}


def _run_all(rank: int, world_size: int, odc: dict[str, Any]) -> dict[str, Any]:
    """All cases one after the other in the same processes."""
    return {case.name: train(rank, world_size, case, **odc) for case in CASES}


@functools.cache
def _layout(name: str) -> list[RankResult]:
    world_size, odc = LAYOUTS[name]
    return run_ranks(_run_all, world_size, odc, timeout_s=280)


@functools.cache
def reference_of(case: str, world_size: int, steps: int = STEPS) -> dict[str, Any]:
    """What one process computes."""
    return reference(BY_NAME[case], world_size, steps=steps)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BY_NAME)
def test_equals_one_process(name: str, layout: str) -> None:
    ranks = [result[name] for result in values(_layout(layout))]
    check(BY_NAME[name], ranks, reference_of(name, LAYOUTS[layout][0]))


def check(case: Case, ranks: list[dict[str, Any]], right: dict[str, Any]) -> None:
    """What the ranks have trained is what one process has."""
    errors = compare(case, ranks, right)
    assert errors["gradient"] <= case.grad_tolerance
    assert errors["weights"] <= case.weight_tolerance
    assert errors["loss"] <= max(case.grad_tolerance, 2e-2 if case.exact_steps < STEPS else 0)
    assert errors["evaluation"] <= 1e-10
    # The norm that clipping used is the whole gradient's, before clipping.
    norms = [norm for norm in ranks[0]["norms"] if norm == norm]
    assert norms == pytest.approx(right["norms"], rel=_norm_tolerance(case))


def _norm_tolerance(case: Case) -> float:
    if case.exact_steps < STEPS:
        return 5e-2
    return 1e-10 if case.dtype == torch.float64 else 1e-5
