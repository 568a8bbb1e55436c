"""What SLURM, MPI and torchrun leave in the environment: user case 2, the table, and contradictions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from odcengine.config import Config
from odcengine.errors import ConfigError
from odcengine.ranks import PORTS, RankInfo, job_port, read_rank_info
from odcengine.slurm_step import step_hosts
from odcengine.topology import Topology

Env = dict[str, str]

# As real launchers set them: SLURM 22.05's srun and Open MPI 4.1.4 were run, the others are documented.
STEP: Env = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
OPEN_MPI: Env = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "PMIX_RANK": "2",
    "PMIX_NAMESPACE": "1234",
}
HYDRA: Env = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
INTEL: Env = {**HYDRA, "I_MPI_ROOT": "/opt/intel/mpi"}
PALS: Env = {
    "PALS_RANKID": "2",
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
    "PALS_LOCAL_RANKID": "0",
    "PALS_LOCAL_SIZE": "2",
    "PALS_NODEID": "1",
    "PALS_APID": "abc",
}
TORCH: Env = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}


@pytest.mark.parametrize(
    ("env", "source", "node"),
    [
        (STEP, "SLURM", 1),
        (OPEN_MPI, "Open MPI", None),
        (HYDRA, "MPICH (Hydra)", None),
        (INTEL, "Intel MPI", None),
        (PALS, "Cray PALS", 1),
        (TORCH, "torchrun", 1),
        ({**STEP, "PMIX_RANK": "2"}, "SLURM", 1),
        ({**STEP, **HYDRA}, "MPICH (Hydra)", 1),  # srun --mpi=pmi2: SLURM adds the node
        ({**STEP, **TORCH}, "torchrun", 1),
    ],
)
def test_every_launcher_is_read(env: Env, source: str, node: int | None) -> None:
    info = read_rank_info(env)
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (2, 4, 0, 2)
    assert (info.source, info.node_rank) == (source, node)
    assert info.warnings == ()


def test_plan_hash_is_handed_on() -> None:
    assert read_rank_info({**TORCH, "ODC_PLAN_HASH": "abc"}).plan_hash == "abc"


# -- user case 2 -------------------------------------------------------------------------------------------


def test_the_real_count_of_the_step_counts() -> None:
    """(b) One task, although two per node were asked for: no wait for a rank that nobody started."""
    info = read_rank_info({"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_NUM_TASKS": "1"})
    assert (info.rank, info.world_size) == (0, 1)
    (warning,) = info.warnings
    assert "SLURM_STEP_NUM_TASKS=1" in warning
    assert "SLURM_NTASKS_PER_NODE=2" in warning


def test_uneven_nodes() -> None:
    """(c) Rank 9 of 10 is local rank 1 of 2, not of 3; hybrid sharding is refused with the counts."""
    info = read_rank_info(
        {
            "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
            "SLURM_NTASKS": "10",
            "SLURM_NODEID": "2",
            "SLURM_PROCID": "9",
            "SLURM_LOCALID": "1",
        }
    )
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (9, 10, 1, 2)
    assert (info.node_rank, info.num_nodes) == (2, 3)
    assert choose_nodes("full").nodes == (tuple(range(10)),)
    with pytest.raises(ConfigError, match=r"same number of ranks.*\{'n0': 4, 'n1': 4, 'n2': 2\}"):
        choose_nodes("hybrid")


def choose_nodes(sharding: str) -> Topology:
    from odcengine.config import load_config
    from odcengine.start import _choose_nodes

    hosts = ("n0",) * 4 + ("n1",) * 4 + ("n2",) * 2
    topology = Topology(9, hosts, ("one machine",) * 10, ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9)))
    config: Config = load_config({"train_batch_size": 10, "odc": {"sharding": sharding}})
    return _choose_nodes(topology, config, device=_cpu())


def _cpu() -> Any:
    from odcengine.device import choose_device

    return choose_device(RankInfo(0, 1), "cpu")


# -- what is no step ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290", "4294967292"])
def test_batch_scripts_and_interactive_shells_are_no_ranks(step: str | None) -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NODEID": "0"}
    if step is not None:
        env["SLURM_STEP_ID"] = step
    assert read_rank_info(env) == RankInfo(0, 1)


# -- the rendezvous ----------------------------------------------------------------------------------------


def test_rendezvous_of_a_step_is_derived_alike_on_all_nodes() -> None:
    ranks = [
        {**STEP, "SLURM_PROCID": str(r), "SLURM_NODEID": str(r // 2), "SLURM_LOCALID": str(r % 2)}
        for r in range(4)
    ]
    (rendezvous,) = {read_rank_info(env).rendezvous for env in ranks}
    assert rendezvous is not None
    host, _, port = rendezvous.partition(":")
    assert host == "n1"
    assert int(port) in PORTS
    assert max(PORTS) < 32768
    other = read_rank_info({**ranks[0], "SLURM_STEP_ID": "1"}).rendezvous
    assert other != rendezvous
    assert read_rank_info({**ranks[0], "MASTER_PORT": "4444"}).rendezvous == "n1:4444"
    assert read_rank_info({**ranks[0], "MASTER_ADDR": "10.0.0.1"}).rendezvous == f"10.0.0.1:{port}"
    assert len({job_port(f"slurm {job}.0") for job in range(200)}) > 190


def test_order_of_a_hostfile_counts(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("n2\nn2\nn1\nn1\n")
    env = {**STEP, "SLURM_HOSTFILE": str(file), "SLURM_DISTRIBUTION": "arbitrary"}
    assert step_hosts(env) == ["n2", "n1"]
    assert str(read_rank_info(env).rendezvous).startswith("n2:")
    assert step_hosts({**env, "SLURM_DISTRIBUTION": "block"}) == ["n1", "n2"]
    file.write_text("n9\n")
    with pytest.raises(ConfigError, match=r"names n9, which SLURM_STEP_NODELIST=n\[1-2\] does not contain"):
        step_hosts(env)


def test_wrong_hostlist_stops_with_the_string() -> None:
    with pytest.raises(ConfigError, match=r"SLURM_STEP_NODELIST='n\[1-' is not understood"):
        read_rank_info({**STEP, "SLURM_STEP_NODELIST": "n[1-"})


def test_a_step_of_one_rank_meets_nobody() -> None:
    """``srun --pty bash``, and python there: a single process, as anywhere else."""
    env = {**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    env |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "n1"}
    assert read_rank_info(env).rendezvous is None


def test_mpi_on_one_host_needs_no_address_and_on_several_does() -> None:
    one = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}
    assert read_rank_info(one).rendezvous == f"127.0.0.1:{job_port('PMIX_NAMESPACE 1234')}"
    assert read_rank_info(OPEN_MPI).rendezvous is None
    assert read_rank_info({**OPEN_MPI, "MASTER_ADDR": "a", "MASTER_PORT": "1"}).rendezvous == "a:1"


# -- contradictions ----------------------------------------------------------------------------------------


def test_contradictions_say_how_to_unset_either_side() -> None:
    left_over = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "1"}
    with pytest.raises(ConfigError) as caught:
        read_rank_info({**left_over, **step})
    assert "(env -u RANK -u WORLD_SIZE, or env -u SLURM_PROCID -u SLURM_STEP_NUM_TASKS)" in str(caught.value)


@pytest.mark.parametrize(
    ("env", "parts"),
    [
        (
            {**STEP, "RANK": "0", "WORLD_SIZE": "1"},
            ["RANK=0, WORLD_SIZE=1", "SLURM_PROCID=2", "SLURM_STEP_NUM_TASKS=4"],
        ),
        ({**STEP, **TORCH, "RANK": "3", "LOCAL_RANK": "1"}, ["RANK=3", "SLURM_PROCID=2"]),
        ({**STEP, **TORCH, "WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS=4"]),
        ({**STEP, **TORCH, "LOCAL_RANK": "1"}, ["LOCAL_RANK=1", "SLURM_LOCALID=0"]),
        ({**STEP, **OPEN_MPI, "OMPI_COMM_WORLD_RANK": "1"}, ["OMPI_COMM_WORLD_RANK=1", "PMIX_RANK=2"]),
        ({**OPEN_MPI, **TORCH, "RANK": "1"}, ["RANK=1", "OMPI_COMM_WORLD_RANK=2"]),
        ({**PALS, "PMI_RANK": "1"}, ["PALS_RANKID=2", "PMI_RANK=1"]),
        ({**STEP, "PMIX_RANK": "1"}, ["SLURM_PROCID=2", "PMIX_RANK=1"]),
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "8"},
            ["SLURM_STEP_TASKS_PER_NODE=2(x2)", "4 tasks", "SLURM_STEP_NUM_TASKS=8"],
        ),
        (
            {**STEP, "SLURM_STEP_NUM_NODES": "3"},
            ["SLURM_STEP_TASKS_PER_NODE=2(x2)", "SLURM_STEP_NUM_NODES=3"],
        ),
        ({**STEP, "SLURM_LOCALID": "2"}, ["SLURM_LOCALID=2", "SLURM_STEP_TASKS_PER_NODE=2(x2)"]),
        ({**STEP, "SLURM_NODEID": "2"}, ["SLURM_NODEID=2", "SLURM_STEP_NUM_NODES=2"]),
        ({"PMIX_RANK": "3"}, ["PMIX_RANK=3", "not the number of ranks"]),
        ({"OMPI_COMM_WORLD_RANK": "3"}, ["OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE is not"]),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, ["SLURM_STEP_NUM_TASKS"]),
        ({"SLURM_STEP_NUM_TASKS": "2"}, ["SLURM_STEP_NUM_TASKS=2", "SLURM_PROCID is not"]),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2x2"}, ["SLURM_STEP_TASKS_PER_NODE='2x2' is not understood"]),
    ],
)
def test_contradictions_name_both_values(env: Env, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_rank_info(env)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("carrier", ["srun one a node", "srun --pty", "mpirun one a node"])
def test_launchers_that_only_carried_another_one(carrier: str) -> None:
    one = {**STEP, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    around = {
        "srun one a node": one,
        "srun --pty": {
            **STEP,
            "SLURM_PROCID": "0",
            "SLURM_NODEID": "0",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1",
        },
        "mpirun one a node": {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            "PMIX_RANK": "1",
        },
    }[carrier]
    info = read_rank_info({**around, **TORCH})
    assert (info.source, info.rank, info.world_size) == ("torchrun", 2, 4)
    if carrier.startswith("srun"):  # mpirun starts its daemons by srun
        info = read_rank_info({**around, **OPEN_MPI})
        assert (info.source, info.rank, info.world_size) == ("Open MPI", 2, 4)


# -- 300 random environments -------------------------------------------------------------------------------


def layers(chance: random.Random, counts: list[int], rank: int) -> dict[str, Env]:
    """Variables of launchers that all tell of one truth, in part by carrying one another."""
    world, node = sum(counts), next(n for n in range(len(counts)) if rank < sum(counts[: n + 1]))
    local, size = rank - sum(counts[:node]), counts[node]
    found: dict[str, Env] = {}
    if chance.random() < 0.6:
        carry = chance.random() < 0.4
        tasks = [1] * len(counts) if carry else counts
        found["slurm"] = {
            "SLURM_JOB_ID": str(chance.randrange(1, 10**7)),
            "SLURM_STEP_ID": str(chance.randrange(4)),
            "SLURM_PROCID": str(node if carry else rank),
            "SLURM_LOCALID": str(0 if carry else local),
            "SLURM_NODEID": str(node),
            "SLURM_STEP_NUM_TASKS": str(sum(tasks)),
            "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, tasks)),
            "SLURM_STEP_NODELIST": f"n[1-{len(counts)}]",
        }
        for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_LOCALID"):
            if chance.random() < 0.2:
                del found["slurm"][name]
        if carry and chance.random() < 0.3:
            found["slurm"]["SLURM_NTASKS"] = str(world)  # of the job: says nothing of the step
    kind = chance.choice(["", "ompi", "hydra", "intel", "pals", "pmix"])
    if kind == "ompi":
        found[kind] = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(world)}
        found[kind] |= {"OMPI_COMM_WORLD_LOCAL_RANK": str(local), "OMPI_COMM_WORLD_LOCAL_SIZE": str(size)}
    elif kind in ("hydra", "intel"):
        found[kind] = {"PMI_RANK": str(rank), "PMI_SIZE": str(world)}
        found[kind] |= {"MPI_LOCALRANKID": str(local), "MPI_LOCALNRANKS": str(size)}
        found[kind] |= {"I_MPI_ROOT": "/opt/impi"} if kind == "intel" else {}
    elif kind == "pals":
        found[kind] = {"PALS_RANKID": str(rank), "PMI_SIZE": str(world), "PALS_LOCAL_RANKID": str(local)}
        found[kind] |= {"PALS_LOCAL_SIZE": str(size), "PALS_NODEID": str(node)}
    if chance.random() < 0.5 or not found:
        found["torch"] = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local)}
        found["torch"] |= {"LOCAL_WORLD_SIZE": str(size), "GROUP_WORLD_SIZE": str(len(counts))}
    if kind == "pmix" and ("torch" in found or found["slurm"]["SLURM_PROCID"] == str(rank)):
        found[kind] = {"PMIX_RANK": str(rank)}
    return found


RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID", "RANK", "PMIX_RANK")
SIZES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")


def carried(found: dict[str, Env], counts: list[int]) -> bool:
    """Whether SLURM's step has one task a node although nodes have more ranks."""
    return "slurm" in found and found["slurm"]["SLURM_STEP_TASKS_PER_NODE"] != ",".join(map(str, counts))


