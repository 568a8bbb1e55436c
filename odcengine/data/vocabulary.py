"""Token ids outside of a model's vocabulary, found on the host.

On the CPU they would be an index error without a name; on a GPU they end the process's context, and whatever
is asked of the device next fails.
"""

from __future__ import annotations

import bisect

import numpy as np
import numpy.typing as npt

from odcengine.data.batch import IGNORE_INDEX, MicroBatch, Sample
from odcengine.data.pack import sequences_of, tokens_and_targets
from odcengine.errors import UsageError


def check_sample(sample: Sample, name: str, vocab_size: int) -> None:
    """See that a model with so many token embeddings can read a sample, and learn what it is to learn.

    Args:
        sample: see :func:`~odcengine.data.pack_samples`.
        name: of the sample, for messages.
        vocab_size: rows of the model's embedding.

    Raises:
        UsageError: a token or label is outside of the vocabulary; names the sample and both numbers.
    """
    for which, sequence in sequences_of(sample, name):
        check_tokens(*tokens_and_targets(sequence, which), which, vocab_size)


def check_tokens(
    tokens: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], name: str, vocab_size: int
) -> None:
    """:func:`check_sample` for one sequence, from :func:`~odcengine.data.pack.tokens_and_targets`."""
    at = _first_outside(tokens, vocab_size)
    if at is not None:
        _refuse(
            f"{name} has the token id {tokens[at]}", vocab_size, "tokenise with the model's own tokenizer"
        )
    at = _first_outside(np.where(targets == IGNORE_INDEX, 0, targets), vocab_size)
    if at is not None:
        remedy = f"a token that is not to be learned has the label {IGNORE_INDEX}"
        _refuse(f"{name} has the label {targets[at]}", vocab_size, remedy)


def check_micro_batch(batch: MicroBatch, vocab_size: int) -> None:
    """:func:`check_sample` for what is packed; a batch that has left the host is not looked at."""
    if batch.input_ids.device.type != "cpu" or batch.segments is None:
        return
    tokens, targets = batch.input_ids[0].numpy(), batch.labels[0].numpy()
    for values in (tokens, np.where(targets == IGNORE_INDEX, 0, targets)):
        at = _first_outside(values, vocab_size)
        if at is None:
            continue
        number = bisect.bisect_right(batch.segments.boundaries, at) - 1
        sample = batch.sample_of_sequence(number)
        name = "the padding" if sample is None else f"sample {batch.sample_ids[sample]}"
        check_tokens(tokens[at : at + 1], targets[at : at + 1], name, vocab_size)


def _first_outside(values: npt.NDArray[np.int64], vocab_size: int) -> int | None:
    if values.min() >= 0 and values.max() < vocab_size:  # as a rule, and no memory is taken
        return None
    return int(np.flatnonzero((values < 0) | (values >= vocab_size))[0])


def _refuse(what: str, vocab_size: int, remedy: str) -> None:
    raise UsageError(f"{what}, but the model's vocabulary is 0 to {vocab_size - 1}; {remedy}")
