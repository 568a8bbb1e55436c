"""Micro-batches: several samples side by side in one row, with their boundaries.

A packed row is right only if nothing crosses a boundary: positions start again, attention stops (see
``odcengine.models``), and the last token of a sample has no target. So the boundaries travel with the
batch; they are never guessed from positions or from special tokens.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
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

    A sample is one sequence of tokens, or several that have to stay together (the two answers of a preference
    pair): these are neighbours in the row, and each is a segment of its own.

    Args:
        input_ids: ``[1, T]`` int64.
        labels: ``[1, T]`` int64, :data:`IGNORE_INDEX` where there is no target.
        position_ids: ``[1, T]`` int64, starting at 0 in every segment.
        cu_seqlens: ``[num_sequences + 1]`` int32, boundaries of the sequences; the last is ``num_tokens``.
        cu_segments: ``cu_seqlens``, with ``T`` appended where the row ends with padding, int32.
        max_seqlen: tokens of the longest segment.
        num_tokens: tokens of samples, without padding.
        num_targets: positions with a target.
        num_samples: number of samples; 0 for the dummy that stands for an empty micro-batch.
        sample_ids: index of each sample in the data set.
        fields: what else the samples say, by name (:func:`pack_samples`): ``[1, T, ...]`` of tokens, aligned
            with the labels; ``[num_sequences]`` of sequences.
        sequences_per_sample: of each sample how many it holds; one each if not given.
        segments: ``cu_segments`` for the host; found by itself.
        targets_per_sequence: positions with a target of each sequence, for the host; found by itself.

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
    fields: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict, repr=False)
    sequences_per_sample: tuple[int, ...] = dataclasses.field(default=(), repr=False)
    segments: Segments | None = dataclasses.field(default=None, repr=False)
    targets_per_sequence: tuple[int, ...] = dataclasses.field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.sequences_per_sample:
            object.__setattr__(self, "sequences_per_sample", (1,) * self.num_samples)
        # On another device they were checked before the move, and looking again would make the host wait.
        device = self.cu_segments.device.type
        if device == "cpu" or (self.segments is None and device != "meta"):
            object.__setattr__(self, "segments", _segments_of(self))
            object.__setattr__(self, "targets_per_sequence", _targets_per_sequence(self))

    @property
    def num_sequences(self) -> int:
        """Number of sequences of tokens; ``num_samples``, unless samples hold several."""
        return len(self.cu_seqlens) - 1

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
        fields = {name: change(value) for name, value in self.fields.items()}
        return dataclasses.replace(self, fields=fields, **changed)

    def field(self, name: str, user: str) -> torch.Tensor:
        """A field of one number for each token or sequence.

        Args:
            name: of the field.
            user: who needs it, for the message.

        Raises:
            UsageError: the micro-batch does not have it, or it is something else.
        """
        field = self.fields.get(name)
        if field is None:
            others = f"but {', '.join(self.fields)}" if self.fields else "nor any other"
            raise UsageError(
                f"{user}: the micro-batch has no field {name}, {others}; "
                "name it in pack_samples(..., fields=...), or in data.fields of the configuration; "
                "engine.balance takes what samples have as one number, or one for each of the input_ids "
                "(prompt included)"
            )
        if list(field.shape) not in ([self.num_sequences], list(self.labels.shape)):
            raise UsageError(
                f"{user}: the field {name} has shape {list(field.shape)}, but must have "
                f"{list(self.labels.shape)}, one number for each token, or {[self.num_sequences]}, one for "
                "each sequence"
            )
        return field

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Give every position the value of its sequence.

        Args:
            values: ``[num_sequences]``.

        Returns:
            ``[1, T]``; 0 in padding.
        """
        self._check("spread", values, [self.num_sequences])
        return torch.cat([values, values.new_zeros(1)])[self._sequence_of_position()][None]

    def sum_per_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Sum the values of each sequence's positions.

        Args:
            values: ``[1, T]``, aligned with the labels.

        Returns:
            ``[num_sequences]``.
        """
        self._check("sum_per_sequence", values, list(self.labels.shape))
        sums = values.new_zeros(self.num_sequences + 1)
        return sums.index_add(0, self._sequence_of_position(), values[0])[:-1]

    def unpack(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Cut a row into its sequences, the inverse of what :func:`pack_samples` does with fields.

        Args:
            values: ``[1, T, ...]``, aligned with the labels: what is found at position ``i`` belongs to the
                token behind it, as the log-probability of a label does.

        Returns:
            For each sequence ``[l, ...]``, aligned with its tokens; 0 for the first, which nothing predicts.
        """
        if values.shape[:2] != self.labels.shape:
            raise UsageError(
                f"MicroBatch.unpack: values of shape {list(values.shape)}, must begin with "
                f"{list(self.labels.shape)}"
            )
        boundaries = () if self.segments is None else self.segments.boundaries[: self.num_sequences + 1]
        pieces = [values[0, start:stop] for start, stop in itertools.pairwise(boundaries)]
        return [torch.cat([torch.zeros_like(piece[:1]), piece[:-1]]) for piece in pieces]

    def sample_of_sequence(self, sequence: int) -> int | None:
        """Where in ``sample_ids`` the sample of a sequence is; None for the padding behind the last one."""
        sample = bisect.bisect_right(list(itertools.accumulate(self.sequences_per_sample)), sequence)
        return sample if sample < self.num_samples else None

    def _sequence_of_position(self) -> torch.Tensor:
        """Int64 ``[T]``: which sequence each position is of; ``num_sequences`` in padding."""
        length, device = self.input_ids.shape[-1], self.cu_seqlens.device
        positions = torch.arange(length, dtype=self.cu_seqlens.dtype, device=device)
        return torch.searchsorted(self.cu_seqlens[1:], positions, right=True)

    def _check(self, name: str, values: torch.Tensor, shape: list[int]) -> None:
        if list(values.shape) != shape:
            raise UsageError(f"MicroBatch.{name}: values of shape {list(values.shape)}, must be {shape}")

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


def _targets_per_sequence(batch: MicroBatch) -> tuple[int, ...]:
    if batch.segments is None:
        return ()
    before = np.concatenate([[0], np.cumsum(batch.labels[0].cpu().numpy() != IGNORE_INDEX)])
    counts: list[int] = np.diff(before[list(batch.segments.boundaries[: batch.num_sequences + 1])]).tolist()
    return tuple(counts)


def _shorten(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:8]))}, ...]"
