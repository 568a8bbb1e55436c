"""The doctor: findings over made-up facts, the way facts travel, and the command on this machine."""

from __future__ import annotations

import copy
import json
import random
import shutil
from dataclasses import replace
from typing import Any

import pytest
from launch_helpers import Launcher, finish
from odc_launcher.doctor import nodes as on_nodes
from odc_launcher.doctor import probe
from odc_launcher.doctor.checks import check_all
from odc_launcher.doctor.command import render
from odc_launcher.doctor.facts import NodeFacts, from_json, gather, to_json
from odc_launcher.doctor.finding import ERROR, OK, WARNING, Context, Finding

from odcengine.host.nvshmem_env import Job

GIB = 1 << 30
ONE = Context(Job())
MANY = Context(Job(several_nodes=True))


def gpu(index: int, count: int = 2, **changes: Any) -> dict[str, Any]:
    peers = {f"0000:{other:02x}:00.0": [True, True, True] for other in range(count) if other != index}
    return {
        "index": index,
        "uuid": f"GPU-{index}",
        "name": "H200",
        "pci": f"0000:{index:02x}:00.0",
        "memory_bytes": 141 * GIB,
        "mig": [],
        "links": ["0000:f0:00.0"] * 18,
        "peers": peers,
    } | changes


def node(host: str = "n1", **changes: Any) -> NodeFacts:
    """A healthy GPU node."""
    facts = NodeFacts(
        host=host,
        versions={
            "python": "3.11.9",
            "odcengine": "0.1.0",
            "torch": "2.11.0",
            "driver": "570.1",
            "driver's CUDA": "12.8",
            "slurm": "slurm 24.05",
        },
        gpus=[gpu(0), gpu(1)],
        interfaces=[
            {"name": "eth0", "is_up": True, "addresses": ["10.0.0.7"], "speed_mbits": 25000},
        ],
        nics=[{"name": "mlx5_0", "kind": "verbs", "link": "InfiniBand", "is_active": True}],
        limits={
            "memlock": -1,
            "memlock_hard": -1,
            "nofile": 65536,
            "nofile_hard": 65536,
            "shm": 64 * GIB,
            "shm_free": 60 * GIB,
            "memory": 900 * GIB,
        },
        cores=64,
        cores_online=64,
        probe={
            "torch": "2.11.0+cu128",
            "cuda": "12.8",
            "nccl": "2.28.3",
            "gpus": ["H200", "H200"],
            "no_access": [],
            "imports": {"triton": "ok", "nvshmem.core": "ok", "mpi4py": None},
            "nvshmem": {"version": "3.4.5", "mismatch": None},
        },
    )
    for name, value in changes.items():
        if isinstance(value, dict):
            getattr(facts, name).update(value)
        else:
            setattr(facts, name, value)
    return facts


def wrong(*nodes: NodeFacts, context: Context = ONE) -> list[Finding]:
    """Findings that are not ok; each must have a remedy."""
    found = [finding for finding in check_all(nodes, context) if finding.level != OK]
    assert all(finding.remedy for finding in found)
    return found


def test_a_healthy_node() -> None:
    assert wrong(node()) == []
    checks = {finding.check for finding in check_all([node()], ONE)}
    assert {"python", "torch", "gpus", "peer access", "nvlink", "rdma", "shared memory", "cores"} <= checks


