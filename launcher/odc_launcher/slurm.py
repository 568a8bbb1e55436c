"""SLURM: what an allocation offers, the step that is started in it, the job that is submitted. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from odcengine.errors import ConfigError
from odcengine.hostlist import expand_counts, read_hostfile
from odcengine.preemption import REQUEUE_EXIT_CODE
from odcengine.slurm_step import slurm_in_step, step_hosts

# What odc-launch derives itself: a second value beside its own would contradict it.
_OWN_OPTIONS = {
    "--nodes": "--nodes of odc-launch",
    "-N": "--nodes of odc-launch",
    "--ntasks-per-node": "--nproc-per-node of odc-launch",
    "--ntasks": "--nodes and --nproc-per-node of odc-launch",
    "-n": "--nodes and --nproc-per-node of odc-launch",
    "--container-image": "launch.container_image",
}
CORE_MASK = ("SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_VERBOSE", "SLURM_CPU_BIND_TYPE")
"""What srun sets in a task that it has bound. The user's own choice is the first without the others."""


@dataclass(frozen=True)
class Shape:
    """Tasks of the step to be started in an allocation.

    Attributes:
        hosts: the nodes, the one of rank 0 first.
        tasks: tasks on each node, in the order of ``hosts``; None where SLURM places them.
        num_tasks: tasks of the step.
        nproc: ranks that each task starts.
        source: where the numbers come from, in words.
    """

    hosts: tuple[str, ...]
    tasks: tuple[int, ...] | None
    num_tasks: int
    nproc: int
    source: str

    @property
    def world_size(self) -> int:
        return self.num_tasks * self.nproc


def allocation_shape(environ: Mapping[str, str], nproc: int | None, nproc_from: str) -> Shape:
    """The step that suits an allocation.

    One task a rank, where the allocation has as many; one task a node, which starts ``nproc`` ranks, where
    it has one a node or none was asked for.

    Args:
        environ: the environment inside the allocation.
        nproc: ranks on each node, if the user said so.
        nproc_from: where that comes from, for messages.

    Raises:
        ConfigError: the variables contradict each other or ``nproc``, or are not understood.
    """
    environ = of_the_job(environ)
    hosts = step_hosts({name: value for name, value in environ.items() if name != "SLURM_STEP_NODELIST"})
    num_nodes = _number(environ, "SLURM_JOB_NUM_NODES") or _number(environ, "SLURM_NNODES") or len(hosts)
    if hosts and num_nodes != len(hosts):
        name = "SLURM_JOB_NUM_NODES" if "SLURM_JOB_NUM_NODES" in environ else "SLURM_NNODES"
        raise ConfigError(
            f"{name}={environ.get(name)} but the list of nodes names {len(hosts)}: {', '.join(hosts)}; unset "
            "what is left over from another job"
        )
    if num_nodes < 1 and environ.get("SLURM_HET_SIZE"):
        raise ConfigError(
            f"the job has {environ['SLURM_HET_SIZE']} components (SLURM_HET_SIZE), but odc-launch starts one "
            "step on nodes that are alike: ask for a job without components"
        )
    if num_nodes < 1:
        raise ConfigError(
            "SLURM_JOB_ID is set but neither SLURM_JOB_NODELIST nor SLURM_NNODES names nodes, as sbatch and "
            "salloc do; outside of a job unset it, or say --launcher local"
        )

    num_tasks, tasks, source = _asked_tasks(environ, num_nodes)
    hostfile = environ.get("SLURM_HOSTFILE")
    if hostfile and environ.get("SLURM_DISTRIBUTION", "arbitrary").startswith("arbitrary"):
        listed = read_hostfile(hostfile)
        if num_tasks not in (None, len(listed)):
            raise ConfigError(
                f"SLURM_HOSTFILE={hostfile} places {len(listed)} tasks, but {source}: give as many lines"
            )
        num_tasks, source = len(listed), f"SLURM_HOSTFILE={hostfile}"
        tasks = tuple(listed.count(host) for host in hosts)

    if num_tasks is None or (tasks is not None and set(tasks) == {1}):  # one task a node, nproc ranks each
        if nproc is None:
            nproc, nproc_from = gpus_per_node(environ)
            _check_equal_gpus(environ, nproc, num_nodes)
        count = 1 if nproc is None else nproc
        told = nproc_from if nproc is not None or num_tasks is None else source
        return Shape(tuple(hosts), (1,) * num_nodes, num_nodes, count, told)
    if nproc is not None and tasks != (nproc,) * num_nodes:
        shown = f"{num_tasks} tasks" if tasks is None else f"{'/'.join(map(str, tasks))} tasks"
        if tasks is not None and len(set(tasks)) == 1:
            shown = f"{tasks[0]} tasks a node"
        raise ConfigError(
            f"{nproc} ranks a node ({nproc_from}) contradict the allocation, which has {shown} "
            f"({source}) on {num_nodes} node{'s' * (num_nodes > 1)}; ask SLURM for "
            f"--ntasks-per-node={nproc}, or for --ntasks-per-node=1, or leave {nproc_from.split()[0]} out"
        )
    return Shape(tuple(hosts), tasks, num_tasks, 1, source)


