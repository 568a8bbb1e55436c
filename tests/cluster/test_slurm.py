"""odc-launch on a real SLURM of two nodes: submitted, in an allocation, under srun, going wrong."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mpi_ranks import needs_mpi
from slurm_cluster import ROOT, Cluster, wait_until

TRAIN = ROOT / "tests" / "cluster" / "train_ranks.py"
VALUES = {  # user case 5
    "A": "two words",
    "B": 'it\'s "x"',
    "NCCL_C": "a\nb $HOME `id` \\",
    "CUDA_PATHS": "/opt/a:$LD_LIBRARY_PATH",
    "NVSHMEM_SYMMETRIC_SIZE": "8G",
    "WANDB_API_KEY": "geheim",
}
DUMP = """\
import os
import sys
print(dict(os.environ))
"""
WAIT = """\
import os, signal, sys, time
from pathlib import Path
rank = os.environ["RANK"]
def got(number, frame):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        time.sleep(0.5)
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, got)
Path(sys.argv[1], "ready" + rank).touch()
end = time.monotonic() + 200
while time.monotonic() < end:
    time.sleep(0.05)
sys.exit(9)
"""


FAIL = """\
import glob, os, sys, time
while os.environ["RANK"] == "3":
    if len(glob.glob("logs/rank*.log")) == 4:  # SLURM ends the others, also those that have not begun
        sys.exit("no data")
    time.sleep(0.05)
time.sleep(600)
"""


def write(folder: Path, source: str) -> str:
    (folder / "script.py").write_text(source)
    return "script.py"


def environments(logs: Path, world_size: int) -> list[dict[str, str]]:
    """What each rank printed of its environment."""
    found: list[dict[str, Any]] = [
        ast.literal_eval((logs / f"rank{r}.log").read_text()) for r in range(world_size)
    ]
    assert sorted(path.name for path in logs.glob("rank*.log")) == sorted(
        f"rank{r}.log" for r in range(world_size)
    )
    return found


def check_ranks(found: list[dict[str, str]], nodes: list[int]) -> None:
    """Ranks, places and one rendezvous."""
    assert [(env["RANK"], env["WORLD_SIZE"]) for env in found] == [
        (str(rank), str(len(nodes))) for rank in range(len(nodes))
    ]
    for rank, (env, node) in enumerate(zip(found, nodes, strict=True)):
        assert env["SLURMD_NODENAME"] == f"n{node + 1}"
        assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == (str(node), "2")
        assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (
            str(nodes[:rank].count(node)),
            str(nodes.count(node)),
        )
    (port,) = {env["MASTER_PORT"] for env in found}
    (address,) = {env["MASTER_ADDR"] for env in found}
    (_,) = {env["ODC_PLAN_HASH"] for env in found}
    assert address == "127.0.0.1"  # n1 is no name that this host resolves: SLURM's own address of it
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not low <= int(port) <= high


def test_submitted_from_outside_with_the_environment_byte_for_byte(cluster: Cluster, tmp_path: Path) -> None:
    script = write(tmp_path, DUMP)
    words = ["--nodes", "2", "--nproc-per-node", "2", "--log-dir", "logs", script, "two words"]
    code, out, err = cluster.run(tmp_path, *cluster.launch(*words), env=VALUES)
    assert code == 0, err
    job = out.strip()
    assert f"job {job} submitted" in err
    cluster.wait_for(job, ["COMPLETED"])
    found = environments(tmp_path / "logs", 4)
    check_ranks(found, [0, 0, 1, 1])
    for env in found:
        assert {name: env[name] for name in VALUES} == VALUES
    output = (tmp_path / f"slurm-{job}.out").read_text()
    assert output.count("[rank ") == 4
    script_text = cluster.run(tmp_path, "scontrol", "write", "batch_script", job, "-")[1]
    assert "exec " in script_text
    assert "geheim" not in script_text


def test_inside_an_allocation_the_first_failure_is_told(cluster: Cluster, tmp_path: Path) -> None:
    script, start = write(tmp_path, FAIL), time.monotonic()
    words = [
        "salloc",
        "--quiet",
        "--nodes=2",
        "--ntasks-per-node=2",
        *cluster.launch("--log-dir", "logs", script),
    ]
    code, _, err = cluster.run(tmp_path, *words, timeout_s=150)
    assert code == 1, err
    assert time.monotonic() - start < 100  # the others were not waited for
    assert "rank 3 on n2 failed first: exit code 1" in err
    assert "no data" in err
    assert len(list((tmp_path / "logs").glob("rank*.log"))) == 4


def test_inside_an_allocation_with_one_task_a_node(cluster: Cluster, tmp_path: Path) -> None:
    script = write(tmp_path, DUMP)
    words = ["salloc", "--quiet", "--nodes=2", "--cpus-per-task=2"]
    launch = cluster.launch("--nproc-per-node", "2", "--log-dir", "logs", script)
    code, _, err = cluster.run(tmp_path, *words, *launch)
    assert code == 0, err
    found = environments(tmp_path / "logs", 4)
    check_ranks(found, [0, 0, 1, 1])
    assert {env["OMP_NUM_THREADS"] for env in found} == {"1"}  # two cores a task, two ranks
    assert {env["SLURM_CPUS_PER_TASK"] for env in found} == {"2"}


@pytest.mark.parametrize(
    "options",
    [
        ["--gpus=4", "--ntasks-per-gpu=1"],
        ["--ntasks-per-node=2", "--gpus-per-task=1"],
        ["--ntasks-per-node=1", "--gpus-per-node=2", "--cpus-per-task=2"],
        ["--gpus-per-node=2"],
    ],
)
def test_gpus_asked_for_in_any_way_have_a_rank_each(
    cluster: Cluster, tmp_path: Path, options: list[str]
) -> None:
    script = write(tmp_path, DUMP)
    words = ["salloc", "--quiet", "--nodes=2", *options, *cluster.launch("--log-dir", "logs", script)]
    code, _, err = cluster.run(tmp_path, *words)
    assert code == 0, err
    check_ranks(environments(tmp_path / "logs", 4), [0, 0, 1, 1])


def test_a_shell_of_srun_on_one_node_starts_the_whole_job(cluster: Cluster, tmp_path: Path) -> None:
    """As `--launcher slurm` in it says; the shell's own step has one task, and says so in SLURM_NTASKS."""
    launch = cluster.launch("--launcher", "slurm", "--log-dir", "logs", write(tmp_path, DUMP))
    shell = ["srun", "--nodes=1", "--ntasks=1", "sh", "-c", " ".join(launch)]
    code, _, err = cluster.run(tmp_path, "salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", *shell)
    assert code == 0, err
    check_ranks(environments(tmp_path / "logs", 4), [0, 0, 1, 1])


