"""Preference pairs: two answers to one prompt, of which the first is the better one.

``prompt``, ``chosen`` and ``rejected`` are texts, or ``chosen`` and ``rejected`` are lists of messages:
answers (the assistant's turns alone, behind the messages or the text of ``prompt``), or whole conversations,
which have their beginning in common. What is to be learned of a conversation are the assistant's turns from
the message on in which the two differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from odcengine.data.rendering import Record, Rendered, messages_of, render_conversation, render_texts, shown
from odcengine.data.tokenizer import TextTokenizer
from odcengine.errors import ConfigError

PAIR_OF_TEXTS, PAIR_OF_CONVERSATIONS = PREFERENCES = ("chosen, rejected", "chosen, rejected (messages)")
ANSWERS = ("chosen", "rejected")
REFERENCE_KEYS = ("ref_chosen_logps", "ref_rejected_logps")
PREFERENCE_KEYS = ("prompt", "tools", *ANSWERS, *REFERENCE_KEYS)


def preference_kind(record: Record) -> str | None:
    """Which of :data:`PREFERENCES` a record is; None if it is none.

    Raises:
        ConfigError: one answer is a text and the other is not.
    """
    value = record.value
    if any(value.get(key) is None for key in ANSWERS):
        return None
    are_texts = [isinstance(value[key], str) for key in ANSWERS]
    if are_texts[0] != are_texts[1]:
        raise ConfigError(
            f"{record.place}: chosen is {shown(value['chosen'])}, but rejected is "
            f"{shown(value['rejected'])}; both must be text, or lists of messages"
        )
    return PAIR_OF_TEXTS if are_texts[0] else PAIR_OF_CONVERSATIONS


def render_pair(record: Record, tokenizer: TextTokenizer, turns: str) -> list[Rendered]:
    """Prompt and chosen answer, prompt and rejected answer.

    Args:
        record: one that :func:`preference_kind` knows.
        tokenizer: with a chat template, if it has messages.
        turns: which of the assistant's turns are learned, ``all`` or ``last``.

    Raises:
        ConfigError: the prompt is missing, or not the same for both.
    """
    place, value = record
    prompt = value.get("prompt")
    if preference_kind(record) == PAIR_OF_TEXTS:
        if not isinstance(prompt, str):
            raise ConfigError(
                f"{place}: chosen and rejected are texts, so prompt must be the text before both, but is "
                f"{shown(prompt)}; --column prompt=NAME reads it from another column"
            )
        return [render_texts(prompt, value[key]) for key in ANSWERS]
    asked = _prompt_messages(place, prompt)
    both = [_conversation(place, value[key], key, asked, prompt) for key in ANSWERS]
    same = _num_same(*both)
    if same in map(len, both) and len(both[0]) != len(both[1]):
        raise ConfigError(f"{place}: one of chosen and rejected is only the beginning of the other")
    if same and same < len(both[0]):
        roles = [messages[same]["role"] for messages in both]
        if roles != ["assistant", "assistant"]:
            raise ConfigError(
                f"{place}: chosen and rejected part at message {same}, of the role {' and '.join(roles)}; a "
                "pair is two answers of the assistant to the same messages"
            )
    if not same:
        raise ConfigError(
            f"{place}: chosen and rejected have no message in common; give the same prompt, as first "
            "messages of both or as prompt"
        )
    tools = value.get("tools")
    return [render_conversation(place, messages, tools, tokenizer, turns, first=same) for messages in both]


def _prompt_messages(place: str, prompt: Any) -> list[dict[str, Any]]:
    if prompt is None:
        return []
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return messages_of(place, prompt, "prompt")


def _conversation(
    place: str, answer: Any, key: str, asked: list[dict[str, Any]], prompt: Any
) -> list[dict[str, Any]]:
    """The whole conversation: an answer behind the prompt, or the conversation that is there already."""
    messages = messages_of(place, answer, key)
    if messages[0]["role"] == "assistant":
        if not asked:
            raise ConfigError(
                f"{place}: {key} begins with the assistant, and there is no prompt; give prompt, or whole "
                "conversations"
            )
        return [*asked, *messages]
    begins = messages[: len(asked)] == asked
    # Beside conversations, a prompt that is text is what the user said, perhaps behind a system message.
    is_said = isinstance(prompt, str) and any(
        message.get("content", "").strip() == prompt.strip() for message in messages
    )
    if asked and not begins and not is_said:
        raise ConfigError(
            f"{place}: {key} is a conversation of its own that does not begin with prompt; leave prompt away "
            "(--column prompt=), or give the assistant's answer alone"
        )
    return messages


def _num_same(chosen: list[dict[str, Any]], rejected: list[dict[str, Any]]) -> int:
    pairs = enumerate(zip(chosen, rejected, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))


def reference_of(record: Record) -> list[float | None]:
    """Log-probabilities of both answers by a reference model, if the record has them.

    Raises:
        ConfigError: only one is there, or one is no finite number.
    """
    value: Mapping[str, Any] = record.value
    found = [value.get(key) for key in REFERENCE_KEYS]
    if found == [None, None]:
        return [None, None]
    for key, number in zip(REFERENCE_KEYS, found, strict=True):
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            raise ConfigError(f"{record.place}: {key} must be a finite number, but is {shown(number)}")
    return [float(number) for number in found if number is not None]
