"""The one command that a launcher is given to start the ranks of a job on their nodes. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from odc_launcher import mpi, slurm
from odc_launcher.caution import sharding_warnings, step_warnings, submission_warnings
from odc_launcher.placing import TORCH_NAMES, Wish
from odc_launcher.plan import SHOWN_PREFIXES, Machine, log_folder
from odc_launcher.request import (
    INTERFACE_NAMES,
    Request,
    asked_nproc,
    common_problems,
    hash_of,
    job_of,
    nproc_contradiction,
    target_words,
)
from odcengine.errors import ConfigError
from odcengine.host.nvshmem_env import value_problems
from odcengine.hostlist import read_hostfile
from odcengine.slurm_step import slurm_in_step, step_hosts


@dataclass(frozen=True)
class JobPlan:
    """A command that starts ranks elsewhere.

    Attributes:
        mode: ``submit`` (sbatch), ``slurm`` (srun) or ``mpi`` (mpirun).
        argv: the command.
        stdin: the batch script that ``sbatch`` reads; None otherwise.
        env: what is added to its environment.
        unset: names removed from it.
        hosts: nodes in the order of ranks; empty where the scheduler will choose.
        ranks: of each node its ranks, where known.
        world_size: number of ranks.
        rendezvous: address and port of rank 0; None before the job has nodes.
        log_dir: folder of the logs; None where the job chooses it.
        request: what the ranks run.
        hash: as the ranks compare it; None where the rendezvous is not known yet.
        summary: one line that says what is started.
        warnings: what the user should know, one line each.
        num_nodes: number of nodes.
    """

    mode: str
    argv: tuple[str, ...]
    stdin: str | None
    env: dict[str, str]
    unset: tuple[str, ...]
    hosts: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    world_size: int
    rendezvous: str | None
    log_dir: str | None
    request: Request
    hash: str | None
    summary: str
    warnings: tuple[str, ...]
    num_nodes: int = 1


def plan_step(
    request: Request,
    wish: Wish,
    environ: Mapping[str, str],
    machine: Machine,
    address_of: Callable[[str], str] = str,
) -> JobPlan:
    """The ``srun`` that starts the ranks inside an allocation.

    Args:
        request: what they run.
        wish: how.
        environ: the environment inside the allocation.
        machine: this host, with the port.
        address_of: the address by which nodes reach a host.

    Raises:
        ConfigError: with what is wrong.
    """
    nproc, nproc_from = _asked_nproc(request)
    shape = slurm.allocation_shape(environ, nproc, nproc_from)
    num_nodes = len(shape.tasks or shape.hosts)
    _check(request, environ, num_nodes)
    if wish.nodes not in (None, num_nodes):
        raise ConfigError(f"--nodes {wish.nodes}, but SLURM's job {environ['SLURM_JOB_ID']} has {num_nodes}")
    log_dir = log_folder(request, machine)
    address = environ.get("MASTER_ADDR") or (address_of(shape.hosts[0]) if shape.hosts else None)
    rendezvous = {"MASTER_PORT": str(machine.master_port)}
    if address is not None:
        rendezvous["MASTER_ADDR"] = address
    argv = slurm.srun_argv(
        shape,
        environ,
        inner_command(request, machine, log_dir, shape.nproc if set(shape.tasks or ()) == {1} else None),
        container_image=wish.container_image,
        srun_args=wish.srun_args,
        inside_step=slurm_in_step(environ) or environ.get("SLURM_STEP_ID") is not None,
    )
    where = f"{address}:{machine.master_port}" if address is not None else None
    return JobPlan(
        mode="slurm",
        argv=argv,
        stdin=None,
        env=_env(request, environ) | rendezvous,
        unset=_unset(environ),
        hosts=shape.hosts,
        ranks=_ranks_of(shape, slurm.of_the_job(environ)),
        world_size=shape.world_size,
        rendezvous=where,
        log_dir=log_dir,
        request=request,
        hash=None if where is None else hash_of(request, shape.world_size, where),
        summary=(
            f"{_count(shape.world_size, 'rank')} on {_count(num_nodes, 'node')} of {slurm.run_of(environ)} "
            f"({shape.source}), rank 0 at {where}, logs in {os.path.relpath(log_dir, machine.cwd)}"
        ),
        warnings=(*sharding_warnings(request, num_nodes), *step_warnings(request, environ, shape)),
        num_nodes=num_nodes,
    )


def plan_submission(request: Request, wish: Wish, environ: Mapping[str, str], machine: Machine) -> JobPlan:
    """The job that is submitted from a login node; inside of it odc-launch plans its step.

    Raises:
        ConfigError: with what is wrong.
    """
    nodes, nproc = wish.nodes or 1, _asked_nproc(request)[0] or 1
    _check(request, environ, nodes)
    command = [machine.python, "-u", "-m", "odc_launcher", "--launcher", "slurm"]
    command += [*wish.options, *_options(request, machine), *target_words(request), *request.args]
    script = slurm.batch_script(
        name=os.path.basename(request.target),
        nodes=nodes,
        nproc=nproc,
        command=command,
        cwd=machine.cwd,
        sbatch_args=(*_sbatch_options(wish, nodes), *wish.sbatch_args),
    )
    exports = any(arg.partition("=")[0] == "--export" for arg in wish.sbatch_args)
    return JobPlan(
        mode="submit",
        argv=("sbatch", "--parsable", *(() if exports else ("--export=ALL",))),
        stdin=script,
        env=_env(request, environ),
        unset=_unset(environ),
        hosts=(),
        ranks=(),
        world_size=nodes * nproc,
        rendezvous=None,
        log_dir=None if request.log_dir is None else log_folder(request, machine),
        request=request,
        hash=None,
        summary=f"a job of {_count(nodes, 'node')} with {_count(nproc, 'rank')} each",
        warnings=(
            *sharding_warnings(request, nodes),
            *submission_warnings(request, wish.sbatch_args, wish.max_requeues),
        ),
        num_nodes=nodes,
    )


def _sbatch_options(wish: Wish, nodes: int) -> Iterator[str]:
    """What a job needs that outlives a node, or runs again; the user's own options come later and win."""
    if wish.max_restarts and nodes > 1:
        yield "--no-kill"
    if wish.max_requeues:
        yield from ("--requeue", "--open-mode=append")  # one output file for all runs


