"""``data.path``: the data set of a run named in the configuration, opened by every rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import run_ranks, values

import odcengine
from odcengine.data import TokenDataset

pytest.importorskip("transformers")

LENGTHS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
SUPERVISED = (2, 0, 3, 0, 4, 8, 1, 5, 4, 0)


def write(path: Path, vocab_size: int = 32) -> TokenDataset:
    """The samples of user case 9."""
    rng = np.random.default_rng(0)
    return TokenDataset.write(
        path,
        [
            {"input_ids": rng.integers(vocab_size, size=n), "loss_mask": np.arange(n) >= n - supervised}
            for n, supervised in zip(LENGTHS, SUPERVISED, strict=True)
        ],
    )


def _train(rank: int, world_size: int, folder: str, data: dict[str, Any], given: bool) -> list[Any]:
    os.chdir(folder)
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": 32,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            }
        },
        "data": {"shuffle": False, **data},
        "balance": {"max_tokens_per_micro_batch": 10},
        "odc": {"timeout_s": 60, "startup_timeout_s": 90},
    }
    engine, _, loader, _ = odcengine.initialize(
        config=config, training_data=TokenDataset.open("tokens") if given else None
    )
    assert loader is not None
    found = []
    for minibatch in loader:
        for micro_batch in minibatch:
            engine.backward(engine(micro_batch))
        metrics = engine.step()
        found.append((metrics.count, minibatch.num_samples_without_targets, metrics.loss))
    engine.close()
    return found


def test_two_ranks_train_on_it(tmp_path: Path) -> None:
    """A relative path is relative to the working directory; the result is that of training_data=..."""
    write(tmp_path / "tokens")
    ranks = values(run_ranks(_train, 2, str(tmp_path), {"path": "tokens"}, False))
    assert [(count, without) for count, without, _ in ranks[0]] == [(5, 2), (18, 0), (4, 1)]
    reference = values(run_ranks(_train, 1, str(tmp_path), {}, True))
    for found in ranks:
        assert [loss for *_, loss in found] == pytest.approx([loss for *_, loss in reference[0]], rel=1e-5)


@pytest.mark.parametrize(
    ("data", "given", "message"),
    [
        ({"path": "nothing"}, False, "nothing: not a data set of odcengine"),
        ({"path": "large"}, False, "but the model's vocabulary ends at 31; tokenise with the model's own"),
        ({"path": "tokens"}, True, "was given training_data, and the configuration names tokens; leave"),
    ],
)
def test_refused(tmp_path: Path, data: dict[str, Any], given: bool, message: str) -> None:
    write(tmp_path / "tokens")
    write(tmp_path / "large", vocab_size=1000)
    (result,) = run_ranks(_train, 1, str(tmp_path), data, given)
    assert result.error_type == "ConfigError"
    assert message in str(result.error)
