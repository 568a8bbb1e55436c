"""Advantages of groups, estimates of the divergence, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from odcengine.errors import UsageError
from odcengine.losses import group_advantages, informative_groups, kl_estimates

# Groups may lie anywhere: two of three answers each, one of equal rewards, one of a single answer.
GROUPS = [7, 2, 7, 2, 9, 7, 2, 9, 4]
REWARDS = [1.0, 0.0, 0.0, 0.5, 0.1, 2.0, 1.0, 0.1, 5.0]


def test_group_advantages() -> None:
    for scale in ("std", "none"):
        found = group_advantages(torch.tensor(REWARDS, dtype=torch.float64), GROUPS, scale=scale)  # type: ignore[arg-type]
        for group in (7, 2):
            mine = [number for number, of in enumerate(GROUPS) if of == group]
            rewards = torch.tensor(REWARDS, dtype=torch.float64)[mine]
            right = rewards - rewards.mean()
            if scale == "std":
                right = right / (rewards.std() + 1e-6)
            torch.testing.assert_close(found[mine], right, rtol=1e-13, atol=1e-13)
        assert found[[4, 7, 8]].tolist() == [0.0, 0.0, 0.0]


def test_groups_without_information_get_exactly_zero() -> None:
    """The mean of six times 0.1 is not 0.1, and the difference over a tiny deviation would be large."""
    assert group_advantages([0.1] * 6, [0] * 6, eps=0.0).tolist() == [0.0] * 6
    assert group_advantages([0.1] * 6, [0] * 6, scale="none").tolist() == [0.0] * 6
    assert informative_groups(REWARDS, GROUPS).tolist() == [of in (7, 2) for of in GROUPS]
    assert group_advantages([], torch.zeros(0, dtype=torch.int64)).shape == (0,)
    assert group_advantages([], []).shape == informative_groups([], []).shape == (0,)
    assert group_advantages([1, 0], [3, 3]).dtype == torch.float32


@pytest.mark.parametrize(
    ("rewards", "groups", "message"),
    [
        ([1.0, float("nan")], [0, 0], "the reward of answer 1 is nan; it must be finite"),
        ([float("inf"), 1.0], [0, 0], "the reward of answer 0 is inf"),
        ([1.0, 2.0], [0], r"rewards of shape \[2\], groups of \[1\]"),
        ([1.0, 2.0], [0.0, 1.0], "type torch.float32"),
    ],
)
def test_refused(rewards: list[float], groups: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        group_advantages(rewards, groups)
    with pytest.raises(UsageError, match=message):
        informative_groups(rewards, groups)
    with pytest.raises(UsageError, match="scale must be one of std, none"):
        group_advantages([1.0], [0], scale="range")  # type: ignore[arg-type]


def test_kl_estimates_are_the_divergence_in_the_mean() -> None:
    """Over all tokens by their probability; k2's gradient is the divergence's own, k1's is zero."""
    torch.manual_seed(0)
    logits = torch.randn(9, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(9, dtype=torch.float64), 0)
    logps = torch.log_softmax(logits, 0)
    divergence = (logps.exp() * (logps - ref)).sum()
    (right,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    drawn = logps.detach().exp()
    names: list[Any] = ["k1", "k2", "k3"]
    means = {name: (drawn * kl_estimates(logps, ref, name)).sum() for name in names}
    torch.testing.assert_close(means["k1"].detach(), divergence.detach())
    torch.testing.assert_close(means["k3"].detach(), divergence.detach())
    gradients = {name: torch.autograd.grad(means[name], logits, retain_graph=True)[0] for name in names}
    torch.testing.assert_close(gradients["k2"], right)
    assert gradients["k1"].abs().max() < 1e-12
    with pytest.raises(UsageError, match="'k4' is unknown; choose one of k1, k2, k3"):
        kl_estimates(logps, ref, "k4")  # type: ignore[arg-type]
