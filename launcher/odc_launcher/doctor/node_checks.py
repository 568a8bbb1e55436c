"""What is right and wrong with one node. Pure, over its facts."""

from __future__ import annotations

import re
from collections.abc import Callable

from odc_launcher.doctor.facts import UNLIMITED, NodeFacts
from odc_launcher.doctor.finding import ERROR, OK, WARNING, Context, Finding, Findings

PYTHONS = ("3.10", "3.11", "3.12")
MIN_TORCH = (2, 11)
MIN_SHM = 1 << 30
MIN_FILES = 4096
SLOW_LINK_MBITS = 10_000


def _python(node: NodeFacts, context: Context) -> Findings:
    version = node.versions["python"]
    if version.rpartition(".")[0] in PYTHONS:
        yield Finding(OK, "python", f"Python {version}, odcengine {node.versions['odcengine']}")
    else:
        yield Finding(
            WARNING, "python", f"Python {version} is not tested", f"use one of {', '.join(PYTHONS)}"
        )


def _torch(node: NodeFacts, context: Context) -> Findings:
    probe, installed = node.probe, node.versions.get("torch")
    if installed is None:
        yield Finding(ERROR, "torch", "torch is not installed", "pip install 'torch>=2.11'")
        return
    if "error" in probe:
        yield Finding(
            ERROR,
            "torch",
            f"torch {installed} cannot be used: {probe['error']}",
            'see what `python -c "import torch"` says on this node',
        )
        return
    version = probe.get("torch", installed)
    if _numbers(version)[:2] < MIN_TORCH:
        yield Finding(ERROR, "torch", f"torch {version} is too old", "pip install 'torch>=2.11'")
    else:
        cuda = f"CUDA {probe['cuda']}" if probe.get("cuda") else "without CUDA"
        nccl = f", NCCL {probe['nccl']}" if probe.get("nccl") else ""
        yield Finding(OK, "torch", f"torch {version}, {cuda}{nccl}")


def _driver(node: NodeFacts, context: Context) -> Findings:
    probe, gpus = node.probe, node.gpus
    wanted = context.device == "cuda"
    if node.gpus_unknown is not None:
        level = WARNING if context.device == "cpu" else ERROR
        yield Finding(level, "gpus", node.gpus_unknown, "see whether `nvidia-smi` works on this node")
        return
    if not gpus:
        hidden = "CUDA_VISIBLE_DEVICES" in node.env and bool(node.versions.get("driver"))
        why = f" (CUDA_VISIBLE_DEVICES={node.env['CUDA_VISIBLE_DEVICES']!r})" if hidden else ""
        if wanted:
            yield Finding(
                ERROR,
                "gpus",
                f"no GPU is visible{why}, but the configuration wants GPUs",
                "ask SLURM for GPUs (--gpus-per-node=8), or set `odc.device: cpu`",
            )
        else:
            yield Finding(OK, "gpus", f"no GPU is visible{why}; ranks compute on the CPU")
        return
    kinds = sorted({gpu["name"] for gpu in gpus})
    text = f"{len(gpus)} x {', '.join(kinds)}, driver {node.versions.get('driver')}"
    if len(kinds) > 1:
        yield Finding(
            ERROR, "gpus", f"{text}: ranks need GPUs of one kind", "choose with CUDA_VISIBLE_DEVICES"
        )
    elif any(gpu["mig"] for gpu in gpus):
        yield Finding(
            WARNING,
            "gpus",
            f"{text}, split into MIG devices, which cannot address each other's memory",
            "switch MIG off, or train with one rank a node",
        )
    else:
        yield Finding(OK, "gpus", text)
    if "error" in probe or context.device == "cpu" or "torch" not in probe:
        return
    newest = node.versions.get("driver's CUDA", "")
    if probe["cuda"] is None:
        yield Finding(
            ERROR,
            "gpus",
            "this node has GPUs, but torch is built without CUDA",
            "install torch from its CUDA index, or set `odc.device: cpu`",
        )
    elif newest and _numbers(probe["cuda"])[:1] > _numbers(newest)[:1]:
        yield Finding(
            ERROR,
            "gpus",
            f"torch is built for CUDA {probe['cuda']}, the driver supports up to {newest}",
            "update the driver, or install torch for an older CUDA",
        )
    elif len(probe["gpus"]) != len(gpus) and not any(gpu["mig"] for gpu in gpus):
        yield Finding(
            ERROR,
            "gpus",
            f"torch sees {len(probe['gpus'])} GPUs, the driver shows {len(gpus)}",
            "compare CUDA_VISIBLE_DEVICES with what SLURM gave the job (`nvidia-smi -L` in the step)",
        )


