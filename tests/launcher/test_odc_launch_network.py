"""Which interface leads to rank 0, and what the user may name."""

from __future__ import annotations

import socket

import pytest
from fake_host import INTERFACES

from odcengine.host.network import (
    Interface,
    Route,
    choose_interface,
    exact_name,
    find_route,
    read_interfaces,
    unknown_names,
)


def choose(
    route: Route, several_nodes: bool = True, interfaces: tuple[Interface, ...] = INTERFACES
) -> object:
    found = choose_interface(interfaces, route, several_nodes=several_nodes)
    return None if found is None else (found.interface, found.family)


def test_the_one_on_the_way_to_rank_0() -> None:
    assert choose(Route("node1", "10.0.0.7", "10.0.0.7")) == ("eth0", "AF_INET")
    assert choose(Route("node1-ib", "10.1.0.7", "10.0.0.7")) == ("ib0", "AF_INET")
    assert choose(Route("node1", "fd00::7", None)) == ("eth0", "AF_INET6")


def test_on_rank_0s_own_host_whose_name_is_a_loopback_address() -> None:
    """As Debian writes /etc/hosts: 127.0.1.1 node1."""
    assert choose(Route("node1", "127.0.1.1", "10.0.0.7")) == ("eth0", "AF_INET")
    no_default = Route("node1", "127.0.1.1", None)
    assert choose(no_default) == ("eth0", "AF_INET")
    only_loopback = (INTERFACES[0], Interface("eth0", True), Interface("eth1", False, ("10.9.9.9",)))
    assert choose(no_default, interfaces=only_loopback) is None


def test_on_one_host_the_loopback_is_right() -> None:
    assert choose(Route("127.0.0.1", "127.0.0.1", "10.0.0.7"), several_nodes=False) == ("lo", "AF_INET")
    assert choose(Route("node1", "127.0.1.1", "10.0.0.7"), several_nodes=False) == ("lo", "AF_INET")
    assert choose(Route("127.0.0.1", "127.0.0.1", "10.0.0.7")) == ("lo", "AF_INET")  # so said by the user


def test_no_way() -> None:
    assert choose(Route("node1", None, "10.0.0.7")) is None
    assert choose(Route("node1", "10.77.0.1", None)) is None  # of an interface in another name space


@pytest.mark.parametrize(
    ("variable", "value", "fits"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),  # gloo takes names
        ("GLOO_SOCKET_IFNAME", "eth0,ib1", False),
        ("GLOO_SOCKET_IFNAME", "ib0,eth0", True),
        ("NCCL_SOCKET_IFNAME", "eth", True),  # NCCL takes beginnings
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth0,ib0", True),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", True),
        ("NCCL_SOCKET_IFNAME", "ens,eth", True),  # one list for all hosts of a cluster
        ("NCCL_SOCKET_IFNAME", "ens", False),
        ("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "bond0", False),
        ("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "ib", True),
        ("NCCL_SOCKET_IFNAME", ",", False),
    ],
)
def test_names_of_the_user(variable: str, value: str, fits: bool) -> None:
    problem = unknown_names(variable, value, INTERFACES)
    assert (problem is None) == fits
    if problem is not None:
        assert problem.startswith(f"{variable}={value}: this host has no network interface ")
        assert "lo (127.0.0.1), eth0 (10.0.0.7), eth01 (down), ib0 (10.1.0.7)" in problem


def test_a_name_that_begins_anothers_is_made_exact() -> None:
    assert exact_name("eth0", INTERFACES) == "=eth0"  # eth01 is there, too
    assert exact_name("ib0", INTERFACES) == "ib0"


def test_this_host() -> None:
    interfaces = read_interfaces()
    assert {interface.name for interface in interfaces} == {name for _, name in socket.if_nameindex()}
    loopback = next(interface for interface in interfaces if interface.is_loopback)
    assert loopback.is_up
    assert "127.0.0.1" in loopback.addresses
    route = find_route("127.0.0.1")
    assert route.source == "127.0.0.1"
    assert choose(route, several_nodes=False, interfaces=interfaces) == (loopback.name, "AF_INET")
    assert find_route("no-such-host.invalid").source is None
