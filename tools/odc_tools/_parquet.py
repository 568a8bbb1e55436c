"""Records of Parquet files: a row group after the other, a few rows at a time, whatever their size."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odc_tools._sources import BYTES_PER_CHUNK, RECORDS_PER_CHUNK, Chunk, Source
from odcengine.data.dataset import import_pyarrow
from odcengine.data.rendering import Record
from odcengine.errors import ConfigError

_MAGIC = b"PAR1"
_READ_AHEAD_BYTES = 2**20  # of each column; without it a column of a row group is read whole
_SPLIT = re.compile(r"(train(ing)?|valid(ation)?|dev|val|eval(uation)?|test(ing)?)(?=[-_.]|$)", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Parquet(Source):
    """A Parquet file.

    This process reads and decompresses; what it hands to a worker is the rows of a chunk as an Arrow stream.

    Args:
        keys: the columns that count; others are not read.
    """

    keys: tuple[str, ...]

    def files(self) -> list[Path]:
        return [Path(self.name)]

    def chunks(self) -> Generator[Chunk, None, None]:
        with _open(self.name) as file:
            num_rows, first = file.metadata.num_rows, 0
            columns = [name for name in file.schema_arrow.names if name in self.keys]
            for batch in self._batches(file, columns or None):
                for rows in _small(batch):
                    stop = first + rows.num_rows
                    yield Chunk(self, first, (_stream(rows),), rows.num_rows, self.size * stop // num_rows)
                    first = stop

    def _batches(self, file: Any, columns: list[str] | None) -> Iterator[Any]:
        batches = file.iter_batches(RECORDS_PER_CHUNK, columns=columns, use_threads=False)
        num_rows = 0
        while True:
            try:
                batch = next(batches, None)
            except (OSError, ValueError) as error:  # pyarrow's errors are these
                raise ConfigError(f"{self.name} row {num_rows}: cannot be read ({_line(error)})") from error
            if batch is None:
                return
            yield batch
            num_rows += batch.num_rows

    def read(self, chunk: Chunk) -> list[Record]:
        arrow = import_pyarrow()
        with arrow.ipc.open_stream(chunk.content[0]) as stream:
            rows = stream.read_all().slice(0, chunk.num_rows)
        try:
            values = rows.to_pylist()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.name} row {chunk.first + _not_utf8(rows)}: not UTF-8") from error
        return [
            Record(f"{self.name} row {number}", value) for number, value in enumerate(values, chunk.first)
        ]


def is_parquet(path: Path) -> bool:
    """Whether a file says that it is one, in its name or its first bytes."""
    with open(path, "rb") as file:
        return path.suffix.lower() in (".parquet", ".pq") or file.read(4) == _MAGIC


def files_of(folder: Path, split: str | None) -> list[Path]:
    """The Parquet files of a folder and the folders in it, in the order of their names.

    Which split a file belongs to is said by its name (``train-00000-of-00008.parquet``) or a folder's.

    Args:
        folder: where they are.
        split: which of them; None where all are of one.

    Raises:
        ConfigError: there are files of several splits, or none of the one that is asked for.
    """
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in (".parquet", ".pq")
        and path.is_file()
        and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
    ]
    splits = {path: _split_of(path.relative_to(folder)) for path in files}
    found = sorted({name or "files without one" for name in splits.values()})
    if split is None:
        if len(found) > 1:
            raise ConfigError(f"{folder}: it has several splits; give --split, one of {', '.join(found)}")
        return files
    chosen = [path for path in files if splits[path] == split]
    if files and not chosen:
        raise ConfigError(f"{folder}: it has no split {split}; give --split, one of {', '.join(found)}")
    return chosen


def _split_of(path: Path) -> str | None:
    for part in reversed(path.parts):
        if match := _SPLIT.match(part):
            return match[1].lower()
    return None


def _open(name: str) -> Any:
    import_pyarrow()
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(name, buffer_size=_READ_AHEAD_BYTES, pre_buffer=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: cannot be read as Parquet ({_line(error)})") from error


def _small(batch: Any) -> Iterator[Any]:
    """A batch of rows in pieces of about a megabyte."""
    rows = max(1, batch.num_rows * BYTES_PER_CHUNK // max(1, batch.nbytes))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def _stream(rows: Any) -> bytes:
    arrow = import_pyarrow()
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _not_utf8(rows: Any) -> int:
    """The first row with text that is not UTF-8."""
    for number in range(rows.num_rows):
        try:
            rows.slice(number, 1).to_pylist()
        except UnicodeDecodeError:
            return number
    return 0


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def open_parquet(path: Path, keys: Sequence[str]) -> Parquet:
    """A source for a file.

    Args:
        path: the file.
        keys: the columns that count.

    Raises:
        ConfigError: it cannot be read.
    """
    _open(str(path)).close()
    return Parquet(str(path), path.stat().st_size, tuple(keys))
