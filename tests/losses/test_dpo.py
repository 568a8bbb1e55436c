"""Losses of preference pairs on one micro-batch; on ranks: test_losses_on_ranks.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from odcengine.data import MicroBatch, pack_samples
from odcengine.errors import UsageError
from odcengine.losses import DpoLoss, TokenLogprobs


def make_pair(reference: Any = (-1.0, -2.0)) -> tuple[MicroBatch, torch.Tensor]:
    """The chosen answer has one token, of log-probability -0.5, the rejected one two of -1."""
    chosen = {"input_ids": [1, 2], "loss_mask": [0, 1], "ref_logprobs": reference[0]}
    rejected = {"input_ids": [1, 3, 4], "loss_mask": [0, 1, 1], "ref_logprobs": reference[1]}
    batch = pack_samples([{"sequences": [chosen, rejected]}], fields=["ref_logprobs"])
    logprobs = torch.tensor([[-0.5, 0.0, -1.0, -1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    return batch, logprobs


@pytest.mark.parametrize(
    "reference", [(-1.0, -2.5), ([0.0, -1.0], [0.0, -0.5, -2.0])], ids=["sums", "tokens"]
)
@pytest.mark.parametrize(
    ("loss", "value", "slope"),
    [
        # The gains are 0.5 for the chosen and 0.5 for the rejected answer.
        (DpoLoss(beta=2.0), math.log(2), -1.0),
        (DpoLoss(beta=2.0, label_smoothing=0.25), math.log(2), -0.5),
        (DpoLoss(beta=2.0, kind="ipo"), 0.25**2, -0.5),
        (DpoLoss(beta=2.0, kind="ipo", average=True), (0.25 - 0.25) ** 2, 0.0),
        (DpoLoss(beta=2.0, average=True), math.log1p(math.exp(-0.5)), -2 / (1 + math.exp(0.5))),
    ],
)
def test_one_pair(loss: DpoLoss, value: float, slope: float, reference: Any) -> None:
    batch, logprobs = make_pair(reference)
    result = loss.of(TokenLogprobs(logprobs), batch)
    (gradient,) = torch.autograd.grad(result.loss_sum, logprobs)
    assert float(result.loss_sum.detach()) == pytest.approx(value)
    share = 0.5 if loss.average else 1.0
    assert gradient[0].tolist() == pytest.approx([slope, 0.0, -slope * share, -slope * share, 0.0])
    assert result.count == 1
    assert {name: float(value) for name, value in result.metrics.items()} == {
        "pairs": 1,
        "accuracy": float(loss.average),  # 0.5 against 0.25 instead of 0.5 against 0.5
        "margin": 1.0 - share,
        "chosen_reward": 1.0,
        "rejected_reward": 1.0 * share,
    }


def test_far_from_the_reference() -> None:
    """Neither the loss nor its gradient overflows."""
    for margin, slope in ((1e5, 0.0), (-1e5, -1.0)):
        batch, logprobs = make_pair((-margin, 0.0))
        result = DpoLoss(beta=1.0).of(TokenLogprobs(logprobs), batch)
        (gradient,) = torch.autograd.grad(result.loss_sum, logprobs)
        assert float(result.loss_sum.detach()) == pytest.approx(max(0.0, -margin), rel=1e-4)
        assert float(gradient[0, 0]) == slope


def test_no_pairs() -> None:
    """The stand-in for an empty micro-batch: nothing, with a graph."""
    logprobs = torch.zeros(1, 1, requires_grad=True)
    result = DpoLoss().of(TokenLogprobs(logprobs), pack_samples([]))
    (gradient,) = torch.autograd.grad(result.loss_sum, logprobs)
    assert (float(result.loss_sum.detach()), result.count, gradient.tolist()) == (0.0, 0.0, [[0.0]])


def test_what_is_refused() -> None:
    answer = {"input_ids": [1, 2], "ref_logprobs": 0.0}
    batch = pack_samples([{"sequences": [answer] * 2}, answer], fields=["ref_logprobs"])
    with pytest.raises(UsageError, match="sample 1 has 1 sequences, but a pair has two"):
        DpoLoss().of(TokenLogprobs(torch.zeros(batch.labels.shape)), batch)
    batch = pack_samples([{"sequences": [answer] * 2}])
    with pytest.raises(UsageError, match="DpoLoss: the micro-batch has no field ref_logprobs"):
        DpoLoss().of(TokenLogprobs(torch.zeros(batch.labels.shape)), batch)
    with pytest.raises(UsageError, match="kind is 'hinge'; choose one of sigmoid, ipo"):
        DpoLoss(kind="hinge")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="beta is 0"):
        DpoLoss(beta=0)
    with pytest.raises(UsageError, match=r"label_smoothing is 0\.1 with kind ipo"):
        DpoLoss(kind="ipo", label_smoothing=0.1)
