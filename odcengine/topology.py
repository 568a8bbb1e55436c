"""Which rank this process is and which ranks share a node: read once, from one table, without torch.

Two steps. :func:`read_rank_info` reads what a launcher left in the environment, and is the only place that
does. :func:`build_topology` then compares machines between ranks and groups them into nodes; the ranks of a
node need not be consecutive.

Several launchers may have left their variables: SLURM starts MPI's daemons, which start odc-launch, which
starts the ranks. The innermost one counts, and those around it must agree with it: either they count the same
ranks, or they only carried it to the nodes, with one task on each.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from odcengine.errors import ConfigError
from odcengine.hostlist import expand_counts, expand_hostlist, read_hostfile

PORTS = range(10000, 32000)
"""Where derived ports lie: above well-known services, below the kernel's usual ephemeral range (32768)."""

_SPECIAL_STEPS = 0xFFFFFFF0  # SLURM numbers the batch script, the interactive step and others from here on


@dataclass(frozen=True)
class LauncherTable:
    """The environment names that one launcher uses.

    Args:
        name: the launcher, as messages call it.
        required: field of :class:`RankInfo` -> name of the variable. The first identifies the launcher, and
            all must be set.
        optional: the same, for variables that may be missing.
        marker: a variable that must be set too, where two launchers share names.
        job: variables that name the job, equal on all its ranks and different in another.
        starts_mpi: MPI can start in the processes that have these variables.
    """

    name: str
    required: Mapping[str, str]
    optional: Mapping[str, str]
    marker: str | None = None
    job: tuple[str, ...] = ()
    starts_mpi: bool = True


# The innermost first. OMPI_COMM_WORLD_NODE_RANK is missing on purpose: it numbers processes, not nodes.
LAUNCHERS: tuple[LauncherTable, ...] = (
    LauncherTable(
        name="torchrun",
        required={"rank": "RANK", "world_size": "WORLD_SIZE"},
        optional={
            "local_rank": "LOCAL_RANK",
            "local_world_size": "LOCAL_WORLD_SIZE",
            "node_rank": "GROUP_RANK",
            "num_nodes": "GROUP_WORLD_SIZE",
        },
        starts_mpi=False,
    ),
    LauncherTable(
        name="Open MPI",
        required={"rank": "OMPI_COMM_WORLD_RANK", "world_size": "OMPI_COMM_WORLD_SIZE"},
        optional={
            "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
            "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
        },
        job=("PMIX_NAMESPACE", "OMPI_MCA_orte_ess_jobid", "OMPI_MCA_ess_base_jobid"),
    ),
    LauncherTable(
        name="Cray PALS",
        required={"rank": "PALS_RANKID", "world_size": "PMI_SIZE"},
        optional={
            "local_rank": "PALS_LOCAL_RANKID",
            "local_world_size": "PALS_LOCAL_SIZE",
            "node_rank": "PALS_NODEID",
        },
        job=("PALS_APID",),
    ),
    LauncherTable(
        name="Intel MPI",
        required={"rank": "PMI_RANK", "world_size": "PMI_SIZE"},
        optional={"local_rank": "MPI_LOCALRANKID", "local_world_size": "MPI_LOCALNRANKS"},
        marker="I_MPI_ROOT",
    ),
    LauncherTable(
        name="MPICH (Hydra)",
        required={"rank": "PMI_RANK", "world_size": "PMI_SIZE"},
        optional={"local_rank": "MPI_LOCALRANKID", "local_world_size": "MPI_LOCALNRANKS"},
    ),
    LauncherTable(  # says nothing of the number of ranks: SLURM or MPI beside it does
        name="PMIx",
        required={"rank": "PMIX_RANK"},
        optional={},
        job=("PMIX_NAMESPACE",),
    ),
    # SLURM's world size has several sources; see _slurm_step.
    LauncherTable(
        name="SLURM",
        required={"rank": "SLURM_PROCID", "world_size": "SLURM_STEP_NUM_TASKS"},
        optional={
            "local_rank": "SLURM_LOCALID",
            "local_world_size": "SLURM_STEP_TASKS_PER_NODE",
            "node_rank": "SLURM_NODEID",
            "num_nodes": "SLURM_STEP_NUM_NODES",
        },
        job=("SLURM_JOB_ID",),
        starts_mpi=False,  # unless its step has PMIx's variables, or PMI's, as well
    ),
)
# Of any batch system: what tells two jobs on one host apart where the launcher says nothing.
_JOB_NAMES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "COBALT_JOBID", "JOB_ID")


