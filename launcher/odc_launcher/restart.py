"""Starting the ranks again after a failure, on the nodes that are left. Decisions are pure functions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping

from odc_launcher.failure import Outcome
from odcengine.hostlist import expand_counts, expand_hostlist
from odcengine.preemption import REQUEUE_EXIT_CODE

_ASKED = "SecondSignal"
_MISTAKES = ("ConfigError", "UsageError", "SyntaxError", "ImportError", "ModuleNotFoundError")
_COMMAND_TIMEOUT_S = 30.0
_START_LIMIT_S = 300
"""Longer than SLURM takes to end the ranks of the last start (``KillWait`` and ``UnkillableStepTimeout``)."""
_GONE = ("down", "fail", "unknown", "not_responding", "power")


def why_not(outcome: Outcome, done: int, limit: int) -> str | None:
    """Why the ranks are not started again; None where they should be, and ``""`` where nobody asks.

    Args:
        outcome: how the last start ended.
        done: restarts so far.
        limit: ``launch.max_restarts``.
    """
    if outcome.code in (0, REQUEUE_EXIT_CODE) or limit == 0:
        return ""
    record = outcome.first.record if outcome.first is not None else None
    if (outcome.stopped and outcome.asked_by is None) or (record is not None and record.kind == _ASKED):
        return "the job was told to stop"
    if record is not None and record.kind in _MISTAKES:
        return f"another start would meet the same {record.kind}"
    if done >= limit:
        return f"{done} restarts were allowed (launch.max_restarts)"
    return None


def run(start: Callable[[int], Outcome], limit: int) -> int:
    """Start the ranks, again after failures.

    Args:
        start: starts them and waits; gets the number of restarts so far.
        limit: restarts at most.

    Returns:
        The exit code of the last start; 75 where ranks failed after a signal of ``preemption`` had come:
        started again here, they would not know of it.
    """
    done = 0
    while True:
        outcome = start(done)
        reason = why_not(outcome, done, limit)
        if reason is not None:
            if reason:
                _note(f"not started again: {reason}")
            return outcome.code
        if outcome.asked_by is not None:
            _note(
                f"not started again: {outcome.asked_by} came; ended with {REQUEUE_EXIT_CODE} to go on from "
                "the newest checkpoint in a new run"
            )
            return REQUEUE_EXIT_CODE
        done += 1
        _note(f"restart {done} of {limit}: the ranks go on from the newest checkpoint")


def srun_args(given: tuple[str, ...], environ: Mapping[str, str]) -> tuple[str, ...]:
    """The options of a restart's srun, which else waits for ever for nodes that SLURM does not give back.

    Args:
        given: the user's, which win.
        environ: what srun inherits; ``SLURM_IMMEDIATE`` is the user's, too.
    """
    return given if "SLURM_IMMEDIATE" in environ else (f"--immediate={_START_LIMIT_S}", *given)


def healthy_environ(
    environ: Mapping[str, str], hosts: tuple[str, ...], states: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The environment of the allocation as if it had only the nodes that work.

    Args:
        environ: the environment inside the allocation.
        hosts: its nodes.
        states: SLURM's state of each node that it tells of.

    Returns:
        The environment, and the nodes that are left out.
    """
    bad = {host for host in hosts if _is_gone(states.get(host, "allocated"))}
    if not bad or len(bad) == len(hosts):
        return dict(environ), ()
    per_node = environ.get("SLURM_TASKS_PER_NODE")
    tasks = [1] * len(hosts) if per_node is None else expand_counts(per_node, "SLURM_TASKS_PER_NODE")
    if len(tasks) != len(hosts):
        return dict(environ), ()
    left = [(host, count) for host, count in zip(hosts, tasks, strict=True) if host not in bad]
    names, counts = ",".join(host for host, _ in left), [count for _, count in left]
    number = str(len(left))
    changed = {
        "SLURM_JOB_NODELIST": names,
        "SLURM_NODELIST": names,
        "SLURM_JOB_NUM_NODES": number,
        "SLURM_NNODES": number,
    }
    asked = {
        "SLURM_NTASKS": str(sum(counts)),
        "SLURM_NPROCS": str(sum(counts)),
        "SLURM_TASKS_PER_NODE": ",".join(map(str, counts)),
    }
    changed |= {name: value for name, value in asked.items() if name in environ}
    kept = {name: value for name, value in environ.items() if name != "SLURM_GPUS"}  # srun would ask for all
    return {**kept, **changed}, tuple(host for host in hosts if host in bad)


def _is_gone(state: str) -> bool:
    state = state.lower()
    return state.endswith("*") or any(word in state for word in _GONE)


def node_states(hosts: tuple[str, ...], job: str) -> dict[str, str]:
    """SLURM's state of each node; of one that the job has lost, ``failed``.

    Args:
        hosts: the nodes that the job had.
        job: its id. It has lost a node for good, even if that works again by now.
    """
    argv = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", "--format=%N %T"]
    rows = (line.split() for line in _ask(argv).splitlines())
    states = {row[0]: row[1] for row in rows if len(row) == 2}
    return states | lost_nodes(hosts, _ask(["scontrol", "show", "job", "--oneliner", job]))


def lost_nodes(hosts: tuple[str, ...], shown: str) -> dict[str, str]:
    """The nodes that a job does not have any more, each ``failed``.

    Args:
        hosts: the nodes that it had.
        shown: what ``scontrol show job --oneliner`` prints.
    """
    found = re.search(r"(?:^|\s)NodeList=(\S+)", shown)
    if found is None or found.group(1) == "(null)":
        return {}
    kept = expand_hostlist(found.group(1), "NodeList of scontrol")
    return {host: "failed" for host in hosts if host not in kept}


def _ask(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, timeout=_COMMAND_TIMEOUT_S, check=True, capture_output=True, text=True)
    except (OSError, subprocess.SubprocessError) as error:
        _note(f"{argv[0]} does not tell which nodes work: {error}")
        return ""
    return done.stdout


def log_folder(first: str, done: int) -> str:
    """Logs of a restart lie in a folder inside that of the first start."""
    return first if done == 0 else os.path.join(first, f"restart-{done}")


def _note(text: str) -> None:
    print(f"odc-launch: {text}", file=sys.stderr, flush=True)
