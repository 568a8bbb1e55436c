"""The kernels of log-probabilities, entropies and their gradient, under Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed (it is in the extra `dev`)")

PROGRAM = """
import torch
from odcengine.losses import LogitTransform, rows
from odcengine.losses._logprob_kernel import gradients_of_rows_, logprobs_of_rows

torch.manual_seed(0)
for vocab in (1, 1000, 17000):  # less than a block, and several
    for dtype in (torch.float32, torch.bfloat16):
        for temperature, with_entropy, scale, cap in (
            (1.0, False, 1.0, None),
            (0.7, True, 1.0, None),
            *([(0.7, True, 0.5, 20.0), (1.3, False, 0.125, None)] if vocab > 1 else []),
        ):
            def change(values):
                return scale * values if cap is None else cap * torch.tanh(scale * values / cap)

            options = {"scale": scale, "cap": cap}
            wide = torch.randn(5, vocab + 3).to(dtype)
            logits = wide[:, :vocab]  # rows further apart than they are long
            targets = torch.tensor([0, vocab - 1, vocab // 2, 0, 0])
            logits[2, targets[2]] = 40.0  # next to certain
            logits[3, 1 : vocab // 2 + 1] = -torch.inf
            right = logits.double().requires_grad_()
            logps = torch.log_softmax(change(right) / temperature, dim=-1)
            chosen = logps.gather(1, targets[:, None])[:, 0]
            entropies = -torch.where(logps > -1e30, logps.exp() * logps, 0).sum(dim=-1)
            before = wide.clone()
            found = logprobs_of_rows(logits, targets, temperature, with_entropy, **options)
            assert torch.equal(wide, before)
            torch.testing.assert_close(found[0], chosen.detach().float(), rtol=1e-6, atol=5e-6)
            if with_entropy:
                torch.testing.assert_close(found[1], entropies.detach().float(), rtol=2e-6, atol=5e-6)
            log_sums = torch.logsumexp(change(right.detach()) / temperature, -1).float()
            torch.testing.assert_close(found[2] + found[3], log_sums)
            slopes, more = torch.linspace(-1, 2, 5), torch.linspace(0.5, -1, 5)
            with_finite = torch.where(logits.double() > -1e30, logits.double(), -1e4).requires_grad_()
            logps = torch.log_softmax(change(with_finite) / temperature, dim=-1)
            loss = (slopes * logps.gather(1, targets[:, None])[:, 0]).sum()
            if with_entropy:
                loss = loss - (more[:, None] * logps.exp() * logps).sum()
            loss.backward()
            entropy = found[1] if with_entropy else None
            slopes_of_entropies = more if with_entropy else None
            gradients_of_rows_(
                logits, targets, temperature, entropy, *found[2:], slopes, slopes_of_entropies, **options
            )
            right = with_finite.grad
            error = (logits.double() - right).abs() - torch.finfo(dtype).eps * right.abs()
            assert error.max() <= 1e-5, (vocab, dtype, temperature, options, error.max())
            assert torch.equal(wide[:, vocab:], before[:, vocab:])

# The same through rows.py, whose other way is torch's operations.
rows._kernels = lambda device: (logprobs_of_rows, gradients_of_rows_)
rows._uses_kernels = lambda logits: True
logits, targets = torch.randn(4, 70), torch.tensor([3, 0, 69, 5])
changes = LogitTransform(0.5, 3.0)
by_kernel = rows.row_logprobs(logits, targets, 1.3, True, changes)
a, b = logits.clone(), logits.clone()
rows.row_gradients_(a, targets, 1.3, by_kernel, torch.arange(4.0), torch.ones(4), changes)
rows._uses_kernels = lambda logits: False
plain = rows.row_logprobs(logits, targets, 1.3, True, changes)
rows.row_gradients_(b, targets, 1.3, plain, torch.arange(4.0), torch.ones(4), changes)
for got, expected in zip(by_kernel, plain):
    torch.testing.assert_close(got, expected)
torch.testing.assert_close(a, b)
assert logprobs_of_rows(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), 1.0, False).shape == (4, 0)
logits[1, 60] = torch.nan
found = logprobs_of_rows(logits, torch.tensor([-100, 3, 70, 5]), 1.0, True)
assert found[0].isnan().tolist() == [True, True, True, False]
assert found[1].isnan().tolist() == [False, True, False, False]
print("done")
"""


def test_under_the_interpreter() -> None:
    """In a process of its own: Triton reads the variable once."""
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(root)}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "done"