@dataclass(frozen=True)
class MpiPlace:
    """What MPI will call this process, as far as its launcher's variables tell.

    Attributes:
        rank: rank in MPI_COMM_WORLD.
        size: its number of ranks, or None.
        words: the launcher with its variables and values, for messages.
    """

    rank: int
    size: int | None
    words: str


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
        num_nodes: number of nodes.
        plan_hash: hash of odc-launch's plan, equal on all ranks that were started alike.
        mpi: the place that mpirun, or srun with PMIx or PMI, gave this process; None where MPI cannot start.
        warnings: what the user should know, one line each.
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
    num_nodes: int | None = None
    plan_hash: str | None = None
    mpi: MpiPlace | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Claim:
    """What one launcher says; ``words`` has the variables and values behind each number, for messages."""

    table: LauncherTable
    numbers: Mapping[str, int]
    words: Mapping[str, str]

    def get(self, key: str) -> int | None:
        return self.numbers.get(key)

    def tell(self) -> str:
        keys = [key for key in ("rank", "world_size") if key in self.numbers]
        return f"{self.table.name} ({', '.join(self.words[key] for key in keys)})"


def read_rank_info(environ: Mapping[str, str] | None = None) -> RankInfo:
    """Read rank and world size from the launchers' variables.

    Args:
        environ: the variables; those of the process by default.

    Returns:
        The rank. Without any launcher's variables: rank 0 of 1.

    Raises:
        ConfigError: a variable is missing beside its fellows, is no whole number, or contradicts another.
    """
    env = os.environ if environ is None else environ
    claims = [claim for table in LAUNCHERS if (claim := _claim(table, env)) is not None]
    if not claims:
        return RankInfo(rank=0, world_size=1, config_file=env.get("ODC_CONFIG"))
    for claim in claims:
        _check(claim)
    first = next((claim for claim in claims if "world_size" in claim.numbers), None)
    if first is None:
        name = claims[0].table.required["rank"]
        raise ConfigError(
            f"environment: {name}={env[name]} ({claims[0].table.name}) tells the rank but not the number of "
            "ranks; start with srun, mpirun or odc-launch, which set both, or unset it for a single process"
        )
    numbers = dict(first.numbers)
    equal = [first]
    for other in claims:
        if other is not first and _agree(first, other, claims, "TORCHELASTIC_RUN_ID" in env):
            equal.append(other)
            for key, value in other.numbers.items():
                numbers.setdefault(key, value)
    _compare(equal)
    info = RankInfo(
        source=first.table.name,
        rank=numbers["rank"],
        world_size=numbers["world_size"],
        local_rank=numbers.get("local_rank"),
        local_world_size=numbers.get("local_world_size"),
        node_rank=numbers.get("node_rank"),
        num_nodes=numbers.get("num_nodes"),
        config_file=env.get("ODC_CONFIG"),
        error_file=env.get("ODC_ERROR_FILE"),
        plan_hash=env.get("ODC_PLAN_HASH"),
        mpi=_mpi_place(claims),
        warnings=_request_warnings(first, env),
    )
    return replace(info, rendezvous=_rendezvous(env, info, [claim.table.name for claim in equal]))


def _mpi_place(claims: Sequence[_Claim]) -> MpiPlace | None:
    claim = next((claim for claim in claims if claim.table.starts_mpi), None)
    return None if claim is None else MpiPlace(claim.numbers["rank"], claim.get("world_size"), claim.tell())


def job_port(job: str) -> int:
    """The port that every node derives from the same text, such as the job's number and step."""
    return PORTS[int.from_bytes(hashlib.sha256(job.encode()).digest()[:8], "big") % len(PORTS)]


def job_name(environ: Mapping[str, str]) -> str | None:
    """A text that is equal on all ranks of a job and tells it from other jobs; None where nothing is."""
    if environ.get("SLURM_JOB_ID"):
        return f"slurm {environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}"
    names = [name for table in LAUNCHERS for name in table.job] + list(_JOB_NAMES)
    return next((f"{name} {environ[name]}" for name in names if environ.get(name)), None)


def step_hosts(environ: Mapping[str, str]) -> list[str]:
    """The hosts of a SLURM step or allocation, the host of rank 0 first; empty outside of SLURM.

    With arbitrary distribution the file ``SLURM_HOSTFILE`` says which host runs which rank: then its order
    counts, each host once.

    Raises:
        ConfigError: a list is not understood, or the file names hosts outside of the step.
    """
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    name = next((name for name in names if environ.get(name)), None)
    hosts = expand_hostlist(environ[name], name) if name is not None else []
    hostfile = environ.get("SLURM_HOSTFILE")
    if hostfile and environ.get("SLURM_DISTRIBUTION", "arbitrary").startswith("arbitrary"):
        ordered = list(dict.fromkeys(read_hostfile(hostfile)))
        strange = [host for host in ordered if hosts and host not in hosts]
        if strange:
            raise ConfigError(
                f"SLURM_HOSTFILE={hostfile} names {', '.join(strange)}, which {name}={environ[name or '']} "
                "does not contain"
            )
        return ordered + [host for host in hosts if host not in ordered]
    return hosts


