"""Ranks that draw work: bundles, the shared counter, exactly once, the same training as with plans."""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import odcengine
from odcengine.balance import CostModel, Plan
from odcengine.balance.dynamic import deal_out
from odcengine.balance.plan import make_plan
from odcengine.data import Minibatch, MinibatchLoader
from odcengine.data.minibatch import warn_of_unused
from odcengine.simulate import Machine, simulate

LATER = 1.02 + 1e-5  # than lb_mini: what dynamic may spend on finer bundles, and rounding to whole numbers
LENGTHS = st.lists(st.integers(1, 100), max_size=60)


def all_of(plan: Plan) -> list[tuple[int, ...]]:
    """The bundles of a plan: of each rank the one with which it begins, and those that are drawn."""
    return [*(bundle for rank in range(plan.num_ranks) if (bundle := plan.begins_with(rank))), *plan.drawn]


# -- bundles -------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    LENGTHS,
    st.integers(1, 9),
    st.integers(100, 300),
    st.one_of(st.none(), st.integers(1, 5)),
    st.sampled_from([0.0, 0.3, 5.0, 200.0]),
)
def test_bundles_hold_every_sample_once_and_end_as_planned(
    lengths: list[int], ranks: int, max_tokens: int, max_samples: int | None, per_micro_batch: float
) -> None:
    cost = CostModel(linear=1.0, quadratic=0.01, per_micro_batch=per_micro_batch)
    plans = {
        strategy: make_plan(
            lengths,
            num_ranks=ranks,
            strategy=strategy,
            max_tokens=max_tokens,
            max_samples=max_samples,
            cost=cost,
        )
        for strategy in ("lb_mini", "dynamic")
    }
    bundles = all_of(plans["dynamic"])
    assert sorted(sample for bundle in bundles for sample in bundle) == list(range(len(lengths)))
    for bundle in bundles:
        assert sum(lengths[sample] for sample in bundle) <= max_tokens
        assert max_samples is None or len(bundle) <= max_samples
    drawn = simulate(plans["dynamic"], Machine(cost), communication="drawn").met_s
    assert drawn == pytest.approx(plans["dynamic"].on_demand_cost, rel=1e-6)
    assert drawn <= plans["lb_mini"].on_demand_cost * LATER


@pytest.mark.parametrize("per_micro_batch", [0.0, 0.02, 0.12])
@pytest.mark.parametrize(("ranks", "each", "max_tokens"), [(2, 4, 17_000), (2, 8, 34_000), (8, 4, 34_000)])
def test_drawing_is_as_good_as_a_plan_where_costs_are_right(
    ranks: int, each: int, max_tokens: int, per_micro_batch: float
) -> None:
    """The costs are seconds of a 1.5B model; 0.12 is a machine whose host is slow."""
    generator = random.Random(0)
    cost = CostModel(linear=2e-5, quadratic=1.2e-9, per_micro_batch=per_micro_batch)
    for _ in range(10):
        lengths = [int(min(16_500, generator.lognormvariate(8.8, 0.6))) + 1 for _ in range(ranks * each)]
        drawn, planned = (
            make_plan(lengths, num_ranks=ranks, strategy=strategy, max_tokens=max_tokens, cost=cost)
            for strategy in ("dynamic", "lb_mini")
        )
        assert drawn.on_demand_cost <= planned.on_demand_cost * LATER
        if per_micro_batch == 0:  # finer, which evens out noise
            assert len(all_of(drawn)) >= 1.2 * len(all_of(planned))


def test_nothing_is_cut_where_a_micro_batch_costs_too_much() -> None:
    lengths, cost = [8000] * 8, CostModel(linear=2e-5, quadratic=0.0, per_micro_batch=0.12)
    drawn = make_plan(lengths, num_ranks=2, strategy="dynamic", max_tokens=16_000, cost=cost)
    assert drawn.on_demand_cost == pytest.approx(2 * (16_000 * 2e-5 + 0.12))
    free = dataclasses.replace(cost, per_micro_batch=0.0)
    drawn = make_plan(lengths, num_ranks=2, strategy="dynamic", max_tokens=16_000, cost=free)
    assert [len(bundle) for bundle in all_of(drawn)] == [2, 2, 1, 1, 1, 1]


def test_nothing_is_cut_on_the_strength_of_a_cost_that_is_not_known() -> None:
    """Seen on two GPUs before costs were learned: 8 micro-batches took 1.25 times as long as 4."""
    lengths, cost = [7271, 4908, 6495, 3578, 4562, 8221, 9415, 11_027], CostModel(1.2e10, 2.4e5)
    options: dict[str, Any] = {"num_ranks": 2, "max_tokens": 16_984}
    bundles = {
        fixed: all_of(
            make_plan(
                lengths, strategy="dynamic", cost=dataclasses.replace(cost, per_micro_batch=fixed), **options
            )
        )
        for fixed in (None, 0.0)
    }
    planned = make_plan(lengths, strategy="lb_mini", cost=cost, **options)
    assert len(bundles[None]) == sum(map(len, planned.micro_batches)) == 4
    assert len(bundles[0.0]) == 8


