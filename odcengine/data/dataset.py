"""Tokenised samples, in memory or memory-mapped from disk.

On disk a data set is a directory of two files:

``samples.arrow``    Arrow IPC file with a row a sample: ``input_ids`` (large_list<uint32>), ``loss_mask``
                     (large_list<uint8>, 1 where the token is to be learned) and ``num_targets`` (int64).
                     Where samples are groups of sequences (preference pairs), these follow each other in
                     ``input_ids``, and ``sequence_lengths`` (large_list<int64>) says where they end;
                     ``ref_logprobs`` (large_list<double>) has a number for each sequence, if they are known.
                     Not compressed, so that it is read where it lies. Any reader of Arrow opens it.
``meta.json``        format, version, totals, largest token id, size of the Arrow file in bytes, and where the
                     samples came from (``odc prepare`` says it; null otherwise)

It is written under a temporary name and renamed at the end, so an interrupted write leaves no half data set.
"""

from __future__ import annotations

import bisect
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

from odcengine.data.token_batch import (
    IntArray,
    TokenBatch,
    TokenSequence,
    arrow_batch,
    arrow_schema,
    check_sample,
    read_arrow_batch,
)
from odcengine.errors import ConfigError, UsageError

__all__ = ["HELD_OUT", "DatasetWriter", "TokenBatch", "TokenDataset", "check_sample", "is_dataset"]

_FORMAT = "odcengine-tokens"
_VERSION, _VERSION_OF_SEQUENCES = 2, 3  # the second has further columns, which the first's readers miss
HELD_OUT = "held_out"
_META, _SAMPLES = "meta.json", "samples.arrow"
_TOKENS_PER_RECORD_BATCH = 2**20  # of the Arrow file: few enough batches to list, small enough to hold
_SAMPLES_PER_RECORD_BATCH = 2**16


