"""Costs and speeds learned from measured steps: they converge, outliers are harmless, all ranks agree."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odcengine.balance import CostModel, OnlineCost, Plan, make_plan

TRUTH = CostModel(linear=2e-5, quadratic=4e-10, per_micro_batch=0.02)  # seconds
WRONG = CostModel(linear=5e10, quadratic=4e6)  # FLOP, with far too much attention
MAX_TOKENS = 65536


class Cluster:
    """Simulated ranks that take as long as :data:`TRUTH` says, by their speed, with noise."""

    def __init__(self, speeds: list[float], *, noise: float = 0.02, samples_per_rank: int = 8) -> None:
        self.speeds = speeds
        self.noise = noise
        self.samples_per_rank = samples_per_rank
        self.dice = np.random.default_rng(len(speeds))

    def lengths(self) -> list[int]:
        drawn = self.dice.lognormal(np.log(12280), 0.8, len(self.speeds) * self.samples_per_rank)
        return [int(length) for length in np.clip(drawn, 512, MAX_TOKENS)]

    def seconds(self, plan: Plan) -> list[float]:
        """Without noise."""
        return [
            sum(float(TRUTH([plan.lengths[sample] for sample in group]).sum()) for group in groups) / speed
            + len(groups) * TRUTH.per_micro_batch / speed
            for groups, speed in zip(plan.micro_batches, self.speeds, strict=True)
        ]

    def measure(self, plan: Plan) -> list[float]:
        factors = np.exp(self.noise * self.dice.standard_normal(len(self.speeds)))
        return [time * factor for time, factor in zip(self.seconds(plan), factors.tolist(), strict=True)]

    def plan(self, online: OnlineCost) -> Plan:
        fit = online.fit()
        return make_plan(
            self.lengths(),
            num_ranks=len(self.speeds),
            strategy="lb_mini",
            max_tokens=MAX_TOKENS,
            cost=fit.cost,
            speeds=fit.speeds,
        )

    def run(self, online: OnlineCost, num_steps: int) -> None:
        for _ in range(num_steps):
            plan = self.plan(online)
            online.update(plan, self.measure(plan))


def check_costs(online: OnlineCost, rel: float) -> None:
    """Costs of whole samples: how they are split between the numbers matters less."""
    lengths = [1000, 5000, 12000, 30000, 65536]
    # The fit's unit of speed is the median rank's, which is 1 in these tests.
    np.testing.assert_allclose(online.cost_model(lengths), TRUTH(lengths), rtol=rel)


@pytest.mark.parametrize(
    ("speeds", "slow"),
    [([1.0] * 4, ()), ([1.0, 1.0, 0.8, 1.0], (2,)), ([1.0, 0.6], (1,)), ([1.0] * 15 + [0.5], (15,))],
)
def test_wrong_costs_and_a_slow_rank_are_learned(speeds: list[float], slow: tuple[int, ...]) -> None:
    cluster = Cluster(speeds)
    online = OnlineCost(WRONG, num_ranks=len(speeds))
    cluster.run(online, 40)
    check_costs(online, 0.08)
    fit = online.fit()
    assert fit.slow_ranks == slow
    assert fit.num_steps == 32
    assert fit.error < 0.03
    np.testing.assert_allclose(fit.speeds, speeds, rtol=0.03)
    # And so the next plans are near the best there are: all ranks are done at about the same time.
    spread = []
    for _ in range(5):
        times = cluster.seconds(cluster.plan(online))
        spread.append(max(times) / np.mean(times))
    assert np.mean(spread) < 1.04


def test_nothing_is_concluded_from_few_steps() -> None:
    cluster = Cluster([1.0, 0.5])
    online = OnlineCost(WRONG, num_ranks=2)
    cluster.run(online, 7)
    assert online.cost_model == WRONG
    assert online.speeds == (1.0, 1.0)
    assert online.report() is None
    cluster.run(online, 1)
    assert online.cost_model != WRONG
    assert online.fit().slow_ranks == (1,)


def test_steps_ten_times_too_slow_change_little() -> None:
    """A tenth of the measurements, and three whole steps at the start, take ten times as long."""
    cluster = Cluster([1.0, 1.0, 1.0, 0.75], noise=0.01)
    online = OnlineCost(WRONG, num_ranks=4)
    for step in range(30):
        plan = cluster.plan(online)
        factors = np.where(cluster.dice.random(4) < 0.1, 10.0, 1.0) if step >= 3 else np.full(4, 10.0)
        online.update(plan, (np.array(cluster.measure(plan)) * factors).tolist())
    check_costs(online, 0.1)
    np.testing.assert_allclose(online.speeds, cluster.speeds, rtol=0.03)


def test_one_outlier_is_no_slow_rank() -> None:
    cluster = Cluster([1.0] * 4)
    online = OnlineCost(WRONG, num_ranks=4)
    cluster.run(online, 20)
    before = online.fit()
    plan = cluster.plan(online)
    times = cluster.measure(plan)
    online.update(plan, [times[0] * 10, *times[1:]])
    after = online.fit()
    assert after.slow_ranks == ()
    np.testing.assert_allclose(after.speeds, before.speeds, rtol=0.02)
    lengths = [1000, 12000, 65536]
    np.testing.assert_allclose(after.cost(lengths), before.cost(lengths), rtol=0.02)


def test_noise_makes_no_speeds() -> None:
    """16 equal ranks with 10% noise, 40 steps: plans do not follow it."""
    cluster = Cluster([1.0] * 16, noise=0.1)
    online = OnlineCost(WRONG, num_ranks=16)
    cluster.run(online, 40)
    assert online.speeds == (1.0,) * 16


def test_a_rank_that_becomes_slow_and_recovers_is_reported_once() -> None:
    cluster = Cluster([1.0] * 4)
    online = OnlineCost(WRONG, num_ranks=4, hosts=["a", "a", "b", "b"])
    lines = []

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            cluster.run(online, 1)
            lines.append(online.report())

    run(20)
    assert lines == [None] * 20
    cluster.speeds[2] = 0.6
    run(40)
    (line,) = [line for line in lines if line]
    assert line.startswith("balance: slow, of the median speed over the last ")
    assert ": rank 2 on b at " in line
    assert line.endswith("%; plans give them less work")
    cluster.speeds[2] = 1.0
    lines.clear()
    run(40)
    assert [line for line in lines if line] == ["balance: no longer slow: rank 2 on b"]


def test_samples_of_one_length_keep_the_shape() -> None:
    """They cannot tell the linear from the quadratic part: the ratio stays that of the model's shape."""
    shape = CostModel.default()
    online = OnlineCost(shape, num_ranks=2)
    for _ in range(10):
        plan = make_plan([8192] * 8, num_ranks=2, strategy="lb_mini", max_tokens=8192)
        online.update(plan, [3.0, 3.0])
    cost = online.cost_model
    assert cost.linear / cost.quadratic == pytest.approx(shape.linear / shape.quadratic, rel=0.3)
    assert float(cost([8192])[0]) + cost.per_micro_batch == pytest.approx(0.75, rel=0.02)


