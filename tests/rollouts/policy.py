"""A tiny policy in float64, rollouts that are spread over ranks at random, and their plain GRPO gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 11
KL, EPS = 0.05, 0.2


def make_policy(seed: int) -> nn.Module:
    """A GPT-2: its norms compute in float64, those of newer families in float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=64,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = GPT2LMHeadModel(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:  # so large that answers differ and ratios are clipped
                parameter.normal_(std=0.4)
    return model


def make_rollouts(step: int, count: int) -> list[dict[str, Any]]:
    """Answers of 1 to 20 tokens to prompts of 1 to 4, with old log-probabilities of another policy."""
    dice = torch.Generator().manual_seed(step)
    rollouts = []
    for _ in range(count):
        prompt, answer = torch.randint(1, 5, (1,), generator=dice), torch.randint(1, 21, (1,), generator=dice)
        length = int(prompt + answer)
        rollouts.append(
            {
                "input_ids": torch.randint(1, VOCAB, (length,), generator=dice),
                "loss_mask": torch.arange(length) >= prompt,
                "advantages": torch.randn((), generator=dice, dtype=torch.float64),
                "old_logprobs": -3 * torch.rand(length, generator=dice, dtype=torch.float64),
                "name": f"rollout {len(rollouts)} of step {step}",
            }
        )
    return rollouts


def share_out(step: int, rollouts: list[dict[str, Any]], num_ranks: int) -> list[list[dict[str, Any]]]:
    """Where they are born: anywhere, in every other step all on the last rank."""
    dice = torch.Generator().manual_seed(1000 + step)
    homes = torch.randint(num_ranks, (len(rollouts),), generator=dice).tolist()
    if step % 2:
        homes = [num_ranks - 1] * len(rollouts)
    return [
        [rollout for rollout, home in zip(rollouts, homes, strict=True) if home == rank]
        for rank in range(num_ranks)
    ]


def logprobs_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of each token but the first, by a sample alone."""
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    return F.log_softmax(logits, dim=-1).gather(1, tokens[1:, None])[:, 0]


def plain_gradient(
    model: nn.Module, reference: nn.Module, rollouts: list[dict[str, Any]]
) -> dict[str, torch.Tensor]:
    """The gradient of one loss over all rollouts, from the formulas, one rollout after the other."""
    model.zero_grad()
    count = sum(int(rollout["loss_mask"][1:].sum()) for rollout in rollouts)
    for rollout in rollouts:
        tokens, mask = rollout["input_ids"], rollout["loss_mask"][1:]
        new = logprobs_of(model, tokens)
        with torch.no_grad():
            other = logprobs_of(reference, tokens)
        ratio = torch.exp(new - rollout["old_logprobs"][1:])
        gain = rollout["advantages"]
        surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - EPS, 1 + EPS) * gain)
        kl = torch.exp(other - new) - 1 - (other - new)
        ((KL * kl - surrogate)[mask].sum() / count).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
