"""What the DeepSpeed examples train: a model of transformers on token sequences of very different lengths."""

from __future__ import annotations

import argparse
import os
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from accelerate import PartialState
from transformers import AutoConfig, AutoModelForCausalLM

from odcengine.balance import CostModel, make_plan
from odcengine.data import TokenDataset


def arguments(description: str, config: str) -> argparse.Namespace:
    """The command line of an example."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="examples/sft/llama_7m", help="directory of a model")
    parser.add_argument("--data", default="demo_out/tokens", help="directory of a prepared data set")
    parser.add_argument("--config", default=config, help="DeepSpeed's configuration")
    parser.add_argument("--batch", type=int, default=16, help="samples of an optimizer step, over all ranks")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--local_rank", type=int, help="given by some launchers; not needed")
    return parser.parse_args()


def without_extension() -> None:
    """Where there is no GPU: keep DeepSpeed from compiling, for a minute, what serves inference only."""
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def accelerate_on_cpus() -> bool:
    """Let Accelerate use DeepSpeed where there is no GPU, to try it out; returns whether there is none.

    It needs nothing of this on GPUs, nor under ``accelerate launch`` there.
    """
    os.environ.setdefault("ACCELERATE_USE_DEEPSPEED", "true")  # as `accelerate launch` does
    if torch.cuda.is_available():
        return False
    without_extension()
    PartialState(backend="gloo")
    return True


def make_model(path: str) -> Any:
    """A model with random weights, the same on every rank."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)


class Shares:
    """Minibatches, and which samples of them each rank computes: equal work, not equal numbers."""

    def __init__(self, path: str, batch: int, world_size: int) -> None:
        self.data = TokenDataset.open(path)
        self.batch = batch
        self.world_size = world_size

    def minibatch(self, step: int, rank: int) -> tuple[list[dict[str, torch.Tensor]], int]:
        """This rank's micro-batches of an optimizer step, and the tokens to learn of all ranks together."""
        ids = [(step * self.batch + number) % len(self.data) for number in range(self.batch)]
        lengths = [int(self.data.lengths[index]) for index in ids]
        plan = make_plan(
            lengths,
            num_ranks=self.world_size,
            strategy="lb_mini",
            max_tokens=max(lengths),
            max_samples=1,
            cost=CostModel.default(),
        )
        share = [self.sample(ids[position]) for (position,) in plan.micro_batches[rank]]
        return share, sum(int((self.sample(index)["labels"][:, 1:] != -100).sum()) for index in ids)

    def sample(self, index: int) -> dict[str, torch.Tensor]:
        """One sequence as a micro-batch; -100 where nothing is to be learned."""
        item = self.data[index]
        tokens = torch.tensor(item["input_ids"], dtype=torch.int64)
        labels = tokens.masked_fill(~torch.tensor(item["loss_mask"]), -100)
        return {"input_ids": tokens[None], "labels": labels[None]}


def loss_sum(model: Any, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The summed token loss."""
    device = next(model.parameters()).device
    labels = micro_batch["labels"].to(device)
    logits = model(input_ids=micro_batch["input_ids"].to(device), use_cache=False).logits
    return F.cross_entropy(logits[0, :-1].float(), labels[0, 1:], ignore_index=-100, reduction="sum")
