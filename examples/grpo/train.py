"""GRPO with odcengine: a small model learns arithmetic from a reward that a program computes.

    odc-launch --nproc-per-node 2 --config configs/grpo_cpu.yaml examples/grpo/train.py --out grpo_out

A short supervised warm start comes first, so that some answers are right. Then, again and again: each rank
samples answers to its own prompts with the sharded model; rewards and group advantages; the log-probabilities
of old and reference policy; updates. The ranks' answers differ in length, so ``engine.annotate`` and
``engine.balance`` move them to where the work is even. ``--out`` gets ``rewards.jsonl`` and ``reward.png``.

With ``--model DIR`` (and its tokenizer) another model learns the same task. ``--rollouts`` takes answers from
JSONL files instead of sampling, ``--write-rollouts`` keeps those that were sampled, one file a rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from arithmetic import Characters, make_problem, reward_of
from rollouts import GenerateSampler, Rollout, Sampler, VllmSampler, read_groups, write_rollouts

import odcengine
from odcengine import OdcEngine
from odcengine.config import load_config
from odcengine.data import MicroBatch
from odcengine.errors import ConfigError
from odcengine.losses import GrpoLoss, group_advantages
from odcengine.ranks import read_rank_info

logger = logging.getLogger("grpo")


def main() -> None:
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config = load_config(arguments.config or read_rank_info().config_file or "configs/grpo_cpu.yaml")
    if arguments.model is not None:
        config = load_config({**config.resolved(), "model": {"path": arguments.model}})
    source = config.model.path or config.model.config
    if source is None:
        raise ConfigError("no model: give --model DIRECTORY, or model.config in the configuration")
    tokenizer = make_tokenizer(source)
    reference = source if config.model.reference is None else None
    engine, optimizer, _, _ = odcengine.initialize(config=config, reference=reference)
    rank, world_size = engine.topology.rank, engine.topology.world_size
    torch.manual_seed(config.seed + rank)  # ranks sample different answers
    dice = random.Random(f"{config.seed}-{rank}")
    with engine:
        for step in range(arguments.sft_steps):
            loss = warm_up(engine, tokenizer, dice, arguments)
            if rank == 0 and step % 50 == 0:
                logger.info("warm start, step %d: loss %.3f", step, loss)
        engine.update_reference()  # the policy is not to leave what the warm start has taught
        for group in optimizer.param_groups:
            group["lr"] = arguments.rl_lr
        log = RewardLog(arguments.out, rank)
        sampler = make_sampler(engine, tokenizer, arguments)
        groups = offline_groups(arguments.rollouts, tokenizer, rank, world_size)
        num_groups = max(1, samples_a_rank(engine) * arguments.updates // arguments.group_size)
        for iteration in range(arguments.iterations):
            if groups is None:
                prompts = [make_problem(dice, arguments.largest).prompt for _ in range(num_groups)]
                found = sampler(prompts, arguments.group_size)
            else:
                found = list(itertools.chain(*itertools.islice(groups, num_groups)))
            found = [with_reward(rollout) for rollout in found]
            if arguments.write_rollouts is not None:
                path = arguments.write_rollouts
                write_rollouts(path.with_name(f"{path.stem}.rank{rank}{path.suffix}"), found)
            reward, accuracy, count = mean_rewards(engine, found)
            if not count:
                break  # the files are at their end on all ranks
            metrics = update(engine, found, arguments)
            log.add(iteration, reward, accuracy, count, metrics)
            if rank == 0 and (iteration % 10 == 0 or iteration == arguments.iterations - 1):
                logger.info("round %d: reward %.3f, right %.1f%%", iteration, reward, 100 * accuracy)
        log.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a model of arithmetic with GRPO.")
    add = parser.add_argument
    add("--config", type=Path, help="configuration (default: that of odc-launch)")
    add("--model", help="directory or name of a model (default: the configuration's)")
    add("--out", type=Path, help="folder for rewards.jsonl and reward.png")
    add("--sft-steps", type=int, default=30, help="steps of the supervised warm start (default 30)")
    add("--iterations", type=int, default=80, help="rounds of sampling (default 80)")
    add("--updates", type=int, default=4, help="optimizer steps a round (default 4)")
    add("--group-size", type=int, default=8, help="answers to a prompt (default 8)")
    add("--rl-lr", type=float, default=1e-3, help="learning rate of the updates (default 1e-3)")
    add("--kl-coef", type=float, default=0.01, help="weight of the divergence from the warm start")
    add("--temperature", type=float, default=1.0, help="of sampling (default 1)")
    add("--max-tokens", type=int, default=5, help="longest answer in tokens (default 5)")
    add("--largest", type=int, default=5, help="largest number in a problem (default 5)")
    add("--sampler", choices=("generate", "vllm"), default="generate", help="who samples")
    add("--rollouts", type=Path, nargs="+", help="JSONL files with answers, instead of sampling")
    add("--write-rollouts", type=Path, help="JSONL file for the sampled answers, .rankN in its name")
    return parser.parse_args()


def make_tokenizer(source: Any) -> Any:
    """The model's own; for a model that begins with random weights one of characters."""
    if isinstance(source, str) and (Path(source) / "tokenizer_config.json").exists():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(source)
    return Characters()


def make_sampler(engine: OdcEngine, tokenizer: Any, arguments: argparse.Namespace) -> Sampler:
    limits = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    if arguments.sampler == "generate":
        return GenerateSampler(engine, tokenizer, **limits)
    if arguments.model is None:
        raise ConfigError("--sampler vllm: give --model DIRECTORY; vLLM reads the architecture there")
    return VllmSampler(engine, tokenizer, arguments.model, **limits)


