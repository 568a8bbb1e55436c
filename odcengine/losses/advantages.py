"""Advantages of groups: how much better an answer is than the others to the same prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from odcengine.errors import UsageError

AdvantageScale = Literal["std", "none"]
_SCALES = ("std", "none")


def group_advantages(
    rewards: torch.Tensor | Sequence[float],
    groups: torch.Tensor | Sequence[int],
    *,
    scale: AdvantageScale = "std",
    eps: float = 1e-6,
) -> torch.Tensor:
    """``(reward - mean) / (std + eps)`` of each group; the critic-free baseline of GRPO.

    ``std`` is that of a sample (divided by n - 1), and as DeepSeekMath, arXiv 2402.03300, 4.1.2. ``none``
    leaves the division out, which favours questions that are neither easy nor hard less: Dr. GRPO, arXiv
    2503.20783. A group whose rewards are all equal, or of one answer, has nothing to tell: its advantages are
    exactly 0.

    A group has to be in one call with all of its answers, so before it is dealt to ranks.

    Args:
        rewards: ``[n]``, one of each answer; also none.
        groups: ``[n]``, integers: answers with the same number are to the same prompt.
        scale: ``std`` or ``none``.
        eps: added to the standard deviation.

    Returns:
        ``[n]``, float32 (float64 for float64 rewards).

    Raises:
        UsageError: a reward that is not finite, or shapes that do not fit.
    """
    if scale not in _SCALES or not 0 <= eps < math.inf:
        raise UsageError(
            f"group_advantages: scale is {scale!r} and eps {eps}; scale must be one of {', '.join(_SCALES)} "
            "and eps a number of 0 or more"
        )
    rewards, group_of, num_groups = _checked("group_advantages", rewards, groups)
    wide = rewards.double()  # equal rewards are to have exactly their mean, as far as that is possible
    counts = _sums(torch.ones_like(wide), group_of, num_groups)
    centred = wide - (_sums(wide, group_of, num_groups) / counts)[group_of]
    if scale == "std":
        variances = _sums(centred.square(), group_of, num_groups) / (counts - 1).clamp(min=1)
        centred = centred / (variances.sqrt() + eps)[group_of]
    informs = _informs(wide, group_of, num_groups)
    return torch.where(informs, centred, 0).to(rewards.dtype)


def informative_groups(
    rewards: torch.Tensor | Sequence[float], groups: torch.Tensor | Sequence[int]
) -> torch.Tensor:
    """Whether the rewards of an answer's group differ; the others teach nothing.

    Leave the others out to fill minibatches with groups that count: "dynamic sampling" of DAPO, arXiv
    2503.14476.

    Args:
        rewards: ``[n]``, as for :func:`group_advantages`.
        groups: ``[n]``.

    Returns:
        Bool ``[n]``.

    Raises:
        UsageError: a reward that is not finite, or shapes that do not fit.
    """
    return _informs(*_checked("informative_groups", rewards, groups))


def _checked(
    name: str, rewards: torch.Tensor | Sequence[float], groups: torch.Tensor | Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, int]:
    rewards = torch.as_tensor(rewards).detach()
    if rewards.dtype != torch.float64:
        rewards = rewards.float()
    groups = torch.as_tensor(groups, device=rewards.device)
    if rewards.shape == groups.shape == (0,):
        groups = groups.long()  # an empty list becomes floats; a rank may have sampled nothing
    if rewards.ndim != 1 or groups.shape != rewards.shape or groups.is_floating_point():
        raise UsageError(
            f"{name}: rewards of shape {list(rewards.shape)}, groups of {list(groups.shape)} and type "
            f"{groups.dtype}; give one number and one whole number for each answer"
        )
    finite = rewards.isfinite()
    if not finite.all():
        worst = int((~finite).nonzero()[0])
        raise UsageError(
            f"{name}: the reward of answer {worst} is {float(rewards[worst])}; it must be finite"
        )
    unique, group_of = torch.unique(groups, return_inverse=True)
    return rewards, group_of, len(unique)


def _sums(values: torch.Tensor, group_of: torch.Tensor, num_groups: int) -> torch.Tensor:
    return values.new_zeros(num_groups).index_add(0, group_of, values)


def _informs(rewards: torch.Tensor, group_of: torch.Tensor, num_groups: int) -> torch.Tensor:
    highest = rewards.new_full((num_groups,), -math.inf).scatter_reduce(0, group_of, rewards, "amax")
    lowest = rewards.new_full((num_groups,), math.inf).scatter_reduce(0, group_of, rewards, "amin")
    return (highest > lowest)[group_of]
