"""What the ranks of a node are told, and what is refused; in the plan with reasons."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fake_host import GPUS, make_host, make_sysfs
from odc_launcher.job import plan_step, plan_submission
from odc_launcher.local import ChildSetup
from odc_launcher.placing import Wish
from odc_launcher.plan import Machine, Place, make_plan
from odc_launcher.printing import render_plan
from odc_launcher.request import Request

from odcengine.errors import ConfigError
from odcengine.host.host import Host
from odcengine.host.network import Route
from odcengine.host.nvshmem_env import Job, NodeSettings, node_settings

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
IFNAME = "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"
FAMILY = "NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY"
REMOTE = "NVSHMEM_REMOTE_TRANSPORT"
ONE = Job(transport="nvshmem")
MANY = Job(transport="nvshmem", several_nodes=True)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return make_host(make_sysfs(tmp_path))


def env(made: NodeSettings) -> dict[str, str]:
    assert not made.problems, made.problems
    assert all(setting.reason for setting in made.settings)
    return {setting.name: setting.value for setting in made.settings}


def test_one_node(host: Host) -> None:
    host = replace(host, route=Route("127.0.0.1", "127.0.0.1"))
    assert env(node_settings(host, {}, ONE)) == {IFNAME: "lo", REMOTE: "none"}
    assert env(node_settings(host, {}, Job())) == {}  # cuda_p2p asks for nothing


def test_several_nodes_with_infiniband(host: Host) -> None:
    made = node_settings(host, {}, MANY)
    assert env(made) == {GLOO: "eth0", IFNAME: "=eth0", REMOTE: "ibrc"}  # there is an eth01, too
    reasons = {setting.name: setting.reason for setting in made.settings}
    assert reasons[GLOO] == "leads to rank 0 at node1 (10.0.0.7)"
    assert reasons[REMOTE] == "InfiniBand or RoCE: mlx5_0, mlx5_1"  # mlx5_2 is down
    assert "NIC of GPU 0 (0000:18:00.0): mlx5_0, behind the same PCIe switch (NVSHMEM takes the nearest)" in (
        made.notes
    )
    assert len([note for note in made.notes if note.startswith("NIC of GPU")]) == 4
    assert any(note.startswith("NVSHMEM_DISABLE_CUDA_VMM: the ranks try") for note in made.notes)


def test_several_nodes_without_nvshmem_get_gloos_interface_only(host: Host) -> None:
    assert env(node_settings(host, {}, Job(several_nodes=True))) == {GLOO: "eth0"}


def test_ipv6(host: Host) -> None:
    host = replace(host, route=Route("node1", "fd00::7"))
    assert env(node_settings(host, {}, MANY))[FAMILY] == "AF_INET6"
    assert FAMILY not in env(node_settings(host, {FAMILY: "AF_INET"}, MANY))


@pytest.mark.parametrize(("kind", "what"), [("efa", "AWS EFA"), ("cxi", "Slingshot")])
def test_libfabric(tmp_path: Path, kind: str, what: str) -> None:
    made = node_settings(make_host(make_sysfs(tmp_path, kind=kind)), {}, MANY)
    found = env(made)
    assert (found[REMOTE], found["NVSHMEM_LIBFABRIC_PROVIDER"]) == ("libfabric", kind)
    assert any(what in setting.reason for setting in made.settings)


def test_no_rdma_between_nodes_is_a_warning(tmp_path: Path) -> None:
    host = replace(make_host(make_sysfs(tmp_path)), nics=())
    made = node_settings(host, {}, MANY)
    assert REMOTE not in env(made)
    assert "`odc.sharding: hybrid`" in made.warnings[0]


def test_no_way_to_rank_0_is_a_warning(host: Host) -> None:
    made = node_settings(replace(host, route=Route("node9", None)), {}, MANY)
    assert GLOO not in env(made)
    assert "no network interface of this host leads to rank 0 at node9" in made.warnings[0]
    assert "eth0 (10.0.0.7)" in made.warnings[0]


def test_the_users_values_win(host: Host) -> None:
    mine = {
        GLOO: "ib0",
        IFNAME: "ib",
        REMOTE: "ucx",
        "NVSHMEM_SYMMETRIC_SIZE": "3.1M",
        "NVSHMEM_HCA_LIST": "x",
    }
    made = node_settings(host, mine, MANY)
    assert env(made) == {}
    assert "NICs of the GPUs: by your NVSHMEM_HCA_LIST" in made.notes
    assert not any(note.startswith("NVSHMEM_SYMMETRIC_SIZE") for note in made.notes)


@pytest.mark.parametrize(
    ("environ", "job", "told"),
    [
        (
            {GLOO: "bond0"},
            Job(),
            "GLOO_SOCKET_IFNAME=bond0: this host has no network interface bond0; it has lo",
        ),
        ({NCCL: "=bond0"}, Job(), "NCCL_SOCKET_IFNAME==bond0: this host has no network interface bond0"),
        ({IFNAME: "bond0"}, ONE, "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=bond0"),
        (
            {},
            replace(MANY, interface="bond0"),
            "launch.interface: bond0: this host has no such network interface",
        ),
        ({REMOTE: "ib"}, ONE, "NVSHMEM_REMOTE_TRANSPORT='ib'; expected ibrc, ibdevx, ucx, libfabric, none"),
        ({FAMILY: "IPv4"}, ONE, "expected AF_INET, AF_INET6"),
        ({"NVSHMEM_SYMMETRIC_SIZE": "30GB"}, ONE, "NVSHMEM_SYMMETRIC_SIZE='30GB'; expected"),
        (
            {REMOTE: "none"},
            replace(MANY, sharding="full"),
            "with `odc.sharding: full` the ranks of all nodes",
        ),
    ],
)
def test_values_that_cannot_be_are_refused(host: Host, environ: dict[str, str], job: Job, told: str) -> None:
    (problem,) = node_settings(host, environ, job).problems
    assert told in problem


def test_values_that_do_not_matter_here_are_let_be(host: Host) -> None:
    """A login shell names interfaces of the cluster's GPU nodes."""
    laptop = replace(host, gpus=replace(host.gpus, gpus=()))
    assert not node_settings(laptop, {NCCL: "ib7", IFNAME: "ib7", REMOTE: "x"}, Job()).problems


