"""What the ranks of ``odc selftest`` run, started by odc-launch: ``python -m`` this module TASK SPEC.

SPEC is a JSON object; every rank writes its result as ``result<RANK>.json`` into the folder it names.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

import odcengine
from odc_tools._stress import Stress, count_lost_updates, run_stress
from odcengine.control import ControlBlock
from odcengine.ranks import read_rank_info
from odcengine.topology import Topology
from odcengine.transport.base import Grid, WindowPlan, WindowSpec
from odcengine.transport.shm import ShmTransport


def transport_task(rank: int, world_size: int, spec: dict[str, Any]) -> dict[str, Any]:
    """Random operations; then, where asked for, how many additions get lost without locks."""
    nodes = tuple(tuple(ranks) for ranks in spec["nodes"])
    topology = Topology(rank, ("localhost",) * world_size, ("machine",) * world_size, nodes)

    def open_block(number: int) -> ControlBlock:
        token = f"{spec['token']}-{number}"
        return ControlBlock(topology, token=token, timeout_s=60.0, startup_timeout_s=120.0)

    control = open_block(0)
    transport = ShmTransport(control, Grid.of(topology))
    result = asdict(run_stress(transport, Stress(spec["seed"], spec["epochs"], spec["operations"])))
    transport.close()
    control.close()
    if spec["hot_rounds"]:
        control = open_block(1)
        transport = ShmTransport(control, Grid.of(topology))
        plan = WindowPlan.of([WindowSpec("hot", (topology.num_nodes, 4096), torch.float32)])
        (window,) = transport.allocate(plan)
        locked, unlocked = count_lost_updates(transport, window, spec["hot_rounds"])
        result |= {"lost_with_locks": locked, "lost_without_locks": unlocked}
        del window
        transport.close()
        control.close()
    return result


def minibatch_task(rank: int, world_size: int, spec: dict[str, Any]) -> dict[str, Any]:
    """Minibatches of a tiny model on several engines, one after the other, and what the process holds."""
    engines, steps = spec["engines"], -(-spec["minibatches"] // spec["engines"])
    held, micro_batches, losses = [], 0, []
    for number in range(engines):
        engine = _engine(spec, number)
        for step in range(steps):
            dice = np.random.default_rng([spec["seed"], number, step, rank])
            for _ in range(dice.integers(0, 6)):
                _micro_batch(engine)
                micro_batches += 1
            losses.append(engine.step().loss)
            if step == steps // 4:
                held.append(_held() | {"at": f"engine {number}, warm"})
        held.append(_held() | {"at": f"engine {number}, end"})
        engine.close()
        del engine
        held.append(_held() | {"at": f"engine {number}, closed"})
    finite = [loss for loss in losses if math.isfinite(loss)]  # nan: no rank had a micro-batch
    return {
        "minibatches": engines * steps,
        "micro_batches": micro_batches,
        "held": held,
        "first_loss": finite[0],
        "last_loss": finite[-1],
    }


def train_task(rank: int, world_size: int, spec: dict[str, Any]) -> dict[str, Any]:
    """Train until something happens; SIGUSR1 makes this rank raise where it is."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise RuntimeError("raised on request")

    signal.signal(signal.SIGUSR1, fail)
    engine = _engine(spec, 0)
    Path(spec["folder"], f"training{rank}").touch()
    dice = np.random.default_rng([spec["seed"], rank])
    while True:
        for _ in range(dice.integers(0, 6)):
            _micro_batch(engine)
        engine.step()


def _engine(spec: dict[str, Any], number: int) -> odcengine.OdcEngine:
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 8))
    config = {
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "steps_per_print": 0,
        "odc": {
            "transport": "shm",
            "wrap": ["Linear"],
            "timeout_s": spec["timeout_s"],
            "startup_timeout_s": 120,
        },
    }
    engine, *_ = odcengine.initialize(config=config, model=model)
    return engine


def _micro_batch(engine: odcengine.OdcEngine) -> None:
    inputs = torch.randn(4, 24)
    engine.backward((engine(inputs) - inputs[:, :8]).square().sum(), count=4)


def _held() -> dict[str, Any]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "rss_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "fds": len(os.listdir("/proc/self/fd")),
        "shared_mappings": sum("odc-" in line for line in maps),
        "threads": len(os.listdir("/proc/self/task")),
    }


_TASKS = {"transport": transport_task, "minibatches": minibatch_task, "train": train_task}


def main() -> None:
    """Run the task of the command line."""
    task, spec = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    info, start = read_rank_info(), time.perf_counter()
    result = _TASKS[task](info.rank, info.world_size, spec)
    result["wall_s"] = time.perf_counter() - start
    Path(spec["folder"], f"result{info.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
