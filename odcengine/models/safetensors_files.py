"""Safetensors files written from pieces: by several processes at once, none of which has a whole tensor.

The format puts all tensors' bytes one after the other behind a header that says where each begins. A piece
that is a range of rows of a tensor is one range of bytes, so it can be written without the rest.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from odcengine.errors import ConfigError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", re.IGNORECASE)
_INDEX = "{}.safetensors.index.json"


def dtype_of(name: str) -> torch.dtype:
    """The dtype that the format calls ``name``; ValueError for one that is not known here."""
    for dtype, known in _NAMES.items():
        if known == name:
            return dtype
    raise ValueError(f"dtype {name} is not supported")


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor goes.

    Attributes:
        file: name of the file.
        start: first byte in it.
        dtype: as it is stored.
        size: its shape.
    """

    file: str
    start: int
    dtype: torch.dtype
    size: tuple[int, ...]

    @property
    def row_nbytes(self) -> int:
        """Bytes of one index of the first dimension."""
        return math.prod(self.size[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class FilesPlan:
    """Files that are not written yet.

    Attributes:
        places: for each tensor where it goes.
        headers: for each file what comes first in it.
        sizes: for each file its bytes.
        index: name and contents of the index, for more than one file.
    """

    places: dict[str, TensorPlace]
    headers: dict[str, bytes]
    sizes: dict[str, int]
    index: tuple[str, bytes] | None

    def create(self, folder: Path) -> None:
        """Make the files, full of zeros but for their headers."""
        for name, header in self.headers.items():
            with open(folder / name, "xb") as file:
                file.write(header)
                file.truncate(self.sizes[name])
        if self.index is not None:
            (folder / self.index[0]).write_bytes(self.index[1])

    def write(self, folder: Path, name: str, first_row: int, rows: torch.Tensor) -> None:
        """Write some rows of a tensor, in any order and from any process.

        Args:
            folder: where :meth:`create` has made the files.
            name: the tensor.
            first_row: index in the first dimension at which ``rows`` begin; 0 for what has no dimension.
            rows: the rows; cast to the file's dtype.
        """
        place = self.places[name]
        data = rows.detach().to(place.dtype).cpu().contiguous().reshape(-1).view(torch.uint8)
        view = data.numpy().data if len(data) else memoryview(b"")
        at = place.start + first_row * place.row_nbytes
        fd = os.open(folder / place.file, os.O_WRONLY)
        try:
            while view:
                written = os.pwrite(fd, view[: 64 << 20], at)
                at, view = at + written, view[written:]
        finally:
            os.close(fd)

    def sync(self, folder: Path) -> None:
        """See to it that what this process wrote is on the disk."""
        for name in self.headers:
            fd = os.open(folder / name, os.O_RDWR)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def plan_files(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], max_bytes: int, stem: str = "model"
) -> FilesPlan:
    """Lay out files.

    Args:
        tensors: dtype and shape of each, in the order in which they are stored.
        max_bytes: of a file; a larger tensor gets a file of its own.
        stem: beginning of the files' names, as transformers and peft expect it.

    Raises:
        ConfigError: a dtype that the format does not have.
    """
    groups: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    filled = 0
    for name, (dtype, size) in tensors.items():
        if dtype not in _NAMES:
            raise ConfigError(f"{name} is {dtype}, which safetensors files do not have")
        nbytes = math.prod(size) * dtype.itemsize
        if groups[-1] and filled + nbytes > max_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = (dtype, size)
        filled += nbytes
    places, headers, sizes, total = dict[str, TensorPlace](), dict[str, bytes](), dict[str, int](), 0
    for number, group in enumerate(groups, start=1):
        several = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        file = f"{stem}{several}.safetensors"
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, (dtype, size) in group.items():
            end = offset + math.prod(size) * dtype.itemsize
            table[name] = {"dtype": _NAMES[dtype], "shape": list(size), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = len(text).to_bytes(8, "little") + text
        sizes[file], total = len(headers[file]) + offset, total + offset
        for name, (dtype, size) in group.items():
            places[name] = TensorPlace(file, len(headers[file]) + table[name]["data_offsets"][0], dtype, size)
    index = None
    if len(groups) > 1:
        record = {
            "metadata": {"total_size": total},
            "weight_map": {name: place.file for name, place in places.items()},
        }
        index = (_INDEX.format(stem), json.dumps(record, indent=2).encode())
    return FilesPlan(places, headers, sizes, index)


def parse_size(text: str) -> int:
    """Bytes of a size such as ``5GB`` (powers of 1000, as transformers counts).

    Raises:
        ConfigError: it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"size {text!r}: expected a number with KB, MB, GB or TB, such as 5GB")
    return int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " "))
