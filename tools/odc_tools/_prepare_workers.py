"""Worker processes of ``odc prepare``, which end with it, and signals, which end it between two chunks."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from odc_tools._sources import Chunk
from odcengine.data.records import Tokenized
from odcengine.errors import OdcError

_CHUNK_TIMEOUT_S = 600.0  # a chunk is about a megabyte of text: a second at most
_POLL_S = 0.2
_CHUNKS_AHEAD = 4  # a worker, so that reading goes on while the oldest chunk is awaited
_PR_SET_PDEATHSIG = 1
_DIED = "a worker process died, perhaps killed for the memory it used; try fewer --workers"


class WorkerError(OdcError):
    """A worker process died or hangs."""


@contextmanager
def ending_cleanly() -> Iterator[Callable[[], None]]:
    """Lets SIGINT and SIGTERM (a job's end of time) end the work between two chunks.

    Yields:
        A function that raises SystemExit once a signal has come. A handler that raises would not do: Python
        drops exceptions in callbacks of its own, such as those around a fork.
    """
    received: list[int] = []

    def check() -> None:
        if received:
            raise SystemExit(128 + received[0])

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda got, frame: received.append(got)) for number in numbers}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class WorkerPool:
    """Worker processes that end with this one; with one worker everything runs in this process.

    Args:
        workers: number of processes.
        check: called again and again while a result is awaited; ends the work by an exception.
    """

    def __init__(self, workers: int, check: Callable[[], None]) -> None:
        self._workers = workers
        self._check = check
        self._executor: ProcessPoolExecutor | None = None
        self._others = set(multiprocessing.active_children())
        if workers > 1:
            # Forked, because the loaded tokenizer and the opened data sets are inherited.
            context = multiprocessing.get_context("fork")
            self._executor = ProcessPoolExecutor(workers, context, initializer=_start_worker)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._executor is None:
            return
        if kind is not None:  # what they do is of no use any more, and one of them may hang
            for process in set(multiprocessing.active_children()) - self._others:
                process.kill()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def submit(self, function: Any) -> Any:
        """Start a function; :meth:`result` waits for it.

        Raises:
            WorkerError: a worker died.
        """
        if self._executor is None:
            return function
        try:
            return self._executor.submit(function)
        except BrokenProcessPool as error:
            raise WorkerError(_DIED) from error

    def result(self, submitted: Any) -> Any:
        """What a submitted function returns, or raises.

        Raises:
            WorkerError: a worker died, or takes far too long.
        """
        deadline = time.monotonic() + _CHUNK_TIMEOUT_S
        while True:
            self._check()
            if not isinstance(submitted, Future):
                return submitted()
            try:
                return submitted.result(_POLL_S)
            except BrokenProcessPool as error:
                raise WorkerError(_DIED) from error
            except FutureTimeoutError as error:
                if time.monotonic() > deadline:
                    text = f"a worker has made no progress for {_CHUNK_TIMEOUT_S:.0f} s"
                    raise WorkerError(text) from error

    def map(self, jobs: Iterable[tuple[Chunk, Any]]) -> Generator[tuple[Chunk, Tokenized], None, None]:
        """Results in the order of the jobs; a few jobs are read ahead."""
        pending: deque[tuple[Chunk, Any]] = deque()
        for chunk, function in jobs:
            # The content went to the worker; there is no need to hold it here.
            pending.append((chunk._replace(content=()), self.submit(function)))
            if len(pending) >= (_CHUNKS_AHEAD * self._workers if self._executor else 1):
                chunk, submitted = pending.popleft()
                yield chunk, self.result(submitted)
        for chunk, submitted in pending:
            yield chunk, self.result(submitted)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the main process, which ends the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
