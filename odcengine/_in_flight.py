"""How much of what nodes exchange at the end of a step is on its way at once: plain arithmetic."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

LIMIT_NBYTES = 512 << 20
"""Bytes that may be on their way beside each other; two exchanges always may, whatever they have."""

_ALWAYS = 2


def has_room(count: int, nbytes: int, more: int) -> bool:
    """Whether another exchange may begin.

    Args:
        count: exchanges on their way.
        nbytes: that they receive together.
        more: that the next one receives.
    """
    return count < _ALWAYS or nbytes + more <= LIMIT_NBYTES


def peak(sizes: Iterable[int]) -> int:
    """The most bytes that are received at once.

    Args:
        sizes: of the exchanges, in their order.
    """
    flying: deque[int] = deque()
    most = 0
    for size in sizes:
        while not has_room(len(flying), sum(flying), size):
            flying.popleft()
        flying.append(size)
        most = max(most, sum(flying))
    return most
