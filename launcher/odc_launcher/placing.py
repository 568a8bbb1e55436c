"""Who starts the ranks: this process, a launcher that it calls, or one that has called it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from odc_launcher import slurm
from odc_launcher.plan import Place
from odc_launcher.request import Request, asked_nproc
from odcengine.errors import ConfigError
from odcengine.ranks import RankInfo, job_name, job_port, read_rank_info
from odcengine.slurm_step import slurm_in_step, step_hosts

TORCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


@dataclass(frozen=True)
class Wish:
    """What the user says about where the ranks run.

    Attributes:
        launcher: ``auto``, ``local``, ``slurm`` or ``mpi``.
        adopt: this process is one task of srun or mpirun.
        nodes: number of nodes.
        hostfile: MPI's file of hosts.
        container_image: for srun.
        sbatch_args, srun_args, mpirun_args: further options.
        max_restarts: how often failed ranks are started again.
        max_requeues: how often a job is requeued.
        options: those of the command line that a submitted job has to repeat.
    """

    launcher: str = "auto"
    adopt: bool = False
    nodes: int | None = None
    hostfile: str | None = None
    container_image: str | None = None
    sbatch_args: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    mpirun_args: tuple[str, ...] = ()
    max_restarts: int = 0
    max_requeues: int = 0
    options: tuple[str, ...] = ()


def choose_mode(wish: Wish, environ: Mapping[str, str], *, has_srun: bool, has_sbatch: bool) -> str:
    """``local``, ``adopt``, ``slurm`` (a step), ``submit`` or ``mpi``.

    Args:
        wish: what the user says.
        environ: the environment.
        has_srun: whether ``srun`` is installed.
        has_sbatch: whether ``sbatch`` is.

    Raises:
        ConfigError: the wish cannot be met here, or launchers' variables contradict each other.
    """
    outer = outer_rank(environ)
    if wish.adopt:
        if outer.source == "single process":
            raise ConfigError(
                "--adopt: no variables of srun or mpirun are set; start odc-launch by one of them"
            )
        return "adopt"
    if wish.launcher == "local":
        if wish.nodes not in (None, 1):
            raise ConfigError(f"--launcher local starts ranks on this host only, but --nodes is {wish.nodes}")
        return "local"
    if outer.world_size > 1:
        return "adopt"
    if wish.launcher == "mpi":
        return "mpi"
    in_job, in_step = bool(environ.get("SLURM_JOB_ID")), slurm_in_step(environ)
    if in_job and (wish.launcher == "slurm" or not in_step):
        if has_srun:
            return "slurm"
        num_nodes = len(step_hosts(environ)) or 1
        if wish.launcher == "slurm" or num_nodes > 1:
            raise ConfigError(
                f"SLURM_JOB_ID={environ['SLURM_JOB_ID']} is set, on {num_nodes} nodes, but srun is not "
                "installed here (in a container?): start odc-launch by srun from outside of it"
            )
        return "local"
    if in_job and wish.nodes is None:
        _refuse_part_of_a_job(environ)
    if wish.launcher == "slurm" or (wish.nodes or 1) > 1:
        if in_job:
            raise ConfigError(
                f"--nodes {wish.nodes}: this is a shell on one node of job {environ['SLURM_JOB_ID']}; add "
                "--launcher slurm to start ranks on the job's nodes"
            )
        if not has_sbatch:
            raise ConfigError(
                f"--nodes {wish.nodes or 1}: sbatch is not installed here, so no job can be submitted; use a "
                "login node, or --launcher mpi with --hostfile"
            )
        return "submit"
    return "local"


def _refuse_part_of_a_job(environ: Mapping[str, str]) -> None:
    """A step of one task in a larger job: what was meant is not known, and one node alone may be a mistake.

    ``sbatch`` from a shell that ``srun --pty`` started hands the shell's step on to the batch script.
    """
    pairs = (("SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES"), ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"))
    for whole, part in pairs:
        job, step = environ.get(whole, "1"), environ.get(part, "1")
        if job.isdecimal() and step.isdecimal() and int(job) > int(step):
            raise ConfigError(
                f"{whole}={job}, but {part}={step} describes a step of one task (this shell's, or left by "
                "the shell that submitted the job): add --launcher slurm to start ranks on all of the job, "
                "or --launcher local to start them on this node only"
            )


def outer_rank(environ: Mapping[str, str]) -> RankInfo:
    """This process as srun or mpirun counts it.

    torchrun's variables count only where both RANK and WORLD_SIZE are set beside a launcher's of several
    ranks: then they must agree. Alone they are a nested launch, which the plan refuses.
    """
    outer = read_rank_info({name: value for name, value in environ.items() if name not in TORCH_NAMES})
    if outer.world_size > 1 and "RANK" in environ and "WORLD_SIZE" in environ:
        inner = read_rank_info(environ)
        if (inner.rank, inner.world_size) != (outer.rank, outer.world_size):
            raise ConfigError(
                f"this process is already a rank of a launch (RANK={inner.rank}, "
                f"WORLD_SIZE={inner.world_size}) inside of {outer.source}'s {outer.world_size} tasks: each "
                "of them would start its own"
            )
    return outer


def adopted_place(request: Request, info: RankInfo, environ: Mapping[str, str], *, above: bool) -> Place:
    """The ranks that this task of srun or mpirun starts.

    Args:
        request: with the number of ranks, where each node has one task.
        info: the task, from :func:`outer_rank`.
        environ: its environment.
        above: whether the launch that started the step tells its failures.

    Raises:
        ConfigError: the number contradicts the tasks, or rank 0's address is not known.
    """
    nproc, _ = asked_nproc(request)
    if info.num_nodes is not None or info.world_size == 1:
        one_each = info.world_size in (1, info.num_nodes)
    else:  # MPI does not tell the number of nodes: on others there may be more tasks than on this one
        one_each = info.local_world_size == 1 and nproc is not None
    if not one_each and nproc not in (None, info.local_world_size):
        raise ConfigError(
            f"{nproc} ranks a node were asked for (--nproc-per-node or launch.nproc_per_node), but "
            f"{info.source} started {info.local_world_size} tasks on this one; start one task a node, or "
            "leave the number out"
        )
    rendezvous = info.rendezvous
    if rendezvous is None and info.world_size == 1:
        rendezvous = f"127.0.0.1:{job_port(job_name(environ) or '')}"
    if rendezvous is None:
        raise ConfigError(
            f"{info.source} started rank {info.rank} of {info.world_size} without saying where rank 0 runs: "
            "set MASTER_ADDR (and MASTER_PORT) for all ranks, or start them by odc-launch --launcher mpi"
        )
    each = (nproc or 1) if one_each else 1
    first = info.rank * each
    local_first = 0 if one_each else info.local_rank
    if local_first is None:
        raise ConfigError(
            f"{info.source} does not tell rank {info.rank}'s index on its node; start one task a node with "
            "--nproc-per-node, or use odc-launch --launcher slurm or mpi"
        )
    return Place(
        ranks=tuple(range(first, first + each)),
        local_ranks=tuple(range(local_first, local_first + each)),
        world_size=info.world_size * each,
        local_world_size=each if one_each else info.local_world_size,
        node_rank=info.rank if one_each else info.node_rank,
        num_nodes=info.world_size if one_each else info.num_nodes,
        master_addr=rendezvous.rpartition(":")[0],
        master_port=int(rendezvous.rpartition(":")[2]),
        source=info.source,
        signals_reach_ranks=(
            slurm_in_step(environ)
            and environ.get("SLURM_PROCID") == str(info.rank)
            and environ.get("SLURM_STEP_NUM_TASKS") == str(info.world_size)
        ),
        reported_above=above,
    )


def run_name(environ: Mapping[str, str], default: str) -> str:
    """Names the log folder: alike on all tasks of a step, anew for each step that is started."""
    if environ.get("SLURM_JOB_ID"):
        step = f".{environ['SLURM_STEP_ID']}" if slurm_in_step(environ) else f"-{default}"
        return f"slurm-{slurm.job_id(environ)}{step}"
    job = job_name(environ)
    return f"mpi-{job_port(job)}" if job is not None else default