def test_under_srun_every_task_is_its_rank(cluster: Cluster, tmp_path: Path) -> None:
    """Uneven nodes, in the order of a hostfile: rank 0 runs on n2, where rank 0 is met."""
    (tmp_path / "hosts").write_text("n2\nn1\nn2\n")
    script = write(tmp_path, DUMP)
    launch = cluster.launch("--log-dir", "logs", script)
    words = ["srun", "--nodes=2", "--ntasks=3", "--distribution=arbitrary", *launch]
    code, out, err = cluster.run(tmp_path, *words, env={"SLURM_HOSTFILE": str(tmp_path / "hosts")})
    assert code == 0, err
    found = environments(tmp_path / "logs", 3)
    check_ranks(found, [1, 0, 1])
    assert [out.count(f"[rank {rank}] ") for rank in range(3)] == [1, 1, 1]


def test_exit_code_under_srun_is_the_ranks(cluster: Cluster, tmp_path: Path) -> None:
    script = write(tmp_path, "import os, sys\nsys.exit(int(os.environ['RANK']) * 11)\n")
    code, _, err = cluster.run(tmp_path, "srun", "--nodes=2", "--ntasks=2", *cluster.launch(script))
    assert code == 11, err
    assert "rank 1 on n2 failed" in err


ASKED = """\
import os, sys, time
if os.environ["RANK"] == "0":
    time.sleep(2)
    print("closed", flush=True)
sys.exit(75)
"""


def test_a_rank_that_was_asked_to_stop_may_take_longer_than_others(cluster: Cluster, tmp_path: Path) -> None:
    """SLURM would end it with the first task that ends with another code than 0."""
    words = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1"]
    launch = cluster.launch("--log-dir", "logs", write(tmp_path, ASKED))
    code, _, err = cluster.run(tmp_path, *words, *launch)
    assert code == 75, err
    assert (tmp_path / "logs" / "rank0.log").read_text() == "closed\n"
    assert "all ranks were asked to stop, and ended with 75" in err


