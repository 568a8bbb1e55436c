"""What ``odc advise`` is asked about: lengths of sequences, a model, and how fast the ranks are."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from odc_tools.bench.workloads import SHAPES, WORKLOADS
from odcengine.balance import CostModel
from odcengine.errors import ConfigError
from odcengine.simulate import Machine, MeasuredRun

Lengths = npt.NDArray[np.int64]

TFLOPS = 400.0
"""Assumed of a GPU where nothing is known: what an H100 or H200 achieves in bf16 with a well-filled row."""
BANDWIDTH = 300.0
"""GB/s assumed for parameters and gradients: between GPUs of a node by NVLink."""
MAX_TOKENS = 8192
"""As ``balance.max_tokens_per_micro_batch``."""

_BYTES_PER_PARAMETER = 8  # of bf16 parameters twice, for forward and backward, and an fp32 gradient
_SAMPLED = 100_000
_LONGEST = 2**31 - 1


@dataclass(frozen=True)
class Sequences:
    """The sequences that a run draws its minibatches from.

    Attributes:
        name: where they come from.
        pool: tokens of each; of a workload a large sample.
        draw: lengths of one minibatch from its number and its count of sequences.
        size: number of sequences; None for a workload, which never ends.
        notes: what was done to them.
    """

    name: str
    pool: Lengths
    draw: Callable[[int, int], list[int]]
    size: int | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Model:
    """The model as the simulator needs it.

    Attributes:
        name: as given.
        cost: FLOP of its sequences.
        num_parameters: approximate.
    """

    name: str
    cost: CostModel
    num_parameters: float


@dataclass(frozen=True)
class Speed:
    """How fast ranks are.

    Attributes:
        machine: for the simulator; of one rank, where there is no traffic, see :meth:`machine_of`.
        origin: where the numbers come from, in words.
        notes: what to know about them.
    """

    machine: Machine
    origin: str
    notes: tuple[str, ...] = ()

    def machine_of(self, num_ranks: int) -> Machine:
        """The machine for so many ranks: one rank exchanges nothing."""
        if num_ranks > 1:
            return self.machine
        return Machine(self.machine.cost, boundary_s=self.machine.boundary_s, noise=self.machine.noise)


# ---- lengths -------------------------------------------------------------------------------------------


def read_sequences(options: argparse.Namespace) -> Sequences:
    """The sequences that the options name.

    Raises:
        ConfigError: they cannot be read, or one does not fit into a micro-batch.
    """
    if options.workload is not None:
        return _of_workload(options)
    if options.data is not None:
        from odcengine.data import TokenDataset

        name, what = str(options.data), f"--data {options.data}"
        try:
            pool = np.asarray(TokenDataset.open(options.data).lengths)
        except ConfigError as error:
            raise ConfigError(*(f"--data: {problem}" for problem in error.problems)) from None
    else:
        name, what = str(options.lengths), f"--lengths {options.lengths}"
        pool = read_lengths(options.lengths)
    if not len(pool):
        raise ConfigError(f"{what}: it has no sequences")
    pool, notes = _fit_limit(pool, what, options)
    seed = options.seed

    def draw(number: int, count: int) -> list[int]:
        dice = np.random.Generator(np.random.PCG64([seed, number]))
        return [int(length) for length in dice.choice(pool, count, replace=count > len(pool))]

    return Sequences(name, pool, draw, len(pool), notes)


def _of_workload(options: argparse.Namespace) -> Sequences:
    workload = WORKLOADS[options.workload]
    pool = np.array(workload.lengths(options.seed, 0, _SAMPLED), dtype=np.int64)
    limit, too_long = options.max_tokens, options.too_long
    if limit is not None and limit < workload.longest and too_long == "error":
        raise ConfigError(
            f"--max-tokens {limit}: {workload.name} has sequences of up to {workload.longest} tokens, which "
            "must fit into a micro-batch; raise it, or give --too-long truncate"
        )
    if too_long == "skip":
        raise ConfigError("--too-long skip: not with --workload, whose sequences are made; use truncate")
    cap = limit or workload.longest

    def draw(number: int, count: int) -> list[int]:
        return [min(cap, length) for length in workload.lengths(options.seed, number, count)]

    return Sequences(workload.name, np.minimum(pool, cap), draw, None)


def read_lengths(path: Path) -> Lengths:
    """Lengths from a text file: one whole number a line; empty lines and what follows a ``#`` do not count.

    Raises:
        ConfigError: names the line that is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"--lengths {path}: it cannot be read: {reason or error}") from None
    lengths = []
    for number, line in enumerate(lines, 1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        if not (word.isascii() and word.isdigit() and len(word) < 11 and 1 <= int(word) <= _LONGEST):
            raise ConfigError(
                f"--lengths {path}, line {number}: {ascii(word)[:40]} is no length; expected one whole "
                "number of 1 or more tokens a line"
            )
        lengths.append(int(word))
    return np.array(lengths, dtype=np.int64)


def _fit_limit(pool: Lengths, what: str, options: argparse.Namespace) -> tuple[Lengths, tuple[str, ...]]:
    """Sequences that fit into a micro-batch."""
    longest = int(pool.max())
    limit = options.max_tokens
    if limit is None or longest <= limit:
        return pool, ()
    over = pool > limit
    if options.too_long == "error":
        raise ConfigError(
            f"{what}: {int(over.sum())} of {len(pool)} sequences have more than --max-tokens {limit}; the "
            f"longest has {longest}. Raise --max-tokens, or give --too-long truncate or skip as "
            "data.too_long of the run"
        )
    if options.too_long == "truncate":
        return np.minimum(pool, limit), (f"{over.sum()} of {len(pool)} sequences cut to {limit} tokens",)
    if over.all():
        raise ConfigError(f"{what}: all sequences have more than --max-tokens {limit}; none is left")
    return pool[~over], (f"{over.sum()} of {len(pool)} sequences over {limit} tokens left out",)


def token_limit(options: argparse.Namespace, sequences: Sequences) -> int:
    """Limit of a micro-batch: as given, else the engine's default or the longest sequence."""
    if options.max_tokens is not None:
        return int(options.max_tokens)
    longest = int(sequences.pool.max())
    if options.workload is not None:
        longest = max(longest, WORKLOADS[options.workload].longest)
    return max(MAX_TOKENS, longest)


# ---- the model -----------------------------------------------------------------------------------------


def read_model(source: str | None, *, recompute: bool) -> Model:
    """A model's shape, without its weights.

    Args:
        source: directory with a ``config.json``, such a file, or a name in ``workloads.SHAPES``; None for
            the shape of a 7B model.
        recompute: activation checkpointing of every block.

    Raises:
        ConfigError: there is no such model, or its configuration does not tell its shape.
    """
    if source is None:
        source = "qwen2.5-7b"
    path = Path(source)
    values = dict(SHAPES[source]) if source in SHAPES and not path.exists() else _read_config(path)
    config: Any = SimpleNamespace(**values)
    try:
        cost = CostModel.from_config(config, recompute=recompute)
        plain = CostModel.from_config(config)
    except ValueError:
        config = _by_transformers(path, source)
        try:
            cost = CostModel.from_config(config, recompute=recompute)
            plain = CostModel.from_config(config)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"--model {source}: {error}") from None
    except (TypeError, ZeroDivisionError) as error:
        raise ConfigError(f"--model {source}: its configuration makes no sense: {error}") from None
    return Model(source, cost, _count_parameters(config, plain))


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        problem = "has no config.json" if path.is_dir() else "does not exist"
        raise ConfigError(
            f"--model {path}: it {problem}; expected a directory of a transformers model, its config.json, "
            f"or one of {', '.join(SHAPES)}"
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {path}: {file.name} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--model {path}: {file.name} is no configuration: expected an object of values")
    text = values.get("text_config")  # of a model that also sees images
    return dict(text) if isinstance(text, dict) else values


def _by_transformers(path: Path, source: str) -> Any:
    """Families that name their numbers otherwise are known to transformers."""
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ConfigError(
            f"--model {source}: its configuration lacks num_hidden_layers, hidden_size, num_attention_heads "
            "or vocab_size; pip install 'odcengine[hf]' to read families with names of their own"
        ) from None
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"--model {source}: transformers cannot read its configuration: {first}") from None


