"""FSDP2 with its own collectives, timed: the baseline, and what a single rank uses.

Every gather and reduce meets all ranks, so all must run the same micro-batches through the same modules.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from odcengine._collectives import all_gather, reduce_scatter
from odcengine.control import ControlBlock
from odcengine.sharding.base import Changed, Sharding, scale_all, squared_norm
from odcengine.sharding.layout import AllGather, ParamEntry, ParamGroup, PlainMemory, ReduceScatter


class CollectiveSharding(Sharding):
    """FSDP2 as it is; gradients accumulate in ``.grad`` of each shard.

    Args:
        model: model that ``fully_shard`` has sharded over all ranks.
        groups: from ``find_groups``.
        control: the node's control block.
    """

    def __init__(self, model: nn.Module, groups: Sequence[ParamGroup], control: ControlBlock) -> None:
        super().__init__(model, groups, control)
        if control.topology.world_size > 1:  # else FSDP2 calls no hook
            for group in self.groups:
                group.module.set_custom_all_gather(_TimedAllGather(self, group))
                group.module.set_custom_reduce_scatter(_TimedReduceScatter(self, group))

    @torch.no_grad()
    def collect(self) -> torch.Tensor:
        self.reshard()
        return squared_norm((gradient for _, gradient in self._gradients()), self.device)

    def _gradients(self) -> Iterator[tuple[ParamEntry, torch.Tensor]]:
        for entry in self.trainable:
            gradient = entry.param.grad
            if isinstance(gradient, DTensor):
                yield entry, gradient.to_local()

    def used(self) -> torch.Tensor:
        flags = [entry.param.grad is not None for entry in self.trainable]
        return torch.tensor(flags, dtype=torch.float64)

    @torch.no_grad()
    def expose(self, used: torch.Tensor, scale: float | torch.Tensor) -> None:
        scale_all([gradient for _, gradient in self._gradients()], scale)
        for entry, flag in zip(self.trainable, used.tolist(), strict=True):
            if flag and entry.param.grad is None:  # another rank's micro-batch used it
                entry.param.grad = torch.zeros_like(entry.param)

    def publish(self, which: Changed) -> None:
        self.reshard()

    @contextlib.contextmanager
    def timed(self, kind: str, group: ParamGroup) -> Iterator[_Clock]:
        """Time a collective; waiting in it and moving data cannot be told apart.

        The host waits inside the backend, which only notices a failure when the connection breaks.
        """
        self.control.check()
        clock, start = _Clock(), time.perf_counter()
        try:
            yield clock
        except RuntimeError as error:
            self.control.raise_cause(error, f"{_WORDS[kind]} of {group.label}")
        end = time.perf_counter()
        clock.seconds = end - start
        if self.recorder is not None:
            self.recorder.add(kind, start, end, group.index)
        self.blocked.wait_s += clock.seconds
        self.control.beat()


@dataclass
class _Clock:
    seconds: float = 0.0


_WORDS = {"all_gather": "the all-gather of parameters", "reduce_scatter": "the reduce-scatter of gradients"}


class _TimedAllGather(PlainMemory, AllGather):
    def __init__(self, sharding: CollectiveSharding, group: ParamGroup) -> None:
        self._sharding = sharding
        self._group = group

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        blocked = self._sharding.blocked
        with self._sharding.timed("all_gather", self._group) as clock:
            work: dist.Work | None = all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        blocked.num_gathers += 1
        blocked.gather_s += clock.seconds
        return work


class _TimedReduceScatter(PlainMemory, ReduceScatter):
    def __init__(self, sharding: CollectiveSharding, group: ParamGroup) -> None:
        self._sharding = sharding
        self._group = group

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._sharding.check_counted()
        blocked = self._sharding.blocked
        with self._sharding.timed("reduce_scatter", self._group) as clock:
            work: dist.Work | None = reduce_scatter(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        blocked.num_pushes += 1
        blocked.push_s += clock.seconds
        return work
