"""Training the engine tests' small model with DeepSpeed ZeRO-3, attached or stock, and in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from engine.toy import TinyLM, micro_batches
from torch import nn
from torch.utils.checkpoint import checkpoint

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")
STEPS = 5


@dataclass(frozen=True)
class Case:
    """One feature: a model, what of DeepSpeed's configuration differs, and the error allowed."""

    name: str
    model: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    odc: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "SGD"
    lr: float = 0.1
    tolerance: float = 1e-6
    managed: bool = False  # boundaries set by hand, as Accelerate does
    zero_init: bool = False
    low: torch.dtype | None = None
    clip: float = 0.0
    large: int | None = None  # elements of a shard from which a parameter is moved by itself


class Reentrant(TinyLM):
    """With the older kind of checkpointing."""

    def forward(self, tokens: torch.Tensor, branch: int) -> torch.Tensor:
        x = self.embed(tokens)
        x.requires_grad_(True) if not x.requires_grad else None
        for block in self.blocks:
            x = checkpoint(block, x, branch, use_reentrant=True)
        return self.head(self.norm(x))


def make_model(case: Case) -> nn.Module:
    torch.manual_seed(1)
    options = dict(case.model)
    kind = Reentrant if options.pop("reentrant", False) else TinyLM
    return kind(**options)


def make_optimizer(case: Case, parameters: Any) -> torch.optim.Optimizer:
    if case.optimizer == "SGD":
        return torch.optim.SGD(parameters, lr=case.lr)
    return torch.optim.AdamW(parameters, lr=case.lr, weight_decay=0.01)


def config_of(case: Case) -> dict[str, Any]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 20, "reduce_bucket_size": 1000}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": case.managed,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": case.clip,
        "steps_per_print": 10**9,
    }
    if case.low == torch.bfloat16:
        config["bf16"] = {"enabled": True}
    for key, value in case.config.items():
        if key == "zero_optimization":
            zero = {**zero, **value}
        else:
            config[key] = value
    return {**config, "zero_optimization": zero}


def make_engine(case: Case) -> Any:
    """A stock engine."""
    import deepspeed

    deepspeed.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for a minute
    if case.zero_init:
        with deepspeed.zero.Init(config_dict_or_path=config_of(case)):
            model = make_model(case)
        start = make_model(case).state_dict()  # what a GPU drew would be others
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(start[name])
    else:
        model = make_model(case)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=make_optimizer(case, trained), config=config_of(case)
    )
    return engine


def loss_of(model: Any, micro_batch: tuple) -> torch.Tensor:
    tokens, targets, branch = micro_batch
    device = next(model.parameters()).device
    tokens, targets = tokens.to(device), targets.to(device)
    logits = model(tokens, branch)
    return F.cross_entropy(logits[0].float(), targets[0], ignore_index=-100, reduction="sum")


def num_targets(shares: list[list[tuple]]) -> int:
    return max(sum(int((targets != -100).sum()) for share in shares for _, targets, _ in share), 1)


def boundary_of(engine: Any) -> None:
    """End a minibatch on any engine."""
    import odcengine

    odcengine.boundary(engine)


def whole_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Every rank's copy of all weights, by DeepSpeed's own gathering."""
    import deepspeed

    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().float().cpu().clone()
    return found


def train_engine(
    engine: Any,
    rank: int,
    world_size: int,
    case: Case,
    *,
    equal: bool = False,
    first: int = 0,
    steps: int = STEPS,
    before: Callable[[int, int], None] | None = None,
    scale: float | None = None,
) -> list[float]:
    """Train; returns the gradient norms."""
    import odcengine

    norms = []
    if scale is None:
        scale = 1.0 if case.odc.get("grad_reduce") == "sum" else float(world_size)
    for step in range(first, first + steps):
        shares = micro_batches(case.name, step, world_size, equal)
        factor = scale / num_targets(shares)
        for number, micro_batch in enumerate(shares[rank]):
            if before is not None:
                before(step, number)
            if case.managed:
                engine.set_gradient_accumulation_boundary(False)
            engine.backward(loss_of(engine, micro_batch) * factor)
        if before is not None:
            before(step, -1)
        if case.managed or not shares[rank]:
            odcengine.boundary(engine)
        else:
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


def reference(case: Case, world_size: int, *, equal: bool = False, steps: int = STEPS) -> dict[str, Any]:
    """The same minibatches in one process with plain torch, in fp32."""
    torch.set_num_threads(1)
    model = make_model(case)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(case, trained)
    norms = []
    for step in range(steps):
        # DeepSpeed's flat buffers have gradients for all parameters: zero where nothing was used.
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        shares = micro_batches(case.name, step, world_size, equal)
        for share in shares:
            for micro_batch in share:
                (loss_of(model, micro_batch) / num_targets(shares)).backward()
        norm = float(torch.nn.utils.get_total_norm([parameter.grad for parameter in trained]))
        norms.append(norm)
        if case.clip:
            factor = max(1.0, (norm + 1e-6) / case.clip)  # as DeepSpeed clips
            for parameter in trained:
                parameter.grad /= factor
        optimizer.step()
    return {"weights": {n: p.detach().clone() for n, p in model.named_parameters()}, "norms": norms}


def error_of(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Largest difference of any weight."""
    if found.keys() != right.keys():
        return float("inf")
    return max(float((found[name] - right[name]).abs().max()) for name in right)