def plan_mpi(
    request: Request,
    wish: Wish,
    environ: Mapping[str, str],
    machine: Machine,
    flavor: mpi.Flavor,
    program: str = "mpirun",
    address_of: Callable[[str], str] = str,
) -> JobPlan:
    """The ``mpirun`` that starts the ranks: on the hosts of a file, on a SLURM job's nodes, or here.

    Args:
        request: what they run.
        wish: how.
        environ: the environment.
        machine: this host, with the port.
        flavor: the implementation.
        program: ``mpirun`` or ``mpiexec``.
        address_of: the address by which nodes reach a host.

    Raises:
        ConfigError: with what is wrong.
    """
    hosts = tuple(hosts_for_mpi(wish, environ))
    nodes, nproc = wish.nodes or len(hosts) or 1, _mpi_nproc(request, wish, environ)
    _check(request, environ, nodes)
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if nodes == 1 and not hosts else None)
    address = address or (address_of(hosts[0]) if hosts else None)
    if address is None:
        raise ConfigError(
            f"--launcher mpi on {nodes} nodes: which host has rank 0 is not known; give --hostfile, or set "
            "MASTER_ADDR"
        )
    where = f"{address}:{machine.master_port}"
    log_dir = log_folder(request, machine)
    env = _env(request, environ) | {"MASTER_ADDR": address, "MASTER_PORT": str(machine.master_port)}
    visible = {name: value for name, value in environ.items() if name not in _unset(environ)} | env
    argv = mpi.mpirun_argv(
        flavor,
        inner_command(request, machine, log_dir, None),
        nodes=nodes,
        nproc=nproc,
        names=mpi.exported_names(visible, list(env), SHOWN_PREFIXES),
        hostfile=wish.hostfile,
        oversubscribe=request.oversubscribe,
        mpirun_args=wish.mpirun_args,
        program=program,
    )
    return JobPlan(
        mode="mpi",
        argv=argv,
        stdin=None,
        env=env,
        unset=_unset(environ),
        hosts=hosts,
        ranks=(),
        world_size=nodes * nproc,
        rendezvous=where,
        log_dir=log_dir,
        request=request,
        hash=hash_of(request, nodes * nproc, where),
        summary=(
            f"{_count(nodes * nproc, 'rank')} by {flavor.name}, rank 0 at {where}, "
            f"logs in {os.path.relpath(log_dir, machine.cwd)}"
        ),
        warnings=tuple(sharding_warnings(request, nodes)),
        num_nodes=nodes,
    )


def inner_command(request: Request, machine: Machine, log_dir: str, nproc: int | None) -> list[str]:
    """What each task of the step runs: odc-launch again, which starts the ranks of its task."""
    words = [machine.python, "-u", "-m", "odc_launcher", "--adopt", "--reported-above"]
    if nproc is not None:
        words += ["--nproc-per-node", str(nproc)]
    words += _options(request, machine, log_dir=log_dir, with_nproc=False)
    return [*words, *target_words(request), *request.args]


