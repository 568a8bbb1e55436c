"""GRPO and its variants on one micro-batch; on ranks: test_losses_on_ranks.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from policy import FIELDS, build, make_answers

from odcengine.data import pack_samples
from odcengine.errors import UsageError
from odcengine.losses import (
    GRPO_METRICS,
    GrpoLoss,
    LossSum,
    TokenLogprobs,
)
from odcengine.models import prepare_model


def one_token(advantage: float, log_ratio: float, **options: Any) -> tuple[LossSum, torch.Tensor]:
    """An answer of one token, whose probability has changed by so much; its loss and gradient."""
    sample = {"input_ids": [1, 2], "advantages": advantage, "old_logprobs": [0.0, -1.0 - log_ratio]}
    batch = pack_samples([sample], fields=("advantages", "old_logprobs"))
    logprobs = torch.tensor([[-1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    result = GrpoLoss(**options).of(TokenLogprobs(logprobs), batch)
    (gradient,) = torch.autograd.grad(result.loss_sum, logprobs)
    return result, gradient[0]


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "options", "loss", "slope", "clipped"),
    [
        (2.0, math.log(1.1), {}, -2.2, -2.2, None),
        (2.0, math.log(1.3), {}, -2.4, 0.0, "clipped_high"),
        (2.0, math.log(1.25), {"eps_high": 0.28}, -2.5, -2.5, None),
        (2.0, math.log(0.1), {}, -0.2, -0.2, None),  # worse than before: to be corrected without limit
        (-2.0, math.log(0.7), {}, 1.6, 0.0, "clipped_low"),
        (-2.0, math.log(4.0), {}, 8.0, 8.0, None),
        (-2.0, math.log(4.0), {"dual_clip": 3.0}, 6.0, 0.0, "clipped_dual"),
        (2.0, 1000.0, {}, -2.4, 0.0, "clipped_high"),  # the ratio overflows where it does not count
        (-2.0, 1000.0, {"dual_clip": 3.0}, 6.0, 0.0, "clipped_dual"),
        (0.0, 1000.0, {}, 0.0, 0.0, None),
        (-2.0, 1000.0, {}, math.inf, math.inf, None),  # the engine skips such a step
    ],
)
def test_clipping(
    advantage: float, log_ratio: float, options: Any, loss: float, slope: float, clipped: str | None
) -> None:
    result, gradient = one_token(advantage, log_ratio, **options)
    assert float(result.loss_sum.detach()) == pytest.approx(loss)
    assert gradient.tolist() == pytest.approx([slope, 0.0])
    for name in ("clipped_high", "clipped_low", "clipped_dual"):
        assert result.metrics[name] == (name == clipped)
    assert set(result.metrics) == set(GRPO_METRICS)


def test_prompts_take_no_part_with_the_ratio_of_a_sequence() -> None:
    """Not in the metrics, and not where a prompt's log-probability is no number."""
    sample = {
        "input_ids": [5, 1, 2, 3],
        "loss_mask": [0, 0, 1, 1],
        "advantages": 1.0,
        "old_logprobs": [0.0, -7.0, -1.1, -1.3],
    }
    batch = pack_samples([sample], fields=("advantages", "old_logprobs"))
    logprobs = torch.tensor([[math.nan, -1.0, -1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    result = GrpoLoss(ratio="sequence").of(TokenLogprobs(logprobs), batch)
    ratio = math.exp((0.1 + 0.3) / 2)
    assert float(result.metrics["approx_kl"]) == pytest.approx(2 * (ratio - 1 - math.log(ratio)))
    (gradient,) = torch.autograd.grad(result.loss_sum, logprobs)
    assert gradient[0, 0] == gradient[0, 3] == 0
    assert torch.isfinite(gradient).all()


def test_without_old_logprobs_the_ratio_is_one() -> None:
    """A single update after sampling: the gradient is that of REINFORCE."""
    batch = pack_samples([{"input_ids": [1, 2, 3], "advantages": [0.0, 2.0, -3.0]}], fields=["advantages"])
    logprobs = torch.tensor([[-1.0, -2.0, torch.nan]], requires_grad=True)  # nothing follows the last token
    result = GrpoLoss().of(TokenLogprobs(logprobs), batch)
    (gradient,) = torch.autograd.grad(result.loss_sum, logprobs)
    assert float(result.loss_sum.detach()) == 1.0
    assert gradient.tolist() == [[-2.0, 3.0, 0.0]]
    assert result.count == 2
    assert result.metrics["approx_kl"] == 0


@pytest.mark.parametrize(("normalize_by", "count"), [("token", 3), ("sequence", 2), ("dr_grpo", 3 * 10)])
def test_what_counts(normalize_by: Any, count: float) -> None:
    """Of three answers one is empty; nothing counts in the stand-in for no answer, which has a graph."""
    samples = [
        {"input_ids": [1, 2], "loss_mask": [0, 1], "advantages": 1.0},
        {"input_ids": [3, 4], "loss_mask": [0, 0], "advantages": 1.0},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "advantages": 1.0},
    ]
    loss = GrpoLoss(normalize_by=normalize_by, max_completion_length=10, kl_coef=0.1, ratio="sequence")
    samples = [{**sample, "ref_logprobs": [0.0] * len(sample["input_ids"])} for sample in samples]
    for batch, right in (
        (pack_samples(samples, fields=["advantages", "ref_logprobs"]), count),
        (pack_samples([]), 0),
    ):
        logprobs = torch.full(batch.labels.shape, -0.5, requires_grad=True)
        result = loss.of(TokenLogprobs(logprobs), batch)
        assert result.count == right
        (gradient,) = torch.autograd.grad(result.loss_sum, logprobs)
        assert gradient.isfinite().all()
        assert (gradient != 0).sum() == result.metrics["tokens"]


def test_low_precision_models() -> None:
    """Log-probabilities and losses are float32; a field may be wider and changes nothing."""
    model = prepare_model(build("gpt2").bfloat16())
    answers = [
        {**answer, "old_logprobs": answer["old_logprobs"].float()}
        for answer in make_answers(build("gpt2"), 1.0)
    ]
    loss = GrpoLoss(kl_coef=0.1, entropy_coef=0.01)
    result = loss(model, pack_samples(answers, fields=FIELDS))
    exact = loss(prepare_model(build("gpt2")), pack_samples(answers, fields=FIELDS))
    assert result.loss_sum.dtype == torch.float32
    assert exact.loss_sum.dtype == torch.float64
    assert abs(float(result.loss_sum.detach() - exact.loss_sum.detach())) < 0.02 * exact.count
    torch.autograd.backward(result.loss_sum)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize_by": "tokens"}, "normalize_by is 'tokens'; choose one of token, sequence, dr_grpo"),
        ({"normalize_by": "dr_grpo"}, "give max_completion_length"),
        ({"eps_low": 1.5}, "eps_low is 1.5, but must be in 0 to 1"),
        ({"eps_high": -0.1}, "eps_high is -0.1"),
        ({"dual_clip": 0.5}, "dual_clip is 0.5, but must be above 1, or None"),
        ({"kl": "k0"}, "kl is 'k0', but must be one of k1, k2, k3"),
        ({"kl_coef": -1.0}, "kl_coef is -1.0"),
        ({"entropy_coef": math.nan}, "entropy_coef is nan"),
        ({"ratio": "batch"}, "ratio is 'batch'"),
        ({"temperature": 0.0}, "temperature is 0.0"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GrpoLoss(**options)


def test_fields_that_are_missing() -> None:
    sample = {"input_ids": [1, 2], "advantages": 1.0, "old_logprobs": -1.0, "ref_logprobs": [0.0, -1.0]}
    found = TokenLogprobs(torch.zeros(1, 2))
    with pytest.raises(UsageError, match="has no field advantages, but old_logprobs; name it in"):
        GrpoLoss().of(found, pack_samples([sample], fields=["old_logprobs"]))
    with pytest.raises(UsageError, match="the field old_logprobs has one number for each sequence"):
        GrpoLoss().of(found, pack_samples([sample], fields=["advantages", "old_logprobs"]))
    with pytest.raises(UsageError, match="has no field ref_logprobs"):
        GrpoLoss(kl_coef=1.0).of(found, pack_samples([sample], fields=["advantages"]))
    other = {"input_ids": [1, 2], "advantages": 1.0, "old_log_probs": [0.0, -1.0]}
    with pytest.raises(UsageError, match="has a field old_log_probs, but no old_logprobs"):
        GrpoLoss().of(found, pack_samples([other], fields=["advantages", "old_log_probs"]))
    with pytest.raises(UsageError, match="entropy_coef needs entropies"):
        GrpoLoss(entropy_coef=1.0).of(found, pack_samples([sample], fields=["advantages"]))
