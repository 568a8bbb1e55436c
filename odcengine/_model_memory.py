"""Bytes that training a model takes on each rank, computed from shapes before anything is allocated.

Imports no torch: ``odc-launch --plan`` shows it. The windows are those of
``sharding.on_demand.plan_windows``, which a test compares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from odcengine._in_flight import peak
from odcengine.errors import ConfigError
from odcengine.transport.heap import Ring, aligned, heap_needed

_FP32_NBYTES = 4
_BF16_NBYTES = 2
_GATHERED_BLOCKS = 2  # the one that computes and the next one, which FSDP2 fetches ahead


@dataclass(frozen=True)
class GroupShapes:
    """Parameters that are gathered together.

    Attributes:
        name: the module; empty for the root.
        shapes: of each parameter that is trained.
        itemsize: bytes of an element of those, as the weights are stored.
        frozen: shapes of those that are not trained.
        frozen_itemsize: bytes of an element of those.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    itemsize: int
    frozen: tuple[tuple[int, ...], ...] = ()
    frozen_itemsize: int = 0

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> GroupShapes:
        """From what ``odcengine.models.shapes`` prints."""
        shapes, frozen = (tuple(map(tuple, data[key])) for key in ("shapes", "frozen"))
        return cls(data["name"], shapes, data["itemsize"], frozen, data["frozen_itemsize"])

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(shape) for shape in (*self.shapes, *self.frozen))

    def shard_numel(self, world_size: int) -> int:
        """Elements of one rank's shard of what is trained."""
        return _shard_numel(self.shapes, world_size)

    def frozen_numel(self, world_size: int) -> int:
        """Elements of one rank's shard of what is not trained."""
        return _shard_numel(self.frozen, world_size)

    def gathered_nbytes(self, world_size: int, *, bf16: bool) -> int:
        """Bytes of all parameters as they are computed with, with the padding of their shards."""
        sizes = ((self.shapes, self.itemsize), (self.frozen, self.frozen_itemsize))
        return sum(
            world_size * _shard_numel(shapes, world_size) * (_BF16_NBYTES if bf16 else itemsize)
            for shapes, itemsize in sizes
        )

    def gradient_nbytes(self, world_size: int, *, bf16: bool) -> int:
        """Bytes of the gradients of what is trained: as they are computed, and in the order of ranks."""
        itemsize = _BF16_NBYTES if bf16 else self.itemsize
        computed = sum(math.prod(shape) for shape in self.shapes)
        return itemsize * (computed + world_size * self.shard_numel(world_size))