class TokenDataset:
    """A map-style data set of token sequences with loss masks.

    ``dataset[i]`` is ``{"input_ids": uint32 [l], "loss_mask": bool [l]}``; the tokens are a view of the file.
    Where samples are groups of sequences it is ``{"sequences": [...]}`` with such a mapping for each, which
    may have a number ``ref_logprobs`` beside.
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
        self.sequences: tuple[IntArray, IntArray] | None = None
        """Tokens of each sequence, int64 ``[num_sequences]``, and the number of each sample's first one and
        the end, int64 ``[num_samples + 1]``; None where each sample is one sequence."""
        if any(batch.starts is not None for batch in self._batches):
            counts = [np.diff(batch.first_sequences) for batch in self._batches]
            self.sequences = (
                np.concatenate([np.diff(batch.sequence_starts) for batch in self._batches]),
                np.cumsum(np.concatenate([[0], *counts])),
            )
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

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
        index %= len(self)
        which = bisect.bisect_right(self._firsts, index) - 1
        return self._batches[which].sample(index - self._firsts[which])

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
        checked = list(_checked(samples))
        return cls([_batch_of(checked)])

    @classmethod
    def write(cls, path: str | os.PathLike[str], samples: Iterable[Mapping[str, Any]]) -> TokenDataset:
        """Write samples to a directory, a batch at a time, and open it.

        An existing data set of that name is replaced; anything else is not touched.

        Args:
            path: the directory to make.
            samples: mappings with ``input_ids`` (1-D integers >= 0, at least one) and optionally
                ``loss_mask`` (same length) or ``labels`` (same length, equal to ``input_ids`` or -100).
                Without either, every token is to be learned. Or mappings with ``sequences``, a list of these
                that stay together, each of which may have a number ``ref_logprobs``.

        Returns:
            The data set as :meth:`open` gives it.

        Raises:
            ConfigError: pyarrow is not installed, or the directory cannot be made.
            UsageError: a sample that does not fit the above (named by its index), or a ``path`` that exists
                and is no data set.
        """
        with DatasetWriter(path) as writer:
            waiting: list[tuple[bool, list[TokenSequence]]] = []
            for sample in _checked(samples):
                waiting.append(sample)
                if len(waiting) == 256:
                    writer.add(_batch_of(waiting))
                    waiting = []
            writer.add(_batch_of(waiting))
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
        if meta.get("version") not in (_VERSION, _VERSION_OF_SEQUENCES):
            raise ConfigError(
                f"{path}: a data set of version {meta.get('version')}, but this odcengine reads versions "
                f"{_VERSION} and {_VERSION_OF_SEQUENCES}; prepare it again"
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
        # Behind a link, the data set is replaced and not the link.
        self._target = Path(os.path.realpath(self.path))
        self._temporary = _beside(self._target, "tmp")
        try:
            self._temporary.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be made: {error.strerror or error}") from error
        self.held_out_path = self._temporary / HELD_OUT
        """Where a second data set, :data:`HELD_OUT`, is written that gets its name with this one."""
        self._columns: tuple[str, ...] | None = None  # the first samples say which
        self._writer: Any = None
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
        if self._columns is None:
            self._columns = batch.columns
        elif batch.columns != self._columns:
            names = [", ".join(columns) or "tokens only" for columns in (batch.columns, self._columns)]
            raise UsageError(
                f"{self.path}: samples with {names[0]} follow samples with {names[1]}; a data set holds one "
                "kind of samples"
            )
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
        self._open().close()
        meta = {
            "format": _FORMAT,
            "version": _VERSION_OF_SEQUENCES if self._columns else _VERSION,
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
        batch = TokenBatch.join(self._pending)
        num_targets = batch.count_targets()
        self._open().write_batch(arrow_batch(self._arrow, batch, num_targets))
        self._num_tokens += len(batch.tokens)
        self._num_targets += int(num_targets.sum())
        self._max_token_id = max(self._max_token_id, int(batch.tokens.max()))
        self._pending, self._num_pending = [], (0, 0)

    def _open(self) -> Any:
        if self._writer is None:
            schema = arrow_schema(self._arrow, self._columns or ())
            self._writer = self._arrow.ipc.new_file(str(self._temporary / _SAMPLES), schema)
        return self._writer


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


def _map_samples(path: Path) -> tuple[list[TokenBatch], IntArray]:
    """The record batches of a file as views of its memory map, and the numbers of targets."""
    arrow = import_pyarrow()
    reader = arrow.ipc.open_file(arrow.memory_map(str(path)))
    if reader.schema != arrow_schema(arrow, reader.schema.names):
        raise ValueError(f"{path.name} has the columns {', '.join(map(str, reader.schema))}")
    batches, num_targets = [], [np.zeros(0, np.int64)]
    for index in range(reader.num_record_batches):
        try:
            batch, targets = read_arrow_batch(reader.get_batch(index))
        except ValueError as error:
            raise ValueError(f"record batch {index}: {error}") from error
        batches.append(batch)
        num_targets.append(targets)
    return batches, np.concatenate(num_targets)


def _batch_of(samples: Sequence[tuple[bool, list[TokenSequence]]]) -> TokenBatch:
    return TokenBatch.of_sequences(
        [sequences for _, sequences in samples], grouped=any(is_group for is_group, _ in samples)
    )


def _beside(path: Path, suffix: str) -> Path:
    """A new name in the same folder, hence on the same file system."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.{suffix}")


def _checked(samples: Iterable[Mapping[str, Any]]) -> Iterator[tuple[bool, list[TokenSequence]]]:
    """Sequences of each sample, checked, and whether it is a group of them."""
    grouped = None
    for index, sample in enumerate(samples):
        try:
            sequences = check_sample(sample)
        except UsageError as error:
            raise UsageError(f"sample {index}: {error}") from error
        is_group = sample.get("sequences") is not None
        grouped = is_group if grouped is None else grouped
        if is_group != grouped:
            raise UsageError(
                f"sample {index} has {'sequences' if is_group else 'no sequences'}, unlike those before; a "
                "data set holds one kind of samples"
            )
        yield is_group, sequences
