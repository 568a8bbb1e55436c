"""Ranks and nodes: the launcher's variables, and grouping ranks into nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from odcengine.errors import ConfigError
from odcengine.ranks import RankInfo, read_rank_info
from odcengine.topology import Topology, build_topology, machine_id

FULL = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
    "ODC_CONFIG": "/job/sft.yaml",
    "ODC_ERROR_FILE": "/job/error3.json",
}


def test_all_variables_are_read() -> None:
    assert read_rank_info(FULL) == RankInfo(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        source="torchrun",
        rendezvous="node-0:29500",
        config_file="/job/sft.yaml",
        error_file="/job/error3.json",
    )


def test_optional_variables_may_be_missing() -> None:
    info = read_rank_info({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node-0"})
    assert (info.rank, info.world_size, info.source) == (0, 2, "torchrun")
    assert (info.local_rank, info.local_world_size, info.node_rank) == (None, None, None)
    assert (info.rendezvous, info.config_file, info.error_file) == (None, None, None)


def test_without_any_variable_it_is_a_single_process() -> None:
    assert read_rank_info({}) == RankInfo(0, 1)
    info = read_rank_info({"ODC_CONFIG": "a.yaml", "LOCAL_RANK": "5"})  # LOCAL_RANK alone identifies nobody
    assert info == RankInfo(0, 1, config_file="a.yaml")


def test_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FULL.items():
        monkeypatch.setenv(name, value)
    assert read_rank_info() == read_rank_info(FULL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": None}, r"RANK=3 is set but WORLD_SIZE is not; torchrun sets RANK and WORLD_SIZE"),
        ({"RANK": None}, r"WORLD_SIZE=4 is set but RANK is not"),
        ({"RANK": "three"}, r"RANK='three' is not a whole number"),
        ({"RANK": ""}, r"RANK='' is not a whole number"),
        ({"WORLD_SIZE": "4.0"}, r"WORLD_SIZE='4.0' is not a whole number"),
        ({"LOCAL_RANK": "x"}, r"LOCAL_RANK='x' is not a whole number"),
        ({"RANK": "-1"}, r"RANK=-1 is negative; it must be 0 or more"),
        ({"WORLD_SIZE": "0"}, r"RANK=3 must be below WORLD_SIZE=0"),
        ({"RANK": "4"}, r"RANK=4 must be below WORLD_SIZE=4 \(from torchrun\)"),
        ({"LOCAL_RANK": "2"}, r"LOCAL_RANK=2 must be below LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "8"}, r"LOCAL_WORLD_SIZE=8 must be at most WORLD_SIZE=4"),
        ({"MASTER_PORT": "http"}, r"MASTER_PORT='http' is no port number; it must be 1 to 65535"),
        ({"MASTER_PORT": "65536"}, r"MASTER_PORT='65536' is no port number"),
        ({"MASTER_PORT": "0"}, r"MASTER_PORT='0' is no port number"),
    ],
)
def test_contradictions_are_named(change: dict[str, str | None], message: str) -> None:
    env = {name: value for name, value in {**FULL, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=message) as caught:
        read_rank_info(env)
    assert len(caught.value.problems) == 1


# -- nodes -------------------------------------------------------------------------------------------------


def gathered(
    rank: int, machines: Sequence[str], node_ranks: Sequence[int | None] | None = None, **others: Any
) -> Callable[[str], list[str]]:
    """An exchange in which the other ranks say what is given here, and this one what it says."""

    def exchange(text: str) -> list[str]:
        texts = []
        for other, machine in enumerate(machines):
            record = json.loads(text) | {"machine": machine, "host": f"host-{machine}"}
            record["node_rank"] = None if node_ranks is None else node_ranks[other]
            if other != rank:
                record |= others
            texts.append(json.dumps(record))
        return texts

    return exchange


def build(
    machines: str, *, rank: int = 0, node_size: int | None = None, node_ranks: Sequence[int] | None = None
) -> Topology:
    info = RankInfo(rank, len(machines))
    return build_topology(info, gathered(rank, machines, node_ranks), node_size=node_size)


def test_one_machine_is_one_node() -> None:
    topology = build("aaa", rank=2)
    assert topology.nodes == ((0, 1, 2),)
    assert (topology.node, topology.local_rank, topology.peers) == (0, 2, (0, 1, 2))
    assert topology.is_even
    assert (topology.world_size, topology.num_nodes) == (3, 1)
    assert topology.describe(1) == "rank 1 (host host-a)"


def test_ranks_of_a_node_need_not_be_consecutive() -> None:
    for rank in range(6):
        topology = build("babcab", rank=rank)
        assert topology.nodes == ((0, 2, 5), (1, 4), (3,))  # ordered by the lowest rank
        assert not topology.is_even
        node, local = {0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (2, 0), 4: (1, 1), 5: (0, 2)}[rank]
        assert (topology.node, topology.local_rank) == (node, local)
        assert topology.flat().nodes == ((0, 1, 2, 3, 4, 5),)
        assert topology.flat().local_rank == rank


def test_the_launcher_can_say_that_one_machine_is_several_nodes() -> None:
    assert build("aaaa", node_ranks=(0, 1, 1, 0)).nodes == ((0, 3), (1, 2))


@pytest.mark.parametrize(
    ("machines", "node_size", "nodes"),
    [
        ("aaaa", 2, ((0, 1), (2, 3))),
        ("aaaa", 4, ((0, 1, 2, 3),)),
        ("aaaa", 1, ((0,), (1,), (2,), (3,))),
        ("abab", 1, ((0,), (1,), (2,), (3,))),
        ("abababab", 2, ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("aabbbb", 2, ((0, 1), (2, 3), (4, 5))),
    ],
)
def test_node_size_cuts_machines(machines: str, node_size: int, nodes: tuple[tuple[int, ...], ...]) -> None:
    for rank in range(len(machines)):
        topology = build(machines, node_size=node_size, rank=rank)
        assert topology.nodes == nodes
        assert rank in topology.peers
        assert topology.is_even


@pytest.mark.parametrize(
    ("machines", "node_size", "count"), [("aaaa", 3, 4), ("aabbb", 2, 3), ("aa", 4, 2), ("aa", 0, 2)]
)
def test_node_size_must_divide_every_machine(machines: str, node_size: int, count: int) -> None:
    message = rf"odc.node_size: {node_size} does not divide the {count} ranks of host host-\w; use a divisor"
    with pytest.raises(ConfigError, match=message):
        build(machines, node_size=node_size)


def test_ranks_that_disagree_about_node_size_are_named() -> None:
    exchange = gathered(1, "aaa", node_size=3)
    with pytest.raises(ConfigError, match=r"differs between ranks: \{0: 3, 1: 1, 2: 3\}"):
        build_topology(RankInfo(1, 3), exchange, node_size=1)
    with pytest.raises(ConfigError, match=r"\{0: 1, 1: None, 2: 1\}"):
        build_topology(RankInfo(1, 3), gathered(1, "aaa", node_size=1))


def test_rank_outside_of_all_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 2 is in no node"):
        Topology(2, ("a", "a"), ("m", "m"), ((0, 1),))


def test_machine_id_is_stable_and_tells_more_than_the_host_name() -> None:
    assert machine_id() == machine_id()
    boot, _, namespace = machine_id().partition("/")
    assert len(boot) == 36
    assert namespace.startswith("net:[")


@pytest.mark.parametrize("host", ["::1", "127.0.0.1", "localhost"])
def test_rank_0_is_met_by_name_and_by_addresses_of_both_kinds(host: str) -> None:
    """Ranks of srun and mpirun that odc-launch did not start; nodes may have IPv6 alone."""
    from datetime import timedelta

    from distributed import free_port
    from torch.distributed.rendezvous import rendezvous

    from odcengine.start import _url

    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this host has no IPv6")
    store, rank, world_size = next(
        rendezvous(_url(f"{host}:{free_port()}"), 0, 1, timeout=timedelta(seconds=60))
    )
    store.set("a", "b")
    assert (rank, world_size, store.get("a")) == (0, 1, b"b")
