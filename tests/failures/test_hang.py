"""A rank that hangs is named, with what all ranks were doing and their stacks (user case 12)."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from distributed import run_ranks, values
from engine.test_exactness import BY_NAME
from engine.toy import config_for, loss_of, make_model, micro_batches
from programs import run_program

import odcengine
from odcengine._hang import DEADLINE_EXIT_CODE, RankState, ranges, report

ROOT = Path(__file__).resolve().parents[2]

TRAIN = """
import os, time
import torch
import odcengine

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
engine, *_ = odcengine.initialize(model=model)

def sleep_for_ever():
    time.sleep(10_000)

for step in range(3):
    if step == 1:  # a short limit from here on: before, all must come along on any machine
        engine._control.timeout_s = float(os.environ["LIMIT_S"])
    for micro_batch in range(3):
        loss = engine(torch.ones(2, 4)).sum()
        if os.environ["RANK"] == "1" and (step, micro_batch) == (1, 1):
            sleep_for_ever()
        engine.backward(loss, count=2)
    engine.step()
"""
LIMIT_S = 4


def test_hanging_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "launch": {"nproc_per_node": 4, "grace_s": 5, "log_dir": "logs"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["-m", "odc_launcher", "--oversubscribe", "--config", "config.json", "train.py"]
    done = run_program(*words, folder=tmp_path, LIMIT_S=str(LIMIT_S))
    told = done.stderr
    assert done.returncode == DEADLINE_EXIT_CODE, told
    assert re.search(r"cause: DeadlineError: no sign of life for 4 s .* from rank 1 ", told), told
    assert re.search(r"rank 1: step 1, micro-batch 1, the user's code .*<- the odd one\n", told), told
    assert re.search(r"ranks 0, 2-3: step 1, the barrier at the minibatch's end, waiting for rank 1", told), (
        told
    )
    silent = re.search(r"rank 1: step 1.* no progress for ([\d.]+) s", told)
    assert silent is not None
    assert LIMIT_S <= float(silent.group(1)) <= LIMIT_S + 20
    for rank in range(4):
        stack = (tmp_path / "logs" / f"stack-rank{rank}.txt").read_text()
        assert ("sleep_for_ever" in stack) == (rank == 1), stack
        assert "train.py" in stack, rank


def test_a_run_that_goes_well_leaves_no_stack_files(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN.replace('== "1"', '== "none"'))
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "launch": {"nproc_per_node": 2, "log_dir": "logs"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["-m", "odc_launcher", "--config", "config.json", "train.py"]
    done = run_program(*words, folder=tmp_path, LIMIT_S=str(LIMIT_S))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank0.log", "rank1.log"]


def test_report() -> None:
    states = [
        RankState(0, "step 4, the barrier at the minibatch's end", 2, 5.04),
        RankState(1, "step 4, the barrier at the minibatch's end", 2, 5.01),
        RankState(2, "step 4, micro-batch 1, forward", None, 5.1),
        RankState(3, "step 4, micro-batch 7, backward", None, 0.2),
    ]
    assert report(states, [2], 4).splitlines() == [
        "where the ranks are:",
        "  rank 2: step 4, micro-batch 1, forward, no progress for 5.1 s   <- the odd one",
        "  ranks 0-1: step 4, the barrier at the minibatch's end, waiting for rank 2, no progress for 5.0 s",
        "  rank 3: step 4, micro-batch 7, backward, no progress for 0.2 s",
        "  4 ranks of other nodes: see the reports there",
    ]


def test_ranges() -> None:
    assert ranges([3, 0, 1, 2, 5, 7, 8]) == "0-3, 5, 7-8"
    assert ranges([4]) == "4"


def _compiles_for_long(rank: int, world_size: int, slow_step: int) -> int:
    from odcengine.models import compiled

    compiled.compile_blocks = lambda blocks: None  # what compiling takes is a sleep here
    case = BY_NAME["untied"]
    config = config_for(case, timeout_s=4, startup_timeout_s=120)
    config["model"] = {"compile": True}
    engine, _, _, _ = odcengine.initialize(model=make_model(case), config=config)
    with engine:
        for step in range(2):
            for micro_batch in micro_batches(case.name, 1, world_size, equal=True)[rank]:
                loss, count = loss_of(engine, micro_batch)
                if rank == 1 and step == slow_step:
                    _sleep(engine, 6.0 if step == 0 else 100.0)
                engine.backward(loss, count=count)
            engine.step()
    return engine.global_steps


def _sleep(engine: odcengine.OdcEngine, seconds: float) -> None:
    """Without a sign of life, until another rank gives up."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        engine._control.check()
        time.sleep(0.05)


def test_compiling_has_the_limit_of_the_start() -> None:
    assert values(run_ranks(_compiles_for_long, 2, 0)) == [2, 2]
    results = run_ranks(_compiles_for_long, 2, 1)
    assert results[0].error_type == "DeadlineError", results
