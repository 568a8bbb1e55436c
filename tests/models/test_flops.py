"""Model FLOPs against a count of the products that a model really does."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from odcengine.models import load_model, model_flops

pytest.importorskip("transformers")

VALUES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("length", [1, 64, 200])
def test_equals_the_products_of_the_model(family: str, length: int) -> None:
    """torch counts the whole square of eager attention; causally half of it is needed."""
    model = load_model({"model_type": family, **VALUES})
    model.set_attn_implementation("eager")  # type: ignore[operator]
    with FlopCounterMode(display=False) as counter:
        logits = model(torch.zeros(1, length, dtype=torch.int64), use_cache=False).logits
        torch.autograd.backward(logits.sum())
    attention = 6 * 3 * 32 * length**2
    # llama's rotary angles are a product as well: positions x frequencies.
    counted = counter.get_total_flops() - attention
    assert model_flops(model.config, [length]) == pytest.approx(counted, rel=2e-3)


def test_samples_add_up_and_their_squares_do_not_mix() -> None:
    config = load_model({"model_type": "llama", **VALUES}).config
    alone = [model_flops(config, [length]) for length in (3, 50, 7)]
    assert model_flops(config, [3, 50, 7]) == pytest.approx(sum(alone))
    assert model_flops(config, [60]) > sum(alone)
    assert model_flops(config, []) == 0.0


def test_known_model() -> None:
    """A 7B Llama: 6 FLOPs a weight and token (6.607e9 of the blocks and the head), and attention."""

    class Config:
        model_type = "llama"
        num_hidden_layers, hidden_size, intermediate_size = 32, 4096, 11008
        num_attention_heads, vocab_size = 32, 32000

    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    assert model_flops(Config, [4096]) == pytest.approx(6 * weights * 4096 + 6 * 32 * 4096 * 4096**2)
    with pytest.raises(ValueError, match="cost model: NoneType has no num_hidden_layers"):
        model_flops(None, [1])
