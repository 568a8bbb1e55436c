"""Where the shards of a ZeRO-3 engine and the sums of their gradients lie in windows; knows no DeepSpeed.

One window of bytes holds this rank's shard of every parameter: first those that are trained, one after the
other as DeepSpeed's flat buffer has them, then the frozen ones. A gradient is summed in an accumulator: each
large parameter has one of its own, small neighbours share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from odcengine.transport.base import WindowPlan, WindowSpec

LARGE_SHARD = 32768
"""Elements of a shard from which a parameter is moved by itself; smaller neighbours are moved together."""

_ALIGNMENT = 16


@dataclass(frozen=True)
class ParamSpec:
    """A parameter, before anything is laid out.

    Attributes:
        name: in messages.
        numel: elements of the whole parameter.
        shard_numel: elements of each rank's shard; the last shards may be padded.
        dtype: of the shard.
        trained: whether it gets gradients.
    """

    name: str
    numel: int
    shard_numel: int
    dtype: torch.dtype
    trained: bool


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies.

    Attributes:
        index: position in the layout.
        spec: the parameter.
        offset: first byte in a row of the window of parameters.
        accumulator: index of its accumulator; -1 for a frozen one.
        grad_offset: first element in a row of that.
    """

    index: int
    spec: ParamSpec
    offset: int
    accumulator: int
    grad_offset: int

    @property
    def nbytes(self) -> int:
        """Of a shard."""
        return self.spec.shard_numel * self.spec.dtype.itemsize

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.offset + self.nbytes

    @property
    def is_large(self) -> bool:
        """Whether it is moved by itself."""
        return self.spec.shard_numel >= LARGE_SHARD


@dataclass(frozen=True)
class ZeroLayout:
    """All parameters' places; equal on all ranks.

    Attributes:
        slots: trained ones first, in the order that was given.
        trained_nbytes: bytes of a rank's shards of what is trained, which lie at the beginning.
        accumulator_numels: elements of a row of each accumulator.
        row_nbytes: bytes of a row of the window of parameters.
    """

    slots: tuple[Slot, ...]
    trained_nbytes: int
    accumulator_numels: tuple[int, ...]
    row_nbytes: int

    @classmethod
    def of(cls, specs: Sequence[ParamSpec]) -> ZeroLayout:
        """Lay parameters out.

        Args:
            specs: those that are trained first, without gaps and of one dtype; then the frozen ones.
        """
        slots: list[Slot] = []
        numels: list[int] = []
        end, shared = 0, False
        for index, spec in enumerate(specs):
            if not spec.trained:
                end = -(-end // _ALIGNMENT) * _ALIGNMENT
                slots.append(Slot(index, spec, end, -1, 0))
            else:
                large = spec.shard_numel >= LARGE_SHARD
                if large or not shared or numels[-1] >= LARGE_SHARD:
                    numels.append(0)
                shared = not large
                slots.append(Slot(index, spec, end, len(numels) - 1, numels[-1]))
                numels[-1] += spec.shard_numel
            end = slots[-1].end
        trained = max((slot.end for slot in slots if slot.spec.trained), default=0)
        row = -(-end // _ALIGNMENT) * _ALIGNMENT  # so that the next node's row is aligned, too
        return cls(tuple(slots), trained, tuple(numels), row)

    def plan(self, num_nodes: int) -> WindowPlan:
        """The windows: of parameters, then the accumulators (fp32, as DeepSpeed's masters)."""
        specs = [WindowSpec("parameters", (num_nodes, self.row_nbytes), torch.uint8)]
        specs += [
            WindowSpec(f"accumulator {index}", (num_nodes, numel), torch.float32)
            for index, numel in enumerate(self.accumulator_numels)
        ]
        return WindowPlan.of(specs)


def fetch_runs(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Parameters that are fetched by one read an owner: large ones alone, small ones with their neighbours.

    Args:
        slots: what is wanted, in any order, each once.
    """
    runs: list[list[Slot]] = []
    for slot in sorted(slots, key=lambda slot: slot.offset):
        last = runs[-1][-1] if runs else None
        joins = (
            last is not None
            and not (slot.is_large or last.is_large)
            and last.end == slot.offset
            and last.spec.dtype == slot.spec.dtype
        )
        if joins:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs
