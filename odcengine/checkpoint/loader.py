"""Loads a checkpoint on all ranks: first everything is looked at, and only then anything is changed."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import ReadItem

from odcengine._collectives import gather_texts
from odcengine.checkpoint import directory
from odcengine.checkpoint.source import Source
from odcengine.checkpoint.state import (
    MODEL,
    Parts,
    Trained,
    check_position,
    check_scheduler,
    fingerprints,
    model_tensors,
    names_of,
    new_optimizer_state,
    random_state_setter,
    set_optimizer_state,
    set_scheduler_state,
)
from odcengine.checkpoint.tensors import record_of
from odcengine.errors import CheckpointError, OdcError
from odcengine.start import Job

logger = logging.getLogger(__name__)

_NAMED = 5


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        path: the checkpoint.
        step: optimizer steps it had done.
        client_state: what the script gave for it.
    """

    path: Path
    step: int
    client_state: dict[str, Any]


@dataclass
class _Plan:
    """Everything that is needed to load, found to be right."""

    source: Source
    tensors: dict[str, torch.Tensor]
    items: list[ReadItem]
    optimizer_states: dict[int, dict[str, Any]] | None
    set_random: Callable[[], None]
    frozen: dict[str, int]  # this rank's share of the frozen parameters' fingerprints


def choose(root: Path, tag: str | None) -> directory.Found:
    """The checkpoint that a directory and a tag mean.

    Args:
        root: a directory of checkpoints, or a checkpoint itself.
        tag: the checkpoint's name; None for the one that ``latest`` names.

    Returns:
        It, or none where the directory has none.
    """
    if tag is not None:
        directory.check_tag(tag)
        return directory.Found(root / tag)
    if any((root / name).exists() for name in (directory.MARK, directory.STATE, directory.METADATA)):
        return directory.Found(root)
    return directory.find(root)


def agree_on(
    job: Job, find: Callable[[], directory.Found], what: str = "the checkpoint to load"
) -> Path | None:
    """Have rank 0 look for a checkpoint, and tell all ranks. Collective.

    Args:
        job: the ranks.
        find: called on rank 0.
        what: for messages.

    Raises:
        CheckpointError: what rank 0's search raised, on all ranks.
    """
    answer: dict[str, Any] = {}
    if job.topology.rank == 0:
        try:
            found = find()
            answer = {"path": found.path and str(found.path), "error": None}
            for note in found.notes:
                logger.warning("checkpoints: %s", note)
        except (CheckpointError, OSError) as error:
            answer = {"path": None, "error": str(error)}
    answer = json.loads(gather_texts(json.dumps(answer), job.control, job.host_group, what)[0])
    if answer["error"]:
        raise CheckpointError(answer["error"])
    return Path(answer["path"]) if answer["path"] else None


def load(folder: Path, trained: Trained, job: Job, parts: Parts) -> Loaded:
    """Load one checkpoint on all ranks. Collective; the caller publishes the parameters afterwards.

    Args:
        folder: the checkpoint, equal on all ranks.
        trained: what is filled.
        job: the ranks.
        parts: what to load beside the model.

    Raises:
        CheckpointError: on all ranks alike; nothing has been changed then.
    """
    plan, error = None, ""
    try:
        plan = _look(folder, trained, job, parts)
    except CheckpointError as problem:
        error = str(problem)
    except OSError as problem:
        error = f"{folder}: {directory.explain(problem)}"
    message = json.dumps({"error": error, "frozen": plan.frozen if plan else {}})
    everyone = [
        json.loads(text)
        for text in gather_texts(message, job.control, job.host_group, "the look at a checkpoint")
    ]
    told = [
        f"{job.topology.describe(rank)}: {said['error']}"
        for rank, said in enumerate(everyone)
        if said["error"]
    ]
    if told:
        same = len({said["error"] for said in everyone}) == 1
        raise CheckpointError(error if same else "; ".join(told[:_NAMED]))
    assert plan is not None  # there was no error
    _compare_frozen(plan.source, [said["frozen"] for said in everyone])
    return _fill(plan, trained, parts)


def _look(folder: Path, trained: Trained, job: Job, parts: Parts) -> _Plan:
    """Read and compare everything that this rank needs; changes nothing."""
    source = Source(folder)
    rank, world_size = job.topology.rank, job.topology.world_size
    state = source.state
    if rank == 0:  # also those that loading needs nothing of: who exports it later should hear of it now
        source.check_small_files()
    if not isinstance(state.get("step"), int) or not isinstance(state.get("client_state"), dict):
        raise CheckpointError(f"{folder / directory.STATE} is damaged: it has no step or client_state")
    without_frozen = state.get("frozen") is not None
    tensors = model_tensors(trained.model, frozen=not without_frozen)
    unknown = [name for name in source.names(MODEL) if MODEL + name not in tensors]
    if unknown:
        raise CheckpointError(
            f"{folder} has {len(unknown)} tensors that the model does not have: "
            f"{', '.join(unknown[:_NAMED])}; is it of another model?"
        )
    states = None
    if parts.optimizer:
        try:
            states, more = new_optimizer_state(source, trained, names_of(trained.model), rank, world_size)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise CheckpointError(
                f"{folder / directory.STATE} is damaged: the optimizer's state: {type(error).__name__}: "
                f"{error}"
            ) from error
        tensors = {**tensors, **more}
    if parts.scheduler:
        check_scheduler(source, trained.scheduler)
    if parts.data:
        check_position(source, trained.loader)
    items = source.plan(tensors)
    set_random = _random_setter(source, job, parts)
    source.verify(items)
    frozen = fingerprints(trained.model) if without_frozen else {}
    return _Plan(source, tensors, items, states, set_random, frozen)


def _random_setter(source: Source, job: Job, parts: Parts) -> Callable[[], None]:
    if not parts.random:
        return lambda: None
    rank, device = job.topology.rank, job.device.torch_device
    if rank < source.mark.world_size:
        return random_state_setter(source.random_state(rank), device, str(source.folder / record_of(rank)))
    # More ranks than there were: new ones get numbers of their own, the same whenever this is loaded.
    text = f"{source.state['step']}-{rank}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def set_random() -> None:
        torch.manual_seed(seed)

    return set_random


def _compare_frozen(source: Source, shares: list[dict[str, int]]) -> None:
    saved = source.state.get("frozen")
    if saved is None:
        return
    here = {name: sum(share[name] for share in shares) % (1 << 40) for name in shares[0]}
    odd = [name for name in {**saved, **here} if saved.get(name) != here.get(name)]
    if odd:
        raise CheckpointError(
            f"{source.folder} was saved without frozen parameters, and those of this model are others: "
            f"{', '.join(odd[:_NAMED])}; begin with the same weights as then"
        )


def _fill(plan: _Plan, trained: Trained, parts: Parts) -> Loaded:
    source = plan.source
    try:
        source.load(plan.items, plan.tensors)
    except CheckpointError as error:  # it was right a moment ago; there is no way back now
        raise OdcError(f"a part of the weights is loaded and the rest is not: {error}") from error
    state = source.state
    if plan.optimizer_states is not None:
        set_optimizer_state(trained, plan.optimizer_states, state["optimizer"])
    if parts.scheduler and trained.scheduler is not None:
        set_scheduler_state(trained.scheduler, state["scheduler"])
    if parts.data and trained.loader is not None and state["data"] is not None:
        trained.loader.load_state_dict(state["data"])
    plan.set_random()
    return Loaded(source.folder, state["step"], state["client_state"])
