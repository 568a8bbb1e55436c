"""The kernels that add into peers' memory, under Triton's interpreter on the CPU."""

from __future__ import annotations

import math
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

BULK_PROGRAM = """
import torch
from triton.runtime.interpreter import InterpreterBuilder
from odcengine.transport import _kernels as kernels

rows_of_program = {}


def add(builder, kind, lines, value, indices):  # which the interpreter does not have
    base = int(lines.base.data[0])
    rows_of_program.setdefault(builder.grid_idx[0], []).append(base)
    old = builder.create_descriptor_load(lines, indices, None)
    old.data = old.data + value.data
    builder.create_descriptor_store(lines, old, indices)


InterpreterBuilder.create_descriptor_reduce = add
generator = torch.Generator().manual_seed(0)
WIDTH, HEIGHT = 16, 4
CASES = ((2, 1000, 31, 1), (3, 16 * 4 * 9, 7, 2), (8, 16 * 41 + 8, 31, 5), (1, 999, 2, 0))
for rows, count, ctas, first in CASES:
    targets = [torch.ones(count + 5) for _ in range(rows)]
    lines = [target[: count // WIDTH * WIDTH].view(-1, WIDTH) for target in targets]
    described = [kernels.TensorDescriptor.from_tensor(matrix, [HEIGHT, WIDTH]) for matrix in lines]
    described += [None] * (kernels.MAX_BULK_ROWS - rows)
    addresses = torch.tensor([target.data_ptr() for target in targets])
    source = torch.randint(-8, 8, (rows, count), generator=generator).bfloat16()
    rows_of_program.clear()
    for _ in range(2):
        kernels.bulk_add_kernel[(ctas,)](*described, addresses, source, count, first, rows, WIDTH, HEIGHT)
    for target, row in zip(targets, source, strict=True):
        assert torch.equal(target[:count], 1 + 2 * row.float()), (rows, count, ctas)
        assert torch.equal(target[count:], torch.ones(5)), (rows, count, ctas)
    for visited in rows_of_program.values():  # none adds to one owner again before it has come to the others
        assert len(set(visited[:rows])) == min(rows, len(visited) // 2), (rows, ctas, visited)
print("all sums are right")
"""


def _interpret(program: str) -> None:
    root = Path(__file__).parents[2]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "all sums are right" in run.stdout


def test_scatter_add_kernel() -> None:
    """Every element is added once, to the right row, whatever the grid; nothing outside is touched."""
    _interpret(PROGRAM)


def test_bulk_add_kernel() -> None:
    """The same; and where programs and rows have no common divisor, each program comes to all rows."""
    _interpret(BULK_PROGRAM)


def test_programs_of_pushes_come_to_all_owners() -> None:
    from odcengine.transport import _kernels, cuda_p2p

    for owners in range(2, _kernels.MAX_BULK_ROWS + 1):
        assert math.gcd(cuda_p2p._BULK_CTAS, owners) == math.gcd(cuda_p2p._PUSH_CTAS, owners) == 1
