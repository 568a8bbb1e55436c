"""A faked host: two sockets of four cores with two threads each, two GPUs a socket, NICs beside them."""

from __future__ import annotations

from pathlib import Path

from odcengine.host.host import Host, read_cores, read_nics, read_places
from odcengine.host.network import Interface, Route
from odcengine.host.nvml import Gpu, Gpus

NUM_CORES = 16  # 0-3 and 8-11 on socket 0, 4-7 and 12-15 on socket 1; core c and c + 8 are siblings
SOCKETS = ("0-3,8-11", "4-7,12-15")
GPUS = tuple(
    Gpu(index, f"GPU-{index}0000000-aaaa", "H200", pci, 141 << 30)
    for index, pci in enumerate(("0000:18:00.0", "0000:2a:00.0", "0000:9a:00.0", "0000:ab:00.0"))
)
INTERFACES = (
    Interface("lo", True, ("127.0.0.1", "::1")),
    Interface("eth0", True, ("10.0.0.7", "fd00::7"), 25000),
    Interface("eth01", False),
    Interface("ib0", True, ("10.1.0.7",)),
    Interface("docker0", True, ("172.17.0.1",)),
)
ROUTE = Route("node1", "10.0.0.7", "10.0.0.7")
_DEVICES = {  # PCI path under /sys/devices, NUMA node
    "0000:18:00.0": ("pci0000:17/0000:17:01.0/0000:18:00.0", 0),
    "0000:2a:00.0": ("pci0000:29/0000:29:01.0/0000:2a:00.0", 0),
    "0000:9a:00.0": ("pci0000:99/0000:99:01.0/0000:9a:00.0", 1),
    "0000:ab:00.0": ("pci0000:aa/0000:aa:01.0/0000:ab:00.0", 1),
    "mlx5_0": ("pci0000:17/0000:17:01.0/0000:19:00.0", 0),
    "mlx5_1": ("pci0000:99/0000:99:02.0/0000:9b:00.0", 1),
    "mlx5_2": ("pci0000:29/0000:29:01.0/0000:2b:00.0", 0),  # down
}


def make_sysfs(root: Path, *, kind: str = "verbs", numa: bool = True) -> Path:
    """Writes the part of sysfs that the launcher reads."""
    system = root / "sys/devices/system/cpu"
    system.mkdir(parents=True)
    (system / "online").write_text(f"0-{NUM_CORES - 1}\n")
    for core in range(NUM_CORES):
        topology = system / f"cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
    for name, (path, node) in _DEVICES.items():
        device = root / "sys/devices" / path
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node if numa else -1}\n")
        (device / "local_cpulist").write_text(f"{SOCKETS[node] if numa else '0-15'}\n")
        bus = root / "sys/bus/pci/devices"
        bus.mkdir(parents=True, exist_ok=True)
        (bus / Path(path).name).symlink_to(device)
        if name.startswith("mlx5"):
            _make_nic(root, name, device, kind)
    return root


def _make_nic(root: Path, name: str, device: Path, kind: str) -> None:
    driver = root / "sys/drivers" / ("efa" if kind == "efa" else "mlx5_core")
    driver.mkdir(parents=True, exist_ok=True)
    (device / "driver").symlink_to(driver)
    if kind == "cxi":
        nic = root / "sys/class/cxi" / name.replace("mlx5_", "cxi")
        nic.mkdir(parents=True)
    else:
        nic = root / "sys/class/infiniband" / name
        port = nic / "ports/1"
        port.mkdir(parents=True)
        (port / "link_layer").write_text("InfiniBand\n")
        (port / "state").write_text("1: DOWN\n" if name == "mlx5_2" else "4: ACTIVE\n")
    (nic / "device").symlink_to(device)


def make_host(
    root: Path,
    *,
    gpus: tuple[Gpu, ...] = GPUS,
    allowed: frozenset[int] = frozenset(range(NUM_CORES)),
    route: Route = ROUTE,
    error: str | None = None,
) -> Host:
    """The host whose sysfs is under ``root``."""
    return Host(
        interfaces=INTERFACES,
        route=route,
        gpus=Gpus(gpus, "570.1", "12.8", error),
        places=read_places(gpus, root),
        nics=read_nics(root),
        cores=read_cores(gpus, root, allowed),
    )
