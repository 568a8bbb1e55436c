"""Saving from GPUs, through pinned memory, and resuming on other numbers of them and on CPUs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, values

from checkpoint.test_saving import _automatic, _load_best
from checkpoint.toy import train

pytestmark = pytest.mark.multi_gpu

BEFORE, AFTER = 7, 20


@pytest.mark.parametrize("gpus", [1, 2, 0], ids=["1 GPU", "2 GPUs", "3 CPU ranks"])
def test_goes_on_like_the_uninterrupted_run(gpus: int, tmp_path: Path) -> None:
    run = functools.partial(train, before=BEFORE, save=True, after=AFTER)
    right = values(run_ranks(run, 2, str(tmp_path), timeout_s=120, gpus=True))[0]
    found: list[dict[str, Any]] = values(
        run_ranks(
            functools.partial(train, after=AFTER),
            gpus or 3,
            str(tmp_path),
            timeout_s=120,
            gpus=gpus > 0,
        )
    )
    for name, tensor in right["at_save"].items():
        assert torch.equal(found[0]["at_save"][name], tensor), name
    assert found[0]["samples"] == right["samples"]
    assert found[0]["losses"] == pytest.approx(right["losses"], rel=1e-9)
    worst = max(float((found[0]["weights"][n] - t).abs().max()) for n, t in right["weights"].items())
    assert worst <= 1e-9


def test_what_is_saved_is_the_moment_of_the_save(tmp_path: Path) -> None:
    ran = values(run_ranks(_automatic, 2, str(tmp_path), timeout_s=120, gpus=True))
    for loaded in values(run_ranks(_load_best, 2, str(tmp_path), timeout_s=120, gpus=True)):
        for name, value in ran[0]["best"].items():
            assert torch.equal(loaded["best"][name], value), name
