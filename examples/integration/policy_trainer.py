"""A policy trainer of its own around FSDP2, as RL libraries have one, with and without odcengine.

odc-launch --nproc-per-node 2 examples/integration/policy_trainer.py            # or torchrun
odc-launch --nproc-per-node 2 examples/integration/policy_trainer.py --attach

Each rank has the rollouts that it has made, of very different lengths, and cuts them into micro-batches by a
limit of tokens, so ranks have different numbers. FSDP2's collectives need equal ones: without ``--attach``
ranks with fewer run dummies. Lines that differ are marked with (1) to (3); the gradients are the same.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import odcengine


@dataclass
class Rollout:
    """A prompt with its answer, and how much better than expected the answer was."""

    tokens: list[int]
    num_prompt: int
    advantage: float


class PolicyTrainer:
    """Updates a policy by the gradient of ``-advantage * log p(answer)``, the mean over all ranks' tokens."""

    def __init__(self, path: str, *, lr: float, max_tokens: int, attach: bool) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if _on_gpu() else torch.device("cpu")
        self.max_tokens = max_tokens
        torch.manual_seed(0)
        self.model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        self.model.to(self.device)
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if _on_gpu() else None)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.odc = None
        if attach:
            self.odc = odcengine.attach(self.model, self.optimizer)  # (1)

    def update(self, rollouts: list[Rollout]) -> dict[str, float]:
        """One optimizer step on this rank's rollouts."""
        micro_batches = self.pack(rollouts)
        num_targets = torch.tensor(sum(len(r.tokens) - r.num_prompt for r in rollouts), device=self.device)
        dist.all_reduce(num_targets)
        if self.odc is None:  # (2): on demand nobody has to run as many as the others
            micro_batches += [[]] * (_most(len(micro_batches), self.device) - len(micro_batches))
        total = 0.0
        for micro_batch in micro_batches:
            loss = self.loss(micro_batch) * (dist.get_world_size() / num_targets)  # FSDP2 takes the mean
            loss.backward()
            total += float(loss.detach())
        if self.odc is not None:
            self.odc.collect()  # (3): before clipping
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).full_tensor().item()  # type: ignore[attr-defined]
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return {"micro-batches": len(micro_batches), "loss": total, "norm": norm}

    def pack(self, rollouts: list[Rollout]) -> list[list[Rollout]]:
        """Longest first, as many to a micro-batch as the limit of tokens allows when they are padded."""
        packed: list[list[Rollout]] = []
        for rollout in sorted(rollouts, key=lambda r: -len(r.tokens)):
            if packed and (len(packed[-1]) + 1) * len(packed[-1][0].tokens) <= self.max_tokens:
                packed[-1].append(rollout)
            else:
                packed.append([rollout])
        return packed

    def loss(self, rollouts: list[Rollout]) -> torch.Tensor:
        """Summed over the answers' tokens; that of a dummy is 0 times something."""
        rows = rollouts or [Rollout([0, 0], 2, 0.0)]
        longest = max(len(row.tokens) for row in rows)
        tokens = torch.tensor([row.tokens + [0] * (longest - len(row.tokens)) for row in rows])
        weights = torch.zeros(tokens.shape)
        for row, weight in zip(rows, weights, strict=True):
            weight[row.num_prompt : len(row.tokens)] = row.advantage
        tokens, weights = tokens.to(self.device), weights.to(self.device)
        logits = self.model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
        log_p = torch.log_softmax(logits, dim=-1).gather(2, tokens[:, 1:, None])[:, :, 0]
        return -(log_p * weights[:, 1:]).sum()


def make_rollouts(step: int, rank: int, count: int) -> list[Rollout]:
    """What a generator would give: answers whose lengths spread widely, more of them on some ranks."""
    chance = random.Random(f"{step}-{rank}")
    found = []
    for _ in range(count + 2 * rank):
        length = min(200, 4 + int(chance.lognormvariate(3.0, 1.0)))
        tokens = [chance.randrange(1, 30) for _ in range(length)]
        found.append(Rollout(tokens, num_prompt=3, advantage=chance.uniform(-1, 1)))
    return found


def _on_gpu() -> bool:
    return torch.cuda.is_available()


def _most(count: int, device: torch.device) -> int:
    most = torch.tensor(count, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="examples/sft/llama_7m", help="directory with a config.json")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=6, help="of rank 0; each further rank has two more")
    parser.add_argument("--max-tokens", type=int, default=256, help="in a micro-batch, padding included")
    parser.add_argument("--attach", action="store_true", help="on demand instead of collectives")
    options = parser.parse_args()
    if _on_gpu():
        torch.cuda.set_device(int(torch.distributed.get_node_local_rank(0)))
    dist.init_process_group("cpu:gloo,cuda:nccl" if _on_gpu() else "gloo")
    trainer = PolicyTrainer(options.model, lr=1e-3, max_tokens=options.max_tokens, attach=options.attach)
    for step in range(options.steps):
        start = time.perf_counter()
        found = trainer.update(make_rollouts(step, dist.get_rank(), options.rollouts))
        seconds = f"{time.perf_counter() - start:.2f} s"
        if trainer.odc is not None:
            seconds += f", waited {trainer.odc.waited_s:.2f} s"
        print(
            f"step {step} rank {dist.get_rank()}: {found['micro-batches']} micro-batches, its part of the "
            f"loss {found['loss']:.5f}, gradient norm {found['norm']:.5f}, {seconds}",
            flush=True,
        )
    if trainer.odc is not None:
        trainer.odc.close()
    # A thread of gloo that still holds tensors of the last collective when Python ends aborts the process.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
