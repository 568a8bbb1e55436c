"""Rollouts on GPUs: balanced, drawn, annotated with a reference model, and sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_ranks, values

import odcengine
from odcengine import OdcEngine
from odcengine.data import MicroBatch
from odcengine.losses import GrpoLoss
from rollouts.policy import EPS, KL, make_policy, make_rollouts, share_out

pytestmark = pytest.mark.multi_gpu

LOSS = GrpoLoss(eps_low=EPS, eps_high=EPS, kl_coef=KL)
METHODS = {
    "lb_mini": ("lb_mini", {}),
    "dynamic": ("dynamic", {}),
    "collective": ("lb_micro", {"transport": "collective"}),
}


def _logprobs(engine: OdcEngine, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
    assert engine.reference is not None
    assert micro_batch.input_ids.is_cuda
    return {"ref_logprobs": LOSS.logprobs(engine.reference, micro_batch).logprobs}


def _learn(rank: int, world_size: int, method: str) -> tuple[list[float], list[list[list[int]]]]:
    strategy, odc = METHODS[method]
    config: dict[str, Any] = {
        "train_batch_size": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "odc": {"timeout_s": 60, "startup_timeout_s": 120, **odc},
        "balance": {"strategy": strategy, "max_tokens_per_micro_batch": 48},
    }
    engine = odcengine.initialize(
        model=make_policy(1).float(), reference=make_policy(2).float(), config=config
    )[0]
    losses, sampled = [], []
    with engine:
        for step in range(3):
            mine = share_out(step, make_rollouts(step, 14), world_size)[rank]
            for micro_batch in engine.balance(engine.annotate(mine, lambda batch: _logprobs(engine, batch))):
                engine.backward(engine(micro_batch, loss_fn=LOSS))
            losses.append(engine.step().loss)
        prompts = torch.tensor([[0, 0, 3], [4, 5, 6]], device="cuda")
        for whole in (True, False) if not odc else (True, True):
            with engine.generating(whole=whole) as model:
                found = model.generate(
                    input_ids=prompts,
                    attention_mask=(prompts > 0).long(),
                    max_new_tokens=3 + 4 * rank,
                    do_sample=False,
                )
            sampled.append(found.tolist())
    return losses, sampled


def _all(rank: int, world_size: int) -> dict[str, Any]:
    return {method: _learn(rank, world_size, method) for method in METHODS}


def test_methods_agree_on_gpus() -> None:
    found = values(run_ranks(_all, 2, timeout_s=200, gpus=True))
    right = found[0]["collective"][0]
    for of_rank in found:
        for losses, (whole, pulled) in of_rank.values():
            assert losses == pytest.approx(right, rel=1e-4)
            assert whole == pulled
