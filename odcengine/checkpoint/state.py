"""What a checkpoint is of: the tensors of model and optimizer, and everything else as plain values."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from odcengine.checkpoint.plain import encode
from odcengine.checkpoint.source import Source
from odcengine.checkpoint.tensors import own_suffix
from odcengine.data import MinibatchLoader
from odcengine.errors import CheckpointError, OdcError

logger = logging.getLogger(__name__)

MODEL, OPTIMIZER = "model.", "optimizer."
_SHARDED, _EQUAL, _OWN, _PLAIN = "sharded", "equal", "own", "plain"
# Which code computes the same update is the present run's choice.
_IMPLEMENTATION = frozenset({"fused", "foreach", "capturable", "differentiable"})
_NAMED = 5


@dataclass
class Trained:
    """What is trained.

    Attributes:
        model: the sharded model.
        optimizer: its optimizer.
        scheduler: its schedule, or None.
        loader: the engine's loader, or None.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    loader: MinibatchLoader | None


@dataclass(frozen=True)
class Parts:
    """What to load of a checkpoint.

    Attributes:
        optimizer: the optimizer's state.
        scheduler: the schedule's.
        data: the position in the data, and the learned costs.
        random: the random generators' states.
    """

    optimizer: bool = True
    scheduler: bool = True
    data: bool = True
    random: bool = True


# ---- the model -----------------------------------------------------------------------------------------


def model_tensors(model: nn.Module, *, frozen: bool = True) -> dict[str, torch.Tensor]:
    """Parameters, each once also if tied, and persistent buffers, by ``model.NAME``.

    Args:
        model: the model.
        frozen: whether with the parameters that need no gradient.
    """
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if frozen or parameter.requires_grad:
            found[MODEL + name] = parameter
    for name, buffer in persistent_buffers(model):
        found[MODEL + name] = buffer
    return found


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that belong to a model's state, each once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}".lstrip("."), buffer


def fingerprints(model: nn.Module) -> dict[str, int]:
    """This rank's share of a number for each frozen parameter: the sum of its elements' bits.

    Summed over ranks it does not depend on how the parameter is sharded. Only parameters of 2, 4 or 8 bytes
    an element have one.
    """
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    found = {}
    for name, parameter in model.named_parameters():
        kind = kinds.get(parameter.element_size())
        if not parameter.requires_grad and kind is not None:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            bits = local.detach().contiguous().view(kind)
            found[name] = int(bits.sum(dtype=torch.int64).item()) % (1 << 40)
    return found


# ---- the optimizer -------------------------------------------------------------------------------------


class OptimizerState:
    """The optimizer's state by the names of its parameters.

    Attributes:
        tensors: those that go to the tensors' files.
        layout: for each parameter's name and key how it is stored: sharded as the parameter is, equal on all
            ranks, each rank's own (then only the same number of ranks can load it), or a plain value.

    Args:
        optimizer: the optimizer.
        names: name of each parameter, by id.
        rank: this rank.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], rank: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.layout: dict[str, dict[str, Any]] = {}
        for parameter, state in optimizer.state.items():
            name = names[id(parameter)]
            kinds = self.layout[name] = {}
            for key, value in state.items():
                if isinstance(value, DTensor):
                    kinds[key] = _SHARDED
                    self.tensors[f"{OPTIMIZER}{name}.{key}"] = value
                elif isinstance(value, torch.Tensor) and value.dim() == 0:
                    kinds[key] = _EQUAL
                    self.tensors[f"{OPTIMIZER}{name}.{key}"] = value
                elif isinstance(value, torch.Tensor):
                    kinds[key] = [_OWN, str(value.dtype).removeprefix("torch.")]
                    self.tensors[_own_name(name, key, rank)] = value
                else:
                    kinds[key] = [_PLAIN, encode(value, f"the optimizer's {key} of {name}")]


def _own_name(name: str, key: str, rank: int) -> str:
    return f"{OPTIMIZER}{name}.{key}{own_suffix(rank)}"


def names_of(model: nn.Module) -> dict[int, str]:
    """The first name of each parameter, by id."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def param_groups(optimizer: Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The parameter groups, with names in place of parameters."""
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        unknown = [parameter for parameter in group["params"] if id(parameter) not in names]
        if unknown:
            raise CheckpointError(
                f"the optimizer has {len(unknown)} parameters that the model does not have; a checkpoint "
                "holds the state of the model's own"
            )
        values = {key: value for key, value in group.items() if key != "params"}
        # Groups made from named parameters hold names, as the user gave them.
        values.pop("param_names", None)
        groups.append(
            {
                "params": [names[id(parameter)] for parameter in group["params"]],
                "values": encode(values, f"param_groups[{number}] of the optimizer"),
            }
        )
    return groups


