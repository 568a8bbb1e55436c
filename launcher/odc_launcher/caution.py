"""What is worth a warning before ranks start on other nodes: a job may have waited hours for them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from odc_launcher.request import Request
from odc_launcher.slurm import Shape, gpus_per_node
from odcengine.slurm_step import slurm_in_step

JOIN_HOSTS = ("nvshmem", "mpi", "collective")


def sharding_warnings(request: Request, num_nodes: int) -> Iterator[str]:
    """What the ranks will refuse on hosts of their own."""
    if request.sharding == "full" and num_nodes > 1 and request.transport not in JOIN_HOSTS:
        yield (
            f"odc.sharding: full on {num_nodes} nodes needs a transport that joins hosts "
            f"({', '.join(JOIN_HOSTS)}); with odc.transport: {request.transport} the ranks will refuse it: "
            "use `odc.sharding: hybrid`"
        )


def step_warnings(request: Request, environ: Mapping[str, str], shape: Shape) -> Iterator[str]:
    """What of an allocation the step will leave aside, or will miss."""
    components = environ.get("SLURM_HET_SIZE", "")
    if components.isdecimal() and int(components) > 1:
        yield (
            f"the job has {components} components (SLURM_HET_SIZE): ranks run on the nodes of the first one, "
            f"{', '.join(shape.hosts)}, only; a job without components uses all of its nodes"
        )
    gpus, source = gpus_per_node(environ)
    most = max(shape.tasks, default=0) * shape.nproc if shape.tasks is not None else None
    if request.device == "cpu" or gpus is None or most is None:
        return
    if most < gpus:
        yield (
            f"{gpus - most} of {gpus} GPUs of a node ({source}) stay idle: {most} ranks a node "
            f"({shape.source}); ask for --ntasks-per-node={gpus}, or start them by --nproc-per-node {gpus}"
        )
    elif most > gpus and environ.get("ODC_SHARE_GPUS") != "1":
        yield f"{most} ranks a node ({shape.source}) share {gpus} GPUs ({source}); the ranks will refuse it"


def placed_warnings(
    request: Request, environ: Mapping[str, str], local_world_size: int | None
) -> Iterator[str]:
    """What a task of the user's own ``srun`` misses."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    if request.device == "cpu" or not slurm_in_step(environ) or (local_world_size or 1) < 2:
        return
    if visible and "," not in visible:
        yield (
            f"CUDA_VISIBLE_DEVICES={visible} shows this rank one GPU of its node, as --gpus-per-task does; "
            "ranks may not reach others' GPUs then (odc.transport: cuda_p2p): add --gpu-bind=none to srun"
        )


def submission_warnings(request: Request, sbatch_args: Sequence[str], max_requeues: int) -> Iterator[str]:
    """What a job that is to go on in further runs lacks."""
    asked = any(arg.partition("=")[0] == "--signal" for arg in sbatch_args)
    if max_requeues and not request.preemption:
        yield (
            f"launch.max_requeues: {max_requeues}, but without checkpoint.dir ranks do not save and end with "
            "exit code 75 when they are warned, unless the script does so itself"
        )
    elif max_requeues and not asked and not request.max_time:
        yield (
            f"launch.max_requeues: {max_requeues}, but nothing warns the ranks before the time limit: add "
            "--signal=USR1@600 to launch.sbatch_args, or set preemption.max_time"
        )
