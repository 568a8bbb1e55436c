"""Tokenised samples, in memory or memory-mapped from disk.

On disk a data set is a directory of two files:

``samples.arrow``    Arrow IPC file with a row a sample: ``input_ids`` (large_list<uint32>), ``loss_mask``
                     (large_list<uint8>, 1 where the token is to be learned) and ``num_targets`` (int64).
                     Not compressed, so that it is read where it lies. Any reader of Arrow opens it.
``meta.json``        format, version, totals, largest token id, size of the Arrow file in bytes, and where the
                     samples came from (``odc prepare`` says it; null otherwise)

It is written under a temporary name and renamed at the end, so an interrupted write leaves no half data set.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from odcengine.errors import ConfigError, UsageError

_FORMAT = "odcengine-tokens"
_VERSION = 2
HELD_OUT = "held_out"
_META, _SAMPLES = "meta.json", "samples.arrow"
_TOKENS_PER_RECORD_BATCH = 2**20  # of the Arrow file: few enough batches to list, small enough to hold
_SAMPLES_PER_RECORD_BATCH = 2**16
_TOKEN = np.dtype(np.uint32)


@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """Samples one after the other: what is written at once, and what a piece of a data set is made of.

    Args:
        tokens: uint32 ``[n]``, the tokens of all samples.
        loss_mask: uint8 ``[n]``, 1 where the token is to be learned.
        offsets: int64 ``[num_samples + 1]``, where each sample starts; from 0 to ``n``.

    Raises:
        UsageError: arrays that do not fit together, or a sample without tokens.
    """

    tokens: npt.NDArray[np.uint32]
    loss_mask: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        tokens, mask, offsets = self.tokens, self.loss_mask, self.offsets
        if not len(offsets) or offsets[0] != 0 or not len(tokens) == len(mask) == offsets[-1]:
            raise UsageError(
                f"TokenBatch: {len(tokens)} tokens, {len(mask)} mask entries and offsets {offsets[:1]}..."
                f"{offsets[-1:]} do not fit together; offsets run from 0 to the number of tokens"
            )
        if (self.lengths < 1).any():
            raise UsageError(f"TokenBatch: sample {int(np.argmin(self.lengths))} has no tokens")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample, int64 ``[num_samples]``."""
        return np.diff(self.offsets)

    def count_targets(self) -> npt.NDArray[np.int64]:
        """Tokens to be learned of each sample, without its first token; int64 ``[num_samples]``."""
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        learned = (self.loss_mask != 0).astype(np.int64)
        counts: npt.NDArray[np.int64] = (
            np.add.reduceat(learned, self.offsets[:-1]) - learned[self.offsets[:-1]]
        )
        return counts

    def take(self, chosen: npt.NDArray[np.bool_]) -> TokenBatch:
        """Some of the samples.

        Args:
            chosen: bool ``[num_samples]``.
        """
        of_tokens = np.repeat(chosen, self.lengths)
        ends = np.cumsum(self.lengths[chosen])
        return TokenBatch(self.tokens[of_tokens], self.loss_mask[of_tokens], np.concatenate([[0], ends]))

    @classmethod
    def of(cls, pairs: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]) -> TokenBatch:
        """A batch of samples given as pairs of tokens (uint32) and loss mask (uint8)."""
        return cls(
            np.concatenate([np.zeros(0, _TOKEN), *(tokens for tokens, _ in pairs)]),
            np.concatenate([np.zeros(0, np.uint8), *(mask for _, mask in pairs)]),
            np.cumsum([0, *(len(tokens) for tokens, _ in pairs)], dtype=np.int64),
        )

    @classmethod
    def join(cls, batches: Sequence[TokenBatch]) -> TokenBatch:
        """The samples of several batches in one."""
        if len(batches) == 1:
            return batches[0]
        lengths = [np.zeros(1, np.int64), *(batch.lengths for batch in batches)]
        return cls(
            np.concatenate([np.zeros(0, _TOKEN), *(batch.tokens for batch in batches)]),
            np.concatenate([np.zeros(0, np.uint8), *(batch.loss_mask for batch in batches)]),
            np.cumsum(np.concatenate(lengths)),
        )


