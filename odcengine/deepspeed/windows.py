"""The windows of a ZeRO-3 engine: fetch, push, collect, publish; knows no DeepSpeed.

Parameters lie in the window itself: the optimizer's copy of its masters into them is the publication. A large
parameter is read straight to its place, as its shards in the order of ranks *are* the parameter; of small
neighbours one read an owner gets all. See ``docs/protocol.md`` for the two fences.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from odcengine.control import ControlBlock, Meeting
from odcengine.deepspeed.layout import Slot, ZeroLayout, fetch_runs
from odcengine.sharding.between_nodes import NodeExchange
from odcengine.transport.base import Transport, Window

_LOOK_S = 1e-3
_MOST_RUNS = 1 << 12
_PENDING_NUMEL = 1 << 22  # elements of small gradients that are kept back at most


class ZeroWindows:
    """This rank's view of all ranks' windows.

    Attributes:
        control: the node's control block.
        epoch: number of the parameters that are published.
        fetch_s, push_s: seconds in fetches and pushes since :meth:`start_minibatch`; on a GPU the host's.
        wait_s: the part of both that was spent waiting for other ranks.
        exchanged_bytes: sent to other nodes since then.

    Args:
        layout: of the parameters.
        transport: one-sided access inside the node; its windows are allocated here. Collective.
        control: the node's control block.
        between_nodes: process group of the ranks with this rank's local index, one a node; None on one node.
    """

    def __init__(
        self,
        layout: ZeroLayout,
        transport: Transport,
        control: ControlBlock,
        between_nodes: dist.ProcessGroup | None = None,
    ) -> None:
        self.control = control
        self.epoch = -1
        self._layout = layout
        self._transport = transport
        self._between_nodes = between_nodes
        self._world_size = control.topology.world_size
        self._params, *self._accumulators = transport.allocate(layout.plan(transport.grid.num_nodes))
        self._on_gpu = self._params.local.is_cuda
        self._pending: list[tuple[Slot, torch.Tensor, torch.cuda.Stream | None]] = []
        self._pending_numel = 0
        self._num_meetings = 0
        # DeepSpeed fetches parameter by parameter, so what the host does for each counts.
        self._runs: dict[tuple[int, ...], list[list[Slot]]] = {}  # of what is fetched together
        self._flags_seen: dict[int, int] = {}  # stream -> epoch of which all flags have been waited for
        self._looked = 0.0  # when this rank looked at the others last
        self.start_minibatch()

    def start_minibatch(self) -> None:
        """Count times and bytes from here."""
        self.fetch_s = self.push_s = self.wait_s = 0.0
        self.exchanged_bytes = 0
        self._crossed_before = self._transport.crossed_bytes

    @property
    def crossed_bytes(self) -> int:
        """Pulled and pushed over node boundaries in this minibatch."""
        return self._transport.crossed_bytes - self._crossed_before

    # -- this rank's own memory ------------------------------------------------------------------------

    @property
    def _row(self) -> torch.Tensor:
        return self._params.local[self._transport.grid.node]

    def shard(self, slot: Slot) -> torch.Tensor:
        """This rank's shard of a parameter, in its window."""
        return self._row[slot.offset : slot.end].view(slot.spec.dtype)

    def trained_shards(self) -> torch.Tensor:
        """This rank's shards of all that is trained, one after the other, in its window."""
        dtype = self._layout.slots[0].spec.dtype
        return self._row[: self._layout.trained_nbytes].view(dtype)

    def own_sum(self, slot: Slot) -> torch.Tensor:
        """Where gradients of this rank's shard are summed: those of its own node, until :meth:`collect`."""
        row = self._accumulators[slot.accumulator].local[self._transport.grid.node]
        return row[slot.grad_offset : slot.grad_offset + slot.spec.shard_numel]

    # -- inside a minibatch ----------------------------------------------------------------------------

    def fetch(self, slots: Sequence[Slot]) -> list[torch.Tensor]:
        """Read whole parameters from their owners; on a GPU in the order of the current stream.

        Args:
            slots: the parameters, each once.

        Returns:
            For each a flat tensor of its elements.
        """
        start = time.perf_counter()
        self._look(start)
        self._wait_published()
        found: dict[int, torch.Tensor] = {}
        wanted = tuple(slot.index for slot in slots)
        runs = self._runs.get(wanted)
        if runs is None:
            if len(self._runs) == _MOST_RUNS:
                self._runs.clear()
            runs = self._runs[wanted] = fetch_runs(slots)
        for run in runs:
            rows = self._read(run)
            if len(run) == 1:
                found[run[0].index] = rows.view(-1)[: run[0].spec.numel]
                continue
            begin = 0
            for slot in run:
                part = rows[:, begin : begin + slot.spec.shard_numel]
                found[slot.index] = part.reshape(-1)[: slot.spec.numel]
                begin += slot.spec.shard_numel
        self.fetch_s += time.perf_counter() - start
        return [found[slot.index] for slot in slots]

    def _read(self, run: Sequence[Slot]) -> torch.Tensor:
        """All ranks' shards of neighbours: ``[W, elements]``."""
        first, end = run[0], run[-1].end
        dtype = first.spec.dtype
        numel = (end - first.offset) // dtype.itemsize
        out = torch.empty(self._world_size, numel, dtype=dtype, device=self._params.local.device)
        if numel:
            self._transport.read_all(self._params, out.view(torch.uint8), first.offset)
        return out

    def _look(self, now: float) -> None:
        """Raise if another rank has failed, and give a sign of life; a thousand times a second is enough."""
        if now - self._looked >= _LOOK_S:
            self._looked = now
            self.control.check()
            self.control.beat()

    def _wait_published(self) -> None:
        stream = torch.cuda.current_stream(self._params.local.device).cuda_stream if self._on_gpu else 0
        if self._flags_seen.get(stream, -1) < self.epoch:
            for peer in self._transport.grid.visits():
                self.wait_s += self._transport.wait_published(peer, self.epoch)
            self._flags_seen[stream] = self.epoch

    def push(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Add a gradient to its owners' sums; small ones wait until :meth:`flush` or enough are there.

        Args:
            slot: the parameter.
            gradient: of the whole parameter, any shape; must not be written to any more.
        """
        if slot.is_large:
            self._add(self._accumulators[slot.accumulator], self._rows_of(slot, gradient), slot.grad_offset)
            return
        stream = torch.cuda.current_stream(gradient.device) if self._on_gpu else None
        self._pending.append((slot, gradient, stream))
        self._pending_numel += slot.spec.numel
        if self._pending_numel >= _PENDING_NUMEL:
            self.flush()

    def flush(self) -> None:
        """Push what is kept back: one push an owner for all neighbours."""
        pending, self._pending = sorted(self._pending, key=lambda item: item[0].offset), []
        self._pending_numel = 0
        if not pending:
            return
        if self._on_gpu:
            current = torch.cuda.current_stream(self._params.local.device)
            for _, gradient, stream in pending:
                if stream is not None and stream != current:  # backwards may use several
                    current.wait_stream(stream)
                    gradient.record_stream(current)
        runs: list[list[tuple[Slot, torch.Tensor]]] = []
        for slot, gradient, _ in pending:
            last = runs[-1][-1][0] if runs else None
            if last is not None and last.end == slot.offset and last.accumulator == slot.accumulator:
                runs[-1].append((slot, gradient))
            else:  # one that comes twice begins a run of its own, too
                runs.append([(slot, gradient)])
        for run in runs:
            rows = torch.cat([self._rows_of(slot, gradient) for slot, gradient in run], dim=1)
            self._add(self._accumulators[run[0][0].accumulator], rows, run[0][0].grad_offset)

    def _rows_of(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient by owner, ``[W, shard]``, padded with zeros."""
        flat = gradient.detach().reshape(-1)
        missing = self._world_size * slot.spec.shard_numel - flat.numel()
        if missing:
            flat = torch.cat([flat, flat.new_zeros(missing)])
        return flat.view(self._world_size, slot.spec.shard_numel)

    def _add(self, accumulator: Window, rows: torch.Tensor, offset: int) -> None:
        start = time.perf_counter()
        self._look(start)
        self._wait_published()  # before it the owner may be emptying its sums
        self.wait_s += self._transport.scatter_add(accumulator, rows, offset)
        self.push_s += time.perf_counter() - start

    # -- at the boundary -------------------------------------------------------------------------------

    def meet(self, meeting: Meeting, number: int) -> float:
        """Barrier A: all pushes have landed, all fetches are done, on all ranks; returns seconds waited."""
        self.flush()
        return self._transport.barrier(meeting, number)

    def meet_to_write(self) -> None:
        """Meet all ranks before shards are written outside of a step; :meth:`publish` ends it."""
        self._num_meetings += 1
        self.meet(Meeting.PUBLISH, self._num_meetings)

    def collect(self) -> list[torch.Tensor]:
        """After barrier A: this rank's row of each accumulator, summed. Collective between nodes."""
        with self._exchange("the sum of gradients between nodes") as exchange:
            for window in self._accumulators:
                exchange.add_up(window.local)
        return [window.local[0] for window in self._accumulators]

    def part_of(self, sums: Sequence[torch.Tensor], slot: Slot) -> torch.Tensor:
        """A parameter's part of what :meth:`collect` returned."""
        return sums[slot.accumulator][slot.grad_offset : slot.grad_offset + slot.spec.shard_numel]

    def empty_sums(self) -> None:
        """Begin anew with all sums at zero; between a meeting and :meth:`publish` only."""
        if self._accumulators:
            torch._foreach_zero_([window.local for window in self._accumulators])

    def publish(self, start: int = 0, end: int | None = None) -> None:
        """Flag B: what lies in this rank's window is what all fetch from now on. Collective between nodes.

        Args:
            start, end: bytes of a row that may have changed; by default all.
        """
        end = self._layout.row_nbytes if end is None else end
        with self._exchange("the exchange of parameters between nodes") as exchange:
            if start < end:
                exchange.share(self._params.local, self._transport.grid.node, [slice(start, end)])
        self.epoch += 1
        self._transport.signal_published(self.epoch)

    def publish_trained(self) -> None:
        """:meth:`publish` after an optimizer's step."""
        self.publish(0, self._layout.trained_nbytes)

    @contextlib.contextmanager
    def _exchange(self, what: str) -> Iterator[NodeExchange]:
        """What is begun inside the block has come at its end, and is counted."""
        column = self._transport.grid.column
        with NodeExchange(self._between_nodes, column, self.control, what) as exchange:
            yield exchange
        self.exchanged_bytes += exchange.sent_nbytes

    def close(self, meeting: Meeting | None) -> None:
        """Let go of the windows; None after a failure, without meeting the others."""
        self._pending.clear()
        self._accumulators.clear()
        del self._params
        self._transport.close(meeting)