def _options(
    request: Request, machine: Machine, *, log_dir: str | None = None, with_nproc: bool = True
) -> list[str]:
    words = []
    if with_nproc and request.nproc is not None:
        words += ["--nproc-per-node", str(request.nproc)]
    if request.config_path is not None:
        words += ["--config", os.path.join(machine.cwd, request.config_path)]
    folder = log_dir if log_dir is not None else request.log_dir
    if folder is not None:
        words += ["--log-dir", os.path.join(machine.cwd, folder)]
    return [*words, "--show", request.show, "--grace-s", f"{request.grace_s:g}"]


def _asked_nproc(request: Request) -> tuple[int | None, str]:
    contradiction = nproc_contradiction(request)
    if contradiction is not None:
        raise ConfigError(contradiction)
    nproc, nproc_from = asked_nproc(request)
    if nproc is not None and nproc < 1:
        raise ConfigError(f"{nproc_from} {nproc}: a node takes at least 1 rank")
    return nproc, nproc_from


def _env(request: Request, environ: Mapping[str, str]) -> dict[str, str]:
    """Of the settings what is equal everywhere; what is expanded is left to each rank's node."""
    names = [item for item in INTERFACE_NAMES if request.interface is not None and item not in environ]
    return {**{name: str(request.interface) for name in names}, **request.env}


def _unset(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Ranks of another launch, and a configuration that was not checked, are not passed on.

    Nor is the core mask of the one task of a shell of ``srun --pty``, which srun would bind all ranks to.
    """
    mask = slurm.CORE_MASK if slurm.CORE_MASK[-1] in environ else ()
    return tuple(name for name in (*TORCH_NAMES, "ODC_CONFIG", "ODC_ERROR_FILE", *mask) if name in environ)


def _mpi_nproc(request: Request, wish: Wish, environ: Mapping[str, str]) -> int:
    """Ranks on each node: as the user says, else as a SLURM job asked for, else one."""
    nproc, nproc_from = _asked_nproc(request)
    if nproc is not None or not environ.get("SLURM_JOB_ID") or wish.hostfile is not None:
        return nproc or 1
    shape = slurm.allocation_shape(environ, nproc, nproc_from)
    if shape.tasks is None or len(set(shape.tasks)) != 1:
        raise ConfigError(
            f"--launcher mpi: the job's tasks ({shape.source}) are not the same number on all nodes; give "
            "--nproc-per-node"
        )
    return shape.tasks[0] * shape.nproc


def hosts_for_mpi(wish: Wish, environ: Mapping[str, str]) -> list[str]:
    """The hosts of the file, else of the SLURM job; empty where there is neither."""
    if wish.hostfile is not None:
        try:
            lines = Path(wish.hostfile).read_text().splitlines()
        except OSError as error:
            raise ConfigError(f"--hostfile {wish.hostfile} cannot be read: {error.strerror}") from error
        names = [line.partition("#")[0].split() for line in lines]
        return list(dict.fromkeys(words[0].partition(":")[0] for words in names if words))
    return step_hosts(environ) if environ.get("SLURM_JOB_ID") else []


def _ranks_of(shape: slurm.Shape, environ: Mapping[str, str]) -> tuple[tuple[int, ...], ...]:
    """Of each node its ranks: by blocks, or as a hostfile says; empty where another distribution is set."""
    distribution = environ.get("SLURM_DISTRIBUTION", "block")
    if environ.get("SLURM_HOSTFILE") and environ.get("SLURM_DISTRIBUTION", "arbitrary").startswith("arb"):
        listed = read_hostfile(environ["SLURM_HOSTFILE"])
        return tuple(tuple(i for i, name in enumerate(listed) if name == host) for host in shape.hosts)
    if shape.tasks is None or not distribution.startswith(("block", "*", "unknown")):
        return ()
    ranks, first = [], 0
    for tasks in shape.tasks:
        ranks.append(tuple(range(first, first + tasks * shape.nproc)))
        first += tasks * shape.nproc
    return tuple(ranks)


def _check(request: Request, environ: Mapping[str, str], num_nodes: int) -> None:
    """Raises with what is wrong wherever the ranks will be."""
    job = job_of(request, several_nodes=num_nodes > 1)
    problems = [*common_problems(request), *value_problems({**environ, **request.env}, job)]
    if problems:
        raise ConfigError(*problems)


def _count(number: int, what: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {what}{'s' * (number != 1)}"
