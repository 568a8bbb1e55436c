"""GPUs of one node that can address each other's memory: over NVLink, or PCIe where peer access is on.

Windows lie in torch's symmetric memory: each rank maps the windows of all others. A pull is a copy by the
copy engine and takes no multiprocessor. A push is one kernel for all owners that adds into their memory with
remote atomics; it runs on a low-priority stream of its own, beside the computation. No server, no staging.

Everything is enqueued; nothing inside a minibatch makes the host wait for a device. Flags and the barrier act
in the order of the streams: a kernel stores a number into a word of each peer's memory, another waits until
the words of this rank's memory have it. The hosts meet first, through the control block, so a device only
ever waits for work that its peers have enqueued already; that is where deadlines, deaths and diverging
programs are noticed and named. Should a device wait all the same, it polls an abort word in host memory and a
clock, and gives up with a status that the next call raises.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from odcengine.control import ControlBlock, Meeting
from odcengine.device import shares_gpus, unmapped_pair
from odcengine.errors import ConfigError, DeadlineError, OdcError, PeerError
from odcengine.transport._sources import PushSources
from odcengine.transport.base import Grid, Transport, Window, WindowPlan, WindowSpec
from odcengine.transport.heap import aligned

try:
    from odcengine.transport import _kernels
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise ConfigError(
        f"odc.transport: cuda_p2p needs Triton ({error}); pip install 'odcengine[cuda12]' (or cuda13)"
    ) from error

logger = logging.getLogger(__name__)

_PUBLISHED, _ARRIVED = 0, 1  # rows of words, one word a peer
_WORD = 8
_BLOCK, _WARPS = 2048, 8
_LINE, _LINES, _BULK_WARPS = 256, 32, 8  # measured: benchmarks/gpu.md
# Prime numbers, so that each program adds to all owners in turn. With 32 and 2 owners half of them would only
# add to this rank's own memory, be done long before the rest, and leave the link half used.
_PUSH_CTAS, _BULK_CTAS = 131, 31
_PUSHES_IN_FLIGHT = 2
_MOST_PARTS = 1 << 14  # views that are kept, so that a pull need not make them
_REASONS = {
    _kernels.ABORTED: "was given up because a rank failed",
    _kernels.TOO_LATE: "ran past its limit of {limit:g} s (odc.timeout_s)",
}
_ELEMENTS = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}


class CudaP2PTransport(Transport):
    """Windows in the memory of this node's GPUs; see :class:`Transport` for the contract.

    Pulls complete in the order of the current stream. Pushes complete in the order of a stream of the
    transport's own: their source may be freed at once, but written again only after ``barrier``.
    Take it from ``lend_source``, so that its memory does not wait for the host to look.

    Args:
        control: the node's control block.
        grid: owners of the shards.
        device: this rank's GPU; the current one.
        group: process group of the node's ranks, for the exchange of memory handles.

    Raises:
        ConfigError: a pair of GPUs cannot address each other's memory; names it.
    """

    name = "cuda_p2p"

    def __init__(
        self, control: ControlBlock, grid: Grid, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        super().__init__(control, grid)
        own = grid.shards[grid.node][grid.local]
        self._device = device
        self._group = group
        self._windows: list[Window] = []
        self._offsets: list[int] = []  # [window]: where it lies in every arena
        self._views: list[list[torch.Tensor | None]] = []  # [window][peer]: [M, n]; None: not mapped here
        self._addresses: list[torch.Tensor] = []  # [window]: int64 [W], where each shard's row lies
        self._sources: list[
            list[tuple[int, torch.Tensor]]
        ] = []  # [window]: others' shards, where all are mapped
        self._rank_of_sources = [rank for shard, rank in enumerate(self._rank_of_shard) if shard != own]
        # [window, offset, elements]: these of all shards
        self._parts: dict[tuple[int, int, int], list[tuple[int, torch.Tensor]]] = {}
        self._lines: dict[int, list[Any]] = {}  # [window]: all owners' rows, for bulk reductions
        self._compiled: dict[tuple[int, torch.dtype], Any] = {}
        self._bulk = torch.cuda.get_device_capability(device) >= (9, 0)
        self._memory: list[torch.Tensor | None] = []  # each peer's arena, where it is mapped here
        self._handle: Any = None
        self._seen_by_host = [-1] * grid.node_size
        self._seen_by_stream: dict[tuple[int, int], int] = {}
        self._all_seen_by_stream: dict[int, int] = {}
        self._pull_streams: dict[int, torch.cuda.Stream] = {}
        self._push_stream = torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]
        self._lender = PushSources(self._push_stream)
        # For each push in flight: its source is ready, it is added.
        self._pushes = deque((new_event(), new_event()) for _ in range(_PUSHES_IN_FLIGHT))
        self._barriers = 0
        self._passed = new_event()
        self._lanes = 1 << (grid.node_size - 1).bit_length()
        # Read and written by kernels while they run; pinned memory is mapped into the device's addresses.
        self._abort = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._status = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._status_now = self._status.numpy()  # the same memory, in a tenth of the time
        self._check_peer_access()
        control.failure_listeners.append(self.abort)

    def _check_peer_access(self) -> None:
        """Every pair that this process can see; a scheduler may show it its own GPU only."""
        pair = unmapped_pair(self._device.index, self.grid.node_size)
        if pair is not None:
            raise ConfigError(f"odc.transport: cuda_p2p: {pair}. Use linked GPUs, or odc.transport: nvshmem")

    def allocate(self, plan: WindowPlan) -> list[Window]:
        if self._windows:
            raise OdcError(f"{self.name} transport: windows are allocated once, in one plan")
        size = self.grid.node_size
        self._words_at = plan.total_nbytes
        extra_at = aligned(self._words_at + 2 * size * _WORD)
        total = extra_at + self._extra_nbytes()
        self._check_memory(total)
        own = self._map(total)
        self._all_mapped = len(self._mapped()) == size
        own.zero_()
        for spec, offset in zip(plan.specs, plan.offsets, strict=True):
            self._add_window(spec, offset)
        self._words = own[self._words_at :][: 2 * size * _WORD].view(torch.int64).view(2, size)
        self._remote_words = [
            torch.tensor(
                [arena.data_ptr() + self._word_at(kind, self.grid.local) for arena in self._mapped()],
                device=self._device,
            )
            for kind in (_PUBLISHED, _ARRIVED)
        ]
        self._use_extra(own, extra_at)
        torch.cuda.synchronize(self._device)  # zeros are there before any peer adds or signals
        self._meet_hosts(Meeting.ALLOCATE, 0)
        self._warm_up()
        return list(self._windows)

    def _add_window(self, spec: WindowSpec, offset: int) -> None:
        views: list[torch.Tensor | None] = [
            None if arena is None else arena[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)
            for arena in self._memory
        ]
        addresses = [0] * (self.grid.num_nodes * self.grid.node_size)
        for node, row in enumerate(self.grid.shards):
            for peer, shard in enumerate(row):
                arena = self._memory[peer]
                if arena is not None:
                    within = offset + node * spec.shape[1] * spec.dtype.itemsize
                    addresses[shard] = arena.data_ptr() + within
        own = views[self.grid.local]
        assert own is not None  # a rank's own memory is there
        self._sources.append(
            [
                (row[peer], view[node])
                for peer in self.grid.visits()
                for node, row in enumerate(self.grid.shards)
                if (view := views[peer]) is not None and (node, peer) != (self.grid.node, self.grid.local)
            ]
        )
        self._offsets.append(offset)
        self._views.append(views)
        self._addresses.append(torch.tensor(addresses, device=self._device))
        self._windows.append(Window(len(self._windows), spec, own))

    def _mapped(self) -> list[torch.Tensor]:
        return [arena for arena in self._memory if arena is not None]

    def _word_at(self, kind: int, index: int) -> int:
        """Offset of a word in every arena, in bytes."""
        return self._words_at + (kind * self.grid.node_size + index) * _WORD

    def _extra_nbytes(self) -> int:
        """Bytes that a subclass needs behind windows and words, equal on all ranks."""
        return 0

    def _use_extra(self, own: torch.Tensor, offset: int) -> None:
        """Where they lie: from ``offset`` of each arena on."""

    def _check_memory(self, total: int) -> None:
        free, size = torch.cuda.mem_get_info(self._device)
        logger.info("symmetric memory for windows: %.2f GiB on %s", total / 2**30, self._device)
        if total > free:
            host = self.control.topology.hosts[self.control.topology.rank]
            raise OdcError(
                f"host {host}, {self._device}: the windows need {total / 2**30:.2f} GiB of symmetric memory, "
                f"{free / 2**30:.2f} of {size / 2**30:.2f} GiB are free; use more GPUs or a smaller model"
            )

    def _map(self, total: int) -> torch.Tensor:
        """This rank's arena, and those of all peers in ``_memory``, by local index."""
        import torch.distributed._symmetric_memory as symmetric_memory

        if shares_gpus():
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        own = symmetric_memory.empty(total, dtype=torch.uint8, device=self._device)
        try:
            self._handle = symmetric_memory.rendezvous(own, self._group.group_name)
        except RuntimeError as error:
            raise OdcError(
                f"{self._me()}: torch's symmetric memory could not be mapped between the node's GPUs: {error}"
            ) from error
        for rank in self.control.topology.peers:
            index = dist.get_group_rank(self._group, rank)
            self._memory.append(self._handle.get_buffer(index, (total,), torch.uint8))
        self._memory[self.grid.local] = own
        return own

    def _warm_up(self) -> None:
        """Compile the kernels now, under the limits of the start, not inside the first minibatch."""
        self._signal(_ARRIVED, 0)
        self._wait_for(_ARRIVED, 0, self.grid.node_size, 0)
        torch.cuda.synchronize(self._device)

    # -- moving data -----------------------------------------------------------------------------------

    def pull(self, window: Window, peer: int, node: int, out: torch.Tensor, offset: int = 0) -> None:
        # narrow() refuses what lies outside; a slice would be cut short, and one element broadcast.
        view = self._views[window.index][peer]
        assert view is not None  # all are mapped, or a subclass takes another way
        out.copy_(view[node].narrow(0, offset, out.numel()), non_blocking=True)
        self._pulls_on(torch.cuda.current_stream(self._device))
        self.traffic.pulled(out.numel() * out.element_size(), self._ranks[peer])

    def _pulls_on(self, stream: torch.cuda.Stream) -> None:
        """Barrier A waits for these."""
        self._pull_streams.setdefault(stream.cuda_stream, stream)

    def gather(self, window: Window, out: torch.Tensor, epoch: int) -> float:
        if not self._all_mapped:
            return super().gather(window, out, epoch)
        # Once a layer and pass: what the host does here counts.
        stream = torch.cuda.current_stream(self._device)
        if self._all_seen_by_stream.get(stream.cuda_stream, -1) < epoch:
            for peer in self.grid.visits():
                self.wait_published(peer, epoch)
            self._all_seen_by_stream[stream.cuda_stream] = epoch
        self._copy_rows(self._sources[window.index], out, stream, self._rank_of_sources)
        return 0.0

    def _copy_rows(
        self,
        parts: Sequence[tuple[int, torch.Tensor]],
        out: torch.Tensor,
        stream: torch.cuda.Stream,
        holders: Sequence[int],
    ) -> None:
        """Copy (shard, its elements) to the rows of ``out``; ``stream`` is the current one."""
        rows = out.unbind(0)
        self._pulls_on(stream)
        for shard, source in parts:
            rows[shard].copy_(source, non_blocking=True)
        self.traffic.pulled(rows[0].numel() * rows[0].element_size(), *holders)

    def read_all(self, window: Window, out: torch.Tensor, offset: int = 0) -> None:
        if not self._all_mapped:
            super().read_all(window, out, offset)
            return
        key = (window.index, offset, out.shape[1])
        parts = self._parts.get(key)
        if parts is None:
            if len(self._parts) == _MOST_PARTS:
                self._parts.clear()
            parts = self._parts[key] = self._find_parts(*key)
        self._copy_rows(parts, out, torch.cuda.current_stream(self._device), self._rank_of_shard)

    def _find_parts(self, index: int, offset: int, numel: int) -> list[tuple[int, torch.Tensor]]:
        """Where the same elements of all shards lie; narrow() refuses what lies outside."""
        return [
            (row[peer], view[node].narrow(0, offset, numel))
            for peer in self.grid.visits()
            if (view := self._views[index][peer]) is not None  # all are mapped
            for node, row in enumerate(self.grid.shards)
        ]

    def push_add(self, window: Window, peer: int, node: int, source: torch.Tensor, offset: int = 0) -> float:
        self._push(window, source[None], offset, self.grid.shards[node][peer])
        return 0.0

    def scatter_add(self, window: Window, source: torch.Tensor, offset: int = 0) -> float:
        self._push(window, source, offset)
        return 0.0

    def _push(self, window: Window, rows: torch.Tensor, offset: int, shard: int | None = None) -> None:
        """Add ``rows`` to all shards, or one row to one shard."""
        numel, length = rows.shape[1], window.spec.shape[1]
        if not 0 <= offset <= offset + numel <= length:
            raise ValueError(
                f"{window.spec.name}: elements {offset} to {offset + numel} of a row of {length} do not exist"
            )
        if window.spec.dtype not in _ELEMENTS:
            raise ValueError(f"{window.spec.name}: cannot add into {window.spec.dtype} on a GPU")
        self._raise_status()
        if not numel:
            return
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        current = torch.cuda.current_stream(self._device)
        ready, done = self._pushes[0]
        self._pushes.rotate(-1)
        if not self._lender.holds(rows):
            # Who takes memory in the order of the current stream keeps that of a few pushes, no more.
            current.wait_event(done)
        ready.record(current)
        self._push_stream.wait_event(ready)
        if shard is None and self._goes_in_bulk(window, rows):
            self._add_in_bulk(window, rows)
        else:
            self._add(window, rows, offset, shard)
        done.record(self._push_stream)
        self._lender.pushed(rows, done)
        holders = self._rank_of_shard if shard is None else (self._rank_of_shard[shard],)
        self.traffic.pushed(numel * rows.element_size(), *holders)

    def _add(self, window: Window, rows: torch.Tensor, offset: int, shard: int | None) -> None:
        addresses = self._addresses[window.index]
        count, numel = rows.shape
        with torch.cuda.stream(self._push_stream):
            _kernels.scatter_add_kernel[(min(-(-numel // _BLOCK) * count, _PUSH_CTAS),)](
                addresses if shard is None else addresses[shard : shard + 1],
                rows,
                rows.stride(0),
                numel,
                count,
                offset,
                self.control.topology.rank % count,
                element=element_of(window.spec.dtype),
                BLOCK=_BLOCK,
                num_warps=_WARPS,
            )

    def _goes_in_bulk(self, window: Window, rows: torch.Tensor) -> bool:
        """Whole 16-bit rows into float32: there bulk reductions are the better way."""
        count, numel = rows.shape
        return (
            self._bulk
            and self._all_mapped
            and count == len(self._views[window.index]) <= _kernels.MAX_BULK_ROWS
            and rows.element_size() == 2
            and window.spec.dtype == torch.float32
            and numel == window.spec.shape[1] >= _LINE * _LINES
            and numel % 8 == 0
            and rows.stride(0) == numel
            and rows.data_ptr() % 16 == 0
        )

    def _add_in_bulk(self, window: Window, rows: torch.Tensor) -> None:
        numel, grid = rows.shape[1], (_BULK_CTAS, 1, 1)
        lines = self._lines.get(window.index)
        if lines is None:
            lines = self._lines[window.index] = self._describe_lines(window)
        arguments = (
            *lines,
            self._addresses[window.index],
            rows,
            numel,
            self.control.topology.rank % len(rows),
            len(rows),
            _LINE,
            _LINES,
        )
        # Triton's own launch looks at every argument again; a compiled kernel of this window takes them as
        # they are, in three fifths of the time.
        key = (window.index, rows.dtype)
        compiled = self._compiled.get(key)
        if compiled is None:
            with torch.cuda.stream(self._push_stream):
                launch = _kernels.bulk_add_kernel[grid]
                self._compiled[key] = launch(*arguments, num_warps=_BULK_WARPS)
        else:
            compiled[grid](*arguments, stream=self._push_stream.cuda_stream)

    def _describe_lines(self, window: Window) -> list[Any]:
        """The owners' rows as whole lines, in the order of shards; None where fewer are needed."""
        height = window.spec.shape[1] // _LINE
        lines: dict[int, Any] = {}
        for peer, view in enumerate(self._views[window.index]):
            assert view is not None  # see _goes_in_bulk
            matrix = view[0, : height * _LINE].view(height, _LINE)
            lines[self.grid.shards[0][peer]] = _kernels.TensorDescriptor.from_tensor(matrix, [_LINES, _LINE])
        ordered = [lines[shard] for shard in sorted(lines)]
        # Each launch encodes every descriptor that it gets anew.
        return ordered + [None] * (_kernels.MAX_BULK_ROWS - len(ordered))

    def lend_source(
        self, size: Sequence[int | torch.SymInt], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self._lender.lend(size, dtype, device)

    def reclaim_sources(self) -> None:
        self._lender.reclaim()

    # -- flags and the barrier ---------------------------------------------------------------------------

    def signal_published(self, epoch: int) -> None:
        self._raise_status()
        self._signal(_PUBLISHED, epoch + 1)
        self.control.set_epoch(epoch)

    def wait_published(self, peer: int, epoch: int) -> float:
        if self._seen_by_host[peer] < epoch:
            self._on_host(lambda: self._wait_for_epoch(peer, epoch))
            self._seen_by_host[peer] = epoch
        key = (torch.cuda.current_stream(self._device).cuda_stream, peer)
        if self._seen_by_stream.get(key, -1) < epoch:
            self._wait_for(_PUBLISHED, peer, 1, epoch + 1)
            self._seen_by_stream[key] = epoch
        return 0.0

    def barrier(self, meeting: Meeting, number: int = 0) -> float:
        self._raise_status()
        current = torch.cuda.current_stream(self._device)
        # Barriers on different streams (in lock-step) come one after the other, as their numbers do.
        current.wait_event(self._passed)
        current.wait_stream(self._push_stream)
        for stream in self._pull_streams.values():
            if stream != current:
                current.wait_stream(stream)
        self._pull_streams.clear()
        self._lender.reclaim()  # the stream waits for all pushes anyway
        self._barriers += 1
        self._signal(_ARRIVED, self._barriers)
        self._on_host(lambda: self._meet_hosts(meeting, number))
        self._wait_for(_ARRIVED, 0, self.grid.node_size, self._barriers)
        self._passed.record(current)
        return 0.0

    def _meet_hosts(self, meeting: Meeting, number: int) -> None:
        """The hosts of all ranks that share windows meet."""
        self.control.barrier(meeting, number)

    def _wait_for_epoch(self, peer: int, epoch: int) -> None:
        """The host waits until a peer's host has raised flag B."""
        self.control.wait_epoch(peer, epoch)

    def _me(self) -> str:
        return self.control.describe_rank(self.control.topology.rank)

    def _on_host(self, wait: Any) -> None:
        try:
            wait()
        except BaseException:
            self.abort()
            raise

    def _signal(self, kind: int, value: int) -> None:
        addresses = self._remote_words[kind]
        _kernels.signal_kernel[(1,)](addresses, value, len(addresses), LANES=self._lanes, num_warps=1)

    def _wait_for(self, kind: int, first: int, count: int, value: int) -> None:
        limit_ns = int(self.control.timeout_s * 1e9)
        _kernels.wait_kernel[(1,)](
            self._words[kind, first:],
            value,
            count,
            self._abort,
            self._status,
            limit_ns,
            LANES=self._lanes,
            num_warps=1,
        )

    def abort(self) -> None:
        """End every wait on the device, after a failure."""
        self._abort.fill_(1)

    def _raise_status(self) -> None:
        state = int(self._status_now[0])
        if state:
            self.control.check()  # a rank that failed says why
            reason = _REASONS[state].format(limit=self.control.timeout_s)
            kind = DeadlineError if state == _kernels.TOO_LATE else PeerError
            raise kind(f"{self._me()}: a wait on {self._device} {reason}")

    def close(self, meeting: Meeting | None = Meeting.CLOSE) -> None:
        if meeting is None:
            self.abort()
        elif self._memory:
            self.barrier(meeting)
            torch.cuda.synchronize(self._device)
        if self.abort in self.control.failure_listeners:
            self.control.failure_listeners.remove(self.abort)
        self._windows.clear()
        self._views.clear()
        self._sources.clear()
        self._addresses.clear()
        self._parts.clear()
        self._lines.clear()
        self._compiled.clear()
        self._memory.clear()
        self._handle = None


def new_event() -> torch.cuda.Event:
    """An event that takes no times."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def element_of(dtype: torch.dtype) -> Any:
    """A dtype as Triton names it."""
    return getattr(_kernels.tl, _ELEMENTS[dtype])
