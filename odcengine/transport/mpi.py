"""CPU ranks of any hosts through MPI's one-sided operations (mpi4py, passive target).

Each rank's windows are one window of MPI's. A pull is a get of bytes. A push is an accumulate in the window's
dtype, cast by the pusher, since MPI knows no bfloat16; the owner reads or zeroes its accumulator only after a
barrier. Flags and the barrier are small messages to each peer, so that a deadline can name who has not come.

Nothing waits inside of MPI: operations return requests that are tested, and the few calls that do wait run in
a thread which the caller watches (``Mpi.call``). Some MPIs serve a get only when the owner enters MPI by
itself (Open MPI over TCP, for example). There a helper thread enters it all the time while a window is open.
The start proves that an owner is served while it computes, and stops the job where it is not.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import time
import weakref
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from odcengine._hang import DEADLINE_EXIT_CODE
from odcengine._meetings import make_tag
from odcengine._memory import available_memory
from odcengine.control import ControlBlock, Meeting
from odcengine.errors import ConfigError, DeadlineError, OdcError
from odcengine.transport._mpi_progress import ProgressTrial
from odcengine.transport._mpi_start import IDLE_NAP_S, NAP_S, Mpi, window_error
from odcengine.transport.base import Grid, Transport, Window, WindowPlan
from odcengine.transport.heap import ALIGNMENT, aligned

logger = logging.getLogger(__name__)

_PUBLISHED, _MET = 0, 1  # kinds of messages
_TAG = 7
_LARGEST = 1 << 28  # bytes of one operation: MPI counts in 32 bits
_SPINS = 20
_ALSO_REFUSED_S = 3.0  # by MPI itself, after another rank was
_PROBE_NBYTES = 128 << 10  # above the size that MPI sends without asking the other side
_LOOPS_S = (0.02, 0.1, 0.4, 1.6, 1.6)  # a busy machine may hold up the owner in one or another


@dataclass(frozen=True)
class _Transfer:
    """An operation on its way; MPI reads or writes ``memory`` until it is done."""

    request: Any
    rank: int
    memory: Any


class MpiTransport(Transport):
    """Windows of MPI; see :class:`Transport` for the contract.

    Args:
        control: the control block of this rank's node; the grid's peers may be on other nodes.
        grid: owners of the shards.
        mpi: the running MPI; its ranks are the job's.
    """

    def __init__(self, control: ControlBlock, grid: Grid, mpi: Mpi) -> None:
        super().__init__(control, grid)
        self._mpi = mpi
        self._others = [rank for rank in self._ranks if rank != control.topology.rank]
        self._windows: list[Window] = []
        self._offsets: list[int] = []
        self._comm: Any = None
        self._window: Any = None  # of MPI
        self._arena: weakref.ref[Any] | None = None
        self._shifts = [0] * grid.node_size  # from where MPI's memory of a peer starts to where it is aligned
        self._published = [-1] * grid.node_size
        self._seen = [-1] * grid.node_size  # the same, and memory is in step
        self._met = [0] * grid.node_size
        self._values = [[0] * grid.node_size, [0] * grid.node_size]  # of meetings with even and odd numbers
        self._meetings = 0
        self._inbox = array("q", [0, 0, 0])
        self._outbox: deque[tuple[Any, Any]] = deque()
        self._in_flight: list[list[_Transfer]] = []
        self._pushed = False
        self._failure: Exception | None = None  # of the helper thread

    # -- memory ----------------------------------------------------------------------------------------

    def allocate(self, plan: WindowPlan) -> list[Window]:
        if self._comm is not None:
            raise OdcError("mpi transport: windows are allocated once, in one plan")
        self._check_memory(plan)
        mpi, size = self._mpi.module, plan.total_nbytes + _PROBE_NBYTES + ALIGNMENT
        what = Meeting.ALLOCATE.explain(0)
        members = mpi.COMM_WORLD.Get_group().Incl(list(self._ranks))
        self._comm = self._call(lambda: mpi.COMM_WORLD.Create_group(members, _TAG), what)
        self._window = self._make_window(size, what)
        if self._window.Get_attr(mpi.WIN_MODEL) != mpi.WIN_UNIFIED:
            raise OdcError(f"{self._mpi.version} keeps public and private copies of windows; not supported")
        self._call(lambda: self._window.Lock_all(mpi.MODE_NOCHECK), what)
        memory = self._window.tomemory()
        shift = -memory.address % ALIGNMENT
        # Held by every tensor that is a view of it, which a weak reference can tell.
        kind: Any = type("Arena", (ctypes.c_ubyte * (size - ALIGNMENT),), {})
        holder = kind.from_address(memory.address + shift)
        self._arena = weakref.ref(holder)
        arena = torch.frombuffer(holder, dtype=torch.uint8)
        arena.zero_()
        for spec, offset in zip(plan.specs, plan.offsets, strict=True):
            local = arena[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)
            self._windows.append(Window(len(self._windows), spec, local))
            self._offsets.append(offset)
        self._synchronize()
        _, self._shifts = self._exchange(shift, what)
        self._call(self._touch_all, what)
        self._prove_progress(aligned(plan.total_nbytes))
        self.barrier(Meeting.ALLOCATE)
        return list(self._windows)

    def _make_window(self, size: int, what: str) -> Any:
        """MPI's window; nodes of one machine come one after the other.

        Open MPI 4 names the file behind a window by the communicator's number, which is the same in groups
        that have no rank in common: two that make theirs at one time on one machine get in each other's way.
        """
        mpi, machines = self._mpi.module, self.control.topology.machines
        of_nodes = [machines[row[0]] for row in self.grid.shards]
        turns = [of_nodes[:node].count(machine) for node, machine in enumerate(of_nodes)]
        made = None
        for turn in range(max(turns) + 1):
            if turn > 0:
                self._meet_all(what)
            if turn == turns[self.grid.node]:
                try:
                    # What one rank is refused all are, within moments: each tells its own reason.
                    made = self._wait_in(
                        lambda: mpi.Win.Allocate(size, 1, comm=self._comm), what, late_s=_ALSO_REFUSED_S
                    )
                except mpi.Exception as error:
                    raise window_error(self._mpi, error) from error
        return made

    def _touch_all(self) -> None:
        """Get a byte of every peer: MPI's first operation on a peer may wait for it inside of the call."""
        mpi, landing = self._mpi.module, bytearray(self.grid.node_size)
        requests = [
            self._window.Rget([memoryview(landing)[peer:], 1, mpi.BYTE], peer, [0, 1, mpi.BYTE])
            for peer in self.grid.visits()
        ]
        mpi.Request.Waitall(requests)

    def _meet_all(self, what: str) -> None:
        """Meet the ranks of all nodes."""
        with self._entered() as mpi:
            request = mpi.COMM_WORLD.Ibarrier()

        def done() -> bool:
            with self._entered():
                return bool(request.Test())

        self.control.wait_until(done, what, list, everyone=True)

    def _check_memory(self, plan: WindowPlan) -> None:
        topology = self.control.topology
        here = sum(topology.machines[rank] == topology.machines[topology.rank] for rank in self._ranks)
        needed, available = plan.total_nbytes * here, available_memory()
        if needed > available:
            raise OdcError(
                f"host {topology.hosts[topology.rank]}: the windows of {here} ranks need "
                f"{needed / 2**30:.2f} GiB, {available / 2**30:.2f} GiB are available; use more hosts, a "
                "smaller model or `odc.sharding: full`"
            )

    # -- moving data -----------------------------------------------------------------------------------

    def pull(self, window: Window, peer: int, node: int, out: torch.Tensor, offset: int = 0) -> None:
        with self._transfers() as transfers:
            self._start_pull(transfers, window, peer, node, out, offset)

    def gather(self, window: Window, out: torch.Tensor, epoch: int) -> float:
        waited = 0.0
        own = self.grid.shards[self.grid.node][self.grid.local]
        with self._transfers() as transfers:
            for peer in self.grid.visits():
                waited += self.wait_published(peer, epoch)
                for node, row in enumerate(self.grid.shards):
                    if row[peer] != own:
                        self._start_pull(transfers, window, peer, node, out[row[peer]], 0)
        return waited

    def push_add(self, window: Window, peer: int, node: int, source: torch.Tensor, offset: int = 0) -> float:
        with self._transfers() as transfers:
            self._start_push(transfers, window, peer, node, source, offset)
        return 0.0

    def scatter_add(self, window: Window, source: torch.Tensor, offset: int = 0) -> float:
        with self._transfers() as transfers:
            for peer in self.grid.visits():
                for node, row in enumerate(self.grid.shards):
                    self._start_push(transfers, window, peer, node, source[row[peer]], offset)
        return 0.0

    def _start_pull(
        self,
        transfers: list[_Transfer],
        window: Window,
        peer: int,
        node: int,
        out: torch.Tensor,
        offset: int,
    ) -> None:
        row = window.local[node].narrow(0, offset, out.numel())  # refuses what lies outside
        if peer == self.grid.local:
            out.copy_(row)
        elif out.numel():
            with self._entered() as mpi:
                for start, part in _parts(out.view(torch.uint8)):
                    memory = _memory(mpi, part)
                    at = self._at(window, peer, node, offset) + start
                    spec = [memory, len(memory), mpi.BYTE]
                    request = self._window.Rget(spec, peer, [at, len(memory), mpi.BYTE])
                    transfers.append(_Transfer(request, self._ranks[peer], out))
        self.traffic.pulled(out.numel() * out.element_size(), self._ranks[peer])

    def _start_push(
        self,
        transfers: list[_Transfer],
        window: Window,
        peer: int,
        node: int,
        source: torch.Tensor,
        offset: int,
    ) -> None:
        window.local[node].narrow(0, offset, source.numel())  # refuses what lies outside
        dtype = window.spec.dtype
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{window.spec.name}: MPI cannot add into {dtype}")
        # This rank's own part too: only MPI's additions are atomic with respect to the others'.
        source = source.detach().to(dtype).contiguous()
        if source.numel():
            self._pushed = True
            with self._entered() as mpi:
                element = mpi.FLOAT if dtype == torch.float32 else mpi.DOUBLE
                for start, part in _parts(source):
                    memory, count = _memory(mpi, part), part.numel()
                    at = self._at(window, peer, node, offset + start)
                    request = self._window.Raccumulate(
                        [memory, count, element], peer, [at, count, element], op=mpi.SUM
                    )
                    transfers.append(_Transfer(request, self._ranks[peer], source))
        self.traffic.pushed(source.numel() * source.element_size(), self._ranks[peer])

    def _at(self, window: Window, peer: int, node: int, offset: int) -> int:
        """Displacement of an element in a peer's window, in bytes."""
        row = node * window.spec.shape[1] + offset
        return self._shifts[peer] + self._offsets[window.index] + row * window.spec.dtype.itemsize

    @contextlib.contextmanager
    def _transfers(self) -> Iterator[list[_Transfer]]:
        """Takes operations, and waits at its end until all are done."""
        left: list[_Transfer] = []
        self._in_flight.append(left)  # stays there after a failure: MPI may still write to that memory
        try:
            yield left
        finally:
            if not left:
                self._in_flight.remove(left)
        if not left:
            return

        def done() -> bool:
            with self._entered():
                left[:] = [transfer for transfer in left if not transfer.request.Test()]
            return not left

        if not any(done() for _ in range(_SPINS)):
            self.control.wait_for_ranks(
                done,
                "data on its way",
                lambda: sorted({transfer.rank for transfer in left}),
                idle=False,
            )
        self._in_flight.remove(left)

    # -- flags and the barrier ---------------------------------------------------------------------------

    def signal_published(self, epoch: int) -> None:
        self._synchronize()
        self._tell(_PUBLISHED, epoch, 0)
        self.control.beat()

    def wait_published(self, peer: int, epoch: int) -> float:
        if self._seen[peer] >= epoch:
            return 0.0
        rank = self._ranks[peer]
        waited = self.control.wait_for_ranks(
            lambda: self._published[peer] >= epoch or (self._looked() and self._published[peer] >= epoch),
            f"parameters of epoch {epoch} of {self.control.describe_rank(rank)}",
            lambda: [rank],
        )
        self._synchronize()
        self._seen[peer] = epoch
        return waited

    def barrier(self, meeting: Meeting, number: int = 0) -> float:
        self.control.beat()
        waited = 0.0
        if self._pushed:
            # A push that is done has left this rank; now it has to arrive.
            start = time.perf_counter()
            self._call(self._window.Flush_all, "its gradients to reach their owners")
            waited = time.perf_counter() - start
            self._pushed = False
        self._synchronize()
        seconds, tags = self._exchange(make_tag(meeting, number), meeting.explain(number))
        self.control.compare_tags(dict(zip(self._ranks, tags, strict=True)))
        return waited + seconds

    def _exchange(self, value: int, what: str) -> tuple[float, list[int]]:
        """Meet all peers; returns seconds waited and the number that each has brought, by local index."""
        self._meetings += 1
        number = self._meetings
        self._tell(_MET, number, value)

        def missing() -> list[int]:
            return [rank for rank, met in zip(self._ranks, self._met, strict=True) if met < number]

        waited = self.control.wait_for_ranks(
            lambda: self._looked() and not self._outbox and not missing(), what, missing
        )
        self._synchronize()
        # A peer can be one meeting ahead, never two: hence two rows.
        return waited, list(self._values[number % 2])

    def _tell(self, kind: int, number: int, value: int) -> None:
        """Send a message to all peers, in the order of sending."""
        message = array("q", [kind, number, value])
        with self._entered() as mpi:
            self._take(self.grid.local, message)
            for peer in self.grid.visits():
                if peer != self.grid.local:
                    request = self._comm.Isend([message, 3, mpi.INT64_T], peer, _TAG)
                    self._outbox.append((request, message))

    def _take(self, peer: int, message: Sequence[int]) -> None:
        kind, number, value = message
        if kind == _PUBLISHED:
            self._published[peer] = number
        else:
            self._values[number % 2][peer] = value
            self._met[peer] = number

    def _looked(self) -> bool:
        """Take the messages that have come; always True."""
        with self._entered():
            self._poll()
        return True

    def _poll(self) -> None:
        mpi = self._mpi.module
        status = mpi.Status()
        while self._comm.Iprobe(mpi.ANY_SOURCE, _TAG, status):
            peer = status.Get_source()
            self._comm.Recv([self._inbox, 3, mpi.INT64_T], peer, _TAG)
            self._take(peer, self._inbox)
        while self._outbox and self._outbox[0][0].Test():
            self._outbox.popleft()

    def _serve(self) -> None:
        """What the helper thread does."""
        if self._failure is None:
            try:
                self._poll()
            except self._mpi.module.Exception as error:
                self._failure = error

    def _watch(self, seconds: float) -> None:
        """End the process where a call of MPI keeps it for too long, or after another rank has failed."""
        try:
            self.control.check()
            if seconds > self.control.timeout_s:
                me = self.control.describe_rank(self.control.topology.rank)
                raise DeadlineError(
                    f"{me}: a call of {self._mpi.version} that should not wait has not returned for "
                    f"{seconds:.1f} s (odc.timeout_s)"
                )
        except OdcError as error:
            logger.critical("%s; this process cannot leave MPI, and ends here", error)
            self.control.fail(error)
            os._exit(DEADLINE_EXIT_CODE if isinstance(error, DeadlineError) else 1)

    def _synchronize(self) -> None:
        """Own stores are seen by others' operations from here on, and theirs by own loads."""
        with self._entered():
            self._window.Sync()

    # -- entering MPI --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def mpi(self) -> Iterator[Any]:
        """``mpi4py.MPI`` for calls of the script's own: no other thread is in MPI inside of this block.

        A call in it that takes longer than ``odc.timeout_s`` ends the process.
        """
        with self._mpi.entered(self.control) as mpi:
            yield mpi

    @contextlib.contextmanager
    def _entered(self) -> Iterator[Any]:
        try:
            if self._failure is not None:
                raise self._failure
            with self._mpi.entered(self.control) as mpi:
                yield mpi
        except self._mpi.module.Exception as error:
            self.control.raise_cause(error, self._mpi.version)

    def _call(self, function: Any, what: str) -> Any:
        """A call that waits for other ranks; returns what it returns."""
        try:
            return self._wait_in(function, what)
        except self._mpi.module.Exception as error:
            self.control.raise_cause(error, self._mpi.version)

    def _wait_in(self, function: Any, what: str, *, late_s: float = 0.0) -> Any:
        return self._mpi.call(function, what, self.control, lambda: self._others, late_s=late_s)

    # -- progress ----------------------------------------------------------------------------------------

    def _prove_progress(self, offset: int) -> None:
        """Find out whether a rank is served while it computes, and see to it that it is."""
        nodes = [
            [self._ranks.index(rank) for rank in ranks if rank in self._ranks]
            for ranks in self.control.topology.nodes
        ]
        trial = ProgressTrial(
            self.grid.local,
            nodes,
            meet=lambda value: self._exchange(value, Meeting.ALLOCATE.explain(0))[1],
            get=lambda peer: self._get_probe(peer, offset),
        )
        with self._mpi.without_helper():
            alone = trial.is_served(_LOOPS_S[0])
        self._mpi.serve(self._serve, IDLE_NAP_S if alone else NAP_S, self._watch)
        if not alone and not any(trial.is_served(loop_s) for loop_s in _LOOPS_S):
            raise ConfigError(
                f"odc.transport: mpi: {self._mpi.version} serves no one-sided operation while the owner "
                "computes, not even with a helper thread in MPI, so every pull would wait for the owner. Set "
                "its own progress thread (MPICH_ASYNC_PROGRESS=1, I_MPI_ASYNC_PROGRESS=1), or another "
                "component of Open MPI (mpirun --mca osc pt2pt, or rdma, ucx)"
            )
        if self.control.topology.rank == 0:
            how = "alone" if alone else "by a helper thread that enters MPI about every 0.1 ms"
            logger.info("%s makes progress %s", self._mpi.version, how)

    def _get_probe(self, peer: int, offset: int) -> None:
        """Get what lies behind the windows of a peer."""
        landing = torch.empty(_PROBE_NBYTES - ALIGNMENT, dtype=torch.uint8)
        with self._transfers() as transfers, self._entered() as mpi:
            memory = _memory(mpi, landing)
            at = [self._shifts[peer] + offset, len(memory), mpi.BYTE]
            transfers.append(_Transfer(self._window.Rget(memory, peer, at), self._ranks[peer], landing))

    # -- the end -----------------------------------------------------------------------------------------

    def close(self, meeting: Meeting | None = Meeting.CLOSE) -> None:
        if self._comm is None:
            return
        if meeting is None:
            self._mpi.stop_serving(self._serve)
            self._mpi.kept.append(self)
            self._mpi.closed(well=False)
            return
        self.barrier(meeting)
        self._windows.clear()
        _, holding = self._exchange(self._is_viewed(), meeting.explain(0))
        self._mpi.stop_serving(self._serve)
        if any(holding):  # MPI takes the memory away, whoever looks at it
            logger.warning("close(): views of windows are still in use; their memory stays until the end")
            self._mpi.kept.append(self)
        else:
            self._call(self._free, meeting.explain(0))
        self._mpi.closed(well=True)
        self.control.barrier(meeting)  # who leaves first would be missed by those that are still in MPI

    def _is_viewed(self) -> bool:
        """Whether a tensor still looks at this rank's windows."""
        if self._arena is not None and self._arena() is not None:
            gc.collect()
        return self._arena is not None and self._arena() is not None

    def _free(self) -> None:
        self._window.Unlock_all()
        self._window.Free()
        self._comm.Free()


def _memory(mpi: Any, tensor: torch.Tensor) -> Any:
    return mpi.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _parts(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Pieces that MPI can count, with their first elements."""
    step = _LARGEST // tensor.element_size()
    for start in range(0, tensor.numel(), step):
        yield start, tensor[start : start + step]
