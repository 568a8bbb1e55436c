"""Low-rank adapters by peft, and parameters that are not trained at all.

An adapter can be put on a model whose weights are still in their files (``stored.py``): its own small
matrices are real and random from a seed, and each rank reads its part of all else when the model is sharded.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from odcengine.errors import ConfigError
from odcengine.models._probe import evaluating
from odcengine.models.stored import StoredModel, state_of

if TYPE_CHECKING:
    from odcengine.config import Lora

logger = logging.getLogger(__name__)

_ADAPTER = "default"


def is_adapted(model: nn.Module) -> bool:
    """Whether peft has put an adapter on the model."""
    return hasattr(model, "peft_config")


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude parameters from training, in place.

    Args:
        model: the model, not sharded yet.
        patterns: of the parameters' names, as ``fnmatch`` reads them.

    Raises:
        ConfigError: a pattern fits no name; shows some.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        found = fnmatch.filter(parameters, pattern)
        if not found:
            raise ConfigError(
                f"model.freeze: {pattern!r} fits no parameter of {type(model).__name__}; names are like "
                f"{', '.join(list(parameters)[:3])}"
            )
        for name in found:
            parameters[name].requires_grad_(False)


def make_masters(model: nn.Module) -> None:
    """Give what is trained in 16 bits masters in float32, in place; what is frozen needs none.

    Buffers of 16 bits are widened, too: they are small, and what models compute from them is not cast.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype in (torch.bfloat16, torch.float16):
                module._buffers[name] = buffer.float()


def add_lora(
    model: nn.Module, lora: Lora, *, base: str | None, random_seed: int = 0, only_shapes: bool = False
) -> nn.Module:
    """Put an adapter on a model; everything else is frozen.

    Args:
        model: a causal language model of transformers; its parameters may be on the meta device.
        lora: the configuration's section.
        base: directory or name of the model, which the adapter's files will name.
        random_seed: of the adapter's first values. The global generators are left as they are.
        only_shapes: leave the adapter of a model on the meta device there.

    Returns:
        peft's model around it. The adapter's matrices have at least 32 bits, as peft makes them.

    Raises:
        ConfigError: peft is not installed or does not take the section; a name fits no module.
    """
    peft = _import_peft()
    config = _read(peft, lora.path) if lora.path is not None else _settings(peft, model, lora)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if on_meta and needs_weights(lora) and not only_shapes:
        raise ConfigError("model.lora: use_dora and path need the weights of the model at once")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random_seed)
        try:
            adapted: nn.Module = peft.get_peft_model(model, config, adapter_name=_ADAPTER)
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            raise ConfigError(f"model.lora: peft refuses it: {error}") from error
        if not only_shapes:
            torch.manual_seed(random_seed)
            _begin(adapted)
    if lora.path is not None and not only_shapes:
        _load(peft, adapted, lora.path)
    adapted.peft_config[_ADAPTER].base_model_name_or_path = base  # type: ignore[index, union-attr]
    return adapted.train()


def needs_weights(lora: Lora) -> bool:
    """Whether an adapter is made from the weights of the model, so that these have to be there before."""
    return lora.use_dora or lora.path is not None


def adapt_stored(stored: StoredModel, lora: Lora, *, base: str | None, random_seed: int) -> StoredModel:
    """:func:`add_lora` to a model whose weights are still in their files."""
    before = {alias: stored.names[aliases[0]] for aliases, _ in state_of(stored.model) for alias in aliases}
    model = add_lora(stored.model, lora, base=base, random_seed=random_seed)
    names: dict[str, str] = {}
    for aliases, tensor in state_of(model):
        found = next((before[name] for name in map(_base_name, aliases) if name in before), None)
        if found is not None:
            names[aliases[0]] = found
        elif tensor.is_meta:
            raise ConfigError(f"model.lora: {aliases[0]} has no weights in {base}; give the model=... loaded")
    return replace(stored, model=model, names=names)


def _base_name(name: str) -> str:
    """The name that a tensor of peft's model has in the model inside of it."""
    name = name.removeprefix("base_model.model.")
    for part in (".base_layer.", ".original_module.", f".modules_to_save.{_ADAPTER}."):
        name = name.replace(part, ".")
    return name


def _check_names(model: nn.Module, key: str, ends: Sequence[str]) -> None:
    """Refuse an end of a name that no module has: peft takes it where another one of the list fits."""
    names = [name for name, _ in model.named_modules() if name]
    for end in ends:
        if not any(name == end or name.endswith(f".{end}") for name in names):
            last = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
            last = [name for name in last if not name.isdigit()]
            close = difflib.get_close_matches(end, last, n=1)
            raise ConfigError(
                f"model.lora.{key}: {end!r} is the end of no module's name in {type(model).__name__}; "
                + (f"did you mean {close[0]}? " if close else "")
                + f"Modules end with {', '.join(last[:20])}"
            )


