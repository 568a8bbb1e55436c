"""Two hosts that know each other by address only: the interface is found, and everything meets over it.

Network namespaces joined by a cable; the host's own name means the host itself in both.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import clean_environment

PORT = "20077"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str, str]]]:
    """Namespace, address and interface of each host."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    number = os.getpid()
    found = [(f"odc{number}h{i}", f"10.77.0.{i + 1}", f"odc{number}v{i}") for i in range(2)]
    made = []
    try:
        try:
            for name, _, _ in found:
                ip("netns", "add", name)
                made.append(name)
            ip("link", "add", found[0][2], "type", "veth", "peer", "name", found[1][2])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this kernel gives no network namespaces: {error.stderr.decode().strip()}")
        for name, address, interface in found:
            ip("link", "set", interface, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            for link in (interface, "lo"):
                ip("-n", name, "link", "set", link, "up")
        yield found
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=30)


def test_ranks_meet_by_address(hosts: list[tuple[str, str, str]], tmp_path: Path) -> None:
    commands = []
    options = json.dumps({"startup_timeout_s": 150, "timeout_s": 60})
    for rank, (name, _, _) in enumerate(hosts):
        env = clean_environment() | {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            "MASTER_ADDR": hosts[0][1],
            "MASTER_PORT": PORT,
        }
        words = ["ip", "netns", "exec", name, sys.executable, "-m", "odc_launcher"]
        words += ["--log-dir", "logs", "-m", "odc_launcher.doctor.ranks", options]
        commands.append((words, env))
        # Before the job runs: afterwards its port is taken.
        plan = subprocess.run(
            [*words[:7], "--plan=json", *words[9:]], cwd=tmp_path, env=env, capture_output=True, timeout=120
        )
        assert plan.returncode == 0, plan
        settings = {item["name"]: item for item in json.loads(plan.stdout)["settings"]}
        assert settings["GLOO_SOCKET_IFNAME"]["value"] == hosts[rank][2]
        assert f"leads to rank 0 at {hosts[0][1]}" in settings["GLOO_SOCKET_IFNAME"]["reason"]
    processes = [
        subprocess.Popen(
            words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for words, env in commands
    ]
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    result = json.loads(outputs[0][0].partition("@odc-ranks ")[2].splitlines()[0])
    assert (result["world_size"], result["num_nodes"]) == (2, 2)
    assert result["pulled"]
    assert result["pushed"]
