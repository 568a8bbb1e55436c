"""What the launcher asks the machine: usable cores and a free port for the rendezvous."""

from __future__ import annotations

import errno
import os
import random
import socket
from pathlib import Path

from odcengine.errors import ConfigError

_EVERY_INTERFACE = ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"))


def usable_cores(root: Path = Path("/")) -> tuple[int, str]:
    """Cores that this process may use: its CPU affinity, lowered by the CPU limit of its cgroups.

    Args:
        root: where ``proc`` and ``sys`` are mounted (tests give their own).

    Returns:
        The number, at least 1 (a fraction of a core is rounded down), and where it comes from.
    """
    cores = len(os.sched_getaffinity(0))
    limit = cgroup_cpu_limit(root)
    if limit is not None and limit < cores:
        return max(1, int(limit)), f"cgroup limit of {limit:g} CPUs"
    return cores, "CPU affinity"


def cgroup_cpu_limit(root: Path = Path("/")) -> float | None:
    """The smallest CPU quota, in cores, on the way from this process's cgroups to their roots."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    limits = []
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if not controllers:
            mount, read = root / "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            mount, read = root / "sys/fs/cgroup" / controllers, _quota_v1
            if not mount.is_dir():
                mount = root / "sys/fs/cgroup/cpu"
        else:
            continue
        # Inside a container the path may be the host's and not exist: then only the mount's root counts.
        group = Path(path.lstrip("/"))
        for folder in [group, *group.parents]:
            quota = read(mount / folder)
            if quota is not None:
                limits.append(quota)
    return min(limits, default=None)


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return None if quota <= 0 else quota / period
    except (OSError, ValueError, ZeroDivisionError):
        return None


def master_port(given: str | None, ephemeral: tuple[int, int] | None = None) -> int:
    """The rendezvous port: the user's ``MASTER_PORT`` if set, which may be in use, else a free one.

    A chosen port lies outside the range from which the kernel gives ports to outgoing connections, so
    that no connection takes it between this check and the moment when rank 0 listens on it.

    Args:
        given: the value of ``MASTER_PORT`` in the user's environment, or None.
        ephemeral: first and last port of that range; read from the kernel by default.

    Raises:
        ConfigError: the user's port is not a port number.
    """
    if given is not None:
        if not given.isdecimal() or not 0 < int(given) < 65536:
            raise ConfigError(f"MASTER_PORT={given!r} in the environment is no port (1 to 65535)")
        return int(given)
    low, high = ephemeral if ephemeral is not None else ephemeral_range()
    # Below 10000 live the well-known services that may start at any time.
    ports = [*range(10000, max(10000, low)), *range(min(65535, high) + 1, 65536)]
    tries: list[int] = random.SystemRandom().sample(ports, min(64, len(ports)))
    for port in tries:
        if port_is_free(port):
            return port
    # Everything is ephemeral (or taken): any free port is better than none.
    with socket.socket() as probe:
        probe.bind(("", 0))
        address: tuple[str, int] = probe.getsockname()
        return address[1]


def port_problem(port: int, given: str | None) -> str | None:
    """Why rank 0 cannot listen on this host, or None.

    Args:
        port: the rendezvous port.
        given: the value of ``MASTER_PORT`` in the user's environment, or None.
    """
    if port_is_free(port):
        return None
    if given is None:
        where, remedy = "derived from the job's number", "set MASTER_PORT to a free one"
    else:
        where, remedy = "MASTER_PORT in the environment", "set it to a free one, or unset it"
    return f"port {port} ({where}) is already in use on {socket.gethostname()}, where rank 0 runs; {remedy}"


def resolves(host: str) -> bool:
    """Whether this host knows the address of another one."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def port_is_free(port: int) -> bool:
    """Whether a server could listen on this TCP port on all of the host's interfaces."""
    for family, address in _EVERY_INTERFACE:
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # no IPv6 on this host
        with probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # As a server would: connections in TIME_WAIT do not count, listeners do.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
                probe.listen(1)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    continue  # IPv6 is compiled in but has no address
                return False
    return True


def ephemeral_range() -> tuple[int, int]:
    """First and last port that the kernel gives to outgoing connections."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999
