"""Micro-batches of a rank: within the limits, no more of them than first fit needs, and even."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odcengine.balance import CostModel, Plan, make_plan
from odcengine.balance.packing import Group, Limits, pack
from odcengine.simulate import Machine, simulate


def heaviest_first(weights: list[int], owners: list[int], num_ranks: int) -> list[Group]:
    order = sorted(range(len(weights)), key=lambda sample: -weights[sample])
    return [[sample for sample in order if owners[sample] == rank] for rank in range(num_ranks)]


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), max_size=60),
    num_ranks=st.integers(1, 5),
    max_tokens=st.one_of(st.none(), st.integers(64, 150)),
    max_samples=st.one_of(st.none(), st.integers(1, 4)),
    data=st.data(),
)
def test_limits_hold_and_numpy_packs_the_same(
    lengths: list[int],
    num_ranks: int,
    max_tokens: int | None,
    max_samples: int | None,
    data: st.DataObject,
) -> None:
    weight = st.integers(1, 1 << 24)
    by_length = data.draw(st.booleans())
    weights = [n * n for n in lengths] if by_length else [data.draw(weight) for _ in lengths]
    owners = [data.draw(st.integers(0, num_ranks - 1)) for _ in lengths]
    shares = heaviest_first(weights, owners, num_ranks)
    limits = Limits(lengths, max_tokens, max_samples)
    packed = pack(shares, weights, limits, use_numpy=False)
    assert pack(shares, weights, limits, use_numpy=True) == packed == pack(shares, weights, limits)
    for share, groups in zip(shares, packed, strict=True):
        assert sorted(itertools.chain(*groups)) == sorted(share)
        loads = [sum(weights[sample] for sample in group) for group in groups]
        assert loads == sorted(loads, reverse=True)
        for group in groups:
            assert group
            assert group == sorted(group)
            assert limits.allow(sum(lengths[sample] for sample in group), len(group))


@pytest.mark.parametrize("use_numpy", [False, True])
def test_the_rest_is_no_small_micro_batch(use_numpy: bool) -> None:
    """Nine samples of 10 tokens, eight to a micro-batch: 5 and 4 of them, not 8 and 1."""
    limits = Limits([10] * 9, 80, None)
    assert pack([list(range(9))], [1] * 9, limits, use_numpy=use_numpy) == [[[0, 2, 4, 6, 8], [1, 3, 5, 7]]]


@pytest.mark.parametrize("use_numpy", [False, True])
def test_full_micro_batches_stay_as_first_fit_has_them(use_numpy: bool) -> None:
    """6+4, 5+5 and 7+3 fill three micro-batches; the lightest that has room would need a fourth one."""
    lengths = [7, 6, 5, 5, 4, 3]
    packed = pack([list(range(6))], lengths, Limits(lengths, 10, None), use_numpy=use_numpy)
    assert packed == [[[0, 5], [1, 4], [2, 3]]]


@pytest.mark.parametrize("use_numpy", [None, False, True])
def test_ranks_without_samples(use_numpy: bool | None) -> None:
    limits = Limits([3, 4], 10, None)
    assert pack([[], [1, 0], []], [3, 4], limits, use_numpy=use_numpy) == [[], [[0, 1]], []]
    assert pack([[], []], [], Limits([], 10, None), use_numpy=use_numpy) == [[], []]


def test_many_ranks_are_packed_alike() -> None:
    dice = np.random.default_rng(0)
    lengths = np.clip(dice.lognormal(7, 1.4, 3000), 16, 8192).astype(int).tolist()
    weights = [length * (61420 + length) for length in lengths]
    for max_tokens, max_samples in ((8192, None), (8192, 3), (None, 5), (None, None)):
        shares = heaviest_first(weights, dice.integers(0, 150, 3000).tolist(), 150)
        limits = Limits(lengths, max_tokens, max_samples)
        assert pack(shares, weights, limits) == pack(shares, weights, limits, use_numpy=False)


def test_even_micro_batches_save_time_where_traffic_bounds_small_ones() -> None:
    """Simulated: short samples, and micro-batches that take at least the time of 2,048 tokens."""
    cost = CostModel(1.0, 0.0)
    machine = Machine(cost, traffic_s=2048)
    dice = np.random.default_rng(3)
    lengths = np.clip(dice.lognormal(np.log(1083), 1.42, 256), 16, 4096).astype(int).tolist()
    plan = make_plan(lengths, num_ranks=32, strategy="lb_mini", max_tokens=4096, cost=cost)
    even = simulate(plan, machine, communication="on_demand").step_s
    # The same shares of ranks, by first fit decreasing.
    filled = [first_fit(list(itertools.chain(*rank)), lengths, 4096) for rank in plan.micro_batches]
    costs = tuple(tuple(float(sum(lengths[s] for s in group)) for group in rank) for rank in filled)
    full = Plan("lb_mini", 32, tuple(map(tuple, filled)), costs, plan.bound, (), tuple(lengths))
    assert even < 0.96 * simulate(full, machine, communication="on_demand").step_s


def first_fit(samples: list[int], lengths: list[int], limit: int) -> list[tuple[int, ...]]:
    groups: list[list[int]] = []
    for sample in sorted(samples, key=lambda sample: -lengths[sample]):
        for group in groups:
            if sum(lengths[other] for other in group) + lengths[sample] <= limit:
                group.append(sample)
                break
        else:
            groups.append([sample])
    return [tuple(sorted(group)) for group in groups]