def _count_parameters(config: Any, cost: CostModel) -> float:
    """Parameters: 6 FLOP for each of the active ones, and what no token, or not every token, "
    "multiplies with."""
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    count = cost.linear / 6
    if not getattr(config, "tie_word_embeddings", False):
        count += config.hidden_size * config.vocab_size
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((value for name in names if (value := getattr(config, name, None))), None)
    active = getattr(config, "num_experts_per_tok", None)
    if experts and active:
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        count += config.num_hidden_layers * (experts - active) * 3 * config.hidden_size * width
    return float(count)


# ---- speeds --------------------------------------------------------------------------------------------


def read_speed(options: argparse.Namespace, model: Model, sequences: Sequences) -> Speed:
    """How fast the ranks are: by a measured run or by assumptions.

    Raises:
        ConfigError: the run cannot be used.
    """
    traffic_s = 0.0
    if options.bandwidth is not None or options.run_file is None:
        traffic_s = _BYTES_PER_PARAMETER * model.num_parameters / ((options.bandwidth or BANDWIDTH) * 1e9)
    notes: tuple[str, ...] = ()
    if options.run_file is None:
        unit = 1 / ((options.tflops or TFLOPS) * 1e12)
        cost = CostModel(linear=model.cost.linear * unit, quadratic=model.cost.quadratic * unit)
        boundary_s = 0.0
        origin = (
            f"{options.tflops or TFLOPS:g} TFLOP/s achieved a GPU{'' if options.tflops else ' (assumed)'}, "
            f"parameters and gradients at {options.bandwidth or BANDWIDTH:g} "
            f"GB/s{'' if options.bandwidth else ' (assumed)'}"
        )
        if not options.tflops:
            notes += ("seconds scale with --tflops, which is assumed; shares and speed-ups hardly change",)
        if options.boundary_s is None:
            notes += (
                "the boundary between minibatches counts as 0 s, which flatters small ones; give "
                "--boundary-s, or --run",
            )
    else:
        run = MeasuredRun.read(options.run_file)
        fit = run.fit(model.cost, sequences.pool)
        cost, boundary_s = fit.cost, fit.boundary_s
        achieved = model.cost.linear / cost.linear / 1e12
        origin = (
            f"fitted to {fit.num_steps} steps of {run.path} on {run.num_ranks} ranks ({fit.error:.1%} off): "
            f"{achieved:.3g} TFLOP/s a rank, {cost.overhead * 1e3:.3g} ms a micro-batch, boundary "
            f"{boundary_s * 1e3:.3g} ms"
        )
        if abs(math.log(run.mean_length / float(sequences.pool.mean()))) > math.log(1.1):
            notes = (
                f"the run's sequences have {run.mean_length:.0f} tokens on average, those given "
                f"{sequences.pool.mean():.0f}: give its data for a good fit",
            )
    if not options.noise:
        notes += ("micro-batches take as long as planned; --noise shows what dynamic evens out",)
    if options.boundary_s is not None:
        boundary_s = options.boundary_s
    machine = Machine(
        cost,
        boundary_s=boundary_s,
        traffic_s=traffic_s,
        speeds=(options.slow,) if options.slow is not None else (),
        noise=options.noise,
    )
    return Speed(machine, origin, notes)
