"""The schema in words: its sections and keys, what a field accepts, and what a wrong word may have meant."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from odcengine import _config_deepspeed as deepspeed
from odcengine.config import MAX_INT, PARAMS, Config


def section_models() -> dict[str, type[BaseModel]]:
    """Returns the class of every top-level section whose keys do not depend on a ``type``."""
    return {
        name: field.annotation
        for name, field in Config.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def nested_models() -> dict[str, type[BaseModel]]:
    """Returns the class of every section inside of a section, by its path; they are null by default."""
    found = {}
    for section, model in section_models().items():
        for name, field in model.model_fields.items():
            for kind in get_args(field.annotation):
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    found[f"{section}.{name}"] = kind
    return found


def form(field: FieldInfo) -> str:
    """Returns what a field accepts, in words."""
    return _form(field.annotation, field.metadata)


def _form(annotation: Any, metadata: list[Any]) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [m for a in args[1:] for m in (a.metadata if isinstance(a, FieldInfo) else [a])]
        return _form(args[0], [*inner, *metadata])
    if origin in (Union, types.UnionType):
        kinds = [arg for arg in args if arg is not type(None)]
        if len(kinds) == 1 and isinstance(kinds[0], type) and _is_section(kinds[0]):
            return f"{section_form(kinds[0])}, or null"
        if all(map(_is_section, kinds)):
            return "a mapping with the keys type and params, or null"
        return " or ".join(_form(arg, metadata) for arg in args)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}" if len(args) > 1 else str(args[0])
    if origin is dict:
        return "a mapping"
    if origin is tuple:
        count = "" if args[-1] is ... else f" of {len(args)}"
        return f"a list{count}, each {_form(args[0], [])}"
    if _is_section(annotation):
        return section_form(annotation)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names.get(annotation, "null") + (_bounds(metadata) if annotation in (int, float) else "")


def section_form(model: type[BaseModel]) -> str:
    """Returns what stands for a section, in words."""
    return f"a mapping with the keys {', '.join(model.model_fields)}"


def _is_section(annotation: Any) -> bool:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _is_section(args[0])
    if origin in (Union, types.UnionType):
        return all(_is_section(arg) for arg in args)
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _bounds(metadata: list[Any]) -> str:
    bounds = []
    for item in metadata:
        if isinstance(item, annotated_types.Ge):
            bounds.append(f">= {item.ge}")
        elif isinstance(item, annotated_types.Gt):
            bounds.append(f"> {item.gt}")
        elif isinstance(item, annotated_types.Lt):
            bounds.append(f"< {item.lt}")
        elif isinstance(item, annotated_types.Le) and item.le != MAX_INT:
            bounds.append(f"<= {item.le:g}" if isinstance(item.le, float) else f"<= {item.le}")
    return " " + " and ".join(bounds) if bounds else ""


def choices(annotation: Any) -> list[str]:
    """Returns the words that a field accepts."""
    if get_origin(annotation) is Literal:
        return [arg for arg in get_args(annotation) if isinstance(arg, str)]
    return [choice for arg in get_args(annotation) for choice in choices(arg)]


def nearest(word: str, names: list[str]) -> str | None:
    """Returns the name that a misspelt word is most like, None where none is near."""
    lower = {name.lower(): name for name in names}
    found = difflib.get_close_matches(word.lower()[:80], lower, n=1, cutoff=0.6)
    return lower[found[0]] if found else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """``did you mean X? ``, with the nearest of the names; empty where none is near."""
    near = nearest(word, list(names))
    return f"did you mean {near}? " if near else ""


def text_hint(value: str, expected: str) -> str:
    """Explains text where a number or a truth value belongs."""
    if expected.startswith(("a number", "a whole number")):
        try:
            float(value)
        except ValueError:
            return ""
        return "it is text, remove the quotes; "
    if expected.startswith("true or false") and value.lower() in ("yes", "no", "on", "off", "y", "n"):
        return f"it is text in YAML 1.2, write {str(value.lower() in ('yes', 'on', 'y')).lower()}; "
    return ""


def all_paths() -> list[str]:
    """Returns the path of every key of the schema and of every known key of DeepSpeed."""
    paths = list(Config.model_fields)
    for name, model in (section_models() | nested_models()).items():
        paths += [f"{name}.{key}" for key in model.model_fields]
    for name, kinds in PARAMS.items():
        for model in kinds.values():
            paths += [f"{name}.params.{key}" for key in model.model_fields]
    paths += [*deepspeed.NO_EFFECT, *deepspeed.REFUSED]
    return list(dict.fromkeys(paths))
