"""Why the protocol is as it is: both fences are needed, and nothing collective happens between them."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import run_ranks, values
from torch.profiler import ProfilerActivity, profile

import odcengine
from engine.toy import Case, compare, config_for, loss_of, make_model, micro_batches, reference, train
from odcengine.control import Meeting
from odcengine.transport.shm import ShmTransport

CASE = Case("fences")
WORLD_SIZE, STEPS = 3, 12


def _train_without(rank: int, world_size: int, fence: str) -> dict[str, Any]:
    """The usual run under delays that differ between ranks and steps, with one fence left out."""
    barrier, signal = ShmTransport.barrier, ShmTransport.signal_published

    def no_barrier(self: ShmTransport, meeting: Meeting, number: int = 0) -> float:
        return 0.0 if meeting is Meeting.END_OF_STEP else barrier(self, meeting, number)

    def slow_writer(group: Any, row: torch.Tensor, entries: Any) -> None:
        time.sleep(0.01 * (rank == world_size - 1))
        write_shard(group, row, entries)

    from odcengine.sharding import on_demand
    from odcengine.sharding.layout import write_shard

    patches = {
        "none": mock.patch.object(ShmTransport, "signal_published", signal),
        "A": mock.patch.object(ShmTransport, "barrier", no_barrier),
        "B": mock.patch.object(ShmTransport, "wait_published", return_value=0.0),
    }
    with patches[fence], mock.patch.object(on_demand, "write_shard", slow_writer):
        return train(
            rank,
            world_size,
            CASE,
            steps=STEPS,
            delay=lambda step, number: time.sleep(0.01 * ((rank + step + number) % world_size)),
        )


@pytest.mark.parametrize(("fence", "right"), [("none", True), ("A", False), ("B", False)])
def test_both_fences_are_needed(fence: str, right: bool) -> None:
    ranks = values(run_ranks(_train_without, WORLD_SIZE, fence))
    expected = reference(CASE, WORLD_SIZE, steps=STEPS)
    # Without A the squared norm misses late pushes, which clipping turns into wrong gradients.
    errors = compare(CASE, ranks, expected)
    worst = max(errors["gradient"], errors["weights"])
    assert (worst < 1e-10) if right else (worst > 1e-6), errors


def _count_collectives(rank: int, world_size: int, transport: str) -> tuple[int, int]:
    """Collectives that torch's profiler sees inside the minibatches, and at their ends."""
    # Collectives cannot even run a model whose ranks use different modules.
    case = Case("counted", {"experts": transport == "shm", "checkpointing": True})
    engine, *_ = odcengine.initialize(model=make_model(case), config=config_for(case, transport=transport))

    def seen(events: Any) -> int:
        return sum("c10d::" in event.name for event in events)

    inside = at_end = 0
    for step in range(3):
        share = micro_batches(case.name, step, world_size, equal=transport == "collective")[rank]
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for micro_batch in share:
                loss, count = loss_of(engine, micro_batch)
                engine.backward(loss, count=count)
        inside += seen(profiled.events())
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            engine.step()
        at_end += seen(profiled.events())
    engine.close()
    return inside, at_end


def test_no_collective_inside_a_minibatch() -> None:
    counts = values(run_ranks(_count_collectives, 3, "shm"))
    assert [inside for inside, _ in counts] == [0, 0, 0]
    assert [at_end for _, at_end in counts] == [3, 3, 3]  # the agreement, once a step


def test_the_count_sees_the_baseline_collectives() -> None:
    counts = values(run_ranks(_count_collectives, 2, "collective"))
    # 3 steps x 2 micro-batches x (4 groups gathered in forward, 3 again in backward, 4 reduced)
    assert all(inside >= 3 * 2 * 8 for inside, _ in counts)


@pytest.mark.parametrize("odc", [{"transport": "collective"}, {"lockstep": True}])
def test_the_baselines_are_exact_too(odc: dict[str, Any]) -> None:
    case = Case("baseline", {"checkpointing": True, "lora": True})
    ranks = values(run_ranks(_train_baseline, 3, case, odc))
    errors = compare(case, ranks, reference(case, 3, equal=True, steps=STEPS))
    assert max(errors.values()) < 1e-10


def _train_baseline(rank: int, world_size: int, case: Case, odc: dict[str, Any]) -> dict[str, Any]:
    return train(rank, world_size, case, equal=True, steps=STEPS, **odc)
