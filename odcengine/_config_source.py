"""Reads a configuration file or mapping into a plain tree that remembers its lines.

YAML and JSON give the same tree: mappings are ``dict[str, ...]``, sequences are tuples, scalars are
``str | int | float | bool | None``. Nothing here knows the schema. Whatever is wrong with the text itself
(syntax, a key written twice, tags, bombs) becomes a :class:`Problem`; nothing is raised.

Plain YAML scalars follow the core schema of YAML 1.2: ``2e-5`` is a number, ``yes`` and ``on`` are text,
``10:30`` is no base-60 number.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import json
import math
import numbers
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import yaml

Path: TypeAlias = "tuple[str | int, ...]"

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32
MAX_NODES = 20_000
_MAX_DIGITS = 40


class Problem(NamedTuple):
    """One mistake: where it is and what is wrong with it.

    Args:
        path: keys and list positions from the top level; empty for the whole file.
        message: what is wrong and the right form.
        line: 1-based line, where it is not the line of ``path``.
    """

    path: Path
    message: str
    line: int | None = None


@dataclass
class Source:
    """A configuration as it was written.

    Args:
        name: the file as the user named it; None for a mapping.
        tree: the top-level mapping; None where the text could not be read as one.
        lines: 1-based line of each key and list item.
        problems: mistakes of the text itself.
    """

    name: str | None
    tree: dict[str, Any] | None = None
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line(self, path: Path) -> int:
        """Returns the line of ``path`` or of its nearest ancestor that has one, else 1."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return 1

    def locate(self, problem: Problem) -> str:
        """Returns ``FILE:LINE: path.to.key: message``, without the parts that do not exist."""
        text = f"{show_path(problem.path)}: {problem.message}" if problem.path else problem.message
        if self.name is None:
            return text
        line = problem.line if problem.line is not None else self.line(problem.path)
        return f"{self.name}:{line}: {text}"

    def report(self, problems: Iterable[Problem]) -> tuple[str, ...]:
        """Returns a line for each of ``problems``, in the order of the file, each once."""
        ordered = list(problems)
        if self.name is not None:
            ordered.sort(key=lambda problem: problem.line or self.line(problem.path))
        return tuple(dict.fromkeys(self.locate(problem) for problem in ordered))


def show_path(path: Path) -> str:
    """Returns ``a.b[0]`` for ``("a", "b", 0)``; keys that are no plain names are quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            plain = re.fullmatch(r"[\w-]{1,80}", part, re.ASCII)
            text += ("." if text else "") + (part if plain else show(part))
    return text


def show(value: object) -> str:
    """Returns ``value`` as a short piece of ASCII for a message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if abs(value) < 10**_MAX_DIGITS else "a very large number"
    if isinstance(value, str):
        return ascii(value if len(value) <= 60 else value[:57] + "...")
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return repr(value) if isinstance(value, float) else f"an object of type {type(value).__name__}"


def read_source(source: str | os.PathLike[str] | Mapping[str, Any]) -> Source:
    """Reads a file or a mapping; what is wrong with it is in the result's ``problems``."""
    if isinstance(source, Mapping):
        return _read_mapping(source)
    try:
        name = os.fsdecode(source)
    except TypeError:
        kind = type(source).__name__
        message = f"a configuration is a path or a mapping, not an object of type {kind}"
        return Source(None, problems=[Problem((), message)])
    result = Source(name)
    text = _read_text(name, result)
    if text is not None:
        extension = os.path.splitext(name)[1].lower()
        looks_json = extension not in (".yaml", ".yml") and text.lstrip().startswith("{")
        reader = _JsonReader if extension == ".json" or looks_json else _YamlReader
        try:
            tree = reader(text, result).document()
        except _Stop as stop:
            result.problems.append(stop.problem)
        else:
            if isinstance(tree, dict):
                result.tree = tree
            else:
                what = "the file is empty" if tree is None else f"the top level is {show(tree)}"
                result.problems.append(
                    Problem((), f"{what}; expected a mapping such as `train_batch_size: 32`")
                )
    return result


class _Stop(Exception):
    """The text cannot be read any further."""

    def __init__(self, message: str, line: int | None = None, path: Path = ()) -> None:
        self.problem = Problem(path, message, line)


