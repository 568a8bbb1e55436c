"""Records of raw data -> tokens with loss masks.

Four kinds of records, told apart by their keys:

``chosen, rejected``     a preference pair: two answers to one prompt (``preference.py``)
``messages``             a conversation; the assistant's turns are to be learned
``prompt, completion``   the completion and the end of the sequence are to be learned
``text``                 everything is to be learned

Without a tokenizer, records are tokens already: ``input_ids``, with ``loss_mask`` or ``labels`` beside them,
or ``sequences`` of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from odcengine.data.preference import (
    PAIR_OF_CONVERSATIONS,
    PREFERENCE_KEYS,
    PREFERENCES,
    preference_kind,
    reference_of,
    render_pair,
)
from odcengine.data.rendering import (
    Record,
    Rendered,
    encode,
    messages_of,
    render_conversation,
    render_texts,
    shown,
)
from odcengine.data.token_batch import TokenBatch, TokenSequence, check_sample
from odcengine.data.tokenizer import Marked, TextTokenizer
from odcengine.errors import ConfigError, UsageError

MESSAGES, PAIR, TEXT = ("messages", "prompt, completion", "text")
KINDS = (*PREFERENCES, MESSAGES, PAIR, TEXT)
TURNS = ("all", "last")
USED_KEYS = (*PREFERENCE_KEYS, "messages", "completion", "text")
TOKENS = "input_ids"
TOKEN_KEYS = ("input_ids", "loss_mask", "labels", "sequences", "attention_mask")
TOO_LONG = ("error", "truncate", "skip")


class Tokenized(NamedTuple):
    """Tokens of some records, and what happened to them.

    Attributes:
        batch: the samples, in the records' order.
        num_records: records read.
        num_skipped: records left out for being too long.
        num_truncated: samples that were cut.
        num_straddling: samples in which a token holds the end of a prompt and the beginning of its answer.
        num_equal: preference pairs left out because their answers are the same.
    """

    batch: TokenBatch
    num_records: int
    num_skipped: int
    num_truncated: int
    num_straddling: int
    num_equal: int = 0


def kind_of(record: Record) -> str:
    """Which of :data:`KINDS` a record is. Keys whose value is null count as missing.

    Raises:
        ConfigError: none of them.
    """
    value = record.value
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{record.place}: a record must be an object with the keys {_KEYS}, but is {shown(value)}"
        )
    preference = preference_kind(record)
    if preference is not None:
        return preference
    for kind in (MESSAGES, PAIR, TEXT):
        if all(value.get(key) is not None for key in kind.split(", ")):
            return kind
    keys = (f"{key} (null)" if value[key] is None else str(key) for key in value)
    found = ascii(", ".join(sorted(keys)) or "no keys")[1:-1]
    raise ConfigError(f"{record.place}: the record has {found[:200]}; expected the keys {_KEYS}")


_KEYS = "messages, or prompt and completion, or text, or prompt, chosen and rejected"


def check_tokens(record: Record) -> str:
    """Check that a record is tokens.

    Returns:
        The kind of such records.

    Raises:
        ConfigError: it has no ``input_ids``, nor ``sequences``.
    """
    if isinstance(record.value, Mapping):
        found = next((key for key in ("sequences", TOKENS) if record.value.get(key) is not None), None)
        if found is not None:
            return found
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
    conversations = kind in (MESSAGES, PAIR_OF_CONVERSATIONS)
    if conversations and not tokenizer.has_chat_template:
        remedy = (
            "give one by --chat-template FILE"
            if tokenizer.kind == "transformers"
            else "give a tokenizer directory of transformers that has one"
        )
        raise ConfigError(
            f"{place}: records with messages need a chat template, but the tokenizer {tokenizer.path} has "
            f"none; {remedy}, or write the records as prompt and completion"
        )
    if not conversations and tokenizer.eos is None:
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
        max_length: limit of tokens in a sample, of a pair in each of the two sequences; or None.
        too_long: what to do with longer ones: ``error``, ``truncate`` (keep the first ``max_length`` tokens)
            or ``skip``.
        turns: which of the assistant's turns are learned: ``all``, or the ``last`` of each conversation.

    Raises:
        ConfigError: a record of another kind or that makes no sense, or one that is too long;
            names its place.
    """
    rendered: list[list[Rendered]] = []
    for record in records:
        found = kind_of(record)
        if found != kind:
            raise ConfigError(
                f"{record.place}: the record has the keys of `{found}`, but the first of this file "
                f"those of `{kind}`; a file holds one kind of records, so split it"
            )
        rendered.append(_render(record, kind, tokenizer, turns))
    flat = [(r.place, part) for r, parts in zip(records, rendered, strict=True) for part in parts]
    marked = iter(encode(flat, tokenizer))
    is_pair = kind in PREFERENCES
    samples: list[list[TokenSequence]] = []
    num_skipped = num_truncated = num_straddling = num_equal = 0
    for record, parts in zip(records, rendered, strict=True):
        whole = [next(marked) for _ in parts]
        longest = max(len(part.tokens) for part in whole)
        if not _fits(longest, max_length, too_long, record.place):
            num_skipped += 1
            continue
        references = reference_of(record) if is_pair else [None]
        sample = [_cut(part, max_length, known) for part, known in zip(whole, references, strict=True)]
        is_cut = max_length is not None and longest > max_length
        if is_pair and is_cut:
            if references[0] is not None:
                raise ConfigError(
                    f"{record.place}: the pair is cut to --max-length {max_length}, but its "
                    "log-probabilities are of whole answers; choose --too-long skip, or leave them away"
                )
            if not all(sequence.loss_mask[1:].any() for sequence in sample):  # nothing is left of an answer
                num_skipped += 1
                continue
        if is_pair and np.array_equal(sample[0].tokens, sample[1].tokens):
            num_equal += 1
            continue
        num_truncated += is_cut
        num_straddling += any(part.num_straddling for part in whole)
        samples.append(sample)
    try:
        batch = TokenBatch.of_sequences(samples, grouped=is_pair)
    except UsageError as error:  # some pairs have log-probabilities of a reference, others do not
        raise ConfigError(f"{records[0].place} and those after it: {error}") from error
    return Tokenized(batch, len(records), num_skipped, num_truncated, num_straddling, num_equal)