@pytest.mark.parametrize("initial", [CostModel(1.0, 0.0), CostModel(0.0, 1.0)])
def test_a_number_that_was_0_is_learned(initial: CostModel) -> None:
    online = OnlineCost(initial, num_ranks=4)
    Cluster([1.0] * 4, noise=0.0).run(online, 33)
    check_costs(online, 0.05)


@settings(max_examples=60, deadline=None)
@given(
    times=st.lists(
        st.lists(
            st.one_of(st.floats(0, 1e6), st.sampled_from([math.nan, math.inf, 1e-9])), min_size=3, max_size=3
        ),
        max_size=12,
    ),
    lengths=st.lists(st.integers(1, 1000), max_size=6),
    strategy=st.sampled_from(["local_sort", "lb_micro", "lb_mini"]),
)
def test_any_measurement_gives_a_usable_and_equal_fit(
    times: list[list[float]], lengths: list[int], strategy: str
) -> None:
    plan = make_plan(lengths, num_ranks=3, strategy=strategy, max_tokens=1000)
    ranks = [OnlineCost(CostModel.default(), num_ranks=3, min_steps=2) for _ in range(2)]
    for online in ranks:
        for busy_s in times:
            online.update(plan, busy_s)
    with np.errstate(all="raise", under="ignore"):
        fit = ranks[0].fit()
    assert ranks[1].fit() == fit
    assert all(0 < speed < math.inf for speed in fit.speeds)
    make_plan(
        lengths, num_ranks=3, strategy="lb_mini", max_tokens=1000, cost=fit.cost, speeds=fit.speeds
    )  # does not raise


