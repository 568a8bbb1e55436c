"""``odc.backend: deepspeed`` trains as fsdp2 does, with the same configuration, script and data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, values

from odcengine.config import load_config
from odcengine.data import TokenDataset, pack_samples
from odcengine.errors import ConfigError
from odcengine.losses import GrpoLoss
from odcengine.models import find_vocabulary

pytest.importorskip("deepspeed")

ENV = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def config(backend: str, data: str) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "scheduler": {"type": "LinearLR", "params": {"start_factor": 0.5, "total_iters": 3}},
        "balance": {"strategy": "lb_mini", "max_tokens_per_micro_batch": 64, "learn_costs": False},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 40},
        "model": {"config": MODEL},
        "data": {"path": data},
        "monitor": {"jsonl": f"{data}-{backend}.jsonl"},
        "odc": {"backend": backend, "timeout_s": 30, "startup_timeout_s": 60},
    }


def _train(rank: int, world_size: int, backend: str, data: str) -> dict[str, Any]:
    """Four steps, one with nothing to learn, and for DeepSpeed a checkpoint."""
    import odcengine
    from odcengine.errors import UsageError

    engine, _, loader, _ = odcengine.initialize(config=config(backend, data))
    zero3 = backend == "deepspeed"
    found, counts = [], []
    assert find_vocabulary(engine.module) == MODEL["vocab_size"]  # however it is sharded
    with engine:
        for minibatch in loader:
            number = 0
            for micro_batch in minibatch:
                engine.backward(engine(micro_batch))
                number += 1
            metrics = engine.step()
            assert metrics.applied
            found.append((metrics.loss, metrics.grad_norm, metrics.lr, metrics.count, metrics.num_samples))
            counts.append(number)
            if zero3 and engine.global_steps == 2:
                engine.save_checkpoint(f"{data}-saved")
            if engine.global_steps == 4:
                break
        found.append(_policy_step(engine, rank))
        nothing = engine.step()  # skipped on all ranks
        assert not nothing.applied
        assert math.isnan(nothing.loss)
        assert nothing.crossed_bytes == 0
        if zero3:
            assert engine.load_checkpoint(f"{data}-saved")[0] is not None
            assert engine.global_steps == 2
    with pytest.raises(UsageError, match="closed"):
        engine(torch.arange(4)[None])
    return {"found": found, "counts": counts}


def _policy_step(engine: Any, rank: int) -> tuple[float, ...]:
    """A step of GRPO, whose backward computes the logits again; one answer on rank 0, two on rank 1."""
    loss = GrpoLoss(normalize_by="sequence", kl_coef=0.1, entropy_coef=0.01)
    answers = [{"input_ids": [3, 4, 5 + number, 6], "advantages": number - 1.5} for number in range(3)]
    for answer in answers[:1] if rank == 0 else answers[1:]:
        batch = pack_samples([answer])
        with torch.no_grad():
            (ref,) = batch.unpack(engine(batch, loss_fn=loss.logprobs).logprobs)
        batch = pack_samples([{**answer, "ref_logprobs": ref + 0.3}], fields=["advantages", "ref_logprobs"])
        engine.backward(engine(batch, loss_fn=loss))
    metrics = engine.step()
    assert metrics.count == 3
    assert engine.sum_over_ranks({"ranks": 1.0}) == {"ranks": 2.0}
    return metrics.loss, metrics.grad_norm


def _both(rank: int, world_size: int, data: str) -> list[dict[str, Any]]:
    """One after the other in the same processes."""
    return [_train(rank, world_size, backend, data) for backend in ("fsdp2", "deepspeed")]


def test_same_as_fsdp2(tmp_path: Path) -> None:
    data = tmp_path / "data"
    lengths = [3, 40, 9, 5, 64, 7, 3, 12, 30, 4, 4, 21, 50, 6, 8, 3] * 3
    TokenDataset.write(data, [{"input_ids": [1 + (n * 7 + k) % 31 for k in range(n)]} for n in lengths])
    both = values(run_ranks(_both, 2, str(data), env=ENV, timeout_s=200))
    right, ranks = zip(*both, strict=True)
    assert len(right[0]["found"]) == 5
    for rank, expected in zip(ranks, right, strict=True):
        assert rank["counts"] == expected["counts"]
        for mine, theirs in zip(rank["found"], expected["found"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)
    assert len(Path(f"{data}-deepspeed.jsonl").read_text().splitlines()) == 6
    assert (Path(f"{data}-saved") / "latest").read_text() == "global_step2"


def test_keys_of_deepspeed_are_passed_on() -> None:
    from odcengine.deepspeed.build import deepspeed_config

    settings = load_config(
        {
            "train_batch_size": 8,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "stage3_max_live_parameters": 1e6,
                "reduce_bucket_size": "auto",
            },
            "wall_clock_breakdown": False,
            "odc": {"backend": "deepspeed"},
            "deepspeed": {"zero_optimization": {"sub_group_size": 10}},
        }
    )
    made = deepspeed_config(settings)
    assert made["zero_optimization"] == {"stage": 3, "stage3_max_live_parameters": 1e6, "sub_group_size": 10}
    assert made["wall_clock_breakdown"] is False
    assert made["bf16"] == {"enabled": True}
    assert load_config(settings.resolved()).resolved() == settings.resolved()
    assert any("auto -> DeepSpeed's default" in notice for notice in settings.notices)


def test_one_rank_and_refused_keys() -> None:
    import odcengine

    base = {"train_batch_size": 8, "odc": {"backend": "deepspeed"}}
    with pytest.raises(ConfigError, match="two ranks or more"):
        odcengine.initialize(config=base)
    offload = {"stage": 3, "offload_param": {"device": "cpu"}}
    with pytest.raises(ConfigError, match="offload is not supported"):
        odcengine.initialize(config={**base, "zero_optimization": offload})
