"""Runs that are killed while they save: what is there afterwards is complete, and they go on from it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import run_ranks, values

from checkpoint.test_directory import write
from checkpoint.toy import config_for, start, steps
from odcengine.checkpoint import directory
from odcengine.checkpoint.directory import find, read_mark

# ---- at every single operation on the file system ---------------------------------------------------------

_OPERATIONS = ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir", "open")


def _killed_at(number: int, action: Callable[[], Any]) -> bool:
    """Run in a child that is killed right before its ``number``-th operation; whether it was."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
                return function(*args, **kwargs)

            return call

        for name in _OPERATIONS:
            setattr(os, name, counted(getattr(os, name)))
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("tag", ["step_4", "step_3"], ids=["new", "replaces"])
def test_killed_before_any_operation(tag: str, tmp_path: Path) -> None:
    number, outcomes = 0, []
    while True:
        root = tmp_path / str(number)
        for step in (1, 2, 3):
            write(root, step)

        def save(root: Path = root) -> None:
            write(root, 4, tag=tag)
            directory.thin_out(root, 1, None, "0123abcd")

        killed = _killed_at(number, save)
        directory.clean(root)  # the next run does so
        found = find(root)
        assert found.path is not None
        assert read_mark(found.path).step in (3, 4), (number, found)
        # Nothing bears the name of a checkpoint but complete ones.
        for path in root.iterdir():
            if path.name != directory.LATEST and not path.name.endswith(".partial"):
                read_mark(path)
        outcomes.append(read_mark(found.path).step)
        if not killed:
            break
        number += 1
    assert number > 15
    assert outcomes[0] == 3
    assert outcomes[-1] == 4


# ---- whole runs ----------------------------------------------------------------------------------------


def _run(rank: int, world_size: int, folder: str) -> int:
    engine, loader = start(config_for(folder, every_n_steps=1, keep_last=2))
    begun = engine.global_steps
    written = Path(folder, f"begins_{rank}")
    written.write_text(str(begun))
    written.rename(Path(folder, f"begun_{rank}"))
    end = time.monotonic() + 200
    while time.monotonic() < end:
        steps(engine, loader, 1)
    return begun


def _step_of(folder: Path) -> int:
    found = find(folder)
    return 0 if found.path is None else read_mark(found.path).step


def _killer(folder: Path, chance: random.Random, early: bool, last: int) -> Callable[[list[int]], None]:
    """Kills a random rank at a random moment, after the run has completed a save unless ``early``."""

    def during(pids: list[int]) -> None:
        deadline = time.monotonic() + 150
        while not all((folder / f"begun_{rank}").exists() for rank in range(4)):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        while not early and directory.read_latest(folder) in (None, directory.tag_of(last)):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.3))
        os.kill(chance.choice(pids), signal.SIGKILL)

    return during


def _kill_and_resume(folder: Path, count: int, seed: int) -> None:
    """Saves follow each other without a pause, so a random moment is mostly one of a save."""
    chance = random.Random(seed)
    last = 0
    for number in range(count):
        early = number > 0 and chance.random() < 0.3  # before this run has completed one
        results = run_ranks(_run, 4, str(folder), during=_killer(folder, chance, early, last), timeout_s=200)
        assert sum(result.exit_code == -signal.SIGKILL for result in results) == 1, number
        assert not any(result.hung for result in results), number
        begun = {(folder / f"begun_{rank}").read_text() for rank in range(4)}
        assert begun == {str(last)}, (number, begun, last)  # all ranks went on from the last complete one
        for rank in range(4):
            (folder / f"begun_{rank}").unlink()
        step = _step_of(folder)
        assert step >= last + (not early), number
        last = step


def test_two_kills(tmp_path: Path) -> None:
    _kill_and_resume(tmp_path, 2, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_fifty_kills(tmp_path: Path) -> None:
    _kill_and_resume(tmp_path, 50, seed=2)
    assert values(run_ranks(_once, 2, str(tmp_path)))[0] == _step_of(tmp_path) + 1


def _once(rank: int, world_size: int, folder: str) -> int:
    engine, loader = start(config_for(folder))
    steps(engine, loader, 1)
    engine.close()
    return engine.global_steps