def _peers(node: NodeFacts, context: Context) -> Findings:
    """Only between the GPUs that are visible."""
    if len(node.gpus) < 2 or context.job.transport == "collective":
        return
    visible = {gpu["pci"]: number for number, gpu in enumerate(node.gpus)}
    pairs = [
        (number, visible[other], rights)
        for number, gpu in enumerate(node.gpus)
        for other, rights in (gpu["peers"] or {}).items()
        if other in visible
    ]
    no_access = {(one, other) for one, other, (read, write, _) in pairs if not (read and write)}
    no_access |= {(one, other) for one, other in node.probe.get("no_access", [])}
    no_atomics = {(one, other) for one, other, (*_, atomics) in pairs if not atomics} - no_access
    if no_access:
        needed = context.job.transport in ("auto", "cuda_p2p")
        yield Finding(
            ERROR if needed else WARNING,
            "peer access",
            f"GPUs cannot address each other's memory: {_pairs(no_access)}",
            "use linked GPUs (`nvidia-smi topo -p2p r`); in virtual machines and with IOMMU or ACS on, "
            "peer access over PCIe is off",
        )
    elif no_atomics:
        yield Finding(
            WARNING,
            "peer access",
            f"no atomic additions in each other's memory: {_pairs(no_atomics)}; pushes need them",
            "use GPUs that are linked by NVLink, or hardware with PCIe atomics",
        )
    else:
        yield Finding(OK, "peer access", f"all {len(node.gpus)} GPUs address each other's memory")
    links = sorted({len(gpu["links"]) for gpu in node.gpus})
    if links == [0]:
        yield Finding(WARNING, "nvlink", "no NVLink: pulls and pushes go over PCIe", "expect less speed")
    elif len(links) > 1:
        yield Finding(
            WARNING,
            "nvlink",
            f"GPUs have different numbers of active NVLinks: {', '.join(map(str, links))}",
            "see `nvidia-smi nvlink -s`; a link may be down",
        )
    else:
        yield Finding(OK, "nvlink", f"{links[0]} active NVLinks a GPU")


def _triton(node: NodeFacts, context: Context) -> Findings:
    if not node.gpus or context.device == "cpu" or context.job.transport == "collective":
        return
    state = node.probe.get("imports", {}).get("triton")
    if state != "ok" and "error" not in node.probe:
        text = "Triton is not installed" if state is None else f"Triton does not import: {state}"
        yield Finding(ERROR, "triton", text, "pip install 'odcengine[cuda12]' (or cuda13)")


def _nvshmem(node: NodeFacts, context: Context) -> Findings:
    if "error" in node.probe:
        return
    state, found = node.probe.get("imports", {}).get("nvshmem.core"), node.probe.get("nvshmem", {})
    wanted = context.job.transport == "nvshmem"
    if state != "ok":
        text = "not installed" if state is None else f"does not import: {state}"
        if wanted:
            remedy = "pip install 'odcengine[cuda12]' (or cuda13)"
            yield Finding(ERROR, "nvshmem", f"nvshmem4py {text}", remedy)
        elif node.gpus:
            yield Finding(OK, "nvshmem", f"nvshmem4py {text}; only `odc.transport: nvshmem` needs it")
    elif found.get("mismatch"):
        yield Finding(
            ERROR if wanted and found["version"] is None else WARNING,
            "nvshmem",
            found["mismatch"],
            "run with one version of host library, device library and plugins",
        )
    else:
        yield Finding(OK, "nvshmem", f"NVSHMEM {found.get('version')}")


