"""A small real job, started as any other: every rank pulls, pushes, steps, and compares with arithmetic.

Argument: the ``odc`` section of the configuration as JSON. Rank 0 prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import nn

import odcengine
from odcengine.ranks import read_rank_info

MARK = "@odc-ranks "
_SIZE = 64  # elements of a row; small integers stay exact in every dtype that is used


class Tiny(nn.Module):
    """Two blocks of one matrix each, and nothing in between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(_SIZE, _SIZE, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([block(x) for block in self.blocks])


def main() -> int:
    """Runs the job; exit code 1 where a number is wrong."""
    odc: dict[str, Any] = json.loads(sys.argv[1])
    info = read_rank_info()
    world_size = info.world_size
    model = Tiny()
    with torch.no_grad():
        for number, block in enumerate(model.blocks):
            block.weight.copy_(_weights(number))  # type: ignore[operator]
    config = {
        "train_batch_size": world_size,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "steps_per_print": 0,
        "odc": odc,
    }
    start = time.monotonic()
    engine, *_ = odcengine.initialize(model=model, config=config)
    device = engine.module.blocks[0].weight.device  # type: ignore[union-attr, index]
    started_s = time.monotonic() - start
    start = time.monotonic()
    with engine:
        x = torch.full((1, _SIZE), float(info.rank + 1), device=device)
        out = engine(x)
        expected = torch.stack([x @ _weights(n).to(device).T for n in range(2)])
        pulled = torch.equal(out.detach().float(), expected)
        engine.backward(out.sum(), count=1)
        engine.step()
        mean = (world_size + 1) / 2  # of the ranks' inputs: the gradient of every weight
        with torch.no_grad():
            after = engine(x).detach().float()
        expected = torch.stack([x @ (_weights(n).to(device) - mean).T for n in range(2)])
        pushed = bool(torch.allclose(after, expected, rtol=1e-5, atol=1e-4))
        topology = engine.transport.control.topology if engine.transport is not None else None
        result = {
            "world_size": world_size,
            "device": device.type,
            "transport": _name_of(engine.transport),
            "num_nodes": 1 if topology is None else topology.num_nodes,
            "pulled": pulled,
            "pushed": pushed,
            "start_s": started_s,
            "step_s": time.monotonic() - start,
        }
    if info.rank == 0:
        print(MARK + json.dumps(result), flush=True)
    return 0 if pulled and pushed else 1


def _name_of(transport: object | None) -> str:
    if transport is None:
        return "none"
    plain = type(transport).__name__.removesuffix("Transport").lower()
    return str(getattr(transport, "name", plain))


def _weights(number: int) -> torch.Tensor:
    rows = torch.arange(_SIZE * _SIZE, dtype=torch.float32).view(_SIZE, _SIZE)
    return rows % 7 + number


if __name__ == "__main__":
    sys.exit(main())