def test_a_cost_of_micro_batches_beyond_all_measure() -> None:
    cost = CostModel(1e-300, 0.0, per_micro_batch=1e30)
    plan = make_plan([5, 3, 4], num_ranks=2, strategy="dynamic", max_tokens=10, cost=cost)
    assert sorted(sample for bundle in all_of(plan) for sample in bundle) == [0, 1, 2]


def test_bundles_are_small_at_the_end_and_not_too_many() -> None:
    generator = random.Random(0)
    lengths = [int(min(65535, generator.lognormvariate(9.4, 0.8))) + 1 for _ in range(32 * 16)]
    plan = make_plan(lengths, num_ranks=32, strategy="dynamic", max_tokens=65536)
    total = sum(plan.loads)
    costs = [sum(CostModel.default()([lengths[s] for s in bundle])) for bundle in all_of(plan)]
    assert costs[-1] < total / 32 / 10
    assert 32 * 4 <= len(costs) <= 32 * 40
    assert plan.on_demand_cost <= plan.bound * 1.03


def test_drawing_evens_out_what_no_plan_knew() -> None:
    """Costs 15% off, and one rank 20% slower than known: at most 1.04 of the bound, on average."""
    generator = random.Random(1)
    ratios = []
    for _ in range(20):
        lengths = [int(min(65535, generator.lognormvariate(9.4, 0.8))) + 1 for _ in range(32 * 16)]
        plan = make_plan(lengths, num_ranks=32, strategy="dynamic", max_tokens=65536)
        cost_of = [sum(CostModel.default()([lengths[s] for s in bundle])) for bundle in all_of(plan)]
        real = [cost * generator.uniform(0.85, 1.15) for cost in cost_of]
        speeds = [0.8] + [1.0] * 31
        free_at = [cost / speed for cost, speed in zip(real, speeds, strict=False)]  # its own first
        for cost in real[32:]:  # in the order of drawing, by whoever is free
            rank = free_at.index(min(free_at))
            free_at[rank] += cost / speeds[rank]
        ratios.append(max(free_at) / (sum(real) / sum(speeds)))
    assert sum(ratios) / len(ratios) <= 1.04, ratios


def test_slower_ranks_are_expected_to_draw_less() -> None:
    drawn = deal_out([10, 10], [10] * 28, [1024, 2048])
    assert sorted(drawn[0] + drawn[1]) == list(range(28))
    assert len(drawn[0]) == 19


@pytest.mark.parametrize("each", [2, 4, 16])
@pytest.mark.parametrize("slow", [0, 5, 63])
def test_a_rank_that_is_known_to_be_slow_ends_as_planned(each: int, slow: int) -> None:
    """One of 64 ranks at half speed: it begins with a bundle that was cut for it."""
    generator = random.Random(each)
    cost = CostModel(linear=2e-5, quadratic=1.2e-9, per_micro_batch=0.02)
    speeds = tuple(0.5 if rank == slow else 1.0 for rank in range(64))
    for _ in range(3):
        lengths = [int(min(65535, generator.lognormvariate(9.4, 0.8))) + 1 for _ in range(64 * each)]
        drawn, planned = (
            make_plan(lengths, num_ranks=64, strategy=strategy, max_tokens=65536, cost=cost, speeds=speeds)
            for strategy in ("dynamic", "lb_mini")
        )
        met_s = simulate(drawn, Machine(cost, speeds=speeds), communication="drawn").met_s
        assert met_s == pytest.approx(drawn.on_demand_cost, rel=1e-6)
        assert met_s <= planned.on_demand_cost * LATER


# -- drawing -------------------------------------------------------------------------------------------------


def test_one_rank_draws_everything_once() -> None:
    samples = [{"input_ids": list(range(1, n + 1))} for n in (3, 9, 4, 7, 2)]
    loader = MinibatchLoader(
        samples, train_batch_size=5, rank=0, world_size=1, strategy="dynamic", max_tokens=10
    )
    for _ in range(2):
        (minibatch,) = list(loader)
        with pytest.raises(TypeError, match="dynamic"):
            len(minibatch)
        seen = [index for batch in minibatch for index in batch.sample_ids]
        assert sorted(seen) == [0, 1, 2, 3, 4]
        assert list(minibatch) == []
        assert "drawn" in repr(minibatch)


def test_samples_that_were_drawn_and_left_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """The others draw what a rank has not come to, but nobody computes what it was at."""
    minibatch = Minibatch(
        plan=make_plan([5] * 4, num_ranks=2, strategy="dynamic", max_tokens=5),
        rank=1,
        sample_ids=(0, 1, 2, 3),
        index=0,
        epoch=0,
        num_targets_global=None,
        num_samples_without_targets=None,
        load=lambda minibatch: ((ids, ids) for ids in minibatch.drawn()),
        run_empty=False,
    )
    minibatch.draw_from(itertools.count().__next__)
    next(iter(minibatch))
    for num_samples in (4, None, 3):
        assert not caplog.messages
        warn_of_unused(minibatch, "the loader's minibatch", step=7, num_left=1, num_samples=num_samples)
    (line,) = caplog.messages
    assert "step 7: rank 1 left its loop over the loader's minibatch after 1 micro-batches" in line
    assert "1 of them are in no step" in line


