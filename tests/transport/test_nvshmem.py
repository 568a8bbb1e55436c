"""NVSHMEM: sizes and start on any machine; the conformance suite on GPUs, mapped or treated as not mapped."""

from __future__ import annotations

import datetime
import time
import types
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks, values
from hypothesis import given
from hypothesis import strategies as st
from transport import conformance
from transport.conformance import LIMIT_S, Backend, Report, launch, plan_of, report_of
from transport.test_cuda_p2p import lent_sources

from odcengine.control import ControlBlock, Meeting
from odcengine.errors import ConfigError
from odcengine.transport import _nvshmem_start as start
from odcengine.transport import heap
from odcengine.transport.base import Grid, Transport

NUM_GPUS = torch.cuda.device_count()
ONE_NODE = (tuple(range(max(2, min(NUM_GPUS, 8)))),)


# -- sizes (USER_CASES 6) ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1G", 1 << 30),
        ("3.1M", 3250586),
        (".5m", 1 << 19),
        ("30g", 30 << 30),
        ("4096", 4096),
        ("2T", 2 << 40),
    ],
)
def test_sizes_are_read_as_nvshmem_does(text: str, size: int) -> None:
    assert heap.parse_symmetric_size(text) == size


@pytest.mark.parametrize("text", ["20kk", "30GB", "-1", "lots", "", "0", "1 G x", "1e9", "."])
def test_malformed_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"NVSHMEM_SYMMETRIC_SIZE=.*; expected a number of bytes"):
        heap.parse_symmetric_size(text)


@given(st.floats(0.001, 5000), st.sampled_from(["", "k", "K", "m", "g", "T"]))
def test_any_size_is_a_whole_number_of_bytes(number: float, suffix: str) -> None:
    size = heap.parse_symmetric_size(f"{number:.3f}{suffix}") if number >= 0.001 else 1
    assert size >= 1
    assert isinstance(size, int)


def test_heap_for_seven_billion_parameters_on_eight_gpus() -> None:
    needed = 7_000_000_000 * (2 + 4) // 8
    size, reason = heap.plan_heap(needed, {})
    assert size >= 5.25e9
    assert size % heap.HEAP_GRANULARITY == 0
    assert size - needed < heap.HEAP_GRANULARITY
    assert "rounded up to 512 MiB" in reason
    assert heap.plan_heap(needed, {"NVSHMEM_SYMMETRIC_SIZE": "8G"}) == (
        8 << 30,
        "given by NVSHMEM_SYMMETRIC_SIZE",
    )
    with pytest.raises(ConfigError, match=rf"=1G is {1 << 30} bytes a GPU, .* need {needed}"):
        heap.plan_heap(needed, {"NVSHMEM_SYMMETRIC_SIZE": "1G"})


# -- more than one user (USER_CASES 7) -----------------------------------------------------------------------


def _library(pe: int, size: int, *, running: bool = True) -> start.Nvshmem:
    core = types.SimpleNamespace(
        my_pe=lambda: pe,
        n_pes=lambda: size,
        init_status=lambda: int(running),
        InitStatus=types.SimpleNamespace(STATUS_IS_INITIALIZED=1),
    )
    return start.Nvshmem(core, None, "NVSHMEM 3.4.5")


def _states(*states: str) -> Callable[[str], list[str]]:
    """What ranks tell each other, this one among them."""

    def exchange(mine: str) -> list[str]:
        assert mine in states
        return list(states)

    return exchange


def test_running_library_is_adopted_only_with_the_same_ranks() -> None:
    """However it was started: by a unique id, by MPI's communicator, by PMIx."""
    pair = _states("as PE 0 of 2", "as PE 1 of 2")
    assert start._adopt(_library(0, 2), 0, 2, pair)
    assert start._adopt(_library(1, 2), 1, 2, pair)
    assert not start._adopt(_library(0, 2, running=False), 0, 2, _states("not at all", "not at all"))
    swapped = _states("as PE 1 of 2", "as PE 0 of 2")
    with pytest.raises(ConfigError, match="on rank 0 as PE 1 of 2, but this job has rank 0 of 2"):
        start._adopt(_library(1, 2), 0, 2, swapped)
    with pytest.raises(ConfigError, match="on rank 0 as PE 0 of 2, but this job has rank 0 of 4"):
        start._adopt(_library(0, 2), 0, 4, _states(*["as PE 0 of 2", "as PE 1 of 2"] * 2))


def test_library_that_runs_in_some_processes_only_is_refused_in_all() -> None:
    for running in (True, False):  # the same words on both ranks, instead of one that waits for the other
        states = _states("as PE 0 of 2", "not at all")
        with pytest.raises(ConfigError, match="on rank 1 not at all, but this job has rank 1 of 2"):
            start._adopt(_library(0, 2, running=running), 0 if running else 1, 2, states)


