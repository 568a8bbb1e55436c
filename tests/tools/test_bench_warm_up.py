"""Which steps of ``odc bench training`` count as warming up."""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace
from typing import Any

import pytest
from odc_tools.bench import training


def _measured(
    monkeypatch: pytest.MonkeyPatch, compiled: list[bool], left_s: float
) -> tuple[list[int], list[str]]:
    """Rounds of the steps and the notes, where the first, second ... run of a minibatch compiles blocks."""
    run = training._Run.__new__(training._Run)
    run._options = argparse.Namespace(rounds=1, workload="grpo", budget_s=100.0, json="")
    run._ranks = SimpleNamespace(of_first=lambda value: value, say=lambda text: None)  # type: ignore[assignment]
    run._minibatches = [SimpleNamespace()]  # type: ignore[list-item]
    run._until_s = time.perf_counter() + left_s
    steps: list[dict[str, Any]] = []
    run._record = {"steps": steps, "notes": []}
    outcomes = iter(compiled)

    def run_all(methods: Any, minibatch: Any, number: int, shift: int, round_: int) -> None:
        for method, graphs in (("fsdp2/lb_micro", 0), ("odc/dynamic", int(next(outcomes)))):
            steps.append({"round": round_, "minibatch": number, "method": method, "compiled": graphs})

    monkeypatch.setattr(run, "_run_all", run_all)
    monkeypatch.setattr(training.bench, "write", lambda *_: None)
    run._measure([], [1.0])
    return [step["round"] for step in steps], run._record["notes"]


def test_a_measurement_in_which_blocks_are_compiled_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _measured(monkeypatch, [False], 100.0) == ([0, 0], [])
    rounds, (note,) = _measured(monkeypatch, [True, False], 100.0)
    assert rounds == [-1, -1, 0, 0]
    assert "odc/dynamic compiled blocks in a measurement of minibatch 0, which is repeated" in note


def test_once_and_only_where_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, (note,) = _measured(monkeypatch, [True], 0.5)
    assert rounds == [0, 0]
    assert "no time to repeat it" in note
    rounds, notes = _measured(monkeypatch, [True, True], 100.0)
    assert rounds == [-1, -1, 0, 0]
    assert len(notes) == 2
