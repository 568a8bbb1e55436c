"""The cost model against the published shapes of Qwen2.5."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from odcengine.balance import CostModel

QWEN_7B = {
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}


@pytest.mark.parametrize(
    ("recompute", "linear", "quadratic"), [(False, 4.24e10, 7.02e5), (True, 5.547e10, 9.03e5)]
)
def test_qwen_7b(recompute: bool, linear: float, quadratic: float) -> None:
    cost = CostModel.from_config(SimpleNamespace(**QWEN_7B), recompute=recompute)
    assert cost.linear == pytest.approx(linear, rel=2e-3)
    assert cost.quadratic == pytest.approx(quadratic, rel=2e-3)


def test_default_is_recomputed_7b() -> None:
    assert CostModel.default() == CostModel.from_config(SimpleNamespace(**QWEN_7B), recompute=True)


def test_values() -> None:
    np.testing.assert_array_equal(CostModel(2.0, 0.5)([1, 4]), [2.5, 16.0])


def test_linear_part_is_six_flop_per_weight() -> None:
    """The weights of a small GPT-2 shape counted by hand: two matrices in the feed-forward block."""
    config = SimpleNamespace(
        num_hidden_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        vocab_size=10,
        model_type="gpt2",
        n_inner=None,
    )
    block = 4 * 8 * 8 + 2 * 8 * 32
    assert CostModel.from_config(config).linear == 6 * (2 * block + 8 * 10)


def test_experts_count_when_active() -> None:
    config = SimpleNamespace(
        **{**QWEN_7B, "intermediate_size": 100}, num_experts_per_tok=4, moe_intermediate_size=10
    )
    dense = SimpleNamespace(**{**QWEN_7B, "intermediate_size": 40})
    assert CostModel.from_config(config) == CostModel.from_config(dense)


def test_layers_of_different_widths() -> None:
    """Gemma 3n lists the width of each layer."""
    config = SimpleNamespace(**{**QWEN_7B, "intermediate_size": [10, 30]})
    mean = SimpleNamespace(**{**QWEN_7B, "intermediate_size": 20})
    assert CostModel.from_config(config) == CostModel.from_config(mean)


def test_missing_shape_is_named() -> None:
    with pytest.raises(ValueError, match="SimpleNamespace has no hidden_size, vocab_size"):
        CostModel.from_config(SimpleNamespace(num_hidden_layers=1, num_attention_heads=1))


def test_model_with_and_without_a_shape() -> None:
    config = SimpleNamespace(**QWEN_7B)
    assert CostModel.for_model(SimpleNamespace(config=config)) == CostModel.from_config(config)
    nested = SimpleNamespace(get_text_config=lambda: config)
    assert CostModel.for_model(SimpleNamespace(config=nested)) == CostModel.from_config(config)
    assert CostModel.for_model(object()) == CostModel.default()
    assert CostModel.for_model(SimpleNamespace(config={"layers": 3})) == CostModel.default()


@pytest.mark.parametrize(("linear", "quadratic"), [(-1.0, 1.0), (0.0, 0.0), (float("nan"), 1.0)])
def test_bad_coefficients(linear: float, quadratic: float) -> None:
    with pytest.raises(ValueError, match="must be >= 0"):
        CostModel(linear, quadratic)


def test_a_configuration_that_will_not_tell_the_width_of_its_heads() -> None:
    """Gemma 4's, whose layers differ; transformers raises what is no AttributeError."""

    class Config:
        num_hidden_layers, hidden_size, num_attention_heads, vocab_size = 2, 32, 4, 64

        @property
        def head_dim(self) -> int:
            raise RuntimeError("varies across layers")

    config = Config()
    plain = CostModel.from_shape(
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        intermediate_size=128,
        vocab_size=64,
    )
    assert CostModel.from_config(config) == plain
