"""Log-probabilities and policy losses on a GPU: their kernels, and a host that does not wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from odcengine.data import IGNORE_INDEX, pack_samples
from odcengine.losses import GrpoLoss, LogitTransform, linear_logprobs, rows

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_the_kernels_work_here() -> None:
    """Otherwise the tests of this file would try torch's operations twice."""
    assert rows._kernels(torch.device(DEVICE, torch.cuda.current_device()))


@pytest.mark.parametrize("way", ["kernel", "torch"])
@pytest.mark.parametrize("vocab", [1, 1000, 16385, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.5, 30.0)])
def test_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, way: str, vocab: int, dtype: torch.dtype, transform: LogitTransform
) -> None:
    """Against torch in float64, logits of a confident model, also scaled and capped."""
    if way == "torch":
        monkeypatch.setattr(rows, "_kernels", lambda device: ())
    torch.manual_seed(0)
    temperature = 0.7
    logits = (4 * torch.randn(70, vocab, device=DEVICE)).to(dtype)
    targets = torch.randint(vocab, (70,), device=DEVICE)
    logits[2, targets[2]] = 40.0  # next to certain
    wide = logits.double().requires_grad_()
    changed = transform.scale * wide
    if transform.cap is not None:
        changed = transform.cap * torch.tanh(changed / transform.cap)
    logps = torch.log_softmax(changed / temperature, dim=-1)
    chosen = logps.gather(1, targets[:, None])[:, 0]
    entropies = -(logps.exp() * logps).sum(dim=-1)
    slopes, more = torch.linspace(-1, 2, 70, device=DEVICE), torch.linspace(1, -1, 70, device=DEVICE)
    (gradient,) = torch.autograd.grad((slopes * chosen + more * entropies).sum(), wide)
    found = rows.row_logprobs(logits, targets, temperature, True, transform)
    assert found.entropies is not None
    torch.testing.assert_close(found.logprobs, chosen.detach().float(), rtol=1e-5, atol=5e-5)
    torch.testing.assert_close(found.entropies, entropies.detach().float(), rtol=1e-5, atol=5e-5)
    rows.row_gradients_(logits, targets, temperature, found, slopes, more, transform)
    error = (logits.double() - gradient).abs()
    assert float((error - torch.finfo(dtype).eps * gradient.abs()).max()) <= 5e-5


def test_the_host_does_not_wait() -> None:
    """Neither the head nor the loss asks the device for anything, forward and backward."""
    samples: list[dict[str, Any]] = [
        {
            "input_ids": list(range(1, length)),
            "loss_mask": [position > 3 for position in range(1, length)],
            "advantages": 0.5,
            "old_logprobs": [-1.0] * (length - 1),
            "ref_logprobs": [-1.0] * (length - 1),
        }
        for length in (9, 30, 17)
    ]
    batch = pack_samples(samples, fields=["advantages", "old_logprobs", "ref_logprobs"]).to(DEVICE)
    head = nn.Linear(16, 1000, device=DEVICE, dtype=torch.bfloat16)
    hidden = torch.randn(*batch.labels.shape, 16, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    losses = [
        GrpoLoss(kl_coef=0.1, entropy_coef=0.01, dual_clip=3.0),
        GrpoLoss(normalize_by="sequence", ratio="sequence"),
        GrpoLoss(normalize_by="dr_grpo", max_completion_length=32),
    ]

    def step(loss: GrpoLoss) -> Any:
        found = linear_logprobs(
            hidden,
            head.weight,
            head.bias,
            batch.labels,
            entropy="differentiable",
            num_targets=batch.num_targets,
            chunk_tokens=16,
        )
        result = loss.of(found, batch)
        torch.autograd.backward(result.loss_sum)
        return result

    step(losses[0])  # kernels are compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [step(loss) for loss in losses]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [result.count for result in results] == [batch.num_targets, 3, 3 * 32]
    assert int(results[0].metrics["tokens"]) == int((batch.labels != IGNORE_INDEX).sum())
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
