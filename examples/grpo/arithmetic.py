"""The task: sums and differences of small numbers, whose answers a program can check."""

from __future__ import annotations

import random
import re
from typing import NamedTuple


class Problem(NamedTuple):
    """A question with its answer."""

    prompt: str
    answer: str


class Characters:
    """A tokenizer of the characters that arithmetic needs; 0 is padding, 1 ends an answer."""

    pad_token_id = 0
    eos_token_id = 1
    _ALPHABET = "0123456789+-= "

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return [2 + self._ALPHABET.index(character) for character in text]

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids; what is no character is left out."""
        return "".join(self._ALPHABET[token - 2] for token in tokens if 2 <= token < 2 + len(self._ALPHABET))


def make_problem(dice: random.Random, largest: int) -> Problem:
    """A random problem with numbers up to ``largest``."""
    a, b = dice.randint(0, largest), dice.randint(0, largest)
    if dice.random() < 0.5:
        return Problem(f"{a}+{b}=", str(a + b))
    return Problem(f"{a}-{b}=", str(a - b))


def solve(prompt: str) -> str:
    """The answer to a prompt.

    Raises:
        ValueError: it is no problem of this task.
    """
    found = re.fullmatch(r"(\d+)([+-])(\d+)=", prompt)
    if found is None:
        raise ValueError(f"{prompt!r} is no problem such as '12+7='")
    a, b = int(found[1]), int(found[3])
    return str(a + b if found[2] == "+" else a - b)


def reward_of(prompt: str, completion: str) -> float:
    """1 for the right answer and nothing else; a tenth of it for any number; 0 for what is none."""
    if completion == solve(prompt):
        return 1.0
    return 0.1 if re.fullmatch(r"-?\d+", completion) else 0.0
