"""The tensors of one rank: their copies at one moment, and the file that they are written to.

The file is one of torch.distributed.checkpoint's: the chunks one after the other, each as ``torch.save``
writes it. Beside it lies what torch's format has no place for, the checksum of every chunk.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor

_ALIGNMENT = 256
_AT_ONCE = 16 << 20  # bytes in one write: how often somebody who wants to stop it is heard


@dataclass(frozen=True)
class Chunk:
    """A rank's part of one tensor.

    Attributes:
        name: of the tensor.
        size: shape of the whole tensor.
        offsets: where the part begins in it.
        tensor: the part, on any device.
    """

    name: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor


def chunks_of(state: Mapping[str, torch.Tensor], rank: int) -> list[Chunk]:
    """What a rank has to save of ``state``.

    Args:
        state: for each name a sharded tensor, one that is equal on all ranks, or, under a name with
            :func:`own_suffix`, one of this rank's own.
        rank: this rank; only rank 0 saves those that are equal on all.

    Returns:
        Chunks that are views of the tensors. Empty ones are left out.
    """
    chunks = []
    for item in create_default_local_save_plan(dict(state), is_coordinator=True).items:
        tensor, data = state[item.index.fqn], item.tensor_data
        assert data is not None  # every item is a tensor
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        mine = isinstance(tensor, DTensor) or rank == 0 or item.index.fqn.endswith(own_suffix(rank))
        if mine and local.numel():
            chunks.append(Chunk(item.index.fqn, tuple(data.size), tuple(data.chunk.offsets), local.detach()))
    return chunks


class Slabs:
    """Memory in large pieces, handed out anew for every save in the same order.

    Torch rounds pinned memory up to a power of two, so a tensor each would waste a third of it.

    Args:
        pinned: whether GPUs copy into it while the host goes on.
        slab_nbytes: size of a piece.
    """

    def __init__(self, *, pinned: bool, slab_nbytes: int = 1 << 28) -> None:
        self._pinned = pinned
        self._slab_nbytes = slab_nbytes
        self._slabs: list[torch.Tensor] = []
        self._current = self._used = 0

    def restart(self) -> None:
        """Hand out the same memory again."""
        self._current = self._used = 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor of the same shape and dtype; its contents are undefined."""
        nbytes = like.numel() * like.element_size()
        while True:
            if self._current == len(self._slabs):
                size = max(self._slab_nbytes, nbytes)
                self._slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned))
            slab, start = self._slabs[self._current], self._used
            if start + nbytes <= slab.numel():
                self._used = start + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
                return slab[start : start + nbytes].view(like.dtype).view(like.shape)
            self._current, self._used = self._current + 1, 0


class Staging:
    """Copies of chunks in the host's memory, which training may then change; kept for the next save.

    On a GPU the copies are only enqueued, into pinned memory and in the order of the stream that computes:
    the host goes on at once.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._pinned = Slabs(pinned=True)

    @torch.no_grad()
    def copy(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], Callable[[], None]]:
        """Copy what is to be saved.

        Args:
            chunks: from :func:`chunks_of`.

        Returns:
            The copies, and a function that waits until they are there; it may be called in another thread.
            They are valid until the next call.
        """
        copies, on_gpu = [], None
        kept, self._kept = self._kept, {}
        self._pinned.restart()
        for chunk in chunks:
            source = chunk.tensor
            if source.is_cuda:
                on_gpu, target = source.device, self._pinned.take(source)
            else:
                target = self._keep(chunk.name, source, kept.get(chunk.name))
            target.copy_(source, non_blocking=True)
            copies.append(replace(chunk, tensor=target))
        if on_gpu is None:
            return copies, lambda: None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(on_gpu))
        return copies, event.synchronize

    def _keep(self, name: str, source: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
        """Room for a copy on the CPU: that of the last save, if it fits."""
        if last is None or last.shape != source.shape or last.dtype != source.dtype:
            last = torch.empty_like(source, memory_format=torch.contiguous_format)
        self._kept[name] = last
        return last


class Cancelled(Exception):
    """The save was given up by all ranks."""


class _Stream(io.RawIOBase):
    """Counts and sums up what goes into a file."""

    def __init__(self, fd: int, progress: Callable[[int], None]) -> None:
        self._fd = fd
        self._progress = progress
        self.position = 0
        self.checksum = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _AT_ONCE):
            piece = view[start : start + _AT_ONCE]
            self.checksum = zlib.crc32(piece, self.checksum)
            while piece:
                written = os.write(self._fd, piece)
                self.position += written
                piece = piece[written:]
            self._progress(self.position)
        return len(view)


def write_chunks(
    path: Path, chunks: Sequence[Chunk], progress: Callable[[int], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Write chunks to a new file, and see to it that they are on the disk.

    Args:
        path: the file.
        chunks: what to write; tensors of a GPU are fetched one by one.
        progress: called with the bytes written so far, every 16 MiB at least; may raise :class:`Cancelled`.

    Returns:
        For each chunk its record, as JSON takes it.

    Raises:
        OSError: the disk is full, and the like.
    """
    records = []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        stream = _Stream(fd, progress)
        for chunk in chunks:
            start, stream.checksum = stream.position, 0
            tensor = chunk.tensor.cpu()
            if (
                not tensor.is_contiguous()
                or tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes()
            ):
                tensor = tensor.clone(
                    memory_format=torch.contiguous_format
                )  # torch.save writes whole storages
            torch.save(tensor, stream)  # type: ignore[arg-type]  # what it calls of a file, this has
            records.append(
                {
                    "name": chunk.name,
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "size": list(chunk.size),
                    "offsets": list(chunk.offsets),
                    "sizes": list(tensor.shape),
                    "at": start,
                    "length": stream.position - start,
                    "crc32": stream.checksum,
                }
            )
        os.fsync(fd)
    finally:
        os.close(fd)
    return records


def own_suffix(rank: int) -> str:
    """End of the names of tensors that only rank ``rank`` has."""
    return f"@rank{rank}"


def file_of(rank: int) -> str:
    """Name of the file with a rank's tensors; torch's own."""
    return f"__{rank}_0.distcp"


def record_of(rank: int) -> str:
    """Name of the file with a rank's checksums and random state."""
    return f"rank_{rank}.json"