def test_array_member_is_requeued_by_its_own_name(cluster: Cluster, tmp_path: Path) -> None:
    """User case 3 on a real array: its first member has the array's number."""
    source = "import os, sys\nsys.exit(75 if os.environ['SLURM_ARRAY_TASK_ID'] == '1' else 0)\n"
    script = write(tmp_path, source)
    (tmp_path / "c.yaml").write_text("train_batch_size: 8\nlaunch: {max_requeues: 1, nodes: 2}\n")
    code, out, err = cluster.run(
        tmp_path, *cluster.launch("--config", "c.yaml", "--sbatch-arg=--array=1-2", script)
    )
    assert code == 0, err
    array = out.strip()
    try:
        requeued = cluster.wait_for(f"{array}_1", ["PENDING", "REQUEUED"])
        wait_until(lambda: "Restarts=1" in cluster.state(f"{array}_1"), "the member is requeued")
        cluster.wait_for(f"{array}_2", ["COMPLETED"])
        assert "ArrayTaskId=1" in requeued
        assert "Restarts=0" in cluster.state(f"{array}_2")
        outputs = [path.read_text() for path in tmp_path.glob(f"slurm-{array}_*.out")]
        assert sum(f"scontrol requeue {array}_1" in text for text in outputs) <= 1  # requeueing may empty it
    finally:
        cluster.run(tmp_path, "scancel", array)


def test_scancel_reaches_every_rank_once(cluster: Cluster, tmp_path: Path) -> None:
    script = write(tmp_path, WAIT)
    words = ["--nodes", "2", "--nproc-per-node", "1", "--log-dir", "logs", script, str(tmp_path)]
    code, out, err = cluster.run(tmp_path, *cluster.launch(*words))
    assert code == 0, err
    job = out.strip()
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2, "both ranks run")
    cluster.run(tmp_path, "scancel", job)
    cluster.wait_for(job, ["CANCELLED"])
    for rank in range(2):
        log = tmp_path / "logs" / f"rank{rank}.log"
        wait_until(lambda log=log: "\n" in log.read_text(), "the rank tells")
        assert log.read_text() == "SIGTERM\n"


