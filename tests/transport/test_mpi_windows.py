"""MPI's one-sided operations between CPU ranks: the conformance suite under mpirun, and what only MPI has."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import RankResult, run_ranks, values
from mpi_ranks import WITHOUT_SHARED_MEMORY, Pool, mpirun, needs_mpi, run_mpi_ranks
from torch import nn
from transport import conformance
from transport.conformance import (
    CULPRIT,
    LIMIT_S,
    MARGIN_S,
    Backend,
    Report,
    end_stopped,
    launch,
    plan_of,
    report_of,
    survivors,
)

import odcengine
from odcengine.control import ControlBlock, Meeting, Phase
from odcengine.transport import mpi as mpi_transport
from odcengine.transport._mpi_start import Mpi, process_mpi
from odcengine.transport.base import Grid, Transport
from odcengine.transport.mpi import MpiTransport

ONE_NODE = ((0, 1, 2),)
TWO_NODES = ((0, 3), (1, 2))


@dataclass(frozen=True)
class MpiBackend(Backend):
    """Builds :class:`MpiTransport`; ``options`` are mpirun's."""

    options: tuple[str, ...] = ()

    def transport(self, control: ControlBlock) -> Transport:
        return MpiTransport(control, Grid.of(control.topology), process_mpi())

    def run(self, function: Callable[..., Any], *args: Any, **settings: Any) -> list[RankResult]:
        settings.pop("gpus")
        return run_mpi_ranks(function, *args, options=self.options, **settings)


class Pooled(MpiBackend):
    """The same on processes that are there already: nothing may go wrong in them."""

    def run(self, function: Callable[..., Any], *args: Any, **settings: Any) -> list[RankResult]:
        world_size, *rest = args
        return _pool(world_size, self.options).run(function, *rest)


_POOLS = contextlib.ExitStack()


@functools.cache
def _pool(world_size: int, options: tuple[str, ...]) -> Pool:
    pool = Pool(world_size, *options)
    _POOLS.callback(pool.close)
    return pool


@pytest.fixture(scope="module", autouse=True)
def _pools_end() -> Iterator[None]:
    with _POOLS:
        yield
    _pool.cache_clear()


@needs_mpi
@pytest.mark.parametrize("case", conformance.SUCCESS, ids=lambda case: case.__name__)
def test_works(case: Callable[[Backend], None]) -> None:
    case(Pooled(TWO_NODES))


@needs_mpi
@pytest.mark.parametrize("case", conformance.ADDRESSING, ids=lambda case: case.__name__)
def test_works_on_one_node_without_shared_memory(case: Callable[[Backend], None]) -> None:
    case(Pooled(ONE_NODE, options=WITHOUT_SHARED_MEMORY))


@needs_mpi
@pytest.mark.parametrize("case", conformance.FAILURES, ids=lambda case: case.__name__)
def test_fails_well(case: Callable[[Backend], None]) -> None:
    case(MpiBackend(ONE_NODE, options=WITHOUT_SHARED_MEMORY))


# -- progress ----------------------------------------------------------------------------------------------


def _computing(rank: int, world: int, backend: Backend, token: str, folder: str) -> bool:
    control, transport = backend.make(rank, token)
    params, grads = transport.allocate(plan_of(transport, (70000, torch.uint8), (5000, torch.float32)))
    conformance.fill(transport, params, 0)
    transport.signal_published(0)
    done, in_time = [Path(folder, f"done{peer}") for peer in range(world)], True
    if rank == CULPRIT:  # outside of MPI until the others have pulled and pushed
        deadline = time.monotonic() + 30
        while not all(path.exists() for path in done if path != done[rank]):
            if time.monotonic() > deadline:
                in_time = False
                break
    else:
        for _ in range(5):
            conformance.check_gather(transport, params, 0, "cpu")
            transport.scatter_add(grads, torch.ones(world, 5000))
        done[rank].touch()
    transport.barrier(Meeting.END_OF_STEP, 0)
    assert torch.equal(grads.local[0], torch.full((5000,), 5.0 * (world - 1)))
    interval = sys.getswitchinterval()
    conformance.finish(control, transport)
    assert interval < 1e-3 < sys.getswitchinterval()
    return in_time


