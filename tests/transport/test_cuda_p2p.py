"""GPUs that address each other's memory: the conformance suite on as many ranks as there are GPUs.

Ranks of two nodes are emulated by two groups of GPUs; with two GPUs by two ranks on each.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import values
from transport import conformance
from transport.conformance import LIMIT_S, Backend, Report, launch, plan_of, report_of, survivors

from odcengine.control import ControlBlock, Meeting
from odcengine.transport.base import Grid, Transport

pytestmark = pytest.mark.multi_gpu

NUM_GPUS = torch.cuda.device_count()
ONE_NODE = (tuple(range(max(2, min(NUM_GPUS, 8)))),)
TWO_NODES = ((0, 3), (1, 2))  # ranks of a node need not be consecutive
THREE_RANKS = ((0, 1, 2),)
SKIPPED = {conformance.nothing_is_left_after_close}  # about files and shared memory, which this does not use


@dataclass(frozen=True)
class CudaP2P(Backend):
    """Builds :class:`CudaP2PTransport`; ranks share GPUs where there are too few."""

    device: str = "cuda"
    accumulators: tuple[torch.dtype, ...] = (torch.float32, torch.float64)

    def transport(self, control: ControlBlock) -> Transport:
        from odcengine.transport.cuda_p2p import CudaP2PTransport

        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        torch.cuda.set_device(control.topology.rank % NUM_GPUS)
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        group = None
        for ranks in self.nodes:
            made = dist.new_group(sorted(ranks), backend="gloo")
            group = made if control.topology.rank in ranks else group
        device = torch.device("cuda", torch.cuda.current_device())
        return CudaP2PTransport(control, Grid.of(control.topology), device, group)


@pytest.mark.parametrize("nodes", [ONE_NODE, TWO_NODES], ids=["one_node", "two_nodes"])
@pytest.mark.parametrize("case", conformance.SUCCESS, ids=lambda case: case.__name__)
def test_works(case: Callable[[Backend], None], nodes: Any) -> None:
    if case in SKIPPED:
        pytest.skip("about files, which this transport does not use")
    case(CudaP2P(nodes))


@pytest.mark.parametrize("case", conformance.FAILURES, ids=lambda case: case.__name__)
def test_fails_well(case: Callable[[Backend], None]) -> None:
    case(CudaP2P(THREE_RANKS))


# -- what only GPUs have -----------------------------------------------------------------------------------


def _busy_peer(rank: int, world: int, backend: Backend, token: str) -> float:
    control, transport = backend.make(rank, token)
    params, grads = transport.allocate(plan_of(transport, (1 << 20, torch.uint8), (1 << 18, torch.float32)))
    rows = torch.ones(world, 1 << 18, device="cuda")
    start = time.monotonic()
    for step in range(3):
        params.local.fill_(step)
        grads.local.zero_()
        transport.signal_published(step)
        if rank == 0:
            torch.cuda._sleep(int(2e8))  # about 0.1 s of the GPU; the host goes on
        out = torch.zeros(world, 1 << 20, dtype=torch.uint8, device="cuda")
        transport.gather(params, out, step)
        transport.scatter_add(grads, rows)
        transport.barrier(Meeting.END_OF_STEP, step)
        enqueued = time.monotonic() - start
        assert int(out.sum()) == step * (world - 1) * (1 << 20)
        assert torch.equal(grads.local[0], torch.full_like(grads.local[0], float(world)))
        transport.barrier(Meeting.PUBLISH, step)
    conformance.finish(control, transport)
    return enqueued


def test_flags_and_barrier_act_in_the_order_of_the_streams() -> None:
    """The host never waits for a device, so only the devices' order can make this right."""
    values(launch(CudaP2P(ONE_NODE), _busy_peer))