def _shard_numel(shapes: Sequence[tuple[int, ...]], world_size: int) -> int:
    """FSDP2 cuts the first axis and pads to equal parts."""
    return sum(-(-shape[0] // world_size) * math.prod(shape[1:]) for shape in shapes)


@dataclass(frozen=True)
class Training:
    """What of the configuration counts.

    Attributes:
        bf16: ``bf16.enabled``: computation and windows in bfloat16, masters in fp32.
        states: tensors that the optimizer keeps for each parameter.
        optimizer: its name.
        keeps_gathered: ``odc.reshard_after_forward`` is false.
        collective: FSDP2's own collectives: no windows.
        deterministic: ``odc.deterministic``: an accumulator for each rank of the node.
    """

    bf16: bool = False
    states: int = 2
    optimizer: str = "AdamW"
    keeps_gathered: bool = False
    collective: bool = False
    deterministic: bool = False


@dataclass(frozen=True)
class ModelMemory:
    """Bytes on each rank.

    Attributes:
        window: parameters that others pull.
        accumulator: sums of gradients that others push.
        weights: this rank's shard of the weights that the optimizer changes.
        frozen: this rank's shard of the others, those of the reference model with them.
        optimizer: its states.
        exchange: received from other nodes at the end of a step, at most at once.
        gathered: full parameters and gradients of the blocks at hand, at most.
        heap_needed: bytes of NVSHMEM's heap that are used with ``odc.transport: nvshmem``.
        reference: what of ``window`` and ``frozen`` is the reference model's.
    """

    window: int
    accumulator: int
    weights: int
    frozen: int
    optimizer: int
    exchange: int
    gathered: int
    heap_needed: int
    reference: int = 0

    @property
    def total(self) -> int:
        """All that is held at once, without activations."""
        shards = self.weights + self.frozen + self.optimizer
        return self.window + self.accumulator + shards + self.exchange + self.gathered


def optimizer_states(kind: str, *, amsgrad: bool = False, momentum: bool = False) -> int:
    """Tensors of a parameter's size that an optimizer of the configuration keeps.

    Args:
        kind: ``Adam``, ``AdamW`` or ``SGD``.
        amsgrad: of Adam and AdamW.
        momentum: of SGD.
    """
    return int(momentum) if kind == "SGD" else 3 if amsgrad else 2


def plan_memory(
    groups: Sequence[GroupShapes],
    world_size: int,
    num_nodes: int,
    training: Training,
    reference: Sequence[GroupShapes] = (),
) -> ModelMemory:
    """The memory of one rank.

    Args:
        groups: the model's, each gathered at once; the root's stays gathered.
        world_size: number of ranks, N.
        num_nodes: M of the windows: 1 for full sharding, the number of nodes for hybrid.
        training: settings.
        reference: groups of the reference model, of which nothing is trained.

    Raises:
        ConfigError: M does not divide N.
    """
    if num_nodes < 1 or world_size % num_nodes:
        raise ConfigError(f"{world_size} ranks cannot be divided between {num_nodes} nodes")
    window = accumulator = weights = frozen = states = of_reference = 0
    received: list[int] = []
    node_size = world_size // num_nodes
    for group in groups:
        shard = group.shard_numel(world_size)
        pulled = _BF16_NBYTES if training.bf16 else group.itemsize
        stored = max(group.itemsize, _FP32_NBYTES) if training.bf16 else group.itemsize
        summed = max(_FP32_NBYTES, stored)
        weights += shard * stored
        held = group.frozen_numel(world_size)
        frozen += held * group.frozen_itemsize
        states += shard * stored * training.states
        if training.collective:
            accumulator += shard * stored  # FSDP2's own gradients
            continue
        kept = _BF16_NBYTES if training.bf16 else group.frozen_itemsize
        window += aligned(num_nodes * (shard * pulled + held * kept))
        slots = node_size if training.deterministic else 1
        accumulator += aligned(num_nodes * slots * shard * summed)
        if num_nodes > 1:
            received.append(num_nodes * shard * summed)
    for group in reference:
        held = group.frozen_numel(world_size) * group.frozen_itemsize
        published = 0 if training.collective else aligned(num_nodes * held)
        frozen += held
        window += published
        of_reference += held + published
    return ModelMemory(
        window=window,
        accumulator=accumulator,
        weights=weights,
        frozen=frozen,
        optimizer=states,
        exchange=peak(received),
        gathered=_gathered(groups, reference, world_size, training),
        heap_needed=heap_needed(window + accumulator, node_size, Ring()),
        reference=of_reference,
    )


def _gathered(
    groups: Sequence[GroupShapes], reference: Sequence[GroupShapes], world_size: int, training: Training
) -> int:
    """Root and two blocks of either model, and the gradients of one block of the model that is trained.

    The roots of both stay: a loss may evaluate the reference beside the model.
    """
    bf16 = training.bf16
    root, held = _whole(groups, world_size, bf16=bf16, keeps_gathered=training.keeps_gathered)
    reference_root, evaluated = _whole(reference, world_size, bf16=bf16, keeps_gathered=False)
    gradients = max((group.gradient_nbytes(world_size, bf16=bf16) for group in groups), default=0)
    return root + reference_root + max(held + gradients, evaluated)


def _whole(
    groups: Sequence[GroupShapes], world_size: int, *, bf16: bool, keeps_gathered: bool
) -> tuple[int, int]:
    """Bytes of the root's parameters, and of the largest blocks that are gathered at once."""
    sizes = [(group.name, group.gathered_nbytes(world_size, bf16=bf16)) for group in groups]
    blocks = sorted((size for name, size in sizes if name), reverse=True)
    root = sum(size for name, size in sizes if not name)
    return root, sum(blocks if keeps_gathered else blocks[:_GATHERED_BLOCKS])
