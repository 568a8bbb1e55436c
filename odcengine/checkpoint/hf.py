"""How transformers and peft lay a model out on disk: names of its tensors, and the files beside them."""

from __future__ import annotations

import copy
import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from odcengine.checkpoint.state import MODEL, model_tensors

logger = logging.getLogger(__name__)

LAYOUT = "export.json"
"""The file of a checkpoint that holds a :class:`Layout`."""

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *(
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "spiece.model",
        "sentencepiece.bpe.model",
    ),
    *("chat_template.jinja", "chat_template.json", "tekken.json"),
)


@dataclass(frozen=True)
class Layout:
    """A model on disk.

    Attributes:
        kind: ``model`` or ``adapter``.
        names: for each tensor, by its name in the model, its name in the file; those without are not written.
        files: JSON files beside the weights, by name.
        convert: whether transformers has to make the file's tensors of the model's (stacked experts, say).
        tokenizer: the directory whose tokenizer belongs to the model, or None.
        dtype: in which weights are written, unless said otherwise; None: as they are trained.
        copies: further names in the file of tensors that are to be there more than once.
    """

    kind: str
    names: dict[str, str]
    files: dict[str, Any] = field(default_factory=dict)
    convert: bool = False
    tokenizer: str | None = None
    dtype: str | None = None
    copies: dict[str, list[str]] = field(default_factory=dict)

    def stored_as(self, name: str) -> list[str]:
        """All names in the file of one of the model's tensors."""
        return [self.names[name], *self.copies.get(name, ())] if name in self.names else []

    def to_json(self) -> bytes:
        """As a file's contents."""
        return json.dumps(asdict(self)).encode()


def layout_of(model: nn.Module, *, source: str | None, dtype: str | None) -> Layout:
    """The layout of a model in training.

    Args:
        model: the model, sharded or not, perhaps wrapped by peft.
        source: directory or name it was loaded from, if known.
        dtype: see :class:`Layout`.
    """
    tensors = {name[len(MODEL) :]: tensor for name, tensor in model_tensors(model).items()}
    if hasattr(model, "peft_config"):
        return _adapter_layout(model, tensors, dtype)
    config = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return Layout("model", {name: name for name in tensors}, dtype=dtype)
    names, convert = _saved_names(model, tensors)
    where = source or getattr(config, "name_or_path", None)
    return Layout(
        "model",
        names,
        _config_files(model, config),
        convert,
        str(Path(where).resolve()) if where and Path(where).is_dir() else None,
        dtype,
    )


def _config_files(model: Any, config: Any) -> dict[str, Any]:
    values = json.loads(config.to_json_string())
    # Attention inside of odcengine is no property of the weights.
    for name in ("_attn_implementation", "attn_implementation", "_attn_implementation_autoset"):
        values.pop(name, None)
    values["architectures"] = [_class_of(model).__name__]
    files = {"config.json": values}
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        files["generation_config.json"] = json.loads(generation.to_json_string())
    return files


def _class_of(model: nn.Module) -> type:
    """The model's class; FSDP2 has made one of its own of it."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def _saved_names(model: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, str], bool]:
    """Names under which transformers stores the tensors, and whether it stores others than the model has."""
    same = {name: name for name in tensors}
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 stores what the model has
        return same, False
    plain = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()
    }
    try:
        stored = revert_weight_conversion(model, dict(plain))
    except Exception as error:  # an internal function, whose failures have no class
        logger.warning("export: transformers does not tell the names of %s (%s)", type(model).__name__, error)
        return same, False
    by_id = {id(tensor): name for name, tensor in plain.items()}
    if len(stored) == len(plain) and all(id(tensor) in by_id for tensor in stored.values()):
        return {by_id[id(tensor)]: name for name, tensor in stored.items()}, False
    return same, True


def _adapter_layout(model: Any, tensors: Mapping[str, torch.Tensor], dtype: str | None) -> Layout:
    """As ``PeftModel.save_pretrained`` stores the active adapter."""
    from peft import get_peft_model_state_dict

    adapter = model.active_adapter
    adapter = adapter[0] if isinstance(adapter, list) else adapter
    embeddings = [
        layer
        for layer in (model.get_input_embeddings(), model.get_output_embeddings())
        # One that peft has wrapped (a trained copy, an adapter) is among what it stores anyway.
        if type(layer) in (nn.Embedding, nn.Linear) and any(p.requires_grad for p in layer.parameters())
    ]
    # Under all its names: peft asks for a trained copy of tied embeddings by that of the head, too.
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    aliases = {
        name: tensors[first[id(parameter)]]
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    stored = get_peft_model_state_dict(
        model,
        state_dict={**aliases, **tensors},
        adapter_name=adapter,
        save_embedding_layers=bool(embeddings),  # "auto" asks the Hub
    )
    by_id = {id(tensor): name for name, tensor in tensors.items()}
    names: dict[str, str] = {}
    copies: dict[str, list[str]] = {}
    for name, tensor in stored.items():
        known = by_id.get(id(tensor))
        if known is not None and known in names:
            copies.setdefault(known, []).append(name)
        elif known is not None:
            names[known] = name
    convert = not all(id(tensor) in by_id for tensor in stored.values())
    config = copy.deepcopy(model.peft_config[adapter])
    config.inference_mode = True
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        values = json.loads((Path(folder) / "adapter_config.json").read_text())
    return Layout(
        "adapter", names, {"adapter_config.json": values}, convert=convert, dtype=dtype, copies=copies
    )


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a directory that make up its tokenizer."""
    return [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
