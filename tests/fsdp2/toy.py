"""A trainer of somebody else's: FSDP2, its own loop, clipping, a step that is skipped where it must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from distributed import init_process_group
from engine.toy import Case, TinyLM, assemble, loss_of, make_model, micro_batches, shard
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

LR, CLIP = 0.2, 0.05


def device_type() -> str:
    """Ranks of CPU tests see no GPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def meet(rank: int, world_size: int) -> None:
    """The process group, which a trainer makes itself."""
    if not dist.is_initialized():
        init_process_group()


def sharded(case: Case, mesh: DeviceMesh | None = None, **options: Any) -> TinyLM:
    model = make_model(case).to(device_type())
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),)) if mesh is None else mesh
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)


def train(
    model: TinyLM,
    optimizer: torch.optim.Optimizer,
    case: Case,
    rank: int,
    *,
    equal: bool,
    first: int = 0,
    steps: int = 3,
    collect: Callable[[], None] | None = None,
    hold_back: bool = False,
) -> dict[str, Any]:
    """Losses are sums; gradients are FSDP2's mean over ranks of the sums."""
    gradients, norms = [], []
    for step in range(first, first + steps):
        share = micro_batches(case.name, step, dist.get_world_size(), equal)[rank]
        for number, micro_batch in enumerate(share):
            if hold_back:
                model.set_requires_gradient_sync(number == len(share) - 1)
            loss_of(model, micro_batch)[0].backward()
        if collect is not None:
            collect()
        named = {name: p for name, p in model.named_parameters() if p.grad is not None}
        gradients.append({name: shard(p.grad) for name, p in named.items()})
        norm = nn.utils.clip_grad_norm_(named.values(), CLIP)
        norms.append(float(norm.full_tensor()))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: shard(p) for name, p in model.named_parameters()}
    return {"gradients": gradients, "norms": norms, "weights": weights}


def reference(case: Case, world_size: int, *, steps: int = 3, scale: float | None = None) -> dict[str, Any]:
    """The same minibatches on one process."""
    model = make_model(case)
    optimizer = make_optimizer(model)
    gradients, norms = [], []
    for step in range(steps):
        for share in micro_batches(case.name, step, world_size):
            for micro_batch in share:
                loss_of(model, micro_batch)[0].backward()
        named = {name: p for name, p in model.named_parameters() if p.grad is not None}
        for parameter in named.values():
            assert parameter.grad is not None
            parameter.grad *= 1 / world_size if scale is None else scale
        gradients.append({name: p.grad.clone() for name, p in named.items()})  # type: ignore[union-attr]
        norms.append(float(nn.utils.clip_grad_norm_(list(named.values()), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"gradients": gradients, "norms": norms, "weights": weights}


def error_between(ranks: list[dict[str, Any]], right: dict[str, Any]) -> float:
    """Largest relative difference of gradients, norms and weights; inf where others have gradients."""
    worst = 0.0
    pairs = [([r["gradients"][n] for r in ranks], expected) for n, expected in enumerate(right["gradients"])]
    pairs.append(([r["weights"] for r in ranks], right["weights"]))
    for shards, expected in pairs:
        whole = assemble(shards)
        if whole.keys() != expected.keys():
            return float("inf")
        scale = max(float(value.abs().max()) for value in expected.values())
        for name, value in expected.items():
            worst = max(worst, float((whole[name] - value).abs().max()) / scale)
    for rank in ranks:
        for norm, expected_norm in zip(rank["norms"], right["norms"], strict=True):
            worst = max(worst, abs(norm - expected_norm) / expected_norm)
    return worst


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
