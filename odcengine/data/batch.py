"""Micro-batches: several samples side by side in one row, with their boundaries.

A packed row is right only if nothing crosses a boundary: positions start again, attention stops (see
``odcengine.models``), and the last token of a sample has no target. So the boundaries travel with the
batch; they are never guessed from positions or from special tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from odcengine.errors import UsageError

IGNORE_INDEX = -100
"""The label of a position without a target."""

Sample = Mapping[str, Any]


class Segments:
    """The boundaries of a row's segments as the host knows them, so that no kernel's launch asks the device.

    No container and no dataclass on purpose: FSDP rebuilds those among the arguments of every layer.

    Attributes:
        boundaries: from 0 to the length of the row; each begins a segment, but for the last.
        longest: tokens of the longest segment.
    """

    __slots__ = ("boundaries", "longest")

    def __init__(self, boundaries: Sequence[int]) -> None:
        self.boundaries = tuple(boundaries)
        self.longest = max([0, *(stop - start for start, stop in itertools.pairwise(boundaries))])


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Samples packed into one row without padding between them.

    ``T`` is the length of the row. Labels are already shifted: ``labels[0, i]`` is the token that position
    ``i`` has to predict, so they are compared with the logits as they are. A row may end with padding,
    which is a segment of its own (no sample sees it) without targets.

    Args:
        input_ids: ``[1, T]`` int64.
        labels: ``[1, T]`` int64, :data:`IGNORE_INDEX` where there is no target.
        position_ids: ``[1, T]`` int64, starting at 0 in every segment.
        cu_seqlens: ``[num_samples + 1]`` int32, boundaries of the samples; the last is ``num_tokens``.
        cu_segments: ``cu_seqlens``, with ``T`` appended where the row ends with padding, int32.
        max_seqlen: tokens of the longest segment.
        num_tokens: tokens of samples, without padding.
        num_targets: positions with a target.
        num_samples: number of samples; 0 for the dummy that stands for an empty micro-batch.
        sample_ids: index of each sample in the data set.
        segments: ``cu_segments`` for the host; found by itself.

    Raises:
        UsageError: boundaries that do not fit the row, or not ``max_seqlen``.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_segments: torch.Tensor
    max_seqlen: int
    num_tokens: int
    num_targets: int
    num_samples: int
    sample_ids: tuple[int, ...]
    segments: Segments | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        # On another device they were checked before the move, and looking again would make the host wait.
        device = self.cu_segments.device.type
        if device == "cpu" or (self.segments is None and device != "meta"):
            object.__setattr__(self, "segments", _segments_of(self))

    @property
    def is_dummy(self) -> bool:
        """Whether the row holds no sample, but only gives a rank something to run while others work."""
        return self.num_samples == 0

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatch:
        """The micro-batch with its tensors on a device.

        On the way from the host to a GPU tensors pass through pinned memory, so the copies take their place
        in the current stream and the host waits for none of them.

        Args:
            device: where to.
            non_blocking: as in :meth:`torch.Tensor.to`.
        """
        target = torch.device(device)

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if target.type == "cuda" and tensor.device.type == "cpu":
                return tensor.pin_memory().to(target, non_blocking=True)  # pins what is not pinned yet
            return tensor.to(target, non_blocking=non_blocking)

        return self._with_tensors(move)

    def pin_memory(self) -> MicroBatch:
        """The micro-batch with its tensors in pinned memory, from which copies to a GPU do not wait."""
        return self._with_tensors(torch.Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        changed: dict[str, Any] = {
            field.name: change(value)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return dataclasses.replace(self, **changed)

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments for a causal language model of transformers, without labels.

        The boundaries go under the names that transformers gives to variable-length attention
        (``cu_seq_lens_q`` and so on), and for the host as ``odc_segments``. They have an effect only with an
        attention that reads them: see :func:`odcengine.models.prepare_model`.
        """
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.cu_segments,
            "cu_seq_lens_k": self.cu_segments,
            "max_length_q": self.max_seqlen,
            "max_length_k": self.max_seqlen,
            "odc_segments": self.segments,
        }