def test_list_and_mapping_of_hcas(host: Host) -> None:
    mine = {"NVSHMEM_HCA_LIST": "mlx5_0", "NVSHMEM_HCA_PE_MAPPING": "mlx5_0:1:1"}
    assert "takes the list and ignores the mapping" in node_settings(host, mine, MANY).warnings[0]


# -- in the plan -------------------------------------------------------------------------------------------

MACHINE = Machine("gpu02", 16, "CPU affinity", 20123, "python", "/home/u", "now")
REQUEST = Request("train.py", nproc=4, transport="nvshmem", device="cuda")
NODE_1 = Place((4, 5, 6, 7), (0, 1, 2, 3), 8, 4, 1, 2, "node1", 20123, "SLURM")


def test_plan_of_a_node(host: Host) -> None:
    plan = make_plan(REQUEST, {}, replace(MACHINE, node=host), NODE_1)
    assert plan.ranks[0].env[GLOO] == "eth0"
    assert [rank.affinity.cores for rank in plan.ranks] == [
        (0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)
    ]  # fmt: skip
    assert {rank.env["OMP_NUM_THREADS"] for rank in plan.ranks} == {"4"}
    text = render_plan(plan, {}, "text")
    assert "sets NVSHMEM_REMOTE_TRANSPORT=ibrc: InfiniBand or RoCE: mlx5_0, mlx5_1\n" in text
    assert "cores of rank 5: 2-3,10-11 (near GPU 0000:2a:00.0, shared between 2 ranks)\n" in text
    assert "# rank 5, log /home/u/odc_logs/now/rank5.log, cores 2-3,10-11 (near" in text
    data = json.loads(render_plan(plan, {}, "json"))
    assert {"name": GLOO, "value": "eth0", "reason": "leads to rank 0 at node1 (10.0.0.7)"} in data[
        "settings"
    ]
    assert data["ranks"][1]["cores"].startswith("2-3,10-11 ")
    assert data["interfaces"] == {GLOO: "eth0", IFNAME: "=eth0"}


def test_interface_of_the_configuration(host: Host) -> None:
    plan = make_plan(replace(REQUEST, interface="ib0"), {}, replace(MACHINE, node=host), NODE_1)
    text = render_plan(plan, {}, "text")
    for name in (GLOO, NCCL, IFNAME):
        assert f"sets {name}=ib0: launch.interface\n" in text
    with pytest.raises(ConfigError, match=r"launch.interface: ib7: this host has no such"):
        make_plan(replace(REQUEST, interface="ib7"), {}, replace(MACHINE, node=host), NODE_1)


def test_affinity_can_be_switched_off_and_cpu_ranks_have_none(host: Host) -> None:
    machine = replace(MACHINE, node=host)
    for request in (replace(REQUEST, affinity="none"), replace(REQUEST, device="cpu", transport="shm")):
        plan = make_plan(request, {}, machine, NODE_1)
        assert all(rank.affinity.cores == () for rank in plan.ranks)
    assert "cores of rank 4: as they are (launch.affinity: none)" in render_plan(
        make_plan(replace(REQUEST, affinity="none"), {}, machine, NODE_1), {}, "text"
    )
    no_gpus = replace(machine, node=replace(host, gpus=replace(host.gpus, gpus=())))
    assert "cores of rank" not in render_plan(make_plan(REQUEST, {}, no_gpus, NODE_1), {}, "text")


