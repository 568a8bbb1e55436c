"""Records of raw data -> tokens with loss masks.

Three kinds of records, told apart by their keys:

``messages``             a conversation; the assistant's turns are to be learned
``prompt, completion``   the completion and the end of the sequence are to be learned
``text``                 everything is to be learned

Without a tokenizer, records are tokens already: ``input_ids``, with ``loss_mask`` or ``labels`` beside them.

What the assistant's turns are, the chat template says: the text that it writes for a conversation must begin
with the text that it writes for the conversation's beginning. What it adds for an assistant's turn, after the
generation prompt that precedes it, is that turn. Templates that rewrite earlier turns are refused, unless
only the last turn is to be learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from odcengine.data.dataset import TokenBatch, check_sample
from odcengine.data.tokenizer import ChatTemplateError, Span, TextTokenizer
from odcengine.errors import ConfigError, UsageError

MESSAGES, PAIR, TEXT = KINDS = ("messages", "prompt, completion", "text")
TURNS = ("all", "last")
USED_KEYS = ("messages", "tools", "prompt", "completion", "text")
TOKENS = "input_ids"
TOKEN_KEYS = ("input_ids", "loss_mask", "labels")
TOO_LONG = ("error", "truncate", "skip")


class Record(NamedTuple):
    """A record and where it stands.

    Attributes:
        place: file and line, for messages.
        value: as parsed.
    """

    place: str
    value: Any


class Tokenized(NamedTuple):
    """Tokens of some records, and what happened to them.

    Attributes:
        batch: the samples, in the records' order.
        num_records: records read.
        num_skipped: records left out for being too long.
        num_truncated: samples that were cut.
        num_straddling: samples in which a token holds the end of a prompt and the beginning of its answer.
    """

    batch: TokenBatch
    num_records: int
    num_skipped: int
    num_truncated: int
    num_straddling: int


def kind_of(record: Record) -> str:
    """Which of :data:`KINDS` a record is. Keys whose value is null count as missing.

    Raises:
        ConfigError: none of them.
    """
    value = record.value
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{record.place}: a record must be an object with the keys {_KEYS}, but is {_shown(value)}"
        )
    for kind in KINDS:
        if all(value.get(key) is not None for key in kind.split(", ")):
            return kind
    keys = (f"{key} (null)" if value[key] is None else str(key) for key in value)
    found = ascii(", ".join(sorted(keys)) or "no keys")[1:-1]
    raise ConfigError(f"{record.place}: the record has {found[:200]}; expected the keys {_KEYS}")


_KEYS = "messages, or prompt and completion, or text"


def check_tokens(record: Record) -> str:
    """Check that a record is tokens.

    Returns:
        The kind of such records.

    Raises:
        ConfigError: it has no ``input_ids``.
    """
    if isinstance(record.value, Mapping) and record.value.get("input_ids") is not None:
        return TOKENS
    keys = ", ".join(sorted(map(str, record.value))) if isinstance(record.value, Mapping) else "no keys"
    raise ConfigError(
        f"{record.place}: the record has {ascii(keys)[1:-1][:200]}, and no tokens (input_ids); give "
        "--tokenizer PATH to make tokens of text"
    )


def check_tokenizer(tokenizer: TextTokenizer, kind: str, place: str) -> None:
    """Check that a tokenizer can be used for a kind of records.

    Args:
        tokenizer: the tokenizer.
        kind: one of :data:`KINDS`.
        place: where such a record stands.

    Raises:
        ConfigError: a chat template or an end of sequence is missing.
    """
    if kind == MESSAGES and not tokenizer.has_chat_template:
        remedy = (
            "give one by --chat-template FILE"
            if tokenizer.kind == "transformers"
            else "give a tokenizer directory of transformers that has one"
        )
        raise ConfigError(
            f"{place}: records with messages need a chat template, but the tokenizer {tokenizer.path} has "
            f"none; {remedy}, or write the records as prompt and completion"
        )
    if kind != MESSAGES and tokenizer.eos is None:
        raise ConfigError(
            f"{place}: a sample must end with the end of the sequence, but the tokenizer {tokenizer.path} "
            "has no such token; set eos_token in its tokenizer_config.json (sentencepiece: train with eos_id)"
        )


def tokenize_records(
    records: Sequence[Record],
    kind: str,
    tokenizer: TextTokenizer,
    *,
    max_length: int | None = None,
    too_long: str = "error",
    turns: str = "all",
) -> Tokenized:
    """Tokenise records of one kind.

    Args:
        records: the records.
        kind: one of :data:`KINDS`.
        tokenizer: one that :func:`check_tokenizer` accepts.
        max_length: limit of tokens in a sample, or None.
        too_long: what to do with longer ones: ``error``, ``truncate`` (keep the first ``max_length`` tokens)
            or ``skip``.
        turns: which of the assistant's turns are learned: ``all``, or the ``last`` of each conversation.

    Raises:
        ConfigError: a record of another kind or that makes no sense, or one that is too long;
            names its place.
    """
    texts, spans = [], []
    for record in records:
        if kind_of(record) != kind:
            raise ConfigError(
                f"{record.place}: the record has the keys of `{kind_of(record)}`, but the first of this file "
                f"those of `{kind}`; a file holds one kind of records, so split it"
            )
        text, of_text = _render(record, kind, tokenizer, turns)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{record.place}: the text holds half of a surrogate pair ({text[error.start]!a}), "
                "which is no character; write characters beyond U+FFFF as UTF-8 or as both halves"
            ) from error
        texts.append(text)
        spans.append(of_text)
    pairs: list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]] = []
    num_skipped = num_truncated = num_straddling = 0
    for record, marked in zip(records, tokenizer.encode_marked(texts, spans), strict=True):
        tokens, mask = marked.tokens, marked.loss_mask
        if kind != MESSAGES:  # the chat template writes its own
            bos, eos = tokenizer.bos, [tokenizer.eos]
            tokens = np.concatenate([bos, tokens, eos]).astype(np.uint32)
            mask = np.concatenate([np.zeros(len(bos)), mask, [1]]).astype(np.uint8)
        if not len(tokens):
            raise ConfigError(f"{record.place}: the conversation has no tokens")
        if not _fits(len(tokens), max_length, too_long, record.place):
            num_skipped += 1
            continue
        num_truncated += max_length is not None and len(tokens) > max_length
        num_straddling += marked.num_straddling > 0
        pairs.append((tokens[:max_length], mask[:max_length]))
    return Tokenized(TokenBatch.of(pairs), len(records), num_skipped, num_truncated, num_straddling)


def take_tokens(
    records: Sequence[Record],
    *,
    vocab_size: int | None = None,
    max_length: int | None = None,
    too_long: str = "error",
) -> Tokenized:
    """Records that are tokens already.

    Args:
        records: the records.
        vocab_size: token ids are below; None where no model was named.
        max_length: limit of tokens in a sample, or None.
        too_long: as :func:`tokenize_records` takes it.

    Raises:
        ConfigError: a record without tokens, or with others than can be; names its place.
    """
    pairs = []
    num_truncated = 0
    for record in records:
        check_tokens(record)
        try:
            tokens, mask = check_sample(record.value)
        except (UsageError, ValueError, OverflowError) as error:  # lists of lists, of text, of huge numbers
            raise ConfigError(f"{record.place}: {error}") from error
        if vocab_size is not None and (largest := int(tokens.max())) >= vocab_size:
            raise ConfigError(
                f"{record.place}: it has the token id {largest}, but the vocabulary of --model ends at "
                f"{vocab_size - 1}; tokenise with the model's own tokenizer"
            )
        if _fits(len(tokens), max_length, too_long, record.place):
            num_truncated += max_length is not None and len(tokens) > max_length
            pairs.append((tokens[:max_length], mask[:max_length]))
    return Tokenized(TokenBatch.of(pairs), len(records), len(records) - len(pairs), num_truncated, 0)


def _fits(num_tokens: int, max_length: int | None, too_long: str, place: str) -> bool:
    """Whether a sample is kept, perhaps cut.

    Raises:
        ConfigError: it is too long, and ``too_long`` is ``error``.
    """
    if max_length is None or num_tokens <= max_length:
        return True
    if too_long == "error":
        raise ConfigError(
            f"{place}: the sample has {num_tokens} tokens, more than --max-length {max_length}; raise it, or "
            "choose --too-long truncate or skip"
        )
    return too_long == "truncate"


def _render(record: Record, kind: str, tokenizer: TextTokenizer, turns: str) -> tuple[str, list[Span]]:
    """The text of a record, and its spans to be learned."""
    if kind == MESSAGES:
        return _render_conversation(record, tokenizer, turns)
    parts = [record.value[key] for key in kind.split(", ")]
    for key, part in zip(kind.split(", "), parts, strict=True):
        if not isinstance(part, str):
            raise ConfigError(f"{record.place}: {key} must be text, but is {_shown(part)}")
    text = "".join(parts)
    start = len(parts[0]) if kind == PAIR else 0
    return text, [(start, len(text))] if start < len(text) else []


def _render_conversation(record: Record, tokenizer: TextTokenizer, turns: str) -> tuple[str, list[Span]]:
    messages = _messages(record)
    tools = record.value.get("tools")

    def render(count: int, generation_prompt: bool = False) -> str:
        try:
            return tokenizer.render(messages[:count], tools, generation_prompt=generation_prompt)
        except ChatTemplateError as error:
            if count == 0:
                raise ConfigError(
                    f"{record.place}: the conversation begins with the assistant, and the chat template "
                    f"has no text before it: {error}; begin it with another turn, such as a user's"
                ) from error
            what = "the conversation" if count == len(messages) else f"its first {count} messages"
            raise ConfigError(f"{record.place}: the chat template refuses {what}: {error}") from error

    whole = render(len(messages))
    spans = []
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for index in answers if turns == "all" else answers[-1:]:
        before = render(index, generation_prompt=True)
        after = whole if index == len(messages) - 1 else render(index + 1)
        for beginning, rest in ((before, after), (after, whole)):
            if not rest.startswith(beginning):
                pairs = enumerate(zip(beginning, rest, strict=False))
                same = next((i for i, (a, b) in pairs if a != b), min(len(beginning), len(rest)))
                raise ConfigError(
                    f"{record.place}: the loss mask cannot be derived from the chat template: around message "
                    f"{index} it does not begin a longer conversation with the text of the shorter one "
                    f"(character {same}: {beginning[same : same + 30]!a} became "
                    f"{rest[same : same + 30]!a}); learn only the last turn by --turns last, or "
                    "give a template that leaves earlier turns as they are by --chat-template FILE"
                )
        if len(after) > len(before):
            spans.append((len(before), len(after)))
    return whole, spans


def _messages(record: Record) -> list[dict[str, Any]]:
    """The messages without keys whose value is null: columns of Arrow have every key."""
    messages = record.value["messages"]
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ConfigError(
            f"{record.place}: messages must be a list of at least one, but is {_shown(messages)}"
        )
    cleaned = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ConfigError(
                f"{record.place}: message {index} must be an object with role and content, but is "
                f"{_shown(message)}"
            )
        kept = {key: value for key, value in message.items() if value is not None}
        for key in ("role", "content"):
            if not isinstance(kept.get(key), str) and not (key == "content" and "tool_calls" in kept):
                shown = _shown(message.get(key))
                raise ConfigError(f"{record.place}: {key} of message {index} must be text, but is {shown}")
        cleaned.append(kept)
    return cleaned


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {ascii(value)[:60]}"
