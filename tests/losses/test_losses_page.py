"""docs/losses.md: its code runs, and its tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from distributed import run_ranks, values

from odcengine.data import pack_samples
from odcengine.losses import DPO_METRICS, GRPO_METRICS, TokenLogprobs
from odcengine.losses.kl import KL_ESTIMATORS, KlEstimator
from odcengine.losses.normalize import NORMALIZATIONS, Normalization

pytest.importorskip("transformers")

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "losses.md").read_text()


def _run(rank: int, world_size: int) -> list[Any]:
    namespace: dict[str, Any] = {}
    for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(text, "docs/losses.md", "exec"), namespace)
    batch = pack_samples([{"input_ids": [1, 2, 3], "advantages": 2.0}], fields=["advantages"])
    found = TokenLogprobs(torch.tensor([[-1.0, -0.5, 0.0]]))
    namespace["causal_lm_logprobs"] = lambda model, micro_batch: found
    own = namespace["reinforce"](None, batch)
    return [namespace["sums"], float(namespace["result"].metrics["pairs"]), float(own.loss_sum), own.count]


def test_code() -> None:
    """On one rank of its own, for the page makes an engine."""
    [[sums, pairs, own, count]] = values(run_ranks(_run, 1, timeout_s=300))
    assert sums["tokens"] == 5
    assert 0 < sums["entropy"] / sums["tokens"] < 3.5  # log of the vocabulary is 3.47
    assert sums["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert (pairs, own, count) == (1, 3.0, 2)


def test_names() -> None:
    for name in (*NORMALIZATIONS, *GRPO_METRICS, *DPO_METRICS):
        assert f"`{name}`" in PAGE, name
    for name in KL_ESTIMATORS:
        assert f"`{name} = " in PAGE
    assert get_args(Normalization) == NORMALIZATIONS
    assert get_args(KlEstimator) == KL_ESTIMATORS
