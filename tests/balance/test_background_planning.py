"""The loader plans ahead in a thread, with measurements that all ranks have by then, also after a resume."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import numpy as np
import pytest

from odcengine.balance import CostModel, OnlineCost, make_plan
from odcengine.data import Minibatch, MinibatchLoader
from odcengine.data import loader as loader_module

WORLD_SIZE = 3
SPEEDS = [1.0, 0.5, 1.0]


class Lengths:
    """A data set whose samples are their lengths."""

    def __init__(self) -> None:
        self.lengths = np.random.default_rng(0).integers(1, 100, 240)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> int:
        return int(self.lengths[index])


def make_loader(rank: int = 0, *, learn: bool = True, hosts: tuple[str, ...] = ()) -> MinibatchLoader:
    cost = CostModel(1.0, 0.001)
    return MinibatchLoader(
        Lengths(),
        train_batch_size=12,
        rank=rank,
        world_size=WORLD_SIZE,
        strategy="lb_mini",
        max_tokens=200,
        seed=5,
        cost=OnlineCost(cost, num_ranks=WORLD_SIZE, hosts=hosts, min_steps=3) if learn else cost,
    )


def busy_of(minibatch: Minibatch) -> list[float]:
    """Seconds of ranks of which the second is slow; a little different in each minibatch."""
    return [
        load / speed * (1 + 0.001 * (minibatch.index % 5))
        for load, speed in zip(minibatch.plan.loads, SPEEDS, strict=True)
    ]


def step(loader: MinibatchLoader, minibatch: Minibatch) -> None:
    loader.measured(busy_of(minibatch), minibatch.num_samples_global)


def run(loader: MinibatchLoader, num_steps: int) -> list[str]:
    plans: list[str] = []
    while len(plans) < num_steps:
        for minibatch in loader:
            plans.append(minibatch.plan.to_json())
            step(loader, minibatch)
            if len(plans) == num_steps:
                break
    return plans


def test_the_next_minibatch_is_planned_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return make_plan(*args, **kwargs)

    monkeypatch.setattr(loader_module, "make_plan", watched)
    loader = make_loader(learn=False)
    assert len(list(loader)) == 20
    loader._ahead._planner.shutdown()
    # The first one here, then 19 and the first of the next epoch there.
    assert threads == [True] + [False] * 20


def test_planning_ahead_changes_nothing() -> None:
    loader = make_loader(learn=False)
    ahead = [
        (minibatch.epoch, minibatch.index, minibatch.sample_ids, minibatch.plan)
        for _ in range(2)
        for minibatch in loader
    ]
    for epoch, index, sample_ids, plan in ahead:
        alone = make_loader(learn=False).minibatch(index, epoch)
        assert (alone.sample_ids, alone.plan) == (sample_ids, plan)


def test_what_was_planned_for_another_position_is_dropped() -> None:
    loader = make_loader(learn=False)
    next(iter(loader))
    loader.set_epoch(3)
    minibatch = next(iter(loader))
    assert (minibatch.epoch, minibatch.index) == (3, 0)
    assert minibatch.sample_ids == make_loader(learn=False).minibatch(0, 3).sample_ids


def test_a_mistake_while_planning_ahead_is_raised_by_the_loop() -> None:
    class Broken(CostModel):
        def __call__(self, lengths: Any) -> Any:
            costs = super().__call__(lengths)
            return costs if threading.current_thread() is threading.main_thread() else costs * np.nan

    loader = make_loader(learn=False)
    loader.cost = Broken(1.0, 0.0)
    minibatches = iter(loader)
    next(minibatches)
    with pytest.raises(ValueError, match="the cost model gave costs from nan"):
        next(minibatches)


def test_all_ranks_learn_the_same_and_spare_the_slow_one() -> None:
    plans = [run(make_loader(rank), 30) for rank in range(WORLD_SIZE)]
    assert plans[0] == plans[1] == plans[2]
    assert plans[0] != run(make_loader(learn=False), 30)
    speeds = json.loads(plans[0][-1])["speeds"]
    assert speeds[1] / speeds[0] == pytest.approx(0.5, rel=0.02)


def test_measurements_count_from_the_second_minibatch_after_them() -> None:
    """Three steps are enough here: of minibatches 0, 1 and 2. The first plan that may know them is 4's."""
    plans = [json.loads(plan) for plan in run(make_loader(), 6)]
    assert [bool(plan["speeds"]) for plan in plans] == [False] * 4 + [True] * 2


@pytest.mark.parametrize("stop_after", [3, 4, 20, 33, 50])
def test_a_resumed_run_has_the_plans_of_one_that_was_not_interrupted(stop_after: int) -> None:
    whole = run(make_loader(), 60)
    first = make_loader()
    assert run(first, stop_after) == whole[:stop_after]
    state = json.loads(json.dumps(first.state_dict()))
    resumed = make_loader(rank=2)
    resumed.load_state_dict(state)
    assert run(resumed, 60 - stop_after) == whole[stop_after:]


def test_positions_without_costs_are_still_read() -> None:
    state = make_loader(learn=False).state_dict()
    assert "cost" not in state
    make_loader().load_state_dict(state)
    make_loader(learn=False).load_state_dict(make_loader().state_dict())


def test_steps_over_something_else_teach_nothing() -> None:
    loader = make_loader()
    for count, minibatch in enumerate(loader):
        if count == 10:
            break
        num_samples = [None, 5, 24][count % 3]
        loader.measured(busy_of(minibatch), num_samples)
        loader.measured(busy_of(minibatch), 12)  # of a minibatch that has ended
    assert isinstance(loader.cost, OnlineCost)
    assert loader.cost.state_dict()["steps"] == []


def test_rank_0_reports_a_slow_rank(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="odcengine"):
        run(make_loader(rank=1, hosts=("n0", "n1", "n2")), 20)
        assert caplog.messages == []
        run(make_loader(rank=0, hosts=("n0", "n1", "n2")), 20)
    (message,) = caplog.messages
    assert "rank 1 on n1 at 50%" in message
