"""Answers with advantages, and policy-gradient losses of them in plain torch, a sequence at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from odcengine.losses import DpoLoss, GrpoLoss

transformers = pytest.importorskip("transformers")

VOCAB = 48
FIELDS = ("advantages", "old_logprobs", "ref_logprobs")
# Tokens, and how many of them are the prompt; one is a prompt only, with nothing to learn.
LENGTHS = ((9, 3), (4, 4), (2, 1), (7, 2), (12, 5), (3, 1), (6, 5))
ADVANTAGES = (1.2, 0.5, -0.7, 0.0, -1.5, 0.4, 0.9)


def build(family: str) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}}.get(
        family, {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    )
    config = transformers.AutoConfig.for_model(
        family, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, pad_token_id=0, **shape
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def make_answers(model: nn.Module, temperature: float) -> list[dict[str, Any]]:
    """Answers with advantages and log-probabilities of an older and of a reference model."""
    generator = torch.Generator().manual_seed(1)
    answers = []
    for (length, prompt), advantage in zip(LENGTHS, ADVANTAGES, strict=True):
        tokens = torch.randint(3, VOCAB, (length,), generator=generator)
        with torch.no_grad():
            now, _ = plain_logprobs(model, tokens, temperature)
        noise = torch.randn(2, length, generator=generator, dtype=torch.float64)
        noise[:, :prompt] = torch.nan  # nobody may look there
        answers.append(
            {
                "input_ids": tokens.tolist(),
                "loss_mask": [position >= prompt for position in range(length)],
                "advantages": advantage,
                "old_logprobs": now + 0.3 * noise[0],
                "ref_logprobs": now + 0.5 * noise[1],
            }
        )
    return answers


def plain_logprobs(
    model: nn.Module, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each token, and entropy of what it was drawn from; 0 for the first."""
    logits = model(tokens[None], use_cache=False).logits[0] / temperature
    logps = torch.log_softmax(logits, dim=-1)
    entropies = -(logps.exp() * logps).sum(dim=-1)
    chosen = logps[:-1].gather(1, tokens[1:, None])[:, 0]
    zero = chosen.new_zeros(1)
    return torch.cat([zero, chosen]), torch.cat([zero, entropies[:-1]])


def plain_grpo(model: nn.Module, answers: list[dict[str, Any]], loss: GrpoLoss) -> torch.Tensor:
    """The loss of a minibatch as the papers write it: over all answers, without any packing."""
    sums, means, lengths = [], [], []
    for answer in answers:
        logps, entropies = plain_logprobs(model, torch.tensor(answer["input_ids"]), loss.temperature)
        mask = torch.tensor(answer["loss_mask"])
        mask[0] = False
        new, old, ref = logps[mask], answer["old_logprobs"][mask], answer["ref_logprobs"][mask]
        ratio, advantage = torch.exp(new - old), answer["advantages"]
        if loss.ratio == "sequence":
            ratio = torch.exp((new - old).mean()).expand(len(new))
        clipped = ratio.clamp(1 - loss.eps_low, 1 + loss.eps_high)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        if loss.dual_clip is not None and advantage < 0:
            gain = torch.maximum(gain, torch.full_like(gain, loss.dual_clip * advantage))
        kls = {
            "k1": new - ref,
            "k2": (new - ref) ** 2 / 2,
            "k3": torch.exp(ref - new) - (ref - new) - 1,
        }
        losses = -gain + loss.kl_coef * kls[loss.kl] - loss.entropy_coef * entropies[mask]
        sums.append(losses.sum())
        means.append(losses.mean())
        lengths.append(len(losses))
    if loss.normalize_by == "token":
        return torch.stack(sums).sum() / sum(lengths)
    if loss.normalize_by == "dr_grpo":
        return torch.stack(sums).sum() / len(answers) / (loss.max_completion_length or 0)
    return torch.stack([mean for mean, length in zip(means, lengths, strict=True) if length]).mean()


def make_pairs(model: nn.Module) -> list[dict[str, Any]]:
    """Preference pairs; in one of them there is nothing to learn of the rejected answer."""
    answers = make_answers(model, 1.0)
    return [
        {"sequences": [answers[chosen], answers[rejected]]} for chosen, rejected in ((0, 3), (6, 1), (4, 5))
    ]


def plain_dpo(
    model: nn.Module, pairs: list[dict[str, Any]], loss: DpoLoss
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a minibatch of pairs, and the rewards of chosen and rejected answers."""
    gains = []
    for answer in (answer for pair in pairs for answer in pair["sequences"]):
        logps, _ = plain_logprobs(model, torch.tensor(answer["input_ids"]), 1.0)
        mask = torch.tensor(answer["loss_mask"])
        mask[0] = False
        gain = (logps[mask] - answer["ref_logprobs"][mask]).sum()
        gains.append(gain / max(1, int(mask.sum())) if loss.average else gain)
    rewards = loss.beta * torch.stack(gains).view(-1, 2)
    margin = rewards[:, 0] - rewards[:, 1]
    if loss.kind == "ipo":
        losses = (margin / loss.beta - 1 / (2 * loss.beta)) ** 2
    else:
        wrong = loss.label_smoothing
        losses = -(1 - wrong) * torch.log(torch.sigmoid(margin)) - wrong * torch.log(torch.sigmoid(-margin))
    return losses.mean(), rewards.detach()


def random_split(count: int, num_ranks: int, seed: int, equal: bool = False) -> list[list[list[int]]]:
    """For each rank its micro-batches; a rank may get none. ``equal``: the same number, some empty."""
    draw = random.Random(seed)
    order = draw.sample(range(count), count)
    owners = [draw.randrange(num_ranks) for _ in order]
    ranks: list[list[list[int]]] = []
    for rank in range(num_ranks):
        mine = [index for index, owner in zip(order, owners, strict=True) if owner == rank]
        cuts = sorted(draw.sample(range(1, len(mine)), draw.randrange(len(mine)))) if mine else []
        ranks.append(
            [mine[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(mine)], strict=True) if mine]
        )
    if equal:
        most = max(map(len, ranks))
        ranks = [micro_batches + [[]] * (most - len(micro_batches)) for micro_batches in ranks]
    return ranks
