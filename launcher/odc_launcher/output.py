"""What ranks print: raw bytes into logs, whole lines onto the screen."""

from __future__ import annotations

import fcntl
import os
import select
import time

LINE_BYTES = 16 * 1024
PROGRESS_INTERVAL_S = 1.0
_SCREEN_BYTES = 1024 * 1024
_WRITE_BYTES = select.PIPE_BUF  # as much as a pipe that reports room takes without blocking
_PATIENCE_S = 10.0


class LineSplitter:
    """Cuts a rank's output into the lines that a terminal would end up showing.

    A progress bar rewrites its line after a carriage return: its states are shown at most once a second,
    and the last one. A line longer than ``LINE_BYTES`` is shown in pieces, of which all but the first
    start with ``... ``; no UTF-8 character is cut.
    """

    def __init__(self) -> None:
        self._pending = b""
        self._continued = False
        self._shown = b""  # the state of the present line's progress bar that was shown last
        self._next_progress = 0.0

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Takes output and returns the lines to show, without line ends.

        Args:
            data: the next bytes, cut anywhere.
            now: a monotonic time in seconds.
        """
        *complete, rest = data.split(b"\n")
        lines: list[bytes] = []
        for part in complete:
            self._take(part, now, lines)
            self._end_line(lines)
        self._take(rest, now, lines)
        return lines

    def finish(self) -> list[bytes]:
        """The last line, if the output does not end with a line end."""
        lines: list[bytes] = []
        if self._pending:
            self._end_line(lines)
        return lines

    def _take(self, part: bytes, now: float, lines: list[bytes]) -> None:
        self._pending += part
        if b"\r" in part:
            past, _, rest = self._pending.rpartition(b"\r")
            state = past.rstrip(b"\r").rpartition(b"\r")[2]
            if state and now >= self._next_progress:
                self._next_progress = now + PROGRESS_INTERVAL_S
                self._shown = state
                self._emit(state, lines)
            # The state stays pending: a line end may follow and make it the line's last.
            self._pending = state + b"\r" + rest
        while len(self._pending) > LINE_BYTES:
            cut = LINE_BYTES
            while cut > LINE_BYTES - 3 and self._pending[cut] & 0xC0 == 0x80:
                cut -= 1
            self._emit(self._pending[:cut], lines)
            self._pending = self._pending[cut:]
            self._continued = True

    def _end_line(self, lines: list[bytes]) -> None:
        line = self._pending.rstrip(b"\r").rpartition(b"\r")[2]
        if not (self._shown and line == self._shown):
            self._emit(line, lines)
        self._pending, self._shown, self._continued = b"", b"", False

    def _emit(self, text: bytes, lines: list[bytes]) -> None:
        lines.append(b"... " + text if self._continued else text)


class LogFile:
    """A rank's log, appended to. A full disk loses output but never stops a rank.

    Args:
        path: the file.
        heading: a line that is written first where the file has text of an earlier launch.

    Attributes:
        start: bytes that were in it before, and the heading.
        shared: another launch that runs writes into it, too, as far as its file system tells.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str, heading: str = "") -> None:
        self.path = path
        self.lost_bytes = 0
        self.error: OSError | None = None
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.shared = False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
        except BlockingIOError:
            self.shared = True
        except OSError:  # a file system without locks
            pass
        if os.fstat(self._fd).st_size and heading:
            self.write(f"{'' if _ends_a_line(path) else chr(10)}{heading}\n".encode("utf-8", "replace"))
        self.start = os.fstat(self._fd).st_size

    def write(self, data: bytes) -> None:
        """Appends; what cannot be written is counted in ``lost_bytes``, and ``error`` says why."""
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            self.error = error
            self.lost_bytes += len(left)

    def close(self) -> None:
        os.close(self._fd)


class Screen:
    """A terminal, pipe or file that is written to without ever blocking the launcher.

    What its reader does not take yet is kept, up to a limit; then it is ``full`` and the caller stops
    reading from the ranks, as any pipeline would make it. But after ten seconds without progress (a
    stopped terminal) output is dropped, until it moves again: logs keep everything, training goes on.

    Args:
        fd: where to write; None writes nowhere.
    """

    def __init__(self, fd: int | None) -> None:
        self.fd = fd
        self.error: OSError | None = None
        self.dropped_bytes = 0
        self._pending = bytearray()
        self._moved_at = time.monotonic()

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    @property
    def full(self) -> bool:
        return len(self._pending) >= _SCREEN_BYTES and not self._stuck()

    def write(self, data: bytes) -> None:
        """Takes whole lines."""
        if self.fd is None:
            return
        if len(self._pending) >= _SCREEN_BYTES and self._stuck():
            self.dropped_bytes += len(data)
            return
        if not self._pending:
            self._moved_at = time.monotonic()
        self._pending += data
        self.pump()

    def pump(self) -> None:
        """Writes what the reader takes now."""
        start = 0
        while start < len(self._pending) and self.fd is not None:
            if not _writable(self.fd, 0):
                break
            try:
                start += os.write(self.fd, self._pending[start : start + _WRITE_BYTES])
            except BlockingIOError:
                break
            except OSError as error:  # the reader is gone, or the disk is full
                self.error, self.fd = error, None
                self._pending.clear()
                return
            self._moved_at = time.monotonic()
        del self._pending[:start]

    def drain(self, timeout_s: float) -> None:
        """Writes the rest, for as long as the reader takes something at least every ``timeout_s``."""
        while self._pending and self.fd is not None and _writable(self.fd, timeout_s):
            self.pump()
        self.dropped_bytes += len(self._pending)
        self._pending.clear()

    def _stuck(self) -> bool:
        return time.monotonic() - self._moved_at > _PATIENCE_S


def _ends_a_line(path: str) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _writable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(timeout_s * 1000))
