"""Shared memory between the CPU ranks of one host: the transport of laptops, CI and debugging. Linux only.

A pull is a memcpy from the owner's memory. A push adds in place under a lock per owner and window, since
plain additions of several processes to the same elements lose some. Nothing is named in the file system, and
nothing stays behind when processes are killed (see ``odcengine/_memory.py``).
"""

from __future__ import annotations

import logging
import os
import sys

import torch

from odcengine._memory import available_memory, create_memory, map_memory
from odcengine.control import ControlBlock, Meeting
from odcengine.errors import ConfigError, OdcError
from odcengine.transport.base import Grid, Transport, Window, WindowPlan

logger = logging.getLogger(__name__)


class ShmTransport(Transport):
    """Windows in anonymous shared memory (``memfd_create``); see :class:`Transport` for the contract."""

    name = "shm"

    def __init__(self, control: ControlBlock, grid: Grid) -> None:
        super().__init__(control, grid)
        if sys.platform != "linux":
            raise ConfigError("odc.transport: shm needs Linux; use `collective` on this system")
        self._windows: list[Window] = []
        self._views: list[list[torch.Tensor]] = []  # [window][peer]: [M, n]
        self._seen_epochs = [-1] * grid.node_size

    def allocate(self, plan: WindowPlan) -> list[Window]:
        grid, first = self.grid, self.grid.local == 0
        if self._windows:
            raise OdcError("shm transport: windows are allocated once, in one plan")
        descriptors = None
        if first:
            self._check_memory(plan)
            descriptors = [
                create_memory(f"odc-window-{peer}", plan.total_nbytes) for peer in range(grid.node_size)
            ]
        arenas = []
        for fd in self.control.share(descriptors):
            arenas.append(torch.frombuffer(map_memory(fd), dtype=torch.uint8))
            os.close(fd)  # the mapping keeps the memory
        arenas[grid.local].zero_()  # first touch by the owner: its NUMA node, and no page faults later
        for index, (spec, offset) in enumerate(zip(plan.specs, plan.offsets, strict=True)):
            views = [
                arena[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape) for arena in arenas
            ]
            self._views.append(views)
            self._windows.append(Window(index, spec, views[grid.local]))
        self.barrier(Meeting.ALLOCATE)
        return list(self._windows)

    def _check_memory(self, plan: WindowPlan) -> None:
        needed, available = plan.total_nbytes * self.grid.node_size, available_memory()
        host = self.control.topology.hosts[self.control.topology.rank]
        logger.info(
            "shared memory for windows: %.1f MiB a rank, %d ranks",
            plan.total_nbytes / 2**20,
            self.grid.node_size,
        )
        if needed > available:
            raise OdcError(
                f"host {host}: the windows of {self.grid.node_size} ranks need {needed / 2**30:.2f} GiB of "
                f"shared memory, {available / 2**30:.2f} GiB are available; use more hosts, a smaller model "
                "or `odc.sharding: full`"
            )

    def pull(self, window: Window, peer: int, node: int, out: torch.Tensor, offset: int = 0) -> None:
        # narrow() refuses what lies outside; a slice would be cut short, and one element broadcast.
        out.copy_(self._views[window.index][peer][node].narrow(0, offset, out.numel()))
        self.traffic.pulled(out.numel() * out.element_size(), self._ranks[peer])

    def push_add(self, window: Window, peer: int, node: int, source: torch.Tensor, offset: int = 0) -> float:
        waited = self.control.lock(self._lock_number(window, peer), self._describe(window, peer))
        try:
            self._add(window, peer, node, source, offset)
        finally:
            self.control.unlock(self._lock_number(window, peer))
        return waited

    def scatter_add(self, window: Window, source: torch.Tensor, offset: int = 0) -> float:
        waited, left = 0.0, list(self.grid.visits())
        while left:
            # Owners whose lock is free come first; wait only where all that are left are busy.
            peer = next((p for p in left if self.control.try_lock(self._lock_number(window, p))), None)
            if peer is None:
                peer = left[0]
                waited += self.control.lock(self._lock_number(window, peer), self._describe(window, peer))
            try:
                for node, row in enumerate(self.grid.shards):
                    self._add(window, peer, node, source[row[peer]], offset)
            finally:
                self.control.unlock(self._lock_number(window, peer))
            left.remove(peer)
        return waited

    def _add(self, window: Window, peer: int, node: int, source: torch.Tensor, offset: int) -> None:
        self._views[window.index][peer][node].narrow(0, offset, source.numel()).add_(source)
        self.traffic.pushed(source.numel() * source.element_size(), self._ranks[peer])

    def _lock_number(self, window: Window, peer: int) -> int:
        return window.index * self.grid.node_size + peer

    def _describe(self, window: Window, peer: int) -> str:
        return f"{window.spec.name} of {self.control.describe(peer)}"

    def signal_published(self, epoch: int) -> None:
        self.control.set_epoch(epoch)

    def wait_published(self, peer: int, epoch: int) -> float:
        if self._seen_epochs[peer] >= epoch:
            return 0.0
        waited = self.control.wait_epoch(peer, epoch)
        self._seen_epochs[peer] = epoch
        return waited

    def barrier(self, meeting: Meeting, number: int = 0) -> float:
        return self.control.barrier(meeting, number)

    def close(self, meeting: Meeting | None = Meeting.CLOSE) -> None:
        if meeting is not None:
            self.barrier(meeting)
        self._windows.clear()
        self._views.clear()
