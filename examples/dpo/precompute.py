"""Log-probabilities of preference pairs by a reference model, written beside the pairs, once.

    odc-launch --config configs/dpo_cpu.yaml examples/dpo/precompute.py --out demo_out/pairs_known

Training on the result needs no reference model in memory, and no forward of one. The reference is the
configuration's ``model``, as it is before any training (without its adapters, where ``model.lora.reference``
says so); the ranks share the pairs out by their cost.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import numpy as np
import torch

import odcengine
from odcengine.config import Config, load_config
from odcengine.data import MicroBatch, TokenDataset
from odcengine.errors import ConfigError
from odcengine.losses import causal_lm_logprobs
from odcengine.ranks import read_rank_info

PAIRS_AT_ONCE = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description="Compute a reference model's log-probabilities of pairs.")
    parser.add_argument("--data", type=Path, help="prepared pairs (default: the configuration's)")
    parser.add_argument(
        "--out", type=Path, required=True, help="data set to write, on a file system of all ranks"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    info = read_rank_info()
    if info.config_file is None:
        raise ConfigError("no configuration: start this with odc-launch --config FILE")
    config = load_config(info.config_file)
    path = arguments.data or config.data.path
    if path is None:
        raise ConfigError("no data: give --data DIRECTORY, or data.path in the configuration")
    pairs = TokenDataset.open(path)
    if pairs.sequences is None:
        raise ConfigError(f"{path}: there are no pairs in it; odc prepare makes them of chosen and rejected")
    # Nothing is trained, resumed or saved here, and there is no second model.
    keys = {
        **config.resolved(),
        "data": {},  # pairs over the limit are left out below, as in training
        "monitor": {},
        "checkpoint": {},
        "model": {**config.resolved()["model"], "reference": None},
    }
    kept = _within_limits(pairs.lengths, config)
    engine, *_ = odcengine.initialize(config=keys)
    rank, world_size = engine.topology.rank, engine.topology.world_size

    def logprobs(micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        of_tokens = causal_lm_logprobs(engine.reference or engine.module, micro_batch).logprobs
        return {"ref_logprobs": micro_batch.sum_per_sequence(of_tokens)}

    with engine:
        rows = []
        for start in range(0, len(kept), PAIRS_AT_ONCE):
            mine = kept[start : start + PAIRS_AT_ONCE][rank::world_size]
            samples = [{"sequences": _as_numbers(pairs[number]), "number": number} for number in mine]
            for sample in engine.annotate(samples, logprobs):
                found = [float(sequence["ref_logprobs"]) for sequence in sample["sequences"]]
                rows.append([float(sample["number"]), *found])
        parts = [
            arguments.out.with_name(f"{arguments.out.name}.rank{number}.npy") for number in range(world_size)
        ]
        parts[rank].parent.mkdir(parents=True, exist_ok=True)
        np.save(parts[rank], np.array(rows, dtype=np.float64).reshape(len(rows), -1))
        engine.sum_over_ranks({"written": 1.0})
        if rank == 0:
            of_pair = {int(row[0]): row[1:] for part in parts for row in np.load(part).tolist()}
            TokenDataset.write(arguments.out, (_with(pairs[n], of_pair[n]) for n in kept))
            for part in parts:
                part.unlink()
            logging.info("written to %s", arguments.out)


def _within_limits(lengths: np.ndarray, config: Config) -> list[int]:
    """The pairs that training will use: with ``data.too_long: skip`` those that a micro-batch can hold."""
    limit = min(config.balance.max_tokens_per_micro_batch, config.data.max_length)
    if config.data.too_long != "skip":
        return list(range(len(lengths)))  # one that is too long is an error, with its number
    kept = [int(number) for number in np.flatnonzero(np.asarray(lengths) <= limit)]
    if len(kept) < len(lengths):
        logging.warning(
            "%d of %d pairs are over the limit of %d tokens and left out",
            len(lengths) - len(kept),
            len(lengths),
            limit,
        )
    if not kept:
        raise ConfigError(
            f"data: no pair has at most {limit} tokens; raise balance.max_tokens_per_micro_batch"
        )
    return kept


def _as_numbers(pair: dict[str, list[dict[str, np.ndarray]]]) -> list[dict[str, np.ndarray]]:
    return [
        {"input_ids": sequence["input_ids"].astype(np.int64), "loss_mask": sequence["loss_mask"]}
        for sequence in pair["sequences"]
    ]


def _with(pair: dict[str, list[dict[str, object]]], found: list[float]) -> dict[str, object]:
    answers = zip(pair["sequences"], found, strict=True)
    return {"sequences": [{**sequence, "ref_logprobs": known} for sequence, known in answers]}


if __name__ == "__main__":
    main()
