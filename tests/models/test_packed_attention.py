"""Packed rows through real (tiny, random) models of transformers: equal to separate samples, isolated."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from odcengine.data import MicroBatch, pack_samples
from odcengine.data.batch import Segments
from odcengine.errors import UsageError
from odcengine.models import (
    PACKED_ATTENTION,
    check_isolation,
    is_transformers_model,
    packed_attention,
    prepare_config,
    prepare_model,
)
from odcengine.models.sample_attention import sample_by_sample

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# A one-token sample in the middle, lengths that differ.
SAMPLES = [[5, 9, 13, 2, 40], [7], [8, 8, 61, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
STARTS = [0, 5, 6, 10, 19]


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))


def qwen2_tied() -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True))


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


MODELS = pytest.mark.parametrize("build", [llama, qwen2_tied, gpt2])


def make_batch(samples: list[list[int]] = SAMPLES, **arguments: Any) -> MicroBatch:
    return pack_samples([{"input_ids": tokens} for tokens in samples], **arguments)


def make_model(build: Any, **arguments: Any) -> Any:
    torch.manual_seed(0)
    return prepare_model(build().eval(), **arguments)


def packed_logits(model: Any, batch: MicroBatch) -> torch.Tensor:
    logits: torch.Tensor = model(**batch.model_inputs(), use_cache=False).logits[0]
    return logits


@MODELS
@pytest.mark.parametrize("multiple", [1, 8])
def test_packed_equals_separate(build: Any, multiple: int) -> None:
    """The reference is the unprepared model, with transformers' own attention, one sample at a time."""
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        alone = [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in SAMPLES]
        packed = packed_logits(prepare_model(model, probe=True), make_batch(pad_to_multiple_of=multiple))
    assert len(packed) == (24 if multiple == 8 else 19)
    for index, expected in enumerate(alone):
        torch.testing.assert_close(packed[STARTS[index] : STARTS[index + 1]], expected, atol=1e-5, rtol=0)


@MODELS
def test_isolation(build: Any) -> None:
    """USER_CASES 10: changing the first sample changes no logit of the others."""
    model = make_model(build)
    with torch.no_grad():
        before = packed_logits(model, make_batch())
        after = packed_logits(model, make_batch([[63, 62, 61, 60, 59], *SAMPLES[1:]]))
    torch.testing.assert_close(after[5:], before[5:], atol=1e-5, rtol=0)
    assert (after[:5] - before[:5]).abs().max() > 1e-3


@MODELS
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients(build: Any, checkpointing: bool) -> None:
    """In float64: the packed row's gradient is the sum of the samples' own."""
    torch.manual_seed(0)
    reference = build().double().train()
    for module in reference.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    gradients: dict[str, torch.Tensor] = {}
    for tokens in SAMPLES:
        if len(tokens) > 1:
            logits = reference(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
            torch.autograd.backward(
                nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="sum")
            )
    for name, parameter in reference.named_parameters():
        gradients[name] = parameter.grad.clone()
        parameter.grad = None
    model: Any = prepare_model(reference)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = make_batch(pad_to_multiple_of=4)
    loss = nn.functional.cross_entropy(
        packed_logits(model, batch), batch.labels[0], ignore_index=-100, reduction="sum"
    )
    torch.autograd.backward(loss)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        scale = max(1.0, float(gradients[name].abs().max()))
        assert float((parameter.grad - gradients[name]).abs().max()) <= 1e-10 * scale, name
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 0.1


def test_no_mask_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of the whole row would be quadratic in its length."""
    from transformers import masking_utils

    model = make_model(llama)

    def refuse(**kwargs: Any) -> None:
        raise AssertionError("a mask was built")

    monkeypatch.setitem(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", refuse)
    packed_logits(model, make_batch())
    model(torch.tensor([[1, 2, 3]]), use_cache=False)


def test_transformers_does_not_look_whether_a_row_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the host would wait for the answer, in every forward."""
    from transformers import masking_utils

    model = make_model(llama)
    prepare_model(model)  # again: one hook is enough

    def refuse(position_ids: torch.Tensor) -> None:
        raise AssertionError("the device was asked")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", refuse)
    packed_logits(model, make_batch())
    assert model.config._attn_implementation == PACKED_ATTENTION
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    inputs = make_batch().model_inputs()
    with pytest.raises(IndexError):
        model(**{**inputs, "input_ids": inputs["input_ids"] + 64}, use_cache=False)
    assert model.config._attn_implementation == PACKED_ATTENTION


