"""What is true of one node, gathered without torch: plain data that travels as JSON."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from odc_launcher.printing import mask
from odcengine._version import __version__
from odcengine.host.affinity import visible_gpus
from odcengine.host.host import read_host
from odcengine.host.nvshmem_env import Job, node_settings

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "mpi4py",
    "nvshmem4py-cu12",
    "nvshmem4py-cu13",
    "nvidia-nvshmem-cu12",
    "nvidia-nvshmem-cu13",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
PROGRAMS = {"slurm": "srun", "mpi": "mpirun"}
SHOWN = ("NVSHMEM_", "NCCL_", "CUDA_", "TORCH_", "PYTORCH_", "GLOO_", "OMP_", "ODC", "MASTER_")
UNLIMITED = -1
_COMMAND_TIMEOUT_S = 10.0


@dataclass
class NodeFacts:
    """One node.

    Attributes:
        host: its name.
        versions: of Python, odcengine, packages, driver and programs; without those that are missing.
        gpus: those that ranks see, in CUDA's order, as :class:`~odcengine.host.nvml.Gpu`.
        gpus_unknown: why they are not known.
        interfaces, nics: as :class:`~odcengine.host.network.Interface` and :class:`~odcengine.host.host.Nic`.
        chosen: variables that odc-launch would set, with reasons.
        problems, warnings: of the user's variables.
        limits: ``memlock`` and ``nofile`` (soft limits; -1: none), bytes of ``/dev/shm`` in all and free,
            bytes of memory that are available.
        memory_files: whether memory files can be made; else the error.
        cores, cores_online: that may be used, and all.
        env: variables that concern the run, secrets masked.
        sees_folder: whether this node sees what the first one wrote into the log folder; None: not tried.
        config_hash: of the configuration file; empty where it cannot be read.
        probe: what :mod:`odc_launcher.doctor.probe` found out.
        seconds: how long gathering took.
    """

    host: str
    versions: dict[str, str] = field(default_factory=dict)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    gpus_unknown: str | None = None
    interfaces: list[dict[str, Any]] = field(default_factory=list)
    nics: list[dict[str, Any]] = field(default_factory=list)
    chosen: list[dict[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)
    memory_files: str = "ok"
    cores: int = 0
    cores_online: int = 0
    env: dict[str, str] = field(default_factory=dict)
    sees_folder: bool | None = None
    config_hash: str | None = None
    probe: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def gather(
    environ: Mapping[str, str],
    job: Job,
    *,
    master_addr: str = "127.0.0.1",
    config_hash: str | None = None,
    token: str | None = None,
) -> NodeFacts:
    """Everything about this node but what needs torch.

    Args:
        environ: the environment that ranks would inherit.
        job: the job that is planned.
        master_addr: the host of rank 0.
        config_hash: of the configuration file as this node reads it.
        token: a file that the first node wrote into the log folder.
    """
    start = time.monotonic()
    host = read_host(master_addr)
    settings = node_settings(host, environ, job)
    gpus, unknown = visible_gpus(host.gpus.gpus, environ)
    if unknown is not None:  # their order is not known, but what they are is
        gpus, _ = visible_gpus(host.gpus.gpus, {**environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
        settings.warnings.append(unknown)
    facts = NodeFacts(
        host=environ.get("SLURMD_NODENAME", socket.gethostname()),
        versions=_versions(),
        gpus=[dataclasses.asdict(gpu) for gpu in gpus],
        gpus_unknown=host.gpus.error,
        interfaces=[dataclasses.asdict(interface) for interface in host.interfaces],
        nics=[dataclasses.asdict(nic) for nic in host.nics],
        chosen=[dataclasses.asdict(setting) for setting in settings.settings],
        problems=settings.problems,
        warnings=settings.warnings,
        limits=_limits(),
        memory_files=_memory_files(),
        cores=len(host.cores.allowed),
        cores_online=host.cores.online,
        env={name: mask(name, value) for name, value in environ.items() if name.startswith(SHOWN)},
        sees_folder=None if token is None else os.path.exists(token),
        config_hash=config_hash,
    )
    for name, value in (("driver", host.gpus.driver), ("driver's CUDA", host.gpus.cuda)):
        if value:
            facts.versions[name] = value
    facts.seconds = time.monotonic() - start
    return facts


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "odcengine": __version__, "kernel": platform.release()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for name, program in PROGRAMS.items():
        if shutil.which(program) is not None:
            found[name] = _first_line(program)
    return found


def _first_line(program: str) -> str:
    try:
        done = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run ({error})"
    first = (done.stdout.strip() or done.stderr.strip()).partition("\n")[0]
    return first if done.returncode == 0 else f"not usable here ({first})"


def _limits() -> dict[str, int]:
    limits = {}
    for name, number in (("memlock", resource.RLIMIT_MEMLOCK), ("nofile", resource.RLIMIT_NOFILE)):
        soft, hard = resource.getrlimit(number)
        limits[name] = UNLIMITED if soft == resource.RLIM_INFINITY else soft
        limits[f"{name}_hard"] = UNLIMITED if hard == resource.RLIM_INFINITY else hard
    try:
        usage = shutil.disk_usage("/dev/shm")
        limits |= {"shm": usage.total, "shm_free": usage.free}
    except OSError:
        limits |= {"shm": 0, "shm_free": 0}
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        limits["memory"] = sizes["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        pass
    return limits


def _memory_files() -> str:
    """Shared memory of ranks is anonymous; sandboxes may refuse it."""
    try:
        os.close(os.memfd_create("odc-doctor"))
    except (OSError, AttributeError) as error:
        return str(error)
    return "ok"


def to_json(facts: NodeFacts) -> dict[str, Any]:
    """As plain data."""
    return dataclasses.asdict(facts)


def from_json(data: dict[str, Any]) -> NodeFacts:
    """The reverse of :func:`to_json`."""
    return NodeFacts(**data)
