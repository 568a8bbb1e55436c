"""Bringing the ranks together: process group, topology, control block. Used by ``odcengine.initialize``."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import functools
import hashlib
import importlib.util
import json
import logging
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from odcengine._collectives import exchange_texts
from odcengine._nvshmem_variables import set_variables
from odcengine.config import DEVICE_OF_TRANSPORT, Config
from odcengine.control import ControlBlock
from odcengine.device import Device, check_devices, choose_device, identity_of, unmapped_pair
from odcengine.errors import ConfigError, UsageError
from odcengine.ranks import RankInfo
from odcengine.topology import Topology, build_topology
from odcengine.transport._mpi_start import Mpi, start_mpi
from odcengine.transport.base import Grid, Transport, WindowPlan
from odcengine.transport.heap import heap_needed
from odcengine.transport.mpi import MpiTransport
from odcengine.transport.shm import ShmTransport

logger = logging.getLogger(__name__)

_NEVER = datetime.timedelta(days=7)  # collectives at the boundary are watched by ControlBlock.wait_work


@dataclass(frozen=True)
class Job:
    """This rank's place in the job.

    Attributes:
        topology: ranks and nodes as windows are laid out over them.
        control: the control block of this rank's node; its topology has the real nodes even where windows
            join several hosts.
        device: where this rank computes.
        mpi: MPI, with the ranks of the job, where the transport needs it.
        start_group: process group of all ranks for tensors of the host, with the limit of the start.
        host_group: gloo process group of all ranks, for small host-side exchanges at the boundary.
        node_group: process group of the ranks of this node, for exchanges between their devices.
        between_nodes: process group of the ranks with this rank's local index, one a node, for tensors of the
            device; None with one node.
        at_exit: what is registered to run at exit unless :meth:`leave` came first.
    """

    topology: Topology
    control: ControlBlock
    device: Device
    start_group: dist.ProcessGroup
    host_group: dist.ProcessGroup
    node_group: dist.ProcessGroup
    between_nodes: dist.ProcessGroup | None
    at_exit: Callable[[], None]
    mpi: Mpi | None = None

    def draw(self, serial: int, total: int | None = None) -> int:
        """The next number of minibatch ``serial`` that no rank has drawn yet, once this one is nearly free.

        Args:
            serial: see :meth:`ControlBlock.draw`.
            total: how many numbers stand for work. Where all are drawn, nobody waits any more.

        Raises:
            UsageError: ``total`` is no whole number.
        """
        if not isinstance(total, int | None):
            raise UsageError(
                f"draw: expected how much work there is, len(work), or nothing; got a {type(total).__name__}"
            )
        control = self.control
        if self.topology.world_size > 1:  # else there is nobody to leave work to
            self.device.wait_until_nearly_done(
                control, lambda: total is not None and control.num_drawn(serial) >= total
            )
        return control.draw(serial)

    def leave(self) -> None:
        """Give up the groups with their sockets and threads, once no rank uses them any more."""
        atexit.unregister(self.at_exit)
        for group in _groups(self.start_group, self.host_group, self.node_group, self.between_nodes):
            if dist.is_initialized():
                dist.destroy_process_group(group)


_ANY_HOSTS = ("mpi", "nvshmem")
"""Transports whose windows may lie on ranks of several hosts."""


def join(info: RankInfo, config: Config) -> Job:
    """Meet all ranks. Collective.

    Args:
        info: this rank.
        config: the configuration, equal on all ranks.

    Returns:
        The job.

    Raises:
        ConfigError: the ranks' configurations differ, or sharding does not fit the nodes.
        DeadlineError: a rank did not come in time.
    """
    with _interruptible():
        return _join(info, config)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGINT ends the process, as it does by default, while torch waits for other ranks.

    Its stores and gloo wait in C++ and start again after a signal: Python could raise KeyboardInterrupt only
    when the limit has passed. A handler of the user's stays.
    """
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _join(info: RankInfo, config: Config) -> Job:
    options = config.odc
    startup = datetime.timedelta(seconds=options.startup_timeout_s)
    device = choose_device(info, _wanted_device(config))
    made_here = not dist.is_initialized()
    if made_here:
        _init_process_group(info, device, startup)
    elif (dist.get_rank(), dist.get_world_size()) != (info.rank, info.world_size):
        raise ConfigError(
            f"torch.distributed was initialised as rank {dist.get_rank()} of {dist.get_world_size()}, but "
            f"{info.source} says rank {info.rank} of {info.world_size}; initialise it from the same variables"
        )

    start_group = _start_group(startup)
    exchange = functools.partial(exchange_texts, group=start_group)
    _compare(exchange, "configuration", _digest(config.to_yaml()))
    _compare(exchange, "launch plan (odc-launch --plan)", info.plan_hash or "none")
    if info.rank == 0:
        for warning in info.warnings:
            logger.warning("%s", warning)
    found = build_topology(info, exchange, node_size=options.node_size)
    if not made_here:  # else the store has told, before NCCL started
        ranks = [found.describe(rank) for rank in range(info.world_size)]
        check_devices(exchange(identity_of(device)), ranks)
    topology = _choose_nodes(found, config, device)
    # A window over several nodes: still each node has a control block of its own.
    watched = found if options.transport in _ANY_HOSTS else topology
    mpi = None
    if options.transport == "mpi" and info.world_size > 1:
        mpi = start_mpi(info, exchange, options.startup_timeout_s)
    host_group = dist.new_group(backend="gloo", timeout=_NEVER)
    node_group, between_nodes = _new_groups(topology, device)

    # One token a node, made by its first rank: the key to the node's shared memory.
    tokens = exchange(secrets.token_hex(16))
    control = ControlBlock(
        watched,
        token=tokens[watched.peers[0]],
        timeout_s=options.timeout_s,
        startup_timeout_s=options.startup_timeout_s,
        store=_open_store(watched, info, exchange, startup) if watched.num_nodes > 1 else None,
        error_file=info.error_file,
    )
    at_exit = functools.partial(_abandon, _groups(start_group, host_group, node_group, between_nodes))
    atexit.register(at_exit)
    return Job(topology, control, device, start_group, host_group, node_group, between_nodes, at_exit, mpi)