def test_padded_batch_and_generation_work_as_before() -> None:
    """Without boundaries the model behaves as transformers' own: left padding, caches."""
    torch.manual_seed(0)
    model = llama().eval()
    inputs = {
        "input_ids": torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
    }
    with torch.no_grad():
        logits = model(**inputs).logits
        tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
        prepare_model(model)
        again = model(**inputs).logits
        again_tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
    torch.testing.assert_close(
        again[inputs["attention_mask"].bool()], logits[inputs["attention_mask"].bool()]
    )
    assert again_tokens.tolist() == tokens.tolist()


def test_configuration_is_copied() -> None:
    """A model made from the same configuration, before or after, keeps its attention."""
    config = transformers.LlamaConfig(**SHAPE)
    config._attn_implementation = "eager"
    before = transformers.LlamaForCausalLM(config)
    model: Any = prepare_model(transformers.LlamaForCausalLM(config), probe=False)
    after = transformers.LlamaForCausalLM(config)
    assert config._attn_implementation == "eager"
    for other in (before, after):
        assert other.model.layers[0].self_attn.config._attn_implementation == "eager"
    configs = {id(module.config) for module in model.modules() if hasattr(module, "config")}
    assert configs == {id(model.config)}
    assert model.config._attn_implementation == PACKED_ATTENTION


def test_model_from_a_prepared_configuration() -> None:
    config = transformers.LlamaConfig(**SHAPE)
    prepared = prepare_config(config)
    assert config._attn_implementation != PACKED_ATTENTION
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(prepared).eval()
    check_isolation(prepare_model(model))
    assert model.config._attn_implementation == PACKED_ATTENTION


def test_probe_leaves_modes_and_weights() -> None:
    torch.manual_seed(0)
    model = llama().train()
    model.model.layers[0].eval()
    weights = [parameter.clone() for parameter in model.parameters()]
    prepare_model(model, probe=True)
    assert model.training
    assert not model.model.layers[0].training
    assert model.model.layers[1].training
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        assert torch.equal(parameter, weight)
        assert parameter.grad is None


# ---- what is refused -----------------------------------------------------------------------------------


def test_recurrent_model_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1)
    with pytest.raises(UsageError, match="MambaForCausalLM does not let its attention be exchanged"):
        prepare_model(transformers.MambaForCausalLM(config))


def test_layers_that_see_over_boundaries_are_refused() -> None:
    config = transformers.Qwen3Config(**SHAPE, head_dim=8)
    config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UsageError, match="Qwen3Config has layers of type linear_attention"):
        prepare_config(config)


def test_model_that_mixes_neighbours_fails_the_probe() -> None:
    """A convolution over tokens: nothing in the configuration tells, only the probe finds it."""

    class Mixing(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]

    torch.manual_seed(0)
    model = llama()
    model.model.norm = nn.Sequential(model.model.norm, Mixing())
    config = model.config
    with pytest.raises(UsageError, match="changing the first sample changes the logits of the others"):
        prepare_model(model, probe=True)
    assert model.config is config
    assert config._attn_implementation != PACKED_ATTENTION
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_model_that_ignores_positions_fails_the_probe() -> None:
    torch.manual_seed(0)
    model = gpt2()

    class Running(nn.Module):
        def __init__(self, table: nn.Embedding) -> None:
            super().__init__()
            self.table = table

        def forward(self, positions: torch.Tensor) -> torch.Tensor:
            embedded: torch.Tensor = self.table(torch.arange(positions.shape[-1])[None])
            return embedded

    model.transformer.wpe = Running(model.transformer.wpe)
    with pytest.raises(UsageError, match=r"it gets alone .* may ignore position_ids"):
        prepare_model(model, probe=True)


