"""odc-launch with a real Open MPI: as its ranks, and starting them."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import ROOT, clean_environment

TRAIN = ROOT / "tests" / "cluster" / "train_ranks.py"


def _open_mpi() -> bool:
    if shutil.which("mpirun") is None:
        return False
    done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=60, check=False)
    return "Open MPI" in done.stdout


pytestmark = pytest.mark.skipif(
    not _open_mpi(), reason="Open MPI is not installed; on Debian: apt-get install openmpi-bin"
)
LAUNCH = [sys.executable, "-m", "odc_launcher"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe"]
WITHOUT_SHARED_MEMORY = ("--mca", "osc", "pt2pt", "--mca", "btl", "self,tcp")
FAIL = """\
import sys, time
import torch
import odcengine

config = {"train_batch_size": "auto", "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
config["odc"] = {"transport": "mpi"}
engine, *_ = odcengine.initialize(model=torch.nn.Linear(3, 2), config=config)
if engine.topology.rank == 1:
    told = sys.excepthook

    def stay(*error):
        told(*error)
        end = time.monotonic() + 100
        while "rank 1 (host " not in open("logs/rank0.log").read() and time.monotonic() < end:
            time.sleep(0.05)

    sys.excepthook = stay  # mpirun kills the others a second after the first has ended
    raise RuntimeError("boom 42")
engine.step()
"""
DUMP = "import os\nprint(dict(os.environ))\n"


def run(folder: Path, *words: str, **env: str) -> tuple[int, str, str]:
    """Runs a command in a clean environment; Open MPI gets a folder with a short name for its sockets."""
    done = subprocess.run(
        words,
        cwd=folder,
        env=clean_environment() | env,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def environments(logs: Path, world_size: int) -> list[dict[str, str]]:
    return [ast.literal_eval((logs / f"rank{rank}.log").read_text()) for rank in range(world_size)]


def test_ranks_of_mpirun_are_adopted(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DUMP)
    code, _, err = run(tmp_path, *MPIRUN, "-np", "3", *LAUNCH, "--log-dir", "logs", "script.py")
    assert code == 0, err
    found = environments(tmp_path / "logs", 3)
    assert [(env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) for env in found] == [
        (str(rank), str(rank), "3") for rank in range(3)
    ]
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"], env["ODC_PLAN_HASH"]) for env in found}) == 1


def test_odc_launch_starts_mpirun_and_tells_the_first_failure(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, sys\nif os.environ['RANK'] == '1': sys.exit(7)\n")
    words = [*LAUNCH, "--launcher", "mpi", "--nproc-per-node", "2", "--oversubscribe", "--log-dir", "logs"]
    words += ["--mpirun-arg=--allow-run-as-root", "script.py"]
    code, _, err = run(tmp_path, *words)
    assert code == 7, err
    assert "rank 1 on " in err
    assert "failed first: exit code 7" in err


def test_environment_arrives_byte_for_byte(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DUMP)
    values = {"NCCL_B": 'it\'s "x"', "CUDA_PATHS": "/opt/a:$LD_LIBRARY_PATH", "ODC_C": "two\nlines"}
    words = [*LAUNCH, "--launcher", "mpi", "--nproc-per-node", "2", "--oversubscribe", "--log-dir", "logs"]
    code, _, err = run(tmp_path, *words, "--mpirun-arg=--allow-run-as-root", "script.py", **values)
    assert code == 0, err
    for env in environments(tmp_path / "logs", 2):
        assert {name: env[name] for name in values} == values


def test_contradiction_of_mpi_and_torch_stops_the_job(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("open('started', 'w')")
    code, _, err = run(tmp_path, *MPIRUN, "-np", "2", *LAUNCH, "script.py", RANK="0", WORLD_SIZE="1")
    assert code == 2, err
    assert "RANK=0, WORLD_SIZE=1" in err
    assert "OMPI_COMM_WORLD_SIZE=2" in err
    assert not (tmp_path / "started").exists()


def test_ranks_of_mpirun_train_exactly_with_shm(tmp_path: Path) -> None:
    import torch
    from engine.toy import compare, reference
    from train_ranks import CASE, STEPS

    words = [*MPIRUN, "-np", "2", *LAUNCH, "--log-dir", "logs", str(TRAIN), str(tmp_path)]
    code, out, err = run(tmp_path, *words, json.dumps({"transport": "shm"}))
    assert code == 0, out + err
    ranks = [torch.load(tmp_path / f"result{rank}", weights_only=False) for rank in range(2)]
    errors = compare(CASE, ranks, reference(CASE, 2, steps=STEPS))
    assert max(errors.values()) < 1e-10, errors
    assert os.listdir(tmp_path / "logs")


def test_ranks_train_exactly_with_windows_of_mpi(tmp_path: Path) -> None:
    """Without shared memory, in processes that odc-launch has started between mpirun and MPI."""
    import torch
    from engine.toy import compare, reference
    from train_ranks import CASE, STEPS

    pytest.importorskip("mpi4py")
    options = [f"--mpirun-arg={option}" for option in ("--allow-run-as-root", *WITHOUT_SHARED_MEMORY)]
    words = ["--launcher", "mpi", "--nproc-per-node", "2", "--oversubscribe", *options, "--log-dir", "logs"]
    words += [str(TRAIN), str(tmp_path), json.dumps({"transport": "mpi"})]
    code, out, err = run(tmp_path, *LAUNCH, *words)
    assert code == 0, out + err
    assert "improperly" not in out + err  # every rank has finalized MPI
    ranks = [torch.load(tmp_path / f"result{rank}", weights_only=False) for rank in range(2)]
    errors = compare(CASE, ranks, reference(CASE, 2, steps=STEPS))
    assert max(errors.values()) < 1e-10, errors


def test_failure_with_windows_of_mpi_is_told(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    (tmp_path / "script.py").write_text(FAIL)
    code, out, err = run(tmp_path, *MPIRUN, "-np", "2", *LAUNCH, "--log-dir", "logs", "script.py")
    assert code == 1, out + err
    assert "boom 42" in (tmp_path / "logs" / "rank1.log").read_text()
    assert "rank 1 (host " in (tmp_path / "logs" / "rank0.log").read_text()
