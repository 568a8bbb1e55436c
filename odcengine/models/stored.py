"""A model whose weights stay in their files until it is sharded; then each rank reads its own part.

The model is made without memory for parameters (on the meta device; buffers, which models compute themselves,
are real). When :func:`~torch.distributed.fsdp.fully_shard` has cut the parameters, every rank gets memory for
its shards and reads their rows from the safetensors files: no rank ever holds the model, or a whole tensor.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as module_hooks

from odcengine.errors import ConfigError
from odcengine.models.safetensors_files import dtype_of

logger = logging.getLogger(__name__)

_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
_AT_ONCE = 64 << 20


@dataclass(frozen=True)
class _Place:
    """Where a tensor is stored."""

    path: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class StoredWeights:
    """The tensors of a directory of safetensors files.

    Attributes:
        folder: the directory.
        fingerprint: of names, shapes, places and sizes; equal where the files are.

    Args:
        folder: the directory.

    Raises:
        ConfigError: a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, _Place] = {}
        sizes = []
        for path in _files(folder):
            self._places.update(_read_header(path))
            sizes.append((path.name, path.stat().st_size))
        text = json.dumps(
            [sizes, sorted((n, p.path.name, p.start, p.shape) for n, p in self._places.items())]
        )
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the first weight of floating point."""
        return next((p.dtype for p in self._places.values() if p.dtype.is_floating_point), None)

    def match(self, model: nn.Module) -> dict[str, str] | str:
        """Which stored tensor belongs to which of a model's.

        Args:
            model: a model with its parameters on the meta device.

        Returns:
            The stored name for the first name of each parameter and persistent buffer; or why there is none.
        """
        found: dict[str, str] = {}
        for names, tensor in state_of(model):
            stored = next((name for name in names if name in self._places), None)
            if stored is None:
                return f"{names[0]} is not in its files under this name"
            if self._places[stored].shape != tuple(tensor.shape):
                return f"{stored} has shape {list(self._places[stored].shape)}, not {list(tensor.shape)}"
            found[names[0]] = stored
        unused = sorted(set(self._places) - {name for names, _ in state_of(model) for name in names})
        if unused:
            logger.warning(
                "model: %s: %d tensors have no place, for example %s", self.folder, len(unused), unused[0]
            )
        return found

    @torch.no_grad()
    def fill(self, model: nn.Module, names: Mapping[str, str], device: torch.device) -> None:
        """Give a sharded model its memory, and this rank's part of the weights.

        Args:
            model: the model, sharded, its parameters on the meta device.
            names: from :meth:`match`.
            device: where the shards are to be.

        Raises:
            ConfigError: a file is too short, or cannot be read.
        """
        model._apply(  # type: ignore[no-untyped-call]
            lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        )
        for aliases, tensor in state_of(model):
            if aliases[0] not in names:  # an adapter's, which is no part of the stored model
                continue
            place = self._places[names[aliases[0]]]
            if isinstance(tensor, DTensor):
                local, first = tensor.to_local(), _first_row(tensor)
            else:
                local, first = tensor, 0
            if local.numel():
                _read_rows(place, first, local)


def state_of(model: nn.Module) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Parameters and persistent buffers, each once, with all its names."""
    names: dict[int, list[str]] = defaultdict(list)
    tensors: dict[int, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        members = [*module._parameters.items(), *module._buffers.items()]
        for name, tensor in members:
            if tensor is not None and name not in module._non_persistent_buffers_set:
                names[id(tensor)].append(f"{prefix}.{name}".lstrip("."))
                tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        yield names[key], tensor


def _first_row(tensor: DTensor) -> int:
    """Index in the first dimension at which this rank's shard begins: FSDP2 cuts as ``torch.chunk`` does."""
    rows = -(-tensor.shape[0] // tensor.device_mesh.size())
    return min(tensor.shape[0], rows * tensor.device_mesh.get_local_rank())


def _read_rows(place: _Place, first: int, target: torch.Tensor) -> None:
    """Fill ``target`` with rows of a stored tensor, cast to its dtype; by pieces of 64 MiB."""
    row_nbytes = math.prod(place.shape[1:]) * place.dtype.itemsize
    flat = target.view(-1)
    per_piece = _AT_ONCE // place.dtype.itemsize
    at = place.start + first * row_nbytes
    fd = os.open(place.path, os.O_RDONLY)
    try:
        for start in range(0, flat.numel(), per_piece):
            piece = flat[start : start + per_piece]
            data = bytearray(piece.numel() * place.dtype.itemsize)
            view, done = memoryview(data), 0
            while done < len(data):
                count = os.preadv(fd, [view[done:]], at + done)
                if not count:
                    raise ConfigError(f"model: {place.path} is too short; get it again")
                done += count
            at += done
            piece.copy_(torch.frombuffer(data, dtype=place.dtype))
    except OSError as error:
        raise ConfigError(f"model: {place.path} cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)


def _files(folder: Path) -> list[Path]:
    """The files that hold the weights: those of the index, or the only one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"model: {index} is damaged: {error}") from error
        paths = sorted(folder / str(name) for name in names)
    else:
        paths = [folder / "model.safetensors"]
    for path in paths:
        if path.parent != folder or not path.is_file():
            raise ConfigError(f"model: {path} is missing; get the weights again")
    return paths


def _read_header(path: Path) -> dict[str, _Place]:
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MOST_HEADER_BYTES:
                raise ValueError("its header is too long")
            table: dict[str, Any] = json.loads(file.read(length))
            end = os.fstat(file.fileno()).st_size - 8 - length
        places = {}
        for name, entry in table.items():
            if name == "__metadata__":
                continue
            dtype, shape = dtype_of(entry["dtype"]), tuple(int(size) for size in entry["shape"])
            start, stop = entry["data_offsets"]
            if not 0 <= start <= stop <= end or stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} does not fit into it")
            places[name] = _Place(path, 8 + length + start, dtype, shape)
        return places
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model: {path} is damaged or incomplete: {error}; get it again") from error


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are made inside of it get parameters without memory; buffers are real."""

    def to_meta(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None  # as it is: a tied one stays the same object
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    handle = module_hooks.register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class StoredModel:
    """A model on the meta device, and where its weights are.

    Attributes:
        model: the model.
        weights: its weights' files.
        names: which stored tensor belongs to which of the model's.
    """

    model: nn.Module
    weights: StoredWeights
    names: dict[str, str]

    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Give the sharded model this rank's part of the weights."""
        self.weights.fill(model, self.names, device)
