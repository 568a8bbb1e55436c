"""The rules of a directory of checkpoints: which one is taken, what is removed, who may write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from odcengine.checkpoint import directory
from odcengine.checkpoint.directory import Mark, find
from odcengine.checkpoint.writer import Writer
from odcengine.errors import CheckpointError


def write(root: Path, step: int, *, automatic: bool = True, tag: str | None = None) -> Path:
    """A complete checkpoint without tensors."""
    tag = tag or directory.tag_of(step)
    folder = directory.temporary(root, tag, f"{step:08x}")
    folder.mkdir(parents=True)
    files = {}
    for name in (directory.STATE, directory.METADATA):
        (folder / name).write_bytes(b"{}")
        files[name] = (2, directory.sha256(b"{}"))
    mark = Mark(tag, step, 1, directory.next_serial(root), automatic, files)
    return directory.complete(folder, root, mark, f"{step:08x}")


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_takes_a_complete_one_and_says_why_not_the_newer(tmp_path: Path) -> None:
    """USER_CASES 11: step_100 is complete, step_200 has no mark although ``latest`` names it."""
    write(tmp_path, 100)
    (tmp_path / "step_200").mkdir()
    (tmp_path / "step_200" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / directory.LATEST).write_text("step_200\n")
    found = find(tmp_path)
    assert found.path == tmp_path / "step_100"
    (note,) = found.notes
    assert "step_200 has no completion mark" in note
    assert "although latest names it" in note


@pytest.mark.parametrize(
    ("latest", "taken", "note"),
    [
        ("step_3\n", "step_3", "step_9 is damaged: state.json has 1 bytes instead of 2"),
        ("step_5\n", "step_5", "step_9 is damaged"),
        ("step_9\n", "step_5", "skipped"),
        ("step_7\n", "step_5", "step_7 does not exist"),
        ("../elsewhere\n", "step_5", "does not name a checkpoint"),
        ("", "step_5", "does not name a checkpoint"),
        (None, "step_5", "skipped"),
    ],
)
def test_latest_counts_if_it_names_a_complete_one(
    tmp_path: Path, latest: str | None, taken: str, note: str
) -> None:
    for step in (3, 5, 9):
        write(tmp_path, step)
    (tmp_path / "step_9" / directory.STATE).write_bytes(b"{")
    if latest is None:
        (tmp_path / directory.LATEST).unlink()
    else:
        (tmp_path / directory.LATEST).write_text(latest)
    found = find(tmp_path)
    assert found.path == tmp_path / taken
    assert note in " ".join(found.notes)


def test_going_back_by_hand(tmp_path: Path) -> None:
    for step in (3, 5):
        write(tmp_path, step)
    (tmp_path / directory.LATEST).write_text("step_3")
    found = find(tmp_path)
    assert found.path == tmp_path / "step_3"
    assert "step_5 is complete, too, but latest names step_3" in found.notes[0]


def test_nothing_there(tmp_path: Path) -> None:
    assert find(tmp_path / "missing").path is None
    assert find(tmp_path).path is None
    (tmp_path / directory.LATEST).write_text("step_3")
    with pytest.raises(CheckpointError, match="no complete checkpoint, although latest names 'step_3'"):
        find(tmp_path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    record = json.loads((path / directory.MARK).read_text())
    (path / directory.MARK).write_text(
        json.dumps({**record, "format": 99})
    )  # its checksum may be made so, too
    with pytest.raises(CheckpointError, match="format 99 is newer"):
        directory.read_mark(path)


def test_replacing_one_of_the_same_name(tmp_path: Path) -> None:
    write(tmp_path, 3, tag="best")
    write(tmp_path, 8, tag="best")
    assert names(tmp_path) == ["best", directory.LATEST]
    assert directory.read_mark(tmp_path / "best").step == 8


def test_what_killed_runs_leave(tmp_path: Path) -> None:
    write(tmp_path, 3)
    (tmp_path / ".step_4.0123abcd.new").mkdir()
    (tmp_path / ".step_2.0123abcd.gone").mkdir()
    os.rename(tmp_path / "step_3", tmp_path / ".step_3.0123abcd.old")  # killed between two renames
    notes = directory.clean(tmp_path)
    assert names(tmp_path) == [directory.LATEST, "step_3"]
    assert directory.read_mark(tmp_path / "step_3").step == 3
    assert len(notes) == 2


def test_retention(tmp_path: Path) -> None:
    write(tmp_path, 1, automatic=False)
    write(tmp_path, 2, automatic=False, tag="best")
    for step in range(10, 70, 10):
        write(tmp_path, step)
    removed = directory.thin_out(tmp_path, 2, 20, "0123abcd")
    assert removed == ["step_30", "step_10"]
    assert names(tmp_path) == sorted(
        ["best", "step_1", "step_20", "step_40", "step_50", "step_60", directory.LATEST]
    )
    assert directory.thin_out(tmp_path, None, None, "0123abcd") == []


def test_retention_after_going_back(tmp_path: Path) -> None:
    """The order of writing counts, not that of steps: what was just written is never removed."""
    for step in (10, 20, 30):
        write(tmp_path, step)
    write(tmp_path, 15)
    assert directory.thin_out(tmp_path, 2, None, "0123abcd") == ["step_20", "step_10"]
    assert find(tmp_path).path == tmp_path / "step_15"


@pytest.mark.parametrize("tag", ["", "..", "a/b", "latest", ".hidden", "x" * 200, "a b"])
def test_tags(tag: str) -> None:
    with pytest.raises(CheckpointError, match="checkpoint tag"):
        directory.check_tag(tag)


# ---- who writes ----------------------------------------------------------------------------------------


def test_two_runs_in_one_directory(tmp_path: Path) -> None:
    first = Writer(tmp_path)
    with pytest.raises(CheckpointError, match=f"another run writes its checkpoints here .*pid {os.getpid()}"):
        Writer(tmp_path)
    first.check()
    first.close()
    Writer(tmp_path).close()
    assert names(tmp_path) == []


def test_a_dead_run_of_this_machine_is_replaced_at_once(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from odcengine.checkpoint.writer import Writer; "
        "Writer(Path(sys.argv[1])); os._exit(0)"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=root, timeout=200)
    assert names(tmp_path) == [".writer"]
    beats: list[int] = []
    Writer(tmp_path, beat=lambda: beats.append(1)).close()
    assert not beats  # it did not wait for a sign of life


def _of_another_machine(root: Path) -> None:
    record = json.loads((root / ".writer").read_text())
    (root / ".writer").write_text(json.dumps({**record, "token": "other", "processes_of": "elsewhere"}))


def test_a_silent_run_of_another_machine_is_replaced(tmp_path: Path) -> None:
    first = Writer(tmp_path, beat_s=60)
    _of_another_machine(tmp_path)
    beats: list[int] = []
    second = Writer(tmp_path, quiet_s=0.3, beat=lambda: beats.append(1))
    assert beats
    second.check()
    with pytest.raises(CheckpointError, match="taken for dead"):
        first.check()
    first._stop.set()
    second.close()


def test_a_run_of_another_machine_that_lives(tmp_path: Path) -> None:
    first = Writer(tmp_path, beat_s=60)
    _of_another_machine(tmp_path)

    def beat() -> None:
        record = json.loads((tmp_path / ".writer").read_text())
        (tmp_path / ".writer").write_text(json.dumps({**record, "beats": record["beats"] + 1}))

    with pytest.raises(CheckpointError, match="another run writes"):
        Writer(tmp_path, quiet_s=5, beat=beat)
    first._stop.set()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"cannot be written to .*file/x: Not a directory"):
        directory.make_root(tmp_path / "file" / "x")