@needs_mpi
def test_a_rank_that_computes_outside_of_mpi_is_pulled_from(tmp_path: Path) -> None:
    backend = MpiBackend(ONE_NODE, options=WITHOUT_SHARED_MEMORY)
    assert all(values(launch(backend, _computing, str(tmp_path))))


def _no_help(rank: int, world: int, backend: Backend, token: str) -> Report:
    Mpi.serve = lambda *args: None  # type: ignore[method-assign,assignment]
    mpi_transport._LOOPS_S = (0.02, 0.1)
    control, transport = backend.make(rank, token)
    return report_of(lambda: transport.allocate(plan_of(transport, (4, torch.uint8))), control=control)


@needs_mpi
def test_start_stops_where_an_owner_is_not_served() -> None:
    """As if the helper thread were of no use."""
    reports = values(launch(MpiBackend(((0, 1),), options=WITHOUT_SHARED_MEMORY), _no_help))
    assert any(report.error_type == "ConfigError" for report in reports), reports
    for report in reports:  # the others may have been told by the first
        assert "serves no one-sided operation while the owner computes" in report.message
        assert "MPICH_ASYNC_PROGRESS=1" in report.message


def _alone(rank: int, world: int, backend: Backend, token: str) -> None:
    control, transport = backend.make(rank, token)
    before = sys.getswitchinterval()
    transport.allocate(plan_of(transport, (4, torch.uint8)))
    assert isinstance(transport, MpiTransport)
    with transport.mpi() as mpi:
        assert mpi.COMM_WORLD.allgather(rank) == [0, 1]
    conformance.finish(control, transport)
    assert sys.getswitchinterval() == before


@needs_mpi
def test_script_calls_mpi_itself_and_settings_of_the_interpreter_come_back() -> None:
    values(launch(MpiBackend(((0, 1),)), _alone))


# -- peers that stop ---------------------------------------------------------------------------------------


def _stopped(rank: int, world: int, backend: Backend, token: str, operation: str) -> Report:
    control, transport = backend.make(rank, token)
    (window,) = transport.allocate(plan_of(transport, (65, torch.float32)))
    control.enter(Phase.BACKWARD, step=7, micro_batch=3)
    transport.barrier(Meeting.END_OF_STEP, 0)
    if rank == CULPRIT:
        conformance.stop_here()
    conformance.wait_for_stop(control)

    def work() -> None:
        if operation == "pull":
            transport.pull(window, CULPRIT, 0, torch.empty(65))
        else:
            transport.scatter_add(window, torch.ones(world, 65))
            transport.barrier(Meeting.END_OF_STEP, 7)

    report = report_of(work, control=control)
    transport.close(None)  # as the engine does; MPI may never come back
    return report


@needs_mpi
@pytest.mark.parametrize(
    ("operation", "waits_for"), [("pull", "data on its way"), ("push", "its gradients to reach their owners")]
)
def test_owner_that_stopped_is_named(operation: str, waits_for: str) -> None:
    """Calls of MPI that would wait for ever are given up."""
    backend = MpiBackend(ONE_NODE, options=WITHOUT_SHARED_MEMORY)
    reports = survivors(launch(backend, _stopped, operation, during=end_stopped))
    conformance.check_deadline(reports)
    for report in reports:
        assert f"for: {waits_for}" in report.message, report


def _kept_in_mpi(rank: int, world: int, backend: Backend, token: str) -> Report:
    control, transport = backend.make(rank, token)
    assert isinstance(transport, MpiTransport)
    transport.allocate(plan_of(transport, (65, torch.float32)))
    transport.barrier(Meeting.END_OF_STEP, 0)
    control.timeout_s = LIMIT_S
    if rank == CULPRIT:
        with transport._entered():
            time.sleep(1000)  # as a call that does not return
    return report_of(lambda: transport.barrier(Meeting.END_OF_STEP, 7), control=control)


@needs_mpi
def test_rank_that_does_not_come_out_of_mpi_ends_itself() -> None:
    results = launch(MpiBackend(ONE_NODE), _kept_in_mpi)
    assert results[CULPRIT].exit_code in (124, 1)  # by its own limit, or since the others have told it
    assert results[CULPRIT].error is None
    for report in survivors(results):
        assert report.culprit == CULPRIT, report
        assert "rank 1 (host testhost, pid " in report.message, report
        assert report.seconds < LIMIT_S + MARGIN_S, report


