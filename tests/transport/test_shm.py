"""Shared memory between the CPU ranks of a host: the conformance suite, and what only it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import conformance
import pytest
from conformance import Backend

from odcengine.control import ControlBlock
from odcengine.transport.base import Grid, Transport
from odcengine.transport.shm import ShmTransport

ONE_NODE = ((0, 1, 2),)
TWO_NODES = ((0, 3), (1, 2))  # ranks of a node need not be consecutive


@dataclass(frozen=True)
class Shm(Backend):
    """Builds :class:`ShmTransport`."""

    def transport(self, control: ControlBlock) -> Transport:
        return ShmTransport(control, Grid.of(control.topology))


@pytest.mark.parametrize("nodes", [ONE_NODE, TWO_NODES], ids=["1x3", "2x2"])
@pytest.mark.parametrize("case", conformance.SUCCESS, ids=lambda case: case.__name__)
def test_works(case: Callable[[Backend], None], nodes: tuple[tuple[int, ...], ...]) -> None:
    case(Shm(nodes))


@pytest.mark.parametrize("case", conformance.FAILURES, ids=lambda case: case.__name__)
def test_fails_well(case: Callable[[Backend], None]) -> None:
    case(Shm(ONE_NODE))
