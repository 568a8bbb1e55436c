"""The memory part of ``odc-launch --plan``: what training takes on each rank.

It is known where the configuration names the model. The shapes come from a process of its own, which imports
torch and transformers and has a deadline. What it cannot tell is left to the ranks, which check in any case.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from odcengine._model_memory import GroupShapes, ModelMemory, Training, optimizer_states, plan_memory
from odcengine.transport.heap import plan_heap

if TYPE_CHECKING:
    from odcengine.config import Config

TIMEOUT_S = 180.0
_MODULE = "odcengine.models.shapes"
_GIB = 1 << 30
_ROWS = (
    ("window", "parameters for pulls"),
    ("accumulator", "sums of gradients"),
    ("weights", "weights that the optimizer changes"),
    ("frozen", "weights that stay as they are"),
    ("optimizer", "states of the optimizer"),
    ("exchange", "received from other nodes, at a step's end"),
    ("gathered", "gathered blocks and their gradients, at most"),
    ("total", "in all, without activations"),
    ("reference", "of this, window and weights of the reference"),
    ("heap", "NVSHMEM's heap, which holds the windows"),
)
_NOT_COUNTED = (
    "not in it: a reference model that the script gives (reference=...); name it in model.reference instead"
)


def describe_memory(
    config: Config | None,
    config_path: str | None,
    world_size: int,
    num_nodes: int,
    environ: Mapping[str, str],
    device_bytes: int | None = None,
) -> dict[str, Any]:
    """The memory of a rank, as plain data.

    Args:
        config: the configuration.
        config_path: its file.
        world_size: number of ranks.
        num_nodes: number of nodes.
        environ: the ranks' environment.
        device_bytes: memory of a GPU, where known.

    Returns:
        ``full`` and, on several nodes, ``hybrid`` in bytes, ``taken``, and NVSHMEM's ``heap``; or ``unknown``
        with the reason. ``num_reference`` is None where the configuration names no reference model; the
        script may still give one, which is not counted then.

    Raises:
        ConfigError: ``NVSHMEM_SYMMETRIC_SIZE`` is too small.
    """
    if config is None or config_path is None or (config.model.path is None and config.model.config is None):
        return {"unknown": "decided in the ranks: the configuration names no model"}
    shapes = read_shapes(config_path, environ)
    if isinstance(shapes, str):
        return {"unknown": f"decided in the ranks: {shapes}"}
    groups = [GroupShapes.of(group) for group in shapes["groups"]]
    reference = [GroupShapes.of(group) for group in shapes["reference"] or ()]
    training = _training(config, world_size)
    full = plan_memory(groups, world_size, 1, training, reference)
    levels = num_nodes if config.odc.node_size is None else world_size // config.odc.node_size
    hybrid = None
    if levels > 1 and world_size % levels == 0 and not training.collective:
        hybrid = plan_memory(groups, world_size, levels, training, reference)
    taken = "hybrid" if hybrid is not None and config.odc.sharding != "full" else "full"
    chosen = hybrid if hybrid is not None and taken == "hybrid" else full
    nvshmem, heap = config.odc.transport == "nvshmem", None
    if nvshmem:
        size, reason = plan_heap(chosen.heap_needed, environ)
        heap = {"bytes": size, "needed": chosen.heap_needed, "reason": reason}
    return {
        "num_parameters": shapes["num_parameters"],
        "num_trained": shapes["num_trained"],
        "num_reference": sum(group.numel for group in reference) if reference else None,
        "ranks": world_size,
        "nodes": levels,
        "optimizer": training.optimizer,
        "taken": taken,
        "full": _as_dict(full, nvshmem=nvshmem),
        "hybrid": None if hybrid is None else _as_dict(hybrid, nvshmem=nvshmem),
        "heap": heap,
        "device_bytes": device_bytes,
    }


def read_shapes(
    config_path: str, environ: Mapping[str, str], timeout_s: float = TIMEOUT_S
) -> dict[str, Any] | str:
    """The shapes of the configuration's model, or why they are not known."""
    # Where ranks run there may be GPUs; the shapes need none, and no other rank.
    env = {**environ, "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            [sys.executable, "-m", _MODULE, config_path],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the model was not read within {timeout_s:g} s"
    except OSError as error:
        return f"the model was not read: {error}"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        return f"the model was not read: {last}"
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def render_memory(data: Mapping[str, Any]) -> list[str]:
    """The same as lines of text."""
    if "unknown" in data:
        return [f"memory: {data['unknown']}"]
    columns = [name for name in ("full", "hybrid") if data[name] is not None]
    trained = data["num_trained"]
    of_them = "" if trained == data["num_parameters"] else f" ({trained:,} trained)"
    reference = data["num_reference"]
    of_them += "" if reference is None else f" and {reference:,} of the reference model"
    nodes = f" on {data['nodes']} nodes" if data["nodes"] > 1 else ""
    lines = [
        f"memory of each of {data['ranks']} ranks{nodes}, {data['num_parameters']:,} parameters{of_them}, "
        f"{data['optimizer']} (sharding: {data['taken']}):",
        f"  {'':<46}{''.join(f'{name:>12}' for name in columns)}",
    ]
    for key, what in _ROWS:
        values = [data[name].get(key, 0) for name in columns]
        if any(values):
            lines.append(f"  {what:<46}" + "".join(f"{_gib(value):>12}" for value in values))
    if data["hybrid"] is not None:
        more = data["hybrid"]["total"] - data["full"]["total"]
        lines.append(f"  hybrid takes {_gib(more)} more a rank; within a minibatch nothing crosses nodes")
    heap = data["heap"]
    if heap is not None:
        lines.append(f"  heap that is set: {_gib(heap['bytes'])} ({heap['reason']})")
    if reference is None:
        lines.append(f"  {_NOT_COUNTED}")
    return lines


def memory_warnings(data: Mapping[str, Any]) -> list[str]:
    """Where it will not fit."""
    device = data.get("device_bytes")
    if "unknown" in data or not device:
        return []
    chosen = data[data["taken"]]
    total = chosen["total"]
    if data["heap"] is not None:  # windows lie in the heap, which may be larger
        total += data["heap"]["bytes"] - chosen["window"] - chosen["accumulator"]
    if total <= device:
        return []
    return [
        f"training needs {_gib(total)} a rank without activations, and its GPU has {_gib(device)}: use more "
        "GPUs, or a smaller model"
    ]


def _as_dict(memory: ModelMemory, *, nvshmem: bool) -> dict[str, int]:
    data = {**dataclasses.asdict(memory), "total": memory.total}
    needed = data.pop("heap_needed")
    return {**data, "heap": plan_heap(needed, {})[0]} if nvshmem else data


def _training(config: Config, world_size: int) -> Training:
    chosen = config.optimizer
    if chosen is None:
        states, name = 2, "the script's optimizer taken for AdamW"
    else:
        amsgrad = bool(getattr(chosen.params, "amsgrad", False))
        momentum = float(getattr(chosen.params, "momentum", 0.0)) > 0
        states, name = optimizer_states(chosen.type, amsgrad=amsgrad, momentum=momentum), chosen.type
    return Training(
        bf16=config.bf16.enabled,
        states=states,
        optimizer=name,
        keeps_gathered=not config.odc.reshard_after_forward,
        collective=config.odc.transport == "collective" or world_size == 1,
        deterministic=config.odc.deterministic,
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB"
