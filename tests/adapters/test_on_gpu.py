"""Adapters on two GPUs, against the same minibatches in one process on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, values

from odcengine.models import load_model

from .test_lora import CASES, MODEL, reference, train

pytestmark = pytest.mark.multi_gpu


def _on_gpus(rank: int, world_size: int, base: str) -> dict[str, Any]:
    found = {}
    for name, section in CASES.items():
        engine, found[name] = train(rank, {"path": base, "dtype": "float64", **section})
        engine.close()
    engine, found["bf16"] = train(rank, {"path": base, **CASES["lora"]}, bf16={"enabled": True})
    engine.close()
    return found


def test_gradients_and_memory(tmp_path: Path) -> None:
    load_model(MODEL, dtype="bfloat16", random_seed=5).save_pretrained(tmp_path / "base")  # type: ignore[operator]
    ranks = values(run_ranks(_on_gpus, 2, str(tmp_path / "base"), gpus=True, timeout_s=200))
    for name, section in CASES.items():
        for step, expected in enumerate(reference(tmp_path, section)):
            shards = [rank[name]["gradients"][step] for rank in ranks]
            scale = max(float(value.abs().max()) for value in expected.values())
            for key, value in expected.items():
                found = torch.cat([shard[key].cpu() for shard in shards])
                # Norms are computed in float32, and a GPU rounds them otherwise.
                assert float((found - value).abs().max()) <= 1e-4 * scale, key
        assert all(rank[name]["accumulators"] == 8 * rank[name]["padded"] for rank in ranks)
    assert all(rank["bf16"]["accumulators"] == 4 * rank["bf16"]["padded"] for rank in ranks)
