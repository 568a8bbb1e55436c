"""Signals that come while there is no rank to pass them on to: before the first start, and between two."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

_FROM_THE_BEGINNING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class EarlySignals:
    """Remembers the first signal that asks the job to stop; a second one has its usual effect, at once.

    A context manager around all that the launcher does; what runs ranks takes signals over meanwhile. Until
    the configuration is known, the usual ones are remembered.

    Attributes:
        came: the signal that came.
    """

    def __init__(self) -> None:
        self.came: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> EarlySignals:
        if threading.current_thread() is threading.main_thread():  # only it may set handlers
            self._take(_FROM_THE_BEGINNING)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back(tuple(self._before))

    def keep(self, numbers: Iterable[signal.Signals]) -> None:
        """Remembers these only; another one that came has its usual effect now.

        Args:
            numbers: signals of ``preemption`` where there is something to go on from.
        """
        wanted = set(numbers)
        others = [number for number in self._before if number not in wanted]
        if threading.current_thread() is threading.main_thread():
            self._take(wanted - set(self._before))
        self._give_back(others)
        if self.came in others:
            os.kill(os.getpid(), self.came)

    def _take(self, numbers: Iterable[signal.Signals]) -> None:
        for number in numbers:
            before = signal.getsignal(number)
            if before in _DEFAULTS:  # ignored ones stay so
                self._before[number] = before
                signal.signal(number, self._handle)

    def _give_back(self, numbers: Iterable[signal.Signals]) -> None:
        for number in numbers:
            with contextlib.suppress(ValueError):  # not the main thread
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, self._before[number])
            del self._before[number]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.came is None:
            self.came = signal.Signals(number)
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
