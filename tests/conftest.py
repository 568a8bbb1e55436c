"""Settings for the whole suite."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "launcher", ROOT / "tools", ROOT / "tests"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# A shell's background job and nohup ignore these, and so would every process that a test starts and signals.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # The same examples in every run, and no limit of seconds: a machine that stops for a while is no defect.
    settings.register_profile(
        "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("suite")

EXTENSIONS = "TORCH_EXTENSIONS_DIR"
LOCKS = "odcengine_locks"
LOCKS_FOLDER = pytest.StashKey[str]()
START_DEEPSPEED = """
import os
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
import deepspeed
deepspeed.init_distributed("gloo", verbose=False)
"""


# A file's tests stay in their order on one worker, which sets up for them once. These take longest and come
# first, so that the run does not end with one of them on one core.
LONG = (
    "engine/test_exactness.py",
    "cluster/test_slurm.py",  # waits more than it works
    "zero3/test_exactness.py",  # compiles an extension
    "engine/test_compile.py",
    "cluster/test_failures_on_slurm.py",
    "tools/test_bench.py",
    "transport/test_mpi_windows.py",
    "cluster/test_doctor.py",
    "test_readme.py",
    "zero3/test_protocol.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long first; else the order stays."""
    place = {ROOT / "tests" / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, at most 4: many tests wait for a deadline, a signal or SLURM.

    A container may have fewer cores than it sees.
    """
    return min(len(os.sched_getaffinity(0)) + 1, 4)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # a test's limit does not count while it waits here
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that is marked ``alone`` waits until no other worker runs a test, and the others wait for it.

    Whoever wants to begin goes through the gate; the one who is to be alone keeps it shut.
    """
    folder = getattr(item.config, "workerinput", {}).get(LOCKS)
    if folder is None:  # the only process with tests
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    with open(Path(folder, "gate"), "w") as gate, open(Path(folder, "running"), "w") as running:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:  # a process that the test has forked may keep the files open
            fcntl.flock(running, fcntl.LOCK_UN)
            fcntl.flock(gate, fcntl.LOCK_UN)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a worker of pytest-xdist where the locks are that it shares with the others."""
    if LOCKS_FOLDER not in node.config.stash:
        node.config.stash[LOCKS_FOLDER] = folder = tempfile.mkdtemp(prefix="odc-tests-")
        node.config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    node.workerinput[LOCKS] = node.config.stash[LOCKS_FOLDER]


def pytest_configure(config: pytest.Config) -> None:
    """What torch compiles goes to a folder of this session's own.

    A process that is killed while it compiles leaves a lock behind, for which every later one waits for ever.
    The variable is here before the server of ranks starts, which hands it on.
    """
    if EXTENSIONS not in os.environ:
        os.environ[EXTENSIONS] = tempfile.mkdtemp(prefix="odc-extensions-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(EXTENSIONS), ignore_errors=True))


@pytest.fixture(scope="session")
def compiled_deepspeed() -> None:
    """DeepSpeed compiles an extension for CPUs at its first start: here, so that no test's deadline has it.

    It takes half a minute, or some on a busy machine.
    """
    if importlib.util.find_spec("deepspeed") is not None:
        subprocess.run([sys.executable, "-c", START_DEEPSPEED], capture_output=True, timeout=800, check=False)
