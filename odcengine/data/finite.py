"""Numbers of samples that are not finite, found on the host.

In a loss they make the gradient of all ranks NaN: the step is skipped, and nobody could say because of which
sample. On the host they still have a name.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from odcengine.data.batch import IGNORE_INDEX, MicroBatch
from odcengine.errors import UsageError

OF_LOSSES = ("advantages", "rewards", "weights", "old_logprobs", "ref_logprobs")
"""Names under which samples have what losses multiply and subtract, here and in other libraries."""


def check_sample_is_finite(sample: Any, name: str) -> None:
    """See that what a loss reads of a sample is finite, where a ``collate_fn`` packs in the engine's place.

    Values of tokens that are not learned (by ``loss_mask`` or ``labels``) may be anything, as in packing.

    Args:
        sample: of a data set or of ``engine.balance``; what is no mapping is not looked at.
        name: of the sample, for messages.

    Raises:
        UsageError: names the sample, the field and the number.
    """
    if not isinstance(sample, Mapping):
        return
    for field in OF_LOSSES:
        numbers = _numbers(sample.get(field))
        if numbers is None:
            continue
        odd = ~np.isfinite(numbers) & _learned(sample, numbers.shape)
        if odd.any():
            raise UsageError(f"{name}: {field} is not finite ({numbers[odd].flat[0]})")
    sequences = sample.get("sequences")
    if isinstance(sequences, (list, tuple)):
        for number, sequence in enumerate(sequences):
            check_sample_is_finite(sequence, f"{name}, sequence {number}")


def check_fields_are_finite(batch: MicroBatch) -> None:
    """The same for the fields of a packed micro-batch that has not left the host; at its targets.

    What :func:`~odcengine.data.pack_samples` has made is finite; a script may have put other values there.
    """
    for field, values in batch.fields.items():
        per_token = values.shape[:2] == batch.labels.shape
        if values.device.type != "cpu" or not (per_token or values.shape == (batch.num_sequences,)):
            continue
        odd = ~values.isfinite()
        if not odd.any():
            continue
        if per_token:
            values, odd = values[0], odd[0]
            odd &= (batch.labels[0] != IGNORE_INDEX).view(-1, *[1] * (odd.ndim - 1))
        for first in odd.nonzero()[:1]:
            sample, number = _sample_of(batch, int(first[0]), per_token), values[tuple(first)].item()
            raise UsageError(f"sample {sample}: {field} is not finite ({number})")


def _sample_of(batch: MicroBatch, at: int, per_token: bool) -> int:
    sequence = at
    if per_token and batch.segments is not None:
        sequence = bisect.bisect_right(batch.segments.boundaries, at) - 1
    sample = batch.sample_of_sequence(sequence)
    return batch.sample_ids[-1 if sample is None else sample]


def _numbers(value: Any) -> Any:
    """An array of floating-point numbers that are on the host; None for anything else."""
    if isinstance(value, torch.Tensor):
        on_host = value.device.type == "cpu" and value.is_floating_point()
        return value.detach().double().numpy() if on_host else None
    try:
        numbers = np.asarray(value)
    except ValueError:  # lists of different lengths: for the collation to judge
        return None
    return numbers if numbers.dtype.kind == "f" else None


def _learned(sample: Mapping[str, Any], shape: tuple[int, ...]) -> Any:
    """Bool, in the shape of a field: where it has one value a token, those of tokens that are learned."""
    tokens = sample.get("input_ids")
    if tokens is None or shape[:1] != (len(tokens),):
        return np.ones(shape, dtype=bool)
    learned = np.ones(len(tokens), dtype=bool)
    for name, ignored in (("loss_mask", 0), ("labels", IGNORE_INDEX)):
        mask = None if sample.get(name) is None else np.asarray(sample[name])
        if mask is not None and mask.shape == learned.shape:
            learned &= mask != ignored
    learned[0] = False  # nothing precedes it
    return np.broadcast_to(learned.reshape(-1, *[1] * (len(shape) - 1)), shape)