@pytest.mark.parametrize("window", [1, 4, 5, 64])
def test_sliding_window(window: int) -> None:
    """Samples shorter and longer than the window: what transformers' own attention gives each alone."""
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**SHAPE, sliding_window=window)).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        alone = [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in SAMPLES]
        prepare_model(model)
        torch.testing.assert_close(packed_logits(model, make_batch()), torch.cat(alone), atol=1e-5, rtol=0)
        # Without boundaries too: a whole row of several samples, and no mask of it.
        again = [model(torch.tensor([tokens] * 2), use_cache=False).logits[1] for tokens in SAMPLES]
    torch.testing.assert_close(again, alone, atol=1e-5, rtol=0)


def test_sliding_window_in_generation_and_padded_batches() -> None:
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**SHAPE, sliding_window=4)).eval()
    inputs = {
        "input_ids": torch.tensor([[0, 0, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]),
    }
    whole = {"input_ids": inputs["input_ids"][1:]}
    arguments: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        tokens = [model.generate(**given, **arguments) for given in (inputs, whole)]
        prepare_model(model)
        again = [model.generate(**given, **arguments) for given in (inputs, whole)]
    for before, after in zip(tokens, again, strict=True):
        assert after.tolist() == before.tolist()


@pytest.mark.parametrize(("kv_heads", "length"), [(4, 13), (2, 8), (1, 5)])
def test_sliding_window_against_a_mask(kv_heads: int, length: int) -> None:
    """In float64, with gradients, and a window of 4 that does and does not divide the length."""
    torch.manual_seed(0)
    shapes = [(2, heads, length, 8) for heads in (4, kv_heads, kv_heads)]
    inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    query, key, value = inputs
    distance = torch.arange(length)[:, None] - torch.arange(length)
    right = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=(distance >= 0) & (distance < 4), scale=0.3, enable_gqa=True
    )
    found = sample_by_sample(query, key, value, Segments([0, length]), scaling=0.3, sliding_window=4)
    torch.testing.assert_close(found.transpose(1, 2), right, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(right)
    for expected, gradient in zip(
        torch.autograd.grad(right, inputs, weights),
        torch.autograd.grad(found.transpose(1, 2), inputs, weights),
        strict=True,
    ):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_calls_that_are_not_packed_rows() -> None:
    model = make_model(llama)
    inputs = make_batch().model_inputs()
    with pytest.raises(UsageError, match="takes no attention_mask"):
        model(**inputs, attention_mask=torch.tensor([[0] + [1] * 18]), use_cache=False)
    short = {**inputs, "cu_seq_lens_q": torch.tensor([0, 5, 18], dtype=torch.int32)}
    with pytest.raises(UsageError, match="boundaries run from 0 to 18, but the row from 0 to 19"):
        model(**short, use_cache=False)
    twice = {name: value.expand(2, -1) if "ids" in name else value for name, value in inputs.items()}
    with pytest.raises(UsageError, match="batch size 1"):
        model(**twice, use_cache=False)
    bidirectional = nn.Module()
    bidirectional.is_causal = False  # type: ignore[assignment]
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UsageError, match="this layer's is not"):
        packed_attention(bidirectional, query, query, query, None, cu_seq_lens_q=torch.tensor([0, 3]))


def test_boundaries_that_do_not_arrive_are_found() -> None:
    """Some models of some versions of transformers drop the keywords: then a sample sees the one before."""
    torch.manual_seed(0)
    model = llama()
    layer = model.model.layers[1].self_attn
    forward = layer.forward

    def dropping(*args: Any, cu_seq_lens_q: Any = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    layer.forward = dropping
    with pytest.raises(UsageError, match="something is carried over boundaries"):
        prepare_model(model)


def test_tiny_vocabulary() -> None:
    torch.manual_seed(0)
    prepare_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, "vocab_size": 4})))


def test_models_of_others_and_meta_weights() -> None:
    with pytest.raises(UsageError, match="Linear is no model of transformers"):
        prepare_model(nn.Linear(1, 1))
    with torch.device("meta"):
        model = llama()
    prepare_model(model)
    assert is_transformers_model(nn.Sequential(model))
    assert not is_transformers_model(nn.Linear(1, 1))
    with pytest.raises(UsageError, match="on the meta device"):
        prepare_model(model, probe=True)


def test_missing_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'odcengine\[hf\]'"):
        prepare_config(object())
