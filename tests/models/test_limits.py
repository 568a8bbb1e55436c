"""Samples that a model cannot read are refused before the first step."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import run_ranks

import odcengine
from odcengine.data import TokenDataset
from odcengine.errors import ConfigError
from odcengine.models import check_lengths, load_model, prepare_model

pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SMALL = {**SIZES, "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "original_max_position_embeddings": 16,
}
PHI3 = {**SMALL, "model_type": "phi3", "max_position_embeddings": 64, "rope_scaling": LONGROPE}
PHI3["original_max_position_embeddings"] = 16
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


@pytest.mark.parametrize(
    ("values", "limit", "message"),
    [
        (GPT2, 32, "has embeddings for 32 positions"),
        (
            {**SIZES, "model_type": "opt", "ffn_dim": 24, "num_attention_heads": 2, "word_embed_proj_dim": 16,
             "max_position_embeddings": 40},
            40,
            "has embeddings for 40 positions",  # and two rows for padding
        ),
        (PHI3, 16, "has longrope"),
        ({**SMALL, "model_type": "llama", "max_position_embeddings": 16, "rope_scaling": DYNAMIC},
         16, "has dynamic RoPE"),
        ({**SMALL, "model_type": "llama", "max_position_embeddings": 16}, None, ""),
        ({**SMALL, "model_type": "mistral", "sliding_window": 12}, None, ""),
    ],
)  # fmt: skip
def test_limits_of_families(values: dict[str, Any], limit: int | None, message: str) -> None:
    model = prepare_model(load_model(values))
    check_lengths(model, limit or 10_000)
    if limit is not None:
        with pytest.raises(
            ConfigError, match=f"{limit + 1} tokens.*{message}.*max_length to at most {limit}"
        ):
            check_lengths(model, limit + 1)


def test_longrope_alone_in_its_row() -> None:
    check_lengths(prepare_model(load_model(PHI3)), 60, shared_rows=False)


def _train(rank: int, world_size: int, too_long: str) -> list[float]:
    samples = [{"input_ids": list(range(10))}] * 7 + [{"input_ids": list(range(40))}]
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW"},
        "model": {"config": GPT2},
        "data": {"max_length": 48 if too_long == "error" else 32, "too_long": too_long},
        "odc": {"timeout_s": 60, "startup_timeout_s": 90},
    }
    engine, _, loader, _ = odcengine.initialize(
        config=config, training_data=TokenDataset.from_samples(samples)
    )
    assert loader is not None
    losses = []
    for minibatch in loader:
        for micro_batch in minibatch:
            engine.backward(engine(micro_batch))
        losses.append(engine.step().loss)
    engine.close()
    return losses


def test_before_the_first_step() -> None:
    """Without the check the run ended in the middle, with an index out of range."""
    (result,) = run_ranks(_train, 1, "error")
    assert result.error_type == "ConfigError"
    assert "the longest sample has 40 tokens, but GPT2LMHeadModel has embeddings for 32" in str(result.error)
    for too_long in ("truncate", "skip"):
        (result,) = run_ranks(_train, 1, too_long)
        assert result.error is None, result.error
