"""One run at a time writes into a directory of checkpoints.

The run's rank 0 puts a file ``.writer`` there that says who it is, and changes it every few seconds. Another
run that finds it is refused while the first one lives: on the same machine the kernel tells, from another one
the changes do. Who has not changed it for a while is taken for dead and is replaced; should it wake up, it
finds another's name in the file and stops saving. That needs no lock service, which file systems of clusters
often lack or keep after a node has died.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from odcengine.checkpoint.directory import explain
from odcengine.errors import CheckpointError

WRITER = ".writer"
BEAT_S = 5.0
QUIET_S = 20.0
"""Silence in seconds after which a writer on another machine is taken for dead."""


class Writer:
    """The right to write into a directory, from the making until :meth:`close`.

    Args:
        root: the directory; it exists.
        beat: called while it waits for a silent run to prove dead.
        quiet_s: how long to wait for a sign of life.
        beat_s: how often to give one.

    Raises:
        CheckpointError: another run writes there; names its host and process.
    """

    def __init__(
        self,
        root: Path,
        *,
        beat: Callable[[], None] = lambda: None,
        quiet_s: float = QUIET_S,
        beat_s: float = BEAT_S,
    ) -> None:
        self.root = root
        self.path = root / WRITER
        self.token = secrets.token_hex(8)
        self._beat_s = beat_s
        self._stop = threading.Event()
        try:
            while not self._take():
                self._wait_for_the_dead(beat, quiet_s)
            for left in root.glob(f"{WRITER}.*"):  # by runs that were killed while they changed it
                left.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written: {explain(error)}") from error
        self._thread = threading.Thread(target=self._run, name="odc-writer", daemon=True)
        self._thread.start()

    def _record(self, beats: int = 0) -> bytes:
        return json.dumps({"token": self.token, "beats": beats, **_identity()}).encode()

    def _take(self) -> bool:
        """Make the file, unless it is there."""
        try:
            fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(fd, "wb") as file:
            file.write(self._record())
        return True

    def _wait_for_the_dead(self, beat: Callable[[], None], quiet_s: float) -> None:
        """Return when the present writer is gone, its file removed; raise if it lives."""
        before = _read(self.path)
        deadline = time.monotonic() + quiet_s
        while not _is_dead(before):
            now = _read(self.path)
            if now is None:
                return
            if now != before or _is_alive(now):
                raise CheckpointError(
                    f"{self.root}: another run writes its checkpoints here ({_describe(now)}); give this one "
                    f"another checkpoint.dir. If that run is gone for certain, remove {self.path}"
                )
            if time.monotonic() > deadline:
                break
            beat()
            time.sleep(min(1.0, quiet_s / 20))
        # Aside first: of several who come here only one can move this very file.
        aside = self.path.with_name(f"{WRITER}.{self.token}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        if _read(aside) != before:
            os.rename(aside, self.path)  # somebody else was faster, and this is its file
        else:
            aside.unlink()

    def check(self) -> None:
        """Raise CheckpointError if another run has taken over."""
        found = _read(self.path)
        if found is None or found.get("token") != self.token:
            who = (
                "nobody is named there any more" if found is None else f"now {_describe(found)} writes there"
            )
            raise CheckpointError(
                f"{self.path}: this run was taken for dead, because it gave no sign of life; {who}"
            )

    def _run(self) -> None:
        beats = 0
        while not self._stop.wait(self._beat_s):
            beats += 1
            try:
                self.check()
                partial = self.path.with_name(f"{WRITER}.{self.token}")
                partial.write_bytes(self._record(beats))
                os.replace(partial, self.path)
            except CheckpointError:
                return
            except OSError:
                continue  # a full or unreachable file system: the next save says so

    def close(self) -> None:
        """Give up the right."""
        self._stop.set()
        self._thread.join(self._beat_s + 5)
        try:
            self.check()
            self.path.unlink()
        except (CheckpointError, OSError):
            pass


def _read(path: Path) -> dict[str, Any] | None:
    """The record in the file; None without a file, an empty one where it holds no record."""
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _identity() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        # Process numbers mean something to who shares boot and name space only.
        "processes_of": f"{_text('/proc/sys/kernel/random/boot_id')}/{os.readlink('/proc/self/ns/pid')}",
        "pid": pid,
        "started": _start_of(pid),
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "?"


def _start_of(pid: int) -> str:
    """When a process began, in ticks since boot; "" for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _is_here(record: dict[str, Any] | None) -> bool:
    return bool(record) and record.get("processes_of") == _identity()["processes_of"]  # type: ignore[union-attr]


def _lives(record: dict[str, Any]) -> bool:
    pid = record.get("pid")
    return isinstance(pid, int) and pid > 0 and _start_of(pid) == record.get("started") != ""


def _is_alive(record: dict[str, Any]) -> bool:
    return _is_here(record) and _lives(record)


def _is_dead(record: dict[str, Any] | None) -> bool:
    return record is None or (_is_here(record) and not _lives(record))


def _describe(record: dict[str, Any]) -> str:
    return f"host {record.get('host', '?')}, pid {record.get('pid', '?')}"
