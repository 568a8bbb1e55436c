"""Settings for the whole suite."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

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
START_DEEPSPEED = """
import os
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
import deepspeed
deepspeed.init_distributed("gloo", verbose=False)
"""


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
