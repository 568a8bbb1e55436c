"""Which failure is named first, and how."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from odc_launcher.failure import (
    ErrorRecord,
    RankEnd,
    describe,
    exit_code,
    log_tail,
    primary,
    read_error_record,
    report,
)


def end(rank: int, returncode: int, time: float, **more: object) -> RankEnd:
    return RankEnd(rank, "n1", returncode, time, f"/none/rank{rank}.log", **more)  # type: ignore[arg-type]


def record(secondary: bool = False, time: float | None = None) -> ErrorRecord:
    return ErrorRecord("RuntimeError", "boom", secondary, time, 12)


def test_the_earliest_failure_that_follows_no_other_is_first() -> None:
    assert primary([end(0, 0, 1.0)]) is None
    assert primary([end(0, 1, 2.0), end(1, 3, 1.0), end(2, 0, 0.5)]).rank == 1  # type: ignore[union-attr]
    follower = end(0, 1, 1.0, record=record(secondary=True))
    culprit = end(1, -11, 5.0)
    assert primary([follower, culprit]) is culprit
    killed = end(2, -9, 0.5, ended_by_launcher=True)
    assert primary([killed, follower]) is follower
    assert primary([killed]) is killed


def test_a_ranks_own_time_of_failure_counts() -> None:
    slow_to_leave = end(0, 1, 9.0, record=record(time=3.0))
    quick = end(1, 1, 4.0)
    assert primary([quick, slow_to_leave]) is slow_to_leave
    wrong_clock = end(0, 1, 9.0, record=record(time=1e12))
    assert primary([quick, wrong_clock]) is quick


@pytest.mark.parametrize(("returncode", "code"), [(0, 0), (3, 3), (-9, 137), (-15, 143)])
def test_exit_codes(returncode: int, code: int) -> None:
    assert exit_code(returncode) == code


def test_signals_have_names() -> None:
    assert describe(-11) == "SIGSEGV"
    assert describe(-(signal.SIGRTMIN + 2)) == f"signal {signal.SIGRTMIN + 2}"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "[" * 100_000, "\ufffd"])
def test_broken_error_files_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "e.json"
    path.write_text(text)
    assert read_error_record(str(path)) is None
    assert read_error_record(str(tmp_path / "missing")) is None


def test_error_files_with_odd_fields(tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    path.write_text(json.dumps({"time": "noon", "step": None, "secondary": "yes", "message": 3}))
    assert read_error_record(str(path)) == ErrorRecord("error", "3", False, None, None)


def test_report_names_rank_host_cause_log_and_followers(tmp_path: Path) -> None:
    log = tmp_path / "rank1.log"
    log.write_bytes(b"".join(b"line %d\n" % n for n in range(100)))
    ends = [
        end(0, 1, 1.0, record=record(secondary=True)),
        RankEnd(1, "n1", 3, 2.0, str(log), record()),
        end(2, -15, 3.0, ended_by_launcher=True),
        end(3, 0, 3.0),
    ]
    text = "\n".join(report(ends))
    assert text.startswith("rank 1 on n1 failed first: exit code 3\n  cause: RuntimeError: boom (step 12)")
    assert str(log) in text
    assert "line 79" not in text
    assert all(f"line {n}\n" in text for n in range(80, 99))
    assert "rank 0 exit code 1 (because of another rank, RuntimeError: boom)" in text
    assert "rank 2 SIGTERM (ended by odc-launch)" in text
    assert "rank 3" not in text


def test_report_after_a_signal_that_was_passed_on_is_short() -> None:
    assert report([end(0, -2, 1.0)], signal.SIGINT) == [
        "rank 0 on n1 failed first after SIGINT was passed on: SIGINT",
        "  log: /none/rank0.log",
    ]


def test_log_tail_of_odd_logs(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"bar 1%\rbar 2%\rbar 100%\r\n\xff\xfe bytes\nno end")
    assert log_tail(str(path)) == ["bar 100%", "\ufffd\ufffd bytes", "no end"]
    path.write_bytes(b"y" * 5_000_000)
    (line,) = log_tail(str(path))
    assert len(line) < 2000
    path.write_bytes(b"")
    assert log_tail(str(path)) == []
    assert "cannot be read" in log_tail(str(tmp_path / "missing"))[0]
