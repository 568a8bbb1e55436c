"""Which ranks share a node: machines are compared between ranks, which need not be consecutive on a node.

What a launcher says of this rank is read in ``ranks.py``.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from odcengine.errors import ConfigError
from odcengine.ranks import RankInfo


def machine_id() -> str:
    """Identify the machine and network namespace, within which memory can be passed over a local socket."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/net")
    boot = boot_id.read_text().strip() if boot_id.exists() else "unknown"
    net = os.readlink(namespace) if namespace.exists() else "unknown"
    return f"{boot}/{net}"


@dataclass(frozen=True)
class Topology:
    """Ranks and nodes of the job, equal on all ranks but for ``rank``.

    Attributes:
        rank: this process's global rank.
        hosts: host name of each rank.
        machines: for each rank, an id that equals another rank's when both can share memory.
        nodes: for each node its ranks, ascending; nodes are ordered by their lowest rank.
    """

    rank: int
    hosts: tuple[str, ...]
    machines: tuple[str, ...]
    nodes: tuple[tuple[int, ...], ...]
    _place: tuple[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for node, ranks in enumerate(self.nodes):
            if self.rank in ranks:
                object.__setattr__(self, "_place", (node, ranks.index(self.rank)))
                return
        raise ConfigError(f"rank {self.rank} is in no node of {self.nodes}")

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return len(self.hosts)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @property
    def node(self) -> int:
        """Index of this rank's node."""
        return self._place[0]

    @property
    def local_rank(self) -> int:
        """Index of this rank among the ranks of its node."""
        return self._place[1]

    @property
    def peers(self) -> tuple[int, ...]:
        """Global ranks of this rank's node, itself included."""
        return self.nodes[self.node]

    @property
    def is_even(self) -> bool:
        """Whether all nodes have the same number of ranks."""
        return len({len(ranks) for ranks in self.nodes}) == 1

    def describe(self, rank: int) -> str:
        """Name a rank the way messages do: ``rank 3 (host node-2)``."""
        return f"rank {rank} (host {self.hosts[rank]})"

    def flat(self) -> Topology:
        """The same ranks as one node, for full sharding over all of them."""
        return Topology(self.rank, self.hosts, self.machines, (tuple(range(self.world_size)),))


def build_topology(
    info: RankInfo,
    exchange: Callable[[str], Sequence[str]],
    *,
    node_size: int | None = None,
) -> Topology:
    """Group the ranks of the job into nodes. Collective: every rank calls it.

    Args:
        info: this rank, from :func:`odcengine.ranks.read_rank_info`.
        exchange: gathers one short string from every rank, in rank order.
        node_size: cut each node into groups of this many ranks (``odc.node_size``); None keeps real nodes.

    Returns:
        The topology, equal on all ranks.

    Raises:
        ConfigError: ``node_size`` does not divide a node, with the counts; or ranks disagree about it.
    """
    mine = {
        "host": socket.gethostname(),
        "machine": machine_id(),
        "node_rank": info.node_rank,
        "node_size": node_size,
    }
    records = [json.loads(text) for text in exchange(json.dumps(mine))]
    sizes = {record["node_size"] for record in records}
    if len(sizes) > 1:
        by_rank = {rank: record["node_size"] for rank, record in enumerate(records)}
        raise ConfigError(f"odc.node_size differs between ranks: {by_rank}; give all ranks the same config")
    members: dict[tuple[int | None, str], list[int]] = {}
    for rank, record in enumerate(records):
        members.setdefault((record["node_rank"], record["machine"]), []).append(rank)
    nodes: list[tuple[int, ...]] = []
    for ranks in members.values():
        size = len(ranks) if node_size is None else node_size
        if size < 1 or len(ranks) % size:
            raise ConfigError(
                f"odc.node_size: {node_size} does not divide the {len(ranks)} ranks of host "
                f"{records[ranks[0]]['host']}; use a divisor of {len(ranks)}"
            )
        nodes.extend(tuple(ranks[i : i + size]) for i in range(0, len(ranks), size))
    nodes.sort()
    return Topology(
        rank=info.rank,
        hosts=tuple(record["host"] for record in records),
        machines=tuple(record["machine"] for record in records),
        nodes=tuple(nodes),
    )
