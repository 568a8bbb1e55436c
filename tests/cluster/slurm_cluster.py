"""Starts and stops a real SLURM of two nodes on this host, as root.

Everything lives in a temporary directory on ports of its own; at the end exactly the daemons started here are
ended, by their process ids.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed import free_port

ROOT = Path(__file__).resolve().parents[2]
SLURM = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "salloc", "scontrol", "scancel", "squeue")
_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "MASTER_",
    "OMP_",
    "ODC",
    "SLURM",
    "SBATCH",
    "SALLOC",
    "OMPI_",
    "PMI",
)


def clean_environment() -> dict[str, str]:
    """The environment without any launcher's variables; ranks see no GPU."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    folders = [ROOT, ROOT / "launcher", ROOT / "tools", ROOT / "tests"]
    return env | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "CUDA_VISIBLE_DEVICES": ""}


def free_ports(count: int) -> list[int]:
    """Ports outside the range from which connections get theirs, until the daemons have taken them."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 90.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.1)
    return value


@dataclass
class Cluster:
    """The running cluster.

    Attributes:
        folder: its files, with daemons' logs.
        env: the environment of a user's shell on its login node.
    """

    folder: Path
    env: dict[str, str]
    pids: list[int] = field(default_factory=list)

    def start(self, cwd: Path, *words: str, **settings: Any) -> subprocess.Popen[str]:
        """Starts a command in a user's shell."""
        popen: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": cwd}
        env = self.env | settings.pop("env", {})
        return subprocess.Popen(words, env=env, text=True, **(popen | settings))

    def run(self, cwd: Path, *words: str, timeout_s: float = 120, **settings: Any) -> tuple[int, str, str]:
        """Runs a command; returns its exit code, stdout and stderr."""
        process = self.start(cwd, *words, **settings)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"{words} did not end:\n{out}\n{err}") from None
        return process.returncode, out, err

    def launch(self, *words: str) -> list[str]:
        """The words that start odc-launch."""
        return [sys.executable, "-m", "odc_launcher", *words]

    def state(self, job: str) -> str:
        """A job as ``scontrol`` tells; empty once it is forgotten."""
        return self.run(self.folder, "scontrol", "--oneliner", "show", "job", job)[1]

    def wait_for(self, job: str, states: Sequence[str], timeout_s: float = 90.0) -> str:
        def there() -> str:
            text = self.state(job)
            return text if any(f"JobState={state}" in text for state in states) else ""

        return str(wait_until(there, f"job {job} {states}: {self.state(job)}", timeout_s))


def start(cluster: Cluster) -> None:
    folder, host = cluster.folder, socket.gethostname().partition(".")[0]
    for name in ("ctld", "n1", "n2"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    ports = free_ports(3)
    (folder / "slurm.conf").write_text(
        f"""ClusterName=odc
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
KillWait=10
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/ctld
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/%n
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=500 Gres=gpu:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=500 Gres=gpu:2
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
    )
    for index in range(2):  # no devices, but what SLURM counts as such
        (folder / f"gpu{index}").touch()
    (folder / "gres.conf").write_text(f"NodeName=n1,n2 Name=gpu File={folder}/gpu[0-1]\n")
    files = {name: f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")}
    munged = ["munged", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}", *files.values()]
    daemons = [(munged, "munged.pid"), (["slurmctld"], "slurmctld.pid")]
    daemons += [(["slurmd", "-N", name], f"slurmd-{name}.pid") for name in ("n1", "n2")]
    for command, pid_file in daemons:
        done = subprocess.run(
            command, env=cluster.env, cwd=folder, capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr.decode()}"
        path = folder / pid_file
        wait_until(
            lambda path=path: path.exists() and path.read_text().strip(), f"{command} writes its number"
        )
        cluster.pids.append(int(path.read_text()))
    wait_until(
        lambda: cluster.run(folder, "sinfo", "--noheader", "--format=%D %t")[1].split() == ["2", "idle"],
        "both nodes are idle: " + cluster.run(folder, "sinfo")[1],
    )


def stop(cluster: Cluster) -> None:
    if len(cluster.pids) > 1:  # slurmctld runs: its jobs first
        with contextlib.suppress(AssertionError, OSError):
            cluster.run(cluster.folder, "scancel", "--user=root", "--signal=KILL", "--full", timeout_s=15)
            cluster.run(cluster.folder, "scancel", "--user=root", timeout_s=15)
            wait_until(
                lambda: not cluster.run(cluster.folder, "squeue", "--noheader")[1].strip(),
                "all jobs ended",
                15,
            )
    for pid in reversed(cluster.pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    for pid in cluster.pids:
        with contextlib.suppress(AssertionError):
            wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"process {pid} ends", 10)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
