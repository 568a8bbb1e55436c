"""Shared memory between the CPU ranks of a host: the conformance suite, and what only it has."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from distributed import values
from transport import conformance
from transport.conformance import (
    MARGIN_S,
    Backend,
    Report,
    end_stopped,
    launch,
    plan_of,
    report_of,
    survivors,
)

from odcengine.control import ControlBlock, Meeting, Phase
from odcengine.errors import OdcError
from odcengine.transport.base import Grid, Transport
from odcengine.transport.shm import ShmTransport

ONE_NODE = ((0, 1, 2),)
TWO_NODES = ((0, 3), (1, 2))  # ranks of a node need not be consecutive


@dataclass(frozen=True)
class Shm(Backend):
    """Builds :class:`ShmTransport`."""

    def transport(self, control: ControlBlock) -> Transport:
        return ShmTransport(control, Grid.of(control.topology))


@pytest.mark.parametrize("case", conformance.SUCCESS, ids=lambda case: case.__name__)
def test_works(case: Callable[[Backend], None]) -> None:
    case(Shm(TWO_NODES))


@pytest.mark.parametrize("case", conformance.ADDRESSING, ids=lambda case: case.__name__)
def test_works_on_one_node(case: Callable[[Backend], None]) -> None:
    case(Shm(ONE_NODE))


@pytest.mark.parametrize("case", conformance.FAILURES, ids=lambda case: case.__name__)
def test_fails_well(case: Callable[[Backend], None]) -> None:
    case(Shm(ONE_NODE))


# -- what only shared memory has ---------------------------------------------------------------------------


def _lock_holder(rank: int, world: int, backend: Backend, token: str, how: str) -> Report | float:
    control, transport = backend.make(rank, token)
    (window,) = transport.allocate(plan_of(transport, (65, torch.float32)))
    assert isinstance(transport, ShmTransport)
    number = transport._lock_number(window, 2)
    control.enter(Phase.BACKWARD, step=7, micro_batch=3)
    if rank == conformance.CULPRIT:
        control.lock(number, "a window")
        transport.barrier(Meeting.END_OF_STEP, 0)
        if how == "stop":
            conformance.stop_here()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    transport.barrier(Meeting.END_OF_STEP, 0)
    if how == "stop":
        conformance.wait_for_stop(control)
        return report_of(lambda: transport.scatter_add(window, torch.ones(world, 65)), control=control)

    def work() -> None:  # the kernel gives the lock of a dead process to the next, which finds out
        transport.push_add(window, 2, 0, torch.ones(65))
        transport.barrier(Meeting.END_OF_STEP, 1)

    return report_of(work, control=control)


def test_stopped_holder_of_a_lock_is_named() -> None:
    reports = survivors(launch(Shm(ONE_NODE), _lock_holder, "stop", during=end_stopped))
    conformance.check_deadline(reports)
    for report in reports:
        assert "for: lock on window 0 of rank 2 (host testhost, pid " in report.message, report
        assert "1.5 s (odc.timeout_s)" in report.message, report


def test_killed_holder_of_a_lock_gives_it_up() -> None:
    for report in survivors(launch(Shm(ONE_NODE), _lock_holder, "kill")):
        assert report.error_type == "PeerError", report
        assert report.culprit == conformance.CULPRIT, report
        assert report.seconds < 0.3 + MARGIN_S, report


def _two_threads(rank: int, world: int, backend: Backend, token: str) -> None:
    control, transport = backend.make(rank, token)
    (window,) = transport.allocate(plan_of(transport, (33, torch.float32)))
    rows = torch.ones(world, 33)

    def push() -> None:
        for _ in range(150):
            transport.scatter_add(window, rows)

    threads = [threading.Thread(target=push) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    transport.barrier(Meeting.END_OF_STEP, 0)
    assert torch.equal(window.local[0], torch.full((33,), 450.0 * world)), window.local
    conformance.finish(control, transport)


def test_threads_of_one_rank_exclude_each_other() -> None:
    """POSIX locks alone do not: they belong to the process."""
    values(launch(Shm(ONE_NODE), _two_threads))


def _no_memory(rank: int, world: int, backend: Backend, token: str) -> Report:
    control, transport = backend.make(rank, token)
    plan = plan_of(transport, (1 << 46, torch.uint8))

    def work() -> None:
        control.barrier(Meeting.PUBLISH)  # all are past the start
        transport.allocate(plan)

    return report_of(work, control=control)


def test_too_little_memory_is_refused_on_all_ranks_at_once() -> None:
    """The rank that allocates says how much is there; the others hear of it long before a deadline."""
    for report in values(launch(Shm(ONE_NODE), _no_memory)):
        assert report.seconds < MARGIN_S, report
        assert "need 196608.00 GiB of shared memory" in report.message, report
        assert "GiB are available" in report.message, report
        assert "host testhost" in report.message, report


def _after_failure(rank: int, world: int, backend: Backend, token: str) -> None:
    before = conformance.traces()
    control, transport = backend.make(rank, token)
    with contextlib.suppress(OdcError), control.phase(Phase.BACKWARD):
        transport.allocate(plan_of(transport, (100, torch.uint8)))
        if rank == 0:
            raise OdcError("no more")
        transport.barrier(Meeting.END_OF_STEP, 0)
    transport.close(None)
    control.close()
    del transport, control
    assert conformance.traces() == before


def test_nothing_is_left_after_a_failure() -> None:
    values(launch(Shm(ONE_NODE), _after_failure))
