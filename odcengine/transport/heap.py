"""Sizes of symmetric memory: windows, message rings, NVSHMEM's heap. Imports no torch, for odc-launch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from odcengine.errors import ConfigError

ALIGNMENT = 256
"""Bytes to which each window's start is aligned."""

SIZE_VARIABLE = "NVSHMEM_SYMMETRIC_SIZE"
HEAP_GRANULARITY = 512 << 20
"""NVSHMEM grows and rounds its heap in steps of this many bytes."""
HEAP_SLACK = 64 << 20
"""Bytes of the heap beside windows and rings: NVSHMEM's own, rounding."""

HEADER_NBYTES = 64
"""Of a message in a ring: number of the message, window, node, offset, elements, dtype."""
WORD_NBYTES = 8

_SUFFIXES = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


def aligned(nbytes: int) -> int:
    """``nbytes``, rounded up to :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Ring:
    """How messages to peers that are not mapped are held.

    Attributes:
        slots: for each pusher, at each owner.
        chunk_nbytes: largest content of a message.
        unmapped: treat all other ranks as not mapped, for tests.
    """

    slots: int = 8
    chunk_nbytes: int = 4 << 20
    unmapped: bool = False

    @property
    def slot_nbytes(self) -> int:
        """A message with its header."""
        return HEADER_NBYTES + self.chunk_nbytes

    def nbytes(self, node_size: int) -> int:
        """Bytes of an arena: words, the slots of all pushers, one message on its way out, one pull."""
        words = aligned(3 * node_size * WORD_NBYTES)
        return words + (node_size * self.slots + 1) * self.slot_nbytes + self.chunk_nbytes


def heap_needed(windows_nbytes: int, node_size: int, ring: Ring) -> int:
    """Bytes of NVSHMEM's heap that a model takes on each rank.

    Args:
        windows_nbytes: size of all windows of a rank.
        node_size: ranks a node, as windows count them.
        ring: the rings.
    """
    return windows_nbytes + ring.nbytes(node_size) + HEAP_SLACK


def parse_symmetric_size(text: str) -> int:
    """Bytes that a value of ``NVSHMEM_SYMMETRIC_SIZE`` stands for.

    As in NVSHMEM: a number, fractions allowed, and one of k, m, g, t (powers of 1024), case ignored. Text
    after the suffix, which the library passes over, is refused here.

    Raises:
        ConfigError: not such a value.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([kmgt]?)", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise ConfigError(
            f"environment: {SIZE_VARIABLE}={text!r}; expected a number of bytes above 0 with an optional "
            "suffix k, m, g or t (powers of 1024), for example 6G or 1.5g"
        )
    return math.ceil(float(match[1]) * (1 << _SUFFIXES[match[2]]))


def plan_heap(needed: int, environ: Mapping[str, str]) -> tuple[int, str]:
    """The size of the symmetric heap of a rank.

    Args:
        needed: bytes that the model's windows and buffers take.
        environ: the process's variables; ``NVSHMEM_SYMMETRIC_SIZE`` is the user's wish.

    Returns:
        Bytes, and why that many.

    Raises:
        ConfigError: the user's size is below what is needed, or malformed.
    """
    text = environ.get(SIZE_VARIABLE)
    if text is None:
        size = -(-needed // HEAP_GRANULARITY) * HEAP_GRANULARITY
        return size, f"{needed / 2**30:.2f} GiB for the model, rounded up to {HEAP_GRANULARITY >> 20} MiB"
    size = parse_symmetric_size(text)
    if size < needed:
        raise ConfigError(
            f"environment: {SIZE_VARIABLE}={text} is {size} bytes a GPU, but the model's windows need "
            f"{needed}; remove it (odcengine sets it), or give more"
        )
    return size, f"given by {SIZE_VARIABLE}"
