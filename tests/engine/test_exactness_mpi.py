"""Exactness over MPI: the core's features, and windows that join two nodes of unequal size."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from distributed import RankResult, values
from mpi_ranks import WITHOUT_SHARED_MEMORY, needs_mpi, run_mpi_ranks

from engine.test_exactness import BY_NAME, CASES, check, reference_of
from engine.toy import train

pytestmark = needs_mpi

# Each step of each micro-batch asks a rank that computes on the same two cores: fewer steps than the core's.
STEPS = 3
HYBRID_CASES = ("tied", "lora", "bf16")


def _run(rank: int, world_size: int, names: tuple[str, ...], odc: dict[str, Any]) -> dict[str, Any]:
    odc = {"transport": "mpi", **odc}
    return {
        case.name: train(rank, world_size, case, steps=STEPS, **odc) for case in CASES if case.name in names
    }


@functools.cache
def _full() -> list[RankResult]:
    """One window over a node of two ranks and a node of one, which share nothing but MPI and the store."""
    return run_mpi_ranks(
        _run,
        3,
        tuple(BY_NAME),
        {"sharding": "full"},
        options=WITHOUT_SHARED_MEMORY,
        nodes=(2, 1),
        timeout_s=280,
    )


@functools.cache
def _hybrid() -> list[RankResult]:
    return run_mpi_ranks(_run, 4, HYBRID_CASES, {"sharding": "hybrid"}, nodes=(2, 2), timeout_s=280)


@pytest.mark.parametrize("name", BY_NAME)
def test_equals_one_process_on_unequal_nodes_without_shared_memory(name: str) -> None:
    check(BY_NAME[name], [result[name] for result in values(_full())], reference_of(name, 3, STEPS))


@pytest.mark.parametrize("name", HYBRID_CASES)
def test_equals_one_process_in_two_level_windows(name: str) -> None:
    check(BY_NAME[name], [result[name] for result in values(_hybrid())], reference_of(name, 4, STEPS))