def _settings(peft: Any, model: Any, lora: Lora) -> Any:
    for key in ("target_modules", "modules_to_save"):
        if isinstance(ends := getattr(lora, key), tuple):
            _check_names(model, key, ends)
    tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))

    def names(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    # Else a trained copy of tied embeddings would part from the head.
    ties: dict[str, Any] = {}
    if tied and lora.modules_to_save is not None:
        if "ensure_weight_tying" not in peft.LoraConfig.__dataclass_fields__:
            raise ConfigError(
                "model.lora.modules_to_save: tied embeddings need a newer peft; pip install -U peft"
            )
        ties["ensure_weight_tying"] = True
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=2 * lora.r if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=names(lora.target_modules),
        exclude_modules=names(lora.exclude_modules),
        modules_to_save=names(lora.modules_to_save),
        bias=lora.bias,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        **ties,
    )


def _read(peft: Any, path: str) -> Any:
    """The settings of an adapter that is there."""
    folder = Path(path).expanduser()
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"model.lora.path: {folder.absolute()} has no adapter_config.json; expected a directory made by "
            "save_pretrained() of peft, engine.save_pretrained() or odc export"
        )
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ConfigError(f"model.lora.path: {folder} cannot be read: {error}") from error
    if not isinstance(config, peft.LoraConfig):
        raise ConfigError(f"model.lora.path: {folder} is a {type(config).__name__}, no LoRA")
    config.inference_mode = False
    config.base_model_name_or_path = None
    return config


def _load(peft: Any, model: nn.Module, path: str) -> None:
    folder = str(Path(path).expanduser())
    try:
        weights: Mapping[str, torch.Tensor] = peft.load_peft_weights(folder, device="cpu")
        result = peft.set_peft_model_state_dict(model, weights, adapter_name=_ADAPTER)
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        raise ConfigError(f"model.lora.path: {folder} does not fit the model: {error}") from error
    # peft puts copies of modules in place itself, and then names them here.
    if unexpected := [name for name in result.unexpected_keys if ".modules_to_save." not in name]:
        raise ConfigError(
            f"model.lora.path: {folder} does not fit the model: {unexpected[0]} (of {len(unexpected)}) has "
            "no place"
        )


@torch.no_grad()
def _begin(model: nn.Module) -> None:
    """Give an adapter its first values, the same wherever the weights below it are.

    On the meta device peft has put it there, too, and real memory comes first.
    """
    from peft.tuners.lora import LoraLayer

    for layer in model.modules():
        if not isinstance(layer, LoraLayer):
            continue
        for part_name in layer.adapter_layer_names:
            part = getattr(layer, part_name, None)
            for module in part.modules() if isinstance(part, nn.Module) else ():
                for name, parameter in module._parameters.items():
                    if parameter is not None and parameter.is_meta:
                        module._parameters[name] = nn.Parameter(
                            torch.empty_like(parameter, device="cpu"), parameter.requires_grad
                        )
        for adapter in layer.r:
            layer.reset_lora_parameters(adapter, True)  # type: ignore[no-untyped-call]


class WithoutAdapters(nn.Module):
    """A model as it is without its adapters: a reference model that has no weights of its own.

    A forward switches peft's adapters off and the model to evaluation mode, computes without gradients, and
    leaves both as they were; so it may come at any time but within a forward or backward of the model.
    Parameters are fetched as in any forward. What it is asked for beside that (its configuration, its head)
    is the model's.

    Args:
        model: with adapters of peft on it, not sharded yet.

    Raises:
        ConfigError: there are none, or something is trained that stays when they are off.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if not is_adapted(model):
            raise ConfigError(
                f"reference: {type(model).__name__} has no adapter of peft that could be switched off; name "
                "a reference model in model.reference, or train adapters (model.lora)"
            )
        kept = _trained_beside_adapters(model)
        if kept:
            raise ConfigError(
                f"reference: {kept[0]} (of {len(kept)} such parameters) is trained and stays when the "
                "adapters are switched off, so that would not be the model before training; set "
                "model.lora.bias: none or freeze it, or name a reference model in model.reference"
            )
        self.adapted = model
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), evaluating(self.adapted), _switched_off(self.adapted):
            return self.adapted(*args, **kwargs)

    def train(self, mode: bool = True) -> WithoutAdapters:
        """Nothing: it is in evaluation mode while it computes, and the mode of the model is not its own."""
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "adapted":
                raise
            return getattr(self.adapted, name)


def _trained_beside_adapters(model: nn.Module) -> list[str]:
    """Names of trained parameters that do not belong to an adapter."""
    owned: list[str] = []
    for name, module in model.named_modules():
        parts = list(getattr(module, "adapter_layer_names", ()))
        if isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict):
            parts.append("modules_to_save")
        owned += [f"{name}.{part}." for part in parts]
    return [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and not name.startswith(tuple(owned))
    ]


@contextlib.contextmanager
def _switched_off(model: Any) -> Iterator[None]:
    """Adapters off. peft freezes them, too, and thaws them all at the end; here they stay what they were.

    Shards and windows are laid out for what was trained at the start. Parameters are taken by name, for FSDP2
    may have others in their places at the end.
    """
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}

    def restore() -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad != trained[name]:
                parameter.requires_grad_(trained[name])

    try:
        with model.disable_adapter():
            restore()
            yield
    finally:
        restore()


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"model.lora needs peft ({error}); pip install 'odcengine[hf]'") from error
    return peft
