"""Two hosts with addresses of their own, started by odc-launch through mpirun: rendezvous, windows, bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.toy import compare, reference
from mpi_ranks import needs_mpi
from slurm_cluster import ROOT
from train_ranks import CASE, STEPS
from two_hosts import TwoHosts, two_hosts

# Open MPI's files in shared memory have these hosts' names, in which "odc" is what other tests look for.
pytestmark = [needs_mpi, pytest.mark.timeout(290), pytest.mark.alone]
TRAIN = ROOT / "tests" / "cluster" / "train_ranks.py"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    folder = tmp_path_factory.mktemp("hosts")
    made = two_hosts(folder)
    try:
        found = made.__enter__()
    except OSError as error:
        pytest.skip(f"no network namespaces for two hosts on this machine: {error}")
    try:
        yield found
    finally:
        made.__exit__(None, None, None)


def train(hosts: TwoHosts, folder: Path, odc: dict[str, Any]) -> list[dict[str, Any]]:
    """Two ranks on each host; returns what each has."""
    (folder / "hosts").write_text("".join(f"{name} slots=2\n" for name in hosts.names))
    options = ["--allow-run-as-root", "--mca", "plm_rsh_agent", str(hosts.agent)]
    if odc["sharding"] == "full":
        options += ["--mca", "osc", "pt2pt"]  # Debian switches it off; docs/mpi.md
    words = [sys.executable, "-m", "odc_launcher", "--launcher", "mpi", "--nproc-per-node", "2"]
    words += ["--hostfile", "hosts", "--log-dir", "logs", *(f"--mpirun-arg={option}" for option in options)]
    code, out, err = hosts.run(0, folder, *words, str(TRAIN), str(folder), json.dumps(odc))
    assert code == 0, out + err
    return [torch.load(folder / f"result{rank}", weights_only=False) for rank in range(4)]


@pytest.mark.parametrize(
    "odc",
    [
        {"transport": "shm", "sharding": "hybrid"},
        {"transport": "mpi", "sharding": "full"},
    ],
    ids=["hybrid", "full"],
)
def test_two_hosts_train_exactly(hosts: TwoHosts, tmp_path: Path, odc: dict[str, Any]) -> None:
    ranks = train(hosts, tmp_path, odc)
    errors = compare(CASE, ranks, reference(CASE, 4, steps=STEPS))
    assert max(errors.values()) < 1e-10, errors
    assert [rank["host"] for rank in ranks] == [hosts.names[0]] * 2 + [hosts.names[1]] * 2
    for rank in ranks:
        crossed = [metrics.crossed_bytes for metrics in rank["metrics"]]
        exchanged = [metrics.exchanged_bytes for metrics in rank["metrics"]]
        if odc["sharding"] == "hybrid":
            assert crossed == [0] * STEPS
            assert all(exchanged)
        else:
            assert sum(crossed) > 0
            assert exchanged == [0] * STEPS
