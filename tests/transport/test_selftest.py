"""``odc selftest``: it passes here, and it would not pass with a broken transport."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import RankResult, run_ranks
from odc_tools import selftest
from odc_tools._stress import Stress, run_stress
from odc_tools.cli import main

from odcengine.control import ControlBlock, Meeting
from odcengine.topology import Topology
from odcengine.transport.base import Grid, Window
from odcengine.transport.shm import ShmTransport

ROOT = Path(__file__).resolve().parents[2]


def odc(*words: str, timeout_s: float = 280.0) -> subprocess.CompletedProcess[str]:
    others = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "OMP_", "ODC")
    env = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    env["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in ("", "launcher", "tools"))
    return subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, timeout=timeout_s
    )


def test_small_run_passes(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = ("--operations", "2000", "--minibatches", "6", "--kills", "1", "--seed", "3")
    done = odc("-m", "odc_tools", "selftest", *words, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "passed"
    record = json.loads(file.read_text())
    assert record["passed"] is True
    assert [row["test"] for row in record["rows"]] == ["transport", "minibatches", "failures"]
    assert not any(row["problems"] for row in record["rows"])


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from odc_tools.cli import main\n"
        "try: main(['selftest', '--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = odc("-c", code)
    assert "--soak" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["selftest", "--ranks", "1"], "--ranks 1: it must be 2 or more"),
        (["selftest", "--kills", "-1"], "--kills -1: it must be 0 or more"),
    ],
)
def test_wrong_numbers_are_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["nonsense"], ["selftest", "--operations", "many"]])
def test_wrong_commands_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: odc" in capsys.readouterr().err


# -- what it must find -------------------------------------------------------------------------------------


class _LosesPushes(ShmTransport):
    pushes = 0

    def _add(self, window: Window, peer: int, node: int, source: torch.Tensor, offset: int) -> None:
        self.pushes += 1
        if self.pushes != 200:
            super()._add(window, peer, node, source, offset)


class _NoFlag(ShmTransport):
    def wait_published(self, peer: int, epoch: int) -> float:
        return 0.0


class _NoBarrier(ShmTransport):
    def barrier(self, meeting: Meeting, number: int = 0) -> float:
        return 0.0 if meeting == Meeting.END_OF_STEP else super().barrier(meeting, number)


class _ShiftsPulls(ShmTransport):
    def pull(self, window: Window, peer: int, node: int, out: torch.Tensor, offset: int = 0) -> None:
        super().pull(window, peer, node, out, offset - (offset == 17))


def _stress(rank: int, world: int, token: str, kind: type[ShmTransport]) -> None:
    topology = Topology(rank, ("h",) * world, ("m",) * world, (tuple(range(world)),))
    control = ControlBlock(topology, token=token, timeout_s=20.0, startup_timeout_s=20.0)
    try:
        run_stress(kind(control, Grid.of(topology)), Stress(seed=5, epochs=40, operations=100))
    except BaseException as error:
        control.fail(error)
        raise


def stress(kind: type[ShmTransport]) -> list[RankResult]:
    return run_ranks(_stress, 2, secrets.token_hex(8), kind)


@pytest.mark.parametrize("kind", [_LosesPushes, _NoFlag, _NoBarrier, _ShiftsPulls])
def test_stress_finds_a_broken_transport(kind: type[ShmTransport]) -> None:
    errors = [result.error or "" for result in stress(kind)]
    assert any("AssertionError: seed 5" in error for error in errors), errors


def held(at: str, **changes: int) -> dict[str, Any]:
    usual = {"rss_bytes": 100 << 20, "fds": 10, "shared_mappings": 0 if "closed" in at else 4, "threads": 5}
    return usual | changes | {"at": at}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"rss_bytes": 103 << 20}, None),
        ({"rss_bytes": 105 << 20}, "resident memory grew by 5.0 MiB"),
        ({"fds": 11}, "rank 7, engine 1, end: 11 fds, 10 before"),
        ({"threads": 6}, "rank 7, engine 1, end: 6 threads, 5 before"),
        ({"shared_mappings": 8}, "rank 7, engine 1, end: 8 mappings, not 4"),
    ],
)
def test_growth_is_found(changes: dict[str, int], problem: str | None) -> None:
    places = ("engine 0, warm", "engine 0, end", "engine 0, closed", "engine 1, warm")
    problems: list[str] = []
    selftest._check_growth(7, [*map(held, places), held("engine 1, end", **changes)], problems)
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]


# -- how it ends -------------------------------------------------------------------------------------------


def test_launcher_that_refuses_is_noticed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(selftest, "_GRACE_S", -1.0)  # the launcher refuses that
    start = time.monotonic()
    row = selftest.check_failures([2], 1, 0)
    assert time.monotonic() - start < 50  # else the ranks were waited for
    (problem,) = row.problems
    assert "the launcher ended with exit code 2 before rank" in problem
    assert "odc-launch: error: " in problem
    assert not list(tmp_path.iterdir())


def of_the_test(folder: Path) -> list[int]:
    """Living processes that have the folder as their place for temporary files, or one in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environ = (entry / "environ").read_bytes()
                state = (entry / "stat").read_bytes().rpartition(b") ")[2][:1]
            except OSError:
                continue
            if f"TMPDIR={folder}".encode() in environ and state not in (b"Z", b"X"):
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("RANK", "MASTER_", "ODC"))
    }
    env["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in ("", "launcher", "tools"))
    words = ["selftest", "--operations", "1000000", "--minibatches", "0", "--kills", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "odc_tools", *words],
        env=env | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while len(of_the_test(tmp_path)) < 4:  # it, the launcher and two ranks
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    _, told = process.communicate(timeout=100)
    assert process.returncode == 128 + number
    assert f"ended by {number.name}" in told
    assert "Traceback" not in told
    assert not of_the_test(tmp_path)
    assert not list(tmp_path.iterdir())
