"""The environment names of the launchers that are known, in one table."""

from __future__ import annotations

from collections.abc import Mapping

from odcengine._claims import Claim, LauncherTable, whole_number
from odcengine.errors import ConfigError
from odcengine.slurm_step import claim_of_step

# The innermost first. OMPI_COMM_WORLD_NODE_RANK is missing on purpose: it numbers processes, not nodes.
LAUNCHERS: tuple[LauncherTable, ...] = (
    LauncherTable(
        name="torchrun",
        required={"rank": "RANK", "world_size": "WORLD_SIZE"},
        optional={
            "local_rank": "LOCAL_RANK",
            "local_world_size": "LOCAL_WORLD_SIZE",
            "node_rank": "GROUP_RANK",
            "num_nodes": "GROUP_WORLD_SIZE",
        },
        starts_mpi=False,
    ),
    LauncherTable(
        name="Open MPI",
        required={"rank": "OMPI_COMM_WORLD_RANK", "world_size": "OMPI_COMM_WORLD_SIZE"},
        optional={
            "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
            "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
        },
        job=("PMIX_NAMESPACE", "OMPI_MCA_orte_ess_jobid", "OMPI_MCA_ess_base_jobid"),
    ),
    LauncherTable(
        name="Cray PALS",
        required={"rank": "PALS_RANKID", "world_size": "PMI_SIZE"},
        optional={
            "local_rank": "PALS_LOCAL_RANKID",
            "local_world_size": "PALS_LOCAL_SIZE",
            "node_rank": "PALS_NODEID",
        },
        job=("PALS_APID",),
    ),
    LauncherTable(
        name="Intel MPI",
        required={"rank": "PMI_RANK", "world_size": "PMI_SIZE"},
        optional={"local_rank": "MPI_LOCALRANKID", "local_world_size": "MPI_LOCALNRANKS"},
        marker="I_MPI_ROOT",
    ),
    LauncherTable(
        name="MPICH (Hydra)",
        required={"rank": "PMI_RANK", "world_size": "PMI_SIZE"},
        optional={"local_rank": "MPI_LOCALRANKID", "local_world_size": "MPI_LOCALNRANKS"},
        unless="I_MPI_ROOT",
    ),
    LauncherTable(  # says nothing of the number of ranks: SLURM or MPI beside it does
        name="PMIx",
        required={"rank": "PMIX_RANK"},
        optional={},
        job=("PMIX_NAMESPACE",),
    ),
    # SLURM's world size has several sources; see slurm_step.py.
    LauncherTable(
        name="SLURM",
        required={"rank": "SLURM_PROCID", "world_size": "SLURM_STEP_NUM_TASKS"},
        optional={
            "local_rank": "SLURM_LOCALID",
            "local_world_size": "SLURM_STEP_TASKS_PER_NODE",
            "node_rank": "SLURM_NODEID",
            "num_nodes": "SLURM_STEP_NUM_NODES",
        },
        job=("SLURM_JOB_ID",),
        starts_mpi=False,  # unless its step has PMIx's variables, or PMI's, as well
    ),
)


def read_claims(env: Mapping[str, str]) -> list[Claim]:
    """What the launchers say that have left their variables, the innermost first.

    Raises:
        ConfigError: a variable is missing beside its fellows, is no whole number, or does not fit another of
            the same launcher.
    """
    claims = [claim for table in LAUNCHERS if (claim := _claim(table, env)) is not None]
    for claim in claims:
        _check(claim)
    return claims


def _claim(table: LauncherTable, env: Mapping[str, str]) -> Claim | None:
    if table.name == "SLURM":
        return claim_of_step(table, env)
    names = list(table.required.values())
    identifying = names if table.name == "torchrun" else names[:1]
    present = [name for name in identifying if name in env]
    lacks_marker = table.marker is not None and table.marker not in env
    is_another = table.unless is not None and table.unless in env
    if not present or lacks_marker or is_another:
        return None
    missing = [name for name in names if name not in env]
    if missing:
        raise ConfigError(
            f"environment: {present[0]}={env[present[0]]} is set but {', '.join(missing)} is not; "
            f"{table.name} sets {' and '.join(names)} together "
            "(start the script with odc-launch, or unset both for a single process)"
        )
    found = {key: name for key, name in {**table.required, **table.optional}.items() if name in env}
    return Claim(
        table,
        {key: whole_number(env, name) for key, name in found.items()},
        {key: f"{name}={env[name]}" for key, name in found.items()},
    )


def _check(claim: Claim) -> None:
    pairs = (("rank", "world_size"), ("local_rank", "local_world_size"), ("node_rank", "num_nodes"))
    for index, size in pairs:
        i, n = claim.get(index), claim.get(size)
        if i is not None and n is not None and i >= n:
            raise ConfigError(
                f"environment: {claim.words[index]} must be below {claim.words[size]} "
                f"(from {claim.table.name})"
            )
    local, world = claim.get("local_world_size"), claim.get("world_size")
    if local is not None and world is not None and local > world:
        raise ConfigError(
            f"environment: {claim.words['local_world_size']} must be at most {claim.words['world_size']} "
            f"(from {claim.table.name})"
        )
