"""The sample store: all samples of a minibatch in memory that the ranks of a node share.

Where ranks draw work (``balance.strategy: dynamic``) nobody knows beforehand who needs which sample. So every
node has all of them: each rank writes its own, and what other nodes have comes in one all-to-all, each rank
serving one rank of every other node.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from odcengine._memory import available_memory, create_memory, map_memory
from odcengine.control import ControlBlock, Meeting
from odcengine.errors import OdcError, UsageError
from odcengine.rollouts.exchange import Stock, pack, trade
from odcengine.rollouts.samples import TensorSample, read, write

_ROOM = 1.25  # the next minibatch is likely to be a little larger


class SampleStore:
    """Samples of one minibatch at a time, readable by all ranks of this node.

    The memory has no name and grows with the largest minibatch.

    Args:
        control: the node's control block.
        group: gloo group of all ranks.
        limit_bytes: largest size of the samples of all ranks together (``balance.sample_store_mib``).
    """

    def __init__(self, control: ControlBlock, group: dist.ProcessGroup, limit_bytes: int) -> None:
        self._control = control
        self._group = group
        self._limit = limit_bytes
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._starts: list[int] = []
        self._stock: Stock | None = None
        self._number = 0

    def fill(self, samples: Sequence[TensorSample], stock: Stock) -> int:
        """Put the samples of all ranks in the place of the last ones. Collective over all ranks.

        Every rank has come to ``take_stock`` before, so none reads the last ones any more.

        Args:
            samples: this rank's.
            stock: what all ranks have.

        Returns:
            Number of this filling, for :meth:`read`.

        Raises:
            UsageError: the samples are larger than the limit; on all ranks.
            OdcError: there is not enough memory.
        """
        topology = self._control.topology
        total = sum(stock.nbytes)
        if total > self._limit:
            raise UsageError(
                f"dynamic: the {len(stock.nbytes)} samples of all ranks have {total / 2**20:.1f} MiB, of "
                f"which each of {topology.num_nodes} nodes holds a copy, more than balance.sample_store_mib: "
                f"{self._limit / 2**20:g}; raise it, take smaller minibatches, or balance.strategy: lb_mini, "
                "which sends each sample to one rank"
            )
        self._make_room(total)
        self._starts = [0, *itertools.accumulate(stock.nbytes)]
        self._stock = stock
        self._number += 1
        for position, sample in zip(stock.own, samples, strict=True):
            write(sample, stock.schema, self._memory[self._starts[position] :])
        if topology.num_nodes > 1:
            self._replicate(samples, stock)
        self._control.barrier(Meeting.SAMPLES, self._number)
        return self._number

    def _replicate(self, samples: Sequence[TensorSample], stock: Stock) -> None:
        """Give this rank's samples to one rank of every other node, and write what comes from there."""
        topology = self._control.topology
        me = topology.rank
        positions = list(stock.own)
        served = {_server(ranks, me, topology.nodes) for ranks in topology.nodes if me not in ranks}
        send, sent = pack(
            samples,
            stock,
            [positions if rank in served else [] for rank in range(topology.world_size)],
        )
        own_node = topology.nodes[topology.node]
        coming = [
            [position for position, home in enumerate(stock.homes) if home == other]
            if other not in own_node and _server(own_node, other, topology.nodes) == me
            else []
            for other in range(topology.world_size)
        ]
        sizes = [sum(stock.nbytes[position] for position in theirs) for theirs in coming]
        received = trade(send, sent, sizes, self._control, self._group)
        end = 0
        for position in itertools.chain(*coming):
            start, size = self._starts[position], stock.nbytes[position]
            self._memory[start : start + size] = received[end : end + size]
            end += size

    def _make_room(self, total: int) -> None:
        """More memory where it is needed; all ranks of the node decide alike."""
        if total <= self._memory.numel():
            return
        size = int(min(max(total * _ROOM, 4096), max(self._limit, total)))
        descriptors = None
        topology = self._control.topology
        self._memory = torch.empty(0, dtype=torch.uint8)  # unmapped before more is asked for
        if topology.local_rank == 0:
            available = available_memory()
            if size > available:
                raise OdcError(
                    f"host {topology.hosts[topology.rank]}: the sample store needs {size / 2**20:.1f} MiB of "
                    f"shared memory, {available / 2**20:.1f} MiB are available; take smaller minibatches, or "
                    "balance.strategy: lb_mini, which sends each sample to one rank"
                )
            descriptors = [create_memory("odc-samples", size)]
        (descriptor,) = self._control.share(descriptors)
        self._memory = torch.frombuffer(map_memory(descriptor), dtype=torch.uint8)
        os.close(descriptor)  # the mapping keeps the memory

    def read(self, number: int, position: int) -> TensorSample:
        """A copy of a sample.

        Args:
            number: of the filling that it belongs to.
            position: of the sample.

        Raises:
            UsageError: the store holds the samples of another minibatch by now.
        """
        stock = self._stock
        if stock is None or number != self._number:
            raise UsageError(
                "this minibatch is over: its samples have been replaced by those of a later engine.balance()"
            )
        start = self._starts[position]
        return read(self._memory[start : start + stock.nbytes[position]], stock.schema, copy=True)

    def close(self) -> None:
        """Let go of the memory."""
        self._stock = None
        self._memory = torch.empty(0, dtype=torch.uint8)


def _server(node: Sequence[int], rank: int, nodes: Sequence[Sequence[int]]) -> int:
    """Which rank of a node takes the samples of a rank of another node."""
    local = next(ranks.index(rank) for ranks in nodes if rank in ranks)
    return node[local % len(node)]
