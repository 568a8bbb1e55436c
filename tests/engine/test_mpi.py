"""Exactness over MPI: the core's features without shared memory, and in two-level windows."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from distributed import RankResult, values
from mpi_ranks import WITHOUT_SHARED_MEMORY, needs_mpi, run_mpi_ranks

from engine.test_exactness import BY_NAME, CASES, check, reference_of
from engine.toy import train

pytestmark = needs_mpi

FULL = (3, {"transport": "mpi"}, WITHOUT_SHARED_MEMORY, tuple(BY_NAME))
HYBRID = (4, {"transport": "mpi", "sharding": "hybrid", "node_size": 2}, (), ("tied", "lora", "bf16"))


def _run(rank: int, world_size: int, names: tuple[str, ...], odc: dict[str, Any]) -> dict[str, Any]:
    return {case.name: train(rank, world_size, case, **odc) for case in CASES if case.name in names}


@functools.cache
def _ranks(hybrid: bool) -> list[RankResult]:
    world_size, odc, options, names = HYBRID if hybrid else FULL
    return run_mpi_ranks(_run, world_size, names, odc, options=options, timeout_s=150)


@pytest.mark.parametrize("name", BY_NAME)
def test_equals_one_process_without_shared_memory(name: str) -> None:
    check(BY_NAME[name], [result[name] for result in values(_ranks(False))], reference_of(name, FULL[0]))


@pytest.mark.parametrize("name", HYBRID[-1])
def test_equals_one_process_on_two_nodes(name: str) -> None:
    check(BY_NAME[name], [result[name] for result in values(_ranks(True))], reference_of(name, HYBRID[0]))
