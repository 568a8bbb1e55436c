"""A complete checkpoint, opened for reading; nothing in it is trusted to be what was written."""

from __future__ import annotations

import io
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from odcengine.checkpoint.directory import METADATA, STATE, Mark, read_listed, read_mark
from odcengine.checkpoint.metadata import StorageInfo, read_metadata
from odcengine.checkpoint.plain import decode, load_json
from odcengine.checkpoint.tensors import record_of
from odcengine.errors import CheckpointError

_FILE = re.compile(r"__(\d{1,9})_0\.distcp")
_FIELDS = frozenset({"name", "dtype", "offsets", "sizes", "at", "length", "crc32"})
_NAMED = 5  # names in a message


class Source:
    """One checkpoint.

    Attributes:
        folder: its path.
        mark: its completion mark.
        metadata: which tensors it has, of which shapes and dtypes, and where their chunks lie.
        state: everything that is no tensor.

    Args:
        folder: its path.

    Raises:
        CheckpointError: it is not complete, or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark: Mark = read_mark(folder)
        self.metadata: Metadata = read_metadata(
            read_listed(folder, self.mark, METADATA), str(folder / METADATA)
        )
        self.state: dict[str, Any] = self._json(STATE)
        self._records: dict[str, dict[tuple[int, int], dict[str, Any]]] = {}

    def _json(self, name: str) -> dict[str, Any]:
        where = str(self.folder / name)
        try:
            value = decode(load_json(read_listed(self.folder, self.mark, name), where))
        except (ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{where} is damaged: {error}") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{where} is damaged: it holds no record")
        return value

    def check_small_files(self) -> None:
        """Compare all files but the tensors' with the mark.

        Raises:
            CheckpointError: one is damaged.
        """
        for name, (_, checksum) in self.mark.files.items():
            if checksum:
                read_listed(self.folder, self.mark, name)

    def random_state(self, rank: int) -> Any:
        """What rank ``rank`` saved of its random generators."""
        return self._json(record_of(rank)).get("random")

    def entry(self, name: str) -> TensorStorageMetadata | None:
        """What is known of a tensor; None where there is none of this name."""
        return self.metadata.state_dict_metadata.get(name)  # type: ignore[return-value]

    def names(self, prefix: str) -> list[str]:
        """Names of tensors that begin with ``prefix``, without it."""
        return [name[len(prefix) :] for name in self.metadata.state_dict_metadata if name.startswith(prefix)]

    # -- reading tensors -------------------------------------------------------------------------------

    def plan(self, state: Mapping[str, torch.Tensor]) -> list[ReadItem]:
        """Which parts of which chunks a rank needs.

        Args:
            state: tensors to be filled, by their names in the checkpoint; of sharded ones the local part is.

        Raises:
            CheckpointError: a tensor is missing, has another shape or dtype, or a part of it is missing.
        """
        self._compare(state)
        items: list[ReadItem] = create_default_local_load_plan(dict(state), self.metadata).items
        covered = dict.fromkeys(state, 0)
        for item in items:
            covered[item.dest_index.fqn] += math.prod(item.lengths)
        for name, tensor in state.items():
            if covered[name] != _local(tensor).numel():
                raise CheckpointError(
                    f"{self.folder}: of {name} {covered[name]} elements are there of the "
                    f"{_local(tensor).numel()} that this rank needs"
                )
        return items

    def _compare(self, state: Mapping[str, torch.Tensor]) -> None:
        missing = [name for name in state if self.entry(name) is None]
        if missing:
            raise CheckpointError(
                f"{self.folder} has no {', '.join(missing[:_NAMED])}"
                f"{f' and {len(missing) - _NAMED} more' if len(missing) > _NAMED else ''}"
            )
        for name, tensor in state.items():
            entry = self.entry(name)
            assert entry is not None  # see above
            if entry.size != tensor.shape:
                raise CheckpointError(
                    f"{self.folder}: {name} has shape {list(entry.size)}, here {list(tensor.shape)}"
                )
            if entry.properties.dtype != tensor.dtype:
                raise CheckpointError(
                    f"{self.folder}: {name} is {entry.properties.dtype}, here {tensor.dtype}; make the model "
                    "in the dtype in which it was trained"
                )

    def verify(self, items: Sequence[ReadItem]) -> None:
        """Read what a plan needs, compare checksums, and keep nothing.

        Raises:
            CheckpointError: something is damaged; names tensor and file.
        """
        for index in dict.fromkeys(item.storage_index for item in items):
            self._read(index)

    @torch.no_grad()
    def load(self, items: Sequence[ReadItem], state: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors.

        Args:
            items: the plan for ``state``.
            state: the tensors.

        Raises:
            CheckpointError: something is damaged; then the tensors are in part as before.
        """
        # Each chunk is read once, though several tensors' parts may need it.
        last: tuple[MetadataIndex, torch.Tensor] | None = None
        for item in sorted(items, key=lambda item: self._place(item.storage_index)):
            if last is None or last[0] != item.storage_index:
                last = (item.storage_index, self._read(item.storage_index))
            part, target = last[1], _local(state[item.dest_index.fqn])
            for dim, length in enumerate(item.lengths):
                part = part.narrow(dim, item.storage_offsets[dim], length)
                target = target.narrow(dim, item.dest_offsets[dim], length)
            target.copy_(part)

    def chunks(self, name: str) -> list[tuple[ChunkStorageMetadata, MetadataIndex]]:
        """The chunks of a tensor, in the order of their offsets."""
        entry = self.entry(name)
        if entry is None:
            raise CheckpointError(f"{self.folder} has no {name}")
        found = [(chunk, MetadataIndex(name, chunk.offsets, i)) for i, chunk in enumerate(entry.chunks)]
        return sorted(found, key=lambda item: tuple(item[0].offsets))

    def read(self, index: MetadataIndex) -> torch.Tensor:
        """One chunk, on the CPU.

        Raises:
            CheckpointError: it is damaged.
        """
        return self._read(index)

    def _place(self, index: MetadataIndex) -> tuple[str, int]:
        info = self._info(index)
        return info.relative_path, info.offset

    def _info(self, index: MetadataIndex) -> StorageInfo:
        info: StorageInfo | None = self.metadata.storage_data.get(index)
        if info is None:
            raise CheckpointError(f"{self.folder / METADATA} does not say where {index.fqn} lies")
        return info

    def _read(self, index: MetadataIndex) -> torch.Tensor:
        entry, info = self.entry(index.fqn), self._info(index)
        assert entry is not None  # from the metadata itself
        dtype, offsets = entry.properties.dtype, index.offset
        sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == offsets)
        path = self.folder / info.relative_path
        where = f"{path}: {index.fqn} (bytes {info.offset} to {info.offset + info.length})"
        record = self._record(info, where)
        named = (record["name"], record["dtype"], record["sizes"], record["offsets"])
        if named != (index.fqn, str(dtype).removeprefix("torch."), list(sizes), list(offsets or ())):
            raise CheckpointError(
                f"{where}: {METADATA} says something else of it than the record of its rank"
            )
        data = _read_bytes(path, info.offset, info.length, where)
        if zlib.crc32(data) != record["crc32"]:
            raise CheckpointError(f"{where} is damaged: its checksum is another one than when it was written")
        try:
            return _tensor_in(data, dtype, sizes)
        except (ValueError, KeyError, struct.error, zipfile.BadZipFile, NotImplementedError) as error:
            raise CheckpointError(f"{where} is damaged: {error}") from error

    def _record(self, info: StorageInfo, where: str) -> dict[str, Any]:
        """What the rank that wrote a chunk has noted of it."""
        file = info.relative_path
        if file not in self._records:
            match = _FILE.fullmatch(file)
            if match is None or file not in self.mark.files:
                raise CheckpointError(f"{where}: the file is none of this checkpoint's")
            name = record_of(int(match[1]))
            table: dict[tuple[int, int], dict[str, Any]] = {}
            try:
                for record in self._json(name)["tensors"]:
                    if not record.keys() >= _FIELDS:
                        raise KeyError("a field is missing")
                    table[int(record["at"]), int(record["length"])] = record
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(f"{self.folder / name} is damaged: {error}") from error
            self._records[file] = table
        found = self._records[file].get((info.offset, info.length))
        if found is None:
            raise CheckpointError(f"{where}: {METADATA} and the record of its rank do not agree")
        return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _read_bytes(path: Path, offset: int, length: int, where: str) -> bytearray:
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            if offset + length > os.fstat(fd).st_size:
                raise CheckpointError(f"{where} is damaged: the file ends before")
            data = bytearray(length)
            view, done = memoryview(data), 0
            while done < length:
                count = os.preadv(fd, [view[done : done + (64 << 20)]], offset + done)
                if not count:
                    raise CheckpointError(f"{where} is damaged: the file ends before")
                done += count
            return data
        finally:
            os.close(fd)
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror}") from error


def _tensor_in(data: bytearray, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
    """The tensor that ``torch.save`` put into an archive, taken from its bytes: its pickle is not read."""
    nbytes = math.prod(sizes) * dtype.itemsize
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
    if len(entries) != 1:
        raise ValueError("it is no tensor of torch.save")
    info = entries[0]
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != nbytes:
        raise ValueError(f"its {info.file_size} bytes are no {dtype} of shape {list(sizes)}")
    # The archive's directory tells where the entry's own header is; its name and extra field come before
    # the data.
    name_length, extra_length = struct.unpack_from("<HH", data, info.header_offset + 26)
    start = info.header_offset + 30 + name_length + extra_length
    if start + nbytes > len(data):
        raise ValueError("the archive ends before its tensor")
    if not nbytes:
        return torch.empty(tuple(sizes), dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=math.prod(sizes), offset=start).reshape(tuple(sizes))