def _read_text(name: str, result: Source) -> str | None:
    """Returns the text of the regular file ``name``; else None and a problem in ``result``."""
    try:
        # Ranks read the file again, each for itself, so a pipe would not do (and could block).
        if not stat.S_ISREG(os.stat(name).st_mode):
            result.problems.append(Problem((), "not a regular file; expected a YAML or JSON file"))
            return None
        with open(name, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        result.problems.append(Problem((), f"cannot read the file: {reason}"))
        return None
    if len(data) > MAX_BYTES:
        message = f"the file has more than {MAX_BYTES} bytes; that is no configuration"
        result.problems.append(Problem((), message))
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"byte 0x{data[error.start]:02x} is not UTF-8; expected a text file in UTF-8"
        result.problems.append(Problem((), message, line))
        return None


def _merge_pair(result: Source, mapping: dict[str, Any], path: Path, key: str, value: Any, line: int) -> None:
    """Adds a pair to ``mapping``; of a key written twice the first one stays."""
    if key in mapping:
        here = (*path, key)
        message = f"written twice, in lines {result.lines[here]} and {line}; keep one"
        result.problems.append(Problem(here, message, line))
        return
    mapping[key] = value


class _Reader:
    """What both readers share: limits and the record of lines."""

    def __init__(self, text: str, result: Source) -> None:
        self.text = text
        self.result = result
        self.nodes = 0

    def count(self, path: Path, line: int, number: int = 1) -> None:
        """Counts nodes and levels against the limits."""
        self.nodes += number
        if len(path) > MAX_DEPTH:
            raise _Stop(f"nested deeper than {MAX_DEPTH} levels", line)
        if self.nodes > MAX_NODES:
            raise _Stop(f"more than {MAX_NODES} values, aliases expanded", line)

    def mark(self, path: Path, line: int) -> None:
        """Records the line of ``path``, unless it is a second one."""
        self.result.lines.setdefault(path, line)

    def clean(self, value: Any, path: Path, line: int) -> Any:
        """Returns ``value``; of text that no file can hold, an escaped form."""
        if isinstance(value, str) and "\0" in value:
            self.result.problems.append(Problem(path, "holds a NUL character", line))
            return ascii(value)
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                self.result.problems.append(Problem(path, "is not valid Unicode text", line))
                return ascii(value)
        return value


# --- YAML ---------------------------------------------------------------------------------------

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = {word: word.lower() == "true" for word in ["true", "True", "TRUE", "false", "False", "FALSE"]}
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_BASED_INT = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INF = re.compile(r"([-+]?)\.(inf|Inf|INF)")
_NAN = re.compile(r"\.(nan|NaN|NAN)")


def _plain_scalar(text: str) -> Any:
    """Resolves a plain scalar by the core schema of YAML 1.2 (section 10.3.2)."""
    if _NULL.fullmatch(text):
        return None
    if text in _BOOL:
        return _BOOL[text]
    # Longer ones become floats: no field takes them, and int() refuses them at some length.
    if _INT.fullmatch(text) and len(text) <= _MAX_DIGITS:
        return int(text.replace("_", ""))
    if _BASED_INT.fullmatch(text) and len(text) <= _MAX_DIGITS:
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if infinite := _INF.fullmatch(text):
        return -math.inf if infinite[1] == "-" else math.inf
    return math.nan if _NAN.fullmatch(text) else text


class _YamlReader(_Reader):
    """Builds the tree from the events of PyYAML's parser.

    Events instead of nodes, because PyYAML's composer recurses without a limit and shares aliased nodes.
    """

    def document(self) -> Any:
        self.events = self._events()
        self.anchors: dict[str, tuple[Any, int]] = {}
        self._next()  # the stream's start
        if isinstance(self._next(), yaml.StreamEndEvent):
            return None
        value = self._value((), self._next())
        self._next()  # the document's end
        after = self._next()
        if not isinstance(after, yaml.StreamEndEvent):
            raise _Stop("a second YAML document begins here; expected one", self._line(after))
        return value

    def _events(self) -> Iterator[yaml.Event]:
        try:
            yield from yaml.parse(self.text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            what = error.problem or error.context or "cannot be parsed"
            if "'\\t'" in what:
                what = "found a tab; indent with spaces"
            where = mark.line + 1 if mark is not None else None
            raise _Stop(f"not valid YAML: {what}", where) from None
        except yaml.reader.ReaderError as error:
            line = self.text.count("\n", 0, error.position) + 1
            what = f"the character {show(self.text[error.position])} is not allowed"
            raise _Stop(f"not valid YAML: {what}", line) from None
        except (ValueError, OverflowError) as error:
            # PyYAML's scanner converts escapes and version numbers without a check of their range.
            raise _Stop(f"not valid YAML: {error}") from None

    def _next(self) -> yaml.Event:
        return next(self.events)

    @staticmethod
    def _line(event: yaml.Event) -> int:
        return int(event.start_mark.line) + 1 if event.start_mark is not None else 1

    def _value(self, path: Path, event: yaml.Event) -> Any:
        line = self._line(event)
        self.count(path, line)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise _Stop(f"alias *{event.anchor} has no finished anchor before it", line, path)
            value, size = self.anchors[event.anchor]
            self.count(path, line, size)
            return copy.deepcopy(value)
        before = self.nodes
        if not isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)):
            raise _Stop("not valid YAML: a value is missing", line, path)
        if event.tag is not None:
            message = f"the tag {show(event.tag)} is not supported; write the plain value"
            self.result.problems.append(Problem(path, message, line))
        value = self._content(path, event)
        if event.anchor is not None:
            self.anchors[event.anchor] = value, self.nodes - before + 1
        return value

    def _content(self, path: Path, event: yaml.Event) -> Any:
        if isinstance(event, yaml.ScalarEvent):
            text = self.clean(event.value, path, self._line(event))
            return _plain_scalar(text) if event.style is None else text
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(event := self._next(), yaml.SequenceEndEvent):
                inner = (*path, len(items))
                self.mark(inner, self._line(event))
                items.append(self._value(inner, event))
            return tuple(items)
        mapping: dict[str, Any] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            line = self._line(event)
            if not isinstance(event, yaml.ScalarEvent):
                message = "a key must be a plain name, not a list, mapping or alias"
                self.result.problems.append(Problem(path, message, line))
                self._value((*path, ""), event)
                self._value((*path, ""), self._next())
                continue
            key = self.clean(event.value, path, line)
            self.mark((*path, key), line)
            value = self._value((*path, key), self._next())
            if key == "<<" and event.style is None:
                message = "merge keys are not supported; write the keys out"
                self.result.problems.append(Problem((*path, key), message, line))
            else:
                _merge_pair(self.result, mapping, path, key, value, line)
        return mapping


