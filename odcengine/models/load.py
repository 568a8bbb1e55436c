"""Models by name: a directory, a configuration, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from odcengine.errors import ConfigError
from odcengine.models.packed import is_transformers_model
from odcengine.models.stored import StoredModel, StoredWeights, parameters_on_meta

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# Where one of these is, weights were meant to be: an interrupted download, or another format.
_TRACES_OF_WEIGHTS = (
    "*.index.json", "*.safetensors*", "pytorch_model*", "adapter_model*",
    "*.h5", "*.msgpack", "*.gguf", "*.pt", "*.pth", "*.ckpt*", "*.incomplete",
)  # fmt: skip
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load_model(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    dtype: str | torch.dtype | None = None,
    random_seed: int = 0,
    gradient_checkpointing: bool = False,
    tokenizer: Any = None,
) -> nn.Module:
    """A causal language model of transformers.

    Args:
        source: one of: a directory with ``config.json`` and weights; a directory with only ``config.json``,
            or that file, for random weights; a mapping of configuration values with ``model_type``, for
            random weights; else the name of a repository of the Hugging Face Hub (``organisation/model``),
            which is downloaded or taken from the local cache.
        dtype: "float32", "bfloat16" or "float64" (or torch's); by default what the weights were stored in,
            and float32 for random ones.
        random_seed: seed of random weights. The global generators are left as they are.
        gradient_checkpointing: keep only the inputs of the blocks for the backward, and compute the rest
            again.
        tokenizer: a tokenizer, or its number of tokens, to check the model's vocabulary against; see
            :func:`check_tokenizer`.

    Returns:
        The model in training mode, on the CPU.

    Raises:
        ConfigError: there is no such model, it is not a causal language model, or its files are incomplete.
    """
    transformers = _import_transformers()
    kind = _dtype(dtype)
    config, path = _read(transformers, source)
    where = f"model: {_show(source)}"
    _require_causal(config, where)
    model: nn.Module
    if path is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(random_seed)
            model = _call(
                where, transformers.AutoModelForCausalLM.from_config, config, dtype=kind or torch.float32
            )
    else:
        model, info = _call(
            where,
            transformers.AutoModelForCausalLM.from_pretrained,
            path,
            config=config,
            dtype=kind or "auto",
            trust_remote_code=False,
            output_loading_info=True,
        )
        if missing := sorted(info["missing_keys"]):
            raise ConfigError(
                f"{where} has no weights for {len(missing)} tensors of {type(model).__name__}, for example "
                f"{missing[0]}; they would be random. Give a complete checkpoint of a causal language model"
            )
        if unused := sorted(info["unexpected_keys"]):
            logger.warning("%s: %d tensors have no place, for example %s", where, len(unused), unused[0])
    if kind == torch.float64:  # transformers keeps some parameters (routers) in float32
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
    if tokenizer is not None:
        check_tokenizer(model, tokenizer)
    if gradient_checkpointing:
        enable_checkpointing(model)
    return model.train()


def meta_model(
    source: str | os.PathLike[str] | Mapping[str, Any], *, dtype: str | torch.dtype | None = None
) -> nn.Module:
    """The model of :func:`load_model` on the meta device: shapes and dtypes, no memory, no weights read.

    Args:
        source: as for ``load_model``.
        dtype: as for ``load_model``; weights that are stored count as the configuration says.

    Raises:
        ConfigError: there is no such model, or it is not a causal language model.
    """
    transformers = _import_transformers()
    config, path = _read(transformers, source)
    where = f"model: {_show(source)}"
    _require_causal(config, where)
    kind = _dtype(dtype)
    if kind is None and path is not None:
        stored = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        kind = getattr(torch, stored) if isinstance(stored, str) else stored
    with torch.device("meta"):
        model: nn.Module = _call(
            where, transformers.AutoModelForCausalLM.from_config, config, dtype=kind or torch.float32
        )
    model.tie_weights()  # type: ignore[operator]
    return model


def open_model(
    source: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    gradient_checkpointing: bool = False,
) -> StoredModel | None:
    """A model of transformers whose weights stay in their files until it is sharded.

    Args:
        source: as for :func:`load_model`.
        dtype: as for :func:`load_model`.
        gradient_checkpointing: as for :func:`load_model`.

    Returns:
        The model on the meta device with what is needed to fill it; None where that cannot be done: there are
        no safetensors files, or transformers makes other tensors of them than are stored.
        Then :func:`load_model` loads it.

    Raises:
        ConfigError: there is no such model, it is not a causal language model, or its files are incomplete.
    """
    transformers = _import_transformers()
    kind = _dtype(dtype)
    config, path = _read(transformers, source)
    _require_causal(config, f"model: {_show(source)}")
    folder = None if path is None else _folder_of(path)
    if folder is None or not any(folder.glob("model*.safetensors")):
        return None
    weights = StoredWeights(folder)
    wanted = kind or getattr(config, "dtype", None) or weights.dtype or torch.float32
    with parameters_on_meta(), torch.random.fork_rng(devices=[]):
        model: nn.Module = _call(
            f"model: {_show(source)}",
            transformers.AutoModelForCausalLM.from_config,
            config,
            dtype=wanted if isinstance(wanted, torch.dtype) else _dtype(str(wanted)),
        )
    names = weights.match(model)
    if isinstance(names, str):
        logger.info("model: %s: every rank loads it whole: %s", _show(source), names)
        return None
    if gradient_checkpointing:
        enable_checkpointing(model)
    return StoredModel(model.train(), weights, names)


def enable_checkpointing(model: nn.Module) -> None:
    """Let a model of transformers recompute its blocks in the backward instead of keeping activations.

    Args:
        model: the model; changed in place. Checkpointing is the non-reentrant kind, as FSDP2 needs it.

    Raises:
        ConfigError: the model cannot do it.
    """
    enable: Any = getattr(model, "activation_checkpointing_enable", None)  # its newer name
    enable = enable or getattr(model, "gradient_checkpointing_enable", None)
    if not callable(enable) or not getattr(model, "supports_gradient_checkpointing", True):
        raise ConfigError(
            f"model.gradient_checkpointing: {type(model).__name__} cannot do it; set it to false, or wrap "
            "its blocks with torch.utils.checkpoint (use_reentrant=False)"
        )
    enable({"use_reentrant": False})


def vocabulary_size(model: nn.Module) -> int:
    """Rows of the input embedding of a model of transformers: one more than the largest token id."""
    for module in model.modules():  # the model may be wrapped
        get: Any = getattr(module, "get_input_embeddings", None)
        if callable(get):
            weight = get().weight
            return int(getattr(weight, "ds_shape", weight.shape)[0])  # DeepSpeed's ZeRO empties its tensors
    raise ConfigError(
        f"model: {type(model).__name__} is no model of transformers: it has no input embeddings"
    )


def find_vocabulary(model: nn.Module) -> int | None:
    """:func:`vocabulary_size` of a model of any kind; None where it is not known to read tokens."""
    try:
        return vocabulary_size(model) if is_transformers_model(model) else None
    except (AttributeError, ConfigError, NotImplementedError):  # of images or sounds
        return None


def check_tokenizer(model: nn.Module, tokenizer: Any) -> None:
    """Refuse a tokenizer that has tokens which the model has no embedding for.

    A model may have more embeddings than its tokenizer has tokens: many are padded to a round number.

    Args:
        model: a model of transformers.
        tokenizer: anything with a length or a ``vocab_size`` (tokenizers of transformers, SentencePiece), or
            the number of tokens.

    Raises:
        ConfigError: names both numbers.
    """
    if isinstance(tokenizer, int):
        num_tokens = tokenizer
    else:
        size = len(tokenizer) if hasattr(tokenizer, "__len__") else tokenizer.vocab_size
        num_tokens = int(size() if callable(size) else size)
    rows = vocabulary_size(model)
    if num_tokens > rows:
        raise ConfigError(
            f"model: the tokenizer has {num_tokens} tokens, but {type(model).__name__} has embeddings for "
            f"{rows}; use the model's own tokenizer, or model.resize_token_embeddings({num_tokens})"
        )


# ---- where a model comes from --------------------------------------------------------------------------


def _read(transformers: Any, source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[Any, str | None]:
    """The configuration, and the directory or name of the weights (None: random ones)."""
    where = f"model: {_show(source)}"
    read = transformers.AutoConfig.from_pretrained
    if isinstance(source, Mapping):
        return _config_from(transformers, _with_lists(source)), None
    try:
        path = Path(source).expanduser()
    except RuntimeError as error:  # ~somebody
        raise ConfigError(f"{where} does not exist: {_first_line(error)}") from error
    if path.is_file():
        if path.suffix != ".json":
            raise ConfigError(f"{where} is a file, but not a config.json; give that, or its directory")
        return _call(where, read, path, trust_remote_code=False), None
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{where} has no config.json; expected a directory made by save_pretrained() of transformers"
            )
        has_weights = any(any(path.glob(pattern)) for pattern in _WEIGHTS)
        traces = sorted(file.name for pattern in _TRACES_OF_WEIGHTS for file in path.glob(pattern))
        if traces and not has_weights:
            raise ConfigError(
                f"{where} has {traces[0]}, but no {' or '.join(_WEIGHTS)}: the weights are incomplete, or of "
                "another format. Get them again, or name its config.json to start from random weights"
            )
        return _call(where, read, path, trust_remote_code=False), str(path) if has_weights else None
    name = os.fspath(source)
    if not isinstance(source, str) or not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise ConfigError(f"{where} does not exist; looked for it at {path.absolute()}")
    try:
        return read(name, trust_remote_code=False), name
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where} is no directory (looked for it at {path.absolute()}), and as a name on the Hugging "
            f"Face Hub it cannot be read: {_first_line(error)} Give an existing directory, or download "
            "it beforehand where there is a network"
        ) from error


def _folder_of(path: str) -> Path | None:
    """The directory of a path, or of a name on the Hub, whose safetensors are downloaded if need be."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download  # transformers needs it itself

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "model*.safetensors"]))
    except Exception as error:  # no network, no such files: load_model says what is wrong
        logger.info("model: %s: its safetensors are not at hand: %s", path, _first_line(error))
        return None


