"""Logits that are scaled or capped after the head: the head's losses are those of transformers' logits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from largest_tensor import LargestTensor
from torch import nn

from odcengine.data import IGNORE_INDEX, MicroBatch, pack_samples
from odcengine.errors import UsageError
from odcengine.losses import (
    LogitTransform,
    causal_lm_logprobs,
    causal_lm_loss_sum,
    linear_cross_entropy_sum,
    linear_logprobs,
    linear_loss,
    softmax,
)
from odcengine.losses.fused_head import fuses_loss, mark_fused
from odcengine.models import prepare_model

TRANSFORMS = [LogitTransform(0.125), LogitTransform(cap=3.0), LogitTransform(-2.0, 1.5)]
TEMPERATURE = 0.7


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small only wait for threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def changed(logits: torch.Tensor, transform: LogitTransform) -> torch.Tensor:
    logits = transform.scale * logits
    return logits if transform.cap is None else transform.cap * torch.tanh(logits / transform.cap)


def policy_loss(logprobs: torch.Tensor, entropies: torch.Tensor | None) -> torch.Tensor:
    """Something that a loss of RL could be: no two tokens count alike."""
    assert entropies is not None
    weights = torch.linspace(-1.0, 2.0, logprobs.numel(), dtype=logprobs.dtype).view_as(logprobs)
    return (weights * logprobs.exp()).sum() + (weights.flip(-1) * entropies).sum()


def plain_policy_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logps = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    chosen = logps.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    entropies = -(logps.exp() * logps).sum(dim=-1)
    known = labels != IGNORE_INDEX
    return policy_loss(torch.where(known, chosen, 0), torch.where(known, entropies, 0))


def plain_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[0], labels[0], ignore_index=IGNORE_INDEX, reduction="sum")


def worst(found: Any, right: Any) -> float:
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max())
        for a, b in zip(found, right, strict=True)
    )


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_parts_equal_torch(
    transform: LogitTransform, dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of large logits, three rows at a time and seven tokens a chunk; against torch in float64."""
    monkeypatch.setattr(softmax, "_WIDE_ELEMENTS", {"cpu": 3 * 101})
    generator = torch.Generator().manual_seed(0)
    inputs = [
        (2 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
        for shape in [(1, 37, 12), (101, 12), (101,)]
    ]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    labels = torch.randint(101, (1, 37), generator=generator)
    labels[0, ::3] = IGNORE_INDEX
    logits = changed(nn.functional.linear(*wide), transform)
    loss = linear_cross_entropy_sum(*inputs, labels, transform=transform, chunk_tokens=7)
    right = plain_loss(logits, labels)
    assert float(loss.detach()) == pytest.approx(float(right.detach()), rel=error)
    expected = torch.autograd.grad(right, wide, retain_graph=True)
    assert worst(torch.autograd.grad(loss, inputs), expected) <= error
    found = linear_logprobs(
        *inputs,
        labels,
        transform=transform,
        temperature=TEMPERATURE,
        entropy="differentiable",
        chunk_tokens=7,
    )
    loss, right = policy_loss(*found), plain_policy_loss(logits, labels)
    assert float(loss.detach()) == pytest.approx(float(right.detach()), rel=error)
    assert worst(torch.autograd.grad(loss, inputs), torch.autograd.grad(right, wide)) <= error


def test_what_is_refused() -> None:
    for scale in (0.0, float("inf"), float("nan")):
        with pytest.raises(UsageError, match=r"scale is .*, but must be a finite number other than 0"):
            LogitTransform(scale)
    for cap in (0.0, -1.0, float("inf")):
        with pytest.raises(UsageError, match=r"cap is .*, but must be a number above 0"):
            LogitTransform(cap=cap)


# ---- models --------------------------------------------------------------------------------------------

MODELS: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": 0.5, "head_dim": 4},  # of small random logits something is cut off
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.0625},
    "hyperclovax": {"logits_scaling": 0.125},  # a factor, where Granite divides
    "nanochat": {"final_logit_softcapping": 0.5},
    "gemma3n_text": {
        "final_logit_softcapping": 0.5,
        "head_dim": 4,
        "vocab_size_per_layer_input": 48,
        "hidden_size_per_layer_input": 4,
        "laurel_rank": 4,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def build(model_type: str, vocab: int = 48) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type,
        **{
            "vocab_size": vocab,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **MODELS[model_type],
        },
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()


def prepared(model: nn.Module) -> Any:
    return prepare_model(model)


def make_batch() -> MicroBatch:
    tokens = [[5, 9, 13, 2, 40], [7], [8, 8, 41, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    return pack_samples(
        [{"input_ids": ids, "loss_mask": [place != 2 for place in range(len(ids))]} for ids in tokens]
    )


@pytest.mark.parametrize("model_type", MODELS)
def test_models_equal_their_logits(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, log-probabilities, entropies and all gradients, against transformers' own logits in float64."""
    # transformers computes norms in float32 also of float64 models, which would hide errors below 1e-7.
    cast = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda tensor, *to, **more: tensor if to == (torch.float32,) else cast(tensor, *to, **more),
    )
    monkeypatch.setattr(linear_loss, "_MIN_CHUNK_TOKENS", 4)
    monkeypatch.setattr(linear_loss, "_CHUNK_ELEMENTS", 4 * 48)
    model = prepared(build(model_type))
    assert fuses_loss(model)
    values = copy.deepcopy(model.config.to_dict())
    batch = make_batch()
    parameters = list(model.parameters())
    right = (plain_loss, plain_policy_loss)
    found = (
        lambda: causal_lm_loss_sum(model, batch),
        lambda: policy_loss(
            *causal_lm_logprobs(model, batch, temperature=TEMPERATURE, entropy="differentiable")
        ),
    )
    for of_logits, of_head in zip(right, found, strict=True):
        logits = model(**batch.model_inputs(), use_cache=False).logits
        expected, loss = of_logits(logits, batch.labels), of_head()
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        pairs = zip(gradients, torch.autograd.grad(expected, parameters, allow_unused=True), strict=True)
        used = [(a, b) for a, b in pairs if a is not None or b is not None]
        largest = max(float(b.abs().max()) for _, b in used if b is not None)
        for gradient, right_gradient in used:
            assert gradient is not None
            assert right_gradient is not None
            assert float((gradient - right_gradient).abs().max()) <= 1e-10 * largest
    assert model.config.to_dict() == values  # nothing is left switched off


def test_the_largest_tensor_of_a_capped_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 tokens x 20,000: nothing near that is made in forward and backward; without fusing it is."""
    num_tokens, vocab = 256, 20000
    monkeypatch.setattr(linear_loss, "_MIN_CHUNK_TOKENS", 16)
    monkeypatch.setattr(linear_loss, "_CHUNK_ELEMENTS", 2**19)
    model = prepared(build("nanochat", vocab).float())
    batch = pack_samples([{"input_ids": [number % vocab for number in range(num_tokens)]}])
    with LargestTensor() as largest:
        torch.autograd.backward(causal_lm_loss_sum(model, batch))
        torch.autograd.backward(causal_lm_logprobs(model, batch).logprobs.sum())
    assert largest.num_elements <= 2**19
    mark_fused(model, False)
    with LargestTensor() as largest:
        torch.autograd.backward(causal_lm_loss_sum(model, batch))
    assert largest.num_elements == num_tokens * vocab


@pytest.mark.parametrize(
    ("model_type", "name"), [("gemma2", "final_logit_softcapping"), ("cohere", "logit_scale")]
)
def test_the_value_comes_back_and_may_not_change(model_type: str, name: str) -> None:
    model = prepared(build(model_type))
    right = float(causal_lm_loss_sum(model, make_batch()).detach())

    def fail(*_: Any) -> None:
        raise ValueError("sample 17 is broken")

    hook = model.model.norm.register_forward_hook(fail)
    with pytest.raises(ValueError, match="sample 17"):
        causal_lm_loss_sum(model, make_batch())
    hook.remove()
    assert float(causal_lm_loss_sum(copy.deepcopy(model), make_batch()).detach()) == right
    owner = model if hasattr(model, name) else model.config
    before = getattr(owner, name)
    setattr(owner, name, 2 * before)
    with pytest.raises(UsageError, match=f"{name} is {2 * before}, but was {before} when the model was"):
        causal_lm_loss_sum(model, make_batch())
    if owner is model:
        setattr(model.config, name, 2 * before)
    prepare_model(model)
    logits = model(**make_batch().model_inputs(), use_cache=False).logits
    right = float(plain_loss(logits, make_batch().labels).detach())
    assert float(causal_lm_loss_sum(model, make_batch()).detach()) == pytest.approx(right, rel=1e-12)


def test_models_of_16_bits() -> None:
    """The cap is computed in float32, so the loss is nearer to the exact one than that of rounded logits."""
    model = build("gemma2")
    exact = float(causal_lm_loss_sum(prepared(model.bfloat16().double()), make_batch()).detach())
    low = prepared(model.bfloat16())
    assert fuses_loss(low)
    loss = causal_lm_loss_sum(low, make_batch())
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(exact, rel=2e-3)
