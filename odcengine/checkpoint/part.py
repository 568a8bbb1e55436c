"""One rank's part of a save, written by a thread while training goes on."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from odcengine.checkpoint import directory
from odcengine.checkpoint.directory import METADATA, STATE, Mark
from odcengine.checkpoint.metadata import StorageInfo, write_metadata
from odcengine.checkpoint.plain import dump_json, load_json
from odcengine.checkpoint.tensors import Cancelled, Chunk, file_of, record_of, write_chunks
from odcengine.errors import CheckpointError

logger = logging.getLogger(__name__)


class Task:
    """A function that runs in a thread of its own; what it raises is kept.

    Args:
        function: called with this task, whose :meth:`check` it calls now and then.
        name: of the thread.
    """

    def __init__(self, function: Callable[[Task], object], name: str) -> None:
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._cancelled = threading.Event()
        self._function = function
        self._start = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function(self)
        except BaseException as error:
            self.error = error
        self.seconds = time.perf_counter() - self._start

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Have it end at its next check."""
        self._cancelled.set()

    def check(self, _: int = 0) -> None:
        """Raise :class:`Cancelled` if it was cancelled."""
        if self._cancelled.is_set():
            raise Cancelled


def reason_of(error: BaseException) -> str:
    """An error in words that name file and cause."""
    if isinstance(error, OSError):
        return directory.explain(error)
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def write_part(
    folder: Path, rank: int, chunks: Sequence[Chunk], ready: Callable[[], None], random: Any, task: Task
) -> None:
    """Write a rank's tensors, and their record when they are on the disk.

    Args:
        folder: the checkpoint's temporary folder.
        rank: this rank.
        chunks: copies of its tensors.
        ready: waits until the copies are there.
        random: its random state, as JSON takes it.
        task: may be cancelled.

    Raises:
        OSError: the disk is full, and the like.
        Cancelled: all ranks have given up.
    """
    ready()
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder.parent} is not the directory that rank 0 writes to; the directory of checkpoints has "
            "to be "
            "on a file system that all hosts share, under the same path"
        )
    records = write_chunks(folder / file_of(rank), chunks, task.check)
    data = dump_json({"rank": rank, "tensors": records, "random": random})
    directory.write_file(folder / record_of(rank), data)
    directory.sync_folder(folder)


@dataclass(frozen=True)
class Publication:
    """What rank 0 needs to finish a checkpoint that all ranks have written their part of.

    Attributes:
        folder: its temporary folder.
        root: the directory of checkpoints.
        tag: its name.
        step: optimizer steps done.
        world_size: number of ranks.
        automatic: saved by the configuration's interval.
        state: everything that is no tensor, as JSON takes it.
        token: of this save.
        keep_last: see :func:`~odcengine.checkpoint.directory.thin_out`.
        keep_every: see there.
        files: further small files.
    """

    folder: Path
    root: Path
    tag: str
    step: int
    world_size: int
    automatic: bool
    state: Any
    token: str
    keep_last: int | None
    keep_every: int | None
    files: dict[str, bytes]

    def publish(self, check: Callable[[], None], task: Task) -> None:
        """Merge the ranks' records into torch's metadata, mark the checkpoint and give it its name.

        Args:
            check: raises where another run writes into the directory.
            task: may be cancelled.

        Raises:
            CheckpointError: a rank's record is missing.
            OSError: the disk is full, and the like.
        """
        files: dict[str, tuple[int, str]] = {}
        chunks = []
        for rank in range(self.world_size):
            task.check()
            data = (self.folder / record_of(rank)).read_bytes()
            files[record_of(rank)] = (len(data), directory.sha256(data))
            files[file_of(rank)] = (os.stat(self.folder / file_of(rank)).st_size, "")
            for record in load_json(data, record_of(rank))["tensors"]:
                chunks.append(_entry(record, file_of(rank)))
        for name, data in {
            **self.files,
            STATE: dump_json(self.state),
            METADATA: write_metadata(chunks),
        }.items():
            directory.write_file(self.folder / name, data)
            files[name] = (len(data), directory.sha256(data))
        check()
        task.check()
        serial = directory.next_serial(self.root)
        mark = Mark(self.tag, self.step, self.world_size, serial, self.automatic, files)
        directory.complete(self.folder, self.root, mark, self.token)
        removed = directory.thin_out(self.root, self.keep_last, self.keep_every, self.token)
        if removed:
            logger.info("checkpoints: removed %s", ", ".join(removed))


def _entry(
    record: dict[str, Any], file: str
) -> tuple[str, torch.dtype, torch.Size, ChunkStorageMetadata, StorageInfo]:
    dtype: torch.dtype = getattr(torch, record["dtype"])
    chunk = ChunkStorageMetadata(torch.Size(record["offsets"]), torch.Size(record["sizes"]))
    return (
        record["name"],
        dtype,
        torch.Size(record["size"]),
        chunk,
        StorageInfo(file, record["at"], record["length"]),
    )
