"""Weights out: safetensors in the layout of transformers or peft, from a checkpoint or an engine."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from odcengine.checkpoint.directory import explain, read_listed, remove
from odcengine.checkpoint.hf import LAYOUT, Layout, tokenizer_files
from odcengine.checkpoint.plain import load_json
from odcengine.checkpoint.source import Source
from odcengine.checkpoint.state import MODEL
from odcengine.errors import CheckpointError, ConfigError
from odcengine.models.safetensors_files import FilesPlan, plan_files

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Export:
    """An export that has been laid out and begun.

    Attributes:
        folder: the temporary folder.
        out: its final name.
        layout: names and files.
        plan: where each tensor goes.
    """

    folder: Path
    out: Path
    layout: Layout
    plan: FilesPlan

    def write(self, pieces: Iterable[tuple[str, int, torch.Tensor]]) -> None:
        """Write pieces of tensors: name in the model, first row, rows. Others' names are passed over."""
        for name, first_row, rows in pieces:
            for stored in self.layout.stored_as(name):
                self.plan.write(self.folder, stored, first_row, rows)
        self.plan.sync(self.folder)

    def finish(self) -> None:
        """Give it its name."""
        if self.out.is_dir():
            self.out.rmdir()  # it was empty; a rename onto it works, too, but not on all file systems
        os.rename(self.folder, self.out)


