"""SLURM's compressed notations, lists of hosts and of tasks a node, without ``scontrol``.

Grammar of a host list (order and zero padding are kept)::

    list   = item { "," item }
    item   = text { "[" ranges "]" text }        node[001-004,007]-ib, rack[1-2]n[01-04]
    ranges = range { "," range }
    range  = digits [ "-" digits ]
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from odcengine.errors import ConfigError

MAX_HOSTS = 65536  # more than any cluster: a typing mistake must not fill the memory

_PART = re.compile(r"\[([^\[\]]*)\]|([A-Za-z0-9_.:-]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hostlist(text: str, where: str = "host list") -> list[str]:
    """The hosts of a compressed list, in its order.

    Args:
        text: such as ``node[001-004,007],gpu-a[1-2]``.
        where: what messages call it, such as the variable's name.

    Raises:
        ConfigError: the list does not follow the grammar.
    """
    hosts: list[str] = []
    for item in _split(text, where):
        hosts += _expand_item(item, text, where)
        if len(hosts) > MAX_HOSTS:
            raise ConfigError(f"{where}={text!r} names more than {MAX_HOSTS} hosts")
    return hosts


def expand_counts(text: str, where: str = "counts") -> list[int]:
    """Numbers a node from SLURM's notation: ``4(x2),2`` is 4, 4, 2.

    Raises:
        ConfigError: the text does not follow the notation.
    """
    counts: list[int] = []
    for item in text.split(","):
        found = _COUNT.fullmatch(item)
        if found is None or (found[2] and int(found[2]) == 0):
            raise ConfigError(
                f"{where}={text!r} is not understood at {item!r}; counts a node look like 4(x2),2"
            )
        repeat = int(found[2] or 1)
        if len(counts) + repeat > MAX_HOSTS:
            raise ConfigError(f"{where}={text!r} speaks of more than {MAX_HOSTS} nodes")
        counts += [int(found[1])] * repeat
    return counts


def read_hostfile(path: str, where: str = "SLURM_HOSTFILE") -> list[str]:
    """The hosts of a file for arbitrary distribution, one of each task in the order of ranks.

    Lines hold host lists; ``host*3`` stands for three tasks; text after ``#`` is a comment.

    Raises:
        ConfigError: the file cannot be read, is empty or has a line that is not understood.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{where}={path}: the file cannot be read: {reason}") from error
    hosts: list[str] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        for item in _split(text, f"{path} line {number}"):
            name, star, repeat = item.partition("*")
            if star and not (repeat.isdecimal() and 0 < int(repeat) <= MAX_HOSTS):
                raise ConfigError(f"{path} line {number}: {item!r} is not understood; HOST*N repeats a host")
            hosts += _expand_item(name, text, f"{path} line {number}") * int(repeat or 1)
    if not hosts:
        raise ConfigError(f"{where}={path}: the file names no host")
    return hosts


def _split(text: str, where: str) -> list[str]:
    """Cuts at the commas outside of brackets."""
    items, start, depth = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise _not_understood(text, where, f"the bracket at position {position + 1} has no partner")
        if letter == "," and depth == 0:
            items.append(text[start:position])
            start = position + 1
    if depth:
        raise _not_understood(text, where, "a bracket is not closed")
    items.append(text[start:])
    return items


def _expand_item(item: str, text: str, where: str) -> list[str]:
    choices: list[list[str]] = []
    end, hosts = 0, 1
    for part in _PART.finditer(item):
        if part.start() != end:
            break
        end = part.end()
        choices.append([part[2]] if part[2] is not None else _expand_ranges(part[1], text, where))
        hosts *= len(choices[-1])
        if hosts > MAX_HOSTS:
            raise ConfigError(f"{where}={text!r} names more than {MAX_HOSTS} hosts")
    if not item or end != len(item):
        raise _not_understood(text, where, f"{item!r} is no host name" if item else "a name is missing")
    return ["".join(parts) for parts in itertools.product(*choices)]


def _expand_ranges(ranges: str, text: str, where: str) -> list[str]:
    names: list[str] = []
    for item in ranges.split(","):
        found = _RANGE.fullmatch(item)
        if found is None:
            raise _not_understood(text, where, f"{item!r} is no range of numbers")
        low, high = found[1], found[2] or found[1]
        if int(high) < int(low):
            raise _not_understood(text, where, f"the range {item!r} runs backwards")
        if len(high) != len(low) and (high[0] == "0" or (low[0] == "0" and len(high) < len(low))):
            raise _not_understood(text, where, f"the ends of the range {item!r} are padded differently")
        if int(high) - int(low) >= MAX_HOSTS:
            raise ConfigError(f"{where}={text!r} names more than {MAX_HOSTS} hosts")
        names += [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
    return names


def _not_understood(text: str, where: str, reason: str) -> ConfigError:
    return ConfigError(f"{where}={text!r} is not understood: {reason}; it looks like node[001-004,007],gpu1")
