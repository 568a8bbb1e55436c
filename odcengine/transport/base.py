"""The contract of a transport: windows that other ranks read from and add into, without their help.

Terms. A *window* is memory of one size on every rank of a node, addressed ``[M, n]``: M nodes, n elements.
The window of local rank ``l`` holds, for each node ``m``, what belongs to the rank with local index ``l`` of
node ``m``; on one node M is 1 and a window holds only its owner's shard. *Shard* ``r`` is the part of a group
of parameters that rank ``r`` owns. Peers are named by their local index, 0 to G - 1.

Ordering rules that callers rely on, for every transport:

1. After ``barrier`` returns, every push that any rank of the node issued before it is in its owner's window
   and visible to the owner, and every pull issued before it has completed.
2. A pull that follows ``wait_published(peer, epoch)`` sees what the peer wrote into its own window before
   its ``signal_published(epoch)``.
3. Pushes from any number of ranks into the same elements add up exactly once each, in any order. A push, too,
   may only follow ``wait_published(owner, epoch)``: until then the owner may be emptying its accumulator.
4. The owner may read or write its own window only where no rank can pull from or push into it: parameters
   between ``barrier`` and ``signal_published``, accumulators between ``barrier`` and the next
   ``signal_published``.

Each wait has a deadline and raises :class:`odcengine.errors.PeerError` with the rank to blame.
"""

from __future__ import annotations

import abc
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from odcengine.control import ControlBlock, Meeting
from odcengine.topology import Topology
from odcengine.transport.heap import ALIGNMENT, aligned


@dataclass(frozen=True)
class WindowSpec:
    """One window, before it is allocated.

    Attributes:
        name: for messages and memory reports.
        shape: (M, n): number of nodes, elements a node.
        dtype: element type; ``torch.uint8`` for windows of bytes.
    """

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes on one rank, without alignment."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WindowPlan:
    """Where each window lies in the memory of a rank; computable before anything is allocated.

    Attributes:
        specs: the windows, in an order equal on all ranks.
        offsets: byte offset of each.
        total_nbytes: size in bytes of the memory of one rank.
    """

    specs: tuple[WindowSpec, ...]
    offsets: tuple[int, ...]
    total_nbytes: int

    @classmethod
    def of(cls, specs: Sequence[WindowSpec]) -> WindowPlan:
        """Lay the windows out one after the other, each aligned to :data:`ALIGNMENT`."""
        offsets, end = [], 0
        for spec in specs:
            offsets.append(end)
            end += aligned(spec.nbytes)
        return cls(tuple(specs), tuple(offsets), max(end, ALIGNMENT))


@dataclass(frozen=True)
class Window:
    """An allocated window.

    Attributes:
        index: position in the plan, equal on all ranks.
        spec: what was asked for.
        local: this rank's own part, ``[M, n]``; see rule 4 for when it may be touched.
    """

    index: int
    spec: WindowSpec
    local: torch.Tensor


@dataclass(frozen=True)
class Grid:
    """Which rank owns which shard.

    Attributes:
        shards: ``shards[m][l]``: the shard (global rank) of node m's local rank l; M rows of G each.
        node: this rank's row.
        local: this rank's column.
    """

    shards: tuple[tuple[int, ...], ...]
    node: int
    local: int

    @classmethod
    def of(cls, topology: Topology) -> Grid:
        """The grid of a topology with even nodes."""
        return cls(topology.nodes, topology.node, topology.local_rank)

    @property
    def num_nodes(self) -> int:
        """M."""
        return len(self.shards)

    @property
    def node_size(self) -> int:
        """G."""
        return len(self.shards[0])

    @property
    def column(self) -> tuple[int, ...]:
        """Global ranks with this rank's local index, one a node; they exchange data between minibatches."""
        return tuple(row[self.local] for row in self.shards)

    def visits(self) -> Iterator[int]:
        """Local indices of all peers, this rank's own first, so that no two ranks start at one owner."""
        for step in range(self.node_size):
            yield (self.local + step) % self.node_size


Range = tuple[int, int]
"""First element in a row of a window, and the one after the last."""


