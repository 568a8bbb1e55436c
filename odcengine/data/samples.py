"""The samples of a data set as the loader uses them: which, how long they are, and micro-batches of them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from odcengine.data.batch import MicroBatch
from odcengine.data.finite import check_sample_is_finite
from odcengine.data.lengths import MapDataset, is_token_sample, measure, naming, refuse_text
from odcengine.data.pack import num_targets_of, pack_samples, truncate_sample
from odcengine.data.vocabulary import check_micro_batch
from odcengine.errors import ConfigError, UsageError

logger = logging.getLogger(__name__)

TOO_LONG = ("error", "truncate", "skip")
"""What can be done with samples longer than the limit."""


def hash_of_lengths(lengths: npt.NDArray[np.int64]) -> str:
    """16 hexadecimal digits that differ where lengths differ."""
    return hashlib.sha256(lengths.tobytes()).hexdigest()[:16]


class Samples:
    """Makes micro-batches of the samples with given indices. All arguments are those of the loader.

    Attributes:
        packs: whether samples are packed here, into :class:`~odcengine.data.MicroBatch`.
        knows_lengths: whether ``lengths`` are tokens, not just 1 each.
        lengths: int64, of each sample, after truncation.
        num_targets: int64, positions with a target of each sample, or None where unknown.
        sequences: tokens of each sequence and each sample's first one, where samples hold several, or None.
        squares: float64, sum of the squares of the lengths of each sample's sequences, or None.
        usable: indices of the samples that are not skipped.
        contents: differs where the lengths before any truncation differ, so the order of samples does not
            change with the limit.

    Args:
        dataset: map-style data set, not empty.
        max_length: limit of tokens in a sample; None for no limit.
        max_tokens: limit of tokens in a micro-batch; None for no limit.
        too_long: one of :data:`TOO_LONG`.
        length_fn: length of a sample, or None.
        collate_fn: makes a micro-batch from a list of samples, or None.
        pad_to_multiple_of: length of packed rows.
        fields: of the samples that packed micro-batches take along.
        vocab_size: tokens of the model; None where unknown.
        warn: say here how many samples are too long: one rank of a job does.

    Raises:
        ConfigError: a sample over the limit.
        UsageError: lengths that do not fit the data set, or samples that nobody has tokenised.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        max_length: int | None,
        max_tokens: int | None,
        too_long: str,
        length_fn: Callable[[Any], int] | None,
        collate_fn: Callable[[list[Any]], Any] | None,
        pad_to_multiple_of: int,
        fields: tuple[str, ...],
        vocab_size: int | None,
        warn: bool,
    ) -> None:
        self._dataset = dataset
        self._max_tokens = max_tokens
        self._collate_fn = collate_fn
        self._pad_to_multiple_of = pad_to_multiple_of
        self._fields = fields
        self._vocab_size = vocab_size
        self.packs = collate_fn is None and is_token_sample(dataset[0])
        measured = measure(dataset, length_fn, self.packs, vocab_size)
        self.lengths, self.num_targets = measured.lengths, measured.num_targets
        self.sequences, self.squares = measured.sequences, measured.squares
        self._longest_sequence = measured.longest_sequence
        self.contents = hash_of_lengths(self.lengths)
        self.knows_lengths = self.packs or length_fn is not None or hasattr(dataset, "lengths")
        if collate_fn is None and not self.knows_lengths:
            refuse_text(dataset[0])
        self._truncated: frozenset[int] = frozenset()
        self.usable = np.arange(len(self.lengths))
        limits = [limit for limit in (max_length, max_tokens) if limit is not None]
        if limits:
            self._handle_too_long(too_long, min(limits), warn=warn)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence in the samples that are used, after truncation."""
        return int(np.minimum(self.lengths, self._longest_sequence)[self.usable].max())

    def micro_batch(self, sample_ids: Sequence[int], stand_in: Sequence[int]) -> Any:
        """The micro-batch of some samples; a dummy for none.

        Args:
            sample_ids: data set indices.
            stand_in: the same, of the samples of a dummy that ``collate_fn`` makes.

        Raises:
            UsageError: a sample that cannot be read or used; names it.
        """
        return self._packed(sample_ids) if self.packs else self._collated(sample_ids, stand_in)

    def _packed(self, sample_ids: Sequence[int]) -> MicroBatch:
        batch = pack_samples(
            [self._read(index) for index in sample_ids],
            sample_ids=sample_ids,
            pad_to_multiple_of=self._pad_to_multiple_of,
            fields=self._fields,
        )
        if self._max_tokens is not None and batch.num_tokens > self._max_tokens:
            raise UsageError(
                f"samples {list(sample_ids)} have {batch.num_tokens} tokens together instead of "
                f"{self.lengths[list(sample_ids)].sum()}, more than the {self._max_tokens} of a "
                "micro-batch; correct the data set's attribute lengths, or length_fn"
            )
        if self._vocab_size is not None:
            check_micro_batch(batch, self._vocab_size)
        return batch

    def _collated(self, sample_ids: Sequence[int], stand_in: Sequence[int]) -> Any:
        samples = []
        for index in sample_ids or stand_in:
            samples.append(self._read(index))
            check_sample_is_finite(samples[-1], f"sample {index}")
        collate = self._collate_fn or torch.utils.data.default_collate
        with naming(f"samples {list(sample_ids)} cannot be put together"):
            return collate(samples)

    def _read(self, index: int) -> Any:
        with naming(f"sample {index} cannot be read"):
            sample = self._dataset[index]
        if index in self._truncated:
            with naming(f"sample {index} cannot be truncated"):
                return truncate_sample(sample, int(self.lengths[index]), self._fields)
        return sample

    def _handle_too_long(self, too_long: str, limit: int, *, warn: bool) -> None:
        over = np.flatnonzero(self.lengths > limit)
        if not len(over):
            return
        first = int(over[0])
        what = (
            f"{len(over)} of {len(self.lengths)} samples are longer than the limit of {limit} "
            f"tokens; the first is sample {first} with {self.lengths[first]} tokens"
        )
        if too_long == "error":
            raise ConfigError(
                f"data: {what}; raise the limit to {self.lengths.max()} "
                "(balance.max_tokens_per_micro_batch, and data.max_length if given), or set data.too_long to "
                "truncate or skip"
            )
        if warn:
            logger.warning("data: %s; too_long is %s", what, too_long)
        if too_long == "skip":
            self.usable = np.flatnonzero(self.lengths <= limit)
            if not len(self.usable):
                raise ConfigError(f"data: {what}, and nothing is left when they are skipped")
            return
        if not self.packs:
            raise ConfigError(
                f"data: {what}; only samples with input_ids that the loader packs itself can be truncated; "
                "choose error or skip, or truncate them in the data set"
            )
        self._truncated = frozenset(over.tolist())
        self.lengths = np.minimum(self.lengths, limit)
        if self.num_targets is not None:
            self.num_targets = self.num_targets.copy()
            for index in over.tolist():
                self.num_targets[index] = num_targets_of(self._read(index), index)
