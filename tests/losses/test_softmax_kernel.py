"""The kernel of softmax and loss, under Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed (it is in the extra `dev`)")

PROGRAM = """
import torch
from odcengine.losses._softmax_kernel import softmax_minus_target_

torch.manual_seed(0)
PLAIN = (1.0, None)
CHANGED = [(torch.float32, (1.0, 30.0)), (torch.bfloat16, (-0.5, 3.0)), (torch.float32, (0.125, None))]
for vocab in (1, 5, 1000, 16384, 33000):  # less than a block, one, and several
    for dtype, (scale, cap) in (
        (torch.float32, PLAIN), (torch.bfloat16, PLAIN), *(CHANGED if vocab in (5, 33000) else ())
    ):
        wide = torch.randn(6, vocab + 3).to(dtype)
        logits = wide[:, :vocab]  # rows further apart than they are long
        targets = torch.tensor([0, vocab - 1, vocab // 2, 0, 0, 0])
        logits[2, targets[2]] = 40.0  # next to certain
        logits[3, 1 : vocab // 2 + 1] = -torch.inf
        right = logits.double().requires_grad_()
        changed = scale * right if cap is None else cap * torch.tanh(scale * right / cap)
        losses = torch.nn.functional.cross_entropy(changed, targets, reduction="none")
        losses.sum().backward()
        before = wide.clone()
        found = softmax_minus_target_(logits, targets, False, scale, cap)
        assert torch.equal(wide, before)
        precision = 1e-6 if cap is None else 1e-5
        torch.testing.assert_close(found, losses.detach().float(), rtol=1e-6, atol=precision)
        assert torch.equal(softmax_minus_target_(logits, targets, True, scale, cap), found)
        error = (logits.double() - right.grad).abs() - torch.finfo(dtype).eps * right.grad.abs()
        assert error.max() <= precision, (vocab, dtype, scale, cap)
        assert torch.equal(wide[:, vocab:], before[:, vocab:])

logits = torch.zeros(4, 50)
logits[3, 49] = torch.nan
losses = softmax_minus_target_(logits, torch.tensor([-100, 50, 3, 3]), True)
assert losses.isnan().tolist() == [True, True, False, True]
assert logits.isnan().any(dim=1).tolist() == [False, False, False, True]
print("all rows are right")
"""


def test_softmax_kernel() -> None:
    """Loss and gradient of every row are those of float64; nothing outside of the rows is touched."""
    root = Path(__file__).parents[2]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "all rows are right" in run.stdout
