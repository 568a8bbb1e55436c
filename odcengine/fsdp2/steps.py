"""Whether ranks have ended a minibatch alike: all by the same optimizers' steps, or all without a step.

A trainer may skip a step, but on all ranks: otherwise some shards are of the parameters before the step and
some of those after it, and nothing fails. So each rank says how it ended the last minibatch where all meet
anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from odcengine.errors import UsageError

NONE_YET = 0
"""The way in which no minibatch has ended: there was none."""
_MOST = 40  # those from here on are one: the number has to stay exact in float64


def way_of(stepped: Iterable[int]) -> int:
    """A minibatch's end in one number of 1 or more.

    Args:
        stepped: indices of the optimizers that have stepped, none where the step was skipped.
    """
    return 1 + sum(1 << index for index in {min(index, _MOST) for index in stepped})


def check_alike(
    ways: Sequence[int],
    again: Sequence[bool],
    *,
    used: bool,
    minibatch: int,
    describe: Callable[[int], str],
) -> None:
    """Raise where ranks have ended the last minibatch in different ways, or nothing was done since.

    Args:
        ways: of each rank, from :func:`way_of`.
        again: of each rank whether ``collect()`` follows ``collect()``, without a step or forward in between.
        used: whether some rank has a gradient in the present minibatch.
        minibatch: number of the last one.
        describe: names a rank.

    Raises:
        UsageError: names the ranks and what they did.
    """
    if len(set(ways)) == 1:
        if all(again) and not used:
            raise UsageError(
                f"collect() was called twice in minibatch {minibatch}, with no optimizer.step() and no "
                "backward in between on any rank: the second call drops the gradients. Call it once a "
                "minibatch, before clipping and the step"
            )
        return
    told = [f"{_names(ranks, describe)}: {_words(way)}" for way, ranks in _by_way(ways).items()]
    twice = [rank for rank, odd in enumerate(again) if odd]
    if twice:
        told.append(f"{_names(twice, describe)} came straight to the next collect()")
    raise UsageError(
        f"ranks have ended minibatch {minibatch} in different ways: {'; '.join(told)}. Some shards of the "
        "parameters are stepped now and some are not. Call collect() once a minibatch on every rank, then "
        "step on all ranks or on none: decide by what is the same on all of them (the norm that "
        "clip_grad_norm_ returns is; a rank's own loss is not)"
    )


def _by_way(ways: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for rank, way in enumerate(ways):
        found.setdefault(way, []).append(rank)
    return dict(sorted(found.items(), key=lambda item: (len(item[1]), item[0])))


def _words(way: int) -> str:
    stepped = [str(index) for index in range(way.bit_length()) if (way - 1) >> index & 1]
    if not stepped:
        return "no optimizer.step()"
    return "optimizer.step()" if stepped == ["0"] else f"optimizer.step() of optimizers {', '.join(stepped)}"


def _names(ranks: Sequence[int], describe: Callable[[int], str]) -> str:
    """Few ranks with their hosts, of many the first ones."""
    if len(ranks) <= 2:
        return " and ".join(map(describe, ranks))
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{', ...' if len(ranks) > 8 else ''} ({len(ranks)} of them)"