def read(env: Env) -> RankInfo | str:
    try:
        return read_rank_info(env)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(300))
def test_random_environment_is_read_right_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    counts = [chance.randrange(1, 5) for _ in range(chance.randrange(1, 5))]
    rank, world = chance.randrange(sum(counts)), sum(counts)
    found = layers(chance, counts, rank)
    carrier = carried(found, counts)
    env = {name: value for layer in found.values() for name, value in layer.items()}
    info = read(env)
    assert isinstance(info, RankInfo), info
    if carrier and len(found) == 1:
        assert (info.rank, info.world_size) == (int(env["SLURM_NODEID"]), len(counts))
    else:
        assert (info.rank, info.world_size) == (rank, world)

    # One variable of one launcher changes: what else counts the same ranks contradicts it.
    name = chance.choice([name for name in env if name in RANKS + SIZES])
    value = int(env[name]) + chance.choice([1, 2, 7]) + 10 * (name in SIZES)
    of_carrier = carrier and name in found["slurm"]
    one_each = max(counts) == 1 and name in SIZES  # with more ranks, the others may have carried them
    others = [
        key
        for key, layer in found.items()
        if name not in layer
        and not one_each
        and not (key == "slurm" and carrier)
        and not (key == "pmix" and name in SIZES)
    ]
    changed = read({**env, name: str(value)})
    if isinstance(changed, str):
        assert f"{name}={value}" in changed  # the wrong value, and the one that it contradicts
        values = [word for word in changed.replace(",", " ").split() if "=" in word or word.isdecimal()]
        assert len(values) >= 2, changed
    elif of_carrier:
        assert len(found) == 1 or (changed.rank, changed.world_size) == (rank, world)
    else:
        assert not others, (env, name, value, changed)
        key = "rank" if name in RANKS else "world_size"
        assert getattr(changed, key) == value


# -- MPI -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, (1, 4)),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, (1, 4)),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "PMIX_RANK": "2"},
            (2, None),
        ),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3"}, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, None),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
            (0, 1),
        ),
    ],
    ids=["mpirun", "mpiexec", "srun --mpi=pmix", "srun", "torchrun", "odc-launch with ranks of its own"],
)
def test_what_mpi_will_call_this_process(
    environ: dict[str, str], place: tuple[int, int | None] | None
) -> None:
    """Not what it is: `odc.transport: mpi` compares both."""
    found = read_rank_info(environ).mpi
    assert (None if found is None else (found.rank, found.size)) == place
