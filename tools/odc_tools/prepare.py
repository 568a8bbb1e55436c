"""``odc prepare``: raw data -> tokens with loss masks, as a data set on disk.

The main process reads chunks of raw lines and writes; workers parse and tokenise. Results are taken in the
order of the chunks, so the files are the same, byte for byte, for any number of workers.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odc_tools._prepare_progress import Progress
from odc_tools._prepare_workers import WorkerError, WorkerPool, ending_cleanly
from odc_tools._sources import Chunk, Source, open_sources
from odcengine._version import __version__
from odcengine.data.dataset import HELD_OUT, DatasetWriter, TokenDataset, is_dataset
from odcengine.data.preference import PREFERENCES
from odcengine.data.records import (
    TOKEN_KEYS,
    TOO_LONG,
    TURNS,
    USED_KEYS,
    Tokenized,
    check_tokenizer,
    check_tokens,
    kind_of,
    take_tokens,
    tokenize_records,
)
from odcengine.data.rendering import Record
from odcengine.data.tokenizer import TextTokenizer, load_tokenizer
from odcengine.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="INPUT",
        help="a JSONL file (also .gz), a Parquet file or a directory of them, a directory that save_to_disk "
        "of Hugging Face's datasets wrote, or hf:NAME for load_dataset",
    )
    parser.add_argument("--out", metavar="DIR", help="the data set to make")
    parser.add_argument("--overwrite", action="store_true", help="replace a data set that is there already")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a sentencepiece .model file, or a directory of transformers; without it, inputs must be tokens "
        "(input_ids)",
    )
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja text used instead of the tokenizer's")
    parser.add_argument(
        "--model", metavar="DIR", help="check that the tokenizer fits this model (config.json)"
    )
    parser.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="KEY=NAME",
        help="read what is called KEY here (prompt, chosen, rejected, messages, ...) from the key NAME of "
        "the records; KEY= leaves it out; may be given several times",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="limit of tokens in a sample, of a preference pair in each of its two sequences",
    )
    parser.add_argument(
        "--too-long",
        choices=TOO_LONG,
        default="error",
        help="what to do with a sample over --max-length (default: %(default)s)",
    )
    parser.add_argument(
        "--turns",
        choices=TURNS,
        default="all",
        help="which of the assistant's turns of a conversation are learned (default: %(default)s)",
    )
    parser.add_argument(
        "--hold-out",
        metavar="SHARE",
        help="set a share of the samples apart for evaluation (0.02: every 50th), as DIR/held_out",
    )
    parser.add_argument("--subset", metavar="NAME", help="configuration of hf:NAME")
    parser.add_argument(
        "--split", metavar="NAME", help="which part of data sets and directories with several"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core)")
    parser.add_argument("--info", metavar="DIR", help="print what a prepared data set is, and nothing else")


def run(options: argparse.Namespace) -> int:
    """Prepares a data set, or prints what one is.

    Returns:
        0, or 1 where a worker failed or something could not be written.
    """
    if options.info is not None:
        if options.inputs or options.out:
            raise ConfigError("--info DIR goes alone, without inputs and --out")
        print(_info(Path(options.info)))
        return 0
    try:
        print(prepare(options))
    except (WorkerError, OSError) as error:  # OSError: a full disk
        print(f"odc prepare: error: {error}", file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True)
class _Settings:
    """What a worker has to know."""

    tokenizer: Path | None
    chat_template: str | None
    max_length: int | None
    too_long: str
    turns: str
    vocab_size: int | None
    hold_out: Fraction | None
    columns: tuple[tuple[str, str], ...]

    def describe(self) -> dict[str, Any]:
        template = None if self.chat_template is None else self.chat_template.encode()
        further: dict[str, Any] = {} if self.hold_out is None else {"hold_out": str(self.hold_out)}
        if self.columns:
            further["columns"] = dict(self.columns)
        return {
            **further,
            "max_length": self.max_length,
            "too_long": self.too_long,
            "turns": self.turns,
            "chat_template_sha256": None if template is None else hashlib.sha256(template).hexdigest(),
        }


# ---- the whole ---------------------------------------------------------------------------------------


def prepare(options: argparse.Namespace) -> str:
    """Make a data set.

    Args:
        options: as :func:`add_arguments` declares them.

    Returns:
        What was made, for the user.

    Raises:
        ConfigError: a mistake in the options or the data.
    """
    settings, out, workers = _check(options)
    # Tokenizers would start threads of their own, which do not survive a fork, in every worker.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = None
    if settings.tokenizer is not None:
        tokenizer = _tokenizer(settings.tokenizer, settings.chat_template)
        if settings.vocab_size is not None:
            _check_model(tokenizer, settings.vocab_size, options.model)
    renamed = dict(settings.columns)
    keys = tuple(renamed.get(key, key) for key in (TOKEN_KEYS if tokenizer is None else USED_KEYS))
    sources = open_sources(options.inputs, subset=options.subset, split=options.split, keys=keys)
    kinds = {source: _first_kind(source, tokenizer, settings.columns) for source in sources}
    _check_kinds(kinds)
    started = time.perf_counter()
    counts: dict[str, int] = dict.fromkeys(_COUNTS, 0)
    records: dict[Source, int] = dict.fromkeys(sources, 0)
    has_targets = False
    num_samples = 0
    with (
        ending_cleanly() as check,
        DatasetWriter(out) as writer,
        contextlib.ExitStack() as stack,
        WorkerPool(workers, check) as pool,
        Progress(sources) as progress,
    ):
        held_out = None
        if settings.hold_out is not None:
            held_out = stack.enter_context(DatasetWriter(writer.held_out_path))
        descriptions = [pool.submit(source.describe) for source in sources]
        jobs = (
            (chunk, functools.partial(_tokenize, settings, kind, chunk))
            for source in sources
            if (kind := kinds[source]) is not None
            for chunk in source.chunks()
        )
        with closing(pool.map(jobs)) as results:
            for chunk, done in results:
                batch = done.batch
                if held_out is not None:
                    chosen = _held_out(num_samples, len(batch), settings.hold_out or Fraction())
                    num_samples += len(batch)
                    held_out.add(batch.take(chosen))
                    batch = batch.take(~chosen)
                writer.add(batch)
                records[chunk.source] += done.num_records
                has_targets = has_targets or bool(batch.count_targets().any())
                for name in _COUNTS:
                    counts[name] += getattr(done, name)
                progress.show(chunk, counts["num_records"], len(done.batch.tokens))
        _check_not_empty(counts, has_targets, options)
        inputs = [
            {**pool.result(description), "kind": kinds[source], "num_records": records[source]}
            for source, description in zip(sources, descriptions, strict=True)
        ]
        source_of_all = _source(tokenizer, settings, inputs, counts)
        if held_out is not None:
            if not held_out.num_samples:
                raise ConfigError(f"--hold-out {options.hold_out}: that is none of {num_samples} samples")
            held_out.finish({**source_of_all, "part": HELD_OUT})
        writer.finish(source_of_all)
    seconds = time.perf_counter() - started
    dataset = TokenDataset.open(out)
    held_out_line = ""
    if settings.hold_out is not None:
        apart = TokenDataset.open(out / HELD_OUT)
        targets = int(apart.num_targets.sum())
        held_out_line = f"held out    {len(apart):,} samples, {targets:,} targets: {out / HELD_OUT}\n"
    return (
        f"{_describe(dataset)}\n{held_out_line}"
        f"speed       {counts['num_records'] / seconds:,.0f} samples/s, {dataset.num_tokens / seconds:,.0f} "
        f"tokens/s ({seconds:.1f} s, {workers} {'worker' if workers == 1 else 'workers'})\n"
        f"written to  {out}"
    )


def _held_out(first: int, count: int, share: Fraction) -> npt.NDArray[np.bool_]:
    """Which of ``count`` samples from number ``first`` on are held out: a share of them, evenly spread."""
    before = [int((first + number) * share) for number in range(count + 1)]
    return np.diff(np.array(before, dtype=np.int64)) > 0


_COUNTS = ("num_records", "num_skipped", "num_truncated", "num_straddling", "num_equal")


def _check(options: argparse.Namespace) -> tuple[_Settings, Path, int]:
    problems = [
        f"{name} is required"
        for name, value in (
            ("INPUT", options.inputs),
            ("--out", options.out),
        )
        if not value
    ]
    workers = len(os.sched_getaffinity(0)) if options.workers is None else options.workers
    for name, value in (("--max-length", options.max_length), ("--workers", workers)):
        if value is not None and value < 1:
            problems.append(f"{name} {value}: it must be at least 1")
    if options.too_long != "error" and options.max_length is None:
        problems.append(f"--too-long {options.too_long} needs --max-length")
    hold_out = None
    if options.hold_out is not None:
        try:
            hold_out = Fraction(options.hold_out)
        except (ValueError, ZeroDivisionError):
            hold_out = Fraction()
        if not 0 < hold_out < 1:
            problems.append(
                f"--hold-out {options.hold_out}: it must be a share between 0 and 1, such as 0.02"
            )
    columns = []
    for text in options.column:
        key, equals, name = text.partition("=")
        known = USED_KEYS if options.tokenizer is not None else TOKEN_KEYS
        if not equals or key not in known:
            problems.append(
                f"--column {text}: it must be KEY=NAME with KEY one of {', '.join(sorted(known))}"
            )
        columns.append((key, name))
    if options.tokenizer is None and options.chat_template is not None:
        problems.append("--chat-template: tokens need none; give --tokenizer to make tokens of text")
    vocab_size = None
    if options.model is not None:
        try:
            vocab_size = _vocabulary_of(Path(options.model))
        except ConfigError as error:
            problems += error.problems
    template = None
    if options.chat_template is not None:
        try:
            template = Path(options.chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            problems.append(f"--chat-template {options.chat_template}: cannot be read ({error})")
    if options.out:
        out = Path(options.out)
        if os.path.lexists(out) and not is_dataset(out):
            problems.append(f"--out {out}: it exists and is no data set; choose another name")
        elif out.exists() and not options.overwrite:
            problems.append(f"--out {out}: there is a data set already; choose another name, or --overwrite")
    if problems:
        raise ConfigError(*problems)
    settings = _Settings(
        None if options.tokenizer is None else Path(options.tokenizer),
        template,
        options.max_length,
        options.too_long,
        options.turns,
        vocab_size,
        hold_out,
        tuple(columns),
    )
    return settings, Path(options.out), workers


def _vocabulary_of(model: Path) -> int:
    """Rows of a model's embedding.

    Raises:
        ConfigError: its ``config.json`` does not say.
    """
    path = model / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        rows = config.get("vocab_size")
        if rows is None:
            rows = config.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"--model {model}: {path} cannot be read ({error})") from error
    if not isinstance(rows, int):
        raise ConfigError(f"--model {model}: config.json has no vocab_size")
    return rows


def _check_model(tokenizer: TextTokenizer, rows: int, model: str) -> None:
    if tokenizer.vocab_size > rows:
        raise ConfigError(
            f"--model {model}: its vocabulary has {rows} tokens, but the tokenizer {tokenizer.path} has "
            f"{tokenizer.vocab_size}; use the model's own tokenizer"
        )
    # Embeddings are padded to round numbers; known models add a few hundred rows, or up to a few percent.
    if rows > 1.1 * tokenizer.vocab_size + 1024:
        raise ConfigError(
            f"--model {model}: its vocabulary has {rows} tokens, but the tokenizer {tokenizer.path} only "
            f"{tokenizer.vocab_size}, so it is hardly the model's own; leave out --model if it is meant"
        )


def _first_kind(
    source: Source, tokenizer: TextTokenizer | None, columns: Sequence[tuple[str, str]]
) -> str | None:
    """The kind of a source's first record, with which the tokenizer must work; None without records."""
    record = source.first_record()
    if record is None:
        return None
    record = _renamed(record, columns)
    if tokenizer is None:
        return check_tokens(record)
    kind = kind_of(record)
    check_tokenizer(tokenizer, kind, record.place)
    return kind