CASES: list[tuple[dict[str, Any], Context, str, str, str]] = [
    ({"versions": {"python": "3.9.1"}}, ONE, WARNING, "python", "3.9.1 is not tested"),
    ({"probe": {"error": "exit code 1: no libcudart"}}, ONE, ERROR, "torch", "no libcudart"),
    ({"probe": {"torch": "2.9.1+cu128"}}, ONE, ERROR, "torch", "2.9.1+cu128 is too old"),
    ({"gpus_unknown": "the driver did not list the GPUs"}, ONE, ERROR, "gpus", "did not list"),
    ({"gpus": [], "env": {}}, replace(ONE, device="cuda"), ERROR, "gpus", "no GPU is visible, but"),
    ({"gpus": [gpu(0), gpu(1, name="A100")]}, ONE, ERROR, "gpus", "GPUs of one kind"),
    ({"gpus": [gpu(0, mig=["MIG-1"]), gpu(1)]}, ONE, WARNING, "gpus", "MIG devices"),
    ({"probe": {"cuda": None}}, ONE, ERROR, "gpus", "torch is built without CUDA"),
    ({"probe": {"cuda": "13.0"}}, ONE, ERROR, "gpus", "built for CUDA 13.0, the driver supports up to 12.8"),
    ({"probe": {"gpus": ["H200"]}}, ONE, ERROR, "gpus", "torch sees 1 GPUs, the driver shows 2"),
    ({"probe": {"no_access": [[0, 1]]}}, ONE, ERROR, "peer access", "each other's memory: 0 and 1"),
    (
        {"gpus": [gpu(0, peers={"0000:01:00.0": [True, True, False]}), gpu(1)]},
        ONE,
        WARNING,
        "peer access",
        "no atomic additions in each other's memory: 0 and 1",
    ),
    ({"gpus": [gpu(0, links=[]), gpu(1, links=[])]}, ONE, WARNING, "nvlink", "over PCIe"),
    ({"gpus": [gpu(0, links=["x"] * 17), gpu(1)]}, ONE, WARNING, "nvlink", "17, 18"),
    ({"probe": {"imports": {"triton": None}}}, ONE, ERROR, "triton", "not installed"),
    (
        {"probe": {"imports": {"triton": "ok", "nvshmem.core": "OSError: libnvshmem_host.so.3"}}},
        Context(Job(transport="nvshmem")),
        ERROR,
        "nvshmem",
        "does not import: OSError",
    ),
    (
        {"probe": {"nvshmem": {"version": "3.3.24", "mismatch": "host 3.3.24, wheel 3.2.5"}}},
        ONE,
        WARNING,
        "nvshmem",
        "host 3.3.24, wheel 3.2.5",
    ),
    ({"problems": ["GLOO_SOCKET_IFNAME=ib7: this host has no"]}, ONE, ERROR, "variables", "ib7"),
    ({"nics": []}, MANY, WARNING, "rdma", "no active RDMA device"),
    (
        {"nics": [{"name": "mlx5_0", "kind": "verbs", "link": "", "is_active": False}]},
        ONE,
        WARNING,
        "rdma",
        "not active: mlx5_0",
    ),
    ({"limits": {"memlock": 65536}}, ONE, WARNING, "memlock", "64.0 KiB of memory may be locked"),
    (
        {"limits": {"memlock": 65536}},
        Context(Job(transport="nvshmem", several_nodes=True)),
        ERROR,
        "memlock",
        "64.0 KiB",
    ),
    ({"limits": {"shm": 64 << 20}}, ONE, WARNING, "shared memory", "/dev/shm has 64.0 MiB"),
    ({"memory_files": "Operation not permitted"}, ONE, ERROR, "shared memory", "not permitted"),
    ({"limits": {"nofile": 1024}}, ONE, WARNING, "open files", "1024 open files"),
    ({"cores": 1}, ONE, WARNING, "cores", "1 of 64 cores may be used by 2 ranks"),
    ({"env": {"NCCL_IB_DISABLE": "1"}}, ONE, WARNING, "variables", "may not use InfiniBand"),
    ({"env": {"CUDA_LAUNCH_BLOCKING": "1"}}, ONE, WARNING, "variables", "every kernel is waited for"),
    (
        {"env": {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=ib0"}},
        ONE,
        WARNING,
        "variables",
        "different interfaces",
    ),
    ({"env": {"OMP_NUM_THREADS": "96"}}, ONE, WARNING, "variables", "OMP_NUM_THREADS=96 on 64 cores"),
    ({"sees_folder": False}, MANY, ERROR, "log folder", "not on a file system"),
    (
        {
            "chosen": [{"name": "GLOO_SOCKET_IFNAME", "value": "eth0", "reason": "r"}],
            "interfaces": [{"name": "eth0", "is_up": True, "addresses": ["10.0.0.7"], "speed_mbits": 1000}],
        },
        MANY,
        WARNING,
        "network",
        "eth0 is slow: 1000 Mbit/s",
    ),
]


@pytest.mark.parametrize(("changes", "context", "level", "check", "told"), CASES)
def test_what_is_wrong_with_a_node(
    changes: dict[str, Any], context: Context, level: str, check: str, told: str
) -> None:
    found = wrong(node(**copy.deepcopy(changes)), context=context)
    assert (level, check) in {(finding.level, finding.check) for finding in found}
    assert any(told in finding.text for finding in found), found


def test_without_torch() -> None:
    facts = node(probe={"error": "exit code 1: No module named torch"})
    del facts.versions["torch"]
    assert [finding.text for finding in wrong(facts)] == ["torch is not installed"]


def test_cpu_ranks_do_not_mind_their_nodes_gpus() -> None:
    facts = node(probe={"cuda": None, "gpus": [], "imports": {}, "torch": "2.13.0+cpu"})
    assert wrong(facts, context=Context(Job(transport="shm"), device="cpu")) == []


# -- between nodes -----------------------------------------------------------------------------------------


def two(**changes: Any) -> tuple[NodeFacts, NodeFacts]:
    """Two nodes that have met; the second with changes."""
    first = node("n1", probe={"store": {"missing": []}})
    second = node("n2", probe={"store": {"round_trip_ms": 0.3, "clock_offset_s": 0.002}})
    for name, value in changes.items():
        if isinstance(value, dict):
            getattr(second, name).update(value)
        else:
            setattr(second, name, value)
    return first, second


def test_two_healthy_nodes_are_told_once() -> None:
    findings = check_all(two(), MANY)
    assert {finding.level for finding in findings} == {OK}
    assert all(finding.hosts == () for finding in findings)
    texts = [finding.text for finding in findings]
    assert "the same software on all 2 nodes" in texts
    assert "all nodes reach the store; the slowest round trip takes 0.3 ms (n2)" in texts


def test_what_is_wrong_on_one_of_two_nodes_names_it() -> None:
    (finding,) = wrong(*two(limits={"nofile": 1024}), context=MANY)
    assert finding.hosts == ("n2",)
    first, second = two(limits={"nofile": 1024})
    first.limits["nofile"] = 1024
    (finding,) = wrong(first, second, context=MANY)
    assert finding.hosts == ()  # on all


@pytest.mark.parametrize(
    ("changes", "level", "told"),
    [
        ({"versions": {"python": "3.12.1"}}, ERROR, "python differs: n1: 3.11.9; n2: 3.12.1"),
        ({"probe": {"torch": "2.13.0"}}, ERROR, "torch differs: n1: 2.11.0+cu128; n2: 2.13.0"),
        ({"probe": {"nvshmem": {"version": "3.3.9"}}}, ERROR, "nvshmem differs: n1: 3.4.5; n2: 3.3.9"),
        ({"versions": {"driver": "560"}}, WARNING, "driver differs: n1: 570.1; n2: 560"),
        ({"gpus": [gpu(0, 1)], "probe": {"gpus": ["H200"]}}, WARNING, "numbers of GPUs: n1: 2, n2: 1"),
        (
            {"gpus": [gpu(0, name="A100"), gpu(1, name="A100")]},
            ERROR,
            "different GPUs: n1: H200; n2: A100",
        ),
        ({"probe": {"store": {"error": "connect timed out"}}}, ERROR, "no store: connect timed out"),
        (
            {"probe": {"store": {"round_trip_ms": 80.0, "clock_offset_s": 0.0}}},
            WARNING,
            "round trip takes 80.0 ms",
        ),
        (
            {"probe": {"store": {"round_trip_ms": 0.3, "clock_offset_s": -7.5}}},
            WARNING,
            "difference to n1: -7.500 s (n2)",
        ),
    ],
)
def test_what_is_wrong_between_nodes(changes: dict[str, Any], level: str, told: str) -> None:
    found = wrong(*two(**copy.deepcopy(changes)), context=MANY)
    assert [finding.level for finding in found] == [level], found
    assert told in found[0].text


def test_a_node_that_did_not_come_to_the_store() -> None:
    first, second = two()
    first.probe["store"] = {"missing": [1]}
    (finding,) = wrong(first, second, context=MANY)
    assert finding.text == "did not reach n1: n2"
    assert "MASTER_ADDR" in finding.remedy


def test_configurations_that_differ() -> None:
    context = replace(MANY, has_config=True)
    first, second = two(config_hash="bb")
    first.config_hash = "aa"
    (finding,) = wrong(first, second, context=context)
    assert "n1: aa; n2: bb" in finding.text
    first.config_hash, second.config_hash = "aa", None
    assert "n2: not readable" in wrong(first, second, context=context)[0].text


# -- how facts travel --------------------------------------------------------------------------------------


def test_facts_survive_lines_that_are_mixed_up() -> None:
    facts = [gather({"NCCL_X": "a b\n" * 100, "ODC_TOKEN": "geheim"}, Job(), token="/nowhere")] * 3
    lines = [line for i, one in enumerate(facts) for line in on_nodes.encode(i, to_json(one)).splitlines()]
    assert max(map(len, lines)) < 200
    random.Random(0).shuffle(lines)
    lost = next(line for line in lines if line.startswith("@odc-node 2 "))
    lines.remove(lost)
    noise = ["srun: warning", "@odc-node", "@odc-node 1 2"]
    answers = on_nodes.decode("\n".join([*noise, *(f"0: {line}" for line in lines)]))
    assert sorted(answers) == [0, 1]  # of node 2 a line is missing
    back = from_json(answers[1])
    assert to_json(back) == json.loads(json.dumps(to_json(facts[1])))
    assert back.env == {"NCCL_X": "a b\n" * 100, "ODC_TOKEN": "***"}
    assert back.sees_folder is False


def test_report() -> None:
    findings = [
        Finding(OK, "python", "3.11"),
        Finding(WARNING, "open files", "few", "ulimit -n 4096", ("n2",)),
        Finding(ERROR, "torch", "none", "pip install torch"),
    ]
    assert list(render(two(), findings)) == [
        "odc-launch doctor: 2 nodes (n1, n2)",
        "ok       python      3.11",
        "warning  open files  n2: few",
        "                     -> ulimit -n 4096",
        "error    torch       none",
        "                     -> pip install torch",
        "1 ok, 1 warning, 1 error",
    ]


# -- the command -------------------------------------------------------------------------------------------


def test_this_machine(launcher: Launcher) -> None:
    code, out, err = finish(launcher.start("doctor", "--json"), 300)
    report = json.loads(out)
    assert code == 0, out + err
    assert report["ok"]
    job = next(finding for finding in report["findings"] if finding["check"] == "small job")
    assert job["text"].startswith("2 cpu ranks over shm pulled and pushed exactly")
    assert report["nodes"][0]["versions"]["torch"]
    assert not (launcher.folder / "odc_logs").exists()


def test_errors_give_exit_code_1(launcher: Launcher) -> None:
    (launcher.folder / "c.yaml").write_text("train_batch_size: 8\nodc: {transport: cuda_p2p}\n")
    launcher.env["GLOO_SOCKET_IFNAME"] = "no_such0"
    code, out, _ = finish(launcher.start("doctor", "--config", "c.yaml"), 300)
    assert code == 1
    lines = [line for line in out.splitlines() if line.startswith("error ")]
    assert any("the configuration wants GPUs" in line for line in lines)
    assert any("no network interface no_such0" in line for line in lines)
    assert "not tried, because of the errors above" in out


def test_a_job_that_fails_names_the_first_failure(launcher: Launcher) -> None:
    (launcher.folder / "c.yaml").write_text("train_batch_size: 8\nodc: {sharding: hybrid, node_size: 2}\n")
    words = ["doctor", "--config", "c.yaml", "--nproc-per-node", "3", "--log-dir", "logs"]
    code, out, _ = finish(launcher.start(*words), 300)
    assert code == 1
    assert "error    small job" in out
    assert "failed first" in out
    assert "ConfigError: odc.node_size: 2 does not divide the 3 ranks" in out
    (folder,) = (launcher.folder / "logs").iterdir()
    assert "does not divide the 3 ranks" in (folder / "launcher.log").read_text()


def test_a_library_that_ends_the_process_is_named(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = launcher.folder / "site" / "nvshmem"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "core.py").write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{launcher.env['PYTHONPATH']}")
    found = probe.run(0, 1, "127.0.0.1", 1, 200.0)
    assert found["torch"]
    assert "ended the process, exit code -6" in found["imports"]["nvshmem.core"]
    facts = node(probe=found | {"gpus": ["H200", "H200"], "cuda": "12.8", "torch": "2.11.0"})
    context = Context(Job(transport="nvshmem"))
    assert [(f.level, f.check) for f in wrong(facts, context=context)] == [(ERROR, "nvshmem")]


def test_outside_of_an_allocation(launcher: Launcher) -> None:
    programs = launcher.folder / "bin"
    programs.mkdir()
    for name in ("srun", "sbatch"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    launcher.env["PATH"] = f"{programs}:{launcher.env['PATH']}"
    code, _, err = finish(launcher.start("doctor", "--nodes", "2"))
    assert code == 2
    assert "salloc --nodes=2 --gpus-per-node=8 odc-launch doctor" in err
    code, _, err = finish(launcher.start("doctor", "--config", "nothing.yaml"))
    assert code == 2
    assert "nothing.yaml does not exist" in err
    shutil.rmtree(programs)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("transport", ["cuda_p2p", "nvshmem"])
def test_gpus_of_this_machine(launcher: Launcher, transport: str) -> None:
    del launcher.env["CUDA_VISIBLE_DEVICES"]
    (launcher.folder / "c.yaml").write_text(f"train_batch_size: 8\nodc: {{transport: {transport}}}\n")
    code, out, err = finish(launcher.start("doctor", "--config", "c.yaml"), 300)
    assert code == 0, out + err
    assert f"cuda ranks over {transport} pulled and pushed exactly" in out
    assert "GPUs address each other's memory" in out
