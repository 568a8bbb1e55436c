"""Bytes that training a model takes on each rank, computed from shapes before anything is allocated.

Imports no torch: ``odc-launch --plan`` shows it. The windows are those of
``sharding.on_demand.plan_windows``, which a test compares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from odcengine._in_flight import peak
from odcengine.errors import ConfigError
from odcengine.transport.heap import Ring, aligned, heap_needed

_FP32_NBYTES = 4
_BF16_NBYTES = 2
_GATHERED_BLOCKS = 2  # the one that computes and the next one, which FSDP2 fetches ahead


@dataclass(frozen=True)
class GroupShapes:
    """Parameters that are gathered together, all of them trained.

    Attributes:
        name: the module; empty for the root.
        shapes: of each parameter.
        itemsize: bytes of an element, as the weights are stored.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    itemsize: int

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    def shard_numel(self, world_size: int) -> int:
        """Elements of one rank's shard: FSDP2 cuts the first axis and pads to equal parts."""
        return sum(-(-shape[0] // world_size) * math.prod(shape[1:]) for shape in self.shapes)


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
        optimizer: its states.
        exchange: received from other nodes at the end of a step, at most at once.
        gathered: full parameters and gradients of the blocks at hand, at most.
        heap_needed: bytes of NVSHMEM's heap that are used with ``odc.transport: nvshmem``.
    """

    window: int
    accumulator: int
    weights: int
    optimizer: int
    exchange: int
    gathered: int
    heap_needed: int

    @property
    def total(self) -> int:
        """All that is held at once, without activations."""
        held = (self.window, self.accumulator, self.weights, self.optimizer, self.exchange, self.gathered)
        return sum(held)


def optimizer_states(kind: str, *, amsgrad: bool = False, momentum: bool = False) -> int:
    """Tensors of a parameter's size that an optimizer of the configuration keeps.

    Args:
        kind: ``Adam``, ``AdamW`` or ``SGD``.
        amsgrad: of Adam and AdamW.
        momentum: of SGD.
    """
    return int(momentum) if kind == "SGD" else 3 if amsgrad else 2


def plan_memory(
    groups: Sequence[GroupShapes], world_size: int, num_nodes: int, training: Training
) -> ModelMemory:
    """The memory of one rank.

    Args:
        groups: the model's, each gathered at once; the root's stays gathered.
        world_size: number of ranks, N.
        num_nodes: M of the windows: 1 for full sharding, the number of nodes for hybrid.
        training: settings.

    Raises:
        ConfigError: M does not divide N.
    """
    if num_nodes < 1 or world_size % num_nodes:
        raise ConfigError(f"{world_size} ranks cannot be divided between {num_nodes} nodes")
    window = accumulator = weights = states = 0
    received: list[int] = []
    node_size = world_size // num_nodes
    for group in groups:
        shard = group.shard_numel(world_size)
        pulled = _BF16_NBYTES if training.bf16 else group.itemsize
        stored = max(group.itemsize, _FP32_NBYTES) if training.bf16 else group.itemsize
        summed = max(_FP32_NBYTES, stored)
        weights += shard * stored
        states += shard * stored * training.states
        if training.collective:
            accumulator += shard * stored  # FSDP2's own gradients
            continue
        window += aligned(num_nodes * shard * pulled)
        slots = node_size if training.deterministic else 1
        accumulator += aligned(num_nodes * slots * shard * summed)
        if num_nodes > 1:
            received.append(num_nodes * shard * summed)
    return ModelMemory(
        window=window,
        accumulator=accumulator,
        weights=weights,
        optimizer=states,
        exchange=peak(received),
        gathered=_gathered(groups, training),
        heap_needed=heap_needed(window + accumulator, node_size, Ring()),
    )


def _gathered(groups: Sequence[GroupShapes], training: Training) -> int:
    """The root and two blocks with their parameters, and the gradients of the larger of them."""

    def nbytes(group: GroupShapes) -> int:
        return group.numel * (_BF16_NBYTES if training.bf16 else group.itemsize)

    blocks = sorted((nbytes(group) for group in groups if group.name), reverse=True)
    root = sum(nbytes(group) for group in groups if not group.name)
    held = sum(blocks) if training.keeps_gathered else sum(blocks[:_GATHERED_BLOCKS])
    gradients = 2 * max([root, *blocks], default=0)  # as autograd makes them, and in the order of ranks
    return root + held + gradients