def pack_samples(
    samples: Sequence[Sample],
    *,
    sample_ids: Sequence[int] | None = None,
    pad_to_multiple_of: int = 1,
    pad_token_id: int = 0,
) -> MicroBatch:
    """Pack samples into one row.

    Args:
        samples: mappings with ``input_ids`` (1-D integers, at least one) and optionally either
            ``labels`` (same length, *not* shifted, as in transformers: ``labels[i]`` belongs to token ``i``,
            :data:`IGNORE_INDEX` where it is not to be learned) or ``loss_mask`` (same length, true where the
            token is to be learned). Without either, every token but the first is a target. The first token
            of a sample is never one, as nothing precedes it. An empty list gives a dummy: one padding token.
        sample_ids: index of each sample in the data set; positions in ``samples`` if None.
        pad_to_multiple_of: the row's length is rounded up to a multiple of this with a trailing segment.
        pad_token_id: the token of the padding.

    Returns:
        The micro-batch, on the CPU.

    Raises:
        UsageError: a sample without tokens, or whose labels or mask do not fit its tokens.
    """
    ids = tuple(range(len(samples))) if sample_ids is None else tuple(int(index) for index in sample_ids)
    if len(ids) != len(samples):
        raise UsageError(f"pack_samples: {len(samples)} samples, but {len(ids)} sample_ids")
    if pad_to_multiple_of < 1:
        raise UsageError(f"pack_samples: pad_to_multiple_of is {pad_to_multiple_of}, but must be at least 1")
    pairs = [_tokens_and_targets(sample, index) for sample, index in zip(samples, ids, strict=True)]
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
    )


def _segments_of(batch: MicroBatch) -> Segments:
    boundaries: list[int] = batch.cu_segments.tolist()
    num_tokens = batch.input_ids.shape[-1]
    grows = all(start < stop for start, stop in itertools.pairwise(boundaries))
    if not grows or boundaries[:1] != [0] or boundaries[-1] != num_tokens:
        raise UsageError(
            f"MicroBatch: cu_segments of a row of {num_tokens} tokens must grow from 0 to {num_tokens}, but "
            f"is {_shorten(boundaries)}; make it with pack_samples"
        )
    segments = Segments(boundaries)
    if segments.longest != batch.max_seqlen:
        raise UsageError(
            f"MicroBatch: the longest segment has {segments.longest} tokens, but max_seqlen is "
            f"{batch.max_seqlen}; make it with pack_samples"
        )
    return segments


def _shorten(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:8]))}, ...]"


def num_targets_of(sample: Sample, index: int) -> int:
    """How many positions of a sample have a target; ``index`` is for the error message."""
    return int((_tokens_and_targets(sample, index)[1] != IGNORE_INDEX).sum())


def truncate_sample(sample: Sample, max_tokens: int) -> dict[str, Any]:
    """The sample cut after ``max_tokens`` tokens, its labels or mask with it."""
    return {
        name: value[:max_tokens] if name in ("input_ids", "labels", "loss_mask") else value
        for name, value in sample.items()
    }


def _tokens_and_targets(sample: Sample, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Tokens of a sample and, shifted by one, what each position has to predict."""
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        raise UsageError(
            f"sample {index} is a {type(sample).__name__} without input_ids; give a mapping with input_ids "
            "and labels or loss_mask, or a collate_fn of your own"
        )
    tokens = np.asarray(sample["input_ids"])
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        raise UsageError(
            f"sample {index}: input_ids has shape {list(tokens.shape)} and type {tokens.dtype}, "
            "but must be 1-D integers, at least one"
        )
    tokens = tokens.astype(np.int64)  # unsigned tokens could not stand beside IGNORE_INDEX
    targets = np.full(len(tokens), IGNORE_INDEX, dtype=np.int64)
    name = next((name for name in ("labels", "loss_mask") if sample.get(name) is not None), None)
    if name is None:
        targets[:-1] = tokens[1:]
        return tokens, targets
    values = np.asarray(sample[name])
    if values.shape != tokens.shape:
        raise UsageError(
            f"sample {index}: {name} has shape {list(values.shape)}, but input_ids has {list(tokens.shape)}"
        )
    if name == "labels":
        targets[:-1] = values[1:]
    else:
        targets[:-1] = np.where(values[1:].astype(bool), tokens[1:], IGNORE_INDEX)
    return tokens, targets
