"""Usable cores and the rendezvous port."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from odc_launcher.machine import cgroup_cpu_limit, master_port, port_is_free, port_problem, usable_cores

from odcengine.errors import ConfigError


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_no_cgroups(tmp_path: Path) -> None:
    assert cgroup_cpu_limit(tmp_path) is None
    assert usable_cores(tmp_path) == (len(os.sched_getaffinity(0)), "CPU affinity")


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        # The smallest quota on the way to the root counts, not only the own one.
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
                "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
            },
            1.5,
        ),
        # In a container the path may be the host's: the mount's root is what is seen.
        ({"proc/self/cgroup": "0::/host/only\n", "sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        (
            {
                "proc/self/cgroup": "4:memory:/m\n3:cpu,cpuacct:/job\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "garbage"}, None),
    ],
)
def test_cgroup_limits(tmp_path: Path, files: dict[str, str], limit: float | None) -> None:
    assert cgroup_cpu_limit(tree(tmp_path, files)) == limit


def test_cgroup_limit_lowers_the_cores_to_at_least_one(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000"}
    assert usable_cores(tree(tmp_path, files)) == (1, "cgroup limit of 0.5 CPUs")


def test_chosen_port_is_free_and_not_ephemeral() -> None:
    for _ in range(20):
        port = master_port(None, (20000, 60000))
        assert 10000 <= port < 20000 or 60000 < port < 65536
        assert port_is_free(port)
    assert 0 < master_port(None, (1024, 65535)) < 65536  # nothing is left outside the range


@pytest.mark.parametrize("given", ["0", "65536", "-1", "http", "", "1e3"])
def test_given_port_must_be_a_port(given: str) -> None:
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        master_port(given)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1"])
def test_port_in_use_is_a_problem(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as server:
        try:
            server.bind((address, 0))
        except OSError:
            pytest.skip("this host has no IPv6")
        server.listen(1)
        port = server.getsockname()[1]
        assert master_port(str(port)) == port
        told = port_problem(port, str(port))
        assert told is not None
        assert f"port {port} (MASTER_PORT in the environment) is already in use" in told
        assert "(derived from the job's number) is already in use" in str(port_problem(port, None))
    assert port_problem(port, str(port)) is None
