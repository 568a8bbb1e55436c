"""What the user asks for, from the command line and the config file, and what follows of it on any host."""

from __future__ import annotations

import hashlib
import json
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from odcengine._version import __version__
from odcengine.host.network import GLOO, NCCL, NVSHMEM
from odcengine.host.nvshmem_env import Job

DEFAULT_GRACE_S = 30.0
DEFAULT_SIGNALS = ("INT", "TERM", "HUP", "USR1", "USR2")
INTERFACE_NAMES = (GLOO, NCCL, NVSHMEM)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True)
class Request:
    """What the command line and the config file ask for.

    Attributes:
        target: the script's path, or the module's name.
        is_module: whether ``target`` is a module (``-m``).
        args: the script's own arguments.
        nproc: ranks to start, from the command line.
        config_path: the config file, or None.
        config_nproc: ``launch.nproc_per_node`` of the config file.
        log_dir: where the logs go; None for a new folder under ``odc_logs``.
        show: which ranks appear on stdout: ``all``, ``rank0`` or ``none``.
        oversubscribe: allow far more ranks than cores.
        grace_s: seconds that ranks have to end by themselves.
        term_grace_s: seconds that they have after TERM, where that is more: they save a checkpoint.
        signals: names of the signals that are passed on; INT and TERM always are.
        preemption: names of those that ask for a checkpoint and another run, where there is a place for one.
        max_time: seconds after which the ranks end to go on in another run; None: they do not by themselves.
        env: variables that every rank gets, byte for byte.
        env_expand: the same, with $NAME and ${NAME} replaced by what the rank inherits.
        interface: network interface for the libraries that ask for one.
        config_hash: hash of the config file's bytes.
        transport, sharding, device: ``odc.transport``, ``odc.sharding`` and ``odc.device``.
        affinity: ``auto``: each rank runs on the cores near its GPU; ``none``: where it is started.
    """

    target: str
    is_module: bool = False
    args: tuple[str, ...] = ()
    nproc: int | None = None
    config_path: str | None = None
    config_nproc: int | None = None
    log_dir: str | None = None
    show: str = "all"
    oversubscribe: bool = False
    grace_s: float = DEFAULT_GRACE_S
    term_grace_s: float = 0.0
    signals: tuple[str, ...] = DEFAULT_SIGNALS
    preemption: tuple[str, ...] = ()
    max_time: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    env_expand: Mapping[str, str] = field(default_factory=dict)
    interface: str | None = None
    config_hash: str | None = None
    transport: str = "auto"
    sharding: str = "auto"
    device: str = "auto"
    affinity: str = "auto"

    @property
    def preemption_signals(self) -> frozenset[signal.Signals]:
        """Those of ``preemption``."""
        return frozenset(signal.Signals[f"SIG{name}"] for name in self.preemption)

    def grace_after(self, number: signal.Signals) -> float:
        """Seconds that ranks have to end by themselves after a signal."""
        return max(self.grace_s, self.term_grace_s) if number == signal.SIGTERM else self.grace_s


def target_words(request: Request) -> tuple[str, ...]:
    """The script or module as Python's command line has it."""
    if request.is_module:
        return ("-m", request.target)
    # A name such as -x.py must not look like an option of Python's.
    return ("./" + request.target if request.target.startswith("-") else request.target,)


def asked_nproc(request: Request) -> tuple[int | None, str]:
    """Ranks on a node, and who asks for them; None where nobody does."""
    if request.nproc is not None:
        return request.nproc, "--nproc-per-node"
    if request.config_nproc is not None:
        return request.config_nproc, f"launch.nproc_per_node in {request.config_path}"
    return None, ""


def nproc_contradiction(request: Request) -> str | None:
    """What is wrong where command line and file ask for different numbers of ranks."""
    if request.nproc is None or request.config_nproc in (None, request.nproc):
        return None
    return (
        f"--nproc-per-node {request.nproc} contradicts launch.nproc_per_node: {request.config_nproc} in "
        f"{request.config_path}; give one of them, or the same number"
    )


def common_problems(request: Request) -> list[str]:
    """What is wrong wherever the ranks are started."""
    problems = parse_signals(request.signals)[1]
    if not 0 <= request.grace_s < float("inf"):
        problems.append(f"the grace time is {request.grace_s}; it is a number of seconds, 0 or more")
    return problems


def parse_signals(names: Iterable[str]) -> tuple[tuple[signal.Signals, ...], list[str]]:
    """The signals that are passed on, and what is wrong with their names."""
    problems = []
    signals = {signal.SIGINT, signal.SIGTERM}
    for name in names:
        number = getattr(signal, "SIG" + name.upper().removeprefix("SIG"), None)
        if not isinstance(number, signal.Signals):
            problems.append(f"launch.signals: {name!r} is no signal's name (such as USR1)")
        elif number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            problems.append(f"launch.signals: {number.name} cannot be passed on")
        else:
            signals.add(number)
    return tuple(sorted(signals)), problems


def job_of(request: Request, *, several_nodes: bool) -> Job:
    """What of a request matters for the variables of libraries."""
    return Job(request.transport, request.sharding, several_nodes, request.interface)


def job_env(request: Request, environ: Mapping[str, str]) -> dict[str, str]:
    """What the user's settings add to every rank's environment; variables that are set win over interface."""
    env: dict[str, str] = {}
    if request.interface is not None:
        env |= {name: request.interface for name in INTERFACE_NAMES if name not in environ}
    env |= request.env
    for name, value in request.env_expand.items():
        env[name] = _VARIABLE.sub(lambda found: environ.get(found[1] or found[2], ""), value)
    return env


def hash_of(request: Request, world_size: int, rendezvous: str) -> str:
    """Hash of what has to be equal on all ranks of a job; where each of them runs is left out."""
    plan = {
        "version": __version__,
        "command": [*target_words(request), *request.args],
        "world_size": world_size,
        "rendezvous": rendezvous,
        "config": request.config_hash,
        "env": dict(request.env),
        "env_expand": dict(request.env_expand),
        "interface": request.interface,
    }
    text = json.dumps(plan, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
