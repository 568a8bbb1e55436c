"""An attached engine trains as one process does, whatever the ranks and the split."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import RankResult, run_ranks, values

from zero3.toy import Case, error_of, make_engine, reference, train_engine, whole_weights

pytest.importorskip("deepspeed")

NO_PERSISTENCE = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
CASES = [
    Case("plain"),
    Case("sum", odc={"grad_reduce": "sum"}),
    Case("clipped", clip=0.05, lr=0.5),
    Case("frozen", {"frozen": True}),
    Case("lora", {"lora": True}),
    Case("checkpointing", {"checkpointing": True}),
    Case("reentrant", {"reentrant": True, "tied": False}),
    Case("called_twice", {"twice": True}),
    Case("conditional", {"experts": True}),
    Case("never_used", {"unused": True}),
    Case("sub_groups", {}, {"zero_optimization": {"sub_group_size": 150}}),
    Case("nothing_persists", {"experts": True}, NO_PERSISTENCE),
    Case("managed", managed=True),
    Case("zero_init", zero_init=True),
    Case("large", {"experts": True, "frozen": True}, large=6, clip=0.05),
    Case("all_large", {"tied": False}, large=1),
    Case("adamw", optimizer="AdamW", lr=1e-2, tolerance=2e-5),
]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {}),
    "3": (3, {}),
    "2x2": (4, {"sharding": "hybrid", "node_size": 2}),
}
# More nodes in the default run only for what depends on them; test_protocol.py has three ranks of one.
QUICK = ("clipped", "frozen", "conditional", "large")
DEFAULT = [("2x2", name) for name in QUICK]


def _train(rank: int, world_size: int, case: Case, odc: dict[str, Any]) -> dict[str, Any]:
    import odcengine
    from odcengine.deepspeed import layout

    engine = make_engine(case)
    with mock.patch.object(layout, "LARGE_SHARD", case.large or layout.LARGE_SHARD):
        attached = odcengine.attach(engine, timeout_s=30, startup_timeout_s=60, **case.odc, **odc)
        norms = train_engine(engine, rank, world_size, case)
        weights = whole_weights(engine)
    attached.close()
    where = {"device": engine.device.type, "transport": type(attached.transport).__name__}
    return {"norms": norms, "weights": weights, **where}


def _train_all(rank: int, world_size: int, odc: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Cases one after the other in the same processes."""
    return {case.name: _train(rank, world_size, case, odc) for case in CASES if case.name in names}


@functools.cache
def _layout(name: str, quick: bool) -> list[RankResult]:
    world_size, odc = LAYOUTS[name]
    names = QUICK if quick and name != "2" else tuple(case.name for case in CASES)
    return run_ranks(_train_all, world_size, odc, names, timeout_s=280)


def _cells() -> list[Any]:
    return [
        pytest.param(
            case,
            layout,
            id=f"{case.name}-{layout}",
            marks=[] if layout == "2" or (layout, case.name) in DEFAULT else [pytest.mark.soak],
        )
        for layout in LAYOUTS
        for case in CASES
    ]


@pytest.mark.parametrize(("case", "layout"), _cells())
def test_equals_one_process(case: Case, layout: str) -> None:
    right = reference(case, LAYOUTS[layout][0])
    quick = layout == "2" or case.name in QUICK
    ranks = [result[case.name] for result in values(_layout(layout, quick))]
    assert float(error_of(ranks[0]["weights"], dict(make_start(case)))) > 1e-3  # it has learned something
    for rank in ranks:
        assert error_of(rank["weights"], right["weights"]) <= case.tolerance
        assert rank["norms"] == pytest.approx(right["norms"], rel=1e-5)


def make_start(case: Case) -> list[tuple[str, torch.Tensor]]:
    from zero3.toy import make_model

    return [(name, parameter.detach()) for name, parameter in make_model(case).named_parameters()]
