"""Which transport `auto` takes on GPUs; torch.cuda is made up."""

from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from odcengine import start
from odcengine.device import unmapped_pair
from odcengine.errors import ConfigError


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], bool]:
    """Four GPUs; the pairs in the result cannot address each other."""
    apart: dict[tuple[int, int], bool] = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU model {index}")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) not in apart)
    return apart


def test_pairs(machine: dict[tuple[int, int], bool]) -> None:
    assert unmapped_pair(0, 4) is None
    machine[0, 2] = True
    assert "GPU 0 (GPU model 0) cannot address the memory of GPU 2 (GPU model 2)" in (
        unmapped_pair(0, 4) or ""
    )
    assert unmapped_pair(2, 4) is None
    assert unmapped_pair(0, 2) is None  # a node of two ranks has no third GPU


def choose(transport: str = "auto") -> str:
    topology = SimpleNamespace(peers=(0, 1), rank=0, describe=lambda rank: f"rank {rank} (host a)")
    device = SimpleNamespace(torch_device=torch.device("cuda", 0))
    job: Any = SimpleNamespace(topology=topology, device=device, start_group=None)
    config: Any = SimpleNamespace(odc=SimpleNamespace(transport=transport))
    return start._gpu_transport(job, config)


@pytest.mark.parametrize(
    ("pair", "there", "expected"),
    [(None, True, "cuda_p2p"), (None, False, "cuda_p2p"), ("GPU 1 cannot", True, "nvshmem")],
)
def test_choice(
    monkeypatch: pytest.MonkeyPatch,
    machine: dict[tuple[int, int], bool],
    pair: str | None,
    there: bool,
    expected: str,
) -> None:
    told = json.dumps([pair, there])  # of rank 1: all ranks must choose alike
    monkeypatch.setattr(start, "exchange_texts", lambda text, group: [text, told])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert choose() == expected
    assert choose("cuda_p2p") == "cuda_p2p"


def test_refused_without_nvshmem_on_a_rank(
    monkeypatch: pytest.MonkeyPatch, machine: dict[tuple[int, int], bool]
) -> None:
    machine[0, 1] = True
    monkeypatch.setattr(start, "exchange_texts", lambda text, group: [text, json.dumps([None, False])])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=r"GPU 0 .* GPU 1 .*not installed for ranks \[1\]: pip install"):
        choose()
