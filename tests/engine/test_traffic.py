"""Bytes between nodes: none within a minibatch where windows have two levels; at its end what docs say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_ranks, values
from mpi_ranks import needs_mpi, run_mpi_ranks
from torch import nn

import odcengine
from odcengine import OdcEngine
from odcengine.metrics import StepMetrics
from odcengine.transport.base import Traffic, Transport, Window

SIZE, LAYERS, STEPS = 12, 3, 3
NUM_PARAMETERS = LAYERS * SIZE * SIZE
MICRO_BATCHES = (2, 0, 3, 1)  # of each rank


def _train(rank: int, world_size: int, odc: dict[str, Any], bf16: bool) -> list[StepMetrics]:
    return _train_engine(rank, odc, bf16)[0]


def _train_engine(rank: int, odc: dict[str, Any], bf16: bool) -> tuple[list[StepMetrics], Traffic | None]:
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))
    config = {
        "train_batch_size": "auto",
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "odc": {"wrap": ["Linear"], **odc},
    }
    engine: OdcEngine
    engine, *_ = odcengine.initialize(model=model, config=config)
    if engine.transport is not None:
        _expect_lent_sources(engine.transport)
    steps = []
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES[rank]):
            batch = torch.ones(1, SIZE, device=next(engine.parameters()).device)
            engine.backward(engine(batch).square().sum(), count=1)
        steps.append(engine.step())
    engine.close()
    return steps, None if engine.transport is None else engine.transport.traffic


def _expect_lent_sources(transport: Transport) -> None:
    """Every push is out of the memory that the transport has lent last: FSDP2 asks for it first."""
    lend_source, scatter_add = transport.lend_source, transport.scatter_add
    lent: list[int] = []

    def lend(*args: Any) -> torch.Tensor:
        source = lend_source(*args)
        lent.append(source.data_ptr())
        return source

    def push(window: Window, source: torch.Tensor, offset: int = 0) -> float:
        assert source.data_ptr() == lent[-1]
        return scatter_add(window, source, offset)

    transport.lend_source = lend  # type: ignore[method-assign]
    transport.scatter_add = push  # type: ignore[method-assign]


@pytest.mark.parametrize(("bf16", "bytes_a_parameter"), [(True, 6), (False, 8)], ids=["bf16", "fp32"])
def test_two_level_windows_cross_no_node_boundary(bf16: bool, bytes_a_parameter: int) -> None:
    """At the end each rank sends, and receives, 6 P/G (M-1)/M bytes: bf16 parameters and fp32 gradients."""
    nodes, ranks = 2, 2
    odc = {"sharding": "hybrid", "node_size": ranks}
    for steps in values(run_ranks(_train, nodes * ranks, odc, bf16)):
        for metrics in steps:
            assert metrics.crossed_bytes == 0
            assert metrics.exchanged_bytes * ranks * nodes == bytes_a_parameter * NUM_PARAMETERS * (nodes - 1)
            assert 0 < metrics.exchange_s < metrics.boundary_s


@pytest.mark.parametrize(
    "odc", [{"sharding": "full"}, {"transport": "collective"}], ids=["full", "collective"]
)
def test_one_node_exchanges_nothing(odc: dict[str, Any]) -> None:
    if odc.get("transport") == "collective":
        steps = values(run_ranks(_train_equal, 2, odc))
    else:
        steps = values(run_ranks(_train, 2, odc, False))
    for metrics in (metrics for rank in steps for metrics in rank):
        assert metrics.crossed_bytes == (0 if "sharding" in odc else None)
        assert (metrics.exchanged_bytes, metrics.exchange_s) == (0, 0.0)


def _train_equal(rank: int, world_size: int, odc: dict[str, Any]) -> list[StepMetrics]:
    return _train(0, world_size, odc, False)  # as many micro-batches on every rank


@needs_mpi
def test_one_window_over_two_nodes_is_counted() -> None:
    """Each micro-batch pulls every layer twice and pushes it once; who is on another node is counted."""
    nodes = (2, 1)
    node_of = [node for node, count in enumerate(nodes) for _ in range(count)]
    results = values(run_mpi_ranks(_train, 3, {"transport": "mpi", "sharding": "full"}, False, nodes=nodes))
    for rank, steps in enumerate(results):
        away = sum(node != node_of[rank] for node in node_of)
        expected = MICRO_BATCHES[rank] * 3 * 4 * NUM_PARAMETERS // len(node_of) * away
        assert [metrics.crossed_bytes for metrics in steps] == [expected] * STEPS
        assert [metrics.exchanged_bytes for metrics in steps] == [0] * STEPS


@pytest.mark.multi_gpu
@pytest.mark.parametrize("transport", ["cuda_p2p", "nvshmem"])
def test_two_level_windows_of_gpus_cross_no_node_boundary(transport: str) -> None:
    """Two nodes of one GPU each."""
    if transport == "nvshmem" and torch.cuda.device_count() < 2:
        pytest.skip("NVSHMEM needs a GPU for each rank")
    odc = {"sharding": "hybrid", "node_size": 1, "transport": transport}
    for steps in values(run_ranks(_train, 2, odc, True, gpus=True)):
        for metrics in steps:
            assert metrics.crossed_bytes == 0
            assert metrics.exchanged_bytes * 2 == 6 * NUM_PARAMETERS
            assert metrics.exchange_s > 0


@pytest.mark.multi_gpu
@pytest.mark.parametrize("transport", ["cuda_p2p", "nvshmem"])
def test_traffic_of_gpus_is_counted(transport: str) -> None:
    """By the rank that it goes to; the reference is what the windows' sizes say."""
    if transport == "nvshmem" and torch.cuda.device_count() < 2:
        pytest.skip("NVSHMEM needs a GPU for each rank")
    for rank, traffic in enumerate(values(run_ranks(_traffic, 2, transport, gpus=True))):
        share = NUM_PARAMETERS // 2  # of each rank
        pulls, pushes = 2 * MICRO_BATCHES[rank] * STEPS, MICRO_BATCHES[rank] * STEPS
        assert traffic.bytes_of_rank[1 - rank] == (2 * pulls + 2 * pushes) * share
        assert traffic.bytes_of_rank[rank] == 2 * pushes * share


def _traffic(rank: int, world_size: int, transport: str) -> Traffic | None:
    return _train_engine(rank, {"transport": transport}, True)[1]
