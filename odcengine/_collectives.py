"""torch's all-gather and reduce-scatter under the names that torch prefers, and bytes through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from odcengine.control import ControlBlock


def _newest(*names: str) -> Callable[..., Any]:
    for name in names:
        function: Callable[..., Any] | None = getattr(dist, name, None)
        if function is not None:
            return function
    raise ImportError(f"torch.distributed has none of {names}")


# torch 2.13 renamed both and warns about the old names.
all_gather = _newest("all_gather_single", "all_gather_into_tensor")
reduce_scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor")


Wait = Callable[[dist.Work], object]


def exchange_texts(text: str, group: dist.ProcessGroup, wait: Wait = dist.Work.wait) -> list[str]:
    """One text from every rank, in the order of ranks. Collective.

    Args:
        text: this rank's.
        group: of the ranks, for tensors of the host.
        wait: waits for each of two collectives; by default as long as the group allows.
    """
    return [data.decode() for data in exchange_bytes(text.encode(), group, wait)]


def exchange_bytes(data: bytes, group: dist.ProcessGroup, wait: Wait = dist.Work.wait) -> list[bytes]:
    """:func:`exchange_texts`, of bytes."""
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return [data]
    own = torch.frombuffer(bytearray(data + b" "), dtype=torch.uint8)  # at least one byte
    sizes = torch.zeros(world_size, dtype=torch.int64)
    wait(all_gather(sizes, torch.tensor([own.numel()]), group=group, async_op=True))
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    padded[: own.numel()] = own
    rows = torch.empty(world_size * padded.numel(), dtype=torch.uint8)
    wait(all_gather(rows, padded, group=group, async_op=True))
    table = rows.view(world_size, -1)
    return [table[rank, : size - 1].numpy().tobytes() for rank, size in enumerate(sizes.tolist())]


def gather_texts(text: str, control: ControlBlock, group: dist.ProcessGroup, what: str) -> list[str]:
    """:func:`exchange_texts` of all ranks of the job, watched.

    Args:
        text: this rank's.
        control: watches the wait.
        group: gloo group of all ranks.
        what: what is exchanged, for messages.

    Raises:
        PeerError: a rank failed, or gave no sign of life.
    """
    return [data.decode() for data in gather_bytes(text.encode(), control, group, what)]


def gather_bytes(data: bytes, control: ControlBlock, group: dist.ProcessGroup, what: str) -> list[bytes]:
    """:func:`gather_texts`, of bytes."""
    return exchange_bytes(data, group, lambda work: control.wait_work(work, what))
