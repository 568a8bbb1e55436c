"""Which rank this process is: read from the environment here and nowhere else, without torch.

Several launchers may have left their variables: SLURM starts MPI's daemons, which start odc-launch, which
starts the ranks. The innermost one counts, and those around it must agree with it: either they count the same
ranks, or they only carried it to the nodes, with one task on each.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from odcengine._claims import Claim, compare_places, counts_the_same
from odcengine._launchers import LAUNCHERS, read_claims
from odcengine.errors import ConfigError
from odcengine.slurm_step import step_hosts

PORTS = range(10000, 32000)
"""Where derived ports lie: above well-known services, below the kernel's usual ephemeral range (32768)."""

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
    claims = read_claims(env)
    if not claims:
        return RankInfo(rank=0, world_size=1, config_file=env.get("ODC_CONFIG"))
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
        if other is not first and counts_the_same(first, other, claims, "TORCHELASTIC_RUN_ID" in env):
            equal.append(other)
            for key, value in other.numbers.items():
                numbers.setdefault(key, value)
    compare_places(equal)
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


def _mpi_place(claims: Sequence[Claim]) -> MpiPlace | None:
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


def _request_warnings(first: Claim, env: Mapping[str, str]) -> tuple[str, ...]:
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