def samples_a_rank(engine: OdcEngine) -> int:
    """Of one optimizer step, before they are balanced."""
    world_size = engine.topology.world_size
    return -(-engine.config.resolve_batch(world_size).train_batch_size // world_size)


# ---- the warm start ------------------------------------------------------------------------------------


def warm_up(engine: OdcEngine, tokenizer: Any, dice: random.Random, arguments: argparse.Namespace) -> float:
    """One step of supervised learning on solved problems."""
    samples = []
    for _ in range(samples_a_rank(engine)):
        problem = make_problem(dice, arguments.largest)
        prompt, answer = tokenizer.encode(problem.prompt), tokenizer.encode(problem.answer)
        answer = [*answer, tokenizer.eos_token_id]
        samples.append({"input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + [1] * len(answer)})
    for micro_batch in engine.balance(samples):
        engine.backward(engine(micro_batch))
    return engine.step().loss


# ---- reinforcement learning ----------------------------------------------------------------------------


def update(engine: OdcEngine, rollouts: list[Rollout], arguments: argparse.Namespace) -> list[Any]:
    """Turn this rank's rollouts into optimizer steps over all ranks'; returns their metrics."""
    loss = GrpoLoss(kl_coef=arguments.kl_coef, temperature=arguments.temperature)
    samples = to_samples(rollouts, arguments.updates)

    def logprobs(micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        found = {"old_logprobs": loss.logprobs(engine.module, micro_batch).logprobs}
        if arguments.kl_coef:
            found["ref_logprobs"] = loss.logprobs(engine.reference, micro_batch).logprobs
        return found

    samples = engine.annotate(samples, logprobs)
    metrics = []
    for number in range(arguments.updates):
        minibatch = engine.balance([sample for sample in samples if sample["update"] == number])
        for micro_batch in minibatch:
            engine.backward(engine(micro_batch, loss_fn=loss))
        metrics.append(engine.step())
    return metrics


def to_samples(rollouts: list[Rollout], num_updates: int) -> list[dict[str, Any]]:
    """Samples with advantages within groups, which are neighbours of one prompt."""
    if not rollouts:
        return []
    groups = [number for number, _, _ in enumerate_groups(rollouts)]
    advantages = group_advantages([rollout.reward for rollout in rollouts], groups)
    return [
        {
            "input_ids": rollout.prompt_ids + rollout.completion_ids,
            "loss_mask": [0] * len(rollout.prompt_ids) + [1] * len(rollout.completion_ids),
            "advantages": advantage,
            "update": group % num_updates,
        }
        for rollout, group, advantage in zip(rollouts, groups, advantages, strict=True)
    ]


def enumerate_groups(rollouts: list[Rollout]) -> Iterator[tuple[int, int, Rollout]]:
    for number, (_, group) in enumerate(itertools.groupby(rollouts, key=lambda rollout: rollout.prompt)):
        for position, rollout in enumerate(group):
            yield number, position, rollout


def with_reward(rollout: Rollout) -> Rollout:
    if rollout.reward is not None:
        return rollout
    return rollout._replace(reward=reward_of(rollout.prompt, rollout.completion))


def mean_rewards(engine: OdcEngine, rollouts: list[Rollout]) -> tuple[float, float, int]:
    """Mean reward and share of right answers over all ranks, and the number of rollouts."""
    rewards = [rollout.reward for rollout in rollouts]
    sums = engine.sum_over_ranks(
        {"reward": sum(rewards), "right": sum(reward == 1 for reward in rewards), "count": len(rewards)}
    )
    count = max(sums["count"], 1)
    return sums["reward"] / count, sums["right"] / count, int(sums["count"])


def offline_groups(
    paths: list[Path] | None, tokenizer: Any, rank: int, world_size: int
) -> Iterator[list[Rollout]] | None:
    """This rank's groups of the files: every ``world_size``-th."""
    if paths is None:
        return None
    return itertools.islice(read_groups(paths, tokenizer), rank, None, world_size)


class RewardLog:
    """Writes and draws the rewards, on rank 0."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._folder = folder
        self._writes = rank == 0
        self._rewards: list[tuple[float, float]] = []
        if folder is not None and self._writes:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "rewards.jsonl").write_text("")

    def add(self, iteration: int, reward: float, accuracy: float, count: int, metrics: list[Any]) -> None:
        if not self._writes:
            return
        self._rewards.append((reward, accuracy))
        idle = sum(sum(step.idle_shares) / len(step.idle_shares) for step in metrics) / len(metrics)
        if self._folder is not None:
            line = {
                "iteration": iteration,
                "reward": reward,
                "accuracy": accuracy,
                "rollouts": count,
                "loss": metrics[-1].loss,
                "grad_norm": metrics[-1].grad_norm,
                "idle_share": idle,
            }
            with (self._folder / "rewards.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        if not self._writes or self._folder is None or not self._rewards:
            return
        from odcengine.monitor.figure import new_figure, save

        figure = new_figure(6, 3.5)
        axes = figure.subplots()
        for values, label in zip(zip(*self._rewards, strict=True), ("reward", "right answers"), strict=True):
            axes.plot(values, label=label)
        axes.set(xlabel="round of sampling", ylabel="mean over all rollouts", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend()
        save(figure, self._folder / "reward.png")


if __name__ == "__main__":
    main()
