"""``odc-launch doctor`` on a real SLURM of two nodes, healthy and not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import Cluster

SALLOC = ["salloc", "--quiet", "--nodes=2"]
ON_N2 = "import os, sys, time\nif os.environ.get('SLURMD_NODENAME') == 'n2' and ({}):\n    {}\n"
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def examine(
    cluster: Cluster, folder: Path, *options: str, salloc: tuple[str, ...] = (), **env: str
) -> tuple[int, dict[str, Any]]:
    words = [*SALLOC, *salloc, *cluster.launch("doctor", "--json", *options)]
    code, out, err = cluster.run(folder, *words, timeout_s=250, env=env)
    assert out, err
    report: dict[str, Any] = json.loads(out)
    assert report["ok"] == (code == 0)
    return code, report


def broken(cluster: Cluster, folder: Path, when: str, what: str) -> str:
    """PYTHONPATH with a sitecustomize that does something on n2."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(ON_N2.format(when, what))
    return f"{site}{os.pathsep}{cluster.env['PYTHONPATH']}"


def texts(report: dict[str, Any], level: str) -> dict[str, tuple[list[str], str]]:
    return {f["check"]: (f["hosts"], f["text"]) for f in report["findings"] if f["level"] == level}


def test_two_healthy_nodes(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("train_batch_size: 8\nodc: {sharding: hybrid}\n")
    code, report = examine(cluster, tmp_path, "--config", "c.yaml", salloc=("--ntasks-per-node=2",))
    assert code == 0, texts(report, "error")
    assert [node["host"] for node in report["nodes"]] == ["n1", "n2"]
    told = texts(report, "ok")
    assert told["small job"][1].startswith(
        "4 cpu ranks over shm, 2 nodes with two-level windows pulled and pushed exactly"
    )
    assert "all nodes reach the store" in told["rendezvous"][1]
    assert "largest difference to n1" in told["clocks"][1]
    assert told["equal versions"][1] == "the same software on all 2 nodes"
    assert told["slurm"][1].startswith("slurm")
    assert not (tmp_path / "odc_logs").exists()


@pytest.mark.soak
def test_one_node_of_an_allocation_is_looked_at_there(cluster: Cluster, tmp_path: Path) -> None:
    """The shell of salloc may be on a login node."""
    words = ["salloc", "--quiet", "--nodes=1", "--nodelist=n2", *cluster.launch("doctor", "--json")]
    code, out, err = cluster.run(tmp_path, *words, timeout_s=250)
    assert code == 0, out + err
    report = json.loads(out)
    assert [node["host"] for node in report["nodes"]] == ["n2"]
    assert texts(report, "ok")["small job"][1].startswith("2 cpu ranks over shm pulled")


def test_a_node_without_torch_is_named(cluster: Cluster, tmp_path: Path) -> None:
    path = broken(cluster, tmp_path, "True", "sys.modules['torch'] = None")
    code, report = examine(cluster, tmp_path, "--timeout-s", "45", PYTHONPATH=path)
    assert code == 1
    hosts, text = texts(report, "error")["torch"]
    assert hosts == ["n2"]
    assert "cannot be used" in text
    assert texts(report, "error")["rendezvous"] == ([], "did not reach n1: n2")
    assert "not tried" in texts(report, "warning")["small job"][1]


@pytest.mark.soak
def test_a_node_that_hangs_is_named(cluster: Cluster, tmp_path: Path) -> None:
    path = broken(cluster, tmp_path, "'doctor' in sys.orig_argv", "time.sleep(150)")
    code, report = examine(cluster, tmp_path, "--timeout-s", "45", PYTHONPATH=path)
    assert code == 1
    hosts, text = texts(report, "error")["nodes"]
    assert hosts == ["n2"]
    assert text.startswith("no answer within 45 s")


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_by_mpirun(cluster: Cluster, tmp_path: Path) -> None:
    tasks = ("--ntasks-per-node=2",)
    code, report = examine(cluster, tmp_path, "--launcher", "mpi", salloc=tasks, **ROOT_MAY)
    assert code == 0, texts(report, "error")
    assert [node["host"] for node in report["nodes"]] == ["n1", "n2"]
    assert texts(report, "ok")["small job"][1].startswith("4 cpu ranks over ")
