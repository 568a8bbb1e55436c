"""The simulator: what must hold for any minibatch, and that it is fast."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odcengine.balance import EQUAL_COUNT_STRATEGIES, STRATEGIES, CostModel, Plan, make_plan
from odcengine.simulate import Machine, Outcome, simulate

MAX_TOKENS = 1000
LENGTHS = st.lists(st.integers(1, MAX_TOKENS), max_size=40)
MACHINES = st.builds(
    Machine,
    cost=st.builds(
        CostModel,
        linear=st.floats(1e-5, 1e-3),
        quadratic=st.floats(0, 1e-6),
        per_micro_batch=st.sampled_from([0.0, 0.01]),
    ),
    boundary_s=st.sampled_from([0.0, 0.2]),
    traffic_s=st.sampled_from([0.0, 0.05]),
    speeds=st.sampled_from([(), (0.5,), (1.0, 2.0)]),
)
COST = CostModel(linear=1e-4, quadratic=1e-8)


def plan_for(lengths: list[int], machine: Machine, strategy: str, num_ranks: int) -> Plan:
    return make_plan(
        lengths,
        num_ranks=num_ranks,
        strategy=strategy,
        max_tokens=MAX_TOKENS,
        cost=machine.cost,
        speeds=machine.speeds_of(num_ranks).tolist(),
    )


def hand_made(*ranks: list[list[int]]) -> Plan:
    """A plan of micro-batches given by the lengths of their sequences."""
    lengths = [length for rank in ranks for group in rank for length in group]
    numbers = iter(range(len(lengths)))
    return Plan(
        strategy="lb_micro",
        num_ranks=len(ranks),
        micro_batches=tuple(tuple(tuple(next(numbers) for _ in group) for group in rank) for rank in ranks),
        costs=tuple(tuple(0.0 for _ in rank) for rank in ranks),
        bound=0.0,
        lengths=tuple(lengths),
    )


def check_events(outcome: Outcome) -> None:
    """Micro-batches of a rank follow one another, and no rank works longer than the minibatch."""
    assert (outcome.ends >= outcome.starts).all()
    assert (outcome.starts[:, 1:] >= outcome.ends[:, :-1] - 1e-9).all()
    assert (outcome.busy_s <= outcome.met_s + 1e-9).all()
    assert outcome.ends.max(initial=0.0) <= outcome.met_s + 1e-9
    assert ((outcome.idle_shares >= 0) & (outcome.idle_shares <= 1)).all()


@given(LENGTHS, MACHINES, st.sampled_from(STRATEGIES), st.integers(1, 7))
@settings(max_examples=150, deadline=None)
def test_bounds_and_order(lengths: list[int], machine: Machine, strategy: str, num_ranks: int) -> None:
    plan = plan_for(lengths, machine, strategy, num_ranks)
    on_demand = simulate(plan, machine, communication="on_demand")
    check_events(on_demand)
    assert on_demand.met_s >= plan.bound * (1 - 1e-9)
    assert on_demand.step_s == on_demand.met_s + machine.boundary_s
    if strategy in EQUAL_COUNT_STRATEGIES:
        collective = simulate(plan, machine, communication="collective")
        check_events(collective)
        assert collective.met_s >= on_demand.met_s * (1 - 1e-9)
    drawn = simulate(plan, machine, communication="drawn")
    check_events(drawn)
    assert drawn.met_s >= plan.bound * (1 - 1e-9)


@given(LENGTHS, MACHINES, st.sampled_from(STRATEGIES), st.permutations(range(5)))
@settings(max_examples=100, deadline=None)
def test_the_numbering_of_ranks_does_not_matter(
    lengths: list[int], machine: Machine, strategy: str, order: list[int]
) -> None:
    plan = plan_for(lengths, machine, strategy, 5)
    speeds = machine.speeds_of(5)
    moved = dataclasses.replace(
        plan,
        micro_batches=tuple(plan.micro_batches[rank] for rank in order),
        costs=tuple(plan.costs[rank] for rank in order),
        speeds=tuple(plan.speeds[rank] for rank in order) if plan.speeds else (),
    )
    other = dataclasses.replace(machine, speeds=tuple(speeds[order].tolist()))
    for communication in ("collective", "on_demand") if plan.equal_counts else ("on_demand",):
        first = simulate(plan, machine, communication=communication)
        second = simulate(moved, other, communication=communication)
        assert second.step_s == pytest.approx(first.step_s)
        np.testing.assert_allclose(second.idle_shares, first.idle_shares[order], atol=1e-12)
    first = simulate(plan, machine, communication="drawn")
    second = simulate(moved, other, communication="drawn")
    assert second.step_s == pytest.approx(first.step_s)
    np.testing.assert_allclose(np.sort(second.idle_shares), np.sort(first.idle_shares), atol=1e-12)


@given(st.integers(1, MAX_TOKENS), st.integers(1, 6), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_equal_lengths_leave_no_idle_time(length: int, num_ranks: int, share: int) -> None:
    machine = Machine(COST, boundary_s=0.1)
    lengths = [length] * (num_ranks * share)
    for strategy in (*EQUAL_COUNT_STRATEGIES, "lb_mini"):
        plan = plan_for(lengths, machine, strategy, num_ranks)
        for communication in ("collective", "on_demand", "drawn"):
            if communication == "collective" and strategy not in EQUAL_COUNT_STRATEGIES:
                continue
            outcome = simulate(plan, machine, communication=communication)
            assert outcome.idle_share == pytest.approx(0.0, abs=1e-9)


@given(LENGTHS, st.sampled_from(STRATEGIES), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_as_the_plan_predicts(lengths: list[int], strategy: str, num_ranks: int) -> None:
    machine = Machine(CostModel(linear=1e-4, quadratic=1e-8))  # without a cost of empty micro-batches
    plan = plan_for(lengths, machine, strategy, num_ranks)
    communication = "collective" if strategy in EQUAL_COUNT_STRATEGIES else "on_demand"
    outcome = simulate(plan, machine, communication=communication)  # type: ignore[arg-type]
    assert outcome.met_s == pytest.approx(plan.predicted_cost)
    assert outcome.idle_share == pytest.approx(plan.idle_share, abs=1e-9)


def test_two_ranks_by_hand() -> None:
    machine = Machine(CostModel(linear=1.0, quadratic=0.0, per_micro_batch=0.5), boundary_s=0.25)
    plan = hand_made([[4], [1]], [[2, 1], [3]])
    collective = simulate(plan, machine, communication="collective")
    np.testing.assert_allclose(collective.starts, [[0, 4.5], [0, 4.5]])
    np.testing.assert_allclose(collective.ends, [[4.5, 6.0], [3.5, 8.0]])
    assert collective.step_s == 8.25
    np.testing.assert_allclose(collective.idle_shares, [2 / 8, 1 / 8])
    on_demand = simulate(plan, machine, communication="on_demand")
    np.testing.assert_allclose(on_demand.ends, [[4.5, 6.0], [3.5, 7.0]])
    assert on_demand.step_s == 7.25
    np.testing.assert_allclose(on_demand.idle_shares, [1 / 7, 0])


def test_empty_micro_batches_cost_collectives_only() -> None:
    machine = Machine(CostModel(linear=1.0, quadratic=0.0, per_micro_batch=0.5))
    plan = hand_made([[4], [2]], [[4], []])
    collective = simulate(plan, machine, communication="collective")
    assert collective.counts.tolist() == [2, 2]
    np.testing.assert_allclose(collective.busy, [[4.5, 2.5], [4.5, 0.5]])
    on_demand = simulate(plan, machine, communication="on_demand")
    assert on_demand.counts.tolist() == [2, 1]
    np.testing.assert_allclose(on_demand.busy_s, [7.0, 4.5])


def test_traffic_and_speed() -> None:
    machine = Machine(CostModel(linear=1.0, quadratic=0.0), traffic_s=3.0, speeds=(0.5,))
    outcome = simulate(hand_made([[1], [4]], [[1], [4]]), machine, communication="on_demand")
    np.testing.assert_allclose(outcome.busy, [[3, 8], [3, 4]])


def test_noise_and_jitter_are_seeded_and_have_mean_one() -> None:
    plan = hand_made(*[[[10]] * 50 for _ in range(40)])
    noisy = Machine(COST, noise=0.1)
    first, again, other = (simulate(plan, noisy, communication="on_demand", seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.busy, again.busy)
    assert (first.busy != other.busy).any()
    ratios = first.busy / simulate(plan, Machine(COST), communication="on_demand").busy
    assert ratios.mean() == pytest.approx(1.0, abs=0.01)
    assert ratios.std() == pytest.approx(0.1, rel=0.1)
    calm = simulate(plan, Machine(COST, meetings=20), communication="collective")
    shaken = simulate(plan, Machine(COST, meetings=20, jitter=0.1), communication="collective")
    check_events(shaken)
    assert calm.idle_share == pytest.approx(0.0, abs=1e-9)
    assert shaken.busy_s.mean() == pytest.approx(calm.busy_s.mean(), rel=0.01)
    assert 1.15 < shaken.met_s / calm.met_s < 1.35  # the mean of the largest of 40 is 2.16 deviations up


def test_a_plan_of_unequal_counts_cannot_be_collective() -> None:
    with pytest.raises(ValueError, match="hang"):
        simulate(hand_made([[1], [1]], [[2]]), Machine(COST), communication="collective")


@pytest.mark.parametrize(
    "wrong", [{"boundary_s": -1.0}, {"noise": float("nan")}, {"meetings": 0}, {"speeds": (1.0, 0.0)}]
)
def test_a_machine_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).rstrip("s")):
        Machine(COST, **wrong)  # type: ignore[arg-type]


def test_drawing_by_hand() -> None:
    machine = Machine(CostModel(linear=1.0, quadratic=0.0, per_micro_batch=0.5), speeds=(1.0, 2.0))
    plan = hand_made([[5], [1, 1]], [[3], [2]])
    plan = dataclasses.replace(plan, costs=((5.5, 2.5), (3.5, 2.5)))
    drawn = simulate(plan, machine, communication="drawn")
    # Each begins with its own: 5.5, and 3.5 at twice the speed. The fast one takes both others, of 2.5 each.
    np.testing.assert_allclose(drawn.starts, [[0, 5.5, 5.5], [0, 1.75, 3.0]])
    np.testing.assert_allclose(drawn.busy, [[5.5, 0, 0], [1.75, 1.25, 1.25]])
    assert drawn.counts.tolist() == [1, 3]
    assert drawn.met_s == 5.5


def test_drawing_heals_a_slow_rank_that_no_plan_knows() -> None:
    dice = np.random.Generator(np.random.PCG64(0))
    lengths = dice.integers(100, MAX_TOKENS, 160).tolist()
    machine = Machine(COST, speeds=(0.5,))
    plan = make_plan(lengths, num_ranks=8, strategy="lb_mini", max_tokens=MAX_TOKENS, cost=COST)
    planned = simulate(plan, machine, communication="on_demand")
    plan = make_plan(lengths, num_ranks=8, strategy="dynamic", max_tokens=MAX_TOKENS, cost=COST)
    drawn = simulate(plan, machine, communication="drawn")
    assert planned.idle_share > 0.3
    assert drawn.met_s < 0.65 * planned.met_s


def test_a_thousand_ranks_take_no_time() -> None:
    dice = np.random.Generator(np.random.PCG64(0))
    lengths = np.clip(dice.lognormal(6, 1, 16 * 1024), 1, 8192).astype(int).tolist()
    plan = make_plan(lengths, num_ranks=1024, strategy="local_sort", max_tokens=8192, cost=COST)
    machine = Machine(COST, noise=0.05, traffic_s=0.01)
    seconds = []
    for _ in range(3):  # processor time of this thread, and the best: others share its caches
        begun = time.thread_time()
        simulate(plan, machine, communication="collective")
        simulate(plan, machine, communication="on_demand")
        simulate(plan, machine, communication="drawn")
        seconds.append(time.thread_time() - begun)
    assert min(seconds) < 1.0, seconds


def test_an_empty_minibatch() -> None:
    plan = make_plan([], num_ranks=3, strategy="lb_mini", max_tokens=None, cost=COST)
    machine = Machine(COST, boundary_s=0.5, noise=0.1)
    assert simulate(plan, machine, communication="on_demand").step_s == 0.5
    assert simulate(plan, machine, communication="drawn").idle_share == 0.0