def _renamed(record: Record, columns: Sequence[tuple[str, str]]) -> Record:
    """The record with the keys that are used here."""
    if not columns or not isinstance(record.value, Mapping):
        return record
    value = {key: found for key, found in record.value.items() if key not in dict(columns)}
    return record._replace(value={**value, **{key: record.value.get(name) for key, name in columns if name}})


def _check_kinds(kinds: Mapping[Source, str | None]) -> None:
    """A data set holds groups of sequences, or single ones."""
    grouped = {source: kind in (*PREFERENCES, "sequences") for source, kind in kinds.items() if kind}
    if len(set(grouped.values())) > 1:
        pairs, others = ([s.name for s, g in grouped.items() if g == wanted] for wanted in (True, False))
        raise ConfigError(
            f"{pairs[0]} has preference pairs, {others[0]} has none; a data set holds one kind of samples"
        )


def _check_not_empty(counts: dict[str, int], has_targets: bool, options: argparse.Namespace) -> None:
    if not counts["num_records"]:
        raise ConfigError(f"{', '.join(options.inputs)}: no records; there is nothing to train on")
    if counts["num_records"] == counts["num_equal"]:
        raise ConfigError(
            f"{', '.join(options.inputs)}: chosen and rejected are the same in all pairs; there is nothing "
            "to learn"
        )
    if counts["num_records"] == counts["num_skipped"] + counts["num_equal"]:
        raise ConfigError(
            f"all {counts['num_records']} records are longer than --max-length {options.max_length}, and "
            "--too-long skip leaves them out: nothing is left to train on"
        )
    if not has_targets:
        raise ConfigError(
            f"{', '.join(options.inputs)}: no record has anything to learn; conversations need turns of the "
            "role assistant that the chat template writes, and --too-long truncate may have cut answers off"
        )


