"""GPUs of any hosts through NVSHMEM: its symmetric heap instead of torch's symmetric memory.

Peers whose memory is mapped here are treated as in ``cuda_p2p``. To a peer that is not mapped nothing but
NVSHMEM's own operations leads: a pull is a ``get`` on the stream. A push is a message into a ring in the
owner's memory, a put with signal; a thread of the owner watches the signals, enqueues the additions and tells
the pusher that the slot is free. A ring has a few slots for each pusher; where all are taken, the pusher's
host waits, with a deadline. No kernel waits for what a peer's host has yet to do: on both sides a host can be
held up inside CUDA until its own device is through, and then neither would go on. At the barrier each pusher
tells each owner how many messages it has sent in all, and the owner goes on when it has added exactly that
many.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time

import torch
import torch.distributed as dist

from odcengine._collectives import all_gather
from odcengine._meetings import make_tag
from odcengine.control import ControlBlock, Meeting
from odcengine.errors import OdcError
from odcengine.transport import _kernels
from odcengine.transport._nvshmem_start import Nvshmem, allocate_symmetric, start_nvshmem
from odcengine.transport.base import Grid, Window
from odcengine.transport.cuda_p2p import CudaP2PTransport, element_of, new_event
from odcengine.transport.heap import ALIGNMENT, HEADER_NBYTES, WORD_NBYTES, Ring, aligned

__all__ = ["NvshmemTransport", "Ring", "start_nvshmem"]

logger = logging.getLogger(__name__)

_PUT, _FREED, _SENT = 0, 1, 2  # rows of words, one word a peer
_ACCUMULATORS = (torch.float32, torch.float64)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_BLOCK, _ADDING_CTAS = 2048, 32
_LONGEST_NAP_S = 2e-4
_STOP_S = 10.0


class NvshmemTransport(CudaP2PTransport):
    """Windows in NVSHMEM's heap; see :class:`Transport` for the contract.

    Args:
        control: the node's control block.
        grid: owners of the shards.
        device: this rank's GPU; the current one.
        group: process group of all ranks, for tensors of the host; without a limit of its own.
        library: NVSHMEM, running with the job's ranks as PEs.
        ring: sizes of the message rings.
    """

    name = "nvshmem"

    def __init__(
        self,
        control: ControlBlock,
        grid: Grid,
        device: torch.device,
        group: dist.ProcessGroup,
        library: Nvshmem,
        ring: Ring | None = None,
    ) -> None:
        super().__init__(control, grid, device, group)
        self._library = library
        self._ring = ring or Ring()
        self._pes = self._ranks  # the PE is the global rank
        self._over_nodes = not set(self._ranks) <= set(control.topology.peers)
        self._publishing: tuple[int, dist.Work] | None = None
        self._calls = threading.Lock()  # the pusher and the thread that adds share one library
        self._unmapped: list[int] = []
        self._uses_ring = False
        self._put = [0] * grid.node_size  # messages to each owner
        self._added = [0] * grid.node_size  # messages of each pusher that are enqueued for adding
        self._free = [0] * grid.node_size  # messages to each owner whose slot is free again
        self._landing_free = new_event()
        self._last_added = new_event()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._failure: BaseException | None = None

    def _check_peer_access(self) -> None:
        """Peers need not be mapped."""

    # -- memory ----------------------------------------------------------------------------------------

    def _check_memory(self, total: int) -> None:
        """The heap is reserved already; too small a one is told by the allocation."""
        logger.info("symmetric memory for windows: %.2f GiB of NVSHMEM's heap", total / 2**30)

    def _map(self, total: int) -> torch.Tensor:
        own = allocate_symmetric(self._library, total, self._device)
        for peer, pe in enumerate(self._pes):
            if peer == self.grid.local:
                self._memory.append(own)
            elif not self._ring.unmapped and self._library.bindings.ptr(own.data_ptr(), pe):
                self._memory.append(self._library.core.get_peer_tensor(own, pe))
            else:
                self._memory.append(None)
                self._unmapped.append(peer)
        if self._unmapped and not self._uses_ring:
            raise OdcError(
                f"NVSHMEM maps no memory of {self._name(self._unmapped[0])} here, though it did "
                "at first; please report it"
            )
        return own

    def _extra_nbytes(self) -> int:
        # Equal on all ranks: one that is not mapped anywhere makes all of them have rings.
        probe = allocate_symmetric(self._library, ALIGNMENT, self._device)
        others = (pe for pe in self._pes if pe != self.control.topology.rank)
        mapped = all(self._library.bindings.ptr(probe.data_ptr(), pe) for pe in others)
        flag = torch.tensor([float(self._ring.unmapped or not mapped)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        self._library.core.free_tensor(probe)
        self._uses_ring = bool(flag)
        return self._ring.nbytes(self.grid.node_size) if self._uses_ring else 0

    def _use_extra(self, own: torch.Tensor, offset: int) -> None:
        self._own = own
        if not self._uses_ring:
            return
        size, ring = self.grid.node_size, self._ring
        self._ring_words = own[offset:][: 3 * size * WORD_NBYTES].view(torch.int64).view(3, size)
        self._slots_at = offset + aligned(3 * size * WORD_NBYTES)
        outbox_at = self._slots_at + size * ring.slots * ring.slot_nbytes
        self._outbox = own[outbox_at:][: ring.slot_nbytes]
        self._landing = own[outbox_at + ring.slot_nbytes :][: ring.chunk_nbytes]

    def _warm_up(self) -> None:
        super()._warm_up()
        if self._unmapped:
            device = self._device
            warm = set[torch.dtype]()
            for window in self._windows:  # every kernel that the thread will need
                kind = window.spec.dtype
                if kind in _ACCUMULATORS and kind not in warm and window.local.numel():
                    warm.add(kind)
                    for dtype in _DTYPES:
                        self._add_message(window, 0, 0, torch.zeros(1, dtype=dtype, device=device))
            torch.cuda.synchronize(device)
            self._thread = threading.Thread(target=self._serve, name="odc-nvshmem", daemon=True)
            self._thread.start()

    # -- pulls -----------------------------------------------------------------------------------------

    def pull(self, window: Window, peer: int, node: int, out: torch.Tensor, offset: int = 0) -> None:
        if self._memory[peer] is not None:
            super().pull(window, peer, node, out, offset)
            return
        window.local[node].narrow(0, offset, out.numel())  # refuses what lies outside
        self._raise_status()
        source = self._at(window, node, offset)
        stream = torch.cuda.current_stream(self._device)
        target, step = out.view(torch.uint8), self._ring.chunk_nbytes
        for start in range(0, target.numel(), step):
            part = target[start : start + step]
            stream.wait_event(self._landing_free)
            with self._calls:
                self._library.bindings.getmem_on_stream(
                    self._landing.data_ptr(),
                    source + start,
                    part.numel(),
                    self._pes[peer],
                    stream.cuda_stream,
                )
            part.copy_(self._landing[: part.numel()], non_blocking=True)
            self._landing_free.record(stream)
        self._pull_streams.setdefault(stream.cuda_stream, stream)
        self.traffic.pulled(target.numel(), self._ranks[peer])

    def _at(self, window: Window, node: int, offset: int) -> int:
        """Symmetric address of an element: that of this rank's own."""
        row = node * window.spec.shape[1] + offset
        return self._own.data_ptr() + self._offsets[window.index] + row * window.spec.dtype.itemsize

    # -- pushes ----------------------------------------------------------------------------------------

    def push_add(self, window: Window, peer: int, node: int, source: torch.Tensor, offset: int = 0) -> float:
        if self._memory[peer] is not None:
            return super().push_add(window, peer, node, source, offset)
        self._raise_status()
        window.local[node].narrow(0, offset, source.numel())  # refuses what lies outside
        current = torch.cuda.current_stream(self._device)
        self._push_stream.wait_stream(current)
        source = source.contiguous()
        if source.dtype not in _DTYPES:
            source = source.float()
        step, waited = self._ring.chunk_nbytes // source.element_size(), 0.0
        with torch.cuda.stream(self._push_stream):
            for start in range(0, source.numel(), step):
                waited += self._wait_for_slot(peer)
                self._send(window, peer, node, source[start : start + step], offset + start)
        done = new_event()
        done.record(self._push_stream)
        self._lender.pushed(source, done)
        self.traffic.pushed(source.numel() * source.element_size(), self._ranks[peer])
        return waited

    def scatter_add(self, window: Window, source: torch.Tensor, offset: int = 0) -> float:
        if self._all_mapped:
            return super().scatter_add(window, source, offset)
        waited = 0.0
        for peer in self.grid.visits():
            for node, row in enumerate(self.grid.shards):
                waited += self.push_add(window, peer, node, source[row[peer]], offset)
        return waited

    def _wait_for_slot(self, peer: int) -> float:
        """Seconds until the owner has room for another message of this rank."""
        needed, waited = self._put[peer] + 1 - self._ring.slots, 0.0
        if self._free[peer] < needed:
            waited = self.control.wait_for_ranks(
                lambda: self._failure is not None or self._free[peer] >= needed,
                f"room for gradients in the ring of {self._name(peer)}",
                lambda: (self._ranks[peer],),
            )
            self._raise_status()
        return waited

    def _send(self, window: Window, peer: int, node: int, part: torch.Tensor, offset: int) -> None:
        """One message; the current stream is that of the pushes, and a slot is free."""
        stream = torch.cuda.current_stream(self._device)
        self._put[peer] += 1
        number = self._put[peer]
        header = [number, window.index, node, offset, part.numel(), _DTYPES.index(part.dtype), 0, 0]
        written = torch.tensor(header).pin_memory()
        content = part.view(torch.uint8)
        # The outbox is free: the put before has returned in the order of this stream.
        self._outbox[:HEADER_NBYTES].view(torch.int64).copy_(written, non_blocking=True)
        self._outbox[HEADER_NBYTES : HEADER_NBYTES + content.numel()].copy_(content, non_blocking=True)
        with self._calls:
            self._library.bindings.putmem_signal_on_stream(
                self._slot(self.grid.local, number).data_ptr(),
                self._outbox.data_ptr(),
                HEADER_NBYTES + content.numel(),
                self._ring_words[_PUT, self.grid.local :].data_ptr(),
                number,
                self._library.core.SignalOp.SIGNAL_SET,
                self._pes[peer],
                stream.cuda_stream,
            )

    def _slot(self, pusher: int, number: int) -> torch.Tensor:
        ring = self._ring
        index = pusher * ring.slots + (number - 1) % ring.slots
        return self._own[self._slots_at + index * ring.slot_nbytes :][: ring.slot_nbytes]

    def _tell(self, kind: int, peer: int, value: int, stream: torch.cuda.Stream, *, quiet: bool) -> None:
        """Store ``value`` into this rank's word of a peer that is not mapped, in the order of the stream."""
        self._store(self._ring_words[kind, self.grid.local :].data_ptr(), peer, value, stream, quiet=quiet)

    def _store(self, address: int, peer: int, value: int, stream: torch.cuda.Stream, *, quiet: bool) -> None:
        bindings = self._library.bindings
        with self._calls:
            if quiet:  # what was put before is there when the word is
                bindings.quiet_on_stream(stream.cuda_stream)
            bindings.signal_op_on_stream(
                address, value, self._library.core.SignalOp.SIGNAL_SET, self._pes[peer], stream.cuda_stream
            )

    def _signal(self, kind: int, value: int) -> None:
        super()._signal(kind, value)
        stream = torch.cuda.current_stream(self._device)
        address = self._own.data_ptr() + self._word_at(kind, self.grid.local)
        for peer in self._unmapped:
            self._store(address, peer, value, stream, quiet=True)

    # -- the owner's side --------------------------------------------------------------------------------

    def _serve(self) -> None:
        """The thread: adds what pushers have put, until :meth:`close`."""
        try:
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream(self._device, priority=0)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                seen = torch.zeros(2, self.grid.node_size, dtype=torch.int64, pin_memory=True)
                header = torch.zeros(HEADER_NBYTES // 8, dtype=torch.int64, pin_memory=True)
                nap_s = 0.0
                while not self._stop.is_set():
                    busy = self._take_all(stream, seen, header)
                    nap_s = 0.0 if busy else min(nap_s + 2e-5, _LONGEST_NAP_S)
                    time.sleep(nap_s)
        except BaseException as error:
            self._failure = error
            self.abort()

    def _take_all(self, stream: torch.cuda.Stream, seen: torch.Tensor, header: torch.Tensor) -> bool:
        seen.copy_(self._ring_words[: _FREED + 1], non_blocking=True)
        stream.synchronize()
        put, self._free = seen.tolist()
        found = False
        for pusher in self._unmapped:
            while self._added[pusher] < put[pusher] and not self._stop.is_set():
                self._take(pusher, stream, header)
                found = True
        return found

    def _take(self, pusher: int, stream: torch.cuda.Stream, header: torch.Tensor) -> None:
        number = self._added[pusher] + 1
        slot = self._slot(pusher, number)
        header.copy_(slot[:HEADER_NBYTES].view(torch.int64), non_blocking=True)
        stream.synchronize()
        told, index, node, offset, count, kind, *_ = header.tolist()
        if told != number:
            raise OdcError(f"message {number} of {self._name(pusher)} carries the number {told}")
        dtype = _DTYPES[kind]
        content = slot[HEADER_NBYTES:][: count * dtype.itemsize].view(dtype)
        self._add_message(self._windows[index], node, offset, content)
        self._tell(_FREED, pusher, number, stream, quiet=False)
        self._last_added.record(stream)
        self._added[pusher] = number

    def _add_message(self, window: Window, node: int, offset: int, content: torch.Tensor) -> None:
        shard = self.grid.shards[node][self.grid.local]
        count = content.numel()
        _kernels.add_message_kernel[(min(-(-count // _BLOCK), _ADDING_CTAS),)](
            self._addresses[window.index][shard : shard + 1],
            content,
            count,
            offset,
            element=element_of(window.spec.dtype),
            BLOCK=_BLOCK,
            num_warps=8,
        )

    def barrier(self, meeting: Meeting, number: int = 0) -> float:
        if not self._unmapped:
            return super().barrier(meeting, number)
        for peer in self._unmapped:
            self._tell(_SENT, peer, self._put[peer], self._push_stream, quiet=True)
        super().barrier(meeting, number)
        self._on_host(self._wait_until_added)
        return 0.0

    # -- hosts of several nodes --------------------------------------------------------------------------

    def _meet_hosts(self, meeting: Meeting, number: int) -> None:
        if not self._over_nodes:
            super()._meet_hosts(meeting, number)
            return
        mine = torch.tensor([make_tag(meeting, number)], dtype=torch.int64)
        tags = torch.zeros(self.grid.node_size, dtype=torch.int64)
        work = all_gather(tags, mine, group=self._group, async_op=True)
        self.control.wait_work(work, meeting.explain(number))
        self.control.compare_tags(dict(enumerate(tags.tolist())))

    def signal_published(self, epoch: int) -> None:
        super().signal_published(epoch)
        if self._over_nodes:  # flag B of all hosts at once: a rank that pulls needs every owner's
            work: dist.Work = dist.all_reduce(torch.zeros(1), group=self._group, async_op=True)
            self._publishing = epoch, work

    def _wait_for_epoch(self, peer: int, epoch: int) -> None:
        if not self._over_nodes:
            super()._wait_for_epoch(peer, epoch)
            return
        assert self._publishing is not None  # nobody pulls before it has published
        published, work = self._publishing
        if published < epoch:
            raise OdcError(f"{self._me()} pulls in epoch {epoch}, but has published {published} only")
        self.control.wait_work(work, f"parameters of epoch {epoch} of all ranks")

    def _name(self, peer: int) -> str:
        return self.control.describe_rank(self._ranks[peer])

    def _wait_until_added(self) -> None:
        """All messages that were sent before the barrier are added, in the order of the current stream."""
        stream = torch.cuda.current_stream(self._device)
        counts = torch.zeros(self.grid.node_size, dtype=torch.int64, pin_memory=True)
        counts.copy_(self._ring_words[_SENT], non_blocking=True)
        event = new_event()
        event.record(stream)
        unmapped = [self._ranks[peer] for peer in self._unmapped]
        self.control.wait_for_ranks(event.query, "the barrier on the GPU", lambda: unmapped)
        self._raise_status()
        self.control.wait_for_ranks(
            lambda: self._failure is not None or not self._missing(counts),
            "gradients that other ranks have pushed",
            lambda: [self._ranks[peer] for peer in self._missing(counts)],
        )
        self._raise_status()
        stream.wait_event(self._last_added)

    def _missing(self, counts: torch.Tensor) -> list[int]:
        return [peer for peer in self._unmapped if self._added[peer] < int(counts[peer])]

    def _raise_status(self) -> None:
        if self._failure is not None:
            raise OdcError(f"{self._me()}: adding what was pushed failed: {self._failure}") from self._failure
        super()._raise_status()

    def close(self, meeting: Meeting | None = Meeting.CLOSE) -> None:
        try:
            if meeting is not None and self._memory:
                self.barrier(meeting)
                torch.cuda.synchronize(self._device)
        finally:
            self._stop.set()
            if self._thread is not None:
                self._thread.join(_STOP_S)
        own = self._memory[self.grid.local] if self._memory else None
        if meeting is not None and self._memory:
            self._meet_hosts(meeting, 0)  # nobody's thread signals any more
        super().close(None)
        self._unmapped = []
        if own is not None and meeting is not None:
            with contextlib.suppress(Exception):  # the heap goes with the process in any case
                self._library.core.free_tensor(own)
