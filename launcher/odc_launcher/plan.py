"""From what the user asked for to what is started: pure, so it is tested and printed without processes."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from odcengine.errors import ConfigError

DEFAULT_GRACE_S = 30.0
DEFAULT_SIGNALS = ("INT", "TERM", "HUP", "USR1", "USR2")
RANKS_PER_CORE_LIMIT = 4

# Of the environment that ranks inherit, what a reader of the plan wants to see.
SHOWN_PREFIXES = ("NVSHMEM_", "NCCL_", "CUDA_", "TORCH", "ODC", "OMP_", "MKL_", "HF_", "WANDB_")
_SECRET = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASSWORD", re.IGNORECASE)
_RANK_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


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
        signals: names of the signals that are passed on; INT and TERM always are.
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
    signals: tuple[str, ...] = DEFAULT_SIGNALS


@dataclass(frozen=True)
class Machine:
    """What the plan needs to know of the machine and the moment.

    Attributes:
        host: the host's name.
        cores: usable cores.
        cores_from: where that number comes from, in words.
        master_port: the rendezvous port.
        python: the interpreter that runs the ranks.
        cwd: the working folder.
        run_name: names the default log folder: date, time and process id.
    """

    host: str
    cores: int
    cores_from: str
    master_port: int
    python: str
    cwd: str
    run_name: str


@dataclass(frozen=True)
class RankPlan:
    """One rank: its command, what is set in its environment, and its files (absolute paths)."""

    rank: int
    argv: tuple[str, ...]
    env: dict[str, str]
    log_path: str
    error_path: str


@dataclass(frozen=True)
class LaunchPlan:
    """All that a back end needs to start the ranks of this host.

    Attributes:
        host: the host's name.
        ranks: the ranks in order.
        log_dir: absolute path of the log folder.
        unset: names removed from the inherited environment.
        shown: ranks that appear on stdout.
        grace_s: seconds that ranks have to end by themselves.
        signals: signals that are passed on.
        summary: one line that says what is started.
        warnings: what the user should know, one line each.
    """

    host: str
    ranks: tuple[RankPlan, ...]
    log_dir: str
    unset: tuple[str, ...]
    shown: frozenset[int]
    grace_s: float
    signals: tuple[signal.Signals, ...]
    summary: str
    warnings: tuple[str, ...]


def make_plan(request: Request, environ: Mapping[str, str], machine: Machine) -> LaunchPlan:
    """Plans a launch on this host.

    Args:
        request: what the user asked for.
        environ: the environment that the ranks inherit.
        machine: the host.

    Raises:
        ConfigError: with everything that is wrong at once.
    """
    problems = [*_nesting_problems(environ), *_nproc_problems(request, machine)]
    signals, signal_problems = _parse_signals(request.signals)
    problems += signal_problems
    if not 0 <= request.grace_s < float("inf"):
        problems.append(f"the grace time is {request.grace_s}; it is a number of seconds, 0 or more")
    if problems:
        raise ConfigError(*problems)

    nproc, nproc_from = _nproc(request)
    warnings = []
    if nproc > machine.cores:
        warnings.append(
            f"{nproc} ranks share {machine.cores} usable cores ({machine.cores_from}): "
            "they slow each other down"
        )
    if environ.get("MASTER_ADDR", "127.0.0.1") not in ("127.0.0.1", "localhost", machine.host):
        warnings.append(
            f"MASTER_ADDR={environ['MASTER_ADDR']} is replaced by 127.0.0.1: "
            "all ranks of this launch run on this host"
        )
    if "RANK" in environ or "WORLD_SIZE" in environ:
        warnings.append("RANK and WORLD_SIZE of the environment are replaced for each rank")
    unset: tuple[str, ...] = ()
    if request.config_path is None and "ODC_CONFIG" in environ:
        unset = ("ODC_CONFIG",)
        warnings.append(
            f"ODC_CONFIG={environ['ODC_CONFIG']} of the environment is not passed on: "
            "give the file with --config, so that it is checked first"
        )

    log_dir = os.path.join(machine.cwd, request.log_dir or os.path.join("odc_logs", machine.run_name))
    common = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(machine.master_port),
    }
    if request.config_path is not None:
        common["ODC_CONFIG"] = os.path.join(machine.cwd, request.config_path)
    threads = environ.get("OMP_NUM_THREADS")
    if threads is None:
        threads = common["OMP_NUM_THREADS"] = str(max(1, machine.cores // nproc))
        threads_from = f"{machine.cores} cores / {nproc} ranks"
    else:
        threads_from = "your environment"

    if request.is_module:
        target: tuple[str, ...] = ("-m", request.target)
    else:  # a name such as -x.py must not look like an option of Python's
        target = ("./" + request.target if request.target.startswith("-") else request.target,)
    ranks = []
    for rank in range(nproc):
        error_path = os.path.join(log_dir, f"rank{rank}.error.json")
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ODC_ERROR_FILE": error_path}
        ranks.append(
            RankPlan(
                rank=rank,
                argv=(machine.python, "-u", *target, *request.args),
                env=common | numbers,
                log_path=os.path.join(log_dir, f"rank{rank}.log"),
                error_path=error_path,
            )
        )
    return LaunchPlan(
        host=machine.host,
        ranks=tuple(ranks),
        log_dir=log_dir,
        unset=unset,
        shown=frozenset({"all": range(nproc), "rank0": range(1), "none": range(0)}[request.show]),
        grace_s=request.grace_s,
        signals=signals,
        summary=(
            f"{nproc} rank{'s' * (nproc > 1)} on {machine.host} (number from {nproc_from}), "
            f"port {machine.master_port}, OMP_NUM_THREADS={threads} ({threads_from}), "
            f"logs in {os.path.relpath(log_dir, machine.cwd)}"
        ),
        warnings=tuple(warnings),
    )


def render(plan: LaunchPlan, environ: Mapping[str, str]) -> str:
    """The plan as text for a person and a shell: comments, and one command a rank.

    A shell that parses a command gets the rank's arguments and variables byte for byte, except that the
    values of variables whose names look like secrets are replaced by ``***``. Of the inherited
    environment only what concerns the run is shown; arguments are shown as they are.
    """
    inherited = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(SHOWN_PREFIXES) and name not in plan.unset
    }
    lines = [_comment(plan.summary)]
    for rank in plan.ranks:
        words = ["env"]
        for name in plan.unset:
            words += ["-u", name]
        for name, value in (inherited | rank.env).items():
            shown = "***" if _SECRET.search(name) else value
            words.append(f"{name}={shlex.quote(shown)}")
        words += [shlex.quote(word) for word in rank.argv]
        lines.append(_comment(f"rank {rank.rank}, log {rank.log_path}"))
        lines.append(" ".join(words))
    return "\n".join(lines) + "\n"


def _comment(text: str) -> str:
    return "# " + text.replace("\n", "\\n")


def _nproc(request: Request) -> tuple[int, str]:
    if request.nproc is not None:
        return request.nproc, "--nproc-per-node"
    if request.config_nproc is not None:
        return request.config_nproc, f"launch.nproc_per_node in {request.config_path}"
    return 1, "the default; --nproc-per-node starts more"


def _nproc_problems(request: Request, machine: Machine) -> Iterable[str]:
    nproc, nproc_from = _nproc(request)
    if request.nproc is not None and request.config_nproc not in (None, request.nproc):
        yield (
            f"--nproc-per-node {request.nproc} contradicts launch.nproc_per_node: "
            f"{request.config_nproc} in {request.config_path}; give one of them, or the same number"
        )
    elif nproc < 1:
        yield f"{nproc} ranks asked for (by {nproc_from}); it takes at least 1"
    elif nproc > RANKS_PER_CORE_LIMIT * machine.cores and not request.oversubscribe:
        yield (
            f"{nproc} ranks on {machine.cores} usable cores ({machine.cores_from}) are more than "
            f"{RANKS_PER_CORE_LIMIT} a core (number from {nproc_from}); start at most "
            f"{RANKS_PER_CORE_LIMIT * machine.cores}, or add --oversubscribe if you mean it"
        )


def _nesting_problems(environ: Mapping[str, str]) -> Iterable[str]:
    """A launch inside a rank of another would multiply the ranks; a world of one is harmless."""
    rank, world_size = environ.get("RANK"), environ.get("WORLD_SIZE")
    if rank is None or world_size in (None, "1"):
        return
    unset = " ".join(f"-u {name}" for name in _RANK_NAMES if name in environ)
    yield (
        f"this process is already a rank of a launch (RANK={rank}, WORLD_SIZE={world_size}): each of "
        f"the {world_size} ranks would start its own; for a separate launch run: "
        f"env {unset} odc-launch ..."
    )


def _parse_signals(names: Iterable[str]) -> tuple[tuple[signal.Signals, ...], list[str]]:
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
