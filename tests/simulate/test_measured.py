"""Costs from the monitor's JSON lines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odcengine.balance import CostModel, make_plan
from odcengine.errors import ConfigError
from odcengine.metrics import StepMetrics
from odcengine.monitor.monitor import _facts
from odcengine.monitor.writers import JsonLines
from odcengine.simulate import Machine, MeasuredRun, simulate

SHAPE = CostModel(linear=6e9, quadratic=2e5)
TRUE = CostModel(linear=6e9 / 2e14, quadratic=2e5 / 2e14, per_micro_batch=0.05)


def write_run(path: Path, *, steps: int = 40, noise: float = 0.02) -> list[int]:
    """A run of 4 ranks as the monitor writes it; returns the lengths of its sequences."""
    dice = np.random.Generator(np.random.PCG64(3))
    machine = Machine(TRUE, boundary_s=0.125, noise=noise)
    used: list[int] = []
    with path.open("w") as file:
        for step in range(steps):
            lengths = np.clip(dice.lognormal(8, 0.8, 32), 16, 16384).astype(int).tolist()
            used += lengths
            plan = make_plan(lengths, num_ranks=4, strategy="lb_mini", max_tokens=16384, cost=TRUE)
            outcome = simulate(plan, machine, communication="on_demand", seed=step)
            slow = 3.0 if step < 2 or step == 20 else 1.0  # warm-up, and something else on the machine
            facts: dict[str, Any] = {
                "step": step,
                "num_micro_batches": sum(map(len, plan.micro_batches)),
                "num_samples": len(lengths),
                "boundary_s": 0.125,
                "step_s": outcome.step_s * slow,
                "busy_s": (outcome.busy_s * slow).tolist(),
                "tokens": [
                    sum(lengths[sample] for group in rank for sample in group) for rank in plan.micro_batches
                ],
            }
            file.write(json.dumps(facts) + "\n")
    return used


def test_costs_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lengths = write_run(path)
    run = MeasuredRun.read(path)
    assert run.num_ranks == 4
    assert len(run.step_s) == 38
    assert run.mean_length == pytest.approx(np.mean(lengths), rel=0.05)
    fit = run.fit(SHAPE, lengths)
    assert fit.boundary_s == 0.125
    assert fit.num_steps == 38
    assert fit.error < 0.08
    assert fit.cost.linear == pytest.approx(TRUE.linear, rel=0.15)
    assert fit.cost.linear / fit.cost.quadratic == pytest.approx(SHAPE.linear / SHAPE.quadratic)
    # What matters is the time of a minibatch of the same kind.
    plan = make_plan(lengths[:32], num_ranks=4, strategy="lb_mini", max_tokens=16384, cost=TRUE)
    truth = simulate(plan, Machine(TRUE), communication="on_demand").step_s
    guess = simulate(plan, Machine(fit.cost), communication="on_demand").step_s
    assert guess == pytest.approx(truth, rel=0.04)


def test_lines_as_the_monitor_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(str(path))
    for step in range(7):
        metrics = StepMetrics(
            step=step,
            loss=math.nan,
            count=90.0,
            grad_norm=1.0,
            applied=True,
            lr=0.1,
            num_micro_batches=5,
            busy_s=(1.0 + step, 2.0),
            wait_s=(1.0, 0.0),
            boundary_s=0.25,
            gather_s=0.0,
            push_s=0.0,
            num_samples=8,
            tokens=(40, 60) if step != 3 else None,
            flops=None,
            load_s=0.0,
        )
        writer.write(_facts(metrics, 0.0, None))
    writer.close()
    run = MeasuredRun.read(path)
    assert run.busy_s.tolist() == [[3.0, 2.0], [5.0, 2.0], [6.0, 2.0], [7.0, 2.0]]  # 0, 1: warm-up
    assert run.tokens.tolist() == [[40.0, 60.0]] * 4
    assert run.step_s.tolist() == [4.25, 6.25, 7.25, 8.25]
    assert run.mean_length == 12.5


def test_a_step_that_was_run_again_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_run(path, steps=10)
    lines = path.read_text().splitlines()
    again = json.loads(lines[5]) | {"step_s": 77.0}
    path.write_text("\n".join([*lines, json.dumps(again)]) + "\n")
    run = MeasuredRun.read(path)
    assert len(run.step_s) == 8
    assert 77.0 in run.step_s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [], "has 0 steps"),
        (lambda lines: lines[:5], "has 5 steps .* 6 are needed"),
        (lambda lines: [*lines, "not json"], "line 11: no step of a run"),
        (lambda lines: [*lines, "[1]"], "line 11"),
        (lambda lines: [*lines, '{"step": 11}'], "line 11"),
        (lambda lines: [lines[0].replace('"busy_s": [', '"busy_s": ["x", '), *lines], "line 1:"),
        (lambda lines: [lines[0].replace('"tokens": [', '"tokens": [1, '), *lines], "line 1:"),
        (lambda lines: [json.dumps(json.loads(line) | {"tokens": None}) for line in lines], "has 0 steps"),
        (
            lambda lines: [
                *lines[:9],
                json.dumps(json.loads(lines[9]) | {"busy_s": [1.0], "tokens": [1]}),
            ],
            "1 and of 4 ranks",
        ),
    ],
)
def test_files_that_do_not_tell(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write_run(path, steps=10)
    path.write_text("".join(line + "\n" for line in change(path.read_text().splitlines())))
    with pytest.raises(ConfigError, match=message):
        MeasuredRun.read(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.jsonl cannot be read: No such file"):
        MeasuredRun.read(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        MeasuredRun.read(tmp_path)
