"""An exported adapter and its base as one model that needs no peft."""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch

from odcengine.checkpoint.directory import explain, remove
from odcengine.checkpoint.export import DTYPES, check_out
from odcengine.checkpoint.hf import tokenizer_files
from odcengine.errors import CheckpointError, ConfigError


def merge_adapter(
    adapter: Path,
    out: Path,
    *,
    base: str | None = None,
    dtype: str | None = None,
    max_bytes: int = 5_000_000_000,
    tokenizer: Path | None = None,
) -> str:
    """Add an adapter's products to the weights they belong to; needs host memory for the whole model.

    Each weight is widened to 32 bits, merged, and rounded once.

    Args:
        adapter: directory of the adapter, as peft saves it.
        out: the directory to make, as transformers stores a model.
        base: directory or name of the model below; by default what the adapter names.
        dtype: of the weights; by default that of the base.
        max_bytes: of a file.
        tokenizer: directory of the tokenizer; by default the base's.

    Returns:
        The base.

    Raises:
        CheckpointError: the base is not known or has no weights, or ``out`` cannot be made.
        ConfigError: there is no such model, or peft is not installed.
    """
    check_out(out)
    named = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    source = base or named
    if source is None:
        raise CheckpointError("merging: the adapter does not name the model below it; give --base DIRECTORY")
    folder = Path(source).expanduser()
    if folder.is_dir() and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise CheckpointError(
            f"merging: {folder} has no weights, so the model began with random ones that are nowhere stored; "
            "give the directory that has them with --base"
        )
    model = _merged(adapter, source, dtype)
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.new")
    try:
        temporary.mkdir(parents=True)
        model.save_pretrained(temporary, max_shard_size=max_bytes)
        texts = tokenizer or (folder if folder.is_dir() else None)
        for file in tokenizer_files(texts) if texts is not None else ():
            shutil.copyfile(file, temporary / file.name)
        if out.is_dir():
            out.rmdir()
        temporary.rename(out)
    except OSError as error:
        raise CheckpointError(f"the export cannot be written to {out}: {explain(error)}") from error
    finally:
        remove(temporary)
    return source


@torch.no_grad()
def _merged(adapter: Path, source: str, dtype: str | None) -> Any:
    from odcengine.models import load_model

    try:
        import peft
        from peft.tuners.lora import LoraLayer
    except ImportError as error:
        raise ConfigError(f"merging needs peft ({error}); pip install 'odcengine[hf]'") from error
    model = peft.PeftModel.from_pretrained(load_model(source), str(adapter))
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            inner = layer.get_base_layer()
            kind: torch.dtype = inner.weight.dtype  # type: ignore[assignment]
            if kind in (torch.bfloat16, torch.float16):
                inner.float()
            layer.merge(safe_merge=True)
            inner.to(kind)
    plain = model.unload()  # the products are in the weights by now
    return plain if dtype is None else plain.to(DTYPES[dtype])
