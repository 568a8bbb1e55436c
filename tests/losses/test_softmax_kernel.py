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
for vocab in (1, 5, 1000, 16384, 33000):  # less than a block, one, and several
    for dtype in (torch.float32, torch.bfloat16):
        wide = torch.randn(6, vocab + 3).to(dtype)
        logits = wide[:, :vocab]  # rows further apart than they are long
        targets = torch.tensor([0, vocab - 1, vocab // 2, 0, 0, 0])
        logits[2, targets[2]] = 40.0  # next to certain
        logits[3, 1 : vocab // 2 + 1] = -torch.inf
        right = logits.double().requires_grad_()
        losses = torch.nn.functional.cross_entropy(right, targets, reduction="none")
        losses.sum().backward()
        before = wide.clone()
        found = softmax_minus_target_(logits, targets, False)
        assert torch.equal(wide, before)
        torch.testing.assert_close(found, losses.detach().float(), rtol=1e-6, atol=1e-6)
        assert torch.equal(softmax_minus_target_(logits, targets, True), found)
        error = (logits.double() - right.grad).abs() - torch.finfo(dtype).eps * right.grad.abs()
        assert error.max() <= 1e-6, (vocab, dtype)
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
