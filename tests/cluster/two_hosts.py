"""Two hosts on one machine: network namespaces with addresses and names of their own, joined by a cable.

Needs root, and a kernel that allows namespaces. What runs on a host sees only its own interfaces, its own
name, and an /etc/hosts that knows both. The file system is shared, as on a cluster.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slurm_cluster import clean_environment

_PROGRAMS = ("ip", "unshare", "mount", "hostname")


@dataclass(frozen=True)
class TwoHosts:
    """The running hosts.

    Attributes:
        names: of both.
        addresses: of both, in one network of two.
        agent: takes a host's name and a command, as ssh does.
    """

    names: tuple[str, str]
    addresses: tuple[str, str]
    agent: Path

    def run(self, host: int, cwd: Path, *words: str, timeout_s: float = 250.0) -> tuple[int, str, str]:
        """Runs a command on a host; returns its exit code, stdout and stderr."""
        process = subprocess.Popen(
            [str(self.agent), self.names[host], "exec " + shlex.join(words)],
            cwd=cwd,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"{words} did not end:\n{out}\n{err}") from None
        return process.returncode, out, err


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"`ip {' '.join(words)}`: {done.stderr.strip()}")


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Both hosts, which are gone after the block.

    Raises:
        OSError: what does not work here.
    """
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        raise OSError(f"{', '.join(missing)} not installed")
    if os.geteuid() != 0:
        raise OSError("needs root")
    number = os.getpid() % 10000
    names = (f"odc{number}a", f"odc{number}b")
    addresses = (f"10.213.{number % 256}.1", f"10.213.{number % 256}.2")
    agent = folder / "agent"
    made: list[str] = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", names[1], "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            _ip("-n", name, "address", "add", f"{address}/30", "dev", name)
            for device in ("lo", name):
                _ip("-n", name, "link", "set", device, "up")
        _write_agent(agent, folder / "hosts", names, addresses)
        hosts = TwoHosts(names, addresses, agent)
        code, out, err = hosts.run(1, folder, "hostname", timeout_s=30)
        if (code, out.strip()) != (0, names[1]):
            raise OSError(f"a command on a host of its own: {out}{err}")
        yield hosts
    finally:
        for name in made:  # the cable goes with them
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30, check=False)


def _write_agent(agent: Path, hosts: Path, names: Sequence[str], addresses: Sequence[str]) -> None:
    lines = [f"{address} {name}" for address, name in zip(addresses, names, strict=True)]
    hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    agent.write_text(
        f"""#!/bin/sh
# HOST COMMAND..., which a shell of that host runs, as with ssh
host=$1
shift
setup='hostname "$0" && mount --bind {hosts} /etc/hosts && exec sh -c "$1"'
exec ip netns exec "$host" unshare --uts --mount sh -c "$setup" "$host" "$*"
"""
    )
    agent.chmod(0o755)
