"""Preemption, requeue and a node that is lost, on a real SLURM of two nodes."""

from __future__ import annotations

import re
from pathlib import Path

from slurm_cluster import Cluster, wait_until

TRAIN = """
import os, sys, time
from pathlib import Path
import torch
import odcengine
from odcengine.ranks import read_rank_info

info = read_rank_info()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
engine, *_ = odcengine.initialize(model=model)
folder, last, slow = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with (folder / f"begins{info.rank}").open("a") as file:
    file.write(f"{engine.global_steps} of {info.world_size}\\n")
while engine.global_steps < last:
    loss = engine(torch.ones(2, 4)).sum()
    if engine.global_steps == slow:
        (folder / f"slow{info.rank}.part").write_text(str(os.getpid()))
        (folder / f"slow{info.rank}.part").rename(folder / f"slow{info.rank}")
        while not (folder / "go").exists():
            time.sleep(0.05)
    engine.backward(loss, count=2)
    engine.step()
(folder / f"done{info.rank}").touch()
"""

CONFIG = """\
train_batch_size: 8
optimizer: {type: SGD, params: {lr: 0.01}}
checkpoint: {dir: saved, every_n_steps: %s}
odc: {timeout_s: 20, sharding: hybrid}
launch: {log_dir: logs, %s}
"""


def prepare(folder: Path, *, every: int, launch: str) -> None:
    (folder / "train.py").write_text(TRAIN)
    (folder / "c.yaml").write_text(CONFIG % (every, launch))


def warned(folder: Path) -> int:
    """How many ranks say that they have got a signal."""
    return sum("SIGUSR1" in path.read_text() for path in folder.glob("logs/**/rank?.log"))


def begins(folder: Path, rank: int = 0) -> list[str]:
    path = folder / f"begins{rank}"
    return path.read_text().splitlines() if path.exists() else []


def test_array_member_is_warned_saves_is_requeued_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    """User cases 3 and 4: `scancel --signal` (as --signal=USR1@300 does) to a member of an array."""
    prepare(tmp_path, every=0, launch="max_requeues: 1, nodes: 2, nproc_per_node: 1")
    words = ["--config", "c.yaml", "--sbatch-arg=--array=1", "train.py", str(tmp_path), "30", "3"]
    code, out, err = cluster.run(tmp_path, *cluster.launch(*words))
    assert code == 0, err
    job = f"{out.strip()}_1"
    try:
        wait_until(lambda: len(list(tmp_path.glob("slow?"))) == 2, "both ranks are in step 3", 120)
        assert cluster.run(tmp_path, "scancel", "--signal=USR1", job)[0] == 0
        wait_until(lambda: warned(tmp_path) == 2, "both ranks have the signal")
        (tmp_path / "go").touch()
        wait_until(lambda: "Restarts=1" in cluster.state(job), "the member is requeued")
        assert (tmp_path / "saved" / "latest").read_text().strip() == "step_4"
        cluster.wait_for(job, ["PENDING"])
        # SLURM waits two minutes by itself: a node refuses what it has just killed.
        code, _, err = cluster.run(tmp_path, "scontrol", "update", f"JobId={job}", "StartTime=now+4")
        assert code == 0, err
        wait_until(lambda: len(list(tmp_path.glob("done*"))) == 2, "the second run ends", 120)
        assert begins(tmp_path, 0) == begins(tmp_path, 1) == ["0 of 2", "4 of 2"]
        cluster.wait_for(job, ["COMPLETED"])
    finally:
        cluster.run(tmp_path, "scancel", out.strip())


def test_warned_while_the_ranks_still_load_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    """There is nothing to save, and the default action of the signal ends the ranks."""
    prepare(tmp_path, every=0, launch="max_requeues: 1, nodes: 2, nproc_per_node: 1")
    (tmp_path / "train.py").write_text(
        "import os, sys, time\nopen(f'{sys.argv[1]}/loads' + os.environ['RANK'], 'w')\ntime.sleep(600)\n"
    )
    code, out, err = cluster.run(tmp_path, *cluster.launch("--config", "c.yaml", "train.py", str(tmp_path)))
    assert code == 0, err
    job = out.strip()
    try:
        wait_until(lambda: len(list(tmp_path.glob("loads?"))) == 2, "both ranks load", 120)
        assert cluster.run(tmp_path, "scancel", "--signal=USR1", job)[0] == 0
        wait_until(lambda: "Restarts=1" in cluster.state(job), "the job is requeued")
    finally:
        cluster.run(tmp_path, "scancel", job)
        wait_until(lambda: not cluster.run(tmp_path, "squeue", "--noheader")[1].strip(), "the job is gone")


LOCAL = """
import os, signal, sys, time
def asked(number, frame):
    sys.exit(75)
signal.signal(signal.SIGUSR1, asked)
print("run", os.environ.get("SLURM_RESTART_COUNT"), flush=True)
while os.environ.get("SLURM_RESTART_COUNT") != "1":
    time.sleep(0.05)
"""