def test_several_ranks_need_a_counter() -> None:
    with pytest.raises(odcengine.errors.UsageError, match="draw from one counter"):
        MinibatchLoader(
            [{"input_ids": [1, 2]}],
            train_batch_size=1,
            rank=0,
            world_size=2,
            strategy="dynamic",
            max_tokens=10,
        )


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.head = nn.Linear(8, 40)

    def forward(self, batch: Any) -> torch.Tensor:
        logits = self.head(self.embed(batch.input_ids)).double()
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum"
        )


def _train(rank: int, world_size: int, strategy: str, odc: dict[str, Any], folder: str) -> dict[str, Any]:
    """When they draw, rank 0 is slow: at its first micro-batch until the others have drawn all there is."""
    torch.manual_seed(0)
    generator = random.Random(3)
    samples = [
        {"input_ids": [generator.randrange(40) for _ in range(generator.randrange(1, 30))]} for _ in range(90)
    ]
    chance = random.Random(rank)
    engine, _, loader, _ = odcengine.initialize(
        model=Tiny().double(),
        training_data=samples,
        loss_fn=lambda model, batch: model(batch),
        config={
            "train_batch_size": 20,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "balance": {"strategy": strategy, "max_tokens_per_micro_batch": 40},
            "odc": {"timeout_s": 60, "startup_timeout_s": 90, **odc},
            "monitor": {"progress": "off"},
        },
    )
    assert loader is not None
    seen: list[list[int]] = []
    losses, numbers = [], []
    with engine:
        for _ in range(2):
            for minibatch in loader:
                seen.append([])
                numbers.append(0)
                done = [Path(folder, f"{strategy}-{len(seen)}-{other}") for other in range(world_size)]
                for batch in minibatch:
                    if strategy == "dynamic":
                        time.sleep(chance.random() * 0.002)
                        if rank == 0:
                            _await_files(done[1:])
                    seen[-1] += batch.sample_ids
                    numbers[-1] += 1
                    engine.backward(engine(batch))
                done[rank].touch()
                losses.append(engine.step().loss)
        weights = torch.cat([p.to_local().flatten() for p in engine.parameters()])  # type: ignore[attr-defined]
    return {"seen": seen, "losses": losses, "weights": weights.detach(), "numbers": numbers}


def _await_files(paths: list[Path]) -> None:
    deadline = time.monotonic() + 50
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("world_size", "odc"),
    [(3, {}), (4, {"sharding": "hybrid", "node_size": 2})],
    ids=["one_node", "two_nodes"],
)
def test_trains_as_with_a_plan_and_every_sample_once(
    world_size: int, odc: dict[str, Any], tmp_path: Path
) -> None:
    drawn = values(run_ranks(_train, world_size, "dynamic", odc, str(tmp_path), timeout_s=120))
    planned = values(run_ranks(_train, world_size, "lb_mini", odc, str(tmp_path), timeout_s=120))
    for step in range(len(drawn[0]["seen"])):
        everybody = sorted(index for result in drawn for index in result["seen"][step])
        assert everybody == sorted(index for result in planned for index in result["seen"][step])
        assert len(set(everybody)) == len(everybody)
    for a, b in zip(drawn, planned, strict=True):
        assert a["losses"] == pytest.approx(b["losses"], rel=1e-12)
        assert torch.allclose(a["weights"], b["weights"], rtol=0, atol=1e-12)
    steps = list(zip(*(result["numbers"] for result in drawn), strict=True))
    assert all(of_ranks[0] <= 1 for of_ranks in steps)
    # The slow one has drawn least: others took what it had no time for, where there was more than one each.
    plenty = [of_ranks for of_ranks in steps if sum(of_ranks) > world_size]
    assert len(plenty) >= len(steps) * 2 // 3
    assert all(sum(of_ranks) > world_size * of_ranks[0] for of_ranks in plenty), steps


def _count(rank: int, world_size: int) -> list[int]:
    torch.manual_seed(0)
    engine, _, _, _ = odcengine.initialize(
        model=Tiny(),
        config={
            "train_batch_size": "auto",
            "optimizer": {"type": "SGD"},
            "odc": {"timeout_s": 60, "startup_timeout_s": 90},
            "monitor": {"progress": "off"},
        },
    )
    control, numbers = engine._control, list[int]()

    def draw() -> None:
        for _ in range(200):
            numbers.append(control.draw(1))

    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.step()
    assert control.draw(2) < world_size
    with pytest.raises(odcengine.errors.UsageError, match="minibatch 1 of the loader is over"):
        control.draw(1)
    engine.close()
    return numbers


def test_counter_gives_each_number_once() -> None:
    """Three processes with two threads each, as fast as they can."""
    numbers = sorted(number for of_rank in values(run_ranks(_count, 3, timeout_s=120)) for number in of_rank)
    assert numbers == list(range(3 * 2 * 200))
