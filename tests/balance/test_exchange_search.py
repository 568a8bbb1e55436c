"""The search: plain Python and numpy find the same, the best exchanges there are, loads near the bound."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from odcengine.balance.assign import (
    PACE,
    assign,
    longest_first,
    longest_first_numpy,
    lower_bound,
    paces_of,
)
from odcengine.balance.exchange import ListShares
from odcengine.balance.exchange_numpy import ArrayShares

WEIGHTS = st.lists(st.one_of(st.integers(1, 9), st.integers(1, 1 << 24)), max_size=40)


def shares_of(
    weights: Sequence[int], num_ranks: int, owners: Sequence[int]
) -> tuple[list[int], list[list[int]]]:
    """Falling weights, and of each rank its samples."""
    held = [[s for s in range(len(weights)) if owners[s] == rank] for rank in range(num_ranks)]
    return sorted(weights, reverse=True), held


@settings(max_examples=300, deadline=None)
@given(
    weights=WEIGHTS.filter(bool),
    paces=st.lists(st.sampled_from([PACE, PACE, 1100, 5000]), min_size=2, max_size=9),
    max_pool=st.integers(0, 12),
    data=st.data(),
)
def test_numpy_makes_the_same_exchanges(
    weights: list[int], paces: list[int], max_pool: int, data: st.DataObject
) -> None:
    owner = st.integers(0, len(paces) - 1)
    owners = data.draw(st.lists(owner, min_size=len(weights), max_size=len(weights)))
    falling, held = shares_of(weights, len(paces), owners)
    plain, fast = ListShares(falling, paces, held), ArrayShares(falling, paces, held)
    for sweep in range(4):
        target = data.draw(st.integers(min(plain.times()), max(plain.times())))
        late, early = plain.divide(target)
        assert [list(ranks) for ranks in fast.divide(target)] == [late, early]
        late = late[: len(early)]
        if not late:
            break
        before = plain.samples().copy(), plain.times().copy()
        how = {
            "shift": data.draw(st.integers(0, len(early) - 1)),
            "num_partners": data.draw(st.integers(1, len(early) // len(late))),
            "max_pool": max_pool,
        }
        num_exchanges = plain.exchange(late, early, **how)
        assert fast.exchange(np.array(late), np.array(early), **how) == num_exchanges, sweep
        assert fast.samples() == plain.samples()
        assert fast.times() == plain.times()
        assert fast.latest() == plain.latest() == max(plain.times())
        check_exchanged(falling, paces, before, plain, late, num_exchanges)


def check_exchanged(
    weights: Sequence[int],
    paces: Sequence[int],
    before: tuple[list[list[int]], list[int]],
    after: ListShares,
    late: Sequence[int],
    num_exchanges: int,
) -> None:
    """Every sample is somewhere, once; times are right; who took part in an exchange is done earlier."""
    samples, times = after.samples(), after.times()
    assert sorted(itertools.chain(*samples)) == list(range(len(weights)))
    for share, pace, time in zip(samples, paces, times, strict=True):
        assert share == sorted(share)
        assert time == sum(weights[sample] for sample in share) * pace
    changed = [rank for rank in range(len(paces)) if samples[rank] != before[0][rank]]
    assert len(changed) == 2 * num_exchanges
    assert len(set(changed) & set(late)) == num_exchanges
    latest_before = max(before[1][rank] for rank in late)
    assert all(times[rank] < latest_before for rank in changed)


@settings(max_examples=100, deadline=None)
@example(weights=[7, 22, 23], second_pace=1300, bits=3)  # the ideal lies between two neighbours
@given(
    weights=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    second_pace=st.sampled_from([PACE, 1300]),
    bits=st.integers(0, 255),
)
def test_exchanges_are_the_best_of_their_kind(weights: list[int], second_pace: int, bits: int) -> None:
    falling, held = shares_of(weights, 2, [bits >> sample & 1 for sample in range(len(weights))])
    shares = ListShares(falling, [PACE, second_pace], held)

    def time_of(kept: set[int]) -> int:
        mine = sum(falling[sample] for sample in kept)
        return max(mine * PACE, (sum(weights) - mine) * second_pace)

    everything = range(len(weights))
    best_split = min(
        time_of(set(kept)) for count in range(9) for kept in itertools.combinations(everything, count)
    )
    mine, theirs = map(set, held)
    best_swap = min(
        time_of((mine - give) | take)
        for give in [set[int](), *({sample} for sample in mine)]
        for take in [set[int](), *({sample} for sample in theirs)]
    )
    for max_pool, best in ((8, best_split), (0, best_swap)):
        found = shares.best_exchange(0, 1, max_pool)
        assert (shares.latest() if found is None else found.time) == best


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, speeds=st.lists(st.sampled_from([1.0, 1.0, 0.5, 0.93]), min_size=1, max_size=9))
def test_both_assign_alike_and_everything_once(weights: list[int], speeds: list[float]) -> None:
    paces = paces_of(speeds)
    shares = assign(weights, paces, use_numpy=False)
    assert assign(weights, paces, use_numpy=True) == shares == assign(weights, paces)
    assert sorted(itertools.chain(*shares)) == list(range(len(weights)))
    for share in shares:
        assert [weights[sample] for sample in share] == sorted([weights[s] for s in share], reverse=True)
    falling = sorted(weights, reverse=True)

    def latest(weights: list[int], shares: list[list[int]]) -> int:
        return max(sum(weights[s] for s in share) * pace for share, pace in zip(shares, paces, strict=True))

    assert latest(weights, shares) <= latest(falling, longest_first(falling, paces))


@pytest.mark.parametrize("scale", ["alike", "long_tail", "one_takes_all"])
def test_the_longest_first_of_numpy_is_the_same(scale: str) -> None:
    dice = np.random.default_rng(4)
    for num_ranks, count in ((1, 5), (3, 2), (64, 64), (64, 1000), (100, 333)):
        weights = dice.integers(1, 9, count)
        if scale == "long_tail":
            weights = np.rint(np.minimum(dice.lognormal(3, 2, count), 1 << 24)).astype(np.int64) + 1
        elif scale == "one_takes_all":
            weights[: num_ranks - 1] = 1 << 24
        falling = sorted(weights.tolist(), reverse=True)
        assert longest_first_numpy(falling, num_ranks) == longest_first(falling, [PACE] * num_ranks)
    assert longest_first_numpy([], 3) == [[], [], []]


@pytest.mark.parametrize("num_ranks", [70, 300])
def test_many_ranks_get_the_same_with_and_without_numpy(num_ranks: int) -> None:
    for samples_per_rank in (3, 11):
        dice = np.random.default_rng([num_ranks, samples_per_rank])
        weights = np.rint(dice.gamma(4.5, 1000.0, num_ranks * samples_per_rank)).astype(int) + 1
        shares = assign(weights.tolist(), [PACE] * num_ranks)
        assert assign(weights.tolist(), [PACE] * num_ranks, use_numpy=False) == shares


def test_a_tolerance_ends_the_search_early() -> None:
    dice = np.random.default_rng(0)
    weights = np.rint(dice.gamma(4.5, 1e5, 64)).astype(int).tolist()
    bound = lower_bound(sorted(weights, reverse=True), [1.0] * 8)

    def above(**options: float) -> float:
        return max(sum(weights[s] for s in share) for share in assign(weights, [PACE] * 8, **options)) / bound

    assert above() <= 1.001
    assert 1.001 < above(tolerance=0.02) <= 1.02


def test_longest_first_asks_who_is_done_first() -> None:
    """The fast rank takes the first two: 4 after 4 units of work, 3 more make 7 < 3 * 3."""
    assert longest_first([4, 3, 1], [PACE, 3 * PACE]) == [[0, 1], [2]]


def test_extreme_speeds_are_limited() -> None:
    assert paces_of([1.0, 0.5, 1e-9]) == [PACE, 2 * PACE, 64 * PACE]


@pytest.mark.parametrize(
    ("falling", "speeds", "bound"),
    [
        ([], [1.0, 1.0], 0.0),
        ([6.0], [1.0, 1.0], 6.0),  # the longest
        ([3.0, 3.0, 2.0, 2.0], [1.0, 1.0], 5.0),  # the mean
        ([4.0, 4.0, 4.0], [1.0, 1.0], 8.0),  # two of three share a rank
        ([6.0], [2.0, 1.0], 3.0),  # on the fastest rank
        ([6.0, 3.0], [2.0, 1.0], 3.0),
    ],
)
def test_lower_bound(falling: list[float], speeds: list[float], bound: float) -> None:
    assert lower_bound(falling, speeds) == bound


def test_bound_counts_micro_batches() -> None:
    assert lower_bound([4.0, 4.0], [1.0], per_micro_batch=0.5, num_micro_batches=2) == 9.0
    assert lower_bound([6.0, 1.0], [1.0, 1.0], per_micro_batch=0.5, num_micro_batches=1) == 6.5


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.integers(1, 20), max_size=6),
    speeds=st.lists(st.sampled_from([1.0, 2.0, 0.5]), min_size=1, max_size=3),
)
def test_nothing_is_below_the_bound(weights: list[int], speeds: list[float]) -> None:
    weights = sorted(weights, reverse=True)
    bound = lower_bound(weights, speeds)
    for owners in itertools.product(range(len(speeds)), repeat=len(weights)):
        loads = [0.0] * len(speeds)
        for weight, rank in zip(weights, owners, strict=True):
            loads[rank] += weight
        assert max(load / speed for load, speed in zip(loads, speeds, strict=True)) >= bound * (1 - 1e-12)


@pytest.mark.parametrize(
    ("num_ranks", "samples_per_rank", "mean", "worst"),
    [(8, 4, 1.0015, 1.005), (32, 4, 1.0015, 1.002), (128, 4, 1.0015, 1.002), (8, 16, 1.0003, 1.0005)],
)
def test_agent_traces_are_near_the_bound(
    num_ranks: int, samples_per_rank: int, mean: float, worst: float
) -> None:
    """Gamma(4.5) lengths: where greedy alone stays 2 to 4% above the bound."""
    ratios = []
    for repeat in range(10):
        dice = np.random.default_rng([num_ranks, samples_per_rank, repeat])
        lengths = np.clip(dice.gamma(4.5, 7830.0, num_ranks * samples_per_rank), 2048, 65536)
        costs = np.sort(lengths * (61420 + lengths))[::-1]
        weights = np.rint(costs / costs[0] * (1 << 24)).astype(int).tolist()
        shares = assign(weights, [PACE] * num_ranks)
        loads = [sum(weights[sample] for sample in share) for share in shares]
        ratios.append(max(loads) / lower_bound(weights, [1.0] * num_ranks))
    assert np.mean(ratios) <= mean
    assert max(ratios) <= worst
