"""An attached model on two GPUs: FSDP2's own gradients, and those of one process with unequal counts."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import run_ranks, values

from .test_attach import CASES, _equal, _unequal, _whole
from .toy import error_between, meet, reference

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
    ranks = values(run_ranks(_on_gpus, 2, transport, gpus=True, timeout_s=280))
    stock = _whole([rank["stock"] for rank in ranks])
    assert error_between([rank["attached"] for rank in ranks], stock) < 1e-10
    for name, case in CASES.items():
        assert error_between([rank["unequal"][name] for rank in ranks], reference(case, 2)) < 1e-10
    assert error_between([rank["hybrid"] for rank in ranks], reference(CASES["plain"], 2)) < 1e-10