def test_ranks_without_a_step_of_slurm_are_warned_and_requeued_too(cluster: Cluster, tmp_path: Path) -> None:
    """`--launcher local` in a batch script; both runs write into the same logs."""
    (tmp_path / "train.py").write_text(LOCAL)
    (tmp_path / "c.yaml").write_text(
        "train_batch_size: 8\ncheckpoint: {dir: saved}\n"
        "launch: {max_requeues: 1, log_dir: logs, nproc_per_node: 2, launcher: local}\n"
    )
    launch = " ".join(cluster.launch("--config", "c.yaml", "train.py"))
    (tmp_path / "job").write_text(
        f"#!/bin/bash\n#SBATCH --requeue\n#SBATCH --open-mode=append\nexec {launch}\n"
    )
    code, out, err = cluster.run(tmp_path, "sbatch", "--parsable", "job")
    assert code == 0, err
    job = out.strip()
    try:
        logs = [tmp_path / "logs" / f"rank{rank}.log" for rank in range(2)]
        wait_until(lambda: all(log.exists() and log.read_text() for log in logs), "both ranks run")
        assert cluster.run(tmp_path, "scancel", "--batch", "--signal=USR1", job)[0] == 0
        wait_until(lambda: "Restarts=1" in cluster.state(job), "the job is requeued")
        cluster.wait_for(job, ["PENDING"])
        cluster.run(tmp_path, "scontrol", "update", f"JobId={job}", "StartTime=now+4")
        cluster.wait_for(job, ["COMPLETED"])
        for log in logs:
            first, heading, second = log.read_text().splitlines()
            assert (first, second) == ("run None", "run 1")
            assert re.search(rf": SLURM's job {job}, run 2, 2 ranks, n[12] ====$", heading), heading
        told = (tmp_path / f"slurm-{job}.out").read_text()
        assert f"the ranks ended with 75, to go on in a new run: scontrol requeue {job}" in told
        assert "failed" not in told
    finally:
        cluster.run(tmp_path, "scancel", job)


def test_time_limit_warns_by_signal(cluster: Cluster, tmp_path: Path) -> None:
    prepare(tmp_path, every=0, launch="nodes: 2, nproc_per_node: 1")
    limit = ["--sbatch-arg=--time=10", "--sbatch-arg=--signal=USR1@10"]
    words = ["--config", "c.yaml", *limit, "train.py", str(tmp_path), "1000000", "-1"]
    code, out, err = cluster.run(tmp_path, *cluster.launch(*words))
    assert code == 0, err
    job = out.strip()
    wait_until(lambda: begins(tmp_path, 0) and begins(tmp_path, 1), "both ranks train", 120)
    # SLURM looks every 30 s, and warns the steps that there are by then, once: not before the ranks train.
    code, _, err = cluster.run(tmp_path, "scontrol", "update", f"JobId={job}", "EndTime=now+60")
    assert code == 0, err
    state = cluster.wait_for(job, ["FAILED", "COMPLETED", "TIMEOUT"], 150)
    assert "ExitCode=75:0" in state
    (saved,) = (tmp_path / "saved").glob("step_*")
    assert (tmp_path / "saved" / "latest").read_text().strip() == saved.name


def test_lost_node_leaves_a_run_on_the_other(cluster: Cluster, tmp_path: Path) -> None:
    prepare(tmp_path, every=2, launch="max_restarts: 1, nproc_per_node: 1")
    words = ["--config", "c.yaml", "train.py", str(tmp_path), "40", "21"]
    process = cluster.start(
        tmp_path,
        "salloc",
        "--quiet",
        "--no-kill",
        "--nodes=2",
        "--ntasks-per-node=1",
        *cluster.launch(*words),
    )
    try:
        wait_until(lambda: len(list(tmp_path.glob("slow?"))) == 2, "both ranks are in step 21", 300)
        words = ["scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test"]
        assert cluster.run(tmp_path, *words)[0] == 0
        lost = int((tmp_path / "slow1").read_text())
        wait_until(lambda: not Path(f"/proc/{lost}").exists(), "the rank on n2 is gone")
        (tmp_path / "go").touch()
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0, out + err
        assert "restart 1 of 1: the ranks go on from the newest checkpoint" in err
        assert "without n2, which SLURM calls down" in err  # by now it may have come back by itself
        first, second = begins(tmp_path)
        assert first == "0 of 2"
        step = re.fullmatch(r"(\d+) of 1", second)
        assert step is not None
        assert int(step.group(1)) in range(16, 24, 2), second
        assert (tmp_path / "done0").exists()
    finally:
        process.terminate()
        process.communicate(timeout=90)
        cluster.run(tmp_path, "scancel", "--user=root")
        cluster.run(tmp_path, "scontrol", "update", "NodeName=n2", "State=RESUME")
        wait_until(
            lambda: (
                cluster.run(tmp_path, "sinfo", "--noheader", "--format=%D %t")[1].split() == ["2", "idle"]
            ),
            "both nodes are idle again",
        )