def test_warning_before_the_end_and_stop_reach_every_rank_once(cluster: Cluster, tmp_path: Path) -> None:
    """User case 4, the launcher's part: a signal to odc-launch alone, as --signal=B: sends it."""
    script = write(tmp_path, WAIT)
    words = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1"]
    process = cluster.start(tmp_path, *words, *cluster.launch("--log-dir", "logs", script, str(tmp_path)))
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2, "both ranks run")
    (launcher,) = children(process.pid)
    os.kill(launcher, signal.SIGUSR1)
    logs = [tmp_path / "logs" / f"rank{rank}.log" for rank in range(2)]
    wait_until(lambda: all(log.read_text() == "SIGUSR1\n" for log in logs), "the ranks tell")
    os.kill(launcher, signal.SIGTERM)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert [log.read_text() for log in logs] == ["SIGUSR1\nSIGTERM\n"] * 2
    assert "SIGTERM: passed on to the ranks, which have 30 s to end" in err


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_drained_node(cluster: Cluster, tmp_path: Path) -> None:
    """The job waits and says why; the launcher does not; one node still works."""
    script = write(tmp_path, DUMP)
    cluster.run(tmp_path, "scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    try:
        code, out, err = cluster.run(tmp_path, *cluster.launch("--nodes", "2", script))
        assert code == 0, err
        job = out.strip()
        cluster.wait_for(job, ["PENDING"])
        reasons = ("Reason=ReqNodeNotAvail", "Reason=Nodes_required", "Reason=Resources")
        wait_until(lambda: any(reason in cluster.state(job) for reason in reasons), "SLURM says why")
        cluster.run(tmp_path, "scancel", job)
        words = ["salloc", "--quiet", "--nodes=1", "--ntasks=2", *cluster.launch("--log-dir", "logs", script)]
        code, _, err = cluster.run(tmp_path, *words)
        assert code == 0, err
        assert {env["SLURMD_NODENAME"] for env in environments(tmp_path / "logs", 2)} == {"n1"}
    finally:
        cluster.run(tmp_path, "scontrol", "update", "NodeName=n2", "State=RESUME")


def test_wrong_hostlist_stops_before_anything_starts(cluster: Cluster, tmp_path: Path) -> None:
    script = write(tmp_path, "open('started', 'w')")
    launch = cluster.launch(script)
    words = ["env", "SLURM_JOB_NODELIST=n[1-", *launch]
    code, _, err = cluster.run(tmp_path, "salloc", "--quiet", "--nodes=2", *words)
    assert code == 2, err
    assert "SLURM_JOB_NODELIST='n[1-' is not understood: a bracket is not closed" in err
    words = ["env", "SLURM_STEP_NODELIST=n[1-", *launch]
    code, _, err = cluster.run(tmp_path, "srun", "--nodes=2", "--ntasks=2", *words)
    assert code == 2, err
    assert "SLURM_STEP_NODELIST='n[1-' is not understood" in err
    assert not (tmp_path / "started").exists()


def test_contradiction_under_srun_stops_with_both_values(cluster: Cluster, tmp_path: Path) -> None:
    script = write(tmp_path, "open('started', 'w')")
    words = ["srun", "--nodes=2", "--ntasks=4", *cluster.launch(script)]
    code, _, err = cluster.run(tmp_path, *words, env={"RANK": "0", "WORLD_SIZE": "1"})
    assert code == 2, err
    assert "RANK=0, WORLD_SIZE=1" in err
    assert "SLURM_STEP_NUM_TASKS=4" in err
    assert not (tmp_path / "started").exists()


def test_two_nodes_of_two_ranks_train_exactly_with_two_level_windows(
    cluster: Cluster, tmp_path: Path
) -> None:
    import torch
    from engine.toy import compare, reference
    from train_ranks import CASE, STEPS

    settings = {"sharding": "hybrid", "node_size": 2, "transport": "shm"}
    launch = cluster.launch("--log-dir", "logs", str(TRAIN), str(tmp_path), json.dumps(settings))
    words = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", *launch]
    code, out, err = cluster.run(tmp_path, *words, timeout_s=250)
    assert code == 0, out + err
    ranks = [torch.load(tmp_path / f"result{rank}", weights_only=False) for rank in range(4)]
    errors = compare(CASE, ranks, reference(CASE, 4, steps=STEPS))
    assert max(errors.values()) < 1e-10, errors


@needs_mpi
def test_ranks_of_srun_train_exactly_with_windows_of_mpi(cluster: Cluster, tmp_path: Path) -> None:
    """MPI started by SLURM's PMIx, without mpirun; on one node, as two of a host would share a folder."""
    import torch
    from engine.toy import compare, reference
    from train_ranks import CASE, STEPS

    settings = {"sharding": "full", "transport": "mpi"}
    launch = cluster.launch("--log-dir", "logs", str(TRAIN), str(tmp_path), json.dumps(settings))
    code, out, err = cluster.run(tmp_path, "srun", "--mpi=pmix", "--nodes=1", "-n2", *launch, timeout_s=250)
    assert code == 0, out + err
    ranks = [torch.load(tmp_path / f"result{rank}", weights_only=False) for rank in range(2)]
    errors = compare(CASE, ranks, reference(CASE, 2, steps=STEPS))
    assert max(errors.values()) < 1e-10, errors


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_mpirun_inside_an_allocation(cluster: Cluster, tmp_path: Path) -> None:
    """mpirun's daemons are a step of SLURM with one task a node, which contradicts nothing."""
    script = write(tmp_path, DUMP)
    launch = cluster.launch("--launcher", "mpi", "--log-dir", "logs", script)
    words = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", *launch]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    code, _, err = cluster.run(tmp_path, *words, env=root | VALUES)
    assert code == 0, err
    found = environments(tmp_path / "logs", 4)
    assert [env["RANK"] for env in found] == list("0123")
    assert [env["SLURMD_NODENAME"] for env in found] == ["n1", "n1", "n2", "n2"]
    assert {env["NCCL_C"] for env in found} == {VALUES["NCCL_C"]}
    assert {env["MASTER_ADDR"] for env in found} == {"127.0.0.1"}


def test_plan_inside_an_allocation_starts_nothing(cluster: Cluster, tmp_path: Path) -> None:
    script = write(tmp_path, "open('started', 'w')")
    words = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", *cluster.launch("--plan=json", script)]
    code, out, err = cluster.run(tmp_path, *words)
    assert code == 0, err
    plan = json.loads(out)
    assert plan["hosts"] == [{"host": "n1", "ranks": [0, 1]}, {"host": "n2", "ranks": [2, 3]}]
    assert plan["command"][:3] == ["srun", "--nodes=2", "--ntasks=4"]
    assert sys.executable in plan["command"]
    assert not (tmp_path / "started").exists()


def test_example_batch_script_trains(cluster: Cluster, tmp_path: Path) -> None:
    """As it is shipped, but for the sizes of nodes, and with the launcher of these sources."""
    from odcengine.data import TokenDataset

    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "demo_out").mkdir()
    samples = ({"input_ids": [first, *range(8)]} for first in range(64))
    TokenDataset.write(tmp_path / "demo_out" / "tokens", samples)
    script = (ROOT / "examples/slurm/train.sbatch").read_text()
    for shipped, small in (
        ("--ntasks-per-node=8", "--ntasks-per-node=1"),
        ("--cpus-per-task=12", "--cpus-per-task=1"),
        ("#SBATCH --gpus-per-node=8\n", ""),
    ):
        assert script.count(shipped) == 1
        script = script.replace(shipped, small)
    (tmp_path / "train.sbatch").write_text(script)
    program = tmp_path / "bin" / "odc-launch"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m odc_launcher "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{cluster.env['PATH']}"
    words = ["sbatch", "--parsable", "train.sbatch", "--steps", "1"]
    code, out, err = cluster.run(tmp_path, *words, env={"PATH": path})
    assert code == 0, err
    state = cluster.wait_for(out.strip(), ["COMPLETED", "FAILED", "CANCELLED"], 250)
    output = (tmp_path / f"sft-{out.strip()}.out").read_text()
    assert "JobState=COMPLETED" in state, output
    assert "2 ranks on 2 nodes of SLURM's job" in output
    logs = list(tmp_path.glob("odc_logs/slurm-*/rank*.log"))
    assert len(logs) == 2
    assert "step 1" in output, output


