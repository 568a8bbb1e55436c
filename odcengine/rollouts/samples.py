"""Samples as they travel: mappings of names to tensors, numbers and texts, and their bytes.

All samples of a minibatch have the same fields; lengths differ. So what a sample is made of (its *schema*) is
agreed on once, and each sample travels as the shapes of its fields followed by their elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from odcengine.errors import UsageError

Sample = Mapping[str, Any]
"""A sample as a script makes it: tensors, arrays, lists of numbers, numbers and texts by name."""
TensorSample = dict[str, Any]
"""A sample as it arrives: CPU tensors, and texts, by name."""

_ALIGNMENT = 16  # of every field: bytes can be viewed as any dtype without a copy
_TEXT = "text"
_INSIDE = "/"  # names of fields of mappings in a list: sequences/0/input_ids
_TOKENS_AND_LABELS = ("input_ids", "labels", "loss_mask")


@dataclass(frozen=True)
class Field:
    """One field of all samples.

    Attributes:
        name: of the field.
        dtype: name of torch's dtype, or ``text``.
        ndim: number of dimensions; 0 for numbers, 1 for texts (of bytes).
    """

    name: str
    dtype: str
    ndim: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in which its elements travel."""
        dtype: torch.dtype = torch.uint8 if self.dtype == _TEXT else getattr(torch, self.dtype)
        return dtype

    def nbytes(self, numel: int) -> int:
        """Bytes of so many elements with their shape, aligned."""
        return _aligned(8 * self.ndim) + _aligned(numel * self.torch_dtype.itemsize)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}" + (f" of {self.ndim} dimensions" if self.ndim > 1 else "")


Schema = tuple[Field, ...]
"""Fields of all samples, by name."""


def to_tensors(sample: Sample, where: str) -> TensorSample:
    """A sample's fields as contiguous CPU tensors without a graph; texts stay texts.

    A list of mappings (``sequences`` of a preference pair) becomes fields of their own; see :func:`nested`.

    Args:
        sample: as the script made it.
        where: which sample, for messages.

    Raises:
        UsageError: no mapping of names to what can travel.
    """
    if not isinstance(sample, Mapping):
        raise UsageError(
            f"{where} is a {type(sample).__name__}; expected a mapping of names to tensors, numbers and texts"
        )
    found: TensorSample = {}
    for name, value in sample.items():
        if not isinstance(name, str) or _INSIDE in name:
            raise UsageError(f"{where}: field {name!r}: names are texts without {_INSIDE!r}")
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
            for number, inner in enumerate(value):
                fields = to_tensors(inner, f"{where}: {name} {number}").items()
                found.update({f"{name}{_INSIDE}{number}{_INSIDE}{field}": tensor for field, tensor in fields})
        else:
            found[name] = _to_tensor(value, f"{where}: field {name!r}")
    return found


def nested(sample: TensorSample) -> TensorSample:
    """A sample as the script made it, with lists of mappings instead of fields of them."""
    found: TensorSample = {}
    lists: dict[str, dict[int, TensorSample]] = {}
    for name, value in sample.items():
        outer, _, rest = name.partition(_INSIDE)
        if rest:
            number, _, field = rest.partition(_INSIDE)
            lists.setdefault(outer, {}).setdefault(int(number), {})[field] = value
        else:
            found[name] = value
    for name, mappings in lists.items():
        found[name] = [nested(mappings[number]) for number in sorted(mappings)]
    return found


def leaf_of(field: Field) -> str:
    """The name of a field without that of the list of mappings that it is in."""
    return field.name.rpartition(_INSIDE)[2]


