"""An attached model on two GPUs: FSDP2's own gradients, and those of one process with unequal counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_ranks, values
from engine.toy import Case, micro_batches

import odcengine

from .test_attach import CASES, ODC, _equal, _unequal, _whole
from .toy import BF16, error_between, make_optimizer, meet, reference, sharded

pytestmark = pytest.mark.multi_gpu


def _on_gpus(rank: int, world_size: int, transport: str) -> dict[str, Any]:
    meet(rank, world_size)
    case, odc = CASES["plain"], {"transport": transport}
    return {
        "stock": _equal(rank, case, False),
        "attached": _equal(rank, case, True),
        "unequal": {name: _unequal(rank, case, **odc) for name, case in CASES.items()},
        "hybrid": _unequal(rank, case, sharding="hybrid", node_size=1, **odc),
    }


@pytest.mark.parametrize("transport", ["cuda_p2p", "nvshmem"])
def test_gradients(transport: str) -> None:
    if transport == "nvshmem" and torch.cuda.device_count() < 2:
        pytest.skip("NVSHMEM needs a GPU for each rank")
    ranks = values(run_ranks(_on_gpus, 2, transport, gpus=True, timeout_s=280))
    stock = _whole([rank["stock"] for rank in ranks])
    assert error_between([rank["attached"] for rank in ranks], stock) < 1e-10
    for name, case in CASES.items():
        assert error_between([rank["unequal"][name] for rank in ranks], reference(case, 2)) < 1e-10
    assert error_between([rank["hybrid"] for rank in ranks], reference(CASES["plain"], 2)) < 1e-10


def _syncs(rank: int, world_size: int) -> None:
    meet(rank, world_size)
    case, device = Case("low", dtype=torch.float32), torch.device("cuda", torch.cuda.current_device())
    model = sharded(case, mp_policy=BF16)
    optimizer = make_optimizer(model)
    handle = odcengine.attach(model, optimizer, **ODC, transport="cuda_p2p")
    share = micro_batches(case.name, 1, world_size)[rank]
    batches = [(tokens.to(device), targets.to(device), branch) for tokens, targets, branch in share]
    for step in range(3):
        torch.cuda.synchronize()
        if step:  # the first minibatch compiles kernels
            torch.cuda.set_sync_debug_mode("error")
        for tokens, targets, branch in batches:
            logits = model(tokens, branch)
            torch.nn.functional.cross_entropy(logits[0].float(), targets[0], reduction="sum").backward()
        torch.cuda.set_sync_debug_mode("default")
        handle.collect()
        optimizer.step()
        optimizer.zero_grad()
    handle.close()


def test_no_host_synchronisation_inside_a_minibatch() -> None:
    values(run_ranks(_syncs, 2, gpus=True, timeout_s=60))
