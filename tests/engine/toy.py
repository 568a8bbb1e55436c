"""A small language model with every feature that sharding must survive, and its one-process reference."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import odcengine
from odcengine import OdcEngine

VOCAB, DIM = 13, 6
STEPS = 20


class Expert(nn.Module):
    """Used by some micro-batches only; wrapped as a group of its own where the case says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, 5)
        self.outer = nn.Linear(5, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))


class Adapter(nn.Module):
    """LoRA-shaped: two small matrices beside a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, 7)
        self.base.requires_grad_(False)
        self.down = nn.Linear(DIM, 2, bias=False)
        self.up = nn.Linear(2, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.7]))  # comes after the children's parameters in FSDP2
        self.norm = nn.LayerNorm(DIM)
        self.up = Adapter() if options.get("lora") else nn.Linear(DIM, 7)
        self.down = nn.Linear(7, DIM)
        if options.get("experts"):
            self.experts = nn.ModuleList([Expert(), Expert()])
        if options.get("unused"):
            self.never = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        h = self.down(F.gelu(self.up(self.norm(x))))
        if hasattr(self, "experts") and branch < 2:
            h = h + self.experts[branch](x)
        return x + self.scale * h


class TinyLM(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Block(options) for _ in range(3)])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if options.get("tied", True):
            self.head.weight = self.embed.weight
        if options.get("frozen"):
            self.blocks[0].requires_grad_(False)
            self.blocks[1].norm.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, branch: int) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            for _ in range(2 if self.options.get("twice") else 1):
                if self.options.get("checkpointing"):
                    x = checkpoint(block, x, branch, use_reentrant=False)
                else:
                    x = block(x, branch)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Case:
    """One feature: a model, what of the configuration differs, and the errors allowed."""

    name: str
    model: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    grad_tolerance: float = 1e-10
    weight_tolerance: float = 1e-10
    evaluate: bool = False
    optimizer: str = "AdamW"
    exact_steps: int = STEPS  # in bf16 the last bit of a master weight soon turns into 2**-8 of a pulled one


def make_model(case: Case) -> TinyLM:
    torch.manual_seed(1)
    return TinyLM(**case.model).to(case.dtype)


def micro_batches(case: str, step: int, world_size: int, equal: bool = False) -> list[list[tuple]]:
    """For each rank its micro-batches of a minibatch: 0 to 5, each tokens, targets and a branch."""
    chance = random.Random(f"{case}-{step}-{world_size}")
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    shares = []
    for _ in range(world_size):
        share = []
        for _ in range(2 if equal else chance.randrange(6)):
            length = chance.randrange(1, 7)
            tokens = torch.randint(VOCAB, (1, length), generator=generator)
            targets = torch.randint(VOCAB, (1, length), generator=generator)
            targets[torch.rand(1, length, generator=generator) < 0.3] = -100
            share.append((tokens, targets, chance.randrange(3)))
        shares.append(share)
    return shares


def loss_of(model: nn.Module | OdcEngine, micro_batch: tuple) -> tuple[torch.Tensor, int]:
    tokens, targets, branch = micro_batch
    device = next(iter(model.parameters())).device
    tokens, targets = tokens.to(device), targets.to(device)
    logits = model(tokens, branch)
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    loss = F.cross_entropy(logits[0].to(wide), targets[0], ignore_index=-100, reduction="sum")
    return loss, int((targets != -100).sum())


def shard(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.detach().to_local().clone().cpu()


def assemble(shards: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Whole tensors from what every rank has of them."""
    if any(s.keys() != shards[0].keys() for s in shards):
        raise AssertionError(f"ranks have gradients of different parameters: {[sorted(s) for s in shards]}")
    return {name: torch.cat([s[name] for s in shards]) for name in shards[0]}


def config_for(case: Case, **odc: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "train_batch_size": "auto",
        "gradient_clipping": 0.5,
        "optimizer": {"type": case.optimizer, "params": {"lr": 1e-2}},
        "odc": {"timeout_s": 100, "startup_timeout_s": 120, "wrap": ["Block"], **odc},
    }
    for key, value in case.config.items():
        merge = isinstance(base.get(key), dict) and isinstance(value, dict)
        base[key] = {**base[key], **value} if merge else value
    return base


def train(
    rank: int,
    world_size: int,
    case: Case,
    *,
    equal: bool = False,
    steps: int = STEPS,
    delay: Callable[[int, int], None] | None = None,
    **odc: Any,
) -> dict[str, Any]:
    """Train the case on all ranks; returns this rank's shards of gradients and weights, and its losses."""
    engine, optimizer, _, _ = odcengine.initialize(model=make_model(case), config=config_for(case, **odc))
    gradients: list[dict[str, torch.Tensor]] = []

    def keep(*_: Any) -> None:
        gradients.append(
            {n: shard(p.grad) for n, p in engine.module.named_parameters() if p.grad is not None}
        )

    optimizer.register_step_pre_hook(keep)
    losses, norms, evaluations, all_metrics = [], [], [], []
    for step in range(steps):
        for number, micro_batch in enumerate(micro_batches(case.name, step, world_size, equal)[rank]):
            if delay is not None:
                delay(step, number)
            loss, count = loss_of(engine, micro_batch)
            engine.backward(loss, count=count)
        metrics = engine.step()
        all_metrics.append(metrics)
        losses.append(metrics.loss)
        norms.append(metrics.grad_norm)
        if case.evaluate and rank != step % world_size:
            evaluations.append(evaluate(engine, step))
    weights = {name: shard(p) for name, p in engine.module.named_parameters()}
    engine.close()
    return {
        "gradients": gradients,
        "weights": weights,
        "losses": losses,
        "norms": norms,
        "evaluations": evaluations,
        "metrics": all_metrics,
        "host": socket.gethostname(),
    }


