"""The kinds of values that keys of the configuration take, each with the check that belongs to it."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MAX_INT = 2**31 - 1
MAX_SECONDS = 1e7

SIGNALS = ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2")


def _whole(value: Any) -> Any:
    """Takes ``1e3`` for 1000, as DeepSpeed does."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_INT:
        return int(value)
    return value


def _number(value: Any) -> Any:
    """Makes a float of an int of any size; pydantic refuses the infinite ones."""
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return float("inf")
    return value


Int = Annotated[int, BeforeValidator(_whole), Field(le=MAX_INT)]
Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Beta = Annotated[Float, Field(ge=0, lt=1)]


def _block_classes(value: Any) -> Any:
    """Checks ``odc.wrap``."""
    names = value if isinstance(value, tuple) else ()
    if value == "auto" or (names and all(isinstance(n, str) and n.isidentifier() for n in names)):
        return value
    if isinstance(value, str) and value.isidentifier() and value.isascii():
        raise ValueError(f"got one name; expected auto or a list of class names: [{value}]")
    raise ValueError("expected auto or a list of class names such as [LlamaDecoderLayer]")


BlockClasses = Annotated[tuple[str, ...] | Literal["auto"], BeforeValidator(_block_classes)]


def _assignments(value: Any) -> Any:
    """Checks ``launch.env``."""
    for item in value if isinstance(value, tuple) else ():
        name, equals, _ = item.partition("=") if isinstance(item, str) else ("", "", "")
        if not equals or not name.isascii() or not name.isidentifier():
            raise ValueError(f"expected a list of NAME=VALUE, found {item!r}")
    return value


Assignments = Annotated[tuple[str, ...], BeforeValidator(_assignments)]


def _signals(value: Any) -> Any:
    """Checks ``launch.signals``; SIGTERM and TERM are the same."""
    if not isinstance(value, tuple):
        raise ValueError(f"expected a list of signal names out of {', '.join(SIGNALS)}")
    names = []
    for name in value:
        short = name.upper().removeprefix("SIG") if isinstance(name, str) else ""
        if short not in SIGNALS:
            shown = name if isinstance(name, (str, int)) else type(name).__name__
            reason = " cannot be caught" if short in ("KILL", "STOP") else " is no signal"
            names_text = ", ".join(SIGNALS)
            raise ValueError(f"{ascii(shown)[:40]}{reason}; expected names out of {names_text}")
        names.append(short)
    return tuple(dict.fromkeys(names))


Signals = Annotated[tuple[str, ...], BeforeValidator(_signals)]


def _names(value: Any) -> Any:
    """Checks a list of names in ``model.lora`` and ``model.freeze``."""
    if value is None or (isinstance(value, tuple) and all(isinstance(n, str) and n for n in value) and value):
        return value
    if isinstance(value, str) and value:
        raise ValueError(f"got one name; expected a list of names: [{value}]")
    raise ValueError("expected a list of names such as [q_proj, v_proj]")


Names = Annotated[tuple[str, ...] | None, BeforeValidator(_names)]


def _target_modules(value: Any) -> Any:
    """Checks ``model.lora.target_modules``."""
    return value if value == "all-linear" else _names(value)


TargetModules = Annotated[tuple[str, ...] | Literal["all-linear"] | None, BeforeValidator(_target_modules)]


def _duration(value: Any) -> Any:
    """Checks ``preemption.max_time``; seconds."""
    seconds: Any = value
    if isinstance(value, str):
        found = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]?\d):([0-5]?\d)", value)
        if found is None:
            raise ValueError(
                f"expected seconds, or a time such as '03:50:00' or '1-12:00:00', found {value!r}"
            )
        days, hours, minutes, rest = (int(part or 0) for part in found.groups())
        seconds = float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"expected a time above 0 in seconds, or text such as '03:50:00', found {value!r}")
    return float(seconds)


Duration = Annotated[float | None, BeforeValidator(_duration)]


def _reshard(value: Any) -> Any:
    """Checks ``odc.reshard_after_forward``."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        raise ValueError(
            "resharding to a smaller group is not supported (those shards are in no window, so they could "
            "only be gathered by a collective in lock-step); expected true or false"
        )
    raise ValueError("expected true or false")


Reshard = Annotated[bool, BeforeValidator(_reshard)]


class Section(BaseModel):
    """Frozen, strict about types, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
