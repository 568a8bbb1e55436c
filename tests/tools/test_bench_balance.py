"""``odc bench balance``: planners against the bound and against each other, without torch."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from odc_tools.bench.balance import PLANNERS, Row, goals, karmarkar_karp
from odc_tools.bench.peers import peers_at
from odc_tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--ranks", "2,8", "--samples", "4", "--minibatches", "2", "--repeats", "2"]


def test_measures_every_planner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "balance.json"
    assert main(["bench", "balance", *SMALL, "--json", str(file), "--commit", "abc"]) == 0
    record: dict[str, Any] = json.loads(file.read_text())
    assert (record["task"], record["commit"], record["wrong"]) == ("balance", "abc", [])
    assert set(record["versions"]) == {"odcengine", "python", "numpy"}
    assert len(record["rows"]) == 4 * 2 * len(PLANNERS)
    above = {(row["workload"], row["ranks"], row["planner"]): row for row in record["rows"]}
    for row in record["rows"]:
        assert len(row["above"]) == 2
        assert [len(repeats) for repeats in row["ms"]] == [2, 2]
        assert min(map(min, row["ms"])) > 0
    # What the strategies are for, and that two implementations of a search agree where both had to search.
    swesmith = {planner: above["swesmith", 8, planner]["above"] for planner in PLANNERS}
    assert np.mean(swesmith["lb_mini"]) < 0.005
    assert max(swesmith["lb_mini-plain"]) <= 0.02
    assert np.mean(swesmith["lb_mini"]) < np.mean(swesmith["karmarkar-karp"])
    assert np.mean(swesmith["lb_micro"]) < np.mean(swesmith["local_sort"])
    assert {"size": ["swesmith", 8, 4], "name": "verl", "above": pytest.approx(0.022), "ms": 0.44} in record[
        "peers"
    ]
    told = capsys.readouterr().out
    assert "swesmith 8x4" in told
    assert "lb_mini, swesmith 8x4: % above the bound" in told
    assert f"results: {file}" in told


def test_needs_no_torch(tmp_path: Path) -> None:
    """Nor what starts ranks: it may run on a login node."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    path = os.pathsep.join([str(tmp_path), *(str(ROOT / name) for name in ("", "launcher", "tools"))])
    words = ["bench", "balance", *SMALL, "--workloads", "grpo", "--planners", "lb_mini"]
    done = subprocess.run(
        [sys.executable, "-m", "odc_tools", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "bench-balance.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "1,8"], "--ranks [1, 8]: it must be 2 or more"),
        (["--samples", "0"], "--samples [0]: it must be 1 or more"),
        (["--max-tokens", "60000"], "--max-tokens 60000: sequences of longalign have up to 65536 tokens"),
        (["--repeats", "0"], "--repeats 0"),
        (["--json", "no/such/folder.json"], "there is no folder"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "balance", *words]) == 2
    assert message in capsys.readouterr().err


def test_wrong_plans_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(lengths: list[int], num_ranks: int, max_tokens: int) -> Any:
        plan = PLANNERS["lb_mini"](lengths, num_ranks, max_tokens)[1]
        assert plan is not None
        return plan.bound, plan.__class__(**{**vars(plan), "micro_batches": plan.micro_batches[1:]})

    monkeypatch.setitem(PLANNERS, "local_sort", forgetful)
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "--workloads", "grpo", "--planners", "local_sort"]
    assert main(["bench", "balance", *words]) == 1
    record = json.loads(Path("bench-balance.json").read_text())
    assert "a sequence is missing" in record["wrong"][0]


def test_differencing() -> None:
    """The classic case: 8 7 6 5 4 on two ranks gives 16 and 14, not the 15 and 15 there are."""
    assert karmarkar_karp([8.0, 7.0, 6.0, 5.0, 4.0], 2) == 16.0
    assert karmarkar_karp([3.0], 2) == 3.0


def test_goals_are_those_of_the_issue() -> None:
    rows = [
        Row("swesmith", 1024, 16, "lb_mini", 0.0, [0.0009], [[30.0, 24.0]]),
        Row("swesmith", 32, 4, "lb_mini", 0.0, [0.0016, 0.0012], [[1.0]]),
        Row("swesmith", 1024, 16, "lb_mini-plain", 0.0, [0.0051], [[29.0]]),
        Row("grpo", 32, 4, "lb_mini", 0.0, [0.5], [[1.0]]),
        Row("swesmith", 1024, 16, "lb_micro", 0.0, [0.5], [[1.0]]),
    ]
    found = [(verdict.value, verdict.target, verdict.met) for verdict in goals(rows)]
    assert found == [
        (pytest.approx(0.09), 0.1, True),
        (24.0, 25.0, True),
        (pytest.approx(0.14), 0.15, True),
        (pytest.approx(0.51), 0.5, False),
        (29.0, 30.0, True),
    ]


def test_peers() -> None:
    verl, sail = peers_at("longalign", 1024, 16)
    assert (verl.name, verl.above, verl.ms) == ("verl", pytest.approx(0.003), 22800.0)
    assert (sail.name, sail.above, sail.ms) == ("sail-sg", None, None)
    assert peers_at("longalign", 64, 4) == peers_at("longalign", 8, 5) == []


def test_options() -> None:
    from odc_tools.bench import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(["balance"])
    assert options.ranks == [8, 32, 128, 1024]
    assert options.workloads == ["longalign", "swesmith", "grpo", "sharegpt"]