def _cut(marked: Marked, max_length: int | None, reference: float | None) -> TokenSequence:
    return TokenSequence(marked.tokens[:max_length], marked.loss_mask[:max_length], reference)


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
    samples = []
    kind = check_tokens(records[0]) if records else TOKENS
    num_truncated = 0
    for record in records:
        found = check_tokens(record)
        if found != kind:
            raise ConfigError(
                f"{record.place}: the record has {found}, but the first of this file {kind}; a file holds "
                "one kind of records, so split it"
            )
        try:
            sample = check_sample(record.value)
        except (UsageError, ValueError, OverflowError) as error:  # lists of lists, of text, of huge numbers
            raise ConfigError(f"{record.place}: {error}") from error
        largest = max(int(sequence.tokens.max()) for sequence in sample)
        if vocab_size is not None and largest >= vocab_size:
            raise ConfigError(
                f"{record.place}: it has the token id {largest}, but the vocabulary of --model ends at "
                f"{vocab_size - 1}; tokenise with the model's own tokenizer"
            )
        longest = max(len(sequence.tokens) for sequence in sample)
        if _fits(longest, max_length, too_long, record.place):
            is_cut = max_length is not None and longest > max_length
            if is_cut and any(sequence.ref_logprob is not None for sequence in sample):
                raise ConfigError(
                    f"{record.place}: the sample is cut to --max-length {max_length}, but its ref_logprobs "
                    "are of whole sequences; choose --too-long skip, or leave them away"
                )
            num_truncated += is_cut
            samples.append([TokenSequence(t[:max_length], m[:max_length], known) for t, m, known in sample])
    try:
        batch = TokenBatch.of_sequences(samples, grouped=kind != TOKENS)
    except UsageError as error:
        raise ConfigError(f"{records[0].place} and those after it: {error}") from error
    return Tokenized(batch, len(records), len(records) - len(samples), num_truncated, 0)


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


def _render(record: Record, kind: str, tokenizer: TextTokenizer, turns: str) -> list[Rendered]:
    """The text of a record, and its spans to be learned; two of a preference pair."""
    place, value = record
    if kind in PREFERENCES:
        return render_pair(record, tokenizer, turns)
    if kind == MESSAGES:
        messages = messages_of(place, value["messages"])
        return [render_conversation(place, messages, value.get("tools"), tokenizer, turns)]
    parts = [value[key] for key in kind.split(", ")]
    for key, part in zip(kind.split(", "), parts, strict=True):
        if not isinstance(part, str):
            raise ConfigError(f"{place}: {key} must be text, but is {shown(part)}")
    return [render_texts(*parts) if kind == PAIR else render_texts("", parts[0])]
