"""Models of transformers on packed data: one forward over all samples is the reference (user case 9)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_ranks, values
from torch import nn

import odcengine
from engine.toy import shard, worst_error

LENGTHS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
SUPERVISED = (2, 0, 3, 0, 4, 8, 1, 5, 4, 0)
GLOBAL_COUNTS = [5, 18, 4]  # tokens with a target in the minibatches of 4, 4 and 2 samples
VOCAB = 32


def samples() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for length, supervised in zip(LENGTHS, SUPERVISED, strict=True):
        tokens = torch.randint(VOCAB, (length,), generator=generator)
        labels = torch.full((length,), -100)
        labels[length - supervised :] = tokens[length - supervised :]
        made.append({"input_ids": tokens.numpy(), "labels": labels.numpy()})
    return made


def make(family: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    config: Any = {
        "llama": lambda: transformers.LlamaConfig(**shape, tie_word_embeddings=False),
        "qwen2": lambda: transformers.Qwen2Config(**shape, tie_word_embeddings=True),
    }[family]()
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def _train(rank: int, world_size: int, family: str, strategy: str, odc: dict[str, Any]) -> dict[str, Any]:
    model = make(family)
    if family == "llama":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "data": {"shuffle": False},
        "balance": {"strategy": strategy, "max_tokens_per_micro_batch": 10},
        "odc": {"timeout_s": 100, "startup_timeout_s": 120, **odc},
    }
    engine, optimizer, loader, _ = odcengine.initialize(model=model, config=config, training_data=samples())
    assert loader is not None
    gradients: list[dict[str, torch.Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append({n: shard(p.grad) for n, p in engine.module.named_parameters()})
    )
    metrics = []
    for minibatch in loader:
        for micro_batch in minibatch:
            engine.backward(engine(micro_batch))
        metrics.append(engine.step())
    engine.close()
    return {
        "gradients": gradients,
        "losses": [m.loss for m in metrics],
        "counts": [m.count for m in metrics],
        "groups": len(engine._sharding._fsdp_modules),
    }


def reference(family: str) -> dict[str, Any]:
    """Every sample by itself through plain transformers, in one process."""
    model, data = make(family), samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients, losses = [], []
    for start, count in zip((0, 4, 8), GLOBAL_COUNTS, strict=True):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for sample in data[start : start + 4]:
            tokens, labels = torch.tensor(sample["input_ids"]), torch.tensor(sample["labels"])
            logits = model(input_ids=tokens[None]).logits[0]
            total = total + F.cross_entropy(logits[:-1], labels[1:], reduction="sum", ignore_index=-100)
        (total / count).backward()
        losses.append(total.item() / count)
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    return {"gradients": gradients, "losses": losses}


@pytest.mark.parametrize(
    ("world_size", "family", "strategy", "odc"),
    [
        (1, "llama", "lb_mini", {}),
        (2, "llama", "lb_mini", {}),
        (3, "llama", "lb_mini", {}),
        (3, "qwen2", "lb_mini", {}),
        (2, "qwen2", "lb_micro", {"transport": "collective"}),
        (3, "llama", "local_sort", {"transport": "collective"}),
        (3, "qwen2", "lb_micro", {"lockstep": True}),
        (4, "qwen2", "lb_mini", {"sharding": "hybrid", "node_size": 2}),
    ],
)
def test_case_9(world_size: int, family: str, strategy: str, odc: dict[str, Any]) -> None:
    ranks = values(run_ranks(_train, world_size, family, strategy, odc))
    right = reference(family)
    assert [r["counts"] for r in ranks] == [GLOBAL_COUNTS] * world_size
    assert ranks[0]["groups"] == 3  # two blocks by the model's _no_split_modules, and the root
    gradients = [
        {name: torch.cat([s[name] for s in shards]) for name in shards[0]}
        for shards in zip(*(r["gradients"] for r in ranks), strict=True)
    ]
    # transformers' RMSNorm computes in fp32 even in a float64 model.
    assert worst_error(gradients, right["gradients"]) < 5e-6
    for result in ranks:
        assert result["losses"] == pytest.approx(right["losses"], rel=1e-6)
