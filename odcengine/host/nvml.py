"""The GPUs of this host as the driver's library NVML lists them, without torch and CUDA.

``python -m odcengine.host.nvml`` prints them as JSON. :func:`read_gpus` runs that as a process of its own
with a deadline: a broken driver may hang or crash whoever asks it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")

TIMEOUT_S = 30.0
_MAX_LINKS = 18
_P2P_READ, _P2P_WRITE, _P2P_ATOMICS = 0, 1, 3
_TEXT = 96


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        index: NVML's, in the order of the PCI bus.
        uuid: ``GPU-...``.
        name: the product's name.
        pci: its address as sysfs has it, such as ``0000:1b:00.0``.
        memory_bytes: size of its memory.
        mig: ids of its MIG devices (``MIG-...``), in order; empty without MIG.
        links: for each active NVLink the PCI address at its other end (a switch's or a GPU's).
        peers: PCI address of each other GPU -> whether it can be read, written, and added to atomically; only
            those of which the driver tells.
    """

    index: int
    uuid: str
    name: str
    pci: str
    memory_bytes: int = 0
    mig: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    peers: dict[str, tuple[bool, bool, bool]] | None = None


@dataclass(frozen=True)
class Gpus:
    """All GPUs of this host that this process may use, and the driver.

    Attributes:
        gpus: in NVML's order.
        driver: version of the driver; empty where there is none.
        cuda: newest CUDA that the driver supports, such as ``12.8``.
        error: why they could not be listed; None where they were, or where there is no driver.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    cuda: str = ""
    error: str | None = None


def read_gpus(root: Path = Path("/"), timeout_s: float = TIMEOUT_S) -> Gpus:
    """The GPUs of this host; none where it has no driver of NVIDIA's.

    Args:
        root: where ``proc`` and ``dev`` are mounted.
        timeout_s: longest time for the answer, in seconds.
    """
    signs = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")
    if not any((root / sign).exists() for sign in signs):
        return Gpus()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "odcengine.host.nvml"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            last = (
                done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
            ).splitlines()
            return Gpus(error=f"the GPUs could not be listed: {last[-1]}")
        return parse(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return Gpus(error=f"the driver did not list the GPUs within {timeout_s:g} s")
    except (OSError, ValueError) as error:
        return Gpus(error=f"the GPUs could not be listed: {error}")


def parse(data: dict[str, Any]) -> Gpus:
    """What :func:`main` printed."""
    gpus = []
    for item in data["gpus"]:
        lists = {name: tuple(item[name]) for name in ("mig", "links")}
        peers = {pci: (bool(r), bool(w), bool(a)) for pci, (r, w, a) in item["peers"].items()}
        gpus.append(Gpu(**{**item, **lists, "peers": peers}))
    return Gpus(tuple(gpus), data["driver"], data["cuda"], data["error"])


class _Pci(ctypes.Structure):
    _fields_ = (
        ("legacy_bus", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("ids", ctypes.c_uint * 2),
        ("bus_id", ctypes.c_char * 32),
    )

    @property
    def address(self) -> str:
        """As sysfs writes it."""
        return f"{self.domain:04x}:{self.bus:02x}:{self.device:02x}.0"


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Nvml:
    """The few functions of NVML that are used. A call that fails raises RuntimeError."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self("nvmlInit_v2")

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            self._library.nvmlErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"{name}: {self._library.nvmlErrorString(status).decode()}")

    def text(self, name: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(_TEXT)
        self(name, *arguments, buffer, _TEXT)
        return buffer.value.decode()

    def number(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_uint()
        self(name, *arguments, ctypes.byref(value))
        return value.value

    def handle(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self(name, *arguments, ctypes.byref(handle))
        return handle


def _or_else(default: _T, ask: Callable[[], _T]) -> _T:
    """What NVML says; the default where this GPU or driver does not know the question."""
    try:
        return ask()
    except (RuntimeError, AttributeError):
        return default


def _list(nvml: _Nvml) -> dict[str, Any]:
    cuda = _or_else(0, lambda: nvml.number("nvmlSystemGetCudaDriverVersion_v2"))
    handles = []
    for index in range(nvml.number("nvmlDeviceGetCount_v2")):
        with contextlib.suppress(RuntimeError):  # one that this user may not open
            handles.append((index, nvml.handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index))))
    addresses = [_pci(nvml, "nvmlDeviceGetPciInfo_v3", handle) for _, handle in handles]
    gpus = []
    for (index, handle), pci in zip(handles, addresses, strict=True):
        memory = _Memory()
        nvml("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        peers = {}
        for (_, peer), other in zip(handles, addresses, strict=True):
            rights = [_p2p(nvml, handle, peer, kind) for kind in (_P2P_READ, _P2P_WRITE, _P2P_ATOMICS)]
            if other != pci and None not in rights:
                peers[other] = rights
        gpus.append(
            {
                "index": index,
                "uuid": nvml.text("nvmlDeviceGetUUID", handle),
                "name": nvml.text("nvmlDeviceGetName", handle),
                "pci": pci,
                "memory_bytes": memory.total,
                "mig": _mig(nvml, handle),
                "links": _links(nvml, handle),
                "peers": peers,
            }
        )
    return {
        "gpus": gpus,
        "driver": nvml.text("nvmlSystemGetDriverVersion"),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
        "error": None,
    }


def _pci(nvml: _Nvml, name: str, *arguments: Any) -> str:
    pci = _Pci()
    nvml(name, *arguments, ctypes.byref(pci))
    return pci.address


def _p2p(nvml: _Nvml, one: ctypes.c_void_p, other: ctypes.c_void_p, kind: int) -> bool | None:
    """Whether one GPU may do that to the other's memory; None where the driver does not tell."""
    name = "nvmlDeviceGetP2PStatus"
    status = _or_else(None, lambda: nvml.number(name, one, other, ctypes.c_uint(kind)))
    return None if status is None else status == 0


def _mig(nvml: _Nvml, handle: ctypes.c_void_p) -> list[str]:
    def part(index: int) -> str:
        return nvml.text(
            "nvmlDeviceGetUUID",
            nvml.handle("nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(index)),
        )

    count = _or_else(0, lambda: nvml.number("nvmlDeviceGetMaxMigDeviceCount", handle))
    parts = [_or_else("", functools.partial(part, index)) for index in range(count)]
    return [uuid for uuid in parts if uuid]


def _links(nvml: _Nvml, handle: ctypes.c_void_p) -> list[str]:
    """Where the active links lead."""

    def end(index: int) -> str:
        link = ctypes.c_uint(index)
        if not nvml.number("nvmlDeviceGetNvLinkState", handle, link):
            return ""
        return _or_else("unknown", lambda: _pci(nvml, "nvmlDeviceGetNvLinkRemotePciInfo_v2", handle, link))

    ends = [_or_else("", functools.partial(end, index)) for index in range(_MAX_LINKS)]
    return [address for address in ends if address]


def main() -> int:
    """Prints the GPUs as JSON."""
    try:
        data = _list(_Nvml())
    except (OSError, RuntimeError, AttributeError) as error:
        data = {"gpus": [], "driver": "", "cuda": "", "error": str(error)}
    sys.stdout.write(json.dumps(data) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
