"""Starting NVSHMEM: one explicit step on all ranks, with a heap that is large enough for the model.

NVSHMEM is one runtime a process. A second start with another set of ranks would be ignored by the library
without a word, so what is running already is adopted only where rank and size agree.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from odcengine._collectives import exchange_texts
from odcengine.device import SHARE_VARIABLE, shares_gpus
from odcengine.errors import ConfigError, OdcError
from odcengine.transport._nvshmem_vmm import choose_vmm
from odcengine.transport.heap import SIZE_VARIABLE, plan_heap

logger = logging.getLogger(__name__)

_VMM_HINT = (
    "On some virtual machines NVSHMEM's heap needs NVSHMEM_DISABLE_CUDA_VMM=1 (a trial at the start sets it, "
    f"unless it is set; the log says what was found): set it and start again. Then {SIZE_VARIABLE} is a hard "
    "limit"
)


@dataclass(frozen=True)
class Nvshmem:
    """The running library.

    Attributes:
        core: the module ``nvshmem.core``.
        bindings: the module ``nvshmem.bindings``.
        version: of library, specification and Python package, for logs.
    """

    core: Any
    bindings: Any
    version: str


def start_nvshmem(
    rank: int, world_size: int, device: torch.device, needed: int, host_group: dist.ProcessGroup
) -> Nvshmem:
    """Start NVSHMEM on all ranks, or adopt it where it runs with these ranks. Collective.

    Args:
        rank: global rank; becomes the PE.
        world_size: number of ranks.
        device: this rank's GPU; current.
        needed: bytes of symmetric memory that will be allocated, equal on all ranks.
        host_group: process group of all ranks, for tensors of the host.

    Returns:
        The library.

    Raises:
        ConfigError: nvshmem4py is missing, versions or sizes do not fit, or NVSHMEM runs with other ranks.
        OdcError: the library does not start.
    """
    if shares_gpus():
        raise ConfigError(
            f"odc.transport: nvshmem needs a GPU for each rank, but {SHARE_VARIABLE}=1 lets ranks share "
            "them; unset it, or take odc.transport: cuda_p2p"
        )
    try:
        from nvshmem import bindings, core
    except ImportError as error:
        raise ConfigError(
            f"odc.transport: nvshmem needs nvshmem4py ({error}); pip install 'odcengine[cuda12]' or cuda13"
        ) from error
    found = core.get_version()
    version = (
        f"NVSHMEM {found.libnvshmem_version}, OpenSHMEM {found.openshmem_spec_version}, nvshmem4py "
        f"{found.nvshmem4py_version}"
    )
    _compare_versions(version, rank, world_size, host_group)
    mismatch = compare_with_wheel(str(found.libnvshmem_version), torch.version.cuda)
    if rank == 0 and mismatch is not None:
        logger.warning("%s", mismatch)
    library = Nvshmem(core, bindings, version)
    if _adopt(library, rank, world_size, functools.partial(exchange_texts, group=host_group)):
        return library
    size, reason = plan_heap(needed, os.environ)
    choose_vmm(rank, world_size, device.index, host_group)
    os.environ[SIZE_VARIABLE] = str(size)
    if rank == 0:
        logger.info("%s; %s=%d (%s)", version, SIZE_VARIABLE, size, reason)
    _init(library, rank, world_size, device, host_group)
    return library


def compare_with_wheel(host_version: str, cuda: str | None) -> str | None:
    """What is wrong with the host library that is loaded, compared with the installed wheel.

    The wheel has host library, device library and plugins of one version; a host library from elsewhere
    (``LD_LIBRARY_PATH``, a module of the cluster) runs with the plugins and the device code of another.

    Args:
        host_version: of the loaded library, such as ``3.4.5``.
        cuda: the CUDA that torch was built for, such as ``12.8``.

    Returns:
        The mismatch with both versions and the remedy; None where they agree or there is no wheel.
    """
    name = f"nvidia-nvshmem-cu{(cuda or '12').partition('.')[0]}"
    try:
        wheel = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if wheel.split(".")[:3] == host_version.split(".")[:3]:
        return None
    return (
        f"NVSHMEM: the loaded host library is {host_version}, but device library and plugins come from "
        f"{name} {wheel}; take the other one out of LD_LIBRARY_PATH (or unload its module), or install "
        f"{name}=={host_version}"
    )


def _compare_versions(version: str, rank: int, world_size: int, group: dist.ProcessGroup) -> None:
    versions = exchange_texts(version, group)
    odd = [other for other, text in enumerate(versions) if text != versions[0]]
    if odd:
        raise ConfigError(
            f"odc.transport: nvshmem: rank 0 has {versions[0]}, rank {odd[0]} has {versions[odd[0]]}; "
            "install the same on all hosts"
        )


def _adopt(library: Nvshmem, rank: int, world_size: int, exchange: Callable[[str], Sequence[str]]) -> bool:
    """Whether the script has started NVSHMEM, in whatever way, with the ranks of the job. Collective.

    Raises:
        ConfigError: with other ranks, or not in all processes; the same on all ranks.
    """
    core, none = library.core, "not at all"
    running = core.init_status() >= core.InitStatus.STATUS_IS_INITIALIZED
    states = exchange(f"as PE {core.my_pe()} of {core.n_pes()}" if running else none)
    if all(state == none for state in states):
        return False
    for other, state in enumerate(states):
        if state != f"as PE {other} of {world_size}":
            raise ConfigError(
                f"NVSHMEM is running already before odcengine.initialize, on rank {other} {state}, but this "
                f"job has rank {other} of {world_size}; a process has one NVSHMEM, so let "
                "odcengine.initialize start it, or start it in all processes with the job's ranks"
            )
    if rank == 0:
        logger.info("%s was running before, with the ranks of the job; it is used as it is", library.version)
    return True


def _init(
    library: Nvshmem, rank: int, world_size: int, device: torch.device, group: dist.ProcessGroup
) -> None:
    from cuda.core import Device

    unique_id = library.core.get_unique_id(empty=rank != 0)
    # The id is a plain structure; its bytes travel as a tensor.
    content = torch.from_numpy(unique_id._data.view("u1").reshape(-1))
    dist.broadcast(content, src=0, group=group)
    current = Device(device.index)
    current.set_current()
    try:
        library.core.init(
            device=current, uid=unique_id, rank=rank, nranks=world_size, initializer_method="uid"
        )
    except Exception as error:
        raise OdcError(f"NVSHMEM does not start on rank {rank}, {device}: {error}. {_VMM_HINT}") from error


def allocate_symmetric(library: Nvshmem, nbytes: int, device: torch.device) -> torch.Tensor:
    """Symmetric memory of this rank. Collective, with the same size on all ranks.

    Raises:
        OdcError: the heap is too small or broken; names the size.
    """
    try:
        arena: torch.Tensor = library.core.tensor((nbytes,), dtype=torch.uint8, except_on_del=False)
    except Exception as error:
        raise OdcError(
            f"NVSHMEM cannot allocate {nbytes / 2**30:.2f} GiB of symmetric memory on {device}: {error}. "
            f"{_VMM_HINT}"
        ) from error
    return arena
