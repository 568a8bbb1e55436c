"""MPI's one-sided operations between CPU ranks: the conformance suite under mpirun, and what only MPI has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from distributed import RankResult
from mpi_ranks import WITHOUT_SHARED_MEMORY, needs_mpi, run_mpi_ranks
from transport import conformance
from transport.conformance import Backend

from odcengine.control import ControlBlock
from odcengine.transport._mpi_start import process_mpi
from odcengine.transport.base import Grid, Transport
from odcengine.transport.mpi import MpiTransport

pytestmark = needs_mpi

ONE_NODE = ((0, 1, 2),)
TWO_NODES = ((0, 3), (1, 2))


@dataclass(frozen=True)
class MpiBackend(Backend):
    """Builds :class:`MpiTransport`."""

    options: tuple[str, ...] = ()

    def transport(self, control: ControlBlock) -> Transport:
        return MpiTransport(control, Grid.of(control.topology), process_mpi())

    def run(self, function: Callable[..., Any], *args: Any, **settings: Any) -> list[RankResult]:
        settings.pop("gpus")
        return run_mpi_ranks(function, *args, options=self.options, **settings)


@pytest.mark.parametrize("case", conformance.SUCCESS, ids=lambda case: case.__name__)
def test_works(case: Callable[[Backend], None]) -> None:
    case(MpiBackend(TWO_NODES))


@pytest.mark.parametrize("case", conformance.ADDRESSING, ids=lambda case: case.__name__)
def test_works_on_one_node_without_shared_memory(case: Callable[[Backend], None]) -> None:
    case(MpiBackend(ONE_NODE, options=WITHOUT_SHARED_MEMORY))


@pytest.mark.parametrize("case", conformance.FAILURES, ids=lambda case: case.__name__)
def test_fails_well(case: Callable[[Backend], None]) -> None:
    case(MpiBackend(ONE_NODE, options=WITHOUT_SHARED_MEMORY))
