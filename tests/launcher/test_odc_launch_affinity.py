"""Cores near GPUs, over a faked sysfs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_host import GPUS, NUM_CORES, make_host, make_sysfs
from hypothesis import given
from hypothesis import strategies as st

from odcengine.host.affinity import Affinity, format_cores, parse_cores, plan_affinity, visible_gpus
from odcengine.host.host import nearest_nic, read_nics
from odcengine.host.nvml import parse

SOCKET_0, SOCKET_1 = "0-3,8-11", "4-7,12-15"


def plan(
    root: Path,
    local_ranks: list[int],
    size: int,
    environ: dict[str, str] | None = None,
    allowed: str = f"0-{NUM_CORES - 1}",
    task_per_rank: bool = False,
) -> list[str]:
    host = make_host(root, allowed=parse_cores(allowed))
    found = plan_affinity(local_ranks, size, GPUS, environ or {}, host.cores, task_per_rank=task_per_rank)
    return [told(affinity) for affinity in found]


def told(affinity: Affinity) -> str:
    return format_cores(affinity.cores) or affinity.reason


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_sysfs(tmp_path)


def test_ranks_of_one_socket_share_its_cores_by_whole_physical_ones(root: Path) -> None:
    assert plan(root, [0, 1, 2, 3], 4) == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]


def test_one_rank_gets_its_socket(root: Path) -> None:
    assert plan(root, [0], 1) == [SOCKET_0]
    assert plan(root, [0], 1, {"CUDA_VISIBLE_DEVICES": "3"}) == [SOCKET_1]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,0", ["4-7,12-15", "0-3,8-11"]),
        ("GPU-3,GPU-00000000-aaaa", ["4-7,12-15", "0-3,8-11"]),
        ("2,0,9,1", ["4-7,12-15", "0-3,8-11"]),  # as in CUDA, 9 ends the list
        ("2,3", ["4-5,12-13", "6-7,14-15"]),
        (" 2 , 3 ", ["4-5,12-13", "6-7,14-15"]),
        ("", ["no GPU", "no GPU"]),
        ("-1", ["no GPU", "no GPU"]),
        ("GPU-", ["no GPU", "no GPU"]),  # of several
        ("2,0,-1", ["4-7,12-15", "0-3,8-11"]),
    ],
)
def test_cuda_visible_devices(root: Path, visible: str, expected: list[str]) -> None:
    assert plan(root, [0, 1], 2, {"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_mig_devices_stand_for_their_gpu() -> None:
    gpus = [replace(GPUS[0], mig=("MIG-11", "MIG-12")), replace(GPUS[2], mig=("MIG-21",))]
    for value, expected in (
        ("MIG-21,MIG-12", [2, 0]),
        ("MIG-GPU-20000000-aaaa/1/0", [2]),
        ("MIG-1", [0]),  # the beginning of two parts of one GPU
        ("MIG-99", []),
    ):
        found, _ = visible_gpus(gpus, {"CUDA_VISIBLE_DEVICES": value})
        assert [gpu.index for gpu in found] == expected, value


def test_gpus_of_different_kinds_are_numbered_by_speed_unless_told(root: Path) -> None:
    gpus = [GPUS[0], replace(GPUS[2], name="RTX")]
    assert visible_gpus(gpus, {})[0] == []
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in str(visible_gpus(gpus, {"CUDA_VISIBLE_DEVICES": "1"})[1])
    by_bus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"}
    assert visible_gpus(gpus, by_bus) == ([gpus[1]], None)
    assert visible_gpus(gpus, {"CUDA_VISIBLE_DEVICES": "GPU-2"}) == ([gpus[1]], None)


def test_never_more_than_the_cgroup_allows(root: Path) -> None:
    assert plan(root, [0, 1, 2, 3], 4, allowed="0-1,4-7,12-15") == ["0", "1", "4-5,12-13", "6-7,14-15"]
    assert plan(root, [0, 1], 2, allowed="4-7") == ["no usable core is near GPU 0000:18:00.0",
                                                    "no usable core is near GPU 0000:2a:00.0"]  # fmt: skip
    # All that is allowed is near: nothing to bind.
    assert plan(root, [0, 1], 2, allowed="0-3") == [f"GPU {pci} is as near to all usable cores"
                                                    for pci in ("0000:18:00.0", "0000:2a:00.0")]  # fmt: skip


def test_too_few_cores_are_not_shared_out(root: Path) -> None:
    assert plan(root, [0, 1, 2, 3], 4, allowed="0,8,4-7") == ["0,8", "0,8", "4-5", "6-7"]


def test_a_task_that_is_bound_stays_where_it_is(root: Path) -> None:
    (found,) = plan(root, [1], 4, allowed="4-7", task_per_rank=True)
    assert found == "bound to 4 of 16 cores already, by whoever started this task"


def test_a_task_that_is_not_bound_takes_its_share(root: Path) -> None:
    assert plan(root, [1], 4, task_per_rank=True) == ["2-3,10-11"]
    # It sees its own GPU only: who else is near is not known.
    assert plan(root, [1], 4, {"CUDA_VISIBLE_DEVICES": "2"}, task_per_rank=True) == [SOCKET_1]


def test_more_ranks_than_gpus(root: Path) -> None:
    found = plan(root, [0, 1, 2], 3, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert found == ["0-1,8-9", "2-3,10-11", "no GPU for local rank 2"]


def test_without_numa_nothing_is_bound(tmp_path: Path) -> None:
    found = plan(make_sysfs(tmp_path, numa=False), [0, 1], 2)
    assert found == [f"GPU {gpu.pci} is as near to all usable cores" for gpu in GPUS[:2]]


@given(
    st.sets(st.integers(0, NUM_CORES - 1), min_size=1),
    st.integers(1, 4),
    st.sampled_from([None, "0,1,2,3", "3,1", "2", "GPU-1,GPU-2"]),
)
def test_any_allowed_set(
    tmp_path_factory: pytest.TempPathFactory, allowed: set[int], size: int, visible: str | None
) -> None:
    base = tmp_path_factory.getbasetemp() / "sysfs"
    if not base.exists():
        make_sysfs(base)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    cores = make_host(base, allowed=frozenset(allowed)).cores
    found = plan_affinity(range(size), size, GPUS, environ, cores, task_per_rank=False)
    gpus, _ = visible_gpus(GPUS, environ)
    for rank, affinity in enumerate(found):
        assert affinity.reason
        assert set(affinity.cores) <= allowed
        if affinity.cores:
            gpu = gpus[0] if len(gpus) == 1 else gpus[rank]
            assert set(affinity.cores) <= cores.near[gpu.pci]


def test_lists_of_cores() -> None:
    assert format_cores(parse_cores("0-3,8,10-11\n")) == "0-3,8,10-11"
    assert parse_cores("") == frozenset()


@pytest.mark.parametrize(
    ("gpu", "nic", "distance"),
    [
        (0, "mlx5_0", "behind the same PCIe switch"),
        (1, "mlx5_0", "in the same NUMA node"),  # mlx5_2 is nearer, but down
        (2, "mlx5_1", "at the same PCIe root"),
        (3, "mlx5_1", "in the same NUMA node"),
    ],
)
def test_nearest_nic(root: Path, gpu: int, nic: str, distance: str) -> None:
    host = make_host(root)
    found = nearest_nic(host.places[GPUS[gpu].pci], host.nics)
    assert found is not None
    assert (found[0].name, found[1]) == (nic, distance)


@pytest.mark.parametrize("kind", ["verbs", "efa", "cxi"])
def test_kinds_of_nics(tmp_path: Path, kind: str) -> None:
    nics = read_nics(make_sysfs(tmp_path, kind=kind))
    assert {nic.kind for nic in nics} == {kind}
    assert len(nics) == 3
    assert read_nics(tmp_path / "nothing") == ()


def test_what_the_driver_tells_is_read_back() -> None:
    data = {
        "gpus": [
            {
                "index": 0,
                "uuid": "GPU-1",
                "name": "H200",
                "pci": "0000:18:00.0",
                "memory_bytes": 5,
                "mig": ["MIG-1"],
                "links": ["0000:05:00.0"],
                "peers": {"0000:2a:00.0": [True, True, False]},
            }
        ],
        "driver": "570.1",
        "cuda": "12.8",
        "error": None,
    }
    (gpu,) = parse(data).gpus
    assert gpu.mig == ("MIG-1",)
    assert gpu.peers == {"0000:2a:00.0": (True, True, False)}
