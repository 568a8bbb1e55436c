"""A small model, its data, and runs that save, resume and tell what became of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import odcengine
from odcengine.data import MicroBatch

VOCAB, DIM, SAMPLES = 17, 6, 70
HYBRID = {"sharding": "hybrid", "node_size": 2}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.7]))
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 7)
        self.down = nn.Linear(7, DIM)
        self.register_buffer("calls", torch.tensor(0.0))  # no dimension
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Toy(nn.Module):
    """Tied embeddings, a frozen layer, a parameter that is smaller than the number of ranks."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.blocks[1].up.requires_grad_(False)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> Toy:
    torch.manual_seed(3)
    model = Toy(dropout).to(dtype)
    for number, block in enumerate(model.blocks):
        block.calls.fill_(number + 0.5)
    return model


def make_data() -> list[dict[str, list[int]]]:
    chance = random.Random(5)
    return [
        {"input_ids": [chance.randrange(VOCAB) for _ in range(chance.randrange(2, 12))]}
        for _ in range(SAMPLES)
    ]


def loss_sum(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    logits = model(batch.input_ids)
    return F.cross_entropy(logits[0], batch.labels[0], ignore_index=-100, reduction="sum")


def config_for(
    folder: Path | str | None = None, *, odc: dict[str, Any] | None = None, **checkpoint: Any
) -> Any:
    section = {**({} if folder is None else {"dir": str(folder)}), **checkpoint}
    return {
        "train_batch_size": 8,
        "gradient_clipping": 0.5,
        "seed": 4,
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5, "total_num_steps": 60}},
        "balance": {"max_tokens_per_micro_batch": 16},
        "odc": {"timeout_s": 100, "startup_timeout_s": 120, "wrap": ["Block"], **(odc or {})},
        "checkpoint": section,
    }


def start(
    config: Any, dtype: torch.dtype = torch.float64, dropout: float = 0.0
) -> tuple[odcengine.OdcEngine, Any]:
    engine, _, loader, _ = odcengine.initialize(
        model=make_model(dtype, dropout), config=config, training_data=make_data(), loss_fn=loss_sum
    )
    return engine, loader


def steps(engine: odcengine.OdcEngine, loader: Any, count: int) -> dict[str, Any]:
    """Train; returns losses, norms, learning rates and the samples of each step, over all ranks."""
    record: dict[str, Any] = {"losses": [], "norms": [], "lrs": [], "samples": [], "steps": []}
    done = 0
    while done < count:
        for minibatch in loader:
            for micro_batch in minibatch:
                engine.backward(engine(micro_batch))
            metrics = engine.step()
            record["losses"].append(metrics.loss)
            record["norms"].append(metrics.grad_norm)
            record["lrs"].append(metrics.lr)
            record["steps"].append(metrics.step)
            record["samples"].append((minibatch.epoch, sorted(minibatch.sample_ids)))
            done += 1
            if done == count:
                break
    return record


def whole(engine: odcengine.OdcEngine) -> dict[str, torch.Tensor]:
    """Weights and optimizer state, put together from all ranks."""

    def full(tensor: Any) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach().cpu().clone()
        # Through the host: torch's functional collectives crash with gloo on GPUs (ranks that share one).
        shards: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shards, tensor.detach().to_local().cpu())
        return torch.cat(shards)

    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    found = {name: full(parameter) for name, parameter in engine.module.named_parameters()}
    for parameter, state in engine.optimizer.state.items():
        for key, value in state.items():
            found[f"{names[id(parameter)]}/{key}"] = full(value)
    return found


def train(
    rank: int,
    world_size: int,
    folder: str | None,
    *,
    before: int = 0,
    save: bool = False,
    after: int = 0,
    odc: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    dropout: float = 0.0,
    **checkpoint: Any,
) -> dict[str, Any]:
    """Train, save, train on; what happened after the save (or from the start) comes back."""
    engine, loader = start(config_for(folder, odc=odc, **checkpoint), dtype, dropout)
    begun_at = engine.global_steps
    if before:
        steps(engine, loader, before)
    if save:
        engine.save_checkpoint(client_state={"note": "seen", "where": (1, 2)})
    at_save = whole(engine)
    record = steps(engine, loader, after)
    record.update(
        begun_at=begun_at,
        client_state=engine.client_state,
        at_save=at_save,
        weights=whole(engine),
        buffers={name: buffer.cpu().clone() for name, buffer in engine.module.named_buffers()},
        tied=engine.module.head.weight is engine.module.embed.weight,
    )
    engine.close()
    return record