def _source(
    tokenizer: TextTokenizer | None, settings: _Settings, inputs: list[dict[str, Any]], counts: dict[str, int]
) -> dict[str, Any]:
    """What ``meta.json`` says about the data's origin; no times: the same data give the same bytes."""
    made_from: dict[str, Any] = {
        "tokenizer": None
        if tokenizer is None
        else {"kind": tokenizer.kind, "sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size},
        "options": settings.describe(),
        "inputs": inputs,
    }
    contents = {**made_from, "inputs": [{**entry, "name": None} for entry in inputs]}
    text = json.dumps(contents, sort_keys=True)
    return {
        "made_by": f"odc prepare {__version__}",
        "fingerprint": hashlib.sha256(text.encode()).hexdigest(),
        **made_from,
        "tokenizer": None if tokenizer is None else {"name": tokenizer.path.name, **made_from["tokenizer"]},
        **counts,
    }


# ---- what a worker does ------------------------------------------------------------------------------


_tokenizer = functools.lru_cache(maxsize=4)(load_tokenizer)
"""Loaded once in a process; forked workers find it loaded."""


def _tokenize(settings: _Settings, kind: str, chunk: Chunk) -> Tokenized:
    """What a worker does with a chunk."""
    records = [_renamed(record, settings.columns) for record in chunk.source.read(chunk)]
    if settings.tokenizer is None:
        return take_tokens(
            records,
            vocab_size=settings.vocab_size,
            max_length=settings.max_length,
            too_long=settings.too_long,
        )
    return tokenize_records(
        records,
        kind,
        _tokenizer(settings.tokenizer, settings.chat_template),
        max_length=settings.max_length,
        too_long=settings.too_long,
        turns=settings.turns,
    )


# ---- what the user sees ------------------------------------------------------------------------------


def _info(path: Path) -> str:
    dataset = TokenDataset.open(path)
    return f"{_describe(dataset)}\n{json.dumps(dataset.metadata, indent=2)}"


def _describe(dataset: TokenDataset) -> str:
    lengths, targets, source = dataset.lengths, dataset.num_targets, dataset.metadata.get("source") or {}
    notes = [
        f"{source[name]:,} {text}"
        for name, text in (
            ("num_skipped", "too long, left out"),
            ("num_truncated", "too long, cut"),
            ("num_equal", "with equal answers, left out"),
            ("num_straddling", "with a token over the border of prompt and answer"),
        )
        if source.get(name)
    ]
    without = int((targets == 0).sum())
    groups = "" if dataset.sequences is None else f" of {len(dataset.sequences[0]):,} sequences"
    lines = [
        f"samples     {len(dataset):,}{groups}{''.join(f'; {note}' for note in notes)}",
        f"tokens      {dataset.num_tokens:,}, largest id {dataset.metadata['max_token_id']}",
        f"targets     {int(targets.sum()):,}; {without:,} samples without any",
    ]
    if len(dataset):
        p10, p50, p90, p99 = np.percentile(lengths, [10, 50, 90, 99], method="nearest").tolist()
        lines.append(f"lengths     p10/50/90/99/max {p10:,} {p50:,} {p90:,} {p99:,} {lengths.max():,}")
    if source:
        lines.append(f"fingerprint {source['fingerprint']}")
    return "\n".join(lines)
