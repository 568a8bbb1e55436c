"""What libraries of the ranks on this host are told by variables: NVSHMEM's start, and gloo's interface.

Pure, over what :mod:`odcengine.host.host` has read. It runs on every node, in the launcher that starts the
ranks there, and in ranks that another launcher has started, because interfaces and RDMA devices may differ
between nodes. What the user has set wins, and is
checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from odcengine.errors import ConfigError
from odcengine.host.affinity import visible_gpus
from odcengine.host.host import Host, nearest_nic
from odcengine.host.network import (
    GLOO,
    NCCL,
    NVSHMEM,
    Choice,
    choose_interface,
    chosen_by_user,
    describe_interfaces,
    exact_name,
    unknown_names,
)
from odcengine.transport.heap import SIZE_VARIABLE, parse_symmetric_size

FAMILY = "NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY"
REMOTE = "NVSHMEM_REMOTE_TRANSPORT"
PROVIDER = "NVSHMEM_LIBFABRIC_PROVIDER"
VMM = "NVSHMEM_DISABLE_CUDA_VMM"
HCA_LIST, HCA_MAPPING = "NVSHMEM_HCA_LIST", "NVSHMEM_HCA_PE_MAPPING"
MAP_NICS = "NVSHMEM_ENABLE_NIC_PE_MAPPING"

REMOTE_TRANSPORTS = ("ibrc", "ibdevx", "ucx", "libfabric", "none")
FAMILIES = ("AF_INET", "AF_INET6")


@dataclass(frozen=True)
class Setting:
    """A variable that the ranks get, and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Job:
    """What of the job matters here.

    Attributes:
        transport: ``odc.transport``.
        sharding: ``odc.sharding``.
        several_nodes: whether ranks run on other nodes, too.
        interface: ``launch.interface``.
    """

    transport: str = "auto"
    sharding: str = "auto"
    several_nodes: bool = False
    interface: str | None = None


@dataclass
class NodeSettings:
    """What was decided for this host.

    Attributes:
        settings: variables that are set; none that the user has set.
        notes: what is decided elsewhere, or by the libraries, one line each.
        warnings: what the user should know.
        problems: why the job cannot run.
    """

    settings: list[Setting] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def node_settings(host: Host, environ: Mapping[str, str], job: Job) -> NodeSettings:
    """Decides what the ranks of this host are told, and checks what the user tells them.

    Args:
        host: this host.
        environ: the environment that the ranks inherit, with what the configuration adds.
        job: the job.
    """
    made = NodeSettings()
    nvshmem = job.transport == "nvshmem"
    made.problems += _interface_problems(host, environ, job)
    names = (GLOO, NVSHMEM) if nvshmem else (GLOO,)
    wanted = [name for name in names if chosen_by_user(environ, name) is None]
    if not job.several_nodes and GLOO in wanted:
        wanted.remove(GLOO)  # on one host gloo's own choice is good
    if wanted and job.interface is None and not made.problems:
        choice = choose_interface(host.interfaces, host.route, several_nodes=job.several_nodes)
        if choice is None:
            made.warnings.append(
                f"no network interface of this host leads to rank 0 at {host.route.host}; it has "
                f"{describe_interfaces(host.interfaces)}: set launch.interface, or MASTER_ADDR"
            )
        else:
            made.settings += _interface_settings(wanted, choice, host, environ)
    if nvshmem:
        made.problems += value_problems(environ, job)
        if environ.get(HCA_LIST) and environ.get(HCA_MAPPING):
            made.warnings.append(
                f"{HCA_LIST} and {HCA_MAPPING} are both set: NVSHMEM takes the list and ignores the mapping"
            )
        _choose_remote(made, host, environ, job)
        made.notes += _notes(host, environ, job)
    return made


def _interface_problems(host: Host, environ: Mapping[str, str], job: Job) -> Iterator[str]:
    names = [interface.name for interface in host.interfaces]
    if job.interface is not None and job.interface not in names:
        yield (
            f"launch.interface: {job.interface}: this host has no such network interface; it has "
            f"{describe_interfaces(host.interfaces)}"
        )
        return
    variables = [GLOO]
    if host.gpus.gpus:  # a login shell may name one for the cluster's GPU nodes
        variables.append(NCCL)
    if job.transport == "nvshmem":
        variables.append(NVSHMEM)
    for variable in variables:
        value = chosen_by_user(environ, variable)
        problem = None if value is None else unknown_names(variable, value, host.interfaces)
        if problem is not None:
            yield problem