def test_a_driver_that_does_not_answer_is_told(host: Host) -> None:
    broken = replace(host, gpus=replace(host.gpus, gpus=(), error="the driver did not list the GPUs"))
    plan = make_plan(REQUEST, {}, replace(MACHINE, node=broken), NODE_1)
    assert "ranks run on any core: the driver did not list the GPUs" in plan.warnings
    assert not plan.ranks[0].affinity.cores


def test_threads_of_the_user_are_kept_though_cores_are_few(host: Host) -> None:
    machine = replace(MACHINE, node=host)
    plan = make_plan(replace(REQUEST, env={"OMP_NUM_THREADS": "9"}), {}, machine, NODE_1)
    assert plan.ranks[0].env["OMP_NUM_THREADS"] == "9"
    assert "OMP_NUM_THREADS=9 (launch.env)" in plan.summary
    plan = make_plan(REQUEST, {"OMP_NUM_THREADS": "9"}, machine, NODE_1)
    assert "OMP_NUM_THREADS" not in plan.ranks[0].env


def test_before_the_nodes_are_known_values_are_checked_and_the_rest_is_said_to_follow() -> None:
    allocation = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    plan = plan_step(REQUEST, Wish(), allocation, MACHINE)
    text = render_plan(plan, allocation, "text")
    assert "note: interfaces, NVSHMEM's variables and cores are decided on each node" in text
    for bad in ({REMOTE: "none"}, {"NVSHMEM_SYMMETRIC_SIZE": "-1"}, {FAMILY: "IPv4"}):
        full = replace(REQUEST, sharding="full")
        with pytest.raises(ConfigError, match="NVSHMEM_"):
            plan_step(full, Wish(), {**allocation, **bad}, MACHINE)
        with pytest.raises(ConfigError, match="NVSHMEM_"):
            plan_submission(full, Wish(nodes=2), bad, MACHINE)
        with pytest.raises(ConfigError, match="NVSHMEM_"):
            plan_step(replace(full, env=bad), Wish(), allocation, MACHINE)


def test_a_rank_runs_on_its_cores() -> None:
    """Really; also where a core is gone since it was planned."""
    (core, *_) = sorted(os.sched_getaffinity(0))
    for cores, expected in (((core,), {core}), ((4095,), os.sched_getaffinity(0))):
        done = subprocess.run(
            [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"],
            preexec_fn=ChildSetup(frozenset(), cores=cores),
            capture_output=True,
            timeout=60,
            check=True,
        )
        assert json.loads(done.stdout) == sorted(expected)


def test_gpus_of_the_plan_are_those_that_the_ranks_see(host: Host) -> None:
    plan = make_plan(REQUEST, {"CUDA_VISIBLE_DEVICES": "3,2,1,0"}, replace(MACHINE, node=host), NODE_1)
    assert f"near GPU {GPUS[3].pci}" in plan.ranks[0].affinity.reason


def test_ranks_of_other_launchers_set_what_is_missing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun, srun and mpirun alone tell NVSHMEM nothing."""
    from odcengine import _nvshmem_variables
    from odcengine.config import load_config
    from odcengine.topology import Topology

    asked: list[str] = []

    def read(master_addr: str, **options: bool) -> Host:
        asked.append(master_addr)
        return host

    monkeypatch.setattr(_nvshmem_variables, "read_host", read)
    two = Topology(0, ("node1", "node2"), ("a", "b"), ((0,), (1,)))
    one = Topology(0, ("node1", "node1"), ("a", "a"), ((0, 1),))
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "20000"}

    def told(topology: Topology, *, interface: str | None = None, **environ: str) -> dict[str, str]:
        config = load_config({"train_batch_size": 8, "launch": {"interface": interface}})
        variables = torchrun | environ
        _nvshmem_variables.set_variables(topology, config, variables)
        return {name: value for name, value in variables.items() if name not in torchrun}

    assert told(two) == {IFNAME: "=eth0", REMOTE: "ibrc"}
    assert told(two, interface="ib0") == {IFNAME: "ib0", REMOTE: "ibrc"}
    users = {IFNAME: "ib", REMOTE: "ucx"}
    assert told(two, **users) == users
    assert told(one)[REMOTE] == "none"
    assert asked == ["10.0.0.7", "10.0.0.7", "10.0.0.7", "127.0.0.1"]
    with pytest.raises(ConfigError, match="no network interface eth7"):
        told(two, **{IFNAME: "eth7"})
