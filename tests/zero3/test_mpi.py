"""An attached engine on windows of MPI."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import values
from mpi_ranks import needs_mpi, run_mpi_ranks

from zero3.test_exactness import CASES, _train_all
from zero3.toy import error_of, reference

pytest.importorskip("deepspeed")
pytestmark = [needs_mpi, pytest.mark.soak]

NAMES = ("clipped", "frozen", "large")


def test_equals_one_process() -> None:
    odc: dict[str, Any] = {"transport": "mpi"}
    ranks = values(run_mpi_ranks(_train_all, 2, odc, NAMES, timeout_s=200))
    for case in CASES:
        if case.name in NAMES:
            right = reference(case, 2)["weights"]
            assert all(error_of(rank[case.name]["weights"], right) <= case.tolerance for rank in ranks)
