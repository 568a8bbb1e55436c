"""Where the facts of a step go: JSON lines, TensorBoard, Weights & Biases; and the thread that writes them.

A mistake that shows before the first step (a missing package, a folder that cannot be made) is a
:class:`~odcengine.errors.ConfigError`. Whatever goes wrong later is reported once and switches that one
writer off: training goes on.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import queue
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from odcengine.errors import ConfigError

logger = logging.getLogger(__name__)

Facts = Mapping[str, Any]

_QUEUE_LENGTH = 10_000
_TAIL_BYTES = 1 << 20
_LINE_START = b'{"step":'
_PER_RANK_LIMIT = 16  # more ranks get a mean and a maximum in TensorBoard and W&B, not a curve each


class Writer(Protocol):
    """Takes one step after another; may raise anything, which switches it off."""

    name: str

    def write(self, facts: Facts) -> None:
        """Write the facts of a step and flush them."""

    def close(self) -> None:
        """Write what is left."""


class JsonLines:
    """One JSON object a step, appended to a file and flushed.

    A last line that a crash has cut off is removed first, so that every line of the file is JSON. A file that
    begins otherwise than this class writes is left alone.

    Args:
        path: the file; its folder is made.

    Raises:
        ConfigError: it cannot be opened for writing, or something else is in it.
    """

    name = "monitor.jsonl"

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._repair()
        except OSError as error:
            raise ConfigError(f"monitor.jsonl: {path} cannot be written: {error.strerror or error}") from None

    def _repair(self) -> None:
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            return
        size = os.fstat(self._fd).st_size
        head = os.pread(self._fd, len(_LINE_START), 0)
        if head != _LINE_START[: len(head)]:
            os.close(self._fd)
            raise ConfigError(
                f"monitor.jsonl: {self.path} exists and was not written by the monitor; choose another name"
            )
        tail = os.pread(self._fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        if not tail or tail.endswith(b"\n"):
            return
        last = tail[tail.rfind(b"\n") + 1 :]
        try:
            json.loads(last)
        except ValueError:
            os.ftruncate(self._fd, size - len(last))
            logger.warning(
                "monitor.jsonl: removed a last line of %d bytes that was cut off in %s", len(last), self.path
            )
        else:
            os.write(self._fd, b"\n")

    def write(self, facts: Facts) -> None:
        """Append a line."""
        line = json.dumps(_without_nan(facts), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _without_nan(value: Any) -> Any:
    """JSON knows no nan and no infinity: null instead."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _without_nan(item) for name, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, (list, tuple)) else value


def make_folder(key: str, folder: str) -> None:
    """Make a folder if it is missing, and see that files can be made in it.

    Args:
        key: of the configuration, for messages.
        folder: the folder.

    Raises:
        ConfigError: it cannot be made or not be written to.
    """
    what = "made"
    try:
        os.makedirs(folder, exist_ok=True)
        what = "written to"
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{key}: {folder} cannot be {what}: {error.strerror or error}") from None


def curves(facts: Facts) -> dict[str, float]:
    """The facts of a step as named curves, for TensorBoard and W&B; others have such names already.

    Values that are unknown are left out; so are those of single ranks if there are many.
    """
    if "idle_shares" not in facts:
        return {name: float(value) for name, value in facts.items() if "/" in name and value is not None}
    names = {
        "loss": "train/loss",
        "grad_norm": "train/grad_norm",
        "lr": "train/lr",
        "num_tokens": "train/tokens",
        "num_samples": "train/samples",
        "tokens_per_s": "speed/tokens_per_s",
        "mfu": "speed/mfu",
        "step_s": "speed/step_s",
        "boundary_s": "speed/boundary_s",
        "load_s": "speed/load_s",
        "exchange_s": "speed/exchange_s",
    }
    found = {name: float(facts[key]) for key, name in names.items() if facts.get(key) is not None}
    shares: Sequence[float] = facts["idle_shares"]
    found["idle/mean"] = sum(shares) / len(shares)
    found["idle/max"] = max(shares)
    if len(shares) <= _PER_RANK_LIMIT:
        found |= {f"idle/rank_{rank}": share for rank, share in enumerate(shares)}
    return found


