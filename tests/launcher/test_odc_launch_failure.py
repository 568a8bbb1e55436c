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
    primary,
    read_error_record,
)
from odc_launcher.report import brief, log_tail, ranges, report, stack


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


def test_report_names_rank_host_cause_log_and_in_one_line_what_followed(tmp_path: Path) -> None:
    log = tmp_path / "rank1.log"
    log.write_bytes(b"".join(b"line %d\n" % n for n in range(100)))
    ends = [
        end(0, 1, 1.0, record=record(secondary=True)),
        RankEnd(1, "n1", 3, 2.0, str(log), record()),
        end(2, -15, 3.0, ended_by_launcher=True),
        end(3, 0, 3.0),
        end(4, 1, 3.0, record=record(secondary=True)),
        end(5, -15, 3.0, stopped_by="SIGTERM"),
        end(6, 1, 3.0),
    ]
    lines = report(ends)
    text = "\n".join(lines)
    assert text.startswith("rank 1 on n1 failed first: exit code 3\n  cause: RuntimeError: boom (step 12)")
    assert str(log) in text
    assert "line 79" not in text
    assert all(f"line {n}\n" in text for n in range(80, 99))
    assert lines[-1] == (
        "  ended because of it: ranks 0, 4; rank 2 (SIGTERM by odc-launch); "
        "rank 5 (SIGTERM; their step was sent SIGTERM); rank 6 (exit code 1)"
    )
    assert brief(ends[1]) == "rank 1 failed (RuntimeError: boom)"


def test_errors_of_their_own_are_grouped_and_few() -> None:
    def own(rank: int, message: str) -> RankEnd:
        return end(rank, 1, 2.0 + rank, record=ErrorRecord("ValueError", message, False, None, 0, rank))

    ends = [own(rank, "no data") for rank in range(8)]
    assert report(ends)[-1] == "  failed as well: ranks 1-7: ValueError: no data"
    lines = report([own(rank, f"sample {rank}") for rank in range(64)])
    assert lines[-2:] == [
        "  failed as well: rank 3: ValueError: sample 3",
        "  failed as well, with errors of their own: ranks 4-63",
    ]


HANGS = ErrorRecord("DeadlineError", "no sign of life from rank 1\nwhere the ranks are:", False, 5.0, 3, 1)
STACK = """\
Thread 0x00007f (most recent call first):
  File "threading.py", line 1 in wait

Current thread 0x00007e (most recent call first):
  File "train.py", line 16 in my_loop
  File "train.py", line 17 in <module>
"""


def test_a_rank_that_hangs_is_named_with_its_stack_not_who_noticed(tmp_path: Path) -> None:
    (tmp_path / "stack-rank1.txt").write_text(STACK)
    (tmp_path / "rank1.log").write_text("reading shard 7\n")
    ends = [
        RankEnd(0, "n1", 124, 5.0, str(tmp_path / "rank0.log"), HANGS),
        RankEnd(1, "n2", -9, 9.0, str(tmp_path / "rank1.log"), None, ended_by_launcher=True),
        end(2, 1, 5.5, record=ErrorRecord("PeerError", "", True, 5.5, 3, 1)),
    ]
    assert report(ends) == [
        "rank 1 on n2 hangs; rank 0 on n1 has given it up: exit code 124",
        "  cause: DeadlineError: no sign of life from rank 1",
        "  where the ranks are:",
        f"  where rank 1 hangs ({tmp_path}/stack-rank1.txt, the innermost call first):",
        '    File "train.py", line 16 in my_loop',
        '    File "train.py", line 17 in <module>',
        f"  last lines of its log {tmp_path}/rank1.log:",
        "    reading shard 7",
        "  ended because of it: ranks 0, 2",
    ]
    assert report(ends[::2])[:2] == ["rank 1" + report(ends)[0][12:], report(ends)[1]]  # it could not tell
    assert brief(ends[0]) == "rank 1 hangs, as rank 0 tells"


def test_a_rank_that_is_gone_without_a_word_is_named_by_those_that_saw_it(tmp_path: Path) -> None:
    died = ErrorRecord("PeerError", "rank 9 (host n2, pid 7) died", True, 5.0, 3, 9)
    lines = report([end(rank, 1, 5.0, record=died) for rank in range(8)])
    assert lines[0] == "rank 9 failed first, without a word of its own; rank 0 on n1 tells: exit code 1"
    assert lines[-1] == "  ended because of it: ranks 0-7"
    killed = report([end(9, -9, 9.0), *(end(rank, 1, 5.0, record=died) for rank in range(8))])
    assert killed[0] == "rank 9 on n1 failed first: SIGKILL"
    assert "  rank 0 saw: rank 9 (host n2, pid 7) died" in killed


def test_launches_of_some_ranks_tell_in_a_line_of_a_failure_elsewhere() -> None:
    """Tasks of the user's own srun: the launch that started the culprit tells the rest."""
    follows = ErrorRecord("PeerError", "rank 9 (host n2, pid 7) failed: KeyError: 'x'", True, 5.0, 3, 9)
    ends = [end(rank, 1, 5.0, record=follows) for rank in range(4)]
    assert report(ends, everybody=False) == [
        "ranks 0-3 on n1 ended because of rank 9: rank 9 (host n2, pid 7) failed: KeyError: 'x'; "
        "its log: /none/rank9.log"
    ]
    hangs = end(0, 124, 5.0, record=HANGS)  # who has given up a rank tells all that is known
    assert report([hangs], everybody=False)[0].startswith("rank 1 hangs; rank 0 on n1 has given it up")


def test_stacks_that_are_not_there_or_long(tmp_path: Path) -> None:
    path = tmp_path / "stack-rank0.txt"
    assert stack(str(path)) == []
    path.write_text("nothing\n")
    assert stack(str(path)) == []
    path.write_text("Current thread 0x1 (most recent call first):\n" + '  File "a.py", line 1 in f\n' * 40)
    assert stack(str(path))[-1] == "... 28 more"
    assert len(stack(str(path))) == 13


def test_ranges() -> None:
    assert ranges([3]) == "rank 3"
    assert ranges([5, 0, 1, 2, 7, 8]) == "ranks 0-2, 5, 7-8"


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
