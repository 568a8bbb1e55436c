"""A run that goes on from a checkpoint is the run that was never interrupted, on any number of ranks."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, values

from checkpoint.toy import HYBRID, train

BEFORE, AFTER = 7, 20  # a data set has 9 minibatches: several epochs are crossed
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "2": (2, {}),
    "3": (3, {}),
    "6": (6, {}),
    "2x2": (4, HYBRID),
    "collective": (2, {"transport": "collective"}),
}
SAMPLE = ("1", "3", "2x2")  # in the default run; all of them in the soak


@functools.cache
def _saved() -> tuple[Path, dict[str, Any]]:
    """A checkpoint of 4 ranks, and how their run went on."""
    folder = tempfile.mkdtemp(prefix="odc-test-")
    runs = values(
        run_ranks(functools.partial(train, before=BEFORE, save=True, after=AFTER), 4, folder, timeout_s=90)
    )
    return Path(folder), runs[0]


def _difference(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert found.keys() == right.keys()
    return max(float((found[name] - right[name]).abs().max()) for name in right)


@pytest.mark.parametrize(
    "layout", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.soak) for name in LAYOUTS]
)
def test_goes_on_like_the_uninterrupted_run(layout: str) -> None:
    world_size, odc = LAYOUTS[layout]
    folder, right = _saved()
    runs = values(
        run_ranks(functools.partial(train, after=AFTER, odc=odc), world_size, str(folder), timeout_s=90)
    )
    for run in runs:
        assert run["begun_at"] == BEFORE
        assert run["client_state"] == {"note": "seen", "where": (1, 2)}
        assert _difference(run["at_save"], right["at_save"]) == 0.0
        assert run["samples"] == right["samples"]
        assert run["steps"] == right["steps"]
        assert run["lrs"] == right["lrs"]
        assert run["losses"] == pytest.approx(right["losses"], rel=1e-10)
        assert run["norms"] == pytest.approx(right["norms"], rel=1e-9)
        assert _difference(run["weights"], right["weights"]) <= 1e-10
        assert run["tied"]
        assert {name: value.shape for name, value in run["buffers"].items()} == {
            name: value.shape for name, value in right["buffers"].items()
        }
        assert float(run["buffers"]["blocks.2.calls"]) == 2.5