class TokenDataset:
    """A map-style data set of token sequences with loss masks.

    ``dataset[i]`` is ``{"input_ids": uint32 [l], "loss_mask": bool [l]}``; the tokens are a view of the file.
    A target is a token that is to be learned and that another token of the same sample precedes.

    Args:
        batches: the samples; :meth:`open`, :meth:`write` and :meth:`from_samples` make them.
        num_targets: int64 ``[num_samples]``, as counted; counted here if None.
        metadata: what ``meta.json`` says, where there is one.
        path: the directory that it was opened from.
    """

    def __init__(
        self,
        batches: Sequence[TokenBatch],
        num_targets: npt.NDArray[np.int64] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        path: Path | None = None,
    ) -> None:
        none = np.zeros(0, dtype=np.int64)
        self._batches = tuple(batches)
        self._firsts = np.cumsum([0, *map(len, self._batches)]).tolist()
        self.lengths: npt.NDArray[np.int64] = np.concatenate([none, *(b.lengths for b in self._batches)])
        """Tokens of each sample, int64 ``[num_samples]``."""
        self.num_targets: npt.NDArray[np.int64] = (
            np.concatenate([none, *(b.count_targets() for b in self._batches)])
            if num_targets is None
            else num_targets
        )
        """Positions with a target of each sample, int64 ``[num_samples]``."""
        self.metadata: dict[str, Any] = dict(metadata or {})
        """What ``meta.json`` says; empty in memory."""
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        # What lies on disk is opened again by a worker process, not sent to it.
        if self._path is not None:
            return TokenDataset.open, (self._path.absolute(),)
        return TokenDataset, (self._batches, self.num_targets)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[Any]]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
        index %= len(self)
        which = bisect.bisect_right(self._firsts, index) - 1
        batch, row = self._batches[which], index - self._firsts[which]
        piece = slice(int(batch.offsets[row]), int(batch.offsets[row + 1]))
        return {"input_ids": batch.tokens[piece], "loss_mask": batch.loss_mask[piece] != 0}

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.lengths.sum())

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that a model with so many token embeddings can read every sample.

        Args:
            vocab_size: rows of the model's embedding.

        Raises:
            ConfigError: a token id is outside the vocabulary; names the sample and both numbers.
        """
        largest = self.metadata.get("max_token_id")
        if isinstance(largest, int) and largest < vocab_size:
            return  # known from writing: the file need not be read
        for first, batch in zip(self._firsts, self._batches, strict=False):
            outside = np.flatnonzero(batch.tokens >= vocab_size)
            if len(outside):
                sample = first + int(np.searchsorted(batch.offsets, outside[0], side="right")) - 1
                raise ConfigError(
                    f"data: sample {sample} has the token id {int(batch.tokens[outside[0]])}, but the "
                    f"model's vocabulary ends at {vocab_size - 1}; tokenise with the model's own tokenizer"
                )

    @classmethod
    def from_samples(cls, samples: Iterable[Mapping[str, Any]]) -> TokenDataset:
        """A data set in memory.

        Args:
            samples: as :meth:`write` takes them.
        """
        return cls([TokenBatch.of(list(_checked(samples)))])

    @classmethod
    def write(cls, path: str | os.PathLike[str], samples: Iterable[Mapping[str, Any]]) -> TokenDataset:
        """Write samples to a directory, a batch at a time, and open it.

        An existing data set of that name is replaced; anything else is not touched.

        Args:
            path: the directory to make.
            samples: mappings with ``input_ids`` (1-D integers >= 0, at least one) and optionally
                ``loss_mask`` (same length) or ``labels`` (same length, equal to ``input_ids`` or -100).
                Without either, every token is to be learned.

        Returns:
            The data set as :meth:`open` gives it.

        Raises:
            ConfigError: pyarrow is not installed, or the directory cannot be made.
            UsageError: a sample that does not fit the above (named by its index), or a ``path`` that exists
                and is no data set.
        """
        with DatasetWriter(path) as writer:
            pairs: list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]] = []
            for pair in _checked(samples):
                pairs.append(pair)
                if len(pairs) == 256:
                    writer.add(TokenBatch.of(pairs))
                    pairs = []
            writer.add(TokenBatch.of(pairs))
            writer.finish()
        return cls.open(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TokenDataset:
        """Open a directory that :meth:`write` or ``odc prepare`` made.

        Samples stay on disk and are mapped into memory; only their lengths and numbers of targets are read.

        Raises:
            ConfigError: no such directory, another format or version, damaged files, or no pyarrow.
        """
        path = Path(path)
        if hint := _raw_data(path):
            raise ConfigError(f"{path}: {hint}")
        try:
            meta = json.loads((path / _META).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path}: not a data set of odcengine ({error}; looked in {path.absolute()}); make one with "
                "odc prepare"
            ) from error
        if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
            raise ConfigError(f"{path}: not a data set of odcengine (meta.json is not of format {_FORMAT})")
        if meta.get("version") != _VERSION:
            raise ConfigError(
                f"{path}: a data set of version {meta.get('version')}, but this odcengine reads version "
                f"{_VERSION}; prepare it again"
            )
        try:
            size = (path / _SAMPLES).stat().st_size
            if size != meta["num_bytes"]:
                raise ValueError(f"{_SAMPLES} has {size} bytes instead of {meta['num_bytes']}")
            batches, num_targets = _map_samples(path / _SAMPLES)
            dataset = cls(batches, num_targets, metadata=meta, path=path)
            found = {"num_samples": len(dataset), "num_tokens": dataset.num_tokens}
            wrong = [
                f"{value} {name} instead of {meta[name]}"
                for name, value in found.items()
                if value != meta[name]
            ]
            if wrong:
                raise ValueError(f"{_SAMPLES} has {' and '.join(wrong)}")
        except (OSError, KeyError, TypeError, ValueError, UsageError) as error:
            raise ConfigError(f"{path}: damaged data set ({error}); prepare it again") from error
        return dataset


class DatasetWriter:
    """Writes a data set batch by batch; a context manager that leaves nothing behind unless it finishes.

    The same batches in the same order give the same bytes.

    Args:
        path: the directory to make. An existing data set of that name is replaced at the end.

    Raises:
        ConfigError: pyarrow is not installed, or the directory cannot be made.
        UsageError: ``path`` exists and is no data set.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if os.path.lexists(self.path) and not is_dataset(self.path):
            raise UsageError(f"{self.path} exists and is no data set of odcengine; choose another name")
        arrow = import_pyarrow()
        self._arrow = arrow
        self._schema = _schema(arrow)
        # Behind a link, the data set is replaced and not the link.
        self._target = Path(os.path.realpath(self.path))
        self._temporary = _beside(self._target, "tmp")
        try:
            self._temporary.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be made: {error.strerror or error}") from error
        self.held_out_path = self._temporary / HELD_OUT
        """Where a second data set, :data:`HELD_OUT`, is written that gets its name with this one."""
        self._writer = arrow.ipc.new_file(str(self._temporary / _SAMPLES), self._schema)
        self._pending: list[TokenBatch] = []
        self._num_pending = (0, 0)
        self.num_samples = 0
        """Samples written so far."""
        self._num_tokens = self._num_targets = 0
        self._max_token_id = -1

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)  # renamed already if it was finished

    def add(self, batch: TokenBatch) -> None:
        """Append samples."""
        if not len(batch):
            return
        self._pending.append(batch)
        self.num_samples += len(batch)
        samples, tokens = self._num_pending
        self._num_pending = samples + len(batch), tokens + len(batch.tokens)
        if samples >= _SAMPLES_PER_RECORD_BATCH or self._num_pending[1] >= _TOKENS_PER_RECORD_BATCH:
            self._flush()

    def finish(self, source: Mapping[str, Any] | None = None) -> None:
        """Complete the files and give them their name.

        Args:
            source: where the samples came from, for ``meta.json``; what JSON can hold.
        """
        self._flush()
        self._writer.close()
        meta = {
            "format": _FORMAT,
            "version": _VERSION,
            "num_samples": self.num_samples,
            "num_tokens": self._num_tokens,
            "num_targets": self._num_targets,
            "max_token_id": self._max_token_id,
            "num_bytes": (self._temporary / _SAMPLES).stat().st_size,
            "source": source,
        }
        (self._temporary / _META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        old = None
        if self._target.exists():
            old = _beside(self._target, "old")
            self._target.rename(old)
        self._temporary.rename(self._target)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def _flush(self) -> None:
        if not self._pending:
            return
        batch, arrow = TokenBatch.join(self._pending), self._arrow
        num_targets = batch.count_targets()
        offsets = arrow.array(batch.offsets)
        columns = [
            arrow.LargeListArray.from_arrays(offsets, arrow.array(batch.tokens)),
            arrow.LargeListArray.from_arrays(offsets, arrow.array(batch.loss_mask)),
            arrow.array(num_targets),
        ]
        self._writer.write_batch(arrow.record_batch(columns, schema=self._schema))
        self._num_tokens += len(batch.tokens)
        self._num_targets += int(num_targets.sum())
        self._max_token_id = max(self._max_token_id, int(batch.tokens.max()))
        self._pending, self._num_pending = [], (0, 0)


def is_dataset(path: Path) -> bool:
    """Whether a directory is a data set of odcengine, of any version."""
    try:
        meta = json.loads((path / _META).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(meta, dict) and meta.get("format") == _FORMAT


def _raw_data(path: Path) -> str | None:
    """What to do where a path names raw data instead of tokens; None where it does not look like that."""
    if str(path).startswith("hf:"):
        what = "a data set of the Hugging Face hub"
    elif path.is_file():
        what = "a file"
    elif any((path / name).exists() for name in ("state.json", "dataset_dict.json", "dataset_info.json")):
        what = "a data set of Hugging Face"
    elif not (path / _META).exists() and any((*path.glob("*.parquet"), *path.glob("*/*.parquet"))):
        what = "a directory of Parquet files"
    else:
        return None
    return (
        f"it is {what}, but training reads tokens; make them once, on one node, with "
        f"odc prepare {path} --tokenizer PATH --out DIR, and name DIR here"
    )


def import_pyarrow() -> Any:
    """The module pyarrow.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise ConfigError(
            f"data sets on disk need pyarrow, a requirement of odcengine that is missing here ({error}); "
            "pip install 'pyarrow>=16'"
        ) from error
    return pyarrow


def _schema(arrow: Any) -> Any:
    return arrow.schema(
        [
            ("input_ids", arrow.large_list(arrow.uint32())),
            ("loss_mask", arrow.large_list(arrow.uint8())),
            ("num_targets", arrow.int64()),
        ]
    )


def _map_samples(path: Path) -> tuple[list[TokenBatch], npt.NDArray[np.int64]]:
    """The record batches of a file as views of its memory map, and the numbers of targets."""
    arrow = import_pyarrow()
    reader = arrow.ipc.open_file(arrow.memory_map(str(path)))
    if reader.schema != _schema(arrow):
        raise ValueError(f"{path.name} has the columns {', '.join(map(str, reader.schema))}")
    batches, num_targets = [], [np.zeros(0, np.int64)]
    for index in range(reader.num_record_batches):
        tokens, mask, targets = reader.get_batch(index).columns
        offsets = _view(tokens.offsets, np.int64)
        if not np.array_equal(offsets, _view(mask.offsets, np.int64)):
            raise ValueError(f"record batch {index}: input_ids and loss_mask have different lengths")
        batches.append(TokenBatch(_view(tokens.values, np.uint32), _view(mask.values, np.uint8), offsets))
        num_targets.append(_view(targets, np.int64))
    return batches, np.concatenate(num_targets)


def _view(column: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A column's memory. ``to_numpy`` gives the same, but imports pandas where there is one, on each rank."""
    if column.null_count:
        raise ValueError(f"{column.null_count} of {len(column)} values are missing")
    if not len(column):
        return np.zeros(0, dtype)
    return np.frombuffer(column.buffers()[1], dtype)[column.offset : column.offset + len(column)]


def _beside(path: Path, suffix: str) -> Path:
    """A new name in the same folder, hence on the same file system."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.{suffix}")


def _checked(
    samples: Iterable[Mapping[str, Any]],
) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]]:
    """Tokens and loss mask of each sample, checked."""
    for index, sample in enumerate(samples):
        try:
            yield check_sample(sample)
        except UsageError as error:
            raise UsageError(f"sample {index}: {error}") from error


def check_sample(sample: Mapping[str, Any]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
    """Tokens and loss mask of a sample.

    Args:
        sample: as :meth:`TokenDataset.write` takes it.

    Raises:
        UsageError: tokens, mask or labels that cannot be.
    """
    tokens = np.asarray(sample["input_ids"])
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        raise UsageError(
            f"input_ids has shape {list(tokens.shape)} and type {tokens.dtype}, but must be 1-D integers, at "
            "least one"
        )
    if tokens.min() < 0 or tokens.max() > np.iinfo(_TOKEN).max:
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
    return tokens.astype(_TOKEN), mask.astype(np.uint8)
