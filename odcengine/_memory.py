"""Linux shared memory without names, passed between processes over a local socket, and locks on it.

Nothing here leaves a trace in the file system: memory comes from ``memfd_create``, sockets live in the
abstract name space, locks are POSIX record locks that the kernel drops when their process ends. POSIX locks
belong to a process, so a forked data-loading worker neither holds nor releases them.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable

from odcengine.errors import ConfigError, DeadlineError, UsageError

_FLOCK = "hhqqi0q"  # struct flock of 64-bit Linux: type, whence, start, length, pid
_PEER_CREDENTIALS = "3i"  # struct ucred: pid, uid, gid
_CHECK_S, _TALK_S = 0.05, 5.0
_MAX_FDS = 250  # the kernel passes at most 253 descriptors in one message


def create_memory(name: str, nbytes: int) -> int:
    """Create zero-filled anonymous memory whose size can never change.

    Args:
        name: label shown in ``/proc/PID/maps``; no name in any file system.
        nbytes: size in bytes, at least 1.

    Returns:
        A file descriptor; closing it does not unmap existing mappings.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def map_memory(fd: int) -> mmap.mmap:
    """Map all of ``fd`` for reading and writing; the mapping lives as long as views of it do."""
    return mmap.mmap(fd, os.fstat(fd).st_size)


def available_memory() -> int:
    """Bytes that can still be used on this machine: MemAvailable, or what the cgroup leaves if less."""
    available = 0
    with open("/proc/meminfo") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit) as limit_file, open(usage) as usage_file:
                left = int(limit_file.read()) - int(usage_file.read())
        except (OSError, ValueError):  # no such cgroup version, or "max"
            continue
        available = min(available, max(left, 0))
    return available


def share_descriptors(
    descriptors: list[int] | None,
    *,
    name: str,
    index: int,
    count: int,
    timeout_s: float,
    check: Callable[[], None] | None = None,
) -> list[int]:
    """Hand file descriptors from the group's first process to all others. Collective.

    Args:
        descriptors: what index 0 gives away; None on all others.
        name: address of the exchange; unguessable, equal on all members and new for every exchange.
        index: this process's index in the group.
        count: number of processes in the group.
        timeout_s: deadline in seconds.
        check: called now and then while waiting; raises where waiting is in vain.

    Returns:
        On index 0 its own descriptors; elsewhere descriptors of the same files, in the same order.

    Raises:
        DeadlineError: somebody did not come in time, with the missing indices.
        UsageError: another process serves the same exchange.
    """
    deadline = time.monotonic() + timeout_s
    address = f"\0{name}"
    check = check or _no_check
    if index == 0:
        if descriptors is None:
            raise ValueError("index 0 must bring the descriptors")
        _serve(descriptors, address, count, deadline, timeout_s, check)
        return descriptors
    return _fetch(address, index, deadline, timeout_s, check)


def _no_check() -> None:
    pass


def _serve(
    descriptors: list[int],
    address: str,
    count: int,
    deadline: float,
    timeout_s: float,
    check: Callable[[], None],
) -> None:
    missing = set(range(1, count))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        try:
            server.bind(address)
        except OSError as error:
            raise UsageError(
                f"shared memory: two processes of this host run as local rank 0 ({error})"
            ) from error
        server.listen(count)
        server.settimeout(_CHECK_S)
        while missing:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"shared memory: local ranks {sorted(missing)} did not come for it within "
                        f"{timeout_s:g} s (odc.startup_timeout_s)"
                    ) from None
                check()
                continue
            with connection:
                connection.settimeout(
                    _TALK_S
                )  # a client sends at once; one that does not must not block others
                try:
                    missing.discard(_give(connection, descriptors))
                except OSError:  # it left in the middle and will come again, or be missed at the deadline
                    continue


def _give(connection: socket.socket, descriptors: list[int]) -> int:
    _check_user(connection)
    index = int.from_bytes(connection.recv(4), "little")
    connection.sendall(len(descriptors).to_bytes(4, "little"))
    for start in range(0, len(descriptors), _MAX_FDS):
        socket.send_fds(connection, [b"f"], descriptors[start : start + _MAX_FDS])
    return index


def _check_user(connection: socket.socket) -> None:
    """Let go of a partner of another user; names of sockets are visible to everybody on the host."""
    size = struct.calcsize(_PEER_CREDENTIALS)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, _ = struct.unpack(_PEER_CREDENTIALS, credentials)
    if uid != os.getuid():
        raise ConnectionRefusedError(
            f"the partner is a process of user {uid}, this is one of user {os.getuid()}; all ranks of a job "
            "must run as one user"
        )


def _fetch(
    address: str, index: int, deadline: float, timeout_s: float, check: Callable[[], None]
) -> list[int]:
    while True:
        received: list[int] = []
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            connection.connect(address)
            _check_user(connection)
            connection.sendall(index.to_bytes(4, "little"))
            count = connection.recv(4)
            if not count:
                raise ConnectionResetError("the giver left")
            while len(received) < int.from_bytes(count, "little"):
                received += _receive(connection)
            return received
        except OSError as error:  # not listening yet
            for fd in received:
                os.close(fd)
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"shared memory: the first local rank did not offer it within {timeout_s:g} s "
                    f"(odc.startup_timeout_s): {error}"
                ) from None
            check()
            time.sleep(0.01)
        finally:
            connection.close()


def _receive(connection: socket.socket) -> list[int]:
    # Not socket.recv_fds: it drops its flags, and children that a rank starts would inherit the descriptors.
    data, ancillary, _, _ = connection.recvmsg(
        1, socket.CMSG_SPACE(_MAX_FDS * array("i").itemsize), socket.MSG_CMSG_CLOEXEC
    )
    if not data:
        raise ConnectionResetError("the giver left")
    fds = array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return list(fds)


class FileLocks:
    """Exclusive locks between processes, one a byte of a shared file, dropped when their holder dies.

    Taking a lock happens after everything that its last holder did before giving it up: both sides pass the
    kernel's lock on the file's lock list, which orders memory on every architecture.

    Args:
        fd: descriptor of the shared file. The process must have no other descriptor of it: closing any would
            drop the locks (POSIX).
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._threads: dict[int, threading.Lock] = {}  # POSIX locks do not exclude threads of one process

    def try_acquire(self, offset: int) -> bool:
        """Take lock ``offset`` if nobody holds it; returns whether it was taken."""
        thread_lock = self._threads.setdefault(offset, threading.Lock())
        if not thread_lock.acquire(blocking=False):
            return False
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
        except (BlockingIOError, PermissionError):
            thread_lock.release()
            return False
        except OSError as error:
            thread_lock.release()
            raise ConfigError(f"shared memory: the kernel refuses record locks: {error}") from error
        return True

    def release(self, offset: int) -> None:
        """Give up lock ``offset``, which this process holds."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, offset)
        self._threads[offset].release()

    def holder(self, offset: int) -> int | None:
        """Process id that holds lock ``offset``; None when it is free or held by this process.

        0 or -1 stands for a holder in another PID name space.
        """
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
        answer = struct.unpack(_FLOCK, fcntl.fcntl(self._fd, fcntl.F_GETLK, request))
        return None if answer[0] == fcntl.F_UNLCK else answer[4]
