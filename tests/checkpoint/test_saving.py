"""Saving while training goes on; what fails on one rank is told on all, and the last checkpoint stays."""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks, values

from checkpoint.toy import config_for, make_model, start, steps, train, whole
from odcengine.checkpoint import part, tensors
from odcengine.checkpoint.directory import find, read_latest, read_mark
from odcengine.errors import CheckpointError, UsageError


class _Log(logging.Handler):
    """Keeps what odcengine logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logger = logging.getLogger("odcengine")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _automatic(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    log = _Log()
    engine, loader = start(config_for(folder, every_n_steps=3, keep_last=2, keep_every=6))
    engine.client_state["seen"] = 1
    steps(engine, loader, 16)
    engine.save_checkpoint(tag="best", client_state={"extra": [1, None]}, wait=False)
    at_save = whole(engine)
    steps(engine, loader, 2)
    engine.close()
    return {"lines": log.lines, "best": at_save, "waited": engine._checkpoints.saver.blocked_s}


def _load_best(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    engine, _ = start(config_for(None))
    nothing = engine.load_checkpoint(os.path.join(folder, "nowhere"))
    path, client_state = engine.load_checkpoint(folder, tag="best")
    after = {"nothing": nothing, "path": path, "state": client_state, "best": whole(engine)}
    after["step"] = engine.global_steps
    engine.close()
    return after


def test_saves_by_itself_and_keeps_what_it_should(tmp_path: Path) -> None:
    folder = str(tmp_path / "made" / "here")
    ran = values(run_ranks(_automatic, 2, folder))
    names = sorted(path.name for path in Path(folder).iterdir())
    assert names == ["best", "latest", "step_12", "step_15", "step_18", "step_6"]
    assert read_latest(Path(folder)) == "step_18"
    assert not [line for line in ran[1]["lines"] if "checkpoint" in line]
    saved = [line for line in ran[0]["lines"] if "saved in" in line]
    assert len(saved) == 7
    for loaded in values(run_ranks(_load_best, 3, folder)):
        assert loaded["nothing"] == (None, {})
        assert loaded["path"] == os.path.join(folder, "best")
        assert loaded["state"] == {"seen": 1, "extra": [1, None]}
        assert loaded["step"] == 16
        # What was written is the moment of the save, although training went on.
        for name, value in ran[0]["best"].items():
            assert torch.equal(loaded["best"][name], value), name


def test_the_same_dropout_as_without_interruption(tmp_path: Path) -> None:
    run = functools.partial(train, dropout=0.3, after=4)
    right = values(run_ranks(functools.partial(run, before=3, save=True), 2, str(tmp_path)))
    found = values(run_ranks(run, 2, str(tmp_path)))
    assert found[0]["losses"] == pytest.approx(right[0]["losses"], rel=1e-10)
    other = values(run_ranks(run, 3, str(tmp_path)))  # a rank more: it works, with other numbers
    assert other[0]["samples"] == right[0]["samples"]


# ---- failures ------------------------------------------------------------------------------------------


def _full(rank: int, at: str) -> None:
    """From now on the disk is full for this rank."""
    real = os.write

    def write(fd: int, data: Any) -> int:
        if at in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    tensors.os.write = write  # type: ignore[assignment]


def _unwritable_mark(rank: int) -> None:
    real = part.write_metadata

    def write(*args: Any) -> bytes:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    part.write_metadata = write
    assert real is not write


def _slow(rank: int) -> None:
    real = part.write_chunks

    def write(path: Path, chunks: Any, check: Callable[[], None]) -> Any:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(0.01)
            check()  # raises when the save has been given up
        return real(path, chunks, check)

    part.write_chunks = write


FAULTS: dict[str, tuple[int, Callable[[int], None], str]] = {
    "disk full": (1, lambda rank: _full(rank, "distcp"), "rank 1 .*No space left on device"),
    "quota of rank 0": (0, _unwritable_mark, "rank 0 .*Disk quota exceeded"),
    "too slow": (1, _slow, r"rank 1 .*not written within 1.5 s \(checkpoint.deadline_s\)"),
}


def _set_options(engine: Any, **update: Any) -> None:
    checkpoints = engine._checkpoints
    checkpoints._options = checkpoints.saver._options = engine.config.checkpoint.model_copy(update=update)


def _with_faults(rank: int, world_size: int, folder: str) -> list[tuple[str, str, list[str]]]:
    """Each fault with a save that is waited for and one in the background; a good save after each."""
    log, told = _Log(), []
    engine, loader = start(config_for(folder))
    engine.save_checkpoint(tag="good")
    for name, (faulty, break_it, _) in FAULTS.items():
        for background in (False, True):
            kept = part.write_chunks, part.write_metadata, tensors.os.write
            if rank == faulty:
                break_it(rank)
            _set_options(
                engine, deadline_s=1.5 if name == "too slow" else 60.0, every_n_steps=int(background)
            )
            log.lines.clear()
            error = "no error"
            steps(engine, loader, 1)
            if background:
                _set_options(engine, deadline_s=1.5 if name == "too slow" else 60.0)
                while engine._checkpoints.saver.busy:  # its end shows at the end of some step
                    steps(engine, loader, 1)
                    time.sleep(0.01)
            else:
                try:
                    engine.save_checkpoint()
                except CheckpointError as problem:
                    error = str(problem)
            part.write_chunks, part.write_metadata, tensors.os.write = kept
            told.append((name, error, list(log.lines)))
            _set_options(engine)
            engine.save_checkpoint(tag="after")
    engine.close()
    return told


def test_a_failure_on_one_rank(tmp_path: Path) -> None:
    ran = values(run_ranks(_with_faults, 2, str(tmp_path), timeout_s=200))
    for number, ((name, error, lines), (_, other, _)) in enumerate(zip(*ran, strict=True)):
        assert error == other
        said = error if number % 2 == 0 else "\n".join(lines)
        assert "was not saved" in said
        assert re.search(FAULTS[name][2], said), (name, said)
    assert find(tmp_path).path == tmp_path / "after"
    assert read_mark(tmp_path / "good").step == 0
    saved = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert saved == {"good", "after", "latest"}


def _stop(rank: int, world_size: int, folder: str) -> str:
    engine, loader = start(config_for(folder, every_n_steps=2, on_failure="stop"))
    if rank == 1:
        _full(rank, "distcp")
    try:
        for _ in range(5000):  # a failure is known some steps later; on a busy machine, many
            steps(engine, loader, 1)
            time.sleep(0.01)
    except CheckpointError as error:
        engine.close()
        return str(error)
    return "it went on"


def test_a_failure_may_stop_the_run(tmp_path: Path) -> None:
    for told in values(run_ranks(_stop, 2, str(tmp_path))):
        assert "step_2 was not saved" in told


def _mistakes(rank: int, world_size: int, folder: str) -> list[str]:
    told = []
    engine, loader = start(config_for(folder))
    cases: list[Callable[[], Any]] = [
        lambda: engine.save_checkpoint(tag="one" if rank else "other"),
        lambda: engine.save_checkpoint(tag="a/b"),
        lambda: engine.save_checkpoint(client_state={"model": [make_model] if rank else 1}),
        lambda: engine.save_checkpoint("/proc/nowhere/x"),
        lambda: engine.load_checkpoint(tag="missing"),
    ]
    for case in cases:
        try:
            case()
            told.append("no error")
        except CheckpointError as error:
            told.append(str(error))
    minibatch = next(iter(loader))
    for micro_batch in minibatch:
        engine.backward(engine(micro_batch))
    if len(minibatch):
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(UsageError, match="between minibatches"):
                call()
    engine.step()
    engine.save_checkpoint()
    engine.close()
    return told


def test_mistakes_are_named_on_all_ranks(tmp_path: Path) -> None:
    ran = values(run_ranks(_mistakes, 2, str(tmp_path)))
    assert ran[0] == ran[1]
    patterns = (
        "give the same on all ranks",
        "checkpoint tag 'a/b'",
        "rank 1 .*client_state.model",
        "/proc",
        "does not exist",
    )
    for told, pattern in zip(ran[0], patterns, strict=True):
        assert re.search(pattern, told), told
    assert (tmp_path / "step_1").exists()


def _elsewhere(rank: int, world_size: int, folder: str) -> str:
    here = Path(folder) / ("one" if rank == 0 else "other")
    here.mkdir()
    os.chdir(here)
    engine, _ = start(config_for(None))
    try:
        engine.save_checkpoint("runs")
        return "saved"
    except CheckpointError as error:
        return str(error)
    finally:
        engine.close()


def test_a_directory_that_a_host_does_not_see(tmp_path: Path) -> None:
    told = values(run_ranks(_elsewhere, 2, str(tmp_path)))
    assert told[0] == told[1]
    assert re.search(r"rank 1 .*: runs is not the directory that rank 0 writes to", told[0])


def _second(rank: int, world_size: int, folder: str, resume: str) -> str:
    try:
        engine, _ = start(config_for(folder, resume=resume))
    except CheckpointError as error:
        return str(error)
    step = engine.global_steps
    engine.close()
    return f"begins at step {step}"


def _on_all_ranks(flag: bool) -> bool:
    flags = torch.tensor(int(flag))
    dist.all_reduce(flags, dist.ReduceOp.MIN)
    return bool(flags)


def _first(rank: int, world_size: int, folder: str) -> str:
    engine, loader = start(config_for(folder))
    steps(engine, loader, 2)
    engine.save_checkpoint()
    while _on_all_ranks(not Path(folder, "go").exists()):  # each for itself, one could see it a round earlier
        time.sleep(0.02)
        engine.save_checkpoint(tag="again")
    engine.close()
    return "ok"


def test_a_second_run_in_the_directory_is_refused(tmp_path: Path) -> None:
    second: list[str] = []

    def during(pids: list[int]) -> None:
        while not (tmp_path / "again").exists():
            time.sleep(0.02)
        second.extend(values(run_ranks(_second, 2, str(tmp_path), "auto")))
        (tmp_path / "go").touch()

    assert values(run_ranks(_first, 2, str(tmp_path), during=during)) == ["ok", "ok"]
    assert len(second) == 2
    assert all("another run writes its checkpoints here" in told for told in second)


def _says_why(rank: int, world_size: int, folder: str) -> tuple[int, list[str]]:
    log = _Log()
    engine, loader = start(config_for(folder, every_n_steps=1))
    step = engine.global_steps
    steps(engine, loader, 1)
    engine.close()
    return step, log.lines


def test_half_a_checkpoint_is_skipped_with_the_reason(tmp_path: Path) -> None:
    """USER_CASES 11: step_200 has no completion mark, although ``latest`` names it."""
    values(run_ranks(functools.partial(train, before=2, save=True), 2, str(tmp_path)))
    half = tmp_path / "step_200"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes((tmp_path / "step_2" / "__0_0.distcp").read_bytes()[:100])
    (tmp_path / "latest").write_text("step_200\n")
    (step, lines), (other_step, _) = values(run_ranks(_says_why, 2, str(tmp_path)))
    assert step == other_step == 2
    assert any("skipped: " in line and "step_200 has no completion mark" in line for line in lines)
    assert read_latest(tmp_path) == "step_3"


def _again(rank: int, world_size: int, folder: str) -> int:
    """A first try that fails, and a second in the same process."""
    mark = Path(folder) / "step_3" / "complete.json"
    kept = mark.read_text()
    mark.write_text("{}")
    with pytest.raises(CheckpointError, match="no complete checkpoint") as kept_alive:
        start(config_for(folder))
    mark.write_text(kept)
    engine, _ = start(config_for(folder))
    engine.close()
    assert kept_alive.value is not None  # and with it all that the first try had
    return engine.global_steps


def test_resume_settings(tmp_path: Path) -> None:
    base, other = str(tmp_path / "base"), str(tmp_path / "other")
    values(run_ranks(functools.partial(train, before=3, save=True), 1, base))

    def run(folder: str, resume: str) -> str:
        return str(values(run_ranks(_second, 1, folder, resume))[0])

    assert "has checkpoints (step_3) that this run would replace" in run(base, "none")
    assert run(other, "none") == "begins at step 0"
    assert run(other, f"{base}/step_3") == "begins at step 3"
    assert "is or has no complete checkpoint" in run(other, str(tmp_path / "nowhere"))
    assert values(run_ranks(_again, 1, base)) == [3]
    values(run_ranks(functools.partial(train, before=5, save=True), 1, other))
    assert run(other, base) == "begins at step 5"  # it has checkpoints of its own now
