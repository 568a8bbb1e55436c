"""Which launcher takes a job, and what it is given: without a cluster, against golden files.

After a wanted change: ODC_UPDATE_GOLDEN=1 pytest on this file, then read the difference.
"""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from odc_launcher import mpi, slurm, step
from odc_launcher.job import plan_mpi, plan_step, plan_submission
from odc_launcher.placing import Wish, adopted_place, choose_mode, outer_rank, run_name
from odc_launcher.plan import Machine, make_plan
from odc_launcher.printing import render, render_job, render_plan
from odc_launcher.request import Request

from odcengine.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden"
MACHINE = Machine(
    host="login1",
    cores=8,
    cores_from="CPU affinity",
    master_port=20123,
    python="/opt/py/bin/python",
    cwd="/home/u",
    run_name="slurm-77-now",
)
REQUEST = Request(
    "train.py",
    args=("--lr", "2e-5", 'it\'s "x"'),
    config_path="sft.yaml",
    config_hash="0123456789abcdef",
)
ALLOCATION = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "gpu[01-02]", "SLURM_JOB_NUM_NODES": "2"}
TASKS = {**ALLOCATION, "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NTASKS_PER_NODE": "4"}
TASK = {
    **TASKS,
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[01-02]",
}
USER = {  # user case 5
    "SLURM_JOB_CPUS_PER_NODE": "64(x2)",
    "A": "two words",
    "NCCL_B": 'it\'s "x"',
    "CUDA_PATHS": "/opt/a:$LD_LIBRARY_PATH",
    "NVSHMEM_SYMMETRIC_SIZE": "8G",
    "WANDB_API_KEY": "geheim",
}
OPEN_MPI = mpi.flavor_of("mpirun (Open MPI) 4.1.4")


def matches(name: str, text: str) -> None:
    """Compares with a golden file."""
    file = GOLDEN / name
    if os.environ.get("ODC_UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


# -- golden files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "environ", "request_", "wish"),
    [
        ("srun_task_a_rank.txt", {**TASKS, "SLURM_CPUS_PER_TASK": "16", **USER}, REQUEST, Wish()),
        ("srun_task_a_node.txt", {**ALLOCATION, **USER}, replace(REQUEST, nproc=4), Wish()),
        (
            "srun_uneven.txt",
            {
                **ALLOCATION,
                "SLURM_JOB_NODELIST": "a[1-3]",
                "SLURM_JOB_NUM_NODES": "3",
                "SLURM_NTASKS": "10",
                "SLURM_TASKS_PER_NODE": "4(x2),2",
                "SLURM_KILL_BAD_EXIT": "0",
                "SLURM_WAIT": "30",
            },
            REQUEST,
            Wish(),
        ),
        (
            "srun_container.txt",
            TASKS,
            replace(REQUEST, interface="ib0", env={"ODC_NOTE": "$HOME stays"}, show="rank0"),
            Wish(container_image="/images/odc.sqsh", srun_args=("--mpi=none",)),
        ),
    ],
)
def test_step(name: str, environ: dict[str, str], request_: Request, wish: Wish) -> None:
    plan = plan_step(request_, wish, environ, MACHINE)
    matches(name, render_job(plan, environ))
    matches(name.replace(".txt", ".json"), render_plan(plan, environ, "json"))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({**TASKS, "SLURM_CPUS_PER_TASK": "16"}, ["--cpus-per-task=16"]),
        (TASKS, []),  # srun's own default
        ({**ALLOCATION, "SLURM_JOB_CPUS_PER_NODE": "96,64"}, ["--cpus-per-task=64"]),  # a task a node
        ({**ALLOCATION, "SLURM_JOB_CPUS_PER_NODE": "96(x2)", "SLURM_CPUS_PER_GPU": "12"}, []),
        ({**TASKS, "SLURM_CPUS_PER_TASK": "16", "SRUN_CPUS_PER_TASK": "8"}, []),  # srun reads that itself
    ],
)
def test_cores_of_a_task_are_the_jobs(environ: dict[str, str], expected: list[str]) -> None:
    plan = plan_step(REQUEST, Wish(), environ, MACHINE)
    assert [word for word in plan.argv if word.startswith("--cpus-per-task")] == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({**TASKS, "SLURM_GPUS_PER_NODE": "4"}, ["--ntasks-per-node=4"]),
        ({**TASKS, "SLURM_GPUS_PER_TASK": "1"}, ["--ntasks-per-node=4", "--gpu-bind=none"]),
        ({**TASKS, "SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"}, ["--ntasks-per-node=4", "--gpu-bind=none"]),
        ({**TASKS, "SLURM_NTASKS_PER_GPU": "1"}, ["--gpu-bind=none"]),  # srun takes one of the two
    ],
)
def test_ranks_of_a_node_see_all_its_gpus(environ: dict[str, str], expected: list[str]) -> None:
    words = plan_step(REQUEST, Wish(), environ, MACHINE).argv
    assert [word for word in words if word.startswith(("--ntasks-per-node", "--gpu-bind"))] == expected
    words = plan_step(REQUEST, Wish(srun_args=("--gpu-bind=closest",)), environ, MACHINE).argv
    assert [word for word in words if word.startswith("--gpu-bind")][-1] == "--gpu-bind=closest"


