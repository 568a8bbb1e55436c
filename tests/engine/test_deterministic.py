"""``odc.deterministic``: the same bits whatever the order in which ranks hand their gradients over."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, values

import odcengine
from engine.test_exactness import check
from engine.toy import Case, config_for, loss_of, make_model, micro_batches, reference, shard, train
from odcengine import _model_memory as memory

CASE = Case("in_turn", {"experts": True}, dtype=torch.float32)
EXACT = [
    Case("tied", {"experts": True}),
    Case("bf16", {}, {"bf16": {"enabled": True}}, torch.float32, 1e-5, 2e-2, exact_steps=2),
]
STEPS, EXACT_STEPS = 4, 6


def _in_turn(
    rank: int, world_size: int, folder: Path, turns: list[int], deterministic: bool
) -> dict[str, torch.Tensor]:
    """Train; in every minibatch a rank begins when the one before it in ``turns`` has pushed its last."""
    config = config_for(CASE, deterministic=deterministic)
    engine, *_ = odcengine.initialize(model=make_model(CASE), config=config)
    for step in range(STEPS):
        turn = turns.index(rank)
        while turn and not (folder / f"{step}-{turns[turn - 1]}").exists():
            time.sleep(0.001)
        for micro_batch in micro_batches(CASE.name, step, world_size, equal=True)[rank]:
            loss, count = loss_of(engine, micro_batch)
            engine.backward(loss, count=count)
        (folder / f"{step}-{rank}").touch()
        engine.step()
    weights = {name: shard(p) for name, p in engine.module.named_parameters()}
    engine.close()
    return weights


def _both_orders(rank: int, world_size: int, folder: str, **odc: Any) -> dict[bool, bool]:
    """Whether two orders give equal bits, without and with the setting."""
    equal = {}
    for deterministic in (False, True):
        runs = []
        for turns in ([0, 1, 2], [2, 1, 0]):
            here = Path(folder) / f"{deterministic}-{turns[0]}"
            here.mkdir(exist_ok=True)
            runs.append(_in_turn(rank, world_size, here, turns, deterministic))
        equal[deterministic] = all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    return equal


def test_equal_bits_in_any_order(tmp_path: Path) -> None:
    found = values(run_ranks(_both_orders, 3, str(tmp_path)))
    assert all(equal[True] for equal in found)
    assert not all(equal[False] for equal in found), "the control must differ: its order is of no account"


def _train_all(rank: int, world_size: int, odc: dict[str, Any]) -> list[dict[str, Any]]:
    return [train(rank, world_size, case, steps=EXACT_STEPS, deterministic=True, **odc) for case in EXACT]


@pytest.mark.parametrize(
    ("world_size", "odc"),
    [(3, {}), (4, {"sharding": "hybrid", "node_size": 2}), (2, {"transport": "collective"})],
)
def test_equals_one_process(world_size: int, odc: dict[str, Any]) -> None:
    equal = odc.get("transport") == "collective"  # FSDP2's own sums have one order anyway
    cases = [Case("alike")] if equal else EXACT
    run = _alike if equal else _train_all
    ranks = values(run_ranks(run, world_size, odc))
    for number, case in enumerate(cases):
        right = reference(case, world_size, equal=equal, steps=EXACT_STEPS)
        check(case, [results[number] for results in ranks], right)


def _alike(rank: int, world_size: int, odc: dict[str, Any]) -> list[dict[str, Any]]:
    case = Case("alike")
    return [train(rank, world_size, case, equal=True, steps=EXACT_STEPS, deterministic=True, **odc)]


def test_memory_is_in_the_plan() -> None:
    blocks = [memory.GroupShapes(f"layers.{n}", ((1000, 256),), 4) for n in range(3)]
    plans = [
        memory.plan_memory(blocks, 8, 2, memory.Training(deterministic=deterministic))
        for deterministic in (False, True)
    ]
    assert plans[1].accumulator == 4 * plans[0].accumulator  # four ranks a node
    assert plans[1].window == plans[0].window