def of_the_job(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment without what concerns only the shell that ``srun --pty`` started in the job."""
    if not slurm_in_step(environ) or environ.get("SLURM_HOSTFILE"):
        return environ
    own = {"SLURM_DISTRIBUTION"}
    if environ.get("SLURM_NTASKS") == environ.get("SLURM_STEP_NUM_TASKS"):
        own |= {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER_NODE"}
    return {name: value for name, value in environ.items() if name not in own}


def _asked_tasks(
    environ: Mapping[str, str], num_nodes: int
) -> tuple[int | None, tuple[int, ...] | None, str]:
    """Tasks of the job, in all and a node; None where the job did not ask for any."""
    total, each = _number(environ, "SLURM_NTASKS"), _number(environ, "SLURM_NTASKS_PER_NODE")
    if total is None and each is None:
        return None, None, "no tasks were asked for"
    per_node = environ.get("SLURM_TASKS_PER_NODE")
    counts = tuple(expand_counts(per_node, "SLURM_TASKS_PER_NODE")) if per_node is not None else None
    if total is None:
        assert each is not None
        return each * num_nodes, (each,) * num_nodes, f"SLURM_NTASKS_PER_NODE={each}"
    source = f"SLURM_NTASKS={total}"
    if total < num_nodes:
        raise ConfigError(
            f"{source} is less than the job's {num_nodes} nodes; if the shell that submitted the job left "
            "it, unset SLURM_NTASKS before sbatch, or ask for tasks (--ntasks-per-node)"
        )
    if counts is not None and len(counts) == num_nodes and sum(counts) == total:
        return total, counts, f"{source}, SLURM_TASKS_PER_NODE={per_node}"
    if each is not None and each * num_nodes == total:
        return total, (each,) * num_nodes, f"{source}, SLURM_NTASKS_PER_NODE={each}"
    if num_nodes == 1:
        return total, (total,), source
    return total, None, source


def gpus_per_node(environ: Mapping[str, str]) -> tuple[int | None, str]:
    """GPUs of the job on a node, and which variable says so: ``4`` and ``a100:4`` are four.

    ``--gpus-per-node`` tells them as they are on all nodes, ``--gres`` and ``--gpus`` on this one only.
    """
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        count = environ.get(name, "").rpartition(":")[2]
        if count.isdecimal() and int(count) > 0:
            return int(count), f"{name}={environ[name]}"
    return None, "the default; --nproc-per-node starts more"


def _check_equal_gpus(environ: Mapping[str, str], nproc: int | None, num_nodes: int) -> None:
    """``--gpus=12`` may be 8 on one node and 4 on the other, which only that one's own variables tell."""
    total = environ.get("SLURM_GPUS", "").rpartition(":")[2]
    if nproc is not None and total.isdecimal() and int(total) != nproc * num_nodes:
        raise ConfigError(
            f"SLURM_GPUS={environ['SLURM_GPUS']} on {num_nodes} nodes, of which this one has {nproc}: the "
            "others have other numbers; ask for --gpus-per-node, or for a task a GPU (--ntasks-per-gpu=1)"
        )


def srun_argv(
    shape: Shape,
    environ: Mapping[str, str],
    inner: Sequence[str],
    *,
    container_image: str | None = None,
    srun_args: Sequence[str] = (),
    inside_step: bool = False,
) -> tuple[str, ...]:
    """The command of the step.

    Args:
        shape: its tasks.
        environ: what ``srun`` inherits; its own variables there are left to it.
        inner: the command of each task.
        container_image: passed through.
        srun_args: the user's further options, which come last and so win.
        inside_step: started from an interactive step, whose cores it shares.
    """
    environ = of_the_job(environ)
    num_nodes = len(shape.tasks) if shape.tasks is not None else len(shape.hosts)
    words = ["srun", f"--nodes={num_nodes}", f"--ntasks={shape.num_tasks}"]
    arbitrary = bool(environ.get("SLURM_HOSTFILE"))
    per_gpu = bool(environ.get("SLURM_NTASKS_PER_GPU"))  # srun takes only one of the two
    if shape.tasks is not None and len(set(shape.tasks)) == 1 and not arbitrary and not per_gpu:
        words.append(f"--ntasks-per-node={shape.tasks[0]}")
    cpus = _cpus_per_task(shape, environ)
    if cpus is not None:  # srun has not taken it from the environment since 22.05
        words.append(f"--cpus-per-task={cpus}")
    if "SLURM_KILL_BAD_EXIT" not in environ:
        words.append("--kill-on-bad-exit=1")
    if "SLURM_WAIT" not in environ:
        words.append("--wait=0")
    words.append("--export=ALL")
    if inside_step:
        words.append("--overlap")
    if slurm_in_step(environ) and "SLURM_DISTRIBUTION" not in environ:
        words.append("--distribution=block")  # not as srun has placed the shell's one task
    if per_gpu or environ.get("SLURM_GPUS_PER_TASK") or "gpu" in environ.get("SLURM_TRES_PER_TASK", ""):
        words.append("--gpu-bind=none")  # else each rank would see its own GPU only, and reach no other
    if container_image is not None:
        words.append(f"--container-image={container_image}")
    return (*words, *srun_args, *inner)


def _cpus_per_task(shape: Shape, environ: Mapping[str, str]) -> int | None:
    if environ.get("SRUN_CPUS_PER_TASK"):  # the user's word to srun
        return None
    asked = _number(environ, "SLURM_CPUS_PER_TASK")
    if asked is not None or shape.tasks is None or set(shape.tasks) != {1}:
        return asked
    if environ.get("SLURM_CPUS_PER_GPU"):  # srun multiplies it itself, and takes only one of the two
        return None
    # One task a node without a number would get one core of all that the job has there.
    per_node = environ.get("SLURM_JOB_CPUS_PER_NODE")
    return min(expand_counts(per_node, "SLURM_JOB_CPUS_PER_NODE")) if per_node else None


def batch_script(
    *,
    name: str,
    nodes: int,
    nproc: int,
    command: Sequence[str],
    cwd: str,
    sbatch_args: Sequence[str] = (),
) -> str:
    """The job that is submitted. Values of variables are not in it: ``sbatch`` carries them.

    ``exec`` makes odc-launch the batch script's process, so that ``--signal=B:USR1@300`` reaches it.

    Raises:
        ConfigError: an argument is one that odc-launch gives itself, or cannot stand in a script.
    """
    problems = []
    for arg in sbatch_args:
        option = arg.partition("=")[0]
        short = arg[:2] if arg[:1] == "-" and arg[:2] != "--" else option
        owner = _OWN_OPTIONS.get(option, _OWN_OPTIONS.get(short))
        if owner is not None:
            problems.append(f"launch.sbatch_args: {arg} is given by {owner}")
        elif not arg.startswith("-") or "\n" in arg:
            problems.append(f"launch.sbatch_args: {arg!r} is no option; write each as --name=value")
    if problems:
        raise ConfigError(*problems)
    options = [f"--job-name={name}", f"--nodes={nodes}", f"--ntasks-per-node={nproc}", f"--chdir={cwd}"]
    lines = ["#!/bin/bash", *(f"#SBATCH {_sbatch_word(word)}" for word in (*options, *sbatch_args))]
    return "\n".join([*lines, "", "exec " + " ".join(map(shlex.quote, command))]) + "\n"


def _sbatch_word(word: str) -> str:
    """As sbatch parses its lines: double quotes around blanks, a backslash before quotes."""
    if not any(letter in word for letter in " \t\"'\\#"):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def job_id(environ: Mapping[str, str]) -> str:
    """The job's name for ``scontrol``: of an array's member ``1234_1``, for its number may mean the array."""
    array, member = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{member}" if array and member else environ["SLURM_JOB_ID"]


def run_of(environ: Mapping[str, str]) -> str:
    """``SLURM's job 1234_1``, and which of its runs this is where it was requeued; else ``odc-launch``."""
    if not environ.get("SLURM_JOB_ID"):
        return "odc-launch"
    before = environ.get("SLURM_RESTART_COUNT", "0")
    run = f", run {int(before) + 1}" if before.isdecimal() and int(before) else ""
    return f"SLURM's job {job_id(environ)}{run}"


def requeue_argv(environ: Mapping[str, str], exit_code: int, max_requeues: int) -> tuple[str, ...] | None:
    """The command that makes the job run again; None where it should not.

    Args:
        environ: the environment inside the job.
        exit_code: how the ranks ended.
        max_requeues: how often it may, by ``SLURM_RESTART_COUNT``.
    """
    if exit_code != REQUEUE_EXIT_CODE or "SLURM_JOB_ID" not in environ:
        return None
    if (_number(environ, "SLURM_RESTART_COUNT") or 0) >= max_requeues:
        return None
    return ("scontrol", "requeue", job_id(environ))


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """A whole number, also ``2(x3)`` where all nodes have the same."""
    text = environ.get(name)
    if text is None or text == "":
        return None
    counts = set(expand_counts(text, name))
    if len(counts) != 1 or (0 in counts and name != "SLURM_RESTART_COUNT"):
        raise ConfigError(f"{name}={text!r} is no whole number of at least 1")
    return counts.pop()
