"""Network interfaces of this host, and the one that leads to the host of rank 0."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
NVSHMEM = "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"

_IFF_UP = 0x1
# Documentation networks: nobody has these addresses, so only the default route leads to them.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_ANY_PORT = 9  # nothing is sent: a datagram socket only looks up the route


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        name: such as ``eth0``.
        is_up: whether it is switched on.
        addresses: its IPv4 and IPv6 addresses; link-local ones are left out.
        speed_mbits: as the kernel tells it; None where it does not.
    """

    name: str
    is_up: bool
    addresses: tuple[str, ...] = ()
    speed_mbits: int | None = None

    @property
    def is_loopback(self) -> bool:
        return bool(self.addresses) and all(_is_loopback(address) for address in self.addresses)


@dataclass(frozen=True)
class Route:
    """How this host reaches another one.

    Attributes:
        host: the other, by name or address.
        source: this host's address on the way there; None where there is no way.
        outward: this host's address on its default route; None without one.
    """

    host: str
    source: str | None
    outward: str | None = None


@dataclass(frozen=True)
class Choice:
    """An interface, the family of its address (``AF_INET`` or ``AF_INET6``), and why it was chosen."""

    interface: str
    family: str
    reason: str


# -- asking the system -------------------------------------------------------------------------------------


def read_interfaces(root: Path = Path("/")) -> tuple[Interface, ...]:
    """All interfaces of this network name space, in the kernel's order.

    Args:
        root: where ``sys`` is mounted.
    """
    addresses: dict[str, list[str]] = {}
    flags: dict[str, int] = {}
    for name, flag, address in _getifaddrs():
        flags[name] = flags.get(name, 0) | flag
        if address is not None:
            addresses.setdefault(name, []).append(address)
    found = []
    for _, name in socket.if_nameindex():
        try:
            speed = int((root / "sys/class/net" / name / "speed").read_text())
        except (OSError, ValueError):  # the kernel refuses to tell for many virtual ones
            speed = -1
        is_up = bool(flags.get(name, 0) & _IFF_UP)
        found.append(Interface(name, is_up, tuple(addresses.get(name, ())), speed if speed > 0 else None))
    return tuple(found)


def find_route(host: str) -> Route:
    """How this host reaches another one; asks the resolver and the kernel, and sends nothing."""
    outward = next((source for ask in _ELSEWHERE if (source := _source(*ask)) is not None), None)
    try:
        entries = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return Route(host, None, outward)
    # IPv4 first: it is what NVSHMEM takes by default, and all nodes choose alike.
    asks = sorted({(entry[0], str(entry[4][0])) for entry in entries}, key=lambda ask: ask[0])
    sources = (_source(family, address) for family, address in asks)
    return Route(host, next((source for source in sources if source is not None), None), outward)


def _source(family: int, address: str) -> str | None:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _ANY_PORT))
            return str(probe.getsockname()[0])
    except OSError:
        return None


class _SockAddr(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = (
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SockAddr)),
    ("netmask", ctypes.c_void_p),
    ("peer", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
)


def _getifaddrs() -> Iterator[tuple[str, int, str | None]]:
    """Name, flags and, where the entry has one, an address; as getifaddrs(3) lists them."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    try:
        entry = first
        while entry:
            item = entry.contents
            yield os.fsdecode(item.name), item.flags, _address_of(item.address)
            entry = item.next
    finally:
        libc.freeifaddrs(first)


def _address_of(pointer: ctypes._Pointer[_SockAddr]) -> str | None:
    if not pointer:
        return None
    family, data = pointer.contents.family, bytes(pointer.contents.data)
    if family == socket.AF_INET:  # port, address
        return socket.inet_ntop(family, data[2:6])
    if family == socket.AF_INET6:  # port, flow, address, scope
        address = socket.inet_ntop(family, data[6:22])
        return None if ipaddress.ip_address(address).is_link_local else address
    return None


# -- deciding ----------------------------------------------------------------------------------------------


def choose_interface(interfaces: Sequence[Interface], route: Route, *, several_nodes: bool) -> Choice | None:
    """The interface over which the ranks of this host meet those of others.

    It is the one on the way to rank 0's host. On that host itself its name often stands for a loopback
    address in ``/etc/hosts``, which no other host reaches: then the one with the default route, else the
    first that is up and has an address.

    Args:
        interfaces: of this host.
        route: to the host of rank 0.
        several_nodes: whether other hosts take part.

    Returns:
        The choice; None where no interface leads there.
    """
    source, reason = route.source, f"leads to rank 0 at {route.host}"
    named = not _is_loopback_name(route.host)
    if several_nodes and named and source is not None and _is_loopback(source):
        source, reason = route.outward, f"{route.host} is this host; this one has the default route"
        if source is None:
            others = (i.addresses[0] for i in interfaces if i.is_up and i.addresses and not i.is_loopback)
            source = next(others, None)
            reason = f"{route.host} is this host; this one is the first with an address"
    if source is None:
        return None
    name = next((interface.name for interface in interfaces if source in interface.addresses), None)
    if name is None and _is_loopback(source):  # all of 127.0.0.0/8 is the loopback's
        name = next((interface.name for interface in interfaces if interface.is_loopback), None)
    if name is None:
        return None
    family = "AF_INET6" if ":" in source else "AF_INET"
    return Choice(name, family, f"{reason} ({source})")


def unknown_names(variable: str, value: str, interfaces: Sequence[Interface]) -> str | None:
    """What is wrong with a variable that names interfaces; None where each name is one of this host's.

    gloo takes names; NCCL, and NVSHMEM's start, which has NCCL's code, take beginnings of names, whole names
    after ``=``, and all but those after ``^``.
    """
    names = [interface.name for interface in interfaces]
    exact = variable == GLOO
    rest = value
    if not exact:
        if rest.startswith("^"):
            return None
        if rest.startswith("="):
            exact, rest = True, rest[1:]
    wanted = [word.partition(":")[0] if not exact else word for word in rest.split(",") if word]
    matching = [w for w in wanted if w in names or (not exact and any(n.startswith(w) for n in names))]
    missing = [word for word in wanted if word not in matching]
    # Of several beginnings one is enough: a list may serve all hosts of a cluster.
    if wanted and (not missing or (matching and not exact)):
        return None
    return (
        f"{variable}={value}: this host has no network interface {', '.join(missing) or repr(value)}; it has "
        f"{describe_interfaces(interfaces)}"
    )


def exact_name(name: str, interfaces: Sequence[Interface]) -> str:
    """The name for a variable that takes beginnings: with ``=`` where it is the beginning of another's."""
    longer = any(other.name != name and other.name.startswith(name) for other in interfaces)
    return f"={name}" if longer else name


def describe_interfaces(interfaces: Sequence[Interface]) -> str:
    """``lo (127.0.0.1), eth0 (10.0.0.7), ib0 (down)``."""
    told = []
    for interface in interfaces:
        state = "down" if not interface.is_up else (interface.addresses or ("no address",))[0]
        told.append(f"{interface.name} ({state})")
    return ", ".join(told) or "none"


def chosen_by_user(environ: Mapping[str, str], variable: str) -> str | None:
    """The user's value of a variable; an empty one is none."""
    return environ.get(variable) or None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _is_loopback_name(host: str) -> bool:
    """Whether the user said loopback, so that all ranks are on this host."""
    return host == "localhost" or _is_loopback(host.strip("[]"))
