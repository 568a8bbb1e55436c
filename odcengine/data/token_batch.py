"""Samples of tokens one after the other, and their columns in an Arrow file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from odcengine.errors import UsageError

TOKEN = np.dtype(np.uint32)
IntArray = npt.NDArray[np.int64]


class TokenSequence(NamedTuple):
    """One sequence of tokens.

    Attributes:
        tokens: uint32 ``[l]``.
        loss_mask: uint8 ``[l]``, 1 where the token is to be learned.
        ref_logprob: log-probability of the tokens to be learned, by a reference model; None where unknown.
    """

    tokens: npt.NDArray[np.uint32]
    loss_mask: npt.NDArray[np.uint8]
    ref_logprob: float | None = None


@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """Samples one after the other: what is written at once, and what a piece of a data set is made of.

    A sample is one sequence, or several that stay together (the answers of a preference pair).

    Args:
        tokens: uint32 ``[n]``, the tokens of all samples.
        loss_mask: uint8 ``[n]``, 1 where the token is to be learned.
        offsets: int64 ``[num_samples + 1]``, where each sample starts; from 0 to ``n``.
        starts: int64 ``[num_sequences + 1]``, where each sequence starts, ``offsets`` among them; None where
            each sample is one sequence.
        ref_logprobs: float64 ``[num_sequences]``, as in :class:`TokenSequence`; None where unknown.

    Raises:
        UsageError: arrays that do not fit together, or a sample without tokens.
    """

    tokens: npt.NDArray[np.uint32]
    loss_mask: npt.NDArray[np.uint8]
    offsets: IntArray
    starts: IntArray | None = None
    ref_logprobs: npt.NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        tokens, mask, offsets = self.tokens, self.loss_mask, self.offsets
        if not len(offsets) or offsets[0] != 0 or not len(tokens) == len(mask) == offsets[-1]:
            raise UsageError(
                f"TokenBatch: {len(tokens)} tokens, {len(mask)} mask entries and offsets {offsets[:1]}..."
                f"{offsets[-1:]} do not fit together; offsets run from 0 to the number of tokens"
            )
        if (self.lengths < 1).any():
            raise UsageError(f"TokenBatch: sample {int(np.argmin(self.lengths))} has no tokens")
        if self.starts is not None and (
            (np.diff(self.starts) < 1).any() or not np.isin(offsets, self.starts).all()
        ):
            raise UsageError("TokenBatch: a sequence has no tokens, or reaches from one sample into another")
        if self.ref_logprobs is not None and len(self.ref_logprobs) != len(self.sequence_starts) - 1:
            raise UsageError(
                f"TokenBatch: {len(self.ref_logprobs)} ref_logprobs for {len(self.sequence_starts) - 1} "
                "sequences"
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IntArray:
        """Tokens of each sample, int64 ``[num_samples]``."""
        return np.diff(self.offsets)

    @property
    def sequence_starts(self) -> IntArray:
        """Where each sequence starts, int64 ``[num_sequences + 1]``."""
        return self.offsets if self.starts is None else self.starts

    @property
    def first_sequences(self) -> IntArray:
        """Number of each sample's first sequence, int64 ``[num_samples + 1]``."""
        return np.searchsorted(self.sequence_starts, self.offsets)

    @property
    def columns(self) -> tuple[str, ...]:
        """Which columns of :func:`arrow_schema` it has beside those that every one has."""
        return tuple(
            name
            for name, values in (("sequence_lengths", self.starts), ("ref_logprobs", self.ref_logprobs))
            if values is not None
        )

    def count_targets(self) -> IntArray:
        """Tokens to be learned of each sample, without the first of a sequence; int64 ``[num_samples]``."""
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        learned = (self.loss_mask != 0).astype(np.int64)
        learned[self.sequence_starts[:-1]] = 0
        counts: IntArray = np.add.reduceat(learned, self.offsets[:-1])
        return counts

    def sample(self, row: int) -> dict[str, Any]:
        """A sample as :func:`~odcengine.data.pack_samples` takes it; its tokens are a view."""
        if self.starts is None and self.ref_logprobs is None:
            return self._sequence(slice(int(self.offsets[row]), int(self.offsets[row + 1])))
        starts = self.sequence_starts
        first, end = np.searchsorted(starts, self.offsets[row : row + 2]).tolist()
        sequences = []
        for number in range(first, end):
            sequence = self._sequence(slice(int(starts[number]), int(starts[number + 1])))
            if self.ref_logprobs is not None:
                sequence["ref_logprobs"] = float(self.ref_logprobs[number])
            sequences.append(sequence)
        return {"sequences": sequences} if self.starts is not None else sequences[0]

    def _sequence(self, piece: slice) -> dict[str, Any]:
        return {"input_ids": self.tokens[piece], "loss_mask": self.loss_mask[piece] != 0}

    def take(self, chosen: npt.NDArray[np.bool_]) -> TokenBatch:
        """Some of the samples.

        Args:
            chosen: bool ``[num_samples]``.
        """
        of_tokens = np.repeat(chosen, self.lengths)
        of_sequences = np.repeat(chosen, np.diff(self.first_sequences))
        starts = self.starts
        return TokenBatch(
            self.tokens[of_tokens],
            self.loss_mask[of_tokens],
            _ends(self.lengths[chosen]),
            None if starts is None else _ends(np.diff(starts)[of_sequences]),
            None if self.ref_logprobs is None else self.ref_logprobs[of_sequences],
        )

    @classmethod
    def of(cls, pairs: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]) -> TokenBatch:
        """A batch of samples given as pairs of tokens (uint32) and loss mask (uint8)."""
        return cls.of_sequences([[TokenSequence(*pair)] for pair in pairs])

    @classmethod
    def of_sequences(cls, samples: Sequence[Sequence[TokenSequence]], *, grouped: bool = False) -> TokenBatch:
        """A batch of samples given as their sequences.

        Args:
            samples: of each its sequences.
            grouped: samples are groups of sequences, also where each has one.
        """
        sequences = [sequence for sample in samples for sequence in sample]
        known = [s.ref_logprob for s in sequences if s.ref_logprob is not None]
        if known and len(known) < len(sequences):
            raise UsageError("ref_logprobs are known of some sequences only; give them for all, or for none")
        return cls(
            np.concatenate([np.zeros(0, TOKEN), *(sequence.tokens for sequence in sequences)]),
            np.concatenate([np.zeros(0, np.uint8), *(sequence.loss_mask for sequence in sequences)]),
            _ends([sum(len(sequence.tokens) for sequence in sample) for sample in samples]),
            _ends([len(sequence.tokens) for sequence in sequences]) if grouped else None,
            np.array(known, dtype=np.float64) if known else None,
        )

    @classmethod
    def join(cls, batches: Sequence[TokenBatch]) -> TokenBatch:
        """The samples of several batches, of the same columns, in one."""
        if len(batches) == 1:
            return batches[0]
        refs = [batch.ref_logprobs for batch in batches if batch.ref_logprobs is not None]
        return cls(
            np.concatenate([np.zeros(0, TOKEN), *(batch.tokens for batch in batches)]),
            np.concatenate([np.zeros(0, np.uint8), *(batch.loss_mask for batch in batches)]),
            _ends(np.concatenate([np.zeros(0, np.int64), *(batch.lengths for batch in batches)])),
            _ends(np.concatenate([np.diff(batch.sequence_starts) for batch in batches]))
            if batches and batches[0].starts is not None
            else None,
            np.concatenate(refs) if refs else None,
        )