def test_ranks_are_not_bound_to_the_core_of_a_shell_of_srun() -> None:
    mask = dict.fromkeys(slurm.CORE_MASK, "mask_cpu:0x1")
    assert plan_step(REQUEST, Wish(), {**TASKS, **mask}, MACHINE).unset == slurm.CORE_MASK
    assert plan_step(REQUEST, Wish(), {**TASKS, "SLURM_CPU_BIND": "cores"}, MACHINE).unset == ()


@pytest.mark.parametrize(
    ("sharding", "transport", "nodes", "warned"),
    [
        ("full", "auto", 2, True),
        ("full", "cuda_p2p", 2, True),
        ("full", "nvshmem", 2, False),
        ("full", "auto", 1, False),
        ("hybrid", "auto", 2, False),
        ("auto", "auto", 2, False),
    ],
)
def test_full_sharding_over_nodes_is_warned_of_before_the_job_waits(
    sharding: str, transport: str, nodes: int, warned: bool
) -> None:
    request = replace(REQUEST, sharding=sharding, transport=transport)
    plan = plan_submission(request, Wish(nodes=nodes), {}, MACHINE)
    assert len(plan.warnings) == warned
    for warning in plan.warnings:
        assert "odc.sharding: full on 2 nodes needs a transport that joins hosts (nvshmem, mpi" in warning


def test_submission() -> None:
    wish = Wish(
        nodes=2,
        sbatch_args=("--time=02:00:00", "--comment=two words", "--array=0-3"),
        options=("--srun-arg=--mpi=none",),
    )
    request = replace(REQUEST, nproc=4, env={"HF_TOKEN": "geheim", "ODC_NOTE": "x"})
    plan = plan_submission(request, wish, USER, MACHINE)
    matches("sbatch.txt", render_job(plan, USER))
    assert plan.stdin is not None
    assert "geheim" not in plan.stdin + render_job(plan, USER)
    assert plan.env["HF_TOKEN"] == "geheim"  # sbatch carries it
    assert shlex.split(plan.stdin.splitlines()[-1])[-3:] == list(REQUEST.args)