# --- JSON ---------------------------------------------------------------------------------------

_SPACE = re.compile(r"[ \t\r\n]*")


def _json_int(text: str) -> Any:
    return int(text) if len(text) <= _MAX_DIGITS else float(text)


class _JsonReader(_Reader):
    """Reads containers itself, for the lines and the limits, and scalars by the json module."""

    def document(self) -> Any:
        self.position = 0
        self.decoder = json.JSONDecoder(parse_int=_json_int)
        self.line_starts = [0, *(m.end() for m in re.finditer("\n", self.text))]
        if self._peek() == "":
            return None
        value = self._value(())
        if self._peek() != "":
            raise self._syntax("text after the end of the object")
        return value

    def _line(self) -> int:
        return bisect.bisect_right(self.line_starts, self.position)

    def _syntax(self, message: str) -> _Stop:
        return _Stop(f"not valid JSON: {message}", self._line())

    def _peek(self) -> str:
        """Skips blanks; returns the next character, "" at the end."""
        space = _SPACE.match(self.text, self.position)
        self.position = space.end() if space else self.position
        return self.text[self.position : self.position + 1]

    def _take(self, expected: str, instead: str) -> str:
        char = self._peek()
        if char == "" or char not in expected:
            found = "the end of the file" if char == "" else show(char)
            raise self._syntax(f"{found} where {instead} should be")
        self.position += 1
        return char

    def _scalar(self) -> Any:
        try:
            value, self.position = self.decoder.raw_decode(self.text, self.position)
        except json.JSONDecodeError as error:
            self.position = max(self.position, min(error.pos, len(self.text)))
            message = f"{error.msg[:1].lower()}{error.msg[1:]}".removesuffix(" at")
            raise self._syntax(message) from None
        return value

    def _value(self, path: Path) -> Any:
        char = self._peek()
        self.count(path, self._line())
        if char not in ("{", "["):
            return self.clean(self._scalar(), path, self._line())
        self.position += 1
        return self._object(path) if char == "{" else self._array(path)

    def _array(self, path: Path) -> tuple[Any, ...]:
        items: list[Any] = []
        if self._peek() == "]":
            self.position += 1
            return ()
        while True:
            self._peek()
            self.mark((*path, len(items)), self._line())
            items.append(self._value((*path, len(items))))
            if self._take(",]", "`,` or `]`") == "]":
                return tuple(items)

    def _object(self, path: Path) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        if self._peek() == "}":
            self.position += 1
            return mapping
        while True:
            if self._peek() != '"':
                self._take("", 'a key in double quotes (JSON has no comments or trailing ",")')
            line = self._line()
            key = self.clean(self._scalar(), path, line)
            self.mark((*path, key), line)
            self._take(":", "`:`")
            value = self._value((*path, key))
            _merge_pair(self.result, mapping, path, key, value, line)
            if self._take(",}", "`,` or `}`") == "}":
                return mapping


# --- mappings of the caller -----------------------------------------------------------------------


def _read_mapping(source: Mapping[str, Any]) -> Source:
    """Copies a caller's mapping into a plain tree."""
    result = Source(None)
    counter = _Reader("", result)

    def convert(value: Any, path: Path) -> Any:
        counter.count(path, 1)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return counter.clean(str.__str__(value), path, 1)
        if isinstance(value, numbers.Integral):
            return int(value)
        if isinstance(value, numbers.Real):
            with contextlib.suppress(OverflowError):
                return float(value)
        if isinstance(value, os.PathLike):
            return os.fsdecode(value)
        if isinstance(value, Mapping):
            mapping: dict[str, Any] = {}
            for key, inner in value.items():
                if isinstance(key, str):
                    name = counter.clean(str.__str__(key), path, 1)
                    plain = convert(inner, (*path, name))
                    if plain is not None or inner is None:  # else it is among the problems
                        mapping[name] = plain
                else:
                    message = f"the key {show(key)} is not text"
                    result.problems.append(Problem(path, message))
            return mapping
        if isinstance(value, (list, tuple)):
            return tuple(convert(inner, (*path, i)) for i, inner in enumerate(value))
        result.problems.append(Problem(path, f"is {show(value)}; expected plain data"))
        return None

    try:
        result.tree = convert(source, ())
    except _Stop as stop:
        result.problems.append(stop.problem)
    return result