def _ends(lengths: npt.ArrayLike) -> IntArray:
    """Where what has these lengths starts, one after the other, and the end."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(lengths, dtype=np.int64))])


# ---- columns of Arrow ----------------------------------------------------------------------------------


def arrow_schema(arrow: Any, columns: Sequence[str] = ()) -> Any:
    """The schema of a file, with ``columns`` of :attr:`TokenBatch.columns`."""
    optional = {
        "sequence_lengths": arrow.large_list(arrow.int64()),
        "ref_logprobs": arrow.large_list(arrow.float64()),
    }
    return arrow.schema(
        [
            ("input_ids", arrow.large_list(arrow.uint32())),
            ("loss_mask", arrow.large_list(arrow.uint8())),
            ("num_targets", arrow.int64()),
            *((name, optional[name]) for name in optional if name in columns),
        ]
    )


def arrow_batch(arrow: Any, batch: TokenBatch, num_targets: IntArray) -> Any:
    """A batch as a record batch of :func:`arrow_schema`."""
    offsets = arrow.array(batch.offsets)
    values = [
        arrow.LargeListArray.from_arrays(offsets, arrow.array(batch.tokens)),
        arrow.LargeListArray.from_arrays(offsets, arrow.array(batch.loss_mask)),
        arrow.array(num_targets),
    ]
    of_sequences = {"sequence_lengths": np.diff(batch.sequence_starts), "ref_logprobs": batch.ref_logprobs}
    sequences = arrow.array(batch.first_sequences) if batch.columns else None
    values += [
        arrow.LargeListArray.from_arrays(sequences, arrow.array(of_sequences[name])) for name in batch.columns
    ]
    return arrow.record_batch(values, schema=arrow_schema(arrow, batch.columns))


def read_arrow_batch(record_batch: Any) -> tuple[TokenBatch, IntArray]:
    """A batch as views of a record batch of :func:`arrow_schema`, and the numbers of targets.

    Raises:
        ValueError: columns that do not fit together.
    """
    columns = dict(zip(record_batch.schema.names, record_batch.columns, strict=True))
    tokens, mask = columns["input_ids"], columns["loss_mask"]
    offsets = _view(tokens.offsets, np.int64)
    if not np.array_equal(offsets, _view(mask.offsets, np.int64)):
        raise ValueError("input_ids and loss_mask have different lengths")
    starts = refs = None
    if "sequence_lengths" in columns:
        starts = _ends(_view(columns["sequence_lengths"].values, np.int64))
    if "ref_logprobs" in columns:
        refs = _view(columns["ref_logprobs"].values, np.float64)
    batch = TokenBatch(_view(tokens.values, np.uint32), _view(mask.values, np.uint8), offsets, starts, refs)
    return batch, _view(columns["num_targets"], np.int64)


def _view(column: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A column's memory. ``to_numpy`` gives the same, but imports pandas where there is one, on each rank."""
    if column.null_count:
        raise ValueError(f"{column.null_count} of {len(column)} values are missing")
    if not len(column):
        return np.zeros(0, dtype)
    return np.frombuffer(column.buffers()[1], dtype)[column.offset : column.offset + len(column)]


