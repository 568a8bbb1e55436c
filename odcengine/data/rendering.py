"""From a record's texts and messages to the text that is tokenised, and what of it is to be learned.

What the assistant's turns are, the chat template says: the text that it writes for a conversation must begin
with the text that it writes for the conversation's beginning. What it adds for an assistant's turn, after the
generation prompt that precedes it, is that turn. Templates that rewrite earlier turns are refused, unless
only the last turn is to be learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from odcengine.data.tokenizer import ChatTemplateError, Marked, Span, TextTokenizer
from odcengine.errors import ConfigError


class Record(NamedTuple):
    """A record and where it stands.

    Attributes:
        place: file and line, for messages.
        value: as parsed.
    """

    place: str
    value: Any


class Rendered(NamedTuple):
    """A text to be tokenised.

    Attributes:
        text: the whole.
        spans: what of it is to be learned.
        is_conversation: the chat template has written it, with its own beginning and end of the sequence.
    """

    text: str
    spans: list[Span]
    is_conversation: bool


def render_texts(prompt: str, answer: str) -> Rendered:
    """A text and its continuation, which is to be learned."""
    text = prompt + answer
    return Rendered(text, [(len(prompt), len(text))] if answer else [], False)


def render_conversation(
    place: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Any,
    tokenizer: TextTokenizer,
    turns: str,
    first: int = 0,
) -> Rendered:
    """A conversation, of which turns of the assistant are to be learned.

    Args:
        place: where it stands, for messages.
        messages: from :func:`messages_of`.
        tools: as the chat template takes them.
        tokenizer: with a chat template.
        turns: which of the assistant's: ``all`` or ``last``.
        first: number of the first message that may be learned.

    Raises:
        ConfigError: the template refuses it, or rewrites earlier turns.
    """

    def render(count: int, generation_prompt: bool = False) -> str:
        try:
            return tokenizer.render(messages[:count], tools, generation_prompt=generation_prompt)
        except ChatTemplateError as error:
            if count == 0:
                raise ConfigError(
                    f"{place}: the conversation begins with the assistant, and the chat template "
                    f"has no text before it: {error}; begin it with another turn, such as a user's"
                ) from error
            what = "the conversation" if count == len(messages) else f"its first {count} messages"
            raise ConfigError(f"{place}: the chat template refuses {what}: {error}") from error

    whole = render(len(messages))
    spans = []
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
    for index in answers if turns == "all" else answers[-1:]:
        before = render(index, generation_prompt=True)
        after = whole if index == len(messages) - 1 else render(index + 1)
        for beginning, rest in ((before, after), (after, whole)):
            if not rest.startswith(beginning):
                pairs = enumerate(zip(beginning, rest, strict=False))
                same = next((i for i, (a, b) in pairs if a != b), min(len(beginning), len(rest)))
                raise ConfigError(
                    f"{place}: the loss mask cannot be derived from the chat template: around message "
                    f"{index} it does not begin a longer conversation with the text of the shorter one "
                    f"(character {same}: {beginning[same : same + 30]!a} became "
                    f"{rest[same : same + 30]!a}); learn only the last turn by --turns last, or "
                    "give a template that leaves earlier turns as they are by --chat-template FILE"
                )
        if len(after) > len(before):
            spans.append((len(before), len(after)))
    return Rendered(whole, spans, True)


def messages_of(place: str, messages: Any, key: str = "messages") -> list[dict[str, Any]]:
    """The messages of a conversation, without keys whose value is null: columns of Arrow have every key.

    Args:
        place: where they stand.
        messages: as parsed.
        key: their name in the record.

    Raises:
        ConfigError: they are none; names which.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ConfigError(f"{place}: {key} must be a list of at least one, but is {shown(messages)}")
    of = "" if key == "messages" else f" of {key}"
    cleaned = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ConfigError(
                f"{place}: message {index}{of} must be an object with role and content, but is "
                f"{shown(message)}"
            )
        kept = {name: value for name, value in message.items() if value is not None}
        for name in ("role", "content"):
            if not isinstance(kept.get(name), str) and not (name == "content" and "tool_calls" in kept):
                raise ConfigError(
                    f"{place}: {name} of message {index}{of} must be text, but is {shown(message.get(name))}"
                )
        cleaned.append(kept)
    return cleaned


def encode(rendered: Sequence[tuple[str, Rendered]], tokenizer: TextTokenizer) -> list[Marked]:
    """Tokens of texts, each behind its place, with beginning and end of the sequence.

    Raises:
        ConfigError: a text holds what is no character, or has no tokens.
    """
    for place, (text, _, _) in rendered:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{place}: the text holds half of a surrogate pair ({text[error.start]!a}), "
                "which is no character; write characters beyond U+FFFF as UTF-8 or as both halves"
            ) from error
    found = tokenizer.encode_marked([r.text for _, r in rendered], [r.spans for _, r in rendered])
    ended = []
    for (place, (_, _, is_conversation)), marked in zip(rendered, found, strict=True):
        if not is_conversation:  # the chat template writes its own
            bos, eos = tokenizer.bos, [tokenizer.eos]
            marked = marked._replace(
                tokens=np.concatenate([bos, marked.tokens, eos]).astype(np.uint32),
                loss_mask=np.concatenate([np.zeros(len(bos)), marked.loss_mask, [1]]).astype(np.uint8),
            )
        if not len(marked.tokens):
            raise ConfigError(f"{place}: the conversation has no tokens")
        ended.append(marked)
    return ended


def shown(value: Any) -> str:
    """A value in a message."""
    return f"{type(value).__name__} {ascii(value)[:60]}"