def _whole_rows(rank: int, world: int, backend: Backend, token: str) -> None:
    control, transport = backend.make(rank, token)
    for_all = [4096, 4104, 65536 + 8, 300_000]
    windows = transport.allocate(plan_of(transport, *((n, torch.float32) for n in for_all)))
    rounds = 50
    for window, n in zip(windows, for_all, strict=True):
        numbers = torch.arange(n, device="cuda") % 31
        rows = torch.stack([(numbers + shard) for shard in range(world)]).bfloat16()
        for number in range(rounds):
            if number % 5 == 4:  # a part, and in another dtype: by atomics, among the bulk reductions
                transport.scatter_add(window, rows[:, : n // 2].float())
            else:
                transport.scatter_add(window, rows)
    transport.barrier(Meeting.END_OF_STEP, 0)
    for window, n in zip(windows, for_all, strict=True):
        expected = (torch.arange(n, device="cuda") % 31 + rank).float() * rounds * world
        expected[n // 2 :] *= 0.8
        assert torch.equal(window.local[0], expected), (n, window.local[0], expected)
    conformance.finish(control, transport)


def test_bulk_reductions_of_all_ranks_and_atomics_add_up() -> None:
    """All GPUs push whole 16-bit rows at once into the same owners; every number counts exactly once."""
    values(launch(CudaP2P(ONE_NODE), _whole_rows))


def lent_sources(rank: int, world: int, backend: Backend, token: str, busy: bool) -> float:
    """Push out of memory that is freed and written again at once; returns the most that was in use at a time.

    Args:
        busy: the GPU is at something else meanwhile, and the host far ahead of it.

    Returns:
        Bytes over those of one source.
    """
    control, transport = backend.make(rank, token)
    n, rounds = 1 << 20, 20
    (window,) = transport.allocate(plan_of(transport, (n, torch.float32)))
    device = window.local.device
    transport.scatter_add(window, torch.zeros(world, n, device=device))  # compiles
    transport.barrier(Meeting.END_OF_STEP, 0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if busy:
        torch.cuda._sleep(int(1e9))  # about half a second
    for number in range(rounds):
        source = transport.lend_source((world * n,), torch.bfloat16, device)
        rows = source.fill_(number + 1).view(world, n)
        if number % 3:
            transport.scatter_add(window, rows)
        else:
            for start in (0, n // 2):
                transport.scatter_add(window, rows[:, start : start + n // 2], start)
        del source, rows
        torch.full((world * n,), 1000, dtype=torch.bfloat16, device=device)  # where it lay, perhaps
    peak = torch.cuda.max_memory_allocated() - before
    transport.barrier(Meeting.END_OF_STEP, 1)
    expected = torch.full_like(window.local[0], world * rounds * (rounds + 1) / 2)
    assert torch.equal(window.local[0], expected), window.local[0]
    assert torch.cuda.memory_allocated() <= before + expected.nbytes
    conformance.finish(control, transport)
    return peak / (world * n * 2)


def test_memory_of_pushes_is_used_again_while_the_host_is_ahead() -> None:
    """Not as much as the host is ahead: two sources, and what the test itself makes."""
    assert max(values(launch(CudaP2P(ONE_NODE), lent_sources, True))) <= 3.5


def _given_up(rank: int, world: int, backend: Backend, token: str, how: str) -> Report:
    _, transport = backend.make(rank, token)
    transport.allocate(plan_of(transport, (64, torch.float32)))

    def work() -> None:
        transport._wait_for(0, 0, 1, 10**6)  # type: ignore[attr-defined]  # nobody will ever store that
        if how == "abort":
            transport.abort()  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        transport.scatter_add(transport._windows[0], torch.ones(world, 64, device="cuda"))  # type: ignore[attr-defined]

    report = report_of(work)
    transport.close(None)
    return report


@pytest.mark.parametrize(("how", "error"), [("abort", "PeerError"), ("clock", "DeadlineError")])
def test_no_wait_of_a_device_lasts_for_ever(how: str, error: str) -> None:
    for report in values(launch(CudaP2P(ONE_NODE, timeout_s=LIMIT_S), _given_up, how)):
        assert report.error_type == error, report
        assert "a wait on cuda:" in report.message, report
        assert report.seconds < LIMIT_S + 2.0, report


def _killed(rank: int, world: int, backend: Backend, token: str) -> Report:
    control, transport = backend.make(rank, token)
    (window,) = transport.allocate(plan_of(transport, (1 << 16, torch.float32)))
    transport.signal_published(0)
    rows = torch.ones(world, 1 << 16, device="cuda")
    if rank == conformance.CULPRIT:
        transport.scatter_add(window, rows)
        os.kill(os.getpid(), 9)

    def work() -> None:
        for _ in range(100):
            transport.scatter_add(window, rows)
        transport.barrier(Meeting.END_OF_STEP, 0)

    report = report_of(work, control=control)
    torch.cuda.synchronize()  # nothing on the device waits for the dead rank
    return report


def test_killed_in_the_middle_of_a_minibatch() -> None:
    for report in survivors(launch(CudaP2P(ONE_NODE), _killed)):
        assert report.error_type == "PeerError", report
        assert report.culprit == conformance.CULPRIT, report
        assert report.seconds < 5.0, report