def _interfaces(node: NodeFacts, context: Context) -> Findings:
    for problem in node.problems:
        yield Finding(ERROR, "variables", problem, "correct or unset it")
    for warning in node.warnings:
        yield Finding(WARNING, "variables", warning, "see docs/slurm.md, Network")
    for setting in node.chosen:
        yield Finding(
            OK, "variables", f"odc-launch sets {setting['name']}={setting['value']}: {setting['reason']}"
        )
    name = next((s["value"] for s in node.chosen if s["name"] == "GLOO_SOCKET_IFNAME"), None)
    chosen = next((i for i in node.interfaces if i["name"] == (name or context.job.interface)), None)
    if context.job.several_nodes and chosen is not None:
        speed = chosen["speed_mbits"]
        if not chosen["is_up"]:
            yield Finding(ERROR, "network", f"{chosen['name']} is down", f"ip link set {chosen['name']} up")
        elif speed is not None and speed < SLOW_LINK_MBITS:
            yield Finding(
                WARNING,
                "network",
                f"{chosen['name']} is slow: {speed} Mbit/s",
                "set launch.interface to a faster one; exchanges between nodes go through NCCL's own choice",
            )


def _nics(node: NodeFacts, context: Context) -> Findings:
    active = [nic["name"] for nic in node.nics if nic["is_active"]]
    down = [nic["name"] for nic in node.nics if not nic["is_active"]]
    if active:
        kinds = sorted({nic["link"] or nic["kind"] for nic in node.nics if nic["is_active"]})
        yield Finding(OK, "rdma", f"{len(active)} active ({', '.join(kinds)}): {', '.join(active)}")
    elif context.job.several_nodes and node.gpus:
        yield Finding(
            WARNING,
            "rdma",
            "no active RDMA device: what passes between nodes goes over TCP",
            "load the drivers of the network cards; in a container pass /dev/infiniband through",
        )
    if down:
        yield Finding(WARNING, "rdma", f"not active: {', '.join(down)}", "see `ibstat` on this node")
    memlock = node.limits.get("memlock", UNLIMITED)
    if active and node.gpus and memlock != UNLIMITED:
        level = ERROR if context.job.transport == "nvshmem" and context.job.several_nodes else WARNING
        yield Finding(
            level,
            "memlock",
            f"at most {_size(memlock)} of memory may be locked, and RDMA locks what it registers",
            "ulimit -l unlimited; under SLURM set PropagateResourceLimitsExcept=MEMLOCK, and slurmd's limit",
        )


def _memory(node: NodeFacts, context: Context) -> Findings:
    if node.memory_files != "ok":
        yield Finding(
            ERROR,
            "shared memory",
            f"memory files cannot be made: {node.memory_files}",
            "allow the system call memfd_create (a sandbox or seccomp profile refuses it)",
        )
    shm = node.limits.get("shm", 0)
    if shm < MIN_SHM:
        yield Finding(
            WARNING,
            "shared memory",
            f"/dev/shm has {_size(shm)}: NCCL and the workers of data loaders use it",
            "in a container: --shm-size=16g or --ipc=host",
        )
    else:
        yield Finding(
            OK, "shared memory", f"/dev/shm has {_size(shm)}, {_size(node.limits['shm_free'])} free"
        )
    if "memory" in node.limits:
        yield Finding(OK, "memory", f"{_size(node.limits['memory'])} available", "")


def _files(node: NodeFacts, context: Context) -> Findings:
    soft, hard = node.limits.get("nofile", UNLIMITED), node.limits.get("nofile_hard", UNLIMITED)
    if soft != UNLIMITED and soft < MIN_FILES:
        told = "no limit" if hard == UNLIMITED else str(hard)
        yield Finding(
            WARNING,
            "open files",
            f"at most {soft} open files a process",
            f"ulimit -n {MIN_FILES} before odc-launch (hard limit: {told})",
        )


