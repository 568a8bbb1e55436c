"""Tokenizers as preparing data needs them: the tokens of a text, and which of them are to be learned.

A text is always tokenised in one piece, because tokenizers merge over any border that one cuts (and some put
a blank in front of every piece). What is to be learned is given as spans of its characters; a token is
learned if it holds a character of a span. A token that also holds characters before the span *straddles* its
beginning: at inference the model is given a prompt that ends with other tokens than in training.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from odcengine.errors import ConfigError

Span = tuple[int, int]
"""First character, and the one after the last."""

# What decides how a directory of transformers tokenises; weights beside them do not.
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "*.tiktoken",
)


class Marked(NamedTuple):
    """Tokens of a text.

    Attributes:
        tokens: uint32 ``[n]``.
        loss_mask: uint8 ``[n]``, 1 where the token is to be learned.
        num_straddling: spans whose first token begins before them.
    """

    tokens: npt.NDArray[np.uint32]
    loss_mask: npt.NDArray[np.uint8]
    num_straddling: int


class ChatTemplateError(Exception):
    """The chat template cannot render a conversation; the message is the template's own."""


class TextTokenizer(abc.ABC):
    """A tokenizer.

    Attributes:
        path: where it was read.
        kind: ``sentencepiece`` or ``transformers``.
        sha256: of its files.
        vocab_size: one more than its largest token id.
        bos: tokens that it puts in front of a text, if any.
        eos: the token that ends a sequence, or None.
        has_chat_template: whether :meth:`render` works.
    """

    path: Path
    kind: str
    sha256: str
    vocab_size: int
    bos: tuple[int, ...]
    eos: int | None
    has_chat_template = False

    @abc.abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of each text, without bos and eos."""

    def render(self, messages: Any, tools: Any = None, *, generation_prompt: bool = False) -> str:
        """A conversation as the chat template writes it.

        Args:
            messages: as the template takes them, usually mappings with ``role`` and ``content``.
            tools: descriptions of tools, for templates that know them.
            generation_prompt: end with what precedes an answer of the assistant.

        Raises:
            ChatTemplateError: the template refuses the conversation.
        """
        raise ChatTemplateError(f"{self.path} has no chat template")

    def encode_marked(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Marked]:
        """Tokens of each text, and which of them are to be learned.

        Args:
            texts: the texts.
            spans: for each text, the spans of characters to be learned, in order and without overlap.
        """
        # Without character offsets: the tokens of the text up to a border are, but for the merges over it,
        # the first tokens of the whole.
        borders = [sorted({p for span in of_text for p in span}) for of_text in spans]
        inner = [
            [p for p in of_text if 0 < p < len(text)] for text, of_text in zip(texts, borders, strict=True)
        ]
        heads = iter(self.encode([text[:p] for text, ps in zip(texts, inner, strict=True) for p in ps]))
        marked = []
        for text, ids, positions, of_text in zip(texts, self.encode(texts), inner, spans, strict=True):
            tokens = np.asarray(ids, dtype=np.uint32)
            first, last = {0: 0, len(text): len(ids)}, {0: 0, len(text): len(ids)}
            straddling = set()
            for position in positions:
                head = np.asarray(next(heads), dtype=np.uint32)
                size = min(len(head), len(tokens))
                differs = np.flatnonzero(head[:size] != tokens[:size])
                common = int(differs[0]) if len(differs) else size
                first[position] = last[position] = common
                if common < len(head):  # a token over the border belongs to the span on either side
                    last[position] = min(common + 1, len(tokens))
                    straddling.add(position)
            mask = np.zeros(len(ids), dtype=np.uint8)
            for start, stop in of_text:
                mask[first[start] : last[stop]] = 1
            marked.append(Marked(tokens, mask, sum(start in straddling for start, _ in of_text)))
        return marked


class SentencePieceTokenizer(TextTokenizer):
    """A sentencepiece model.

    Args:
        path: the ``.model`` file.

    Raises:
        ConfigError: it cannot be read.
    """

    kind = "sentencepiece"

    def __init__(self, path: Path) -> None:
        import sentencepiece

        try:
            data = path.read_bytes()
            self._model = sentencepiece.SentencePieceProcessor(model_proto=data)
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"tokenizer: {path} is no sentencepiece model ({error})") from error
        if not data:  # sentencepiece takes it for a model without pieces
            raise ConfigError(f"tokenizer: {path} is no sentencepiece model (the file is empty)")
        self.path = path
        self.sha256 = hashlib.sha256(data).hexdigest()
        self.vocab_size = int(self._model.vocab_size())
        bos, eos = int(self._model.bos_id()), int(self._model.eos_id())
        self.bos = (bos,) if bos >= 0 else ()
        self.eos = eos if eos >= 0 else None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        # One thread: there is a process for every core already.
        ids: list[list[int]] = self._model.encode(list(texts), num_threads=1) if texts else []
        return ids


class TransformersTokenizer(TextTokenizer):
    """A tokenizer directory of transformers.

    Args:
        path: the directory.
        chat_template: used instead of its own.

    Raises:
        ConfigError: it cannot be read, or transformers is not installed.
    """

    kind = "transformers"

    def __init__(self, path: Path, chat_template: str | None = None) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigError(
                f"tokenizer: {path} is a directory of transformers, which is missing here ({error}); "
                "pip install 'odcengine[hf]', or give a sentencepiece .model file"
            ) from error
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # transformers raises nearly everything here
            raise ConfigError(
                f"tokenizer: transformers cannot read the directory {path} ({_first_line(error)}); give one "
                "that save_pretrained wrote, or a sentencepiece .model file"
            ) from error
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        self._tokenizer = tokenizer
        self.path = path
        self.sha256 = _hash_files(path)
        self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
        self.bos = self._find_bos()
        self.eos = tokenizer.eos_token_id
        self.has_chat_template = bool(tokenizer.chat_template)

    def _find_bos(self) -> tuple[int, ...]:
        """What it puts in front of a text by itself."""
        bare, whole = self.encode(["a"])[0], list(self._tokenizer("a")["input_ids"])
        starts = (i for i in range(len(whole)) if bare and whole[i : i + len(bare)] == bare)
        return tuple(whole[: next(starts, 0)])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._call(texts)["input_ids"] if texts else []
        return ids

    def encode_marked(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Marked]:
        if not texts or not self._tokenizer.is_fast:
            return super().encode_marked(texts, spans)
        encoded = self._call(texts, return_offsets_mapping=True)
        marked = []
        for ids, offsets, of_text in zip(encoded["input_ids"], encoded["offset_mapping"], spans, strict=True):
            begin, end = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
            mask, num_straddling = np.zeros(len(ids), dtype=bool), 0
            for start, stop in of_text:
                inside = (end > start) & (begin < stop)
                # Tokens of blanks may be given as nothing at the blanks' end.
                inside |= (begin == end) & (end > start) & (end <= stop)
                mask |= inside
                num_straddling += bool((inside & (begin < start)).any())
            marked.append(Marked(np.asarray(ids, np.uint32), mask.astype(np.uint8), num_straddling))
        return marked

    def render(self, messages: Any, tools: Any = None, *, generation_prompt: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as error:  # a template is a program: it may divide by zero or recurse for ever
            raise ChatTemplateError(_first_line(error)) from error
        return text

    def _call(self, texts: Sequence[str], **arguments: Any) -> Any:
        return self._tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
            **arguments,
        )


def load_tokenizer(path: Path, chat_template: str | None = None) -> TextTokenizer:
    """A tokenizer from disk.

    Args:
        path: a sentencepiece ``.model`` file, or a tokenizer directory of transformers.
        chat_template: Jinja text that replaces the directory's own chat template.

    Raises:
        ConfigError: there is no such tokenizer.
    """
    if path.is_dir():
        return TransformersTokenizer(path, chat_template)
    if not path.exists():
        raise ConfigError(
            f"tokenizer: {path} does not exist; give a sentencepiece .model file or a tokenizer directory of "
            "transformers"
        )
    if path.suffix == ".json":
        raise ConfigError(f"tokenizer: {path} is a file of transformers; give its directory, {path.parent}")
    if chat_template is not None:
        raise ConfigError(
            f"tokenizer: {path} is a sentencepiece model, which has no tokens for the turns of a chat "
            "template; give a tokenizer directory of transformers"
        )
    return SentencePieceTokenizer(path)


def _hash_files(folder: Path) -> str:
    files = sorted({file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()})
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
