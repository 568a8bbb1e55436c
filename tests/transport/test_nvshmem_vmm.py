"""The trial of NVSHMEM's heap, with a program in the probe's place; versions of its libraries."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks, values

from odcengine._collectives import exchange_texts
from odcengine.transport._nvshmem_start import compare_with_wheel
from odcengine.transport._nvshmem_vmm import VMM_VARIABLE, choose_vmm

PROBE = """\
import os, sys, time
mode, rank, world_size, gpu, fd = sys.argv[1], *map(int, sys.argv[2:])
assert os.environ["NVSHMEM_SYMMETRIC_SIZE"] == str(64 << 20)
disabled = os.environ.get("NVSHMEM_DISABLE_CUDA_VMM") == "1"
if mode == "no id" and rank == 0:
    sys.exit("no socket")
with os.fdopen(fd, "wb" if rank == 0 else "rb") as pipe:
    if rank == 0:
        pipe.write(bytes(range(200)))
    elif pipe.read() != bytes(range(200)) and mode != "no id":
        sys.exit("not the id")
if mode == "needs it" and not disabled:
    if rank == 1:
        os.abort() if gpu == 7 else sys.exit("cuMemCreate failed")
    time.sleep(60)
if mode == "hangs" and rank == 1 or mode == "no id":
    time.sleep(60)
"""


def _choose(rank: int, world_size: int, script: str, mode: str, gpu: int, set_on: int) -> object:
    dist.init_process_group("gloo")
    env = dict(os.environ)
    if rank == set_on:
        env[VMM_VARIABLE] = "0"
    start = time.monotonic()
    told = choose_vmm(
        rank,
        world_size,
        gpu,
        dist.group.WORLD,
        environ=env,
        command=(sys.executable, script, mode),
        timeout_s=2.0 if mode == "hangs" else 30.0,
    )
    return env.get(VMM_VARIABLE), told, time.monotonic() - start


def choose(folder: Path, mode: str, gpu: int = 0, set_on: int = -1) -> list[tuple[str | None, str | None]]:
    script = folder / "probe.py"
    script.write_text(PROBE)
    found = values(run_ranks(_choose, 2, str(script), mode, gpu, set_on, timeout_s=150))
    assert max(seconds for _, _, seconds in found) < 55  # nobody sat out a probe's sleep
    return [(value, told) for value, told, _ in found]


def test_left_alone_where_the_heap_works(tmp_path: Path) -> None:
    assert choose(tmp_path, "works") == [(None, f"NVSHMEM's heap works without {VMM_VARIABLE}")] * 2


@pytest.mark.parametrize(
    ("gpu", "told"), [(0, "rank 1: cuMemCreate failed"), (7, "rank 1: it ended with -6")]
)
def test_set_on_all_ranks_where_one_needs_it(tmp_path: Path, gpu: int, told: str) -> None:
    """Also where the failure ends the process, and while others wait for the one that is gone."""
    found = choose(tmp_path, "needs it", gpu)
    assert [value for value, _ in found] == ["1", "1"]
    assert found[0][1] == found[1][1] is not None
    assert f"fails here ({told}) and works with {VMM_VARIABLE}=1" in found[0][1]


def test_users_value_is_left_alone_though_only_one_rank_has_it(tmp_path: Path) -> None:
    assert choose(tmp_path, "needs it", set_on=1) == [(None, None), ("0", None)]


@pytest.mark.parametrize(("mode", "told"), [("hangs", "no answer within 2 s"), ("no id", "no socket")])
def test_not_set_where_it_does_not_help(tmp_path: Path, mode: str, told: str) -> None:
    for value, text in choose(tmp_path, mode):
        assert value is None
        assert text is not None
        assert f"with and without {VMM_VARIABLE}" in text
        assert told in text


def _texts(rank: int, world_size: int) -> list[str]:
    dist.init_process_group("gloo")
    return exchange_texts(f"r{rank} \u00e9" + "x" * 400 * rank, dist.group.WORLD) + exchange_texts(
        "", dist.group.WORLD
    )


def test_texts_of_all_ranks() -> None:
    for texts in values(run_ranks(_texts, 2, timeout_s=30)):
        assert texts == ["r0 \u00e9", "r1 \u00e9" + "x" * 400, "", ""]


@pytest.mark.parametrize(
    ("host", "wheel", "cuda", "agree"),
    [
        ("3.4.5", "3.4.5", "12.8", True),
        ("3.4.5", "3.4.5.post1", "13.0", True),
        ("3.3.24", "3.2.5", "12.8", False),
    ],
)
def test_host_library_and_wheel(
    monkeypatch: pytest.MonkeyPatch, host: str, wheel: str, cuda: str, agree: bool
) -> None:
    asked = []

    def version(name: str) -> str:
        asked.append(name)
        return wheel

    monkeypatch.setattr(importlib.metadata, "version", version)
    told = compare_with_wheel(host, cuda)
    assert asked == [f"nvidia-nvshmem-cu{cuda[:2]}"]
    assert (told is None) == agree
    if told is not None:
        assert "host library is 3.3.24" in told
        assert "nvidia-nvshmem-cu12 3.2.5" in told


def test_no_wheel_is_no_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert compare_with_wheel("3.4.5", None) is None


def _real(rank: int, world_size: int) -> tuple[str | None, str | None, int]:
    from odcengine.transport._nvshmem_start import allocate_symmetric, start_nvshmem

    torch.cuda.set_device(rank)
    dist.init_process_group("gloo")
    os.environ.pop(VMM_VARIABLE, None)
    env = dict(os.environ)
    told = choose_vmm(rank, world_size, rank, dist.group.WORLD, environ=env)
    device = torch.device("cuda", rank)
    # Tries again by itself, and then starts with what it found.
    library = start_nvshmem(rank, world_size, device, 64 << 20, dist.group.WORLD)
    memory = allocate_symmetric(library, 1 << 20, device)
    memory.fill_(rank + 1)
    assert os.environ.get(VMM_VARIABLE) == env.get(VMM_VARIABLE)
    return told, env.get(VMM_VARIABLE), int(memory.sum())


@pytest.mark.multi_gpu
def test_the_real_library_starts_with_what_the_trial_finds() -> None:
    found = values(run_ranks(_real, 2, timeout_s=240, gpus=True))
    for rank, (told, value, total) in enumerate(found):
        assert told is not None
        assert "with and without" not in told, told
        assert value == ("1" if "is set now" in told else None)
        assert total == (rank + 1) << 20
