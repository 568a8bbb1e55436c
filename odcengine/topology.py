"""Which rank this process is and which ranks share a node: read once, from one table, without torch.

Two steps. :func:`read_rank_info` reads what a launcher left in the environment, and is the only place that
does. :func:`build_topology` then compares machines between ranks and groups them into nodes; the ranks of a
node need not be consecutive.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from odcengine.errors import ConfigError


@dataclass(frozen=True)
class LauncherTable:
    """The environment names that one launcher uses; ``required`` ones identify it.

    Args:
        name: the launcher, as messages call it.
        required: field of :class:`RankInfo` -> name of the variable; all must be set.
        optional: the same, for variables that may be missing.
    """

    name: str
    required: Mapping[str, str]
    optional: Mapping[str, str]


LAUNCHERS: tuple[LauncherTable, ...] = (
    LauncherTable(
        name="torchrun",
        required={"rank": "RANK", "world_size": "WORLD_SIZE"},
        optional={
            "local_rank": "LOCAL_RANK",
            "local_world_size": "LOCAL_WORLD_SIZE",
            "node_rank": "GROUP_RANK",
        },
    ),
)


@dataclass(frozen=True)
class RankInfo:
    """What the launcher says about this process; None where it says nothing.

    Attributes:
        rank: global rank, 0 to ``world_size`` - 1.
        world_size: number of ranks of the job.
        local_rank: index of this rank among those of its node.
        local_world_size: number of ranks of its node.
        node_rank: index of its node.
        source: the launcher whose variables were read, or "single process".
        rendezvous: address and port at which rank 0 can be met.
        config_file: the configuration that odc-launch was given.
        error_file: where odc-launch looks for this rank's error record.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    source: str = "single process"
    rendezvous: str | None = None
    config_file: str | None = None
    error_file: str | None = None


def read_rank_info(environ: Mapping[str, str] | None = None) -> RankInfo:
    """Read rank and world size from the launcher's variables.

    Args:
        environ: the variables; those of the process by default.

    Returns:
        The rank. Without any launcher's variables: rank 0 of 1.

    Raises:
        ConfigError: a variable is missing beside its fellows, is no whole number, or contradicts another.
    """
    env = os.environ if environ is None else environ
    for table in LAUNCHERS:
        present = [name for name in table.required.values() if name in env]
        if not present:
            continue
        missing = [name for name in table.required.values() if name not in env]
        if missing:
            raise ConfigError(
                f"environment: {present[0]}={env[present[0]]} is set but {', '.join(missing)} is not; "
                f"{table.name} sets {' and '.join(table.required.values())} together "
                "(start the script with odc-launch, or unset both for a single process)"
            )
        names = {**table.required, **table.optional}
        values = {key: _whole_number(env, name) for key, name in names.items() if name in env}
        info = RankInfo(
            source=table.name,
            rendezvous=_rendezvous(env),
            config_file=env.get("ODC_CONFIG"),
            error_file=env.get("ODC_ERROR_FILE"),
            **values,
        )
        _check(info, names)
        return info
    return RankInfo(rank=0, world_size=1, config_file=env.get("ODC_CONFIG"))


def _rendezvous(env: Mapping[str, str]) -> str | None:
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if address is None or port is None:
        return None
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"environment: MASTER_PORT={port!r} is no port number; it must be 1 to 65535")
    return f"{address}:{port}"


def _whole_number(env: Mapping[str, str], name: str) -> int:
    try:
        value = int(env[name])
    except ValueError:
        raise ConfigError(
            f"environment: {name}={env[name]!r} is not a whole number; it must be one that the launcher set"
        ) from None
    if value < 0:
        raise ConfigError(f"environment: {name}={value} is negative; it must be 0 or more")
    return value


def _check(info: RankInfo, names: Mapping[str, str]) -> None:
    for index, size in (("rank", "world_size"), ("local_rank", "local_world_size")):
        i, n = getattr(info, index), getattr(info, size)
        if i is not None and n is not None and i >= n:
            raise ConfigError(
                f"environment: {names[index]}={i} must be below {names[size]}={n} (from {info.source})"
            )
    if info.local_world_size is not None and info.local_world_size > info.world_size:
        raise ConfigError(
            f"environment: {names['local_world_size']}={info.local_world_size} must be at most "
            f"{names['world_size']}={info.world_size} (from {info.source})"
        )


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
        info: this rank, from :func:`read_rank_info`.
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