def slurm_in_step(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task of ``srun``, not a batch script or an interactive shell of SLURM's."""
    number = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if number.isdecimal():
        return int(number) < _SPECIAL_STEPS
    return "SLURM_STEP_NUM_TASKS" in environ or "SLURM_STEP_TASKS_PER_NODE" in environ


def _claim(table: LauncherTable, env: Mapping[str, str]) -> _Claim | None:
    if table.name == "SLURM":
        return _slurm_step(table, env)
    names = list(table.required.values())
    identifying = names if table.name == "torchrun" else names[:1]
    present = [name for name in identifying if name in env]
    if not present or (table.marker is not None and table.marker not in env):
        return None
    if table.name == "MPICH (Hydra)" and LAUNCHERS[3].marker in env:
        return None  # the same variables, read as Intel's
    missing = [name for name in names if name not in env]
    if missing:
        raise ConfigError(
            f"environment: {present[0]}={env[present[0]]} is set but {', '.join(missing)} is not; "
            f"{table.name} sets {' and '.join(names)} together "
            "(start the script with odc-launch, or unset both for a single process)"
        )
    found = {key: name for key, name in {**table.required, **table.optional}.items() if name in env}
    return _Claim(
        table,
        {key: _whole_number(env, name) for key, name in found.items()},
        {key: f"{name}={env[name]}" for key, name in found.items()},
    )


def _slurm_step(table: LauncherTable, env: Mapping[str, str]) -> _Claim | None:
    """A step's numbers: of what it really started, not of what the job asked for."""
    if not slurm_in_step(env):
        return None
    numbers: dict[str, int] = {}
    words: dict[str, str] = {}

    def take(key: str, name: str) -> None:
        if key not in numbers and name in env:
            numbers[key], words[key] = _whole_number(env, name), f"{name}={env[name]}"

    take("world_size", "SLURM_STEP_NUM_TASKS")
    counts: list[int] = []
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE")
    if per_node is not None:
        counts = expand_counts(per_node, "SLURM_STEP_TASKS_PER_NODE")
        if numbers.get("world_size", sum(counts)) != sum(counts):
            raise ConfigError(
                f"environment: SLURM_STEP_TASKS_PER_NODE={per_node} adds up to {sum(counts)} tasks, but "
                f"{words['world_size']}; both describe this step: unset what another job left"
            )
        if "world_size" not in numbers:
            numbers["world_size"] = sum(counts)
            words["world_size"] = f"SLURM_STEP_TASKS_PER_NODE={per_node}"
    take("world_size", "SLURM_NTASKS")
    if "world_size" not in numbers:
        raise ConfigError(
            "environment: SLURM_STEP_ID is set but neither SLURM_STEP_NUM_TASKS, SLURM_STEP_TASKS_PER_NODE "
            "nor SLURM_NTASKS says how many tasks the step has; start with srun or odc-launch"
        )
    take("rank", "SLURM_PROCID")
    if "rank" not in numbers:
        if numbers["world_size"] != 1:
            raise ConfigError(
                f"environment: {words['world_size']} is set but SLURM_PROCID is not; srun sets both"
            )
        numbers["rank"], words["rank"] = 0, "SLURM_PROCID not set"
    take("local_rank", "SLURM_LOCALID")
    take("node_rank", "SLURM_NODEID")
    take("num_nodes", "SLURM_STEP_NUM_NODES")
    if counts:
        if numbers.get("num_nodes", len(counts)) != len(counts):
            raise ConfigError(
                f"environment: SLURM_STEP_TASKS_PER_NODE={per_node} speaks of {len(counts)} nodes, but "
                f"{words['num_nodes']}; both describe this step"
            )
        numbers["num_nodes"] = len(counts)
        words.setdefault("num_nodes", f"SLURM_STEP_TASKS_PER_NODE={per_node}")
        node = numbers.get("node_rank", 0 if len(counts) == 1 else None)
        if node is not None and node < len(counts):
            numbers["local_world_size"] = counts[node]
            words["local_world_size"] = f"SLURM_STEP_TASKS_PER_NODE={per_node}"
    return _Claim(table, numbers, words)


def _request_warnings(first: _Claim, env: Mapping[str, str]) -> tuple[str, ...]:
    """Where a step has not the ranks that the job asked for: nobody waits for ranks nobody started."""
    asked, world_size = env.get("SLURM_NTASKS_PER_NODE", ""), first.numbers["world_size"]
    if first.table.name != "SLURM" or first.get("num_nodes") not in (None, 1):
        return ()  # on several nodes it is an upper limit of each
    if not asked.isdecimal() or int(asked) == world_size:
        return ()
    return (
        f"the step has {world_size} rank{'s' * (world_size != 1)} ({first.words['world_size']}) although "
        f"SLURM_NTASKS_PER_NODE={asked} was asked for; the step counts",
    )


def _agree(first: _Claim, other: _Claim, claims: Sequence[_Claim], elastic: bool) -> bool:
    """Whether another launcher counts the same ranks; False where it only carried the first to the nodes.

    Raises:
        ConfigError: neither.
    """
    size = other.get("world_size")
    if other.get("rank") == first.get("rank") and size in (None, first.get("world_size")):
        return True
    if size is None:  # PMIx: what is around it may tell
        around = next((c for c in claims if c is not other and c.get("rank") == other.get("rank")), None)
        carries = around is not None and _carries(around, first, elastic)
    else:
        carries = _carries(other, first, elastic)
    if not carries:
        raise ConfigError(
            f"environment: {first.tell()} contradicts {other.tell()}: this process cannot be both; unset "
            f"what is left over from elsewhere ({_unset(first)}, or {_unset(other)}), or start it by one of "
            "them only"
        )
    return False


def _unset(claim: _Claim) -> str:
    told = claim.tell()
    return "env " + " ".join(f"-u {name}" for name in claim.table.required.values() if name in told)


def _carries(outer: _Claim, inner: _Claim, elastic: bool) -> bool:
    """Whether a launcher may have started another one once a node (MPI's daemons, odc-launch, torchrun)."""
    size, inner_size = outer.get("world_size"), inner.get("world_size")
    if size is None or inner_size is None or size > inner_size:
        return False
    if inner.table.name == "torchrun":
        if size not in (1, inner.get("num_nodes") or size):
            return False
        if size == inner_size and not elastic:  # one rank a node: only torchrun's agents number them anew
            return False
    if outer.get("num_nodes") is not None:
        return size == outer.get("num_nodes")
    return size == 1 or outer.get("local_world_size") == 1


def _compare(claims: Sequence[_Claim]) -> None:
    """Launchers that count the same ranks must agree on the node as well."""
    first = claims[0]
    for other in claims[1:]:
        for key in ("local_rank", "local_world_size"):
            if first.get(key) is not None and other.get(key) not in (None, first.get(key)):
                raise ConfigError(
                    f"environment: {first.words[key]} ({first.table.name}) contradicts {other.words[key]} "
                    f"({other.table.name}): both speak of this rank's place on its node"
                )


def _rendezvous(env: Mapping[str, str], info: RankInfo, sources: Sequence[str]) -> str | None:
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if port is not None and (not port.isdecimal() or not 0 < int(port) < 65536):
        raise ConfigError(f"environment: MASTER_PORT={port!r} is no port number; it must be 1 to 65535")
    if info.source != "torchrun" and info.world_size > 1:
        job = job_name(env)
        if address is None:
            address = _rank0_host(env, info, sources)
        if port is None and job is not None:
            port = str(job_port(job))
    return None if address is None or port is None else f"{address}:{port}"


def _rank0_host(env: Mapping[str, str], info: RankInfo, sources: Sequence[str]) -> str | None:
    if info.world_size == info.local_world_size:
        return "127.0.0.1"
    hosts = step_hosts(env) if "SLURM" in sources else []
    return hosts[0] if hosts else None  # where MPI puts rank 0 its variables do not tell


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


def _check(claim: _Claim) -> None:
    pairs = (("rank", "world_size"), ("local_rank", "local_world_size"), ("node_rank", "num_nodes"))
    for index, size in pairs:
        i, n = claim.get(index), claim.get(size)
        if i is not None and n is not None and i >= n:
            raise ConfigError(
                f"environment: {claim.words[index]} must be below {claim.words[size]} "
                f"(from {claim.table.name})"
            )
    local, world = claim.get("local_world_size"), claim.get("world_size")
    if local is not None and world is not None and local > world:
        raise ConfigError(
            f"environment: {claim.words['local_world_size']} must be at most {claim.words['world_size']} "
            f"(from {claim.table.name})"
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