def test_state_goes_through_json_and_gives_the_same_fit() -> None:
    cluster = Cluster([1.0, 0.7])
    online = OnlineCost(WRONG, num_ranks=2, hosts=["a", "b"])
    cluster.run(online, 35)
    restored = OnlineCost(WRONG, num_ranks=2, hosts=["a", "b"])
    restored.load_state_dict(json.loads(json.dumps(online.state_dict())))
    assert restored.fit() == online.fit()
    assert restored.freeze(skip_last=1)() == online.freeze(skip_last=1)()
    plan = cluster.plan(online)
    for each in (online, restored):
        each.update(plan, [1.0, 2.0])
    assert restored.fit() == online.fit()


@pytest.mark.parametrize("hosts", [["a", "b"], ["a", "c"]])
def test_what_is_not_known_is_not_known_after_loading(hosts: list[str]) -> None:
    """What a micro-batch costs; else a resumed run would cut bundles as if it were nothing."""
    online = OnlineCost(WRONG, num_ranks=2, hosts=["a", "b"])
    assert online.cost_model.per_micro_batch is None
    restored = OnlineCost(WRONG, num_ranks=2, hosts=hosts)
    restored.load_state_dict(json.loads(json.dumps(online.state_dict())))
    assert restored.cost_model == online.cost_model


def test_other_hosts_take_over_costs_and_no_speeds() -> None:
    cluster = Cluster([1.0, 0.7])
    online = OnlineCost(WRONG, num_ranks=2, hosts=["a", "b"])
    cluster.run(online, 35)
    for other in (
        OnlineCost(WRONG, num_ranks=2, hosts=["a", "c"]),
        OnlineCost(WRONG, num_ranks=3, hosts=["a", "b", "c"]),
    ):
        other.load_state_dict(online.state_dict())
        assert other.cost_model == online.cost_model
        assert set(other.speeds) == {1.0}
        assert other.fit().num_steps == 0


def test_another_model_takes_over_nothing() -> None:
    online = OnlineCost(WRONG, num_ranks=2)
    Cluster([1.0, 0.7]).run(online, 20)
    other = OnlineCost(CostModel.default(), num_ranks=2)
    other.load_state_dict(online.state_dict())
    assert other.fit() == OnlineCost(CostModel.default(), num_ranks=2).fit()
    with pytest.raises(ValueError, match="version 1, not 7"):
        other.load_state_dict({"version": 7})


def test_times_of_other_ranks_are_refused() -> None:
    plan = make_plan([1, 2], num_ranks=2, strategy="lb_mini", max_tokens=2)
    for done in (plan, [(1, 1, 1), (1, 2, 4)]):
        with pytest.raises(ValueError, match="the work of 2 ranks and the times of 3, but costs of 2 ranks"):
            OnlineCost(WRONG, num_ranks=2).update(done, [1.0, 1.0, 1.0])


def test_what_ranks_say_they_did_teaches_as_their_plan_does() -> None:
    cluster = Cluster([1.0, 0.7])
    planned, told = (OnlineCost(WRONG, num_ranks=2) for _ in range(2))
    for _ in range(12):
        plan = cluster.plan(planned)
        busy_s = cluster.measure(plan)
        planned.update(plan, busy_s)
        lengths = [[plan.lengths[at] for group in groups for at in group] for groups in plan.micro_batches]
        groups_of = [sum(map(bool, groups)) for groups in plan.micro_batches]
        squares = [sum(length**2 for length in mine) for mine in lengths]
        told.update(list(zip(groups_of, map(sum, lengths), squares, strict=True)), busy_s)
    assert told.fit() == planned.fit()
    assert told.fit().num_steps
    assert told.state_dict() == planned.state_dict()
