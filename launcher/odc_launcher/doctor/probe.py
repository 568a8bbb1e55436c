"""The part of the doctor that needs torch: ``python -m odc_launcher.doctor.probe NODE NODES ADDRESS PORT S``.

It imports torch, looks at what torch sees, and meets the probes of the other nodes through a store as
training does. It prints JSON objects; the last one counts.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

_ROUNDS = 5
_MARK = "@odc-probe "


def run(node: int, num_nodes: int, address: str, port: int, timeout_s: float) -> dict[str, Any]:
    """Runs the probe as a process of its own, with a deadline.

    Args:
        node: index of this node.
        num_nodes: number of nodes.
        address: of the first node.
        port: of the store there.
        timeout_s: longest time for everything, in seconds; the nodes wait for each other for a third of it.

    Returns:
        What it found out; ``error`` where it did not end well.
    """
    words = [sys.executable, "-m", __spec__.name, *map(str, (node, num_nodes, address, port, timeout_s / 3))]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"importing torch and meeting the other nodes took more than {timeout_s:g} s"}
    except OSError as error:
        return {"error": f"{sys.executable} cannot be started: {error}"}
    last = (done.stderr.strip() or "no message").splitlines()[-1]
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        return {"error": f"exit code {done.returncode}: {last}"}
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(_MARK))
    trying = found.pop("trying", None)
    if trying is not None:
        found["imports"][trying] = f"it ended the process, exit code {done.returncode}: {last}"
    return found


def main(arguments: Sequence[str]) -> int:
    """Prints what was found, also before each import that may end the process."""
    node, num_nodes, address, port = int(arguments[0]), int(arguments[1]), arguments[2], int(arguments[3])
    found = _see()
    if num_nodes > 1:
        found["store"] = _meet(node, num_nodes, address, port, float(arguments[4]))
    _tell(found)
    return 0


def _tell(found: dict[str, Any]) -> None:
    print(_MARK + json.dumps(found), flush=True)


def _see() -> dict[str, Any]:
    """Torch, its GPUs, and the libraries beside it."""
    import torch

    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [],
        "no_access": [],
        "imports": {},
    }
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        found["gpus"] = [torch.cuda.get_device_name(index) for index in range(count)]
        found["no_access"] = [
            [one, other]
            for one in range(count)
            for other in range(count)
            if one != other and not torch.cuda.can_device_access_peer(one, other)
        ]
        with contextlib.suppress(RuntimeError, AttributeError):
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    for name in ("triton", "nvshmem.core", "mpi4py"):
        _tell({**found, "trying": name})
        found["imports"][name] = _import(name)
    if found["imports"]["nvshmem.core"] == "ok":
        found["nvshmem"] = _nvshmem(torch.version.cuda)
    return found


def _import(name: str) -> str | None:
    """``ok``, why it fails, or None where it is not installed."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A part of it may be what is missing.
        missing = error.name or ""
        return None if name == missing or name.startswith(missing + ".") else str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def _nvshmem(cuda: str | None) -> dict[str, str | None]:
    from nvshmem import core

    from odcengine.transport._nvshmem_start import compare_with_wheel

    try:
        version = str(core.get_version().libnvshmem_version)
    except Exception as error:
        return {"version": None, "mismatch": f"the host library does not load: {error}"}
    return {"version": version, "mismatch": compare_with_wheel(version, cuda)}


def _meet(node: int, num_nodes: int, address: str, port: int, limit_s: float) -> dict[str, Any]:
    """Round trips to the store on the first node, and the difference of the clocks."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit, deadline = datetime.timedelta(seconds=limit_s), time.monotonic() + limit_s
    try:
        store = TCPStore(address, port, is_master=node == 0, timeout=limit, wait_for_workers=False)
        if node == 0:
            return {"missing": _answer(store, num_nodes, deadline)}
        return _ask(store, node, deadline)
    except Exception as error:  # torch raises its own kinds, by version
        return {"error": str(error).strip().partition("\n")[0]}


def _answer(store: Any, num_nodes: int, deadline: float) -> list[int]:
    """The first node tells each other one its time; returns those that did not ask."""
    missing = []
    for node in range(1, num_nodes):
        try:
            for number in range(_ROUNDS):
                _wait(store, f"ask/{node}/{number}", deadline)
                store.set(f"time/{node}/{number}", repr(time.time()))
            _wait(store, f"done/{node}", deadline)
        except TimeoutError:
            missing.append(node)
    return missing


def _ask(store: Any, node: int, deadline: float) -> dict[str, float]:
    shortest, offset = float("inf"), 0.0
    for number in range(_ROUNDS):
        start = time.time()
        store.set(f"ask/{node}/{number}", "")
        _wait(store, f"time/{node}/{number}", deadline)
        told, end = float(store.get(f"time/{node}/{number}")), time.time()
        if end - start < shortest:
            shortest, offset = end - start, (start + end) / 2 - told
    store.set(f"done/{node}", "")
    return {"round_trip_ms": shortest * 1e3, "clock_offset_s": offset}


def _wait(store: Any, key: str, deadline: float) -> None:
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{key} did not come")
        time.sleep(0.001)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
