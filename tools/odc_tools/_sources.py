"""Where raw records come from: JSONL files, Parquet files and Hugging Face data sets, cut into chunks.

How a source is cut depends on the source only, so the result does not depend on the number of workers.
Chunks hold raw lines, rows or row numbers; parsing is the workers' task.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import json
import zlib
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from odcengine.data.rendering import Record
from odcengine.errors import ConfigError

RECORDS_PER_CHUNK = 256
BYTES_PER_CHUNK = 2**20
_BYTES_PER_ROW = 2**10  # assumed, where a file's bytes and rows share a progress bar


class Chunk(NamedTuple):
    """Some records of a source, not read yet.

    Attributes:
        source: the source.
        first: number of its first record, from 0 (a line of a file).
        content: the lines of a file, or one Arrow stream of rows; empty for the rows of a data set, which
            the worker reads itself.
        num_rows: number of lines or rows.
        position: bytes of the source up to and with this chunk.
    """

    source: Source
    first: int
    content: tuple[bytes, ...]
    num_rows: int
    position: int


@dataclass(frozen=True, eq=False)
class Source:
    """An input.

    Args:
        name: as the user wrote it.
        size: bytes, approximately where it is no file.
    """

    name: str
    size: int

    def chunks(self) -> Generator[Chunk, None, None]:
        """Its records in order."""
        raise NotImplementedError

    def read(self, chunk: Chunk) -> list[Record]:
        """The records of a chunk.

        Raises:
            ConfigError: a broken record; names its place.
        """
        raise NotImplementedError

    def files(self) -> list[Path]:
        """The files that it reads."""
        raise NotImplementedError

    def first_record(self) -> Record | None:
        """Its first record; None without any.

        Raises:
            ConfigError: it is broken; names its place.
        """
        with closing(self.chunks()) as chunks:
            for chunk in chunks:
                if records := self.read(self._shortened(chunk)):
                    return records[0]
        return None

    def _shortened(self, chunk: Chunk) -> Chunk:
        """The chunk up to its first record: what comes later may be broken."""
        return chunk._replace(num_rows=1)

    def describe(self) -> dict[str, Any]:
        """Name, size and hash of its files, for the metadata; reads all of them."""
        digest, size = hashlib.sha256(), 0
        for path in self.files():
            with open(path, "rb") as file:
                while block := file.read(2**20):
                    digest.update(block)
                    size += len(block)
        return {"name": Path(self.name).name, "size": size, "sha256": digest.hexdigest()}


@dataclass(frozen=True, eq=False)
class JsonLines(Source):
    """A file with one JSON object a line, also compressed by gzip (``.gz``)."""

    def files(self) -> list[Path]:
        return [Path(self.name)]

    def chunks(self) -> Generator[Chunk, None, None]:
        try:
            with open(self.name, "rb") as raw:
                yield from self._cut(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{self.name}: cannot be read ({error})") from error

    def _cut(self, raw: BinaryIO) -> Generator[Chunk, None, None]:
        # By the name or by the two bytes that no JSON begins with: a name may lack .gz.
        packed = self.name.lower().endswith(".gz") or raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        stream: Any = gzip.GzipFile(fileobj=raw) if packed else raw
        lines: list[bytes] = []
        first = size = 0
        for number, line in enumerate(stream, 1):
            lines.append(line)
            size += len(line)
            if len(lines) == RECORDS_PER_CHUNK or size >= BYTES_PER_CHUNK:
                yield Chunk(self, first, tuple(lines), len(lines), raw.tell())
                lines, first, size = [], number, 0
        if lines:
            yield Chunk(self, first, tuple(lines), len(lines), raw.tell())

    def _shortened(self, chunk: Chunk) -> Chunk:
        index = next((i for i, line in enumerate(chunk.content) if line.strip()), 0)
        return chunk._replace(first=chunk.first + index, content=chunk.content[index : index + 1], num_rows=1)

    def read(self, chunk: Chunk) -> list[Record]:
        records = []
        for number, line in enumerate(chunk.content, chunk.first + 1):
            if not line.strip():
                continue
            place = f"{self.name}:{number}"
            try:
                records.append(Record(place, json.loads(line.decode("utf-8-sig"))))
            except UnicodeDecodeError as error:
                raise ConfigError(f"{place}: not UTF-8 (byte {error.start + 1} of the line)") from error
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"{place}: not JSON ({error.msg} at column {error.colno}); expected one object a line"
                ) from error
            except (ValueError, RecursionError) as error:  # numbers of thousands of digits, deep nesting
                raise ConfigError(f"{place}: not JSON that can be read ({error})") from error
        return records


@dataclass(frozen=True, eq=False)
class Rows(Source):
    """A data set of Hugging Face.

    Args:
        path: a directory that ``save_to_disk`` wrote; None for one that ``load_dataset`` finds by its name.
        dataset: what ``load_dataset`` is given where ``path`` is None.
        subset: a configuration of it.
        split: which part, where there are several.
        keys: the columns that count; others, such as images, are not decoded.
    """

    path: str | None
    dataset: str | None
    subset: str | None
    split: str | None
    keys: tuple[str, ...]

    def open(self) -> Any:
        """The data set, opened once in a process."""
        return _open_rows(self.name, self.path, self.dataset, self.subset, self.split, self.keys)

    def files(self) -> list[Path]:
        return [Path(file["filename"]) for file in self.open().cache_files]

    def chunks(self) -> Generator[Chunk, None, None]:
        num_rows = len(self.open())
        for first in range(0, num_rows, RECORDS_PER_CHUNK):
            stop = min(first + RECORDS_PER_CHUNK, num_rows)
            yield Chunk(self, first, (), stop - first, self.size * stop // num_rows)

    def read(self, chunk: Chunk) -> list[Record]:
        columns = self.open()[chunk.first : chunk.first + chunk.num_rows]
        return [
            Record(
                f"{self.name} row {chunk.first + i}", {name: column[i] for name, column in columns.items()}
            )
            for i in range(chunk.num_rows)
        ]


@functools.lru_cache(maxsize=64)  # forked workers find it open
def _open_rows(
    name: str,
    path: str | None,
    dataset: str | None,
    subset: str | None,
    split: str | None,
    keys: tuple[str, ...],
) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{name}: data sets of Hugging Face need datasets, which is missing here ({error}); "
            "pip install 'odcengine[hf]'"
        ) from error
    try:
        found: Any = datasets.load_dataset(dataset, subset) if path is None else datasets.load_from_disk(path)
    except Exception as error:  # datasets raises nearly everything here
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"{name}: datasets cannot open it ({lines[0]})") from error
    if not isinstance(found, datasets.DatasetDict):
        if split is not None:
            raise ConfigError(f"{name}: --split {split}, but it is a single data set; leave out --split")
        return _used_columns(found, keys)
    if split is None and len(found) == 1:
        split = next(iter(found))
    if split not in found:
        wrong = "has several splits" if split is None else f"has no split {split}"
        raise ConfigError(f"{name}: it {wrong}; give --split, one of {', '.join(found)}")
    return _used_columns(found[split], keys)


def _used_columns(dataset: Any, keys: tuple[str, ...]) -> Any:
    used = [name for name in dataset.column_names if name in keys]
    return dataset.select_columns(used) if used else dataset


def open_sources(
    names: Sequence[str], *, subset: str | None, split: str | None, keys: tuple[str, ...]
) -> list[Source]:
    """The sources behind the inputs of a command line.

    Args:
        names: files, directories of ``save_to_disk`` or of Parquet files, ``hf:NAME`` for ``load_dataset``.
        subset: configuration of the data sets given by name.
        split: which part of data sets with several.
        keys: columns that count.

    Raises:
        ConfigError: an input that does not exist or is none of these; names all of them.
    """
    sources: list[Source] = []
    problems: list[str] = []
    for name in names:
        try:
            sources += _open_input(name, subset, split, keys)
        except ConfigError as error:
            problems += error.problems
    if split and not problems and all(Path(name).is_file() for name in names):
        problems.append(f"--split {split}: it chooses from data sets, but all inputs are files")
    if subset and not problems and not any(name.startswith("hf:") for name in names):
        problems.append(f"--subset {subset}: it chooses a configuration of hf:NAME, but there is none")
    if problems:
        raise ConfigError(*problems)
    return sources


def _open_input(name: str, subset: str | None, split: str | None, keys: tuple[str, ...]) -> list[Source]:
    from odc_tools._parquet import files_of, is_parquet, open_parquet

    path = Path(name)
    if name.startswith("hf:"):
        rows = Rows(name, 0, None, name.removeprefix("hf:"), subset, split, keys)
    elif path.is_file():
        if is_parquet(path):
            return [open_parquet(path, keys)]
        return [JsonLines(name, path.stat().st_size)]
    elif path.is_dir():
        if not any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
            if files := files_of(path, split):
                return [open_parquet(file, keys) for file in files]
            raise ConfigError(
                f"{name}: a directory, but no data set that save_to_disk wrote and without Parquet files; "
                f"give files, or hf:{name} to have load_dataset look into it"
            )
        rows = Rows(name, 0, name, None, None, split, keys)
    elif path.exists():
        raise ConfigError(f"{name}: it is no regular file, and an input is read several times; give a file")
    else:
        raise ConfigError(f"{name}: does not exist; a data set of the Hugging Face hub is written hf:NAME")
    return [dataclasses.replace(rows, size=len(rows.open()) * _BYTES_PER_ROW)]