def _start_group(timeout: datetime.timedelta) -> dist.ProcessGroup:
    """The default group, or, where a script made it for GPUs only, another for tensors of the host."""
    world = dist.group.WORLD
    assert world is not None  # join has seen to it
    if "cpu:" in dist.get_backend_config():
        return world
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


def _wanted_device(config: Config) -> str:
    needed = DEVICE_OF_TRANSPORT.get(config.odc.transport, "auto")
    return needed if config.odc.device == "auto" else config.odc.device


def _new_groups(topology: Topology, device: Device) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """The groups of this rank's node and of its column. Collective over all ranks."""
    node_group, between_nodes = dist.group.WORLD, None
    assert node_group is not None  # join has seen to it
    if device.type == "cuda" and topology.num_nodes > 1:
        for ranks in topology.nodes:
            group = dist.new_group(sorted(ranks), backend=device.backend, timeout=_NEVER)
            node_group = group if topology.rank in ranks else node_group
    if topology.num_nodes > 1 and topology.is_even:
        for column in zip(*topology.nodes, strict=True):
            group = dist.new_group(sorted(column), backend=device.backend, timeout=_NEVER)
            between_nodes = group if topology.rank in column else between_nodes
    return node_group, between_nodes


def _groups(*groups: dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
    """Those that are there and were made here."""
    return [group for group in groups if group is not None and group is not dist.group.WORLD]


def _url(rendezvous: str) -> str:
    """``host:port`` as torch.distributed takes it; an IPv6 address needs brackets."""
    host, _, port = rendezvous.rpartition(":")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _init_process_group(info: RankInfo, device: Device, timeout: datetime.timedelta) -> None:
    device_id = device.torch_device if "nccl" in device.backend else None
    if info.world_size == 1 and info.rendezvous is None:
        dist.init_process_group(
            device.backend, store=HashStore(), rank=0, world_size=1, timeout=timeout, device_id=device_id
        )
    elif info.rendezvous is None:
        raise ConfigError(
            f"environment: {info.source} says rank {info.rank} of {info.world_size}, but MASTER_ADDR and "
            "MASTER_PORT, where rank 0 is met, are not both set (odc-launch and torchrun set them)"
        )
    else:
        # torchrun's own variables mean more than an address (its agent may serve the store already).
        method = "env://" if info.source == "torchrun" else _url(info.rendezvous)
        store, _, _ = next(rendezvous(method, info.rank, info.world_size, timeout=timeout))
        store.set_timeout(timeout)
        _check_devices_early(store, info, device)
        dist.init_process_group(
            device.backend,
            store=PrefixStore("default_pg", store),
            rank=info.rank,
            world_size=info.world_size,
            timeout=timeout,
            device_id=device_id,
        )
    atexit.register(_destroy_process_group)


def _check_devices_early(store: Store, info: RankInfo, device: Device) -> None:
    """Refuse here what NCCL, which starts with the process group, would refuse without naming ranks.

    Costs each rank one request to the store, whose answer holds about 100 bytes a rank.
    """
    keys = [f"odc-device-{rank}" for rank in range(info.world_size)]
    store.set(keys[info.rank], json.dumps([socket.gethostname(), identity_of(device)]))
    found = [json.loads(text) for text in store.multi_get(keys)]
    check_devices(
        [identity for _, identity in found],
        [f"rank {rank} (host {host})" for rank, (host, _) in enumerate(found)],
    )


def _abandon(groups: Sequence[dist.ProcessGroup]) -> None:
    """At exit after a failure: let the process end although a collective is pending that never ends.

    The destructor of a gloo group waits for its collectives, and a rank that is stopped or cut off takes no
    part in them any more. A group that is never destroyed lets the process go.
    """
    for group in (*groups, dist.group.WORLD if dist.is_initialized() else None):
        if group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _compare(exchange: Callable[[str], Sequence[str]], what: str, mine: str) -> None:
    texts = exchange(mine)
    odd = [rank for rank, text in enumerate(texts) if text != texts[0]]
    if odd:
        raise ConfigError(
            f"the {what} of ranks {odd} differs from rank 0's ({texts[odd[0]]}, rank 0 has {texts[0]}); "
            "all ranks must run the same script with the same files"
        )


def _choose_nodes(topology: Topology, config: Config, device: Device) -> Topology:
    """The topology that windows are laid out for: hybrid sharding keeps the nodes, full has one."""
    mode, one_machine = config.odc.sharding, len(set(topology.machines)) == 1
    if config.odc.transport == "collective":
        return topology.flat() if one_machine else topology
    if mode == "hybrid" and not topology.is_even:
        counts = {topology.hosts[ranks[0]]: len(ranks) for ranks in topology.nodes}
        raise ConfigError(
            f"odc.sharding: hybrid needs the same number of ranks on every node, but they have {counts}; "
            "start equal numbers, or use `odc.sharding: full`"
        )
    if mode == "hybrid" or (mode == "auto" and topology.is_even):
        return topology
    if not one_machine and config.odc.transport not in _ANY_HOSTS:
        name = config.odc.transport
        if name == "auto":
            name = "shm" if device.type == "cpu" else "cuda_p2p"
        raise ConfigError(
            f"odc.transport: {name} joins ranks of one host, but with `odc.sharding: {mode}` it would have "
            f"to join the hosts {sorted(set(topology.hosts))}; use `odc.sharding: hybrid` with equal numbers "
            f"of ranks on each, which keeps {name} inside each host, or "
            f"`odc.transport: {'mpi' if device.type == 'cpu' else 'nvshmem'}`"
        )
    return topology.flat()


def _open_store(
    topology: Topology,
    info: RankInfo,
    exchange: Callable[[str], Sequence[str]],
    timeout: datetime.timedelta,
) -> TCPStore:
    """A key-value store on rank 0's host, for signs of life and failures between nodes.

    It is reached where the ranks have met already: a host's own name may mean nothing to the others.
    """
    host = socket.gethostname() if info.rendezvous is None else info.rendezvous.rpartition(":")[0]
    serving = None
    if topology.rank == 0:
        serving = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
    told = exchange(json.dumps([host, serving.port if serving else 0]))[0]
    if serving is not None:
        return serving
    host, port = json.loads(told)
    return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


def equalize_weights(model: nn.Module, job: Job, *, stored: str | None = None) -> None:
    """Give all ranks rank 0's parameters and buffers, as DeepSpeed does. Collective.

    Args:
        model: the model, not sharded yet, on the CPU or on the job's device.
        job: the ranks.
        stored: of a model on the meta device, the fingerprint of the files that its weights come from; these
            are compared, and only what is real is given to all.

    Raises:
        ConfigError: the ranks' models differ in names, shapes or dtypes.
    """
    if dist.get_world_size() == 1:
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shape = json.dumps([[name, list(t.shape), str(t.dtype), t.requires_grad] for name, t in tensors.items()])
    what = "model (names, shapes, dtypes, requires_grad of its tensors)"
    exchange = functools.partial(exchange_texts, group=job.start_group)
    _compare(exchange, what, _digest(shape))
    _compare(exchange, "model's files (names, sizes, places of tensors)", stored or "none")
    for tensor in tensors.values():
        if tensor.numel() and not tensor.is_meta:
            # Over the devices: one tensor at a time travels through the GPU, which gloo could not match.
            moved = tensor.detach().to(job.device.torch_device)
            dist.broadcast(moved, src=0)
            if moved.device != tensor.device and job.topology.rank != 0:
                tensor.detach().copy_(moved)


def make_transport(job: Job, config: Config, plan: WindowPlan) -> Transport:
    """The one-sided transport of a job. Collective.

    Args:
        job: the ranks.
        config: the configuration; its transport is not ``collective``.
        plan: windows that will be allocated.
    """
    grid, device = Grid.of(job.topology), job.device.torch_device
    if job.mpi is not None:
        return MpiTransport(job.control, grid, job.mpi)
    if device.type == "cpu":
        return ShmTransport(job.control, grid)
    if _gpu_transport(job, config) == "nvshmem":
        from odcengine.transport.nvshmem import NvshmemTransport, Ring, start_nvshmem

        ring, topology = Ring(unmapped=config.odc.unmapped), job.topology
        needed = heap_needed(plan.total_nbytes, grid.node_size, ring)
        for setting in set_variables(topology, config):
            if topology.rank == 0:
                logger.info("%s=%s: %s", setting.name, setting.value, setting.reason)
        library = start_nvshmem(topology.rank, topology.world_size, device, needed, job.start_group)
        return NvshmemTransport(job.control, grid, device, job.host_group, library, ring)
    from odcengine.transport.cuda_p2p import CudaP2PTransport

    return CudaP2PTransport(job.control, grid, device, job.node_group)


def _gpu_transport(job: Job, config: Config) -> str:
    """For ``auto`` cuda_p2p where a node's GPUs address each other's memory, else nvshmem. Collective."""
    if config.odc.transport != "auto":
        return config.odc.transport
    pair = unmapped_pair(job.device.torch_device.index, len(job.topology.peers))
    has_nvshmem = importlib.util.find_spec("nvshmem") is not None
    told = exchange_texts(json.dumps([pair, has_nvshmem]), job.start_group)
    answers = [json.loads(text) for text in told]
    pairs = [f"{job.topology.describe(rank)}: {pair}" for rank, (pair, _) in enumerate(answers) if pair]
    if not pairs:
        return "cuda_p2p"
    without = [rank for rank, (_, there) in enumerate(answers) if not there]
    if without:
        raise ConfigError(
            f"odc.transport: auto: {pairs[0]}. For such GPUs there is nvshmem, but it is not installed for "
            f"ranks {without}: pip install 'odcengine[cuda13]' (or cuda12)"
        )
    if job.topology.rank == 0:
        logger.warning("odc.transport: auto: %s; nvshmem is used", pairs[0])
    return "nvshmem"