def _alone_in_the_start(rank: int, world: int) -> None:
    if rank == 0:
        process_mpi().start(0.5)
    time.sleep(2.0)


@needs_mpi
def test_start_of_mpi_that_does_not_come_back_ends() -> None:
    """The other rank does not start MPI at all."""
    with mpirun(2) as env_of_ranks:
        results = run_ranks(_alone_in_the_start, 2, env_of_ranks=env_of_ranks)
    assert [result.exit_code for result in results] == [-signal.SIGALRM, 0]


# -- the end of a window -----------------------------------------------------------------------------------


def _view_after_close(rank: int, world: int, backend: Backend, token: str, holder: int) -> bool:
    control, transport = backend.make(rank, token)
    assert isinstance(transport, MpiTransport)
    (window,) = transport.allocate(plan_of(transport, (9, torch.float32)))
    window.local.fill_(3.0)
    cycle: list[Any] = [window.local]  # only the collector finds it
    cycle.append(cycle)
    view = window.local[0] if rank == holder else None
    del cycle, window
    conformance.finish(control, transport)
    if view is not None:
        assert torch.equal(view, torch.full((9,), 3.0))
    return transport in process_mpi().kept


@needs_mpi
def test_memory_stays_while_a_tensor_views_it() -> None:
    """MPI would take it away under the tensor: all ranks keep their windows then."""
    backend = Pooled(((0, 1, 2),), options=WITHOUT_SHARED_MEMORY)
    assert values(launch(backend, _view_after_close, 1)) == [True] * 3
    assert values(launch(backend, _view_after_close, -1)) == [False] * 3


# -- what is refused ---------------------------------------------------------------------------------------


def _initialize(rank: int, world: int, prepare: Callable[[], None] | None) -> Report:
    if prepare is not None:
        prepare()
    config = {
        "train_batch_size": "auto",
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "odc": {"transport": "mpi"},
    }
    return report_of(lambda: odcengine.initialize(model=nn.Linear(3, 2), config=config))


def _hide_mpi4py() -> None:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]


def _check_refused(results: list[RankResult], *texts: str) -> None:
    for report in values(results):
        assert report.error_type == "ConfigError", report
        for text in texts:
            assert text in report.message, report


def test_refused_without_mpi4py() -> None:
    results = run_ranks(_initialize, 2, _hide_mpi4py)
    _check_refused(results, "needs mpi4py, which is not installed; pip install 'odcengine[mpi]'")


@needs_mpi
def test_refused_without_mpirun() -> None:
    results = run_ranks(_initialize, 2, None)
    _check_refused(results, "was started by torchrun, without the variables of mpirun", "srun --mpi=pmix")


@needs_mpi
def test_refused_with_fewer_processes_of_mpi_than_ranks() -> None:
    """odc-launch --nproc-per-node 2 in one task of mpirun."""
    with mpirun(1) as (env,):
        results = run_ranks(_initialize, 2, None, env=env)
    _check_refused(results, "says rank 0 of 2, but Open MPI (OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=1)")


def _start_with_all_threads() -> None:
    from mpi4py import MPI

    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        call = Mpi.call

        def late(self: Mpi, function: Callable[[], Any], *args: Any, **options: Any) -> Any:
            def after_a_while() -> Any:
                time.sleep(0.3)
                return function()

            return call(self, after_a_while, *args, **options)

        Mpi.call = late  # type: ignore[method-assign,assignment]


@needs_mpi
def test_refused_with_the_thread_level_that_has_no_windows() -> None:
    """Rank 0, which MPI refuses a moment after rank 1, tells the reason and not that rank 1 has failed."""
    with mpirun(2, *WITHOUT_SHARED_MEMORY) as env_of_ranks:
        results = run_ranks(_initialize, 2, _start_with_all_threads, env_of_ranks=env_of_ranks)
    _check_refused(results, "made no window", "MPI_THREAD_MULTIPLE", "mpi4py.rc.thread_level = 'serialized'")