def test_example_array_trains_with_a_configuration_for_each_member(cluster: Cluster, tmp_path: Path) -> None:
    """As it is shipped, but for sizes, with a tiny model in the place of Qwen's; one log a rank."""
    from odcengine.data import TokenDataset

    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    model = tmp_path / "models" / "Qwen2.5-1.5B-Instruct"
    model.mkdir(parents=True)
    shutil.copy(ROOT / "examples/sft/llama_7m/config.json", model)
    (tmp_path / "data").mkdir()
    samples = ({"input_ids": [first, *range(8)]} for first in range(64))
    TokenDataset.write(tmp_path / "data" / "sft", samples)
    script = (ROOT / "examples/slurm/array.sbatch").read_text()
    for shipped, small in (
        ("--array=0-3%2", "--array=1-2"),
        ("--cpus-per-task=12", "--cpus-per-task=1"),
        ("#SBATCH --gpus-per-node=1\n", ""),
    ):
        assert script.count(shipped) == 1
        script = script.replace(shipped, small)
    (tmp_path / "array.sbatch").write_text(script)
    program = tmp_path / "bin" / "odc-launch"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m odc_launcher "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{cluster.env['PATH']}"
    words = ["sbatch", "--parsable", "array.sbatch", "--steps", "1"]
    code, out, err = cluster.run(tmp_path, *words, env={"PATH": path})
    assert code == 0, err
    job = out.strip()
    for member, rate in ((1, "1e-5"), (2, "2e-5")):
        state = cluster.wait_for(f"{job}_{member}", ["COMPLETED", "FAILED", "CANCELLED"], 250)
        output = (tmp_path / f"qwen2.5_1.5b-{job}_{member}.out").read_text()
        assert "JobState=COMPLETED" in state, output
        assert len((tmp_path / f"runs/lr_{rate}/metrics.jsonl").read_text().splitlines()) == 1, output
        assert len(list(tmp_path.glob(f"odc_logs/slurm-{job}_{member}-*/rank0.log"))) == 1
