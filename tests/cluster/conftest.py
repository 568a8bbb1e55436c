"""The tests of this folder share one SLURM, which exists while they run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SLURM, Cluster, clean_environment, start, stop


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    missing = [name for name in SLURM if shutil.which(name) is None]
    if missing:
        pytest.skip(
            f"SLURM is not installed ({', '.join(missing)}); on Debian: apt-get install slurm-wlm munge"
        )
    if os.geteuid() != 0:
        pytest.skip("starting slurmd on this host needs root")
    folder = Path(tempfile.mkdtemp(prefix="odc-slurm-"))
    own = Cluster(folder, clean_environment() | {"SLURM_CONF": str(folder / "slurm.conf")})
    try:
        start(own)
        yield own
    finally:
        stop(own)
        shutil.rmtree(folder, ignore_errors=True)
