"""What the launcher reads of this host beside its interfaces: cores, RDMA devices, and what is near what."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from odcengine.host.affinity import Cores, parse_cores
from odcengine.host.network import Interface, Route, find_route, read_interfaces
from odcengine.host.nvml import Gpu, Gpus, read_gpus

SAME_SWITCH, SAME_ROOT, SAME_NUMA, FAR = range(4)
DISTANCES = ("behind the same PCIe switch", "at the same PCIe root", "in the same NUMA node", "far away")


@dataclass(frozen=True)
class Nic:
    """A device that reads and writes other hosts' memory.

    Attributes:
        name: such as ``mlx5_0``.
        kind: ``verbs`` (InfiniBand and RoCE), ``efa`` (AWS) or ``cxi`` (Slingshot).
        link: ``InfiniBand``, ``Ethernet`` or as the driver calls it.
        is_active: whether one of its ports is up.
        path: where its PCI device is in sysfs.
        numa_node: its NUMA node; None where unknown.
    """

    name: str
    kind: str
    link: str = ""
    is_active: bool = True
    path: str = ""
    numa_node: int | None = None


@dataclass(frozen=True)
class GpuPlace:
    """Where a GPU is in sysfs: its path and NUMA node."""

    path: str
    numa_node: int | None


@dataclass(frozen=True)
class Host:
    """What the plan of the ranks of this host may depend on.

    Attributes:
        interfaces: network interfaces.
        route: to the host of rank 0.
        gpus: GPUs and their driver.
        places: PCI address of each GPU -> where it is.
        nics: RDMA devices.
        cores: cores.
    """

    interfaces: tuple[Interface, ...]
    route: Route
    gpus: Gpus
    places: dict[str, GpuPlace]
    nics: tuple[Nic, ...]
    cores: Cores


def read_host(master_addr: str, root: Path = Path("/"), *, with_gpus: bool = True) -> Host:
    """Reads this host.

    Args:
        master_addr: the host of rank 0.
        with_gpus: ask the driver for GPUs, which can take seconds; CPU ranks do not need them.
        root: where ``proc``, ``sys`` and ``dev`` are mounted.
    """
    gpus = read_gpus(root) if with_gpus else Gpus()
    return Host(
        interfaces=read_interfaces(root),
        route=find_route(master_addr),
        gpus=gpus,
        places=read_places(gpus.gpus, root),
        nics=read_nics(root),
        cores=read_cores(gpus.gpus, root),
    )


def read_cores(gpus: Sequence[Gpu], root: Path = Path("/"), allowed: frozenset[int] | None = None) -> Cores:
    """The cores of this host, and those near each GPU.

    Args:
        gpus: the GPUs.
        root: where ``sys`` is mounted.
        allowed: those that may be used; this process's own by default.
    """
    allowed = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    folder = root / "sys/devices/system/cpu"
    online = _cores(folder / "online") or allowed
    near, siblings = {}, {}
    for gpu in gpus:
        device = root / "sys/bus/pci/devices" / gpu.pci
        if _number(device / "numa_node") not in (None, -1):
            near[gpu.pci] = _cores(device / "local_cpulist")
    for core in allowed if near else ():
        siblings[core] = _cores(folder / f"cpu{core}/topology/thread_siblings_list")
    return Cores(
        allowed,
        len(online),
        {pci: cores for pci, cores in near.items() if cores},
        {core: group for core, group in siblings.items() if group},
    )


def read_places(gpus: Sequence[Gpu], root: Path = Path("/")) -> dict[str, GpuPlace]:
    """Where each GPU is in sysfs, by its PCI address."""
    devices = {gpu.pci: root / "sys/bus/pci/devices" / gpu.pci for gpu in gpus}
    return {pci: GpuPlace(os.path.realpath(device), _numa(device)) for pci, device in devices.items()}


def read_nics(root: Path = Path("/")) -> tuple[Nic, ...]:
    """The RDMA devices of this host, by name."""
    found = []
    for device in _folders(root / "sys/class/infiniband"):
        driver = os.path.basename(os.path.realpath(device / "device/driver"))
        ports = list(_folders(device / "ports"))
        links = {_text(port / "link_layer") for port in ports}
        found.append(
            Nic(
                device.name,
                kind="efa" if driver == "efa" else "verbs",
                link=", ".join(sorted(links - {""})),
                is_active=any("ACTIVE" in _text(port / "state") for port in ports),
                path=os.path.realpath(device / "device"),
                numa_node=_numa(device / "device"),
            )
        )
    for device in _folders(root / "sys/class/cxi"):
        path, numa = os.path.realpath(device / "device"), _numa(device / "device")
        found.append(Nic(device.name, kind="cxi", link="Slingshot", path=path, numa_node=numa))
    return tuple(found)


def nearest_nic(place: GpuPlace, nics: Sequence[Nic]) -> tuple[Nic, str] | None:
    """The active RDMA device with the shortest way to a GPU over PCIe, and how far that is in words."""
    active = [nic for nic in nics if nic.is_active]
    if not active:
        return None
    distance, nic = min(((_distance(place, nic), nic) for nic in active), key=lambda pair: pair[0])
    return nic, DISTANCES[distance[0]]


def _distance(place: GpuPlace, nic: Nic) -> tuple[int, int]:
    """Class of the distance and number of bridges between, from the paths in sysfs."""
    one, other = (_pci_parts(path) for path in (place.path, nic.path))
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    hops = len(one) + len(other) - 2 * common
    if common > 1:
        return SAME_SWITCH, hops
    if common == 1:
        return SAME_ROOT, hops
    return (SAME_NUMA if place.numa_node == nic.numa_node is not None else FAR), hops


def _pci_parts(path: str) -> list[str]:
    """From the root complex on: ``pci0000:17``, the bridges, the device."""
    parts = path.split("/")
    start = next((i for i, part in enumerate(parts) if part.startswith("pci")), len(parts))
    return parts[start:]


def _numa(device: Path) -> int | None:
    node = _number(device / "numa_node")
    return None if node == -1 else node


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    try:
        return int(_text(path))
    except ValueError:
        return None


def _cores(path: Path) -> frozenset[int]:
    try:
        return parse_cores(_text(path))
    except ValueError:
        return frozenset()
