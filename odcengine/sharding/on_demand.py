"""FSDP2 on demand: what its public hooks (``hooks.py``) pull and push, with one-sided operations.

Within a minibatch no rank waits for another: a group's parameters are read from their owners' windows when
this rank needs them, and its gradients are added into the owners' accumulators when this rank has them. See
``docs/protocol.md`` for why one barrier and one flag a minibatch are enough.

With several nodes (two-level windows) the window on local rank l holds the shards of all ranks with local
index l, one of each node, so that nothing crosses a node boundary inside a minibatch; ``publish`` and
``collect`` exchange them between nodes once a minibatch (``between_nodes.py``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from odcengine.control import ControlBlock, Meeting
from odcengine.device import Mark
from odcengine.errors import UsageError
from odcengine.sharding.base import Changed, Sharding, scale_all, squared_norm
from odcengine.sharding.between_nodes import NodeExchange
from odcengine.sharding.experts import ChosenExperts
from odcengine.sharding.hooks import set_hooks
from odcengine.sharding.layout import ParamEntry, ParamGroup, prove_layout, write_shard
from odcengine.sharding.padding import Padding
from odcengine.transport.base import Grid, Transport, Window, WindowPlan, WindowSpec


def plan_windows(groups: Sequence[ParamGroup], num_nodes: int, num_slots: int = 1) -> WindowPlan:
    """Lay out the windows of a model: for each group one of parameters and one accumulator.

    Args:
        groups: the model's groups.
        num_nodes: M; 1 for full sharding.
        num_slots: 1, or G where each rank of the node adds into a slot of its own.

    Returns:
        The plan: ``[M, bytes]`` uint8 and ``[M, slots * elements]`` of the accumulator's dtype for each
        group. The accumulator has fp32, or fp64 where a trainable parameter has.
    """
    specs = []
    for group in groups:
        specs.append(WindowSpec(f"parameters of {group.label}", (num_nodes, group.nbytes), torch.uint8))
        specs.append(
            WindowSpec(
                f"accumulator of {group.label}",
                (num_nodes, num_slots * group.grad_numel),
                accumulator_dtype(group),
            )
        )
    return WindowPlan.of(specs)


def accumulator_dtype(group: ParamGroup) -> torch.dtype:
    """Dtype in which gradients of a group are summed: fp32, fp64 if one of its parameters has fp64."""
    wide = any(entry.param.dtype == torch.float64 for entry in group.trainable)
    return torch.float64 if wide else torch.float32


def slots_of(grid: Grid, *, deterministic: bool) -> int:
    """Slots of an accumulator: one, or one for each rank of the node."""
    return grid.node_size if deterministic else 1


class OnDemandSharding(Sharding):
    """Hooks, windows, publish and collect of one model.

    Attributes:
        how_to_change: for messages: what makes changes of parameters known.

    Args:
        model: model that ``fully_shard`` has sharded over all ranks, two or more.
        groups: from ``find_groups``.
        transport: one-sided access inside the node.
        control: the node's control block.
        between_nodes: process group of the ranks with this rank's local index, one a node; None on one node.
        mark: a point in time of the device; see ``Device.mark``.
        gradients_enqueued: called before a group's gradients are pushed; see ``Device.gradients_enqueued``.
        lockstep: meet all ranks of the node before every gather and push. Only for measuring: it shows what
            decoupling gives on the same transport. Needs equal programs on all ranks.
        deterministic: every rank of the node adds into a slot of its own, and the slots are summed in the
            order of ranks: equal bits in every run, for G times the accumulators.
        chosen_experts: of groups of experts pull those that tokens chose, instead of all.
    """

    how_to_change = (
        "a load, or a write outside engine.step()",
        "Call engine.publish() on every rank after changing parameters, between minibatches",
    )

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[ParamGroup],
        transport: Transport,
        control: ControlBlock,
        *,
        between_nodes: dist.ProcessGroup | None = None,
        mark: Callable[[], Mark] = time.perf_counter,
        gradients_enqueued: Callable[[], None] = lambda: None,
        lockstep: bool = False,
        deterministic: bool = False,
        chosen_experts: bool = False,
    ) -> None:
        super().__init__(model, groups, control)
        self.transport = transport
        self.epoch = -1
        self._lockstep = lockstep
        self._between_nodes = between_nodes
        self._mark = mark
        self._gradients_enqueued = gradients_enqueued
        self._crossed_before = 0
        prove_layout(self.groups)
        grid, num_slots = transport.grid, slots_of(transport.grid, deterministic=deterministic)
        windows = transport.allocate(plan_windows(self.groups, grid.num_nodes, num_slots))
        self._param_windows: list[Window] = windows[0::2]
        self._accumulators: list[Window] = windows[1::2]
        self._slot = grid.local if num_slots > 1 else 0
        # [M, slots, elements] of each group
        self._slots = [
            window.local.view(grid.num_nodes, num_slots, group.grad_numel)
            for group, window in zip(self.groups, self._accumulators, strict=True)
        ]
        self._versions: dict[int, int] = {}
        self._compared: set[int] = set()  # groups whose own shard was compared in this minibatch
        # On a GPU the outcome of the comparison stays there until the boundary: one flag a group.
        on_gpu = self.device.type != "cpu"
        self._differs = torch.zeros(len(self.groups) if on_gpu else 0, dtype=torch.bool, device=self.device)
        self._exposed: dict[int, DTensor] = {}  # gradients that are views of an accumulator, by parameter
        self._sums: list[torch.Tensor] = []
        self._used = torch.zeros(len(self.trainable), dtype=torch.float64)
        world_size = control.topology.world_size
        self._experts = [  # by group
            ChosenExperts.of(group, world_size) if chosen_experts else None for group in self.groups
        ]
        self._padding = [Padding.of(group, world_size) for group in self.groups]  # by group
        self._parameter_hooks = set_hooks(self, self.groups, world_size, self._used)

    # -- inside a minibatch ----------------------------------------------------------------------------

    def begin(self) -> None:
        super().begin()
        self._compared.clear()
        self._crossed_before = self.transport.crossed_bytes

    def check_parameters(self) -> None:
        super().check_parameters()
        for group in self.groups:
            for entry in group.entries:
                if self._versions.get(id(entry.param)) != entry.param._version:
                    self._raise_changed(f"parameter {entry.name}")

    def pull(self, group: ParamGroup, out: torch.Tensor) -> None:
        """Fill ``out`` (``[W, nbytes]`` uint8, own row in place) with the group's parameters."""
        start = time.perf_counter()
        self.control.check()
        if group.index not in self._compared:
            self._compare_with_published(group, out[self.control.topology.rank])
        if self._lockstep:
            self.blocked.wait_s += self.transport.barrier(Meeting.LOCKSTEP_GATHER, group.index)
        self.blocked.wait_s += self._gather(group, out)
        if group is self.groups[-1]:
            # What the last backward has pushed shall not be kept while loss and backward are at their peak;
            # a forward began since, so that nothing waits for it.
            self.transport.reclaim_sources()
        self.control.beat()
        end = time.perf_counter()
        self.blocked.num_gathers += 1
        self.blocked.gather_s += end - start
        if self.recorder is not None:
            self.recorder.add("gather", start, end, group.index)

    def _gather(self, group: ParamGroup, out: torch.Tensor) -> float:
        window, experts = self._param_windows[group.index], self._experts[group.index]
        padding = self._padding[group.index]
        if experts is not None:
            experts.note_pull()
            parts = experts.parts_to_pull(group)
        elif padding is not None:
            parts = padding.to_pull
        else:
            return self.transport.gather(window, out, self.epoch)
        return self.transport.gather_parts(window, out, parts, self.epoch)

    def _compare_with_published(self, group: ParamGroup, own: torch.Tensor) -> None:
        """Once a minibatch: what FSDP2 takes of this rank's shard is what other ranks take of it.

        Versions do not show writes through ``.data`` or a local tensor; the bytes do.
        """
        self._compared.add(group.index)
        published = self._param_windows[group.index].local[self.transport.grid.node]
        if self._differs.numel():
            if group.nbytes % 8 == 0:  # eight bytes at a time
                own, published = own.view(torch.int64), published.view(torch.int64)
            self._differs[group.index] = (own != published).any()
        elif not torch.equal(own, published):
            self._raise_changed(f"a parameter of {group.label}")

    def _raise_changed(self, what: str) -> NoReturn:
        causes, remedy = self.how_to_change
        raise UsageError(
            f"{what} was changed after it was published ({causes}); other ranks would use its old value. "
            f"{remedy}"
        )

    def faults(self) -> torch.Tensor:
        return self._differs.double()

    def raise_faults(self, faults: Sequence[float]) -> None:
        for group, differs in zip(self.groups, faults, strict=False):
            if differs:
                self._raise_changed(f"a parameter of {group.label}")

    def push(
        self,
        group: ParamGroup,
        rows: torch.Tensor,
        entries: Sequence[ParamEntry],
        chosen: frozenset[int] | None,
    ) -> None:
        """Add gradients into the owners' accumulators.

        Args:
            group: the group.
            rows: ``[W, k]``: for each shard the gradients of ``entries``.
            entries: trainable parameters that follow each other in the group.
            chosen: in a group of experts those that have gradients.
        """
        start = time.perf_counter()
        self.control.check()
        window, experts = self._accumulators[group.index], self._experts[group.index]
        slot = self._slot * group.grad_numel  # where this rank's begins
        offset = slot + (entries[0].grad_offset or 0)
        padding = self._padding[group.index]
        if experts is not None and chosen is not None:
            parts = experts.parts_to_push(entries, chosen, slot)
            self.blocked.wait_s += self.transport.scatter_add_parts(window, rows, parts, offset)
        elif padding is not None:
            parts = padding.to_push(entries, slot)
            self.blocked.wait_s += self.transport.scatter_add_parts(window, rows, parts, offset)
        else:
            self.blocked.wait_s += self.transport.scatter_add(window, rows, offset)
        self.control.beat()
        end = time.perf_counter()
        self.blocked.push_s += end - start
        if self.recorder is not None:
            self.recorder.add("push", start, end, group.index)

    def enter_push(self, group: ParamGroup) -> frozenset[int] | None:
        """Before the group's gradients are handed over; in lock-step all ranks meet.

        Returns:
            In a group of experts those that the gradients are for.
        """
        self.check_counted()
        self.blocked.num_pushes += 1
        self._gradients_enqueued()
        if self._lockstep:
            waited = self.transport.barrier(Meeting.LOCKSTEP_PUSH, group.index)
            self.blocked.wait_s += waited
            self.blocked.push_s += waited
        experts = self._experts[group.index]
        return None if experts is None else experts.take_unpushed()

    # -- at the boundary -------------------------------------------------------------------------------

    def reshard(self) -> None:
        super().reshard()
        for experts in self._experts:
            if experts is not None:
                experts.reset()

    def collect(self) -> torch.Tensor:
        self.add_up()
        return squared_norm(self._sums, self.device)

    @torch.no_grad()
    def add_up(self) -> None:
        """:meth:`collect` without the norm."""
        self.reshard()
        self.blocked.crossed_bytes = self.transport.crossed_bytes - self._crossed_before
        for slots in self._slots:
            for slot in range(1, slots.shape[1]):  # in the order of ranks
                slots[:, 0] += slots[:, slot]
        with self._exchange("the sum of gradients between nodes") as exchange:
            for slots in self._slots:
                exchange.add_up(slots[:, 0])
        self._sums = [slots[0, 0] for slots in self._slots]

    @contextlib.contextmanager
    def _exchange(self, what: str) -> Iterator[NodeExchange]:
        """What is begun inside the block has come at its end, and is counted and timed."""
        start = self._mark()
        with NodeExchange(self._between_nodes, self.transport.grid.column, self.control, what) as exchange:
            yield exchange
        if exchange.count:
            self.blocked.exchanges.append((start, self._mark()))
            self.blocked.exchanged_bytes += exchange.sent_nbytes

    def used(self) -> torch.Tensor:
        return self._used

    @torch.no_grad()
    def expose(self, used: torch.Tensor, scale: float | torch.Tensor) -> None:
        scale_all(self._sums, scale)
        self._set_gradients(used)

    def _set_gradients(self, used: torch.Tensor) -> None:
        flags = iter(used.tolist())
        for group, flat in zip(self.groups, self._sums, strict=True):
            for entry in group.trainable:
                entry.param.grad = self._gradient(entry, flat) if next(flags) else None

    def _gradient(self, entry: ParamEntry, flat: torch.Tensor) -> DTensor:
        """The parameter's gradient: a view of ``flat``, cast where the parameter has another dtype."""
        param, kept = entry.param, self._exposed.get(id(entry.param))
        if kept is not None:
            return kept
        local = entry.local
        assert isinstance(param, DTensor)  # find_groups saw to it
        assert entry.grad_offset is not None  # it is trainable
        view = flat[entry.grad_offset : entry.grad_offset + local.numel()].view(local.shape)
        gradient = DTensor.from_local(
            view.to(param.dtype),
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
        if view.dtype == param.dtype:
            self._exposed[id(param)] = gradient  # the same memory in every minibatch
        return gradient

    def release(self) -> None:
        super().release()
        self._sums = []
        if self._accumulators:
            torch._foreach_zero_([window.local for window in self._accumulators])
        self._used.zero_()

    @torch.no_grad()
    def publish(self, which: Changed) -> None:
        self.reshard()
        node = self.transport.grid.node
        with self._exchange("the exchange of parameters between nodes") as exchange:
            for group, window in zip(self.groups, self._param_windows, strict=True):
                entries = which.of(group)
                if not entries:
                    continue
                write_shard(group, window.local[node], entries)
                self._versions.update((id(entry.param), entry.param._version) for entry in entries)
                if self._between_nodes is not None:
                    exchange.share(window.local, node, _spans(group, entries))
        self._compared.clear()
        self._differs.zero_()
        self.epoch += 1
        self.transport.signal_published(self.epoch)

    def close(self) -> None:
        self.reshard()
        self._sums.clear()
        self._exposed.clear()
        self._param_windows.clear()
        self._accumulators.clear()
        self._slots.clear()
        super().close()


def _spans(group: ParamGroup, entries: Sequence[ParamEntry]) -> list[slice]:
    """The bytes of some parameters in a group's shard, neighbours together; all of it for all of them."""
    if len(entries) == len(group.entries):
        return [slice(0, group.nbytes)]
    spans: list[slice] = []
    for entry in entries:
        end = entry.byte_offset + entry.numel * entry.dtype.itemsize
        if spans and spans[-1].stop == entry.byte_offset:
            spans[-1] = slice(spans[-1].start, end)
        else:
            spans.append(slice(entry.byte_offset, end))
    return spans
