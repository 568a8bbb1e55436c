"""Stopping before an allocation ends: a signal or the clock asks, all ranks stop together, with a checkpoint.

A signal may reach one rank only, in the middle of a minibatch. It sets a flag; what a rank has been asked
travels with the sums that ranks exchange at the end of every step anyway, so all of them know in the same
step. They save one complete checkpoint and leave with the exit code that says "run me again".
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from odcengine.errors import ConfigError

REQUEUE_EXIT_CODE = 75
"""Exit code of a run that wants to go on in a new job (EX_TEMPFAIL of sysexits.h)."""

ELAPSED = "ODC_LAUNCH_ELAPSED_S"
"""Variable in which odc-launch tells ranks that it starts again how long ago the first ones began, in s."""

_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


def time_left_s(max_time_s: float | None, environ: Mapping[str, str] = os.environ) -> float | None:
    """What is left of ``preemption.max_time``: ranks that are started again in a job have less of it.

    Args:
        max_time_s: the configuration's, in seconds; None: no limit.
        environ: the environment.

    Returns:
        Seconds from now, 0 where it is over; None: no limit.

    Raises:
        ConfigError: the variable is no number.
    """
    if max_time_s is None:
        return None
    text = environ.get(ELAPSED, "0")
    try:
        return max(0.0, max_time_s - float(text))
    except ValueError:
        raise ConfigError(f"environment: {ELAPSED} is {text!r}; expected seconds") from None


class Preempted(SystemExit):
    """Raised by ``engine.step()`` on all ranks when the job was asked to stop and its checkpoint is complete.

    Uncaught it ends the process with exit code 75 and no traceback, as SystemExit does.

    Args:
        reason: what asked for it.
        step: optimizer steps done.
    """

    def __init__(self, reason: str, step: int) -> None:
        super().__init__(REQUEUE_EXIT_CODE)
        self.reason = reason
        self.step = step

    def __str__(self) -> str:
        return f"stopped after {self.step} steps: {self.reason}"


class SecondSignal(Exception):
    """Why a rank ended by a signal although it was about to save; odc-launch reads it in the error record."""


class StopRequests:
    """What this rank has been asked.

    Args:
        signals: names without SIG; each is taken unless the script has a handler of its own for it, which
            stays. A second one has its usual effect, at once.
        max_time_s: seconds after which it is time to stop, see :func:`time_left_s`; None: no limit.
        record_end: is told why a second signal ends this process; None: nobody is.
    """

    def __init__(
        self,
        signals: Sequence[str],
        max_time_s: float | None,
        record_end: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.foreign: list[str] = []
        left_s = time_left_s(max_time_s)
        self._ends_at = None if left_s is None else time.monotonic() + left_s
        self._max_time_s = max_time_s
        self._record_end = record_end
        self._asked_by: str | None = None
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            self.foreign = list(signals)  # only the main thread may set handlers
            return
        for name in signals:
            number = signal.Signals[f"SIG{name}"]
            before = signal.getsignal(number)
            if before in _DEFAULTS:
                self._before[number] = before
                signal.signal(number, self._handle)
            elif before is not signal.SIG_IGN:
                self.foreign.append(name)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._asked_by is None:
            self._asked_by = name
            # Not by logging: the signal may have come in the middle of it.
            os.write(
                2,
                f"odcengine: {name}: this step is finished and a checkpoint saved, then the job ends; "
                "a second one ends it at once\n".encode(),
            )
            return
        if self._record_end is not None:  # else odc-launch would take it for one that came too early
            self._record_end(SecondSignal(f"{name} after {self._asked_by}: ended at once, without saving"))
        self.close()
        os.kill(os.getpid(), number)

    @property
    def reason(self) -> str | None:
        """Why this rank wants to stop; None: it does not."""
        if self._asked_by is not None:
            return self._asked_by
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            return f"preemption.max_time of {self._max_time_s:g} s has passed"
        return None

    def vote(self) -> float:
        """1 where this rank wants to stop; summed over ranks at the end of a step."""
        return float(self.reason is not None)

    def close(self) -> None:
        """Give the signals back."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)
        self._before.clear()
