"""From what the user asked for to what is started on this host: pure, so it is tested and printed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from odc_launcher.request import (
    INTERFACE_NAMES,
    Request,
    asked_nproc,
    common_problems,
    hash_of,
    job_env,
    job_of,
    nproc_contradiction,
    parse_signals,
    target_words,
)
from odcengine.errors import ConfigError
from odcengine.host.affinity import Affinity, plan_affinity
from odcengine.host.host import Host
from odcengine.host.nvshmem_env import NodeSettings, Setting, as_env, node_settings

RANKS_PER_CORE_LIMIT = 4

# Of the environment that ranks inherit, what a reader of the plan wants to see.
SHOWN_PREFIXES = ("NVSHMEM_", "NCCL_", "CUDA_", "TORCH", "ODC", "OMP_", "MKL_", "HF_", "WANDB_")
_RANK_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class Place:
    """Which ranks of the job a launch on this host starts, as srun or mpirun placed them.

    Attributes:
        ranks: global rank of each, ascending.
        local_ranks: the index of each among the ranks of its node.
        world_size: number of ranks of the job.
        local_world_size: number of ranks of this node; None where unknown.
        node_rank: index of this node; None where unknown.
        num_nodes: number of nodes; None where unknown.
        master_addr: the host of rank 0.
        master_port: the port there.
        source: who placed them, in words.
        signals_reach_ranks: the scheduler signals the ranks itself, so that passing on would do it twice.
        reported_above: the launch that started this step tells its failures.
    """

    ranks: tuple[int, ...]
    local_ranks: tuple[int, ...]
    world_size: int
    local_world_size: int | None
    node_rank: int | None
    num_nodes: int | None
    master_addr: str
    master_port: int
    source: str
    signals_reach_ranks: bool = False
    reported_above: bool = False


@dataclass(frozen=True)
class Machine:
    """What the plan needs to know of the machine and the moment.

    Attributes:
        host: the host's name.
        cores: usable cores.
        cores_from: where that number comes from, in words.
        master_port: the rendezvous port.
        python: the interpreter that runs the ranks.
        cwd: the working folder.
        run_name: names the default log folder: date, time and process id.
        bound: the cores are part of the host's, as where srun or mpirun binds each task to its own.
        node: interfaces, GPUs and the like, where ranks are started on this host; None: nothing is decided
            by them.
        port_problem: why rank 0 cannot listen on the port now; None: it can, or is on another host.
    """

    host: str
    cores: int
    cores_from: str
    master_port: int
    python: str
    cwd: str
    run_name: str
    bound: bool = False
    node: Host | None = None
    port_problem: str | None = None


@dataclass(frozen=True)
class RankPlan:
    """One rank: its command, what is set in its environment, its files (absolute paths), its cores."""

    rank: int
    argv: tuple[str, ...]
    env: dict[str, str]
    log_path: str
    error_path: str
    affinity: Affinity = field(default_factory=Affinity)


@dataclass(frozen=True)
class LaunchPlan:
    """All that a back end needs to start the ranks of this host.

    Attributes:
        host: the host's name.
        ranks: the ranks in order.
        log_dir: absolute path of the log folder.
        unset: names removed from the inherited environment.
        shown: ranks that appear on stdout.
        grace_s: seconds that ranks have to end by themselves.
        term_grace_s: seconds that they have after TERM.
        signals: signals that are passed on.
        preemption: those of them that ask for a checkpoint and another run.
        summary: one line that says what is started.
        warnings: what the user should know, one line each.
        hash: equal for launches that start the same job alike; the ranks compare it.
        place: where srun or mpirun placed these ranks; None: they are the whole job.
        settings: of the variables those that were chosen for this host, with their reasons.
        notes: what is decided elsewhere, one line each.
    """

    host: str
    ranks: tuple[RankPlan, ...]
    log_dir: str
    unset: tuple[str, ...]
    shown: frozenset[int]
    grace_s: float
    term_grace_s: float
    signals: tuple[signal.Signals, ...]
    summary: str
    warnings: tuple[str, ...]
    hash: str
    place: Place | None = None
    settings: tuple[Setting, ...] = ()
    notes: tuple[str, ...] = ()
    preemption: frozenset[signal.Signals] = frozenset()

    @property
    def world_size(self) -> int:
        """Number of ranks of the job, wherever they are started."""
        return len(self.ranks) if self.place is None else self.place.world_size


def make_plan(
    request: Request, environ: Mapping[str, str], machine: Machine, place: Place | None = None
) -> LaunchPlan:
    """Plans a launch on this host.

    Args:
        request: what the user asked for.
        environ: the environment that the ranks inherit.
        machine: the host.
        place: where srun or mpirun placed the ranks; None: all of the job's are started here.

    Raises:
        ConfigError: with everything that is wrong at once.
    """
    problems = common_problems(request)
    if place is None:
        problems += [*_nesting_problems(environ), *_nproc_problems(request, machine)]
    if problems:
        raise ConfigError(*problems)

    here = _whole_job(request, machine) if place is None else place
    warnings = list(_warnings(request, environ, machine, here, placed=place is not None))
    log_dir = log_folder(request, machine)
    common = {
        "WORLD_SIZE": here.world_size,
        "LOCAL_WORLD_SIZE": here.local_world_size,
        "GROUP_RANK": here.node_rank,
        "GROUP_WORLD_SIZE": here.num_nodes,
        "MASTER_ADDR": here.master_addr,
        "MASTER_PORT": here.master_port,
    }
    env = {name: str(value) for name, value in common.items() if value is not None}
    # What an outer launcher left of these would be another's.
    unset = [name for name, value in common.items() if value is None and name in environ]
    if request.config_path is None and "ODC_CONFIG" in environ:
        unset.insert(0, "ODC_CONFIG")
    env |= job_env(request, environ)
    made = _node_settings(request, {**environ, **env}, machine, here)
    env |= as_env(made.settings)
    warnings += made.warnings
    if request.config_path is not None:
        env["ODC_CONFIG"] = os.path.join(machine.cwd, request.config_path)
    given = _given_threads(env, environ)
    threads, threads_from = given or _threads(environ, machine, here, placed=place is not None)
    if given is None:
        env["OMP_NUM_THREADS"] = threads
    affinities, warning = _affinities(request, {**environ, **env}, machine, here)
    warnings += [] if warning is None else [warning]
    plan_hash = env["ODC_PLAN_HASH"] = hash_of(
        request, here.world_size, f"{here.master_addr}:{here.master_port}"
    )

    ranks = []
    for rank, local_rank, affinity in zip(here.ranks, here.local_ranks, affinities, strict=True):
        error_path = os.path.join(log_dir, f"rank{rank}.error.json")
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "ODC_ERROR_FILE": error_path}
        if affinity.cores and given is None:
            numbers["OMP_NUM_THREADS"] = str(min(int(threads), len(affinity.cores)))
        ranks.append(
            RankPlan(
                rank=rank,
                argv=(machine.python, "-u", *target_words(request), *request.args),
                env=env | numbers,
                log_path=os.path.join(log_dir, f"rank{rank}.log"),
                error_path=error_path,
                affinity=affinity,
            )
        )
    shown = {"all": here.ranks, "rank0": (0,), "none": ()}[request.show]
    return LaunchPlan(
        host=machine.host,
        ranks=tuple(ranks),
        log_dir=log_dir,
        unset=tuple(unset),
        shown=frozenset(shown),
        grace_s=request.grace_s,
        term_grace_s=request.grace_after(signal.SIGTERM),
        signals=parse_signals(request.signals)[0],
        summary=(
            f"{_what(here)} on {machine.host} (number from {here.source}), "
            f"port {here.master_port}, OMP_NUM_THREADS={threads} ({threads_from}), "
            f"logs in {os.path.relpath(log_dir, machine.cwd)}"
        ),
        warnings=tuple(warnings),
        hash=plan_hash,
        place=place,
        settings=(*_of_interface(request, env), *made.settings),
        notes=tuple(made.notes),
        preemption=request.preemption_signals,
    )


def _whole_job(request: Request, machine: Machine) -> Place:
    """All ranks, on this host."""
    nproc, nproc_from = _nproc(request)
    return Place(
        ranks=tuple(range(nproc)),
        local_ranks=tuple(range(nproc)),
        world_size=nproc,
        local_world_size=nproc,
        node_rank=0,
        num_nodes=1,
        master_addr="127.0.0.1",
        master_port=machine.master_port,
        source=nproc_from,
    )


def _warnings(
    request: Request, environ: Mapping[str, str], machine: Machine, here: Place, *, placed: bool
) -> Iterable[str]:
    """What is unwise, or other than the environment says."""
    if machine.port_problem is not None:
        yield machine.port_problem
    nproc = _sharing(machine, here)
    if nproc > machine.cores:
        yield (
            f"{nproc} ranks share {machine.cores} usable cores ({machine.cores_from}): "
            "they slow each other down"
        )
    own_names = ("127.0.0.1", "localhost", machine.host)
    if not placed and environ.get("MASTER_ADDR", "127.0.0.1") not in own_names:
        yield (
            f"MASTER_ADDR={environ['MASTER_ADDR']} is replaced by 127.0.0.1: "
            "all ranks of this launch run on this host"
        )
    if not placed and ("RANK" in environ or "WORLD_SIZE" in environ):
        yield "RANK and WORLD_SIZE of the environment are replaced for each rank"
    if request.config_path is None and "ODC_CONFIG" in environ:
        yield (
            f"ODC_CONFIG={environ['ODC_CONFIG']} of the environment is not passed on: "
            "give the file with --config, so that it is checked first"
        )


def _node_settings(
    request: Request, environ: Mapping[str, str], machine: Machine, here: Place
) -> NodeSettings:
    """What the libraries are told on this host.

    Raises:
        ConfigError: what the user tells them cannot be.
    """
    if machine.node is None:
        return NodeSettings()
    made = node_settings(
        machine.node, environ, job_of(request, several_nodes=here.world_size != here.local_world_size)
    )
    if made.problems:
        raise ConfigError(*made.problems)
    return made


def _of_interface(request: Request, env: Mapping[str, str]) -> Iterable[Setting]:
    if request.interface is not None:
        for name in INTERFACE_NAMES:
            if env.get(name) == request.interface:
                yield Setting(name, request.interface, "launch.interface")


def _affinities(
    request: Request, environ: Mapping[str, str], machine: Machine, here: Place
) -> tuple[tuple[Affinity, ...], str | None]:
    """The cores of each rank, and a warning."""
    node, count = machine.node, here.local_world_size or len(here.ranks)
    if node is None or request.device == "cpu" or not (node.gpus.gpus or node.gpus.error):
        return tuple(Affinity() for _ in here.ranks), None
    if request.affinity == "none":
        return tuple(Affinity(reason="launch.affinity: none") for _ in here.ranks), None
    if node.gpus.error is not None:
        warning = f"ranks run on any core: {node.gpus.error}"
        return tuple(Affinity(reason=node.gpus.error) for _ in here.ranks), warning
    planned = plan_affinity(
        here.local_ranks,
        count,
        node.gpus.gpus,
        environ,
        node.cores,
        task_per_rank=len(here.ranks) < count,
    )
    return planned, None


def log_folder(request: Request, machine: Machine) -> str:
    """Absolute path of the folder for logs."""
    return os.path.join(machine.cwd, request.log_dir or os.path.join("odc_logs", machine.run_name))


def _given_threads(env: Mapping[str, str], environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Threads of a rank as the user says, and where."""
    if "OMP_NUM_THREADS" in env:
        return env["OMP_NUM_THREADS"], "launch.env"
    inherited = environ.get("OMP_NUM_THREADS")
    # An empty one is none for OpenMP: every rank would take all cores.
    return (inherited, "your environment") if inherited else None


