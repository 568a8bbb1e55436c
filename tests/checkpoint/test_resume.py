"""A run that goes on from a checkpoint is the run that was never interrupted, on any number of ranks."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, values

from checkpoint.test_saving import _Log
from checkpoint.toy import HYBRID, config_for, start, steps, train
from odcengine.checkpoint.part import Publication
from odcengine.errors import CheckpointError

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
        run_ranks(functools.partial(train, before=BEFORE, save=True, after=AFTER), 4, folder, timeout_s=200)
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
        run_ranks(functools.partial(train, after=AFTER, odc=odc), world_size, str(folder), timeout_s=200)
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


def _changed(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """A refused start, one with another learning rate, and a signal while the last save is written."""
    log = _Log()
    before = signal.getsignal(signal.SIGTERM)
    refused = config_for(folder) | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with pytest.raises(CheckpointError, match="has the state of AdamW, here the optimizer is SGD"):
        start(refused)
    given_back = signal.getsignal(signal.SIGTERM) == before
    lower = config_for(folder) | {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}
    }
    engine, loader = start(lower)
    steps(engine, loader, 1)
    publish = Publication.publish

    def slow(self: Publication, check: Any, task: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        publish(self, check, task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Publication, "publish", slow)
        engine.save_checkpoint(tag="last", wait=False)
        engine.close()
    return {
        "given_back": given_back and signal.getsignal(signal.SIGTERM) == before,
        "lines": log.lines,
        "last": (Path(folder) / "last").is_dir(),
    }


def test_what_was_changed_is_told_and_signals_are_given_back_in_time(tmp_path: Path) -> None:
    values(run_ranks(functools.partial(train, before=1, save=True), 1, str(tmp_path)))
    runs = values(run_ranks(_changed, 2, str(tmp_path)))
    assert "initial_lr 0.01 (not 0.001)" in " ".join(runs[0]["lines"])
    for run in runs:
        assert run["given_back"]
        assert run["last"]
        assert not [line for line in run["lines"] if "handlers stay" in line]
