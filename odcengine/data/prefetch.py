"""Reading in a thread of its own, in the order that was asked for.

Results do not depend on it: what is read is decided before, and one thread reads, so the data set is never
asked for two samples at once. For a GPU, tensors are also put into pinned memory there, from which copies to
the device do not make the host wait.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import torch

from odcengine.errors import UsageError

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_CLOSE_S = 10.0


class _Job(NamedTuple):
    future: Future[Any]
    function: Callable[[], Any]


class Reading(NamedTuple):
    """Something that is being read.

    Attributes:
        what: what it is, for messages.
        future: the result to come.
    """

    what: str
    future: Future[Any]


class Reader:
    """A thread that reads; started by the first :meth:`submit`, ended by :meth:`close` or with its owner.

    Args:
        device: where what was read will go; for a GPU it is put into pinned memory.
        timeout_s: limit of waiting for one reading.
    """

    def __init__(self, device: torch.device | None, timeout_s: float | None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left: threading.Thread | None = None  # closed, and perhaps still at its last reading
        # The thread holds the queue only, so whoever drops this reader ends it.
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, what: str, function: Callable[[], Any]) -> Reading:
        """Have a function called after those that were submitted before.

        Args:
            what: what it reads, for messages.
            function: called in the thread.

        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._jobs, self._device), name="odc-read", daemon=True
            )
            self._thread.start()
        future: Future[Any] = Future()
        self._jobs.put(_Job(future, function))
        return Reading(what, future)

    def wait(self, reading: Reading) -> Any:
        """The result of a reading; raises what it raised.

        Raises:
            UsageError: it takes longer than ``timeout_s``, or the thread is gone; names what is read.
        """
        start = time.monotonic()
        while True:
            # A poll, so that signals are handled.
            wait([reading.future], _POLL_S)
            thread = self._thread or self._left
            ended = thread is None or not thread.is_alive()  # asked first: its last act is a result
            if reading.future.done():
                return reading.future.result()
            if ended:
                raise UsageError(f"data: {reading.what}: the thread that reads has ended")
            if self._timeout_s is not None and time.monotonic() - start > self._timeout_s:
                raise UsageError(
                    f"data: reading {reading.what} takes longer than {self._timeout_s:g} s "
                    "(odc.timeout_s); look at the file system, or at the data set's __getitem__"
                )

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """End the thread, after what it is reading; what was submitted and not begun is left out.

        Args:
            timeout_s: so long it is waited for; then it is left to end with the process, with a warning.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._left = thread
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job.future.cancel()
        self._jobs.put(None)
        thread.join(timeout_s)
        if thread.is_alive():
            logger.warning("data: the thread that reads ahead is busy after %g s; left alone", timeout_s)


def _work(jobs: queue.SimpleQueue[_Job | None], device: torch.device | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)  # pinned memory belongs to a device's context
    while _do_next(jobs, pin=device is not None):
        pass


def _do_next(jobs: queue.SimpleQueue[_Job | None], *, pin: bool) -> bool:
    """Do a job; False at the end. A function, so that nothing is kept alive while the next job is awaited."""
    job = jobs.get()
    if job is None:
        return False
    if job.future.set_running_or_notify_cancel():
        try:
            result = job.function()
            job.future.set_result(pinned(result) if pin else result)
        except BaseException as error:
            job.future.set_exception(error)
    return True


def pinned(batch: Any) -> Any:
    """A batch whose tensors lie in pinned memory.

    Args:
        batch: something with a method ``pin_memory`` (a tensor, a ``MicroBatch``), or mappings, lists and
            tuples of such; anything else is returned as it is.
    """
    if hasattr(batch, "pin_memory"):
        return batch.pin_memory()
    if type(batch) is dict:
        return {key: pinned(value) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)([pinned(value) for value in batch])
    return batch
