"""Runs a function on the ranks of a real ``mpirun``.

mpirun starts small programs that only hand out the variables of their rank. Processes that have imported
torch already take them over, so that a test takes a second and not ten. It is how MPI starts under
odc-launch, too: the process that mpirun has started is not the one that calls MPI.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed import RankResult, run_ranks

_STUB = """\
import json, os, sys, time
folder = sys.argv[1]
path = os.path.join(folder, "env" + os.environ["OMPI_COMM_WORLD_RANK"])
with open(path + ".part", "w") as file:
    json.dump(dict(os.environ), file)
os.rename(path + ".part", path)
while os.path.isdir(folder) and not os.path.exists(os.path.join(folder, "done")):
    time.sleep(0.01)
"""
_VARIABLES = ("OMPI_", "PMIX_", "ORTE_", "OPAL_")
WITHOUT_SHARED_MEMORY = ("--mca", "osc", "pt2pt", "--mca", "btl", "self,tcp")
"""As between hosts that TCP connects: whoever is pulled from has to enter MPI."""
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--quiet")


def missing_mpi() -> str | None:
    """Why there is no Open MPI to test with, or None."""
    if shutil.which("mpirun") is None:
        return "Open MPI is not installed; on Debian: apt-get install openmpi-bin"
    done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=60, check=False)
    if "Open MPI" not in done.stdout:
        return "mpirun is not Open MPI's"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed; pip install 'odcengine[mpi]'"
    return None


needs_mpi = pytest.mark.skipif(missing_mpi() is not None, reason=str(missing_mpi()))


@contextmanager
def mpirun(world_size: int, *options: str, timeout_s: float = 60.0) -> Iterator[list[dict[str, str]]]:
    """The variables that mpirun gives to each of ``world_size`` ranks; ends mpirun with the block."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_VARIABLES)}
    with tempfile.TemporaryDirectory(prefix="odc-mpi-") as text:
        folder = Path(text)
        words = [*MPIRUN, "-np", str(world_size), *options, sys.executable, "-I", "-S", "-c", _STUB, text]
        process = subprocess.Popen(
            words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            paths = [folder / f"env{rank}" for rank in range(world_size)]
            deadline = time.monotonic() + timeout_s
            while not all(path.exists() for path in paths):
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    raise AssertionError(f"mpirun did not start: {process.communicate()[0]}")
                time.sleep(0.005)
            settings = [json.loads(path.read_text()) for path in paths]
            yield [{k: v for k, v in own.items() if k.startswith(_VARIABLES)} for own in settings]
        finally:
            (folder / "done").touch()
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def _in_mpi(rank: int, world_size: int, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    from odcengine.transport._mpi_start import process_mpi

    mpi = process_mpi()
    assert mpi.start(60.0) is None
    value = function(rank, world_size, *args)
    mpi.finish()  # multiprocessing's children run no exit handlers
    return value


class Pool:
    """Ranks of one ``mpirun`` that run one function after the other, until one of them fails.

    Args:
        world_size: number of ranks.
        options: of mpirun.
    """

    def __init__(self, world_size: int, *options: str) -> None:
        self._world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="odc-pool-")
        self._tasks = 0
        self._end: Any = "running"
        self._thread = threading.Thread(target=self._run, args=(options,), daemon=True)
        self._thread.start()

    def _run(self, options: Sequence[str]) -> None:
        try:
            self._end = run_mpi_ranks(
                _work, self._world_size, self._folder.name, options=options, timeout_s=280
            )
        except BaseException as error:
            self._end = error

    def run(self, function: Callable[..., Any], *args: Any) -> list[RankResult]:
        """As ``run_ranks``; all runs of a pool share one deadline."""
        folder, number, start = Path(self._folder.name), self._tasks, time.monotonic()
        self._tasks += 1
        _write(folder / f"task{number}", (function, args))
        paths = [folder / f"result{number}-{rank}" for rank in range(self._world_size)]
        while not all(path.exists() for path in paths):
            if not self._thread.is_alive():
                raise AssertionError(f"the ranks have ended: {self._end}\n{self._stacks()}")
            time.sleep(0.005)
        seconds = time.monotonic() - start
        return [
            RankResult(rank, exit_code=0, seconds=seconds, **pickle.loads(path.read_bytes()))
            for rank, path in enumerate(paths)
        ]

    def _stacks(self) -> str:
        results = self._end if isinstance(self._end, list) else []
        return "\n".join(f"rank {result.rank}: {result.error}\n{result.stack}" for result in results)

    def close(self) -> None:
        """End the ranks."""
        _write(Path(self._folder.name, f"task{self._tasks}"), None)
        self._thread.join()
        self._folder.cleanup()


def _write(path: Path, value: Any) -> None:
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_bytes(pickle.dumps(value))
    temporary.rename(path)


def _work(rank: int, world_size: int, folder: str) -> None:
    """What a rank of a pool does."""
    for number in itertools.count():
        path = Path(folder, f"task{number}")
        while not path.exists():
            time.sleep(0.005)
        task = pickle.loads(path.read_bytes())
        if task is None:
            return
        try:
            result = {"value": task[0](rank, world_size, *task[1])}
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}", "error_type": type(error).__name__}
        _write(Path(folder, f"result{number}-{rank}"), result)


def run_mpi_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    options: Sequence[str] = (),
    nodes: Sequence[int] | None = None,
    timeout_s: float = 60.0,
    during: Callable[[list[int]], None] | None = None,
) -> list[RankResult]:
    """As ``run_ranks``, with MPI started in every process.

    ``options`` are mpirun's. ``nodes`` makes several nodes of this host, as a launcher tells them: the
    number of ranks of each.
    """
    with mpirun(world_size, *options) as env_of_ranks:
        node_of_ranks = [node for node, count in enumerate(nodes or ()) for _ in range(count)]
        for env, node in zip(env_of_ranks, node_of_ranks, strict=False):
            env |= {"GROUP_RANK": str(node), "GROUP_WORLD_SIZE": str(len(nodes or ()))}
        return run_ranks(
            _in_mpi,
            world_size,
            function,
            args,
            env_of_ranks=env_of_ranks,
            timeout_s=timeout_s,
            during=during,
        )