class TensorBoard:
    """Curves for TensorBoard.

    Args:
        folder: where its event files go; made if missing.

    Raises:
        ConfigError: the package is missing, or the folder cannot be made or written to.
    """

    name = "monitor.tensorboard"

    def __init__(self, folder: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "monitor.tensorboard: the package tensorboard is not installed; install it with pip install "
                "'odcengine[monitor]', or remove the key"
            ) from None
        make_folder(self.name, folder)
        self._folder, self._make = folder, SummaryWriter
        self._writer: Any = None

    def write(self, facts: Facts) -> None:
        """Add a point to every curve."""
        step = facts["step"]
        if self._writer is None:
            # A resumed run hides what the one before wrote beyond its starting point.
            self._writer = self._make(self._folder, purge_step=step if step else None)
        for name, value in curves(facts).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


_WANDB_SETTINGS = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "save_code": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class WandB:
    """Curves for Weights & Biases. Sends metrics and the configuration, nothing else of this machine.

    Args:
        project: the project; account and key are W&B's own matter.
        config: the resolved configuration, shown with the run.

    Raises:
        ConfigError: the package is missing.
    """

    name = "monitor.wandb_project"

    def __init__(self, project: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                "monitor.wandb_project: the package wandb is not installed; install it with pip install "
                "wandb, or remove the key"
            ) from None
        self._wandb: Any = wandb
        self._project, self._config = project, dict(config)
        self._run: Any = None
        self._step = 0

    def write(self, facts: Facts) -> None:
        """Add a point to every curve."""
        if self._run is None:
            self._run = self._wandb.init(
                project=self._project, config=self._config, settings=self._private_settings()
            )
        self._step = max(self._step, facts["step"])  # W&B takes nothing for a step before the last
        self._run.log(curves(facts), step=self._step)

    def _private_settings(self) -> Any:
        """No code, git state, command line, packages, host facts or console; names differ by version."""
        settings = self._wandb.Settings()
        for name, value in _WANDB_SETTINGS.items():
            if hasattr(settings, name):
                setattr(settings, name, value)
        return settings

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()


class Background:
    """A thread that writes, so that a slow or hanging file system does not hold up training.

    Args:
        writers: get every step that :meth:`write` is given, in order.
    """

    def __init__(self, writers: Sequence[Writer]) -> None:
        self.writers = list(writers)
        self._queue: queue.Queue[tuple[str, Callable[[], None]] | None] = queue.Queue(_QUEUE_LENGTH)
        self._thread: threading.Thread | None = None
        self._full = False

    def write(self, facts: Facts) -> None:
        """Have the facts of a step written; returns at once."""
        if self.writers:
            self.run("the monitor's writers", lambda: self._write(facts))

    def run(self, what: str, task: Callable[[], None]) -> None:
        """Have any task done after those before; its errors are reported. Returns at once.

        Where so many tasks wait that something must hang, the task is dropped, which is reported once.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="odc-monitor", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((what, task))
        except queue.Full:
            if not self._full:
                self._full = True
                logger.warning("monitor: writing hangs; from here on steps are missing in what it writes")

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            what, task = item
            try:
                task()
            except Exception as error:
                logger.warning("monitor: %s failed: %s: %s", what, type(error).__name__, error)

    def _write(self, facts: Facts) -> None:
        for writer in list(self.writers):
            self._guard(writer, functools.partial(writer.write, facts))

    def _close_writers(self) -> None:
        for writer in list(self.writers):
            self._guard(writer, writer.close)

    def _guard(self, writer: Writer, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self.writers.remove(writer)
            with contextlib.suppress(Exception):
                writer.close()
            logger.warning(
                "%s is switched off, training goes on: %s: %s", writer.name, type(error).__name__, error
            )

    def close(self, timeout_s: float) -> None:
        """Write what is left and end the thread; gives up after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        if self._thread is None:  # nothing was written; at exit no thread can be started any more
            self._close_writers()
            return
        self.run("the monitor's writers", self._close_writers)
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("monitor: writing did not end within %g s and is given up", timeout_s)
