"""What SLURM's variables say of a job step: whether this is one, its ranks and its hosts.

SLURM says some numbers in several ways, and some variables describe what the job asked for instead of what
the step has.
"""

from __future__ import annotations

from collections.abc import Mapping

from odcengine._claims import Claim, LauncherTable, whole_number
from odcengine.errors import ConfigError
from odcengine.hostlist import expand_counts, expand_hostlist, read_hostfile

_SPECIAL_STEPS = 0xFFFFFFF0  # SLURM numbers the batch script, the interactive step and others from here on


def slurm_in_step(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task of ``srun``, not a batch script or an interactive shell of SLURM's."""
    number = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if number.isdecimal():
        return int(number) < _SPECIAL_STEPS
    return "SLURM_STEP_NUM_TASKS" in environ or "SLURM_STEP_TASKS_PER_NODE" in environ


def step_hosts(environ: Mapping[str, str]) -> list[str]:
    """The hosts of a SLURM step or allocation, the host of rank 0 first; empty outside of SLURM.

    With arbitrary distribution the file ``SLURM_HOSTFILE`` says which host runs which rank: then its order
    counts, each host once.

    Raises:
        ConfigError: a list is not understood, or the file names hosts outside of the step.
    """
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    name = next((name for name in names if environ.get(name)), None)
    hosts = expand_hostlist(environ[name], name) if name is not None else []
    hostfile = environ.get("SLURM_HOSTFILE")
    if hostfile and environ.get("SLURM_DISTRIBUTION", "arbitrary").startswith("arbitrary"):
        ordered = list(dict.fromkeys(read_hostfile(hostfile)))
        strange = [host for host in ordered if hosts and host not in hosts]
        if strange:
            raise ConfigError(
                f"SLURM_HOSTFILE={hostfile} names {', '.join(strange)}, which {name}={environ[name or '']} "
                "does not contain"
            )
        return ordered + [host for host in hosts if host not in ordered]
    return hosts


def claim_of_step(table: LauncherTable, env: Mapping[str, str]) -> Claim | None:
    """A step's numbers, of what it really started, not of what the job asked for; None outside of a step.

    Raises:
        ConfigError: a variable is missing or contradicts another.
    """
    if not slurm_in_step(env):
        return None
    numbers: dict[str, int] = {}
    words: dict[str, str] = {}

    def take(key: str, name: str) -> None:
        if key not in numbers and name in env:
            numbers[key], words[key] = whole_number(env, name), f"{name}={env[name]}"

    take("world_size", "SLURM_STEP_NUM_TASKS")
    counts: list[int] = []
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE")
    if per_node is not None:
        counts = expand_counts(per_node, "SLURM_STEP_TASKS_PER_NODE")
        if numbers.get("world_size", sum(counts)) != sum(counts):
            raise ConfigError(
                f"environment: SLURM_STEP_TASKS_PER_NODE={per_node} adds up to {sum(counts)} tasks, but "
                f"{words['world_size']}; both describe this step: unset what another job left"
            )
        if "world_size" not in numbers:
            numbers["world_size"] = sum(counts)
            words["world_size"] = f"SLURM_STEP_TASKS_PER_NODE={per_node}"
    take("world_size", "SLURM_NTASKS")
    if "world_size" not in numbers:
        raise ConfigError(
            "environment: SLURM_STEP_ID is set but neither SLURM_STEP_NUM_TASKS, SLURM_STEP_TASKS_PER_NODE "
            "nor SLURM_NTASKS says how many tasks the step has; start with srun or odc-launch"
        )
    take("rank", "SLURM_PROCID")
    if "rank" not in numbers:
        if numbers["world_size"] != 1:
            raise ConfigError(
                f"environment: {words['world_size']} is set but SLURM_PROCID is not; srun sets both"
            )
        numbers["rank"], words["rank"] = 0, "SLURM_PROCID not set"
    take("local_rank", "SLURM_LOCALID")
    take("node_rank", "SLURM_NODEID")
    take("num_nodes", "SLURM_STEP_NUM_NODES")
    if counts:
        if numbers.get("num_nodes", len(counts)) != len(counts):
            raise ConfigError(
                f"environment: SLURM_STEP_TASKS_PER_NODE={per_node} speaks of {len(counts)} nodes, but "
                f"{words['num_nodes']}; both describe this step"
            )
        numbers["num_nodes"] = len(counts)
        words.setdefault("num_nodes", f"SLURM_STEP_TASKS_PER_NODE={per_node}")
        node = numbers.get("node_rank", 0 if len(counts) == 1 else None)
        if node is not None and node < len(counts):
            numbers["local_world_size"] = counts[node]
            words["local_world_size"] = f"SLURM_STEP_TASKS_PER_NODE={per_node}"
    return Claim(table, numbers, words)
