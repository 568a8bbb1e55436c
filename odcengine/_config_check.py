"""From the tree of a source to a Config: translate, validate, look for contradictions, name every mistake."""

from __future__ import annotations

import difflib
import os
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from odcengine import _config_deepspeed as deepspeed
from odcengine._config_source import Path, Problem, Source, read_source, show, show_path
from odcengine.config import DEVICE_OF_TRANSPORT, MAX_INT, PARAMS, Choice, Config, SgdParams
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
                if field is None or "auto" in _choices(field.annotation):
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
        choices = _choices(field.annotation) if field is not None else []
        expected = form(field) if field is not None else "another value"
        if section is not None and section is not Choice:
            expected = _mapping(section)
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
                hint = did_you_mean(value, choices) or _text_hint(value, expected)
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
        elsewhere = [known for known in _all_paths() if known.rpartition(".")[2] == key]
        if elsewhere:
            return f"unknown key here; it belongs at {' or '.join(elsewhere[:3])}"
        near = _nearest(key, [*here, *deepspeed.known_keys(show_path(section))])
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


def _backend_contradictions(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """What DeepSpeed as the back end does otherwise, or not at all."""
    if config.odc.backend == "fsdp2":
        if config.deepspeed:
            yield (
                ("deepspeed", "odc.backend"),
                "is for odc.backend: deepspeed only; remove it, or set the backend",
            )
        return
    odc = config.odc
    wrong = {
        "odc.transport": (odc.transport == "collective", "collective is stock DeepSpeed; expected auto"),
        "odc.lockstep": (odc.lockstep, "measures fsdp2 only; expected false"),
        "odc.deterministic": (odc.deterministic, "sums in rank order with fsdp2 only; expected false"),
        "odc.wrap": (odc.wrap != "auto", "DeepSpeed shards parameter by parameter; remove it"),
        "odc.experts": (odc.experts != "all", "DeepSpeed gathers whole tensors; expected all"),
        "odc.reshard_after_forward": (
            not odc.reshard_after_forward,
            "set deepspeed.zero_optimization.stage3_max_live_parameters and stage3_max_reuse_distance",
        ),
        "model.compile": (config.model.compile, "not with odc.backend: deepspeed; expected false"),
        "model.reference": (
            config.model.reference is not None,
            "not with odc.backend: deepspeed; expected null",
        ),
        "checkpoint.dir": (
            config.checkpoint.dir is not None,
            "checkpoints are DeepSpeed's: call engine.save_checkpoint(dir) in the script, and remove it",
        ),
    }
    for path, (is_wrong, message) in wrong.items():
        if is_wrong:
            yield (path, "odc.backend"), message


def contradictions(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the keys and the message of every contradiction between valid values."""
    yield from _backend_contradictions(config)
    odc, balance = config.odc, config.balance
    strategy = ("balance.strategy", "odc.transport", "odc.lockstep")
    uneven = ("lb_mini", "dynamic")
    equal = "local_sort or lb_micro, which give every rank equally many micro-batches"
    if odc.transport == "collective":
        if odc.lockstep:
            yield (
                ("odc.lockstep", "odc.transport"),
                "measures a one-sided transport, but odc.transport is collective; expected false, or "
                "transport auto or shm",
            )
        if balance.strategy in uneven:
            yield strategy, f"{balance.strategy} cannot run with odc.transport: collective; expected {equal}"
        if odc.sharding == "hybrid":
            yield (
                ("odc.sharding", "odc.transport"),
                "hybrid needs the windows of a one-sided transport, but odc.transport is collective; "
                "expected full",
            )
        if odc.experts == "chosen":
            yield (
                ("odc.experts", "odc.transport"),
                "chosen needs a one-sided transport, but odc.transport is collective, where all ranks gather "
                "the same; expected all",
            )
        if odc.node_size is not None:
            yield (
                ("odc.node_size", "odc.transport"),
                "needs the windows of a one-sided transport, but odc.transport is collective; remove it",
            )
    elif odc.lockstep and balance.strategy in uneven:
        yield strategy, f"{balance.strategy} cannot run with odc.lockstep: true; expected {equal}"
    if odc.deterministic:
        if balance.strategy == "dynamic":
            yield (
                ("balance.strategy", "odc.deterministic"),
                "dynamic gives work to whoever is first, so which rank adds what differs from run to run; "
                "expected lb_mini, or odc.deterministic: false",
            )
        if balance.learn_costs:
            yield (
                ("balance.learn_costs", "odc.deterministic"),
                "plans with learned costs depend on measured times; expected false with "
                "odc.deterministic: true",
            )
    if odc.device not in ("auto", DEVICE_OF_TRANSPORT.get(odc.transport, odc.device)):
        yield (
            ("odc.device", "odc.transport"),
            f"ranks on {odc.device} cannot use odc.transport: {odc.transport}; expected auto",
        )
    if odc.unmapped and odc.transport != "nvshmem":
        yield ("odc.unmapped", "odc.transport"), "is a test switch of odc.transport: nvshmem; remove it"
    if odc.node_size is not None and odc.sharding == "full" and not odc.unmapped:  # a test of several hosts
        yield (
            ("odc.node_size", "odc.sharding"),
            "has no use with odc.sharding: full; remove it, or set sharding to hybrid",
        )
    every, folder = config.monitor.timeline_every, config.monitor.timeline_dir
    if (every > 0) != (folder is not None):
        paths = ("monitor.timeline_every", "monitor.timeline_dir")
        yield (
            paths if every else paths[::-1],
            f"has no effect without {paths[1] if every else paths[0]}; give both or neither",
        )
    checkpoint = config.checkpoint
    stopping = config.preemption
    asked = stopping.max_time is not None or stopping.signals != type(stopping)().signals
    if checkpoint.dir is None and asked:
        yield (
            ("preemption", "checkpoint.dir"),
            "saves a checkpoint before the job ends; give its directory in checkpoint.dir",
        )
    if checkpoint.every_n_steps and checkpoint.dir is None:
        yield (
            ("checkpoint.every_n_steps", "checkpoint.dir"),
            "has no effect without checkpoint.dir; give the directory of the checkpoints",
        )
    if config.model.path is not None and config.model.config is not None:
        yield (
            ("model.config", "model.path"),
            "is for random weights, but model.path names a model; keep one of the two",
        )
    lora = config.model.lora
    if lora is not None and lora.path is not None and lora.model_fields_set != {"path"}:
        others = sorted(lora.model_fields_set - {"path"})
        yield (
            ("model.lora.path", *(f"model.lora.{key}" for key in others)),
            f"the adapter's own settings count; remove {', '.join(others)}",
        )
    limit = balance.max_tokens_per_micro_batch
    if config.data.max_length > limit:
        yield (
            ("data.max_length", "balance.max_tokens_per_micro_batch"),
            f"{config.data.max_length} is more than balance.max_tokens_per_micro_batch {limit}, so such a "
            f"sample fits into no micro-batch; expected at most {limit}",
        )
    micro, steps = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    total = config.train_batch_size
    if None not in (total, micro, steps) and total % (micro * steps):  # type: ignore[operator]
        yield (
            ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
            f"{total} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps} x "
            "ranks for any number of ranks; remove gradient_accumulation_steps, or make them agree",
        )
    optimizer = config.optimizer
    if optimizer is not None:
        params = optimizer.params
        if params.fused and params.foreach:
            yield (
                ("optimizer.params.foreach", "optimizer.params.fused"),
                "excludes fused: true; keep one of the two",
            )
        plain = isinstance(params, SgdParams) and (params.momentum == 0 or params.dampening != 0)
        if isinstance(params, SgdParams) and params.nesterov and plain:
            keys = ("nesterov", "momentum", "dampening")
            yield (
                tuple(f"optimizer.params.{key}" for key in keys),
                "needs momentum > 0 and dampening 0",
            )


# --- the schema as text ---------------------------------------------------------------------------


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
            return f"{_mapping(kinds[0])}, or null"
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
        return _mapping(annotation)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names.get(annotation, "null") + (_bounds(metadata) if annotation in (int, float) else "")


def _mapping(model: type[BaseModel]) -> str:
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


def _choices(annotation: Any) -> list[str]:
    """Returns the words that a field accepts."""
    if get_origin(annotation) is Literal:
        return [arg for arg in get_args(annotation) if isinstance(arg, str)]
    return [choice for arg in get_args(annotation) for choice in _choices(arg)]


def _nearest(word: str, names: list[str]) -> str | None:
    lower = {name.lower(): name for name in names}
    found = difflib.get_close_matches(word.lower()[:80], lower, n=1, cutoff=0.6)
    return lower[found[0]] if found else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """``did you mean X? ``, with the nearest of the names; empty where none is near."""
    near = _nearest(word, list(names))
    return f"did you mean {near}? " if near else ""


def _text_hint(value: str, expected: str) -> str:
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


def _all_paths() -> list[str]:
    """Returns the path of every key of the schema and of every known key of DeepSpeed."""
    paths = list(Config.model_fields)
    for name, model in (section_models() | nested_models()).items():
        paths += [f"{name}.{key}" for key in model.model_fields]
    for name, kinds in PARAMS.items():
        for model in kinds.values():
            paths += [f"{name}.params.{key}" for key in model.model_fields]
    paths += [*deepspeed.NO_EFFECT, *deepspeed.REFUSED]
    return list(dict.fromkeys(paths))