def new_optimizer_state(
    source: Source, trained: Trained, names: Mapping[int, str], rank: int, world_size: int
) -> tuple[dict[int, dict[str, Any]], dict[str, torch.Tensor]]:
    """Room for the optimizer's state of a checkpoint.

    Returns:
        The state of each parameter, by its id, and its tensors by their names in the checkpoint, to be
        filled.

    Raises:
        CheckpointError: the optimizer does not fit.
    """
    saved = source.state.get("optimizer")
    if not isinstance(saved, dict):
        raise CheckpointError(f"{source.folder} has no state of an optimizer")
    kind = type(trained.optimizer).__name__
    if saved.get("type") != kind:
        raise CheckpointError(
            f"{source.folder} has the state of {saved.get('type')}, here the optimizer is {kind}; use the "
            "same, or load without the optimizer's state"
        )
    _compare_groups(source, saved["groups"], trained.optimizer, names)
    states: dict[int, dict[str, Any]] = {}
    tensors: dict[str, torch.Tensor] = {}
    scalars_on = _devices_of_scalars(trained.optimizer)
    parameters = {names[id(p)]: p for group in trained.optimizer.param_groups for p in group["params"]}
    for name, kinds in saved["layout"].items():
        parameter = parameters.get(name)
        if parameter is None:
            raise CheckpointError(f"{source.folder}: the optimizer's {name} is none of this one's parameters")
        state = states[id(parameter)] = {}
        for key, how in kinds.items():
            where = f"{OPTIMIZER}{name}.{key}"
            if isinstance(how, list) and how[0] == _PLAIN:
                state[key] = how[1]
                continue
            if isinstance(how, list):
                where = _own_name(name, key, rank)
                if source.mark.world_size != world_size:
                    raise CheckpointError(
                        f"{source.folder}: the optimizer's {key} of {name} has a part of each rank's own, "
                        f"which only {source.mark.world_size} ranks can load, not {world_size}"
                    )
            entry = source.entry(where)
            if entry is None:
                raise CheckpointError(f"{source.folder} has no {where}")
            existing = trained.optimizer.state.get(parameter, {}).get(key)
            if _is_like(existing, entry, how):
                value = existing
            elif how == _SHARDED:
                value = torch.empty_like(parameter.detach(), dtype=entry.properties.dtype)
            else:
                device = scalars_on[id(parameter)] if how == _EQUAL and key == "step" else _device(parameter)
                value = torch.empty(tuple(entry.size), dtype=entry.properties.dtype, device=device)
            state[key] = tensors[where] = value
    return states, tensors


def _is_like(existing: Any, entry: TensorStorageMetadata, how: Any) -> bool:
    """Whether a tensor that is there already has room for one of the checkpoint."""
    return (
        isinstance(existing, torch.Tensor)
        and isinstance(existing, DTensor) == (how == _SHARDED)
        and existing.shape == entry.size
        and existing.dtype == entry.properties.dtype
    )


def _device(parameter: torch.Tensor) -> torch.device:
    return parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device


def _devices_of_scalars(optimizer: Optimizer) -> dict[int, torch.device]:
    """Where torch's optimizers want the number of steps: beside fused ones' parameters, else on the CPU."""
    found = {}
    for group in optimizer.param_groups:
        beside = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            found[id(parameter)] = _device(parameter) if beside else torch.device("cpu")
    return found


def _compare_groups(
    source: Source, saved: list[dict[str, Any]], optimizer: Optimizer, names: Mapping[int, str]
) -> None:
    here = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    there = [group["params"] for group in saved]
    if not all(isinstance(group["values"], dict) for group in saved):
        raise TypeError("a parameter group has no values")
    if [sorted(group) for group in here] == [sorted(group) for group in there]:
        return
    if len(here) != len(there):
        detail = f"{len(there)} parameter groups, here {len(here)}"
    else:
        number = next(i for i, (a, b) in enumerate(zip(here, there, strict=True)) if sorted(a) != sorted(b))
        odd = sorted(set(here[number]) ^ set(there[number]))
        detail = f"other parameters in group {number}: {', '.join(odd[:_NAMED])}"
    raise CheckpointError(
        f"{source.folder}: the optimizer had {detail}; make it in the same way, or load without its state"
    )