def packable(schema: Schema, counts: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """Fields that packed rows can take along: numbers, and what has one value a token in all samples.

    Args:
        schema: of the samples.
        counts: for each sample the elements of each field, from :func:`numels`.
    """
    index = {field.name: number for number, field in enumerate(schema)}
    fits: dict[str, bool] = {}
    for field in schema:
        within, _, leaf = field.name.rpartition(_INSIDE)
        tokens = index.get(f"{within}{_INSIDE}input_ids" if within else "input_ids")
        one_a_token = tokens is not None and all(row[index[field.name]] == row[tokens] for row in counts)
        is_value = field.ndim == 0 or (field.ndim == 1 and field.dtype != _TEXT and one_a_token)
        inside = tokens is not None  # what lies beside a list of sequences belongs to none of them
        fits[leaf] = fits.get(leaf, True) and is_value and inside
    return tuple(name for name, fit in fits.items() if fit and name not in _TOKENS_AND_LABELS)


def _to_tensor(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise UsageError(f"{where} is a tensor of layout {value.layout}; only dense ones travel")
        return value.detach().cpu().contiguous()
    try:
        if isinstance(value, (np.ndarray, np.generic)):
            return torch.from_numpy(np.array(value))  # a copy
        if isinstance(value, (bool, int, float, list, tuple)):
            made = torch.tensor(value)
            return made if made.numel() else made.long()  # an empty list says nothing; other samples do
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{where}: its {type(value).__name__} does not become a tensor ({error})") from error
    raise UsageError(
        f"{where} is a {type(value).__name__}; expected a tensor, an array or list of numbers, a number or a "
        "text (leave out what the update does not need)"
    )


def schema_of(samples: Sequence[TensorSample], where: str) -> Schema | None:
    """The schema of some samples; None without any.

    Args:
        samples: from :func:`to_tensors`.
        where: whose samples, for messages.

    Raises:
        UsageError: samples have different fields.
    """
    if not samples:
        return None
    merged = _schema_of_one(samples[0])
    for number, sample in enumerate(samples[1:], 1):
        merged = merge(merged, _schema_of_one(sample), f"{where}: sample 0", f"sample {number}")
    return merged


def _schema_of_one(sample: TensorSample) -> Schema:
    return tuple(
        Field(name, _TEXT, 1)
        if isinstance(value, str)
        else Field(name, str(value.dtype).removeprefix("torch."), value.ndim)
        for name, value in sorted(sample.items())
    )


def merge(first: Schema, second: Schema, where: str, other: str) -> Schema:
    """The schema of which samples of both are: the wider dtype of each field.

    Args:
        first: a schema.
        second: another.
        where: whose the first is, for messages.
        other: whose the second is.

    Raises:
        UsageError: fields of one that the other lacks, or of another kind.
    """
    if first == second:
        return first
    names = [{field.name for field in schema} for schema in (first, second)]
    if names[0] != names[1]:
        odd = ", ".join(sorted(names[0] ^ names[1]))
        raise UsageError(
            f"{where} and {other} have different fields: {odd} only in one of them; all samples of a "
            "minibatch need the same fields"
        )
    fields = []
    for a, b in zip(first, second, strict=True):
        if a.ndim != b.ndim or (a.dtype == _TEXT) != (b.dtype == _TEXT):
            raise UsageError(
                f"{where} has {a} ({a.ndim}-D), {other} {b} ({b.ndim}-D); a field needs one kind in all "
                "samples"
            )
        fields.append(a if a.dtype == b.dtype else _wider(a, b))
    return tuple(fields)


def _wider(a: Field, b: Field) -> Field:
    dtype = torch.promote_types(a.torch_dtype, b.torch_dtype)
    return Field(a.name, str(dtype).removeprefix("torch."), a.ndim)


def numels(sample: TensorSample, schema: Schema) -> list[int]:
    """Elements of each field; bytes of a text."""
    values = [sample[field.name] for field in schema]
    return [len(value.encode()) if isinstance(value, str) else value.numel() for value in values]


def nbytes(schema: Schema, counts: Sequence[int]) -> int:
    """Bytes of a sample that travels.

    Args:
        schema: of the samples.
        counts: elements of each field, from :func:`numels`.
    """
    return sum(field.nbytes(count) for field, count in zip(schema, counts, strict=True))


def write(sample: TensorSample, schema: Schema, out: torch.Tensor) -> int:
    """Write a sample's bytes.

    Args:
        sample: from :func:`to_tensors`.
        schema: agreed on.
        out: 1-D uint8, from where the sample begins.

    Returns:
        Bytes written.
    """
    end = 0
    for field in schema:
        value = sample[field.name]
        if isinstance(value, str):
            value = torch.frombuffer(bytearray(value.encode() or b"\0"), dtype=torch.uint8)[
                : len(value.encode())
            ]
        value = value.to(field.torch_dtype)
        end = _put(out, end, torch.tensor(value.shape, dtype=torch.int64))
        end = _put(out, end, value.reshape(-1))
    return end


def read(data: torch.Tensor, schema: Schema, *, copy: bool) -> TensorSample:
    """The sample whose bytes begin where ``data`` begins.

    Args:
        data: 1-D uint8, aligned to 16 bytes in its storage.
        schema: agreed on.
        copy: give tensors memory of their own; else they are views of ``data``.
    """
    sample: TensorSample = {}
    end = 0
    for field in schema:
        shape: list[int] = _get(data, end, field.ndim, torch.int64).tolist()
        end += _aligned(8 * field.ndim)
        numel = math.prod(shape)
        value = _get(data, end, numel, field.torch_dtype).view(shape)
        end += _aligned(numel * field.torch_dtype.itemsize)
        if field.dtype == _TEXT:
            sample[field.name] = value.numpy().tobytes().decode()
        else:
            sample[field.name] = value.clone() if copy else value
    return sample


def convert(sample: TensorSample, schema: Schema) -> TensorSample:
    """A sample that stays where it is, in the dtypes that the others have."""
    return {
        field.name: value if isinstance(value, str) else value.to(field.torch_dtype)
        for field in schema
        for value in (sample[field.name],)
    }


def _put(out: torch.Tensor, start: int, values: torch.Tensor) -> int:
    size = values.numel() * values.element_size()
    out[start : start + size] = values.contiguous().view(torch.uint8)
    return start + _aligned(size)


def _get(data: torch.Tensor, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return data[start : start + numel * dtype.itemsize].view(dtype)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
