"""Mixtures of experts whose micro-batches pull only the experts that their tokens chose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_ranks, values
from engine.toy import assemble, shard, worst_error
from torch import nn

import odcengine
from odcengine.models import load_model
from odcengine.sharding.layout import PlainMemory

pytest.importorskip("transformers")

VOCAB, EXPERTS = 64, 8
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 12},
    "mixtral": {"num_local_experts": 5},
    "gpt_oss": {"num_local_experts": 3},
    "qwen2_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 8},
}
STEPS = 2
LENGTHS = ((3, 1, 2), (4,))  # tokens of the micro-batches of each rank


def make(kind: str, implementation: str) -> Any:
    """float64, but for the grouped products, which torch has for at most float32."""
    dtype = "float32" if implementation == "grouped_mm" else "float64"
    model: Any = load_model({**SHAPE, **MIXTURES[kind], "model_type": kind}, dtype=dtype)
    model.set_experts_implementation(implementation)
    return model


def tokens(step: int, rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + number)
    return torch.randint(VOCAB, (1, LENGTHS[rank][number]), generator=generator)


def loss_of(model: Any, row: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=row, use_cache=False).logits[0]
    return F.cross_entropy(logits, row[0].roll(1), reduction="sum")


def poisoned(self: Any, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that spoils everything if what was not pulled is read."""
    memory = torch.empty(*size, dtype=dtype, device=device)
    return memory.fill_(0xFF) if dtype == torch.uint8 else memory.fill_(float("nan"))


def _train(rank: int, world_size: int, cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    PlainMemory.allocate = poisoned  # type: ignore[method-assign]
    return [_train_case(rank, *case) for case in cases]


def _train_case(rank: int, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    model = make(kind, options.get("implementation", "eager"))
    if options.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.get("frozen"):
        for module in model.modules():
            if hasattr(module, "is_transposed"):
                module.down_proj.requires_grad_(False)
    config = {
        "train_batch_size": "auto",
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "odc": {"timeout_s": 30, "startup_timeout_s": 30, "experts": "chosen", **options.get("odc", {})},
    }
    engine, optimizer, _, _ = odcengine.initialize(model=model, config=config)
    gradients: list[dict[str, torch.Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(
            {n: shard(p.grad) for n, p in engine.module.named_parameters() if p.grad is not None}
        )
    )
    traffic, losses = [], []
    for step in range(STEPS):
        before = (engine.transport.traffic.pulled_bytes, engine.transport.traffic.pushed_bytes)
        rows = [tokens(step, rank, number) for number in range(len(LENGTHS[rank]))]
        if options.get("evaluate"):
            with torch.no_grad():
                engine(input_ids=rows[0], use_cache=False)
        if options.get("order") == "stack":  # backwards in the reverse order of the forwards
            made = [loss_of(engine, row) for row in rows]
            for loss, row in reversed(list(zip(made, rows, strict=True))):
                engine.backward(loss, count=row.numel())
        elif options.get("order") == "queue":
            made = [loss_of(engine, row) for row in rows]
            for loss, row in zip(made, rows, strict=True):
                engine.backward(loss, count=row.numel())
        elif options.get("order") == "together":
            made = [loss_of(engine, row) for row in rows]
            engine.backward(sum(made, torch.zeros(())), count=sum(row.numel() for row in rows))
        else:
            for row in rows:
                engine.backward(loss_of(engine, row), count=row.numel())
        losses.append(engine.step().loss)
        after = engine.transport.traffic
        traffic.append((after.pulled_bytes - before[0], after.pushed_bytes - before[1]))
    weights = {name: shard(p) for name, p in engine.module.named_parameters()}
    engine.close()
    return {"gradients": gradients, "weights": weights, "losses": losses, "traffic": traffic}


def reference(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    model: nn.Module = make(kind, "eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    for step in range(STEPS):
        optimizer.zero_grad()
        count = sum(map(sum, LENGTHS))
        for rank, lengths in enumerate(LENGTHS):
            for number in range(len(lengths)):
                (loss_of(model, tokens(step, rank, number)) / count).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return {"gradients": gradients, "weights": {n: p.detach() for n, p in model.named_parameters()}}


CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"odc": {"experts": "all"}}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"implementation": "grouped_mm"}),
    ("qwen3_moe", {"checkpointing": True}),
    ("qwen3_moe", {"order": "stack", "evaluate": True}),
    ("qwen3_moe", {"order": "queue", "implementation": "batched_mm"}),
    ("qwen3_moe", {"order": "together", "odc": {"reshard_after_forward": False}}),
    ("mixtral", {"order": "together"}),
    ("qwen2_moe", {"checkpointing": True}),
    ("gpt_oss", {}),
]


def test_gradients_are_those_of_one_process() -> None:
    ranks = values(run_ranks(_train, 2, CASES))
    for number, (kind, options) in enumerate(CASES):
        results = [rank[number] for rank in ranks]
        right = reference(kind, options)
        found = [assemble(list(shards)) for shards in zip(*(r["gradients"] for r in results), strict=True)]
        error = worst_error(found, right["gradients"])
        weights = worst_error([assemble([r["weights"] for r in results])], [right["weights"]])
        print(kind, options, error, weights, [r["traffic"] for r in results])