# ---- samples of users ------------------------------------------------------------------------------------


def check_sample(sample: Mapping[str, Any]) -> list[TokenSequence]:
    """The sequences of a sample, one as a rule.

    Args:
        sample: as :meth:`TokenDataset.write` takes it.

    Raises:
        UsageError: tokens, mask, labels or log-probabilities that cannot be.
    """
    if sample.get("sequences") is None:
        return [_check_sequence(sample)]  # ref_logprobs of single sequences are nobody's here
    sequences = sample["sequences"]
    if not isinstance(sequences, Sequence) or not sequences:
        raise UsageError(f"sequences is {str(sequences)[:60]}, but must be a list of mappings with input_ids")
    found = []
    for number, sequence in enumerate(sequences):
        if not isinstance(sequence, Mapping) or sequence.get("input_ids") is None:
            raise UsageError(f"sequence {number} is a {type(sequence).__name__} without input_ids")
        try:
            found.append(_check_sequence(sequence)._replace(ref_logprob=_check_reference(sequence)))
        except UsageError as error:
            raise UsageError(f"sequence {number}: {error}") from error
    return found


def check_unpadded(sample: Mapping[str, Any], which: str = "") -> None:
    """Refuse a sequence with padding: it would be computed, balanced and, without labels, learned.

    Args:
        sample: the sequence.
        which: its name and a colon, for messages.

    Raises:
        UsageError: its ``attention_mask`` is not all ones.
    """
    if (mask := sample.get("attention_mask")) is None:
        return
    padding = np.asarray(mask) == 0
    if padding.any():
        raise UsageError(
            f"{which}its attention_mask has {int(padding.sum())} zeros of {padding.size}, so it is padded; "
            "samples are packed without padding. Tokenize with padding=False, or cut input_ids and labels to "
            "where the mask is 1"
        )


def _check_sequence(sample: Mapping[str, Any]) -> TokenSequence:
    tokens = np.asarray(sample["input_ids"])
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        raise UsageError(
            f"input_ids has shape {list(tokens.shape)} and type {tokens.dtype}, but must be 1-D integers, at "
            "least one"
        )
    check_unpadded(sample)
    if tokens.min() < 0 or tokens.max() > np.iinfo(TOKEN).max:
        raise UsageError(f"token ids run from {tokens.min()} to {tokens.max()}; not storable")
    if sample.get("labels") is not None:
        labels = np.asarray(sample["labels"])
        if labels.shape != tokens.shape or ((labels != -100) & (labels != tokens)).any():
            raise UsageError("labels must have the shape of input_ids and hold the same token or -100")
        mask = labels != -100
    elif sample.get("loss_mask") is not None:
        mask = np.asarray(sample["loss_mask"]) != 0
        if mask.shape != tokens.shape:
            raise UsageError(
                f"loss_mask has shape {list(mask.shape)}, but input_ids has {list(tokens.shape)}"
            )
    else:
        mask = np.ones(len(tokens), dtype=bool)
    return TokenSequence(tokens.astype(TOKEN), mask.astype(np.uint8))


def _check_reference(sequence: Mapping[str, Any]) -> float | None:
    value = sequence.get("ref_logprobs")
    if value is None:
        return None
    if not isinstance(value, (int, float, np.number)) or not np.isfinite(value):
        raise UsageError(
            f"ref_logprobs is {str(value)[:60]}, but must be one number: the log-probability of the tokens "
            "that are to be learned"
        )
    return float(value)
