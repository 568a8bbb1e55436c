"""A plan as text for a person and a shell, or as JSON for a program. Secrets are masked."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from odc_launcher.job import JobPlan
from odc_launcher.memory import memory_warnings, render_memory
from odc_launcher.plan import SHOWN_PREFIXES, LaunchPlan, RankPlan
from odc_launcher.report import ranges
from odc_launcher.request import INTERFACE_NAMES, parse_signals
from odcengine.host.affinity import format_cores

_SECRET = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASSWORD", re.IGNORECASE)
_DEVICE_NAMES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
_LATER = (
    "interfaces, NVSHMEM's variables and cores are decided on each node, by the odc-launch that starts the "
    "ranks there; `srun ... odc-launch --plan ...` or `odc-launch doctor` shows them"
)


def render_job(plan: JobPlan, environ: Mapping[str, str]) -> str:
    """The command as text for a person and a shell; of a submission the script."""
    if plan.stdin is not None:
        extra = [comment(f"variable {name}={mask(name, value)}") for name, value in plan.env.items()]
        first, _, rest = plan.stdin.partition("\n")
        told = [comment(f"submitted by: {shlex.join(plan.argv)}"), *extra]
        return "\n".join([first, *told, rest])
    shown = shown_env(environ, plan.unset) | plan.env
    return f"{comment(plan.summary)}\n{shell_line(plan.argv, shown, plan.unset)}\n"


def describe(plan: JobPlan | LaunchPlan, environ: Mapping[str, str]) -> dict[str, object]:
    """The plan as plain data: hosts, ranks, devices, interfaces, ports, environment, commands, hash."""
    shown = shown_env(environ, plan.unset)
    common: dict[str, object] = {
        "devices": {name: environ[name] for name in _DEVICE_NAMES if name in environ},
        "log_dir": plan.log_dir,
        "hash": plan.hash,
        "summary": plan.summary,
        "warnings": list(plan.warnings),
        "signals": [],
    }
    if isinstance(plan, LaunchPlan):
        env = plan.ranks[0].env
        merged = shown | env
        ranks = [
            {
                "rank": rank.rank,
                "local_rank": int(rank.env["LOCAL_RANK"]),
                "cores": _cores(rank),
                "env": {name: mask(name, value) for name, value in (shown | rank.env).items()},
                "command": list(rank.argv),
                "log": rank.log_path,
            }
            for rank in plan.ranks
        ]
        return common | {
            "mode": "local" if plan.place is None else "adopt",
            "world_size": int(env["WORLD_SIZE"]),
            "hosts": [{"host": plan.host, "ranks": [rank.rank for rank in plan.ranks]}],
            "rendezvous": f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}",
            "interfaces": {name: merged[name] for name in INTERFACE_NAMES if name in merged},
            "signals": [number.name for number in plan.signals],
            "settings": [dataclasses.asdict(setting) for setting in plan.settings],
            "notes": list(plan.notes),
            "config": env.get("ODC_CONFIG"),
            "ranks": ranks,
        }
    merged = shown | plan.env
    request = plan.request
    ranks_of = plan.ranks or (None,) * len(plan.hosts)
    return common | {
        "mode": plan.mode,
        "world_size": plan.world_size,
        "hosts": [
            {"host": host, "ranks": None if ranks is None else list(ranks)}
            for host, ranks in zip(plan.hosts, ranks_of, strict=True)
        ],
        "rendezvous": plan.rendezvous,
        "interfaces": {name: merged[name] for name in INTERFACE_NAMES if name in merged},
        "signals": [number.name for number in parse_signals(request.signals)[0]],
        "config": request.config_path,
        "config_hash": request.config_hash,
        "notes": [_LATER],
        "env": {name: mask(name, value) for name, value in merged.items()},
        "env_expand": dict(request.env_expand),
        "command": list(plan.argv),
        "script": plan.stdin,
    }


def _cores(rank: RankPlan) -> str | None:
    """``0-15 (near GPU 0000:1b:00.0)``; None on hosts without GPUs."""
    cores, reason = rank.affinity.cores, rank.affinity.reason
    if not reason:
        return None
    return f"{format_cores(cores) if cores else 'as they are'} ({reason})"


def render_plan(
    plan: JobPlan | LaunchPlan,
    environ: Mapping[str, str],
    form: str,
    memory: Mapping[str, Any] | None = None,
) -> str:
    """``describe``, and the memory of a rank where given, as text or JSON."""
    data = describe(plan, environ)
    warnings = list(plan.warnings)
    if memory is not None:
        data["memory"] = memory
        data["warnings"] = warnings = [*warnings, *memory_warnings(memory)]
    if form == "json":
        return json.dumps(data, indent=2) + "\n"
    lines = []
    for name in ("summary", "mode", "world_size", "rendezvous", "log_dir", "config", "hash"):
        unknown = "none" if name == "config" else "not known before the job runs"
        value = unknown if data.get(name) is None else data[name]
        lines.append(f"{name.replace('_', ' ')}: {value}")
    for name in ("devices", "interfaces"):
        items = data[name]
        assert isinstance(items, dict)
        pairs = ", ".join(f"{key}={value}" for key, value in items.items())
        lines.append(f"{name}: {pairs or 'as the libraries choose'}")
    hosts = data["hosts"]
    assert isinstance(hosts, list)
    for host in hosts:
        ranks = host["ranks"]
        lines.append(
            f"host {host['host']}: {'ranks as SLURM places them' if ranks is None else ranges(ranks)}"
        )
    lines += [f"note: {note}" for note in (plan.notes if isinstance(plan, LaunchPlan) else [_LATER])]
    if isinstance(plan, LaunchPlan):
        lines += [f"sets {item.name}={item.value}: {item.reason}" for item in plan.settings]
        lines += [f"cores of rank {rank.rank}: {_cores(rank)}" for rank in plan.ranks if _cores(rank)]
    lines += [] if memory is None else render_memory(memory)
    lines += [f"warning: {warning}" for warning in warnings]
    text = render(plan, environ) if isinstance(plan, LaunchPlan) else render_job(plan, environ)
    return "\n".join(lines) + "\n\n" + text


def shell_line(argv: Sequence[str], env: Mapping[str, str], unset: Sequence[str] = ()) -> str:
    """A command with its environment as a line that a shell parses back; secrets are masked."""
    words = ["env"] if env or unset else []
    for name in unset:
        words += ["-u", name]
    for name, value in env.items():
        words.append(f"{name}={shlex.quote(mask(name, value))}")
    return " ".join([*words, *(shlex.quote(word) for word in argv)])


def mask(name: str, value: str) -> str:
    """The value of a variable as it may be shown."""
    return "***" if _SECRET.search(name) else value


def shown_env(environ: Mapping[str, str], unset: Sequence[str] = ()) -> dict[str, str]:
    """Of the inherited environment what concerns the run."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(SHOWN_PREFIXES) and name not in unset
    }


def render(plan: LaunchPlan, environ: Mapping[str, str]) -> str:
    """The plan as text for a person and a shell: comments, and one command a rank.

    A shell that parses a command gets the rank's arguments and variables byte for byte, except that the
    values of variables whose names look like secrets are replaced by ``***``. Of the inherited
    environment only what concerns the run is shown; arguments are shown as they are. The cores of a rank are
    in its comment: the launcher binds it.
    """
    inherited = shown_env(environ, plan.unset)
    lines = [comment(plan.summary)]
    for rank in plan.ranks:
        cores = _cores(rank)
        lines.append(comment(f"rank {rank.rank}, log {rank.log_path}{f', cores {cores}' if cores else ''}"))
        lines.append(shell_line(rank.argv, inherited | rank.env, plan.unset))
    return "\n".join(lines) + "\n"


def comment(text: str) -> str:
    """A line that a shell skips."""
    return "# " + text.replace("\n", "\\n")