def _with_lists(value: Any) -> Any:
    """A copy with lists for tuples: configurations are kept unchangeable, transformers takes lists only."""
    if isinstance(value, Mapping):
        return {key: _with_lists(item) for key, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


def _config_from(transformers: Any, values: dict[str, Any]) -> Any:
    """A configuration from values; a name that is nearly one of the type's is taken for a slip."""
    known: list[str] = list(transformers.CONFIG_MAPPING.keys())
    kind = values.pop("model_type", None)
    if not isinstance(kind, str):
        raise ConfigError(
            "model.config: model_type is missing; it is the name of an architecture of transformers, for "
            "example llama, qwen2 or gpt2"
        )
    if kind not in known:
        near = difflib.get_close_matches(kind, known, 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "for example llama, qwen2 or gpt2"
        raise ConfigError(f"model.config: transformers knows no model_type {kind!r}; {hint}")
    default = _call("model.config", transformers.AutoConfig.for_model, kind)
    names = {*default.to_dict(), *default.attribute_map}
    problems = [
        f"model.config: {kind} has no {name!r}; did you mean {near[0]}?"
        for name in values
        if name not in names and (near := difflib.get_close_matches(str(name), names, 1, cutoff=0.8))
    ]
    if problems:
        raise ConfigError(*problems)
    return _call("model.config", transformers.AutoConfig.for_model, kind, **values)


def _require_causal(config: Any, where: str) -> None:
    from transformers.models.auto import modeling_auto

    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        what = "an encoder-decoder"
    elif kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        what = "an encoder, whose tokens see those behind them"
    elif kind not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        what = "nothing that predicts the next token"
    else:
        return
    raise ConfigError(
        f"{where} is not a causal language model: {kind} is {what}; expected a decoder such as llama, qwen2 "
        "or gpt2"
    )


def _call(where: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call transformers, whose errors for a wrong file or value have no common class."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"{where} needs code of its own, which is not run here; make the model in the script and "
                "give it to odcengine.initialize(model=...)"
            ) from error
        raise ConfigError(f"{where} cannot be loaded: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """What an error says, on one line and not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= 300 else text[:300].rsplit(" ", 1)[0] + " ..."
    return text if text.endswith((".", "...")) else text + "."


def _show(source: Any) -> str:
    return "config" if isinstance(source, Mapping) else f"{os.fspath(source)!r}"


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or dtype in _DTYPES.values():
        return dtype  # type: ignore[return-value]
    found = _DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ConfigError(f"model.dtype: {dtype} is not supported; expected one of {', '.join(_DTYPES)}")
    return found


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"model: loading it needs transformers ({error}); pip install 'odcengine[hf]'"
        ) from error
    return transformers
