"""From the tree of a source to a Config: translate, validate, look for contradictions, name every mistake."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from odcengine import _config_deepspeed as deepspeed
from odcengine._config_contradictions import contradictions
from odcengine._config_schema import (
    all_paths,
    choices,
    did_you_mean,
    form,
    nearest,
    nested_models,
    section_form,
    section_models,
    text_hint,
)
from odcengine._config_source import Path, Problem, Source, read_source, show, show_path
from odcengine.config import PARAMS, Choice, Config
from odcengine.errors import ConfigError

REFUSED_VALUES: dict[str, tuple[tuple[Any, str], ...]] = {
    "zero_optimization.stage": tuple(
        (stage, f"stage {stage} is not supported: parameters are always sharded; expected 3")
        for stage in (0, 1, 2)
    ),
}
"""Values that are understood and refused, with the reason."""


def build(source: str | os.PathLike[str] | Mapping[str, Any]) -> Config:
    """Reads ``source`` and returns its Config; see :func:`odcengine.config.load_config`."""
    parsed = read_source(source)
    checker = _Checker(parsed)
    config = checker.run() if parsed.tree is not None else None
    if parsed.problems or config is None:
        raise ConfigError(*parsed.report(parsed.problems))
    return config.with_notices(parsed.report(checker.notices))


class _Checker:
    """One pass over one source; mistakes go to ``source.problems``."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.tree: dict[str, Any] = source.tree or {}
        self.notices: list[Problem] = []
        self.dropped: list[Path] = []
        self.max_length_copied = False

    def run(self) -> Config | None:
        self._rename()
        self._empty_sections()
        self._require_batch_size()
        self._deepspeed_keys()
        for name in PARAMS:
            self._typed_section(name)
        self._auto(self.tree, ())
        self._refused_values()
        self._dependent_defaults()
        config = self._validate()
        if config is not None:
            self._contradictions(config)
        return config

    # --- access to the tree -----------------------------------------------------------------------

    def problem(self, path: Path, message: str) -> None:
        self.source.problems.append(Problem(path, message))

    def notice(self, path: Path, message: str) -> None:
        self.notices.append(Problem(path, message))

    def holder(self, path: Path) -> dict[str, Any] | None:
        """Returns the mapping that holds the last key of ``path``, None where that key is missing."""
        node: Any = self.tree
        for part in path[:-1]:
            node = node.get(part) if isinstance(node, dict) else None
        return node if isinstance(node, dict) and path[-1] in node else None

    def get(self, dotted: str) -> Any:
        """Returns the value at ``dotted``, None where it is missing."""
        path = tuple(dotted.split("."))
        holder = self.holder(path)
        return None if holder is None else holder[path[-1]]

    def drop(self, path: Path) -> None:
        """Removes a wrong value, so that its default stands in for the rest of the checks."""
        self.dropped.append(path)
        if (holder := self.holder(path)) is not None:
            del holder[str(path[-1])]

    def model(self, path: Path) -> type[BaseModel] | None:
        """Returns the class of the section at ``path``."""
        if not path:
            return Config
        if path[0] not in PARAMS:
            if len(path) == 1:
                return section_models().get(str(path[0]))
            return nested_models().get(show_path(path))
        if len(path) == 1:
            return Choice
        kind = self.get(f"{path[0]}.type")
        known = isinstance(kind, str) and path[1:] == ("params",)
        return PARAMS[str(path[0])].get(kind) if known else None

    def field(self, path: Path) -> FieldInfo | None:
        """Returns the field at ``path`` of the schema."""
        model = self.model(path[:-1])
        return model.model_fields.get(str(path[-1])) if model is not None else None

    # --- translation ------------------------------------------------------------------------------

    def _rename(self) -> None:
        for old, new in deepspeed.RENAMED.items():
            if old not in self.tree:
                continue
            value = self.tree.pop(old)
            target = tuple(new.split("."))
            node: Any = self.tree
            for part in target[:-1]:
                node[part] = {} if node.get(part) is None else node[part]
                node = node[part]
            if isinstance(node, dict) and target[-1] in node:
                self.problem((old,), f"is DeepSpeed's name of {new}, which is given as well; keep one")
            elif isinstance(node, dict):
                node[target[-1]] = value
                for path, line in list(self.source.lines.items()):
                    if path[0] == old:
                        self.source.lines.setdefault((*target, *path[1:]), line)
                self.notice((old,), f"taken as {new}")

    def _empty_sections(self) -> None:
        """A section whose keys are all commented out is null in YAML."""
        for name in section_models():
            if name in self.tree and self.tree[name] is None:
                self.tree[name] = {}
        for name in PARAMS:
            section = self.tree.get(name)
            if isinstance(section, dict) and section.get("params") is None:
                section["params"] = {}

    def _require_batch_size(self) -> None:
        sizes = ("train_batch_size", "train_micro_batch_size_per_gpu")
        if all(self.tree.get(size) is None for size in sizes):
            self.problem(
                ("train_batch_size",),
                "missing; give it or train_micro_batch_size_per_gpu (`auto` where the script forms its own "
                "minibatches)",
            )

    def _deepspeed_keys(self) -> None:
        passed_on = self.get("odc.backend") == "deepspeed"
        for dotted, reason in deepspeed.NO_EFFECT.items():
            path = tuple(dotted.split("."))
            if (holder := self.holder(path)) is None:
                continue
            value = holder.pop(path[-1])
            if not passed_on:
                self.notice(path, f"accepted without effect: {reason}")
            elif value == deepspeed.AUTO:
                self.notice(path, "auto -> DeepSpeed's default")
            else:
                self._pass_on(path, value)
        for dotted, reason in deepspeed.REFUSED.items():
            path = tuple(dotted.split("."))
            if (holder := self.holder(path)) is not None:
                value = holder.pop(path[-1])
                if not deepspeed.is_off(dotted, value):
                    self.problem(path, reason)
                elif isinstance(value, dict) and value.get("enabled") == deepspeed.AUTO:
                    self.notice((*path, "enabled"), "auto -> false")

    def _pass_on(self, path: tuple[str, ...], value: Any) -> None:
        """Put a key of DeepSpeed's into the section that is passed on to it."""
        if self.tree.get("deepspeed") is None:
            self.tree["deepspeed"] = {}
        node: Any = self.tree["deepspeed"]
        for part in path[:-1]:
            node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):  # what else stands there is reported as what it is
            node[path[-1]] = value

    def _typed_section(self, name: str) -> None:
        """Canonicalises the ``type`` of an optimizer or scheduler; drops a section without a valid one."""
        section = self.tree.get(name)
        if not isinstance(section, dict):
            return
        kind = section.get("type")
        kinds = {known.lower(): known for known in PARAMS[name]}
        expected = f"expected one of {', '.join(PARAMS[name])}"
        path = (name, "type")
        if not isinstance(kind, str):
            got = f"got {show(kind)}" if "type" in section else "missing"
            self.problem(path, f"{got}; {expected}")
        elif found := kinds.get(deepspeed.TYPE_ALIASES.get(kind.lower(), kind).lower()):
            if kind.lower() != found.lower():
                self.notice(path, f"{kind} taken as {found}")
            section["type"] = found
            if isinstance(section["params"], dict):
                self._typed_params(name, found, section["params"])
            return
        elif kind.lower() in deepspeed.REFUSED_TYPES:
            self.problem(path, f"{show(kind)} is not in this version; {expected}")
        else:
            self.problem(path, f"{show(kind)} is unknown; {did_you_mean(kind, PARAMS[name])}{expected}")
        self.drop((name,))

    def _typed_params(self, name: str, kind: str, params: dict[str, Any]) -> None:
        """Handles the parameters that only DeepSpeed has, and those whose meaning differs from torch."""
        path = (name, "params")
        for key, (harmless, reason) in deepspeed.PARAMS[name].items():
            if key in params and key not in PARAMS[name][kind].model_fields:
                value = params.pop(key)
                if harmless is ...:
                    self.notice((*path, key), f"accepted without effect: {reason}")
                elif type(value) is not type(harmless) or value != harmless:
                    self.problem((*path, key), reason)
        if kind == "WarmupDecayLR" and "warmup_max_lr" not in params:
            self.notice(path, "warmup_max_lr is the optimizer's lr (in DeepSpeed it would be 0.001)")
        if (
            kind == "Adam"
            and params.get("weight_decay", 0) not in (0, deepspeed.AUTO)
            and "adam_w_mode" not in params
        ):
            self.notice(
                (*path, "weight_decay"),
                "decoupled, as by DeepSpeed's Adam; `adam_w_mode: false` gives torch's L2 term",
            )

    def _auto(self, section: dict[str, Any], path: Path) -> None:
        """Replaces ``auto`` where it is accepted and refuses it where it is not."""
        for key, value in list(section.items()):
            here = (*path, key)
            if isinstance(value, dict):
                if self.model(here) is not None:
                    self._auto(value, here)
            elif value == deepspeed.AUTO:
                field = self.field(here)
                if field is None or "auto" in choices(field.annotation):
                    continue
                if (accepted := deepspeed.AUTO_VALUES.get(show_path(here))) is None:
                    self.problem(here, f"`auto` is not accepted here; expected {form(field)}")
                    self.drop(here)
                else:
                    section[key], text = accepted
                    if text == deepspeed.OPTIMIZER_LR:
                        lr = self.get("optimizer.params.lr")
                        text += f", {5e-5 if lr == deepspeed.AUTO else show(lr)}" if lr else ""
                    self.notice(here, f"auto -> {text}")

    def _refused_values(self) -> None:
        for dotted, values in REFUSED_VALUES.items():
            path = tuple(dotted.split("."))
            value = self.get(dotted)
            for refused, reason in values:
                if type(value) is type(refused) and value == refused:
                    self.problem(path, reason)
                    self.drop(path)

    def _dependent_defaults(self) -> None:
        """Fills in the defaults that depend on other keys."""
        equal_counts = self.get("odc.transport") == "collective" or self.get("odc.lockstep") is True
        balance = self.tree.setdefault("balance", {})
        if equal_counts and isinstance(balance, dict):
            balance.setdefault("strategy", "lb_micro")
        if self.get("odc.deterministic") is True and isinstance(balance, dict):
            balance.setdefault("learn_costs", False)
        data = self.tree.setdefault("data", {})
        limit = self.get("balance.max_tokens_per_micro_batch")
        if isinstance(data, dict) and data.get("max_length") is None:
            data.pop("max_length", None)
            if limit is not None and ("data", "max_length") not in self.dropped:
                data["max_length"] = limit
                self.max_length_copied = True

    # --- validation -------------------------------------------------------------------------------

    def _validate(self) -> Config | None:
        """Reports what pydantic finds; returns a Config with defaults in place of what is wrong."""
        try:
            return Config.model_validate(self.tree)
        except ValidationError as error:
            wrong = [self._report(detail) for detail in error.errors(include_url=False)]
        for path in wrong:
            self.drop(path)
        try:
            return Config.model_validate(self.tree)
        except ValidationError:
            return None

    def _report(self, detail: ErrorDetails) -> Path:
        """Names one mistake that pydantic found; returns what has to be dropped to go on without it."""
        path: Path = detail["loc"]
        if path[0] in PARAMS and len(path) > 1:
            path = (path[0], *path[2:])  # pydantic puts the type's name there
        kind, value = detail["type"], detail["input"]
        if kind == "extra_forbidden":
            self.problem(path, self._unknown_key(path))
            return path
        owner = path
        while self.field(owner) is None and len(owner) > 1:
            owner = owner[:-1]
        field, section = self.field(owner), self.model(owner)
        words = choices(field.annotation) if field is not None else []
        expected = form(field) if field is not None else "another value"
        if section is not None and section is not Choice:
            expected = section_form(section)
        if kind == "missing":
            self.problem(path, f"missing; expected {expected}")
            return path[:1]  # only sections with a type have keys that must be given
        if path == ("data", "max_length") and self.max_length_copied:
            return path  # max_tokens_per_micro_batch is reported itself
        if kind == "value_error":
            message = str(detail["ctx"]["error"])
        else:
            hint = ""
            if isinstance(value, str):
                hint = did_you_mean(value, words) or text_hint(value, expected)
            if kind == "less_than_equal" and "<=" not in expected:
                expected += f", at most {detail['ctx']['le']}"
            message = f"got {show(value)}; {hint}expected {expected}"
        self.problem(path, message)
        return owner

    def _unknown_key(self, path: Path) -> str:
        """Returns what to say about a key that is not in the schema."""
        key, section = str(path[-1]), path[:-1]
        model = self.model(section)
        here = list(model.model_fields) if model is not None else []
        elsewhere = [known for known in all_paths() if known.rpartition(".")[2] == key]
        if elsewhere:
            return f"unknown key here; it belongs at {' or '.join(elsewhere[:3])}"
        near = nearest(key, [*here, *deepspeed.known_keys(show_path(section))])
        if near:
            return f"unknown key; did you mean {near}?"
        where = show_path(section) or "the top level"
        return f"unknown key; {where} has {', '.join(here)}"

    def _contradictions(self, config: Config) -> None:
        """Reports pairs of values that exclude each other, unless one of them is wrong by itself."""
        for paths, message in contradictions(config):
            keys = [tuple(path.split(".")) for path in paths]
            if not any(key[: len(bad)] == bad for key in keys for bad in self.dropped):
                self.problem(keys[0], message)
