"""Which transport `auto` takes on GPUs; torch.cuda is made up."""

from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from odcengine import device, start
from odcengine.device import check_devices, choose_device, identity_of, unmapped_pair
from odcengine.errors import ConfigError
from odcengine.ranks import RankInfo
from odcengine.transport._nvshmem_start import start_nvshmem


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


class MadeUpGpu:
    """What :class:`CudaDevice` tells of itself."""

    type = "cuda"
    backend = device.CudaDevice.backend

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)


def _gpus_of(monkeypatch: pytest.MonkeyPatch, share: str, count: int) -> list[Any]:
    """The devices of four ranks of a machine with ``count`` GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    properties = [SimpleNamespace(uuid=f"uuid{index}", name="GPU model") for index in range(count)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[device.index])
    monkeypatch.setattr(device, "CudaDevice", MadeUpGpu)
    monkeypatch.setenv("ODC_SHARE_GPUS", share)
    return [
        choose_device(RankInfo(rank, 4, local_rank=rank, local_world_size=4), "auto") for rank in range(4)
    ]


@pytest.mark.parametrize(("count", "expected"), [(1, [0, 0, 0, 0]), (2, [0, 1, 0, 1]), (4, [0, 1, 2, 3])])
def test_ranks_share_gpus_where_they_may(
    monkeypatch: pytest.MonkeyPatch, count: int, expected: list[int]
) -> None:
    gpus = _gpus_of(monkeypatch, "1", count)
    assert [gpu.torch_device.index for gpu in gpus] == expected
    check_devices([identity_of(gpu) for gpu in gpus], [f"rank {rank}" for rank in range(4)])
    assert {gpu.backend for gpu in gpus} == {"cpu:gloo,cuda:gloo"}  # NCCL refuses two ranks on one GPU


def test_sharing_gpus_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = _gpus_of(monkeypatch, "0", 1)
    names = [f"rank {rank}" for rank in range(4)]
    with pytest.raises(ConfigError, match=r"rank 0 and rank 1 are on the same GPU; .*ODC_SHARE_GPUS=1"):
        check_devices([identity_of(gpu) for gpu in gpus], names)
    assert {gpu.backend for gpu in gpus} == {"cpu:gloo,cuda:nccl"}
    with pytest.raises(ConfigError, match=r"local rank 2 of 4 finds 2 GPUs; .*ODC_SHARE_GPUS=1"):
        _gpus_of(monkeypatch, "0", 2)
    with pytest.raises(ConfigError, match="ODC_SHARE_GPUS='yes'; expected 1"):
        _gpus_of(monkeypatch, "yes", 2)


def test_ranks_agree_whether_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = identity_of(_gpus_of(monkeypatch, "0", 4)[0])
    shared = identity_of(_gpus_of(monkeypatch, "1", 4)[1])
    with pytest.raises(
        ConfigError, match=r"rank 1 computes on GPU model \(ODC_SHARE_GPUS=1\), rank 0 on GPU"
    ):
        check_devices([alone, shared], ["rank 0", "rank 1"])


def test_nvshmem_wants_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODC_SHARE_GPUS", "1")
    group: Any = None
    with pytest.raises(ConfigError, match=r"nvshmem needs a GPU for each rank.*cuda_p2p"):
        start_nvshmem(0, 2, torch.device("cuda", 0), 0, group)
