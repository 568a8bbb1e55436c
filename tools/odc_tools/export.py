"""``odc export``: the weights of a checkpoint as transformers or peft store them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from odcengine.errors import CheckpointError, ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what odc export takes."""
    parser.add_argument(
        "checkpoint", type=Path, help="a checkpoint, or a directory of them (then what latest names)"
    )
    parser.add_argument("out", type=Path, help="directory to make: safetensors, config, tokenizer")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        help="type of the weights (default: bfloat16 if the model was computed in it, else as trained)",
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", help="largest size of a file (default: %(default)s)"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="directory with the tokenizer's files (default: the one the model was loaded from)",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="an adapter and the model below it as one model, without peft; takes memory for all of it",
    )
    parser.add_argument(
        "--base", help="with --merge: the model below the adapter (default: the one it was trained on)"
    )


def run(options: argparse.Namespace) -> int:
    """Exports; returns the exit code."""
    import tempfile

    from odcengine.checkpoint import directory
    from odcengine.checkpoint.export import export_checkpoint
    from odcengine.checkpoint.hf import tokenizer_files
    from odcengine.checkpoint.loader import choose
    from odcengine.checkpoint.merge import merge_adapter
    from odcengine.models.safetensors_files import parse_size

    try:
        found = choose(options.checkpoint, None)
        for note in found.notes:
            print(f"odc export: {note}", file=sys.stderr)
        if found.path is None:
            there = "has no complete checkpoint" if os.path.isdir(options.checkpoint) else "does not exist"
            raise CheckpointError(
                f"{options.checkpoint} {there}; give a run's checkpoint.dir, or a checkpoint in it"
            )
        mark = directory.read_mark(found.path)
        max_bytes = parse_size(options.max_shard_size)
        if options.merge:
            with tempfile.TemporaryDirectory() as folder:
                adapter = Path(folder) / "adapter"
                if export_checkpoint(found.path, adapter, dtype="float32").kind != "adapter":
                    raise CheckpointError(f"{found.path} is of a whole model: export it without --merge")
                base = merge_adapter(
                    adapter,
                    options.out,
                    base=options.base,
                    dtype=options.dtype,
                    max_bytes=max_bytes,
                    tokenizer=options.tokenizer,
                )
            print(f"{options.out}: {base} with the adapter of {found.path} after {mark.step} steps merged in")
            return 0
        layout = export_checkpoint(
            found.path, options.out, dtype=options.dtype, max_bytes=max_bytes, tokenizer=options.tokenizer
        )
    except (CheckpointError, ConfigError) as error:
        print(f"odc export: error: {error}", file=sys.stderr)
        return 1
    what = "adapter" if layout.kind == "adapter" else "model"
    print(f"{options.out}: the {what} of {found.path} after {mark.step} steps, {len(layout.names)} tensors")
    if what == "model" and not tokenizer_files(options.out):
        print("It has no tokenizer: where that of the model was is not known; give --tokenizer DIRECTORY.")
    return 0
