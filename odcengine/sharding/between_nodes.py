"""What nodes exchange once a minibatch, sums of gradients and parameters, so much at once and no more."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from odcengine._collectives import all_gather
from odcengine._in_flight import has_room
from odcengine.control import ControlBlock


class NodeExchange:
    """Exchanges of rows of windows among the ranks of a column, one on each node: a context manager.

    Every rank of the column makes the same calls in the same order; all has come at the end of the block.

    Attributes:
        count: exchanges that have begun.
        sent_nbytes: this rank sends to all other nodes in them together, and gets from them.

    Args:
        group: of the column's ranks; None on one node, where nothing is exchanged.
        column: global ranks of the column, in the order of nodes.
        control: watches the waits.
        what: what is exchanged, for messages.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, column: Sequence[int], control: ControlBlock, what: str
    ) -> None:
        self.count = 0
        self.sent_nbytes = 0
        self._group = group
        self._control = control
        self._what = what
        # The group may order its ranks otherwise than the grid orders the nodes.
        self._order = [column.index(rank) for rank in sorted(column)]
        self._in_order = self._order == sorted(self._order)
        self._flying: deque[tuple[dist.Work, int, Callable[[], object]]] = deque()
        self._flying_nbytes = 0

    def add_up(self, rows: torch.Tensor) -> None:
        """Get the other nodes' sums of this rank's shard, and add them in the order of the group's ranks.

        Args:
            rows: ``[M, elements]``: this node's sums, for the rank of each node. The whole sum takes the
                place of the first row: what the rows held is on its way to the others, or was this rank's
                own and is in the sum.
        """
        if self._group is None or not rows.numel():
            return
        self._make_room(rows.nbytes)
        sent = (rows if self._in_order else rows[self._order]).contiguous()
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)
        self._add(work, sent[0], functools.partial(torch.sum, received, dim=0, out=rows[0]))

    def share(self, rows: torch.Tensor, node: int, spans: Sequence[slice]) -> None:
        """Give parts of this rank's row to the other nodes, and put theirs in place.

        Args:
            rows: ``[M, bytes]`` uint8: of each node.
            node: this rank's.
            spans: the parts, one at least; equal on all ranks of the column.
        """
        if self._group is None:
            return
        own = rows[node]
        sent = torch.cat([own[span] for span in spans])
        nbytes = len(rows) * sent.numel()
        self._make_room(nbytes)
        whole = sent.numel() == own.numel() and self._in_order
        received = rows.reshape(-1) if whole else sent.new_empty(nbytes)
        work = all_gather(received, sent, group=self._group, async_op=True)

        def put_in_place() -> None:
            if whole:
                return
            table, start = received.view(-1, sent.numel()), 0
            for span in spans:
                width = span.stop - span.start
                rows[self._order, span] = table[:, start : start + width]
                start += width

        self._add(work, sent, put_in_place)

    def __enter__(self) -> NodeExchange:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        while self._flying and kind is None:
            self._land_first()

    def _make_room(self, nbytes: int) -> None:
        """Before an exchange that receives so many bytes."""
        while not has_room(len(self._flying), self._flying_nbytes, nbytes):
            self._land_first()

    def _add(self, work: dist.Work, row: torch.Tensor, then: Callable[[], object]) -> None:
        """An exchange has begun, of rows like this one; ``then`` is called when it is done."""
        num_nodes = len(self._order)
        self._flying.append((work, num_nodes * row.nbytes, then))
        self._flying_nbytes += num_nodes * row.nbytes
        self.count += 1
        self.sent_nbytes += (num_nodes - 1) * row.nbytes

    def _land_first(self) -> None:
        work, nbytes, then = self._flying.popleft()
        self._control.wait_work(work, self._what)
        then()
        self._flying_nbytes -= nbytes