@dataclass
class Traffic:
    """What this rank moved since the counters were last reset, in bytes and calls.

    Attributes:
        pulled_bytes, pushed_bytes: this rank's own shard included where it goes the same way.
        num_pulls, num_pushes: calls, or rows of calls for all shards.
        bytes_of_rank: both by the global rank that was pulled from or pushed to.
    """

    pulled_bytes: int = 0
    pushed_bytes: int = 0
    num_pulls: int = 0
    num_pushes: int = 0
    bytes_of_rank: Counter[int] = field(default_factory=Counter)

    def pulled(self, nbytes: int, *ranks: int) -> None:
        """Count ``nbytes`` pulled from each of these global ranks."""
        self.num_pulls += len(ranks)
        self.pulled_bytes += len(ranks) * nbytes
        for rank in ranks:
            self.bytes_of_rank[rank] += nbytes

    def pushed(self, nbytes: int, *ranks: int) -> None:
        """Count ``nbytes`` pushed to each of these global ranks."""
        self.num_pushes += len(ranks)
        self.pushed_bytes += len(ranks) * nbytes
        for rank in ranks:
            self.bytes_of_rank[rank] += nbytes


class Transport(abc.ABC):
    """One-sided communication between the ranks of a node; one instance serves one engine.

    Args:
        control: the node's control block; carries flags, barrier, deadlines and failures.
        grid: owners of the shards.
    """

    def __init__(self, control: ControlBlock, grid: Grid) -> None:
        self.control = control
        self.grid = grid
        self.traffic = Traffic()
        self._ranks = grid.shards[grid.node]  # by local index
        holders = {  # of each shard's row
            shard: rank for row in grid.shards for shard, rank in zip(row, self._ranks, strict=True)
        }
        self._rank_of_shard = tuple(holders[shard] for shard in range(len(holders)))

    def bytes_of_node(self) -> dict[int, int]:
        """Bytes that this rank pulled from and pushed to each node, by the node's index.

        Nodes are those of the control block: what other nodes have here crossed their boundary.
        """
        nodes = self.control.topology.nodes
        return {
            node: sum(self.traffic.bytes_of_rank[rank] for rank in ranks) for node, ranks in enumerate(nodes)
        }

    @property
    def crossed_bytes(self) -> int:
        """Bytes that this rank pulled and pushed over node boundaries since the counters were last reset."""
        own = self.control.topology.node
        return sum(nbytes for node, nbytes in self.bytes_of_node().items() if node != own)

    @abc.abstractmethod
    def allocate(self, plan: WindowPlan) -> list[Window]:
        """Allocate all windows of the engine, zero-filled. Collective, called once, with equal plans.

        Args:
            plan: the windows.

        Returns:
            The windows, in the plan's order. All ranks have mapped all of them when it returns.

        Raises:
            OdcError: there is not enough memory; names both numbers.
            PeerError: a rank failed or did not come in time.
        """

    @abc.abstractmethod
    def pull(self, window: Window, peer: int, node: int, out: torch.Tensor, offset: int = 0) -> None:
        """Read from a peer's window.

        Args:
            window: the window.
            peer: local index of the owner.
            node: row of the window.
            out: 1-D contiguous, of the window's dtype; filled with the elements from ``offset`` on.
            offset: first element in the row.

        Completes: on the CPU when it returns; on a GPU in the order of the current stream.
        """

    @abc.abstractmethod
    def push_add(self, window: Window, peer: int, node: int, source: torch.Tensor, offset: int = 0) -> float:
        """Add into a peer's window; atomic with respect to all other pushes.

        Args:
            window: the window.
            peer: local index of the owner.
            node: row of the window.
            source: 1-D, any floating dtype; converted to the window's dtype before it is added.
            offset: first element in the row.

        Returns:
            Seconds waited for other ranks, where the host waits; 0.0 else.

        Completes: as :meth:`pull`; ``source`` may be reused then. The owner sees it after ``barrier``.
        """

    def lend_source(
        self, size: Sequence[int | torch.SymInt], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Uninitialised memory to push from, in the order of the current stream.

        A source from elsewhere is as good, but on a GPU its memory is not used again until the host has seen
        that the push is done, and hosts are far ahead.

        Args:
            size: shape.
            dtype: of the elements.
            device: where the windows are.
        """
        return torch.empty(*size, dtype=dtype, device=device)

    def reclaim_sources(self) -> None:  # noqa: B027 - where pushes are done when they return there are none
        """Free what was lent for pushes; on a GPU the streams that it was lent on wait for these."""

    def gather(self, window: Window, out: torch.Tensor, epoch: int) -> float:
        """Pull every shard of the window but this rank's own.

        Waits for flag B of each owner before the first read of its window.

        Args:
            window: the window.
            out: ``[W, n]`` contiguous, of the window's dtype; row r receives shard r. The caller has put this
                rank's own shard in place.
            epoch: epoch whose parameters are wanted.

        Returns:
            Seconds waited for other ranks, where the host waits; 0.0 else.
        """
        waited = 0.0
        own = self.grid.shards[self.grid.node][self.grid.local]
        for peer in self.grid.visits():
            waited += self.wait_published(peer, epoch)
            for node, row in enumerate(self.grid.shards):
                if row[peer] != own:
                    self.pull(window, peer, node, out[row[peer]])
        return waited

    def read_all(self, window: Window, out: torch.Tensor, offset: int = 0) -> None:
        """Pull the same elements of every shard, this rank's own included; all flags B have been waited for.

        Args:
            window: the window.
            out: ``[W, n]`` contiguous, of the window's dtype; row r receives elements of shard r.
            offset: the first of them.
        """
        for peer in self.grid.visits():
            for node, row in enumerate(self.grid.shards):
                self.pull(window, peer, node, out[row[peer]], offset)

    def scatter_add(self, window: Window, source: torch.Tensor, offset: int = 0) -> float:
        """Push every row of ``source`` to the owner of its shard, this rank's own shard included.

        Args:
            window: the window.
            source: ``[W, k]`` with contiguous rows, any floating dtype; row r goes to shard r.
            offset: first element in each shard.

        Returns:
            Seconds waited for other ranks, where the host waits; 0.0 else.
        """
        waited = 0.0
        for peer in self.grid.visits():
            for node, row in enumerate(self.grid.shards):
                waited += self.push_add(window, peer, node, source[row[peer]], offset)
        return waited

    def gather_parts(
        self, window: Window, out: torch.Tensor, parts: Sequence[Sequence[Range]], epoch: int
    ) -> float:
        """:meth:`gather` of some elements of each shard; an owner of none of them is not waited for.

        Args:
            window: the window.
            out: as for :meth:`gather`; what is in no range is left as it is.
            parts: for each shard the ranges of its elements that are wanted.
            epoch: epoch whose parameters are wanted.

        Returns:
            Seconds waited for other ranks, where the host waits; 0.0 else.
        """
        waited = 0.0
        own = self.grid.shards[self.grid.node][self.grid.local]
        for peer in self.grid.visits():
            if any(parts[row[peer]] for row in self.grid.shards):
                waited += self.wait_published(peer, epoch)
            for node, row in enumerate(self.grid.shards):
                if row[peer] != own:
                    for start, stop in parts[row[peer]]:
                        self.pull(window, peer, node, out[row[peer], start:stop], start)
        return waited

    def scatter_add_parts(
        self, window: Window, source: torch.Tensor, parts: Sequence[Sequence[Range]], offset: int = 0
    ) -> float:
        """:meth:`scatter_add` of some elements of each row.

        Args:
            window: the window.
            source: ``[W, k]`` with contiguous rows, any floating dtype; row r goes to shard r.
            parts: for each shard the ranges of its elements that are added to. Their owners' flag B has been
                waited for.
            offset: element of each shard that the first of ``source`` belongs to.

        Returns:
            Seconds waited for other ranks, where the host waits; 0.0 else.
        """
        waited = 0.0
        for peer in self.grid.visits():
            for node, row in enumerate(self.grid.shards):
                for start, stop in parts[row[peer]]:
                    piece = source[row[peer], start - offset : stop - offset]
                    waited += self.push_add(window, peer, node, piece, start)
        return waited

    @abc.abstractmethod
    def signal_published(self, epoch: int) -> None:
        """Raise this rank's flag B: its window holds ``epoch``'s parameters, its accumulator is empty."""

    @abc.abstractmethod
    def wait_published(self, peer: int, epoch: int) -> float:
        """Wait for a peer's flag B of ``epoch`` or later, cheap once it was seen; returns seconds waited."""

    @abc.abstractmethod
    def barrier(self, meeting: Meeting, number: int = 0) -> float:
        """Meet all ranks of the node (rule 1).

        Args:
            meeting: where this rank is in its program.
            number: which of these meetings.

        Returns:
            Seconds waited.
        """

    @abc.abstractmethod
    def close(self, meeting: Meeting | None = Meeting.CLOSE) -> None:
        """Unmap the windows.

        Args:
            meeting: where to meet all ranks first, so that nobody still reads. None after a failure: no
                meeting, the memory goes with the last process.
        """