def set_optimizer_state(trained: Trained, states: dict[int, dict[str, Any]], saved: dict[str, Any]) -> None:
    """Give the optimizer loaded state, and the hyperparameters that go with it."""
    optimizer = trained.optimizer
    moving = frozenset() if trained.scheduler is None else frozenset({"lr"})  # initial_lr is the base
    optimizer.state.clear()
    for group, other in zip(optimizer.param_groups, saved["groups"], strict=True):
        for parameter in group["params"]:
            if id(parameter) in states:
                optimizer.state[parameter] = states[id(parameter)]
        _report_differences("optimizer", group, other["values"], skip=_IMPLEMENTATION | moving)
        group.update((key, value) for key, value in other["values"].items() if key not in _IMPLEMENTATION)


def _report_differences(
    what: str, here: Mapping[str, Any], there: Mapping[str, Any], *, skip: frozenset[str] = frozenset()
) -> None:
    """Name settings that the configuration wants otherwise: the checkpoint's count."""
    changed = [
        f"{key} {there[key]} (not {here[key]})"
        for key in there
        if key in here
        and key not in skip
        and isinstance(there[key], (int, float, tuple))
        and not isinstance(here[key], torch.Tensor)
        and here[key] != there[key]
    ]
    if changed:
        logger.warning("%s: the checkpoint's settings are used: %s", what, ", ".join(changed[:_NAMED]))


# ---- schedule, data, random generators -----------------------------------------------------------------


def scheduler_state(scheduler: LRScheduler | None) -> Any:
    """The schedule's state as plain values, or None."""
    if scheduler is None:
        return None
    return {
        "type": type(scheduler).__name__,
        "values": encode(scheduler.state_dict(), "the scheduler's state"),
    }


def set_scheduler_state(scheduler: LRScheduler, saved: dict[str, Any]) -> None:
    """Go on with a saved schedule."""
    # What moves with every step differs anyway; the rest are the schedule's settings.
    moving = frozenset({"last_epoch", "base_lrs", *(key for key in saved["values"] if key.startswith("_"))})
    _report_differences("scheduler", scheduler.__dict__, saved["values"], skip=moving)
    scheduler.load_state_dict(saved["values"])


def check_scheduler(source: Source, scheduler: LRScheduler | None) -> None:
    """Raise CheckpointError where the saved schedule is of another kind."""
    found = source.state.get("scheduler")
    saved: dict[str, Any] = found if isinstance(found, dict) else {}
    here = None if scheduler is None else type(scheduler).__name__
    there = saved.get("type")
    if here != there:
        raise CheckpointError(
            f"{source.folder} has the state of {there or 'no scheduler'}, here it is {here or 'none'}; use "
            "the same, or load without the scheduler's state"
        )
    if here is not None and not isinstance(saved.get("values"), dict):
        raise CheckpointError(f"{source.folder}: the scheduler's state is damaged")


def check_position(source: Source, loader: MinibatchLoader | None) -> None:
    """Raise CheckpointError where the saved position in the data belongs to other data or settings."""
    saved = source.state.get("data")
    if loader is None or saved is None:
        return  # the script brings its own batches, and keeps its place in client_state
    before = loader.state_dict()
    try:
        loader.load_state_dict(saved)
    except (OdcError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{source.folder}: {error}") from error
    finally:
        loader.load_state_dict(before)


def random_state(device: torch.device) -> Any:
    """The states of this process's random generators, as plain values."""
    numpy_kind, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (str(numpy_kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return encode(state, "the random state")


def random_state_setter(saved: Any, device: torch.device, where: str) -> Callable[[], None]:
    """A function that sets the generators; what is wrong with the state is found before it is called.

    Raises:
        CheckpointError: it is no such state.
    """
    try:
        kind, keys, *rest = saved["numpy"]
        numpy_state = (kind, keys.numpy().astype(np.uint32), *rest)
        random.Random().setstate(saved["python"])
        np.random.RandomState().set_state(numpy_state)
        torch.Generator().set_state(saved["torch"])
        on_gpu = saved.get("cuda") if device.type == "cuda" else None
        if on_gpu is not None:
            torch.Generator(device).set_state(on_gpu)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{where}: the random state is damaged: {error}") from error

    def set_state() -> None:
        random.setstate(saved["python"])
        np.random.set_state(numpy_state)
        torch.set_rng_state(saved["torch"])
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)

    return set_state
