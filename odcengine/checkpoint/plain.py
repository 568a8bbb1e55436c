"""Values of Python as JSON and back, exactly, without pickle.

JSON has no tuples, integer keys, counters, bytes or tensors; they become objects with one key that begins
with ``$``. What is nothing of the kind is refused when it is saved, not found out when it is loaded.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from odcengine.errors import CheckpointError

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_MOST_BYTES = 1 << 20  # of a tensor in JSON; larger ones belong to the model or the optimizer
_NAMES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: Any, where: str) -> Any:
    """What ``json.dumps`` takes for ``value``.

    Args:
        value: None, bool, numbers, text, bytes, lists, tuples, sets, dictionaries (any plain keys), counters,
            numpy's numbers and small tensors, nested.
        where: the place of ``value``, for messages.

    Returns:
        Its JSON form; :func:`decode` gives the value back.

    Raises:
        CheckpointError: names the place of what is nothing of the above.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        value = value.item()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list):
        return [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, (set, frozenset)):
        return {"$set": [encode(item, where) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Counter):
        return {"$counter": _pairs(value, where)}
    if type(value) in (dict, OrderedDict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        return {"$dict": _pairs(value, where)}
    if type(value) is torch.Tensor:
        return {"$tensor": _tensor(value, where)}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}; checkpoints hold tensors and "
        "what JSON can say (numbers, text, lists, dictionaries). Keep its plain values instead"
    )


def _pairs(value: dict[Any, Any], where: str) -> list[list[Any]]:
    return [[encode(key, f"a key of {where}"), encode(item, f"{where}.{key}")] for key, item in value.items()]


def _tensor(value: torch.Tensor, where: str) -> dict[str, Any]:
    name = str(value.dtype).removeprefix("torch.")
    if name not in _DTYPES or value.numel() * value.element_size() > _MOST_BYTES:
        raise CheckpointError(
            f"{where} is a tensor of {value.dtype} with shape {list(value.shape)}; beside the model and the "
            f"optimizer only tensors of up to {_MOST_BYTES} bytes of common types are saved"
        )
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": name, "shape": list(value.shape), "data": base64.b64encode(raw).decode()}


def decode(value: Any) -> Any:
    """The value that :func:`encode` was given.

    Raises:
        ValueError: it is no such form.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(item) for key, item in value.items()}
    if len(value) != 1 or tag not in _DECODERS:
        raise ValueError(f"{sorted(value)} is no value that odcengine writes")
    return _DECODERS[tag](value[tag])


def _decode_tensor(form: dict[str, Any]) -> torch.Tensor:
    raw = bytearray(base64.b64decode(form["data"], validate=True))
    dtype, shape = _DTYPES[form["dtype"]], form["shape"]
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(shape)


def _decode_pairs(form: list[list[Any]]) -> dict[Any, Any]:
    return {decode(key): decode(item) for key, item in form}


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": lambda form: _NAMES[form],
    "$tuple": lambda form: tuple(decode(item) for item in form),
    "$set": lambda form: {decode(item) for item in form},
    "$bytes": lambda form: base64.b64decode(form, validate=True),
    "$counter": lambda form: Counter(_decode_pairs(form)),
    "$dict": _decode_pairs,
    "$tensor": _decode_tensor,
}


def dump_json(value: Any) -> bytes:
    """``value``, from :func:`encode`, as JSON text."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def load_json(data: bytes, where: str) -> Any:
    """JSON text as plain lists, dictionaries, text and numbers.

    Raises:
        CheckpointError: it is no JSON.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: it is no JSON ({error})") from error
