"""What a rank that fails leaves behind for the launcher: a record of its error, and its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from odcengine._hang import DEADLINE_EXIT_CODE
from odcengine.errors import DeadlineError, PeerError
from odcengine.topology import Topology


def write_error_record(
    path: str, topology: Topology, error: BaseException, *, step: int, secondary: bool
) -> None:
    """Write one JSON record of why this rank ends; never raises.

    Args:
        path: where to.
        topology: ranks and hosts.
        error: why.
        step: optimizer step, from 0.
        secondary: this rank stops because of another one.
    """
    report = error.report if isinstance(error, DeadlineError) else ""
    record = {
        "rank": topology.rank,
        "host": topology.hosts[topology.rank],
        "pid": os.getpid(),
        "time": time.time(),
        "type": type(error).__name__,
        "message": f"{error}\n{report}" if report else str(error),
        # Who notices that a rank is silent is the first to fail: there is nobody else to tell the cause.
        "secondary": secondary and not isinstance(error, DeadlineError),
        "culprit": error.rank if isinstance(error, PeerError) else topology.rank,
        "step": step,
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
    }
    temporary = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):
        Path(temporary).write_text(json.dumps(record), encoding="utf-8")
        os.replace(temporary, path)


def tell_uncaught(tell: weakref.WeakMethod[Callable[[BaseException], None]]) -> Callable[[], None]:
    """Tell about an exception that ends this process, and let the exit code tell what it was.

    Args:
        tell: called with the exception, before it is printed, as long as its object lives.

    Returns:
        What ends that, where no other hook was put over this one.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        alive = tell()
        if alive is not None:
            alive(error)
        before(kind, error, trace)
        if isinstance(error, DeadlineError):
            raise SystemExit(DEADLINE_EXIT_CODE)  # in an exception hook it sets the exit code

    def remove() -> None:
        if sys.excepthook is hook:
            sys.excepthook = before

    sys.excepthook = hook
    return remove
