"""Parts of a checkpoint: without frozen weights, other optimizers, going back within a run, long runs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, values
from torch.distributed.tensor import DTensor

import odcengine
from checkpoint.toy import HYBRID, config_for, loss_sum, make_data, make_model, start, steps, whole
from odcengine.checkpoint.tensors import Slabs
from odcengine.errors import CheckpointError


def _without_frozen(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    engine, loader = start(config_for(folder, save_frozen=False))
    steps(engine, loader, 2)
    engine.save_checkpoint()
    right = whole(engine)
    steps(engine, loader, 2)
    engine.load_checkpoint()
    found = whole(engine)
    engine.close()
    return {"same": all(torch.equal(found[name], right[name]) for name in right)}


def _other_frozen(rank: int, world_size: int, folder: str) -> str:
    model = make_model()
    with torch.no_grad():
        model.blocks[1].up.weight[3, 2] += 1e-9
    try:
        odcengine.initialize(
            model=model, config=config_for(folder), training_data=make_data(), loss_fn=loss_sum
        )
        return "loaded"
    except CheckpointError as error:
        return str(error)


def test_frozen_weights_may_stay_away_if_they_are_the_same(tmp_path: Path) -> None:
    assert all(run["same"] for run in values(run_ranks(_without_frozen, 2, str(tmp_path))))
    names = (tmp_path / "step_2" / "rank_0.json").read_text()
    assert "blocks.1.down.weight" in names
    assert "blocks.1.up.weight" not in names
    assert values(run_ranks(_without_frozen, 3, str(tmp_path)))[0]["same"]
    told = values(run_ranks(_other_frozen, 2, str(tmp_path)))
    assert all("those of this model are others: blocks.1.up.weight" in error for error in told)


# ---- optimizers of others ------------------------------------------------------------------------------


class Own(torch.optim.Optimizer):
    """Keeps plain tensors of its own shard, a sharded one, a scalar and a number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, local = self.state[parameter], parameter.to_local()
                if not state:
                    state["mine"] = torch.zeros(local.numel() + 1, dtype=torch.float32)
                    state["sharded"] = torch.zeros_like(parameter)
                    state["count"], state["label"] = 0, "x"
                state["count"] += 1
                state["mine"] += 1
                state["sharded"] += parameter.grad
                parameter -= group["lr"] * parameter.grad


def _own(rank: int, world_size: int, folder: str, save: bool) -> str:
    config = {**config_for(None), "scheduler": None}
    del config["optimizer"]
    engine, optimizer, loader, _ = odcengine.initialize(
        model=make_model(), config=config, training_data=make_data(), loss_fn=loss_sum, optimizer=Own
    )
    if save:
        steps(engine, loader, 3)
        engine.save_checkpoint(folder)
        engine.close()
        return "saved"
    try:
        engine.load_checkpoint(folder)
    except CheckpointError as error:
        engine.load_checkpoint(folder, load_optimizer_states=False)  # that can be had
        engine.close()
        return str(error)
    state = next(iter(optimizer.state.values()))
    assert state["count"] == 3
    assert state["label"] == "x"
    assert isinstance(state["sharded"], DTensor)
    assert torch.equal(state["mine"], torch.full_like(state["mine"], 3.0))
    assert state["mine"].dtype == torch.float32
    steps(engine, loader, 1)
    engine.close()
    return "loaded"


def test_state_of_each_rank_s_own_needs_as_many_ranks(tmp_path: Path) -> None:
    assert values(run_ranks(_own, 2, str(tmp_path), True)) == ["saved"] * 2
    assert values(run_ranks(_own, 2, str(tmp_path), False)) == ["loaded"] * 2
    told = values(run_ranks(_own, 3, str(tmp_path), False))
    assert all("of each rank's own, which only 2 ranks can load, not 3" in error for error in told)


# ---- within a run --------------------------------------------------------------------------------------


def _go_back(rank: int, world_size: int, folder: str, odc: dict[str, Any]) -> dict[str, Any]:
    config = config_for(folder, odc=odc)
    config["balance"]["strategy"] = "dynamic"
    engine, loader = start(config)
    steps(engine, loader, 3)
    engine.save_checkpoint()
    first = steps(engine, loader, 9)  # over the end of the epoch
    engine.load_checkpoint()
    second = steps(engine, loader, 9)
    engine.close()
    return {"first": first, "second": second}


@pytest.mark.parametrize("odc", [{}, HYBRID], ids=["full", "hybrid"])
def test_going_back_within_a_run(odc: dict[str, Any], tmp_path: Path) -> None:
    """Ranks draw their work here: numbers of minibatches go on while those of steps go back."""
    for run in values(run_ranks(_go_back, 4 if odc else 2, str(tmp_path), odc, timeout_s=200)):
        assert run["second"]["samples"] == run["first"]["samples"]
        assert run["second"]["losses"] == pytest.approx(run["first"]["losses"], rel=1e-9)


def _different_calls(rank: int, world_size: int, folder: str) -> None:
    engine, loader = start(config_for(folder))
    steps(engine, loader, 1)
    if rank == 0:
        engine.save_checkpoint()
    else:
        steps(engine, loader, 1)


def test_ranks_at_different_calls_are_named(tmp_path: Path) -> None:
    told = " ".join(result.error or "" for result in run_ranks(_different_calls, 2, str(tmp_path)))
    assert re.search(r"rank 0 \(.*?\) is at a save between steps, before step 1", told)
    assert re.search(r"rank 1 \(.*?\) is at the end of step 1", told)


def test_memory_for_copies_is_used_again() -> None:
    slabs = Slabs(pinned=False, slab_nbytes=4096)
    sources = [
        torch.arange(count, dtype=dtype)
        for count, dtype in (
            (900, torch.float32),
            (3, torch.float64),
            (100, torch.int16),
            (3000, torch.int64),
        )
    ]
    sources += [torch.tensor(1.5), torch.ones(40, 10, dtype=torch.bfloat16)]
    places = []
    for _ in range(3):
        slabs.restart()
        copies = [slabs.take(source) for source in sources]
        for copy, source in zip(copies, sources, strict=True):
            copy.copy_(source)
        assert all(torch.equal(copy, source) for copy, source in zip(copies, sources, strict=True))
        places.append([copy.data_ptr() for copy in copies])
    assert places[0] == places[1] == places[2]
    assert len(set(places[0])) == len(sources)


# ---- for long ------------------------------------------------------------------------------------------


def _long(rank: int, world_size: int, folder: str, count: int, every: int) -> list[tuple[int, int]]:
    def now() -> tuple[int, int]:
        fields = Path("/proc/self/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))

    engine, loader = start(config_for(folder, every_n_steps=every, keep_last=2))
    found = []
    for _ in range(count // every):
        steps(engine, loader, every)
        engine.wait_for_checkpoint()  # its files are closed
        found.append(now())
    engine.close()
    return found


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_memory_is_flat_over_ten_thousand_minibatches(tmp_path: Path) -> None:
    for run in values(run_ranks(_long, 2, str(tmp_path), 10_000, 500, timeout_s=1400)):
        (early, fds), (late, fds_at_end) = run[3], run[-1]
        assert late - early < 8 << 20, [memory >> 20 for memory, _ in run]
        assert fds_at_end == fds