def check_out(out: Path) -> None:
    """Raise CheckpointError where something is there already."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not empty; give a new directory")


def begin_export(
    out: Path,
    layout: Layout,
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    *,
    dtype: str | None,
    max_bytes: int,
    tokenizer: Path | None,
    token: str,
    create: bool = True,
) -> Export:
    """Lay out an export, and make its folder with all files but the weights' contents.

    Args:
        out: the directory to make.
        layout: names and files.
        tensors: dtype and shape of each tensor, by its name in the model.
        dtype: of the weights; None: the layout's.
        max_bytes: of a file.
        tokenizer: directory of the tokenizer; None: the layout's, where it is still there.
        token: for the temporary name; equal on all ranks.
        create: whether to make the folder; one process does.

    Raises:
        CheckpointError: the directory exists, or cannot be made.
    """
    wanted = dtype or layout.dtype
    kind = None if wanted is None else DTYPES[wanted]
    missing = [name for name in layout.names if name not in tensors]
    if missing:
        raise CheckpointError(
            f"the weights are not complete: {missing[0]} is missing (of {len(missing)}); a checkpoint that "
            "was saved without frozen parameters holds no whole model"
        )
    chosen = {
        stored: (
            kind if kind is not None and tensors[name][0].is_floating_point else tensors[name][0],
            tensors[name][1],
        )
        for name in layout.names
        for stored in layout.stored_as(name)
    }
    plan = plan_files(chosen, max_bytes, "adapter_model" if layout.kind == "adapter" else "model")
    folder = out.with_name(f".{out.name}.{token}.new")
    export = Export(folder, out, layout, plan)
    if not create:
        return export
    check_out(out)
    try:
        folder.mkdir(parents=True)
        for name, values in layout.files.items():
            if name == "config.json" and chosen:
                values = _with_dtype(values, next(iter(chosen.values()))[0])
            (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        source = tokenizer or (Path(layout.tokenizer) if layout.tokenizer else None)
        for file in tokenizer_files(source) if source is not None and layout.kind == "model" else ():
            shutil.copyfile(file, folder / file.name)
        plan.create(folder)
    except OSError as error:
        remove(folder)
        raise CheckpointError(f"the export cannot be written to {out}: {explain(error)}") from error
    return export


def _with_dtype(values: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    name = "torch_dtype" if "torch_dtype" in values else "dtype"
    return {**values, name: str(dtype).removeprefix("torch.")}


def read_layout(source: Source) -> Layout:
    """The layout that a checkpoint holds.

    Raises:
        CheckpointError: it is damaged.
    """
    if LAYOUT not in source.mark.files:
        raise CheckpointError(
            f"{source.folder} does not say how its model is stored (see the log of the run); use "
            "torch.distributed.checkpoint.format_utils to take its tensors out"
        )
    values = load_json(read_listed(source.folder, source.mark, LAYOUT), str(source.folder / LAYOUT))
    try:
        layout = Layout(**values)
        plain = all(type(a) is type(b) is str for a, b in layout.names.items())
        plain = plain and all(type(a) is str for name in layout.copies for a in layout.stored_as(name))
        safe = all(Path(name).name == name and name.endswith(".json") for name in layout.files)
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"{source.folder / LAYOUT} is damaged: {error}") from error
    if not plain or not safe or layout.dtype not in (None, *DTYPES):
        raise CheckpointError(f"{source.folder / LAYOUT} is damaged")
    return layout


def export_checkpoint(
    folder: Path,
    out: Path,
    *,
    dtype: str | None = None,
    max_bytes: int = 5_000_000_000,
    tokenizer: Path | None = None,
) -> Layout:
    """Export a checkpoint; in memory there is one rank's part of one tensor at a time.

    Args:
        folder: the checkpoint. out: the directory to make. dtype: of the weights; None: what they were
        computed in. max_bytes: of a file. tokenizer: directory of the tokenizer; None: that of the model that
        was trained, where it is still there.

    Returns:
        What was exported.

    Raises:
        CheckpointError: the checkpoint is damaged, or ``out`` cannot be made.
    """
    check_out(out)
    source = Source(folder)
    layout = read_layout(source)
    if layout.convert:
        return _export_converted(source, layout, out, dtype=dtype, max_bytes=max_bytes, tokenizer=tokenizer)
    tensors = {}
    for name in source.names(MODEL):
        entry = source.entry(MODEL + name)
        assert entry is not None  # it is in the list of names
        tensors[name] = (entry.properties.dtype, tuple(entry.size))
    export = begin_export(
        out,
        layout,
        tensors,
        dtype=dtype,
        max_bytes=max_bytes,
        tokenizer=tokenizer,
        token=secrets.token_hex(4),
    )
    try:
        export.write(
            (name, chunk.offsets[0] if chunk.offsets else 0, source.read(index))
            for name in layout.names
            for chunk, index in source.chunks(MODEL + name)
        )
        export.finish()
    except OSError as error:
        raise CheckpointError(f"the export cannot be written to {out}: {explain(error)}") from error
    finally:
        remove(export.folder)
    return layout


def _export_converted(
    source: Source, layout: Layout, out: Path, *, dtype: str | None, max_bytes: int, tokenizer: Path | None
) -> Layout:
    """Where transformers stores other tensors than the model has, it has to make them, of the whole model."""
    if layout.kind == "adapter" or "config.json" not in layout.files:
        raise CheckpointError(f"{source.folder}: this kind of adapter cannot be exported from a checkpoint")
    try:
        import transformers
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise ConfigError(
            f"export: this model's layout needs transformers ({error}); pip install 'odcengine[hf]'"
        ) from error
    values = dict(layout.files["config.json"])
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    tensors = {name: whole_tensor(source, MODEL + name) for name in layout.names}
    stored = {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, tensors).items()}
    named = Layout(
        "model", {name: name for name in stored}, layout.files, False, layout.tokenizer, layout.dtype
    )
    export = begin_export(
        out,
        named,
        {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()},
        dtype=dtype,
        max_bytes=max_bytes,
        tokenizer=tokenizer,
        token=secrets.token_hex(4),
    )
    try:
        export.write((name, 0, tensor) for name, tensor in stored.items())
        export.finish()
    finally:
        remove(export.folder)
    return named


def whole_tensor(source: Source, name: str) -> torch.Tensor:
    """A tensor put together from its chunks, on the CPU."""
    entry = source.entry(name)
    if entry is None:
        raise CheckpointError(f"{source.folder} has no {name}")
    whole = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
    covered = 0
    for chunk, index in source.chunks(name):
        part = whole
        for dim, (offset, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            part = part.narrow(dim, offset, length)
        part.copy_(source.read(index))
        covered += part.numel()
    if covered != whole.numel():
        raise CheckpointError(
            f"{source.folder}: of {name} only {covered} of {whole.numel()} elements are there"
        )
    return whole