@pytest.mark.parametrize(
    ("name", "version", "nodes"),
    [
        ("mpirun_open_mpi.txt", "mpirun (Open MPI) 4.1.4\n", 2),
        ("mpirun_open_mpi_one.txt", "mpirun (Open MPI) 4.1.4\n", 1),
        ("mpirun_intel.txt", "Intel(R) MPI Library for Linux* OS, Version 2021.13", 2),
        ("mpirun_hydra.txt", "HYDRA build details:\n    Version: 4.2.2", 2),
        ("mpirun_pals.txt", "mpiexec version 1.8.0 revision 1", 2),
    ],
)
def test_mpirun(name: str, version: str, nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("b1 slots=4\nb2 slots=4 # second\n")
    wish = Wish(nodes=nodes, hostfile="hosts" if nodes > 1 else None, mpirun_args=("--verbose",))
    environ = {**USER, "PATH": "/bin", "BASH_FUNC_x%%": "() { :; }"}
    flavor = mpi.flavor_of(version)
    plan = plan_mpi(replace(REQUEST, nproc=4), wish, environ, MACHINE, flavor)
    matches(name, render_job(plan, environ))
    assert plan.world_size == 4 * nodes
    assert "geheim" not in render_plan(plan, environ, "json")


def test_adopted_rank() -> None:
    environ = {**TASK, **USER, "SLURM_CPUS_PER_TASK": "16", "MASTER_PORT": "20123"}
    place = adopted_place(REQUEST, outer_rank(environ), environ, above=True)
    plan = make_plan(REQUEST, environ, replace(MACHINE, host="gpu02"), place)
    matches("adopted.txt", render(plan, environ))
    matches("adopted_plan.txt", render_plan(plan, environ, "text"))
    matches("adopted_plan.json", render_plan(plan, environ, "json"))


def test_the_step_and_its_ranks_have_one_hash() -> None:
    above = plan_step(REQUEST, Wish(), TASKS, MACHINE)
    hashes = set()
    for rank in range(8):
        numbers = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank % 4, "SLURM_NODEID": rank // 4}
        environ = {**TASK, **{name: str(value) for name, value in numbers.items()}, **above.env}
        place = adopted_place(REQUEST, outer_rank(environ), environ, above=True)
        hashes.add(make_plan(REQUEST, environ, MACHINE, place).hash)
    assert hashes == {above.hash}
    other = replace(REQUEST, config_hash="fedcba9876543210")  # another file on one node
    assert plan_step(other, Wish(), TASKS, MACHINE).hash != above.hash


# -- printed lines give a shell the same values (user case 5) -----------------------------------------------


def test_printed_line_is_parsed_back_and_masked() -> None:
    environ = {**TASKS, **USER}
    plan = plan_step(REQUEST, Wish(), environ, MACHINE)
    words = shlex.split(render_job(plan, environ), comments=True)
    split = words.index("srun")
    assert tuple(words[split:]) == plan.argv
    shown = dict(word.split("=", 1) for word in words[1:split])
    assert shown == {
        "NCCL_B": 'it\'s "x"',
        "CUDA_PATHS": "/opt/a:$LD_LIBRARY_PATH",
        "NVSHMEM_SYMMETRIC_SIZE": "8G",
        "WANDB_API_KEY": "***",
        "MASTER_ADDR": "gpu01",
        "MASTER_PORT": "20123",
    }


def test_expansion_happens_only_where_asked_for() -> None:
    request = replace(
        REQUEST,
        env={"LD_LIBRARY_PATH": "/opt/a:$LD_LIBRARY_PATH"},
        env_expand={"ODC_X": "/opt/a:${LD_LIBRARY_PATH}:$NOT_THERE", "ODC_Y": "$$A"},
    )
    environ = {**TASK, "LD_LIBRARY_PATH": "/usr/lib", "A": "1", "CUDA_VISIBLE_DEVICES": "3"}
    place = adopted_place(request, outer_rank(environ), environ, above=False)
    env = make_plan(request, environ, MACHINE, place).ranks[0].env
    assert env["LD_LIBRARY_PATH"] == "/opt/a:$LD_LIBRARY_PATH"
    assert env["ODC_X"] == "/opt/a:/usr/lib:"
    assert env["ODC_Y"] == "$1"
    assert "CUDA_VISIBLE_DEVICES" not in env  # the scheduler's are never rewritten


# -- the shape of a step -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "nproc", "tasks", "each", "world_size"),
    [
        ({"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4"}, None, (4, 4), 1, 8),  # user case 2a
        ({**ALLOCATION}, None, (1, 1), 1, 2),
        ({**ALLOCATION}, 4, (1, 1), 4, 8),
        ({**ALLOCATION, "SLURM_GPUS_PER_NODE": "a100:8"}, None, (1, 1), 8, 16),
        ({**ALLOCATION, "SLURM_GPUS_ON_NODE": "2"}, None, (1, 1), 2, 4),
        ({**ALLOCATION, "SLURM_GPUS": "4", "SLURM_GPUS_ON_NODE": "2"}, None, (1, 1), 2, 4),
        (  # as for torchrun: one task a node
            {**ALLOCATION, "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_PER_NODE": "8"},
            None,
            (1, 1),
            8,
            16,
        ),
        (TASKS, None, (4, 4), 1, 8),
        (TASKS, 4, (4, 4), 1, 8),
        ({**TASKS, "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}, 4, (1, 1), 4, 8),
        (  # a shell of srun in the job: number and places of tasks are the shell's own
            {**TASKS, "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            None,
            (4, 4),
            1,
            8,
        ),
        ({**ALLOCATION, "SLURM_NTASKS": "5"}, None, None, 1, 5),
        ({**ALLOCATION, "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}, None, (4, 4), 1, 8),
    ],
)
def test_shape(
    environ: dict[str, str], nproc: int | None, tasks: tuple[int, ...] | None, each: int, world_size: int
) -> None:
    shape = slurm.allocation_shape(environ, nproc, "--nproc-per-node")
    assert (shape.tasks, shape.nproc, shape.world_size) == (tasks, each, world_size)


def test_hostfile_gives_order_and_counts(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("gpu02\ngpu02\ngpu01\n")
    environ = {**ALLOCATION, "SLURM_NTASKS": "3", "SLURM_HOSTFILE": str(file)}
    plan = plan_step(REQUEST, Wish(), environ, MACHINE)
    assert plan.hosts == ("gpu02", "gpu01")
    assert plan.ranks == ((0, 1), (2,))
    assert plan.rendezvous == "gpu02:20123"
    assert "--ntasks=3" in plan.argv
    with pytest.raises(ConfigError, match=r"places 3 tasks, but SLURM_NTASKS=4"):
        plan_step(REQUEST, Wish(), {**environ, "SLURM_NTASKS": "4"}, MACHINE)


@pytest.mark.parametrize(
    ("environ", "nproc", "parts"),
    [
        (TASKS, 8, ["8 ranks a node (--nproc-per-node)", "4 tasks a node", "SLURM_NTASKS=8"]),
        ({**ALLOCATION, "SLURM_NTASKS": "5"}, 2, ["2 ranks a node", "5 tasks (SLURM_NTASKS=5) on 2 nodes"]),
        (
            {**ALLOCATION, "SLURM_JOB_NUM_NODES": "3"},
            None,
            ["SLURM_JOB_NUM_NODES=3", "names 2: gpu01, gpu02"],
        ),
        (
            {**ALLOCATION, "SLURM_JOB_NODELIST": "gpu[01-"},
            None,
            ["SLURM_JOB_NODELIST='gpu[01-' is not understood"],
        ),
        ({**ALLOCATION, "SLURM_NTASKS": "x"}, None, ["SLURM_NTASKS='x' is not understood"]),
        ({**ALLOCATION, "SLURM_NTASKS": "1"}, None, ["SLURM_NTASKS=1 is less than the job's 2 nodes"]),
        ({**ALLOCATION, "SLURM_NTASKS": "0"}, None, ["SLURM_NTASKS='0' is no whole number"]),
        (
            {**ALLOCATION, "SLURM_GPUS": "h200:12", "SLURM_GPUS_ON_NODE": "8"},
            None,
            ["SLURM_GPUS=h200:12 on 2 nodes, of which this one has 8", "--gpus-per-node"],
        ),
        ({"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2"}, None, ["the job has 2 components (SLURM_HET_SIZE)"]),
        ({"SLURM_JOB_ID": "7"}, None, ["neither SLURM_JOB_NODELIST nor SLURM_NNODES"]),
    ],
)
def test_contradictory_allocations(environ: dict[str, str], nproc: int | None, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        slurm.allocation_shape(environ, nproc, "--nproc-per-node")
    for part in parts:
        assert part in str(caught.value)


def test_numbers_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="--nodes 3, but SLURM's job 77 has 2"):
        plan_step(REQUEST, Wish(nodes=3), TASKS, MACHINE)
    with pytest.raises(
        ConfigError, match=r"--nproc-per-node 2 contradicts launch.nproc_per_node: 4 in sft.yaml"
    ):
        plan_step(replace(REQUEST, nproc=2, config_nproc=4), Wish(), ALLOCATION, MACHINE)
    with pytest.raises(ConfigError, match=r"2 ranks a node were asked for .* but SLURM started 4 tasks"):
        adopted_place(replace(REQUEST, nproc=2), outer_rank(TASK), TASK, above=False)


@pytest.mark.parametrize(
    ("arg", "part"),
    [
        ("--nodes=4", "--nodes=4 is given by --nodes of odc-launch"),
        ("-N4", "-N4 is given by --nodes"),
        ("--ntasks-per-node=2", "--nproc-per-node"),
        ("02:00:00", "'02:00:00' is no option"),
        ("--time=1\nrm -rf /", "is no option"),
    ],
)
def test_arguments_of_sbatch_that_are_refused(arg: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_submission(REQUEST, Wish(nodes=2, sbatch_args=(arg,)), {}, MACHINE)
    assert part in str(caught.value)


# -- which launcher ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "environ", "mode"),
    [
        (Wish(), {}, "local"),
        (Wish(nodes=1), {}, "local"),
        (Wish(nodes=2), {}, "submit"),
        (Wish(launcher="slurm"), {}, "submit"),
        (Wish(launcher="mpi"), {}, "mpi"),
        (Wish(), TASKS, "slurm"),
        (Wish(), {**TASKS, "SLURM_PROCID": "0"}, "slurm"),  # a batch script
        (Wish(), {**TASKS, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}, "slurm"),  # interactive
        (Wish(launcher="mpi"), TASKS, "mpi"),
        (Wish(launcher="local"), TASKS, "local"),
        (Wish(), TASK, "adopt"),
        (Wish(launcher="slurm"), TASK, "adopt"),
        (Wish(launcher="local"), TASK, "local"),
        (Wish(), {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "adopt"),
        (
            Wish(),
            {
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NUM_NODES": "1",
                "SLURM_STEP_ID": "1",
                "SLURM_STEP_NUM_TASKS": "1",
            },
            "local",  # srun --pty
        ),
        (Wish(nodes=1), {**ALLOCATION, "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "1"}, "local"),
        (
            Wish(launcher="local"),
            {**ALLOCATION, "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "1"},
            "local",
        ),
        (
            Wish(launcher="slurm"),
            {**ALLOCATION, "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "1"},
            "slurm",
        ),
        (Wish(adopt=True), {**ALLOCATION, "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "1"}, "adopt"),
    ],
)
def test_mode(wish: Wish, environ: dict[str, str], mode: str) -> None:
    assert choose_mode(wish, environ, has_srun=True, has_sbatch=True) == mode


@pytest.mark.parametrize(
    ("wish", "environ", "part"),
    [
        (Wish(adopt=True), {}, "no variables of srun or mpirun"),
        (Wish(launcher="local", nodes=2), {}, "--nodes is 2"),
        (Wish(nodes=2), {}, "sbatch is not installed"),
        (Wish(), TASKS, "srun is not installed here"),
        (  # as seen: sbatch from a shell of srun --pty
            Wish(),
            {**ALLOCATION, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"},
            "SLURM_JOB_NUM_NODES=2, but SLURM_STEP_NUM_NODES=1",
        ),
        (
            Wish(),
            {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            "SLURM_NTASKS=8, but SLURM_STEP_NUM_TASKS=1",
        ),
        (Wish(), {**TASK, "RANK": "1", "WORLD_SIZE": "2"}, "RANK=1, WORLD_SIZE=2"),
        (
            Wish(nodes=2),
            {**ALLOCATION, "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "1"},
            "--launcher slurm",
        ),
    ],
)
def test_modes_that_are_refused(wish: Wish, environ: dict[str, str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_mode(wish, environ, has_srun=False, has_sbatch=False)
    assert part in str(caught.value)


def test_without_srun_one_node_runs_here() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    assert choose_mode(Wish(), environ, has_srun=False, has_sbatch=False) == "local"


def test_one_task_a_node_starts_its_ranks() -> None:
    environ = {
        **TASK,
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    place = adopted_place(replace(REQUEST, nproc=4), outer_rank(environ), environ, above=False)
    assert (place.ranks, place.local_ranks, place.world_size) == ((4, 5, 6, 7), (0, 1, 2, 3), 8)
    assert (place.node_rank, place.num_nodes, place.master_addr) == (1, 2, "gpu01")
    assert place.signals_reach_ranks


def test_mpi_over_several_hosts_needs_the_address_of_rank_0() -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    with pytest.raises(ConfigError, match="set MASTER_ADDR"):
        adopted_place(REQUEST, outer_rank(environ), environ, above=False)
    environ |= {"MASTER_ADDR": "b1", "MASTER_PORT": "2000"}
    place = adopted_place(REQUEST, outer_rank(environ), environ, above=False)
    assert (place.ranks, place.local_ranks, place.master_addr) == ((3,), (1,), "b1")
    assert not place.signals_reach_ranks
    with pytest.raises(ConfigError, match="which host has rank 0 is not known"):
        plan_mpi(REQUEST, Wish(nodes=2), {}, MACHINE, OPEN_MPI)


def test_mpi_inside_an_allocation_takes_its_nodes_and_tasks() -> None:
    plan = plan_mpi(REQUEST, Wish(), TASKS, MACHINE, OPEN_MPI)
    assert plan.argv[:5] == ("mpirun", "-np", "8", "--map-by", "ppr:4:node")
    assert (plan.rendezvous, plan.hosts) == ("gpu01:20123", ("gpu01", "gpu02"))
    uneven = {**ALLOCATION, "SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}
    with pytest.raises(ConfigError, match="not the same number on all nodes; give --nproc-per-node"):
        plan_mpi(REQUEST, Wish(), uneven, MACHINE, OPEN_MPI)


def test_unknown_mpi_is_quoted() -> None:
    with pytest.raises(ConfigError, match=r"'some MPI 1\.0'"):
        mpi.flavor_of("some MPI 1.0\nmore")


# -- arrays and requeue (user case 3) -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"SLURM_JOB_ID": "1234", "SLURM_ARRAY_JOB_ID": "1234", "SLURM_ARRAY_TASK_ID": "1"}, "1234_1"),
        ({"SLURM_JOB_ID": "1235", "SLURM_ARRAY_JOB_ID": "1234", "SLURM_ARRAY_TASK_ID": "2"}, "1234_2"),
        ({"SLURM_JOB_ID": "99"}, "99"),
    ],
)
def test_requeue(environ: dict[str, str], name: str) -> None:
    assert slurm.requeue_argv(environ, 75, 1) == ("scontrol", "requeue", name)
    assert slurm.requeue_argv(environ, 75, 0) is None
    assert slurm.requeue_argv(environ, 1, 1) is None
    assert slurm.requeue_argv({**environ, "SLURM_RESTART_COUNT": "1"}, 75, 1) is None
    assert slurm.requeue_argv({**environ, "SLURM_RESTART_COUNT": "1"}, 75, 2) is not None
    assert run_name(environ, "now") == f"slurm-{name}-now"
    assert run_name({**environ, "SLURM_STEP_ID": "3"}, "now") == f"slurm-{name}.3"


def test_plan_as_json_has_everything() -> None:
    environ: dict[str, Any] = {**TASKS, **USER, "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_SOCKET_IFNAME": "ib1"}
    data = json.loads(render_plan(plan_step(REQUEST, Wish(), environ, MACHINE), environ, "json"))
    assert data["hosts"] == [
        {"host": "gpu01", "ranks": [0, 1, 2, 3]},
        {"host": "gpu02", "ranks": [4, 5, 6, 7]},
    ]
    assert data["rendezvous"] == "gpu01:20123"
    assert data["devices"] == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert data["interfaces"] == {"NCCL_SOCKET_IFNAME": "ib1"}
    assert data["config_hash"] == "0123456789abcdef"
    assert data["env"]["WANDB_API_KEY"] == "***"
    assert data["command"][0] == "srun"


def test_a_failed_requeue_is_told_and_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "$@" > "$0.args"\nexit 3\n')
    monkeypatch.setenv("PATH", str(tmp_path))
    environ = {"SLURM_JOB_ID": "1234", "SLURM_ARRAY_JOB_ID": "1234", "SLURM_ARRAY_TASK_ID": "1"}
    step.requeue(environ, 75, 1)
    assert "the job is not requeued" in capfd.readouterr().err  # the file cannot be run
    scontrol.chmod(0o755)
    step.requeue(environ, 75, 1)
    assert (tmp_path / "scontrol.args").read_text() == "requeue 1234_1\n"
    assert "the job is not requeued: scontrol ended with 3" in capfd.readouterr().err
    step.requeue(environ, 1, 1)
    assert capfd.readouterr().err == ""


def test_a_task_of_one_rank_starts_the_ranks_of_its_node() -> None:
    environ = {**ALLOCATION, "SLURM_STEP_ID": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    place = adopted_place(replace(REQUEST, nproc=2), outer_rank(environ), environ, above=True)
    assert (place.ranks, place.world_size, place.master_addr) == ((0, 1), 2, "127.0.0.1")


def test_uneven_tasks_with_one_on_this_node_are_no_launchers() -> None:
    environ = {
        **TASK,
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "1,2",
        "SLURM_NODEID": "0",
    }
    place = adopted_place(REQUEST, outer_rank(environ), environ, above=False)
    assert (place.ranks, place.local_world_size, place.num_nodes) == ((1,), 1, 2)