def _versions(rank: int, world_size: int) -> None:
    dist.init_process_group("gloo")
    version = "NVSHMEM 3.4.5" if rank != 1 else "NVSHMEM 3.3.24"
    start._compare_versions(version, rank, world_size, dist.group.WORLD)


def test_different_versions_are_refused_on_all_ranks() -> None:
    for result in run_ranks(_versions, 2, timeout_s=30):
        assert result.error_type == "ConfigError", result
        assert result.error is not None
        assert "rank 0 has NVSHMEM 3.4.5, rank 1 has NVSHMEM 3.3.24" in result.error


# -- on GPUs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NvshmemBackend(Backend):
    """Builds :class:`NvshmemTransport`, one rank a GPU."""

    device: str = "cuda"
    unmapped: bool = False
    slots: int = 8

    def transport(self, control: ControlBlock) -> Transport:
        from odcengine.transport.nvshmem import NvshmemTransport, Ring, start_nvshmem

        rank = control.topology.rank
        torch.cuda.set_device(rank)
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        device, group = torch.device("cuda", rank), dist.group.WORLD
        library = start_nvshmem(rank, self.world_size, device, 256 << 20, group)
        ring = Ring(slots=self.slots, chunk_nbytes=1 << 16, unmapped=self.unmapped)
        return NvshmemTransport(control, Grid.of(control.topology), device, group, library, ring)


BACKENDS = {
    "mapped": NvshmemBackend(ONE_NODE),
    "unmapped": NvshmemBackend(ONE_NODE, unmapped=True),
    "ring_of_one": NvshmemBackend(ONE_NODE, unmapped=True, slots=1),
}


@pytest.mark.multi_gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", conformance.SUCCESS, ids=lambda case: case.__name__)
def test_works(case: Callable[[Backend], None], backend: str) -> None:
    if case is conformance.nothing_is_left_after_close:
        pytest.skip("NVSHMEM stays until the process ends")
    case(BACKENDS[backend])


def _busy_owner(rank: int, world: int, backend: Backend, token: str) -> None:
    control, transport = backend.make(rank, token)
    (window,) = transport.allocate(plan_of(transport, (200_000, torch.float32)))
    rows = torch.ones(world, 200_000, device="cuda")
    if rank == 0:
        torch.cuda._sleep(int(4e9))  # the owner's GPU is busy for seconds
        time.sleep(1.0)
    else:  # rank 0 has no work of its own
        for _ in range(3):
            transport.scatter_add(window, rows)
    transport.barrier(Meeting.END_OF_STEP, 0)
    assert torch.equal(window.local[0], torch.full_like(window.local[0], 3.0 * (world - 1)))
    conformance.finish(control, transport)


@pytest.mark.multi_gpu
def test_owner_that_is_busy_or_has_no_work_still_takes_what_is_pushed() -> None:
    values(launch(BACKENDS["ring_of_one"], _busy_owner))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("backend", ["mapped", "unmapped"])
def test_memory_of_pushes_may_be_written_again_at_once(backend: str) -> None:
    values(launch(BACKENDS[backend], lent_sources, False))


def _dead_thread(rank: int, world: int, backend: Backend, token: str) -> Report:
    control, transport = backend.make(rank, token)
    (window,) = transport.allocate(plan_of(transport, (200_000, torch.float32)))
    if rank == 0:
        transport._stop.set()  # type: ignore[attr-defined]  # the owner takes nothing any more
    control.barrier(Meeting.PUBLISH)

    def work() -> None:
        transport.push_add(window, 0, 0, torch.ones(200_000, device="cuda"))

    if rank == 0:
        time.sleep(LIMIT_S + 2)
    report = report_of(work, control=control) if rank == 1 else Report("none", "", None, 0.0)
    transport.close(None)
    return report


@pytest.mark.multi_gpu
def test_full_ring_waits_with_a_deadline() -> None:
    backend = NvshmemBackend(ONE_NODE, unmapped=True, slots=1, timeout_s=LIMIT_S)
    report = values(launch(backend, _dead_thread))[1]
    assert report.error_type == "DeadlineError", report
    assert report.culprit == 0, report
    assert "room for gradients in the ring of rank 0" in report.message, report
    assert LIMIT_S < report.seconds < LIMIT_S + 2.5, report


@pytest.mark.multi_gpu
def test_job_of_other_ranks_in_one_process_is_refused() -> None:
    for result in launch(BACKENDS["mapped"], _adopts_wrong_rank):
        assert result.error_type == "ConfigError", result


def _adopts_wrong_rank(rank: int, world: int, backend: Backend, token: str) -> None:
    backend.make(rank, token)
    from nvshmem import bindings, core

    # Each process tells what it found; the others of this job found the same with their own rank.
    start._adopt(
        start.Nvshmem(core, bindings, "NVSHMEM"),
        rank,
        world + 2,
        lambda found: [found.replace(f"PE {rank} ", f"PE {other} ") for other in range(world + 2)],
    )
