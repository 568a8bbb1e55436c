"""``benchmarks/gpu/run.py``: what it would run on GPUs is right, as far as that can be told without any."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from odc_tools import bench
from scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "run.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT, "gpu_run")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=300, check=False
    )


def test_every_command_is_one(tmp_path: Path) -> None:
    """Options of benchmarks are accepted, scripts and tests are there, results are read where written."""
    listed = run("--list", "--out", str(tmp_path), "--commit", "abc")
    assert listed.returncode == 0, listed.stderr
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    written, budgets = set(), {}
    for line in listed.stdout.splitlines():
        part, _, text = line.partition(": ")
        words = shlex.split(text)[1:]
        if words[:3] == ["-m", "odc_tools", "bench"]:
            options = parser.parse_args(words[3:])
            bench.check_options(options)
            assert options.json not in written
            assert options.commit == "abc"
            written.add(options.json)
            budgets[part] = budgets.get(part, 0.0) + getattr(options, "budget_s", 0.0)
        elif words[:2] == ["-m", "pytest"]:
            paths = [word for word in words if word.startswith("tests/")]
            assert paths
            assert all((ROOT / path).exists() for path in paths), paths
        else:
            scripts = [word for word in words if word.startswith("benchmarks/")]
            assert scripts or words == ["-m", "odc_launcher", "doctor"]
            assert all((ROOT / name).is_file() for name in scripts)
            reads = {word for word in words if word.endswith(".json")}
            assert reads <= written
    assert set(budgets) >= {"equal", "unequal", "rl", "deepspeed"}
    assert all(budget < 540 for budget in budgets.values()), budgets


def test_all_tests_for_several_gpus_are_in_a_part(script: ModuleType) -> None:
    paths = [
        ROOT / word
        for part in ("tests", "more-tests")
        for command in script.PARTS[part]
        for word in command.words.split()
        if word.startswith("tests/")
    ]
    for file in (ROOT / "tests").rglob("test_*.py"):
        text = file.read_text(encoding="utf-8")
        if "mark.multi_gpu" in text or "mark.gpu" in text:
            assert any(path == file or path in file.parents for path in paths), file


def test_a_command_that_fails_or_takes_too_long_does_not_stop_the_others(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = tmp_path / "pid"
    source = (
        "import json, subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; "
        f"time.sleep(600)']); open({str(started)!r}, 'w').write(json.dumps(child.pid)); time.sleep(600)"
    )
    commands = (
        script.Command("bad", "-c 'raise SystemExit(3)'"),
        script.Command("slow", f"-c {shlex.quote(source)}", weight=2),
        script.Command("good", "-c 'print(1); print(2); print(3)'", lines=2),
    )
    script.PARTS = {"part": commands}
    options = argparse.Namespace(shape="tiny", commit=None, limit_s=20.0, together=False)
    assert script.run_part("part", options, tmp_path) == 2
    shown = capsys.readouterr().out
    assert "== bad: exit code 3" in shown
    assert "== slow: ended after 10 s" in shown
    assert "== good: exit code 0" in shown
    assert shown.endswith("\n2\n3\n")
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(json.loads(started.read_text())).wait(timeout=60)


def test_what_it_refuses() -> None:
    done = run("tets")
    assert (done.returncode, "no part tets; there are tests, more-tests" in done.stderr) == (2, True)
    done = run("equal", "--together")
    assert (done.returncode, "--together: only for tests" in done.stderr) == (2, True)
