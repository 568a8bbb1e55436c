"""What the loader knows of every sample of a data set before it reads any: its length and its targets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from odcengine.data.batch import IGNORE_INDEX
from odcengine.data.pack import sequences_of, tokens_and_targets
from odcengine.data.vocabulary import check_tokens
from odcengine.errors import OdcError, UsageError


class MapDataset(Protocol):
    """What the loader needs of a data set: a length, and samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Errors of the user's code say of what they come: they become a UsageError with that name."""
    try:
        yield
    except OdcError:
        raise
    except Exception as error:
        raise UsageError(f"data: {what} ({type(error).__name__}: {error})") from error


def is_token_sample(sample: Any) -> bool:
    """Whether the loader packs such samples itself."""
    return isinstance(sample, Mapping) and ("input_ids" in sample or "sequences" in sample)


def refuse_text(sample: Any) -> None:
    """Refuse a sample that is text which nobody has tokenised: torch's collate would pass it on unseen.

    Raises:
        UsageError: it is a text, or has ``messages``, ``prompt`` or ``text`` as ``odc prepare`` reads them.
    """
    found = "is text" if isinstance(sample, str) else None
    if isinstance(sample, Mapping):
        texts = [name for name in ("prompt", "text") if isinstance(sample.get(name), str)]
        if isinstance(sample.get("messages"), list):
            texts.insert(0, "messages")
        found = f"has {texts[0]} and no input_ids" if texts else None
    if found is not None:
        raise UsageError(
            f"sample 0 {found}, but training reads tokens; make them with odc prepare FILE --tokenizer PATH "
            "--out DIR and give TokenDataset.open(DIR), or give a collate_fn of your own"
        )


class Measured(NamedTuple):
    """What is known of each sample, int64 ``[n]`` each."""

    lengths: npt.NDArray[np.int64]
    num_targets: npt.NDArray[np.int64] | None
    """Positions with a target; None where unknown."""
    sequences: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None
    """Tokens of each sequence, and the number of each sample's first one and the end, ``[n + 1]``; None where
    samples are not known to hold several."""

    @property
    def longest_sequence(self) -> npt.NDArray[np.int64]:
        """Tokens of the longest sequence of each sample."""
        if self.sequences is None:
            return self.lengths
        return np.maximum.reduceat(self.sequences[0], self.sequences[1][:-1])

    @property
    def squares(self) -> npt.NDArray[np.float64] | None:
        """Sum of the squares of the lengths of each sample's sequences; None where each is one sequence."""
        if self.sequences is None:
            return None
        return np.add.reduceat(self.sequences[0].astype(np.float64) ** 2, self.sequences[1][:-1])


def measure(
    dataset: MapDataset,
    length_fn: Callable[[Any], int] | None,
    packs: bool,
    vocab_size: int | None = None,
) -> Measured:
    """Length of each sample, and its number of targets where that can be known.

    Args:
        dataset: the data set.
        length_fn: length of a sample, if the user gave one.
        packs: whether samples are packed by the loader, so that their tokens can be counted.
        vocab_size: tokens of the model, which all that are counted have to be of; None where unknown.

    Raises:
        UsageError: a sample that cannot be read, a length below 1, or not one number for each sample.
    """
    lengths: Any = getattr(dataset, "lengths", None)
    num_targets: Any = getattr(dataset, "num_targets", None)
    sequences = getattr(dataset, "sequences", None) if packs else None
    if length_fn is not None:
        lengths = []
        for index in range(len(dataset)):
            with naming(f"length_fn fails on sample {index}"):
                lengths.append(length_fn(dataset[index]))
    elif lengths is None and packs:
        lengths, counted, of_sequences, firsts = [], [], list[int](), [0]
        for index in range(len(dataset)):
            with naming(f"sample {index} cannot be read"):
                sample = dataset[index]
            parts, targets = [], 0
            for name, sequence in sequences_of(sample, f"sample {index}"):
                tokens, labels = tokens_and_targets(sequence, name)
                if vocab_size is not None:
                    check_tokens(tokens, labels, name, vocab_size)
                parts.append(len(tokens))
                targets += int((labels != IGNORE_INDEX).sum())
            counted.append(targets)
            lengths.append(sum(parts))
            of_sequences += parts
            firsts.append(len(of_sequences))
        num_targets = counted if num_targets is None else num_targets
        if len(of_sequences) > len(lengths):
            sequences = np.asarray(of_sequences, dtype=np.int64), np.asarray(firsts, dtype=np.int64)
    elif lengths is None:
        lengths = np.ones(len(dataset), dtype=np.int64)
    lengths = _one_per_sample(dataset, "lengths", lengths)
    if lengths.min() < 1:
        index = int(np.argmin(lengths))
        raise UsageError(f"sample {index} has length {lengths[index]}, but must have at least 1")
    return Measured(
        lengths,
        None if num_targets is None else _one_per_sample(dataset, "num_targets", num_targets),
        sequences,
    )


def _one_per_sample(dataset: MapDataset, name: str, values: Any) -> npt.NDArray[np.int64]:
    array = np.asarray(values, dtype=np.int64)
    if array.shape != (len(dataset),):
        raise UsageError(f"the data set has {len(dataset)} samples, but {name} of shape {list(array.shape)}")
    return array
