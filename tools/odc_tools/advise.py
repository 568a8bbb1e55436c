"""``odc advise``: what balancing and on-demand communication are worth for given data, model and GPUs.

Nothing is trained: minibatches are drawn from the lengths of the data, planned as the engine plans them, and
simulated. See ``docs/advice.md``.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odcengine.errors import ConfigError

if TYPE_CHECKING:
    from odc_tools.advise_inputs import Model, Sequences, Speed
    from odc_tools.advise_predict import Limits

SEQUENCES = 8
"""Of a GPU and minibatch, where nothing is said."""
_MOST_GPUS = 4096
_MOST_SEQUENCES = 2**18


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    from odc_tools.bench.workloads import SHAPES, WORKLOADS

    data = parser.add_argument_group("sequences (one of these)").add_mutually_exclusive_group(required=True)
    data.add_argument("--data", type=Path, metavar="DIR", help="data set of odc prepare")
    data.add_argument("--lengths", type=Path, metavar="FILE", help="text file of one length in tokens a line")
    data.add_argument("--workload", choices=tuple(WORKLOADS), help="lengths as odc bench draws them")
    group = parser.add_argument_group("training")
    add = group.add_argument
    add(
        "--model",
        metavar="MODEL",
        help="directory of a transformers model, its config.json (no weights are read), or one of "
        f"{', '.join(SHAPES)} (default: qwen2.5-7b)",
    )
    add("--gpus", type=_gpus, default=[8, 64], metavar="LIST", help="numbers of GPUs (default: 8,64)")
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--sequences", type=int, metavar="N", help=f"a GPU and minibatch (default: {SEQUENCES})"
    )
    size.add_argument(
        "--train-batch-size", type=int, metavar="N", help="sequences of a minibatch, over all GPUs"
    )
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="limit of a micro-batch, max_tokens_per_micro_batch (default: 8192, or the longest sequence)",
    )
    add("--max-samples", type=int, metavar="N", help="limit of sequences in a micro-batch (default: none)")
    add(
        "--too-long",
        choices=("error", "truncate", "skip"),
        default="error",
        help="what to do with sequences over --max-tokens (default: error)",
    )
    add("--no-checkpointing", action="store_true", help="blocks are not recomputed in the backward")
    add = parser.add_argument_group("speed").add_argument
    add("--run", dest="run_file", type=Path, metavar="FILE", help="monitor.jsonl of a run to fit costs to")
    add("--tflops", type=float, metavar="F", help="achieved by a GPU, instead of --run (default: 400)")
    add(
        "--bandwidth",
        type=float,
        metavar="GB/S",
        help="of a GPU, for parameters and gradients (default: 300; with --run: traffic counts as hidden)",
    )
    add(
        "--boundary-s", type=float, metavar="S", help="seconds between minibatches (default: 0, or the run's)"
    )
    add("--noise", type=float, default=0.0, metavar="F", help="spread of a micro-batch's time, as a share")
    add("--slow", type=float, metavar="F", help="speed of one slow GPU, as a share of the others'")
    add = parser.add_argument_group("simulation and output").add_argument
    add(
        "--minibatches",
        type=int,
        default=20,
        metavar="N",
        help="to simulate; fewer of large ones (default: 20)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the order of sequences (default: 0)")
    add("--json", type=Path, metavar="FILE", help="write all numbers")
    add("--png", type=Path, metavar="FILE", help="draw a picture")


def _gpus(text: str) -> list[int]:
    """``8,64``."""
    return sorted({int(part) for part in text.split(",")})


_gpus.__name__ = "list of numbers"  # argparse's messages have it


def run(options: argparse.Namespace) -> int:
    """Predict and advise.

    Args:
        options: what :func:`add_arguments` declared.

    Returns:
        0.

    Raises:
        ConfigError: the options, or what they name, are wrong.
    """
    check_options(options)
    import numpy as np

    from odc_tools import advise_inputs, advise_predict, advise_report
    from odcengine.monitor.progress import count as with_unit

    if options.png is not None:
        advise_report.check_drawing()
    sequences = advise_inputs.read_sequences(options)
    model = advise_inputs.read_model(options.model, recompute=not options.no_checkpointing)
    speed = advise_inputs.read_speed(options, model, sequences)
    limits = advise_predict.Limits(advise_inputs.token_limit(options, sequences), options.max_samples)

    pool = sequences.pool
    number = "drawn from" if sequences.size is None else f"{sequences.size:,} of"
    print(
        f"Sequences: {number} {sequences.name}, mean {pool.mean():,.0f} tokens, median "
        f"{np.median(pool):,.0f}, longest {pool.max():,}; up to {limits.max_tokens:,} tokens in a micro-batch"
    )
    recomputed = "not recomputed" if options.no_checkpointing else "recomputed"
    print(f"Model: {model.name}, {with_unit(model.num_parameters)} parameters, blocks {recomputed}")
    print(f"Speed: {speed.origin}")
    notes = [*sequences.notes, *speed.notes]
    results, asked_sizes = [], []
    for gpus in options.gpus:
        count = options.train_batch_size or (options.sequences or SEQUENCES) * gpus
        if sequences.size is not None and count > sequences.size:
            notes.append(
                f"{count:,} sequences for {gpus} GPUs are more than the {sequences.size:,} there are: they "
                "are drawn with replacement, and larger minibatches are not tried"
            )
        sizes = [
            advise_predict.predict(
                sequences,
                speed.machine_of(gpus),
                gpus=gpus,
                count=each,
                minibatches=options.minibatches,
                limits=limits,
            )
            for each in advise_predict.sizes_to_try(gpus, count, sequences.size)
        ]
        asked = next(size for size in sizes if size.sequences == count)
        advice = advise_predict.advise(asked, sizes, speed.machine, limits)
        print(f"\n{advise_report.format_size(asked)}\n")
        if gpus > 1:
            print(f"{advise_report.format_sizes(sizes)}\n")
        print("\n".join(f"- {sentence}" for sentence in advice))
        results.append(
            {
                "gpus": gpus,
                "asked": asked.to_json(),
                "sizes": [size.to_json() for size in sizes],
                "advice": advice,
            }
        )
        asked_sizes.append(asked)
    print("\nIdle: the ranks' time waiting until they meet, as a share. Not modelled:")
    print("\n".join(f"- {text}" for text in advise_report.NOT_MODELLED))
    print("".join(f"Note: {note}\n" for note in notes), end="")

    if options.json is not None:
        document = _document(options, sequences, model, speed, limits, results, notes)
        _write("--json", options.json, lambda: _save(options.json, document))
    if options.png is not None:
        title = f"{sequences.name}, {model.name}: predicted by simulation"
        _write(
            "--png",
            options.png,
            lambda: advise_report.draw(options.png, title, pool, asked_sizes, sizes),
        )
    return 0


def _document(
    options: argparse.Namespace,
    sequences: Sequences,
    model: Model,
    speed: Speed,
    limits: Limits,
    results: list[dict[str, Any]],
    notes: list[str],
) -> dict[str, Any]:
    """All numbers, as ``--json`` writes them."""
    from odc_tools.advise_report import NOT_MODELLED

    machine, pool = speed.machine, sequences.pool
    return {
        "version": 1,
        "sequences": {
            "source": sequences.name,
            "count": sequences.size,
            "mean": float(pool.mean()),
            "longest": int(pool.max()),
        },
        "model": {"source": model.name, "parameters": model.num_parameters},
        "machine": {
            "origin": speed.origin,
            "seconds_per_token": machine.cost.linear,
            "seconds_per_squared_token": machine.cost.quadratic,
            "seconds_per_micro_batch": machine.cost.per_micro_batch,
            "boundary_s": machine.boundary_s,
            "traffic_s": machine.traffic_s,
            "noise": machine.noise,
            "slow": options.slow,
        },
        "limits": {"max_tokens": limits.max_tokens, "max_samples": limits.max_samples},
        "results": results,
        "notes": notes,
        "not_modelled": list(NOT_MODELLED),
    }


def _save(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _write(option: str, path: Path, action: Callable[[], None]) -> None:
    try:
        action()
    except OSError as error:
        raise ConfigError(f"{option} {path}: it cannot be written: {error.strerror or error}") from None
    print(f"Wrote {path}")


def check_options(options: argparse.Namespace) -> None:
    """Refuses what makes no sense, before anything is read.

    Raises:
        ConfigError: all problems at once.
    """
    problems = [
        f"--{name.replace('_', '-')} {value}: it must be {least:g} or more"
        for name, least in _LEAST.items()
        if (value := getattr(options, name)) is not None and not least <= value < math.inf
    ]
    problems += [
        f"--{name} {value:g}: it must be above 0 and finite"
        for name in ("tflops", "bandwidth", "slow")
        if (value := getattr(options, name)) is not None and not 0 < value < math.inf
    ]
    problems += [
        f"--gpus {gpus}: expected numbers from 1 to {_MOST_GPUS}"
        for gpus in options.gpus
        if not 1 <= gpus <= _MOST_GPUS
    ]
    largest = options.train_batch_size or (options.sequences or SEQUENCES) * max(options.gpus)
    if largest > _MOST_SEQUENCES:
        option = "--train-batch-size" if options.train_batch_size else "--sequences"
        problems.append(
            f"{option}: minibatches of {largest:,} sequences are too large to simulate; the most is "
            f"{_MOST_SEQUENCES:,}"
        )
    if options.tflops is not None and options.run_file is not None:
        problems.append("--tflops: not with --run, which tells the speed; leave one of them out")
    if options.png is not None and options.png.suffix != ".png":
        problems.append(f"--png {options.png}: it must end in .png")
    for option in ("json", "png"):
        path = getattr(options, option)
        if path is not None and not path.absolute().parent.is_dir():
            problems.append(f"--{option} {path}: there is no folder {path.absolute().parent}; make it first")
    if problems:
        raise ConfigError(*problems)


_LEAST = {
    "sequences": 1,
    "train_batch_size": 1,
    "max_tokens": 1,
    "max_samples": 1,
    "boundary_s": 0,
    "noise": 0,
    "minibatches": 2,
    "seed": 0,
}
