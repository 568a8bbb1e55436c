"""Which cores each rank of this host runs on: those near its GPU, shared out between the ranks there.

Pure: what sysfs and the driver say is read by :mod:`odcengine.host.host` and handed in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from odcengine.host.nvml import Gpu


@dataclass(frozen=True)
class Cores:
    """The cores of this host.

    Attributes:
        allowed: those that this process may use.
        online: number of all that are switched on.
        near: PCI address of a GPU -> the cores of its NUMA node.
        siblings: core -> the hardware threads of the same physical core, itself included.
    """

    allowed: frozenset[int]
    online: int
    near: Mapping[str, frozenset[int]]
    siblings: Mapping[int, frozenset[int]]


@dataclass(frozen=True)
class Affinity:
    """The cores of a rank, and why these; no cores: it keeps those that it has."""

    cores: tuple[int, ...] = ()
    reason: str = ""


def visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[list[Gpu], str | None]:
    """The GPUs in the order in which CUDA numbers them for a process.

    ``CUDA_VISIBLE_DEVICES`` has numbers, or beginnings of ids of GPUs or MIG devices; as in CUDA the first
    that does not exist ends the list. A MIG device stands for the GPU that it is a part of.

    Args:
        gpus: all, in the order of the PCI bus.
        environ: the process's variables.

    Returns:
        The GPUs, and why they are not known (None where they are).
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    by_bus = environ.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST") == "PCI_BUS_ID"
    numbered = value is None or any(word.strip().isdecimal() for word in value.split(","))
    if numbered and not by_bus and len({gpu.name for gpu in gpus}) > 1:
        return [], "GPUs of different kinds are numbered by speed; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
    if value is None:
        return list(gpus), None
    found: list[Gpu] = []
    for word in (word.strip() for word in value.split(",")):
        gpu = _named(gpus, word)
        if gpu is None:
            break
        found.append(gpu)
    return found, None


def _named(gpus: Sequence[Gpu], word: str) -> Gpu | None:
    if word.isdecimal():
        return gpus[int(word)] if int(word) < len(gpus) else None
    if word.startswith("MIG-GPU-"):  # the older form: MIG-GPU-UUID/instance/compute instance
        uuid = word.removeprefix("MIG-").partition("/")[0]
        return next((gpu for gpu in gpus if gpu.uuid == uuid), None)
    if word.startswith("MIG-"):
        return _only([gpu for gpu in gpus if any(part.startswith(word) for part in gpu.mig)])
    if word.startswith("GPU-"):
        return _only([gpu for gpu in gpus if gpu.uuid.startswith(word)])
    return None


def _only(gpus: Sequence[Gpu]) -> Gpu | None:
    return gpus[0] if len(gpus) == 1 else None


def gpu_of(local_rank: int, visible: Sequence[Gpu]) -> Gpu | None:
    """The GPU of a rank, as ``odcengine.device.choose_device`` takes it."""
    if len(visible) == 1:  # a scheduler may show each rank its own GPU only
        return visible[0]
    return visible[local_rank] if local_rank < len(visible) else None


def plan_affinity(
    local_ranks: Sequence[int],
    local_world_size: int,
    gpus: Sequence[Gpu],
    environ: Mapping[str, str],
    cores: Cores,
    *,
    task_per_rank: bool,
) -> tuple[Affinity, ...]:
    """The cores of each rank that this launcher starts.

    Args:
        local_ranks: their indices among the ranks of this host.
        local_world_size: number of ranks of this host.
        gpus: the GPUs of this host.
        environ: the environment that the ranks inherit.
        cores: the cores of this host.
        task_per_rank: a scheduler started one task for each rank, and may have bound it.

    Returns:
        One entry a rank. A rank is never given a core that the launcher may not use itself.
    """
    if task_per_rank and len(cores.allowed) < cores.online:
        same = f"bound to {len(cores.allowed)} of {cores.online} cores already, by whoever started this task"
        return tuple(Affinity(reason=same) for _ in local_ranks)
    visible, unknown = visible_gpus(gpus, environ)
    if environ.get("ODC_SHARE_GPUS") == "1":
        return tuple(Affinity(reason="ranks share GPUs") for _ in local_ranks)
    if not visible:
        reason = unknown or "no GPU"
        return tuple(Affinity(reason=reason) for _ in local_ranks)
    # Where each task sees its own GPU only, the other ranks near it are not known.
    alone = task_per_rank and len(visible) == 1 and local_world_size > 1
    everybody = list(local_ranks) if alone else list(range(local_world_size))
    near = {rank: _near(gpu_of(rank, visible), cores) for rank in everybody}
    planned = []
    for rank in local_ranks:
        gpu, mine = gpu_of(rank, visible), near.get(rank, frozenset())
        if gpu is None:
            planned.append(Affinity(reason=f"no GPU for local rank {rank}"))
        elif mine is None:
            planned.append(Affinity(reason=f"GPU {gpu.pci} is as near to all usable cores"))
        elif not mine:
            planned.append(Affinity(reason=f"no usable core is near GPU {gpu.pci}"))
        else:
            sharing = [other for other in everybody if near[other] == mine]
            share = _share(mine, cores.siblings, len(sharing), sharing.index(rank))
            what = f"near GPU {gpu.pci}"
            if len(sharing) > 1:
                what += f", shared between {len(sharing)} ranks"
            if len(share) == len(mine) and len(sharing) > 1:
                what = f"near GPU {gpu.pci}; too few to share out between {len(sharing)} ranks"
            planned.append(Affinity(share, what))
    return tuple(planned)


def _near(gpu: Gpu | None, cores: Cores) -> frozenset[int] | None:
    """Usable cores near a GPU; None where all are, or where nothing is known."""
    if gpu is None or gpu.pci not in cores.near:
        return None
    near = cores.near[gpu.pci] & cores.allowed
    return None if near == cores.allowed else near


def _share(
    cores: Collection[int], siblings: Mapping[int, frozenset[int]], count: int, position: int
) -> tuple[int, ...]:
    """One of ``count`` parts, physical cores whole; all cores where there are fewer than parts."""
    physical: list[list[int]] = []
    seen: set[int] = set()
    for core in sorted(cores):
        if core not in seen:
            group = sorted(siblings.get(core, frozenset({core})) & set(cores)) or [core]
            seen.update(group)
            physical.append(group)
    if len(physical) < count:
        return tuple(sorted(cores))
    first, last = (len(physical) * place // count for place in (position, position + 1))
    return tuple(sorted(core for group in physical[first:last] for core in group))


def format_cores(cores: Collection[int]) -> str:
    """``0-3,8-11``, as the kernel writes lists of cores."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_cores(text: str) -> frozenset[int]:
    """The cores of a list such as ``0-3,8-11``; empty text has none."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
