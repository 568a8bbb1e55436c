"""Shards that are padding for a large part: what nobody needs of them does not travel.

FSDP2 cuts a parameter along a dimension into parts of equal size and pads the last ones; experts stacked in
one tensor, on more ranks than experts, are mostly padding. FSDP2 never reads it after a gather, and fills it
with zeros before a reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.distributed.tensor import DTensor, Shard

from odcengine.sharding.layout import ParamEntry, ParamGroup
from odcengine.transport.base import Range

# Padding up to this share of what is real travels along: leaving it out costs more calls.
_TOLERATED = 1.25


class Padding:
    """Where the shards of a group are not padding.

    Args:
        group: a group that is padding for a large part.
        world_size: number of shards.
    """

    def __init__(self, group: ParamGroup, world_size: int) -> None:
        self._filled = {
            id(entry): [filled_numel(entry, shard, world_size) for shard in range(world_size)]
            for entry in group.entries
        }
        self._world_size = world_size
        self.to_pull = self._parts(
            group.entries,
            start_of=lambda entry: entry.byte_offset,
            size_of=lambda entry: entry.dtype.itemsize,
        )

    @classmethod
    def of(cls, group: ParamGroup, world_size: int) -> Padding | None:
        """Of a group that is padding for a large part; None for any other."""
        whole = sum(entry.param.numel() for entry in group.entries)
        padded = world_size * sum(entry.numel for entry in group.entries)
        return cls(group, world_size) if padded > _TOLERATED * whole else None

    def to_push(self, entries: Sequence[ParamEntry], first: int) -> list[list[Range]]:
        """For each shard the elements of the gradients of these parameters that are no padding.

        Args:
            entries: trainable parameters.
            first: where the group's gradients begin in a row of the accumulator.
        """
        return self._parts(
            entries, start_of=lambda entry: first + (entry.grad_offset or 0), size_of=lambda _: 1
        )

    def _parts(
        self,
        entries: Sequence[ParamEntry],
        *,
        start_of: Callable[[ParamEntry], int],
        size_of: Callable[[ParamEntry], int],
    ) -> list[list[Range]]:
        parts: list[list[Range]] = [[] for _ in range(self._world_size)]
        for entry in entries:
            start, size = start_of(entry), size_of(entry)
            for ranges, filled in zip(parts, self._filled[id(entry)], strict=True):
                append_range(ranges, start, start + filled * size)
        return parts


def filled_numel(entry: ParamEntry, shard: int, world_size: int) -> int:
    """Elements of a shard of a parameter that are no padding; they come first."""
    param = entry.param
    assert isinstance(param, DTensor)  # find_groups saw to it
    (placement,) = param.placements
    assert isinstance(placement, Shard)
    size = param.shape[placement.dim]
    rows = -(-size // world_size)
    return entry.numel // rows * max(0, min(rows, size - shard * rows))


def append_range(ranges: list[Range], start: int, stop: int) -> None:
    """Add a range, joined to the last one where that ends at its start; nothing if it is empty."""
    if start == stop:
        return
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], stop)
    else:
        ranges.append((start, stop))