def _threads(environ: Mapping[str, str], machine: Machine, here: Place, *, placed: bool) -> tuple[str, str]:
    """Threads of a rank, and why so many. A task of SLURM's may see cores that belong to its neighbours."""
    per_task, count = environ.get("SLURM_CPUS_PER_TASK", ""), len(here.ranks)
    if placed and per_task.isdecimal():
        shared = f" / {count} ranks" if count > 1 else ""
        return str(max(1, int(per_task) // count)), f"SLURM_CPUS_PER_TASK={per_task}{shared}"
    nproc = _sharing(machine, here)
    return str(max(1, machine.cores // nproc)), f"{machine.cores} cores / {nproc} ranks"


def _sharing(machine: Machine, here: Place) -> int:
    """Ranks that share the machine's usable cores."""
    return len(here.ranks) if machine.bound else here.local_world_size or len(here.ranks)


def _what(here: Place) -> str:
    """The ranks that are started here, in words."""
    count = len(here.ranks)
    if count < here.world_size:
        return f"rank{'s' * (count > 1)} {_numbers(here.ranks)} of {here.world_size}"
    return f"{count} rank{'s' * (count > 1)}"


def _numbers(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


def _nproc(request: Request) -> tuple[int, str]:
    nproc, nproc_from = asked_nproc(request)
    return (1, "the default; --nproc-per-node starts more") if nproc is None else (nproc, nproc_from)


def _nproc_problems(request: Request, machine: Machine) -> Iterable[str]:
    nproc, nproc_from = _nproc(request)
    contradiction = nproc_contradiction(request)
    if contradiction is not None:
        yield contradiction
    elif nproc < 1:
        yield f"{nproc} ranks asked for (by {nproc_from}); it takes at least 1"
    elif nproc > RANKS_PER_CORE_LIMIT * machine.cores and not request.oversubscribe:
        yield (
            f"{nproc} ranks on {machine.cores} usable cores ({machine.cores_from}) are more than "
            f"{RANKS_PER_CORE_LIMIT} a core (number from {nproc_from}); start at most "
            f"{RANKS_PER_CORE_LIMIT * machine.cores}, or add --oversubscribe if you mean it"
        )


def _nesting_problems(environ: Mapping[str, str]) -> Iterable[str]:
    """A launch inside a rank of another would multiply the ranks; a world of one is harmless."""
    rank, world_size = environ.get("RANK"), environ.get("WORLD_SIZE")
    if rank is None or world_size in (None, "1"):
        return
    unset = " ".join(f"-u {name}" for name in _RANK_NAMES if name in environ)
    yield (
        f"this process is already a rank of a launch (RANK={rank}, WORLD_SIZE={world_size}): each of "
        f"the {world_size} ranks would start its own; for a separate launch run: "
        f"env {unset} odc-launch ..."
    )