def _cores(node: NodeFacts, context: Context) -> Findings:
    if node.cores < node.cores_online:
        text = f"{node.cores} of {node.cores_online} cores may be used"
    else:
        text = f"{node.cores} cores"
    few = len(node.gpus) > node.cores
    yield Finding(
        WARNING if few else OK,
        "cores",
        f"{text} by {len(node.gpus)} ranks" if few else text,
        "ask SLURM for --cpus-per-task" if few else "",
    )


_SWITCHES: tuple[tuple[str, Callable[[str], bool], str, str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", lambda v: v == "1", "every kernel is waited for", "unset it"),
    ("NCCL_P2P_DISABLE", lambda v: v == "1", "NCCL may not use NVLink", "unset it"),
    ("NCCL_IB_DISABLE", lambda v: v == "1", "NCCL may not use InfiniBand or RoCE", "unset it"),
    ("NVSHMEM_DISABLE_P2P", lambda v: v not in ("", "0", "false"), "NVSHMEM maps no memory", "unset it"),
    ("NCCL_DEBUG", lambda v: v.upper() == "TRACE", "NCCL prints every call", "use WARN or INFO"),
)


def _variables(node: NodeFacts, context: Context) -> Findings:
    """Of the environment what slows down or contradicts."""
    env = node.env
    for name, bad, effect, remedy in _SWITCHES:
        harmless = name == "NCCL_IB_DISABLE" and not node.nics
        if node.gpus and name in env and bad(env[name]) and not harmless:
            yield Finding(WARNING, "variables", f"{name}={env[name]}: {effect}", remedy)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME")
    values = {name: env[name].lstrip("=") for name in names if env.get(name)}
    plain = {value for value in values.values() if not value.startswith("^")}
    if len(plain) > 1:
        told = ", ".join(f"{name}={env[name]}" for name in values)
        yield Finding(
            WARNING, "variables", f"different interfaces: {told}", "set launch.interface, and unset these"
        )
    if "NVSHMEM_DISABLE_CUDA_VMM" in env and context.job.transport == "nvshmem":
        yield Finding(
            WARNING,
            "variables",
            f"NVSHMEM_DISABLE_CUDA_VMM={env['NVSHMEM_DISABLE_CUDA_VMM']}: its heap cannot grow beyond "
            "NVSHMEM_SYMMETRIC_SIZE where this is 1",
            "unset it: the ranks find out whether it is needed",
        )
    threads = env.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > node.cores > 0:
        yield Finding(
            WARNING,
            "variables",
            f"OMP_NUM_THREADS={threads} on {node.cores} cores",
            "unset it: odc-launch divides the cores between the ranks",
        )


def _programs(node: NodeFacts, context: Context) -> Findings:
    for name in ("slurm", "mpi"):
        if name in node.versions:
            yield Finding(OK, name, node.versions[name])


def _folder(node: NodeFacts, context: Context) -> Findings:
    if node.sees_folder is False:
        yield Finding(
            ERROR,
            "log folder",
            "the folder of the logs is not on a file system that this node shares with the first",
            "choose one with --log-dir (or launch.log_dir) that all nodes see",
        )


NODE_CHECKS = (
    _python,
    _torch,
    _driver,
    _peers,
    _triton,
    _nvshmem,
    _programs,
    _interfaces,
    _nics,
    _variables,
    _memory,
    _files,
    _cores,
    _folder,
)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def _pairs(pairs: set[tuple[int, int]]) -> str:
    shown = sorted({(min(pair), max(pair)) for pair in pairs})
    more = f" and {len(shown) - 6} more pairs" if len(shown) > 6 else ""
    return ", ".join(f"{one} and {other}" for one, other in shown[:6]) + more


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} bytes"