def evaluate(engine: OdcEngine, step: int) -> tuple[int, torch.Tensor]:
    """A forward between minibatches, on some ranks only."""
    engine.eval()
    with torch.no_grad():
        device = next(engine.parameters()).device
        logits = engine(torch.arange(VOCAB, device=device)[None], 0)
    engine.train()
    return step, logits.clone().cpu()


def reference(
    case: Case, world_size: int, *, equal: bool = False, steps: int = STEPS, device: str = "cpu"
) -> dict[str, Any]:
    """The same minibatches on one process with plain torch; its tensors come back to the CPU."""
    torch.set_num_threads(1)  # as the ranks: with more, bf16 kernels round their partial sums elsewhere
    master = make_model(case).to(device)
    low = case.config.get("bf16", {}).get("enabled", False)
    trained = [p for p in master.parameters() if p.requires_grad]
    kind = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[case.optimizer]
    optimizer = kind(trained, lr=1e-2, weight_decay=0.0)
    gradients, losses, norms, evaluations = [], [], [], []
    for step in range(steps):
        optimizer.zero_grad()
        total, count = 0.0, 0
        for share in micro_batches(case.name, step, world_size, equal):
            for micro_batch in share:
                model = make_model(case).to(device, torch.bfloat16) if low else master
                if low:
                    model.load_state_dict(master.state_dict())  # casts
                loss, targets = loss_of(model, micro_batch)
                loss.backward()
                if low:
                    _add_gradients(model, master)
                total, count = total + loss.item(), count + targets
        losses.append(total / count if count else float("nan"))
        if count:
            for p in trained:
                if p.grad is not None:
                    p.grad /= count
            norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
            norms.append(float(norm))
            torch.nn.utils.clip_grad_norm_(trained, 0.5)
            named = [(n, p.grad) for n, p in master.named_parameters() if p.grad is not None]
            gradients.append({name: grad.clone().cpu() for name, grad in named})
            optimizer.step()
        if case.evaluate:
            with torch.no_grad():
                evaluations.append(master(torch.arange(VOCAB, device=device)[None], 0).cpu())
    weights = {name: p.detach().cpu() for name, p in master.named_parameters()}
    return {
        "gradients": gradients,
        "weights": weights,
        "losses": losses,
        "norms": norms,
        "evaluations": evaluations,
    }


def _add_gradients(source: nn.Module, target: nn.Module) -> None:
    for p, q in zip(source.parameters(), target.parameters(), strict=True):
        if p.grad is not None:
            q.grad = p.grad.to(q.dtype) if q.grad is None else q.grad + p.grad


def worst_error(found: list[dict[str, torch.Tensor]], right: list[dict[str, torch.Tensor]]) -> float:
    """max over parameters of max|a - b| / max|b|, both over all minibatches; infinite if names differ.

    The scale is taken over the run: a parameter of one element may have a gradient that all but cancels in
    some minibatch, where rounding is of the size of what was summed, not of the sum.
    """
    if len(found) != len(right) or any(a.keys() != b.keys() for a, b in zip(found, right, strict=True)):
        return float("inf")
    differences: dict[str, float] = {}
    scales: dict[str, float] = {}
    for a, b in zip(found, right, strict=True):
        for name, value in b.items():
            difference = float((a[name].double() - value.double()).abs().max())
            differences[name] = max(differences.get(name, 0.0), difference)
            scales[name] = max(scales.get(name, 1e-30), float(value.abs().max()))
    return max(differences[name] / scales[name] for name in differences)


def compare(case: Case, ranks: list[dict[str, Any]], right: dict[str, Any]) -> dict[str, float]:
    """Errors of a run, given by what each rank returned, against its reference."""
    gradients = [assemble(list(shards)) for shards in zip(*(r["gradients"] for r in ranks), strict=True)]
    losses = [(a, b) for r in ranks for a, b in zip(r["losses"], right["losses"], strict=True) if b == b]
    logits = [(a, right["evaluations"][step]) for r in ranks for step, a in r["evaluations"]]
    return {
        "gradient": worst_error(gradients[: case.exact_steps], right["gradients"][: case.exact_steps]),
        "weights": worst_error([assemble([r["weights"] for r in ranks])], [right["weights"]]),
        "loss": max(abs(a - b) / abs(b) for a, b in losses),
        "evaluation": max((float((a - b).abs().max()) for a, b in logits), default=0.0),
    }
