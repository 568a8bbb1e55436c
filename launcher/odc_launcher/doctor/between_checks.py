"""What is right and wrong between the nodes of a job. Pure, over their facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from odc_launcher.doctor.facts import NodeFacts
from odc_launcher.doctor.finding import ERROR, OK, WARNING, Context, Finding, Findings

SLOW_ROUND_TRIP_MS = 20.0
MAX_CLOCK_OFFSET_S = 1.0
_MUST_AGREE = ("python", "odcengine", "torch", "triton", "nvshmem", "nccl")
_SHOULD_AGREE = ("transformers", "driver", "mpi", "slurm")


def _versions(nodes: Sequence[NodeFacts], context: Context) -> Findings:
    differing = 0
    for name in (*_MUST_AGREE, *_SHOULD_AGREE):
        found: dict[str, list[str]] = {}
        for node in nodes:
            found.setdefault(_version_of(node, name), []).append(node.host)
        if len(found) > 1:
            differing += 1
            told = "; ".join(f"{', '.join(hosts)}: {version}" for version, hosts in found.items())
            yield Finding(
                ERROR if name in _MUST_AGREE else WARNING,
                "equal versions",
                f"{name} differs: {told}",
                "run the same environment (one virtual environment or image) on all nodes",
            )
    if not differing:
        yield Finding(OK, "equal versions", f"the same software on all {len(nodes)} nodes")


def _version_of(node: NodeFacts, name: str) -> str:
    probe: Mapping[str, Any] = node.probe
    if name == "nvshmem":
        return str(probe.get("nvshmem", {}).get("version", "none"))
    if name in ("nccl", "torch"):
        return str(probe.get(name) or node.versions.get(name, "none"))
    return node.versions.get(name, "none")


def _same_gpus(nodes: Sequence[NodeFacts], context: Context) -> Findings:
    kinds = {node.host: {gpu["name"] for gpu in node.gpus} for node in nodes}
    if len({frozenset(kind) for kind in kinds.values()}) > 1:
        told = "; ".join(f"{host}: {', '.join(sorted(kind)) or 'none'}" for host, kind in kinds.items())
        yield Finding(
            ERROR, "equal nodes", f"different GPUs: {told}", "choose nodes alike (SLURM: --constraint)"
        )
    counts = {node.host: len(node.gpus) for node in nodes}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{host}: {count}" for host, count in counts.items())
        yield Finding(
            WARNING,
            "equal nodes",
            f"different numbers of GPUs: {told}",
            "hybrid sharding needs equal ones: ask for as many on each node (--gpus-per-node)",
        )


def _same_config(nodes: Sequence[NodeFacts], context: Context) -> Findings:
    if not context.has_config:
        return
    found: dict[str, list[str]] = {}
    for node in nodes:
        found.setdefault(node.config_hash or "not readable", []).append(node.host)
    if len(found) > 1 or "not readable" in found:
        told = "; ".join(f"{', '.join(hosts)}: {value}" for value, hosts in found.items())
        yield Finding(
            ERROR,
            "configuration",
            f"the nodes read different files: {told}",
            "keep it on a file system that all nodes see",
        )


def _store(nodes: Sequence[NodeFacts], context: Context) -> Findings:
    remedy = (
        "let the nodes reach each other over TCP (ports 10000 to 31999 for the rendezvous, and the kernel's "
        "own range); MASTER_ADDR must be an address of the first node that the others reach"
    )
    slowest, host = 0.0, ""
    failed = False
    for node in nodes:
        store = node.probe.get("store")
        if store is None:
            failed = True  # its probe has an error of its own
        elif "error" in store:
            failed = True
            yield Finding(ERROR, "rendezvous", f"no store: {store['error']}", remedy, (node.host,))
        elif store.get("missing"):
            failed = True
            told = ", ".join(nodes[n].host if n < len(nodes) else f"node {n}" for n in store["missing"])
            yield Finding(ERROR, "rendezvous", f"did not reach {node.host}: {told}", remedy)
        elif store.get("round_trip_ms", 0.0) > slowest:
            slowest, host = store["round_trip_ms"], node.host
    if not failed:
        slow = slowest > SLOW_ROUND_TRIP_MS
        yield Finding(
            WARNING if slow else OK,
            "rendezvous",
            f"all nodes reach the store; the slowest round trip takes {slowest:.1f} ms ({host})",
            "see whether launch.interface should name a faster network" if slow else "",
        )


def _clocks(nodes: Sequence[NodeFacts], context: Context) -> Findings:
    offsets = {
        node.host: node.probe["store"]["clock_offset_s"]
        for node in nodes
        if "clock_offset_s" in node.probe.get("store", {})
    }
    if not offsets:
        return
    host = max(offsets, key=lambda name: abs(offsets[name]))
    text = f"largest difference to {nodes[0].host}: {offsets[host]:+.3f} s ({host})"
    if abs(offsets[host]) > MAX_CLOCK_OFFSET_S:
        yield Finding(
            WARNING,
            "clocks",
            text,
            "synchronise them (chrony, ntpd): logs and timelines of nodes do not fit together",
        )
    else:
        yield Finding(OK, "clocks", text)


BETWEEN_CHECKS = (_versions, _same_gpus, _same_config, _store, _clocks)
