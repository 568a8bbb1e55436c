"""Torch's ``.metadata``, the one pickled file of a checkpoint, without running what a pickle may ask for.

A pickle can name any function of any module and have it called. The unpickler here knows the few data classes
of which torch makes its metadata, and nothing else; what comes out is checked again, field by field.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from odcengine.errors import CheckpointError

StorageInfo = filesystem._StorageInfo
"""Where a chunk lies: file, offset and length. Torch has no public name for it."""

_CLASSES = (
    *(metadata.Metadata, metadata.TensorStorageMetadata, metadata.ChunkStorageMetadata),
    *(metadata.TensorProperties, metadata.MetadataIndex, metadata._MEM_FORMAT_ENCODING),
    *(StorageInfo, torch.Size),
)
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in _CLASSES},
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in _DTYPES},
    ("torch.serialization", "_get_layout"): lambda name: {"torch.strided": torch.strided}[name],
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = _ALLOWED.get((module_name, global_name))
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, which is not allowed")
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside of the file")


def write_metadata(
    chunks: Iterable[tuple[str, torch.dtype, torch.Size, ChunkStorageMetadata, StorageInfo]],
) -> bytes:
    """The contents of ``.metadata``, as torch's own readers expect them.

    Args:
        chunks: for each chunk its tensor's name, dtype and whole size, its place in the tensor and in a file.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, StorageInfo] = {}
    for name, dtype, size, chunk, info in chunks:
        entry = tensors.setdefault(name, TensorStorageMetadata(TensorProperties(dtype=dtype), size, []))
        storage[MetadataIndex(name, chunk.offsets, len(entry.chunks))] = info
        entry.chunks.append(chunk)
    # "model.a.b" is entry "a.b" of the state dict "model".
    paths = {name: tuple(name.split(".", 1)) for name in tensors}
    whole = Metadata(dict(tensors), planner_data=paths, storage_data=storage)
    whole.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    return pickle.dumps(whole, protocol=4)


def read_metadata(data: bytes, where: str) -> Metadata:
    """The metadata in a file's contents; nothing but plain data comes out, and nothing is run.

    Args:
        data: contents of ``.metadata``.
        where: its path, for messages.

    Raises:
        CheckpointError: it is damaged, or asks for anything but torch's data classes.
    """
    try:
        found = _Unpickler(io.BytesIO(data)).load()
        _check(found)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise CheckpointError(
            f"{where} is damaged or was not written by torch.distributed.checkpoint: "
            f"{str(error) or type(error).__name__}"
        ) from error
    whole: Metadata = found
    return whole


def _check(whole: Any) -> None:
    """Raise ValueError unless all fields have the types that they should have."""
    _require(type(whole) is Metadata, "it holds no metadata")
    tensors, storage = whole.state_dict_metadata, whole.storage_data
    _require(type(tensors) is dict and type(storage) is dict, "its tables are missing")
    for name, entry in tensors.items():
        _require(type(name) is str and type(entry) is TensorStorageMetadata, f"{name!r} is no tensor")
        _require(type(entry.properties.dtype) is torch.dtype, f"{name} has no dtype")
        _require(_is_shape(entry.size) and type(entry.chunks) is list, f"{name} has no shape")
        for chunk in entry.chunks:
            _require(type(chunk) is ChunkStorageMetadata, f"{name} has a chunk that is none")
            for extent in (chunk.offsets, chunk.sizes):
                _require(_is_shape(extent) and len(extent) == len(entry.size), f"{name} has a wrong chunk")
            ends = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
            _require(all(a + b <= c for a, b, c in ends), f"{name} has a chunk outside of it")
    for index, info in storage.items():
        _require(type(index) is MetadataIndex and type(info) is StorageInfo, "its table of files is wrong")
        _require(type(index.fqn) is str and _is_shape(index.offset), "its table of files is wrong")
        path, descriptors = info.relative_path, getattr(info, "transform_descriptors", None)
        _require(type(path) is str and not descriptors, f"{index.fqn} lies in no plain file")
        safe = PurePosixPath(path)
        _require(len(safe.parts) == 1 and safe.name == path != "..", f"{path!r} is outside of it")
        _require(_is_count(info.offset) and _is_count(info.length), f"{index.fqn} has no place")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_shape(value: Any) -> bool:
    return type(value) is torch.Size and all(_is_count(item) for item in value)
