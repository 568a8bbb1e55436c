"""``benchmarks/fidelity/run.py``: what its verdict is, and that its configurations are right."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scripts import load_script

from odcengine.config import load_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(ROOT / "benchmarks" / "fidelity" / "run.py", "fidelity_run")


def _report(script: ModuleType, off: dict[str, float]) -> dict[str, Any]:
    """Of three seeds that are 0.1 apart, with methods that are off by so much."""
    steps = np.arange(40)
    runs = {
        (name, seed): {"loss": list(5 - 0.05 * steps + 0.1 * seed + off.get(name, 0.0)), "wall_s": 1.0}
        for name in script.METHODS
        for seed in range(3)
    }
    options = argparse.Namespace(task="sft", seeds=3, minibatches=40, bf16=False)
    report: dict[str, Any] = script.compare(runs, options)
    return report


def test_verdict(script: ModuleType) -> None:
    equal = _report(script, {})
    assert equal["within_seed_noise"]
    assert equal["between_seeds"] == pytest.approx([0.1, 0.2, 0.1])
    near = _report(script, {"on demand, lb_mini": 0.05})
    assert near["within_seed_noise"]
    assert near["methods"]["on demand, lb_mini"]["from_collectives"] == pytest.approx([0.05] * 3)
    assert near["methods"]["on demand, dynamic"]["equal_at_first"] == [40] * 3
    assert not _report(script, {"on demand, dynamic": 0.3})["within_seed_noise"]
    text = "\n".join(script.table(near))
    assert "| on demand, lb_mini | 0.05 to 0.05 | 0 to 0 |" in text
    assert "CPU, loss" in text


@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_configurations(script: ModuleType, task: str) -> None:
    base = script.SFT if task == "sft" else load_config(ROOT / "configs" / "grpo_cpu.yaml").resolved()
    for method in script.METHODS.values():
        config = load_config(script.merged(base, method, {"bf16": {"enabled": True}}))
        assert config.balance.strategy == method["balance"]["strategy"]
        assert config.odc.transport == method["odc"]["transport"]