def _interface_settings(
    wanted: list[str], choice: Choice, host: Host, environ: Mapping[str, str]
) -> Iterator[Setting]:
    for name in wanted:
        exact = choice.interface if name == GLOO else exact_name(choice.interface, host.interfaces)
        yield Setting(name, exact, choice.reason)
    if NVSHMEM in wanted and choice.family != FAMILIES[0] and FAMILY not in environ:
        yield Setting(FAMILY, choice.family, f"the address of {choice.interface}")


def value_problems(environ: Mapping[str, str], job: Job) -> Iterator[str]:
    """What is wrong with values of the user's for NVSHMEM, on any node."""
    if job.transport != "nvshmem":
        return
    if SIZE_VARIABLE in environ:
        try:
            parse_symmetric_size(environ[SIZE_VARIABLE])
        except ConfigError as error:
            yield from error.problems
    for name, values in ((REMOTE, REMOTE_TRANSPORTS), (FAMILY, FAMILIES)):
        if name in environ and environ[name] not in values:
            yield f"environment: {name}={environ[name]!r}; expected {', '.join(values)}"
    if environ.get(REMOTE) == "none" and job.several_nodes and job.sharding == "full":
        yield (
            f"environment: {REMOTE}=none, but with `odc.sharding: full` the ranks of all nodes read each "
            f"other's memory; unset {REMOTE}, or use `odc.sharding: hybrid`"
        )


def _choose_remote(made: NodeSettings, host: Host, environ: Mapping[str, str], job: Job) -> None:
    """How ranks of different nodes reach each other's memory."""
    if REMOTE in environ:
        return
    if not job.several_nodes:
        made.settings.append(Setting(REMOTE, "none", "all ranks are on this host"))
        return
    kinds: dict[str, list[str]] = {}
    for nic in host.nics:
        if nic.is_active:
            kinds.setdefault(nic.kind, []).append(nic.name)
    if "verbs" in kinds:
        what = f"InfiniBand or RoCE: {', '.join(kinds['verbs'])}"
        made.settings.append(Setting(REMOTE, "ibrc", what))
    elif kinds:
        kind = next(iter(sorted(kinds)))
        what = f"{'Slingshot' if kind == 'cxi' else 'AWS EFA'}: {', '.join(kinds[kind])}"
        made.settings.append(Setting(REMOTE, "libfabric", what))
        if PROVIDER not in environ:
            made.settings.append(Setting(PROVIDER, kind, what))
    else:
        down = ", ".join(nic.name for nic in host.nics)
        made.warnings.append(
            "NVSHMEM needs RDMA between nodes, and this host has no active device for it"
            f"{f' (down: {down})' if down else ''}; `odc.transport: cuda_p2p` with `odc.sharding: hybrid` "
            "does without"
        )


def _notes(host: Host, environ: Mapping[str, str], job: Job) -> Iterator[str]:
    if SIZE_VARIABLE not in environ:
        yield f"{SIZE_VARIABLE}: set in the ranks, to what the model's windows need"
    if VMM not in environ:
        yield f"{VMM}: the ranks try NVSHMEM's heap without it, and set it where that fails"
    if not job.several_nodes:
        return
    mapped = [name for name in (MAP_NICS, HCA_LIST, HCA_MAPPING) if environ.get(name)]
    if mapped:
        yield f"NICs of the GPUs: by your {', '.join(mapped)}"
        return
    gpus, _ = visible_gpus(host.gpus.gpus, environ)
    for number, gpu in enumerate(gpus):
        found = nearest_nic(host.places[gpu.pci], host.nics) if gpu.pci in host.places else None
        if found is not None:
            nic, distance = found
            yield f"NIC of GPU {number} ({gpu.pci}): {nic.name}, {distance} (NVSHMEM takes the nearest)"


def as_env(settings: list[Setting]) -> dict[str, str]:
    """The variables as a mapping."""
    return {setting.name: setting.value for setting in settings}
