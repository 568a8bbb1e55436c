"""The kernel that adds into peers' memory, under Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed (it is in the extra `dev`)")

PROGRAM = """
import torch
from odcengine.transport import _kernels as kernels

generator = torch.Generator().manual_seed(0)
for dtype, element in ((torch.float32, kernels.tl.float32), (torch.float64, kernels.tl.float64)):
    for source_dtype in (torch.float32, torch.bfloat16):
        for rows, count, offset, ctas, first in ((3, 1, 0, 1, 2), (2, 65, 3, 4, 1), (4, 200, 17, 3, 0)):
            targets = [torch.ones(count + offset + 5, dtype=dtype) for _ in range(rows)]
            addresses = torch.tensor([target.data_ptr() for target in targets])
            wide = torch.randint(-8, 8, (rows, count + 7), generator=generator).to(source_dtype)
            source = wide[:, 2 : 2 + count]
            for _ in range(2):
                kernels.scatter_add_kernel[(ctas,)](
                    addresses, source, source.stride(0), count, rows, offset, first, element=element, BLOCK=64
                )
            for target, row in zip(targets, source, strict=True):
                expected = torch.ones_like(target)
                expected[offset : offset + count] += 2 * row.to(dtype)
                assert torch.equal(target, expected), (dtype, source_dtype, rows, count, target, expected)
print("all sums are right")
"""


def test_scatter_add_kernel() -> None:
    """Every element is added once, to the right row, whatever the grid; nothing outside is touched."""
    root = Path(__file__).parents[2]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "all sums are right" in run.stdout
