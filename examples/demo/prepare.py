"""Make the demo's instruction data from text that every machine has: Python's own standard library.

Each function with a docstring becomes one example: its signature and docstring are the prompt, its body is
the completion. A sentencepiece tokenizer is trained on the result. Lengths vary as in real instruction data:
half of the examples have fewer than 120 tokens, one in a hundred more than 1,200.

    python examples/demo/prepare.py --out DIR

writes ``DIR/instructions.jsonl`` (one ``{"prompt": ..., "completion": ...}`` a line), ``DIR/tokenizer.model``
and ``DIR/tokens`` (an ``odcengine.data.TokenDataset``; only completions are to be learned). The same Python
gives the same files.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece

from odcengine.data import TokenDataset

VOCAB_SIZE = 4096
MAX_TOKENS = 2048
BOS_ID = 1
EOS_ID = 2

# Folders of tests, of packages that somebody installed, and of compiled files.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Example:
    """A function of the standard library.

    Args:
        prompt: decorators, signature and docstring, ending with a newline.
        completion: the rest of the body, ending with a newline.
    """

    prompt: str
    completion: str


@dataclass(frozen=True)
class Summary:
    """What :func:`prepare` made.

    Args:
        num_files: source files read.
        num_examples: different functions with a docstring.
        num_too_long: of those, left out for having more tokens than allowed.
        lengths: tokens of each kept example, int64.
        num_targets: tokens to be learned, over all kept examples.
        num_characters: characters of the kept examples.
        vocab_size: pieces of the tokenizer.
        max_tokens: the limit of tokens in an example.
    """

    num_files: int
    num_examples: int
    num_too_long: int
    lengths: npt.NDArray[np.int64]
    num_targets: int
    num_characters: int
    vocab_size: int
    max_tokens: int

    def __str__(self) -> str:
        tokens = int(self.lengths.sum())
        characters = self.num_characters / max(1, tokens)
        p10, p50, p90, p99 = np.percentile(self.lengths, [10, 50, 90, 99]).round().astype(int).tolist()
        return (
            f"data: {self.num_examples:,} different functions with docstrings in {self.num_files:,} files of "
            f"Python's library; {self.num_too_long:,} longer than {self.max_tokens:,} tokens left out\n"
            f"tokenizer: sentencepiece BPE, {self.vocab_size:,} pieces, {characters:.2f} characters a token\n"
            f"tokens: {tokens:,}, {self.num_targets:,} of them to learn; mean {self.lengths.mean():.0f} "
            f"an example, p10/50/90/99 {p10}/{p50}/{p90}/{p99}, longest {self.lengths.max():,}"
        )


def source_files(root: Path) -> list[Path]:
    """Python files below a folder in a fixed order, without tests and installed packages."""
    files = (path for path in root.rglob("*.py") if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts))
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def extract_examples(files: Iterable[Path]) -> list[Example]:
    """The functions with a docstring and a body, each text once, in the order of the files."""
    examples: dict[Example, None] = {}
    for path in files:
        for example in _examples_of_file(path):
            examples.setdefault(example)
    return list(examples)


def _examples_of_file(path: Path) -> Iterator[Example]:
    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            source = file.read()
            tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):  # some libraries ship files for other Pythons
        return
    lines = _lines(source)
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or ast.get_docstring(node) is None:
            continue
        docstring, *body = node.body
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        if not body or body[0].lineno <= (docstring.end_lineno or 0) or first == docstring.lineno:
            continue
        pieces = [_outdent(line, node.col_offset) for line in lines[first - 1 : node.end_lineno]]
        cut = (docstring.end_lineno or 0) - first + 1
        yield Example("".join(pieces[:cut]), "".join(pieces[cut:]).rstrip() + "\n")


def _lines(text: str) -> list[str]:
    """Lines as Python counts them: other separators, such as form feeds, do not end one."""
    return io.StringIO(text).readlines()


def _outdent(line: str, width: int) -> str:
    """The line with up to ``width`` blanks less in front; remarks and strings may have fewer."""
    blanks = len(line) - len(line.lstrip(" \t"))
    return line[min(width, blanks) :]


def write_jsonl(path: Path, examples: Iterable[Example]) -> None:
    """Write one JSON object a line, with the keys ``prompt`` and ``completion``."""
    with open(path, "w", encoding="utf-8") as file:
        for example in examples:
            file.write(json.dumps({"prompt": example.prompt, "completion": example.completion}) + "\n")


def train_tokenizer(
    examples: Iterable[Example], vocab_size: int = VOCAB_SIZE
) -> sentencepiece.SentencePieceProcessor:
    """Train a byte-pair tokenizer that keeps every character: code depends on blanks and line ends."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(
            line for example in examples for line in (example.prompt + example.completion).split("\n")
        ),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        character_coverage=0.9995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def tokenize_examples(
    examples: list[Example], tokenizer: sentencepiece.SentencePieceProcessor
) -> Iterator[dict[str, Any]]:
    """Samples for a :class:`~odcengine.data.TokenDataset`: begin, prompt, completion, end.

    Only the completion and the end are to be learned.
    """
    prompts = tokenizer.encode([example.prompt for example in examples])
    completions = tokenizer.encode([example.completion for example in examples])
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = np.array([BOS_ID, *prompt, *completion, EOS_ID])
        yield {"input_ids": tokens, "loss_mask": np.arange(len(tokens)) > len(prompt)}


def prepare(
    out: Path, *, stdlib: Path | None = None, vocab_size: int = VOCAB_SIZE, max_tokens: int = MAX_TOKENS
) -> Summary:
    """Make the three files of the demo.

    Args:
        out: folder for them; made if missing.
        stdlib: folder of the sources; that of the running Python if None.
        vocab_size: pieces of the tokenizer.
        max_tokens: examples with more tokens are left out.

    Returns:
        What was made.

    Raises:
        SystemExit: no example was found there.
    """
    root = Path(sysconfig.get_path("stdlib")) if stdlib is None else stdlib
    files = source_files(root)
    examples = extract_examples(files)
    if not examples:
        raise SystemExit(
            f"{root} holds no Python functions with docstrings; give a folder with sources by --stdlib"
        )
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "instructions.jsonl", examples)
    tokenizer = train_tokenizer(examples, vocab_size)
    (out / "tokenizer.model").write_bytes(tokenizer.serialized_model_proto())
    samples = list(tokenize_examples(examples, tokenizer))
    kept = [index for index, sample in enumerate(samples) if len(sample["input_ids"]) <= max_tokens]
    dataset = TokenDataset.write(out / "tokens", (samples[index] for index in kept))
    return Summary(
        num_files=len(files),
        num_examples=len(examples),
        num_too_long=len(examples) - len(kept),
        lengths=dataset.lengths,
        num_targets=int(dataset.num_targets.sum()),
        num_characters=sum(len(examples[index].prompt + examples[index].completion) for index in kept),
        vocab_size=tokenizer.vocab_size(),
        max_tokens=max_tokens,
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Make the demo's instruction data from the standard library."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the data")
    parser.add_argument("--stdlib", type=Path, help="folder of the sources (default: of this Python)")
    parser.add_argument(
        "--vocab-size", type=int, default=VOCAB_SIZE, help="pieces of the tokenizer (%(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="longest example (%(default)s)")
    arguments = parser.parse_args(argv)
    print(
        prepare(
            arguments.out,
            stdlib=arguments.stdlib,
            vocab_size=arguments.vocab_size,
            max_tokens=arguments.max_tokens,
        )
    )


if __name__ == "__main__":
    main()
