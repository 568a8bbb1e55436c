"""Packing: samples are put side by side in one row, what belongs to their tokens beside them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from odcengine.data.batch import IGNORE_INDEX, MicroBatch, Sample
from odcengine.data.token_batch import check_unpadded
from odcengine.errors import UsageError

# What other libraries call the mask of the loss.
_MASKS_ELSEWHERE = ("completion_mask", "response_mask", "assistant_masks", "action_mask")


def pack_samples(
    samples: Sequence[Sample],
    *,
    sample_ids: Sequence[int] | None = None,
    pad_to_multiple_of: int = 1,
    pad_token_id: int = 0,
    fields: Sequence[str] = (),
) -> MicroBatch:
    """Pack samples into one row.

    Fields are what a loss needs beside the tokens (advantages, log-probabilities of an earlier model). The
    value of a field is either one number for the sequence or one for each of its tokens, as ``labels`` are:
    what stands at ``i`` belongs to token ``i``. In the row it is shifted like the labels are, so that
    ``fields[name][0, i]`` belongs to ``labels[0, i]``, and zero where the label is :data:`IGNORE_INDEX`.

    Args:
        samples: mappings with ``input_ids`` (1-D integers, at least one) and optionally either
            ``labels`` (same length, *not* shifted, as in transformers: ``labels[i]`` belongs to token ``i``,
            :data:`IGNORE_INDEX` where it is not to be learned) or ``loss_mask`` (same length, true where the
            token is to be learned). Without either, every token but the first is a target; a mask by another
            library's name (``completion_mask``, say) in place of these is refused. The first token
            of a sample is never one, as nothing precedes it. Or mappings with ``sequences``, a list of such
            mappings that have to stay together, each a segment of the row. An empty list gives a dummy: one
            padding token.
        sample_ids: index of each sample in the data set; positions in ``samples`` if None.
        pad_to_multiple_of: the row's length is rounded up to a multiple of this with a trailing segment.
        pad_token_id: the token of the padding.
        fields: names of the fields that the micro-batch takes along; other keys of samples are left.

    Returns:
        The micro-batch, on the CPU.

    Raises:
        UsageError: a sample without tokens, or whose labels, mask or fields do not fit its tokens; a field
            that is missing or not finite.
    """
    ids = tuple(range(len(samples))) if sample_ids is None else tuple(int(index) for index in sample_ids)
    if len(ids) != len(samples):
        raise UsageError(f"pack_samples: {len(samples)} samples, but {len(ids)} sample_ids")
    if pad_to_multiple_of < 1:
        raise UsageError(f"pack_samples: pad_to_multiple_of is {pad_to_multiple_of}, but must be at least 1")
    of_samples = [sequences_of(sample, f"sample {index}") for sample, index in zip(samples, ids, strict=True)]
    sequences = list(itertools.chain(*of_samples))
    pairs = [tokens_and_targets(sequence, name) for name, sequence in sequences]
    lengths = [len(tokens) for tokens, _ in pairs]
    num_tokens = sum(lengths)
    num_padding = -num_tokens % pad_to_multiple_of if samples else pad_to_multiple_of
    row = np.full(num_tokens + num_padding, pad_token_id, dtype=np.int64)
    labels = np.full(num_tokens + num_padding, IGNORE_INDEX, dtype=np.int64)
    positions = np.empty(num_tokens + num_padding, dtype=np.int64)
    boundaries = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)
    for (tokens, targets), start in zip(pairs, boundaries.tolist(), strict=False):
        row[start : start + len(tokens)] = tokens
        labels[start : start + len(tokens)] = targets
        positions[start : start + len(tokens)] = np.arange(len(tokens))
    positions[num_tokens:] = np.arange(num_padding)
    cu_seqlens = torch.from_numpy(boundaries)
    cu_segments = cu_seqlens
    if num_padding:
        cu_segments = torch.from_numpy(np.append(boundaries, np.int32(len(row))))
    return MicroBatch(
        input_ids=torch.from_numpy(row)[None],
        labels=torch.from_numpy(labels)[None],
        position_ids=torch.from_numpy(positions)[None],
        cu_seqlens=cu_seqlens,
        cu_segments=cu_segments,
        max_seqlen=max([*lengths, num_padding]),
        num_tokens=num_tokens,
        num_targets=int((labels != IGNORE_INDEX).sum()),
        num_samples=len(samples),
        sample_ids=ids,
        sequences_per_sample=tuple(map(len, of_samples)),
        fields={
            field: _packed_field(field, sequences, torch.from_numpy(labels), boundaries.tolist())
            for field in (fields if samples else ())
        },
    )


def sequences_of(sample: Sample, name: str) -> list[tuple[str, Sample]]:
    """The sequences of tokens that a sample is made of, itself as a rule, each with a name for messages."""
    if not isinstance(sample, Mapping) or "sequences" not in sample:
        return [(name, sample)]
    sequences = sample["sequences"]
    if not isinstance(sequences, Sequence) or not sequences:
        raise UsageError(f"{name}: sequences is {sequences!r}, but must be a list of mappings with input_ids")
    return [(f"{name}, sequence {number}", sequence) for number, sequence in enumerate(sequences)]


def _packed_field(
    field: str, sequences: Sequence[tuple[str, Sample]], labels: torch.Tensor, boundaries: Sequence[int]
) -> torch.Tensor:
    """One field of all sequences: ``[1, T, ...]`` or ``[num_sequences]``."""
    values = [_field_of(sequence, field, name) for name, sequence in sequences]
    first = values[0]
    for (name, _), value in zip(sequences, values, strict=True):
        if value.shape[1:] != first.shape[1:] or value.ndim != first.ndim:
            raise UsageError(
                f"{name}: {field} has shape {list(value.shape)}, but {list(first.shape)} in "
                f"{sequences[0][0]}; it must be one number in all samples, or one for each token"
            )
    dtype = functools.reduce(torch.promote_types, [value.dtype for value in values])
    if first.ndim == 0:
        _check_finite(field, sequences, values)
        return torch.stack([value.to(dtype) for value in values])
    has_target = labels != IGNORE_INDEX
    row = torch.zeros(len(labels), *first.shape[1:], dtype=dtype)
    for value, start in zip(values, boundaries, strict=False):
        row[start : start + len(value) - 1] = value[1:]
    row[~has_target] = 0
    _check_finite(field, sequences, [row[start:stop] for start, stop in itertools.pairwise(boundaries)])
    return row[None]


def _field_of(sequence: Sample, field: str, name: str) -> torch.Tensor:
    if sequence.get(field) is None:
        raise UsageError(f"{name} has no {field}; it has {', '.join(map(str, sequence))}")
    value = sequence[field]
    try:
        if not isinstance(value, torch.Tensor):
            value = torch.from_numpy(np.array(value))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: {field} must be a number, or one for each token ({error})") from error
    if value.ndim and len(value) != len(sequence["input_ids"]):
        raise UsageError(
            f"{name}: {field} has shape {list(value.shape)}, but there are {len(sequence['input_ids'])} "
            "input_ids; give one number, or one for each token, prompt included"
        )
    value = value.detach().cpu()
    return value if value.is_floating_point() or value.dtype == torch.bool else value.to(torch.int64)


def _check_finite(
    field: str, sequences: Sequence[tuple[str, Sample]], values: Sequence[torch.Tensor]
) -> None:
    """Found here it has a name; on a GPU it would be one gradient of many that is not finite."""
    for (name, _), value in zip(sequences, values, strict=True):
        if not value.isfinite().all():
            raise UsageError(
                f"{name}: {field} is not finite ({value[~value.isfinite()].flatten()[0].item()})"
            )


def num_targets_of(sample: Sample, index: int) -> int:
    """How many positions of a sample have a target; ``index`` is for the error message."""
    return sum(
        int((tokens_and_targets(sequence, name)[1] != IGNORE_INDEX).sum())
        for name, sequence in sequences_of(sample, f"sample {index}")
    )


def truncate_sample(sample: Sample, max_tokens: int, fields: Sequence[str] = ()) -> dict[str, Any]:
    """The sample cut after ``max_tokens`` tokens, its labels or mask and the fields of tokens with it.

    Raises:
        UsageError: it holds several sequences.
    """
    if "sequences" in sample:
        raise UsageError(
            "data.too_long: a sample of several sequences is not truncated: nobody could say which of them "
            "is to lose its end; choose error or skip, or truncate them in the data set"
        )
    cut = {"input_ids", "labels", "loss_mask"}
    cut.update(name for name in fields if np.ndim(sample.get(name, 0)))
    return {name: value[:max_tokens] if name in cut else value for name, value in sample.items()}


def tokens_and_targets(sample: Sample, which: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Tokens of a sequence and, shifted by one, what each position has to predict; ``[l]`` each.

    Args:
        sample: the sequence.
        which: its name, for messages.
    """
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        raise UsageError(
            f"{which} is a {type(sample).__name__} without input_ids; give a mapping with input_ids "
            "and labels or loss_mask, or a collate_fn of your own"
        )
    tokens = np.asarray(sample["input_ids"])
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        raise UsageError(
            f"{which}: input_ids has shape {list(tokens.shape)} and type {tokens.dtype}, "
            "but must be 1-D integers, at least one"
        )
    check_unpadded(sample, f"{which}: ")
    tokens = tokens.astype(np.int64)  # unsigned tokens could not stand beside IGNORE_INDEX
    targets = np.full(len(tokens), IGNORE_INDEX, dtype=np.int64)
    name = next((name for name in ("labels", "loss_mask") if sample.get(name) is not None), None)
    if name is None:
        if other := next((other for other in _MASKS_ELSEWHERE if sample.get(other) is not None), None):
            raise UsageError(
                f"{which} has {other}, but neither loss_mask nor labels, so its prompt would be learned as "
                "well; give loss_mask, 0 or 1 for each of the input_ids, prompt included"
            )
        targets[:-1] = tokens[1:]
        return tokens, targets
    values = np.asarray(sample[name])
    if values.shape != tokens.shape:
        raise UsageError(
            f"{which}: {name} has shape {list(values.shape)}, but input_ids has {list(tokens.shape)}"
        )
    if name == "labels":
        if values.dtype.kind not in "iu":  # a cast would cut 1.5 to 1 and learn it
            raise UsageError(
                f"{which}: labels have type {values.dtype}, but must be integers: tokens, and {IGNORE_INDEX} "
                "where nothing is learned"
            )
        targets[:-1] = values[1:]
    else:
        targets[:-1] = np.where(values[1:].astype(bool), tokens[1:], IGNORE_INDEX)
    return tokens, targets
