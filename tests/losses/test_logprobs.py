"""Log-probabilities and entropies without full logits: torch's values, never more logits than a chunk's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from largest_tensor import LargestTensor
from torch import nn

from odcengine.data import IGNORE_INDEX, pack_samples
from odcengine.errors import UsageError
from odcengine.losses import (
    TokenLogprobs,
    causal_lm_logprobs,
    linear_logprobs,
    linear_loss,
    softmax,
    token_logprobs,
)
from odcengine.losses.fused_head import fuses_loss, mark_fused
from odcengine.models import prepare_model

TEMPERATURE = 0.7


def make_case(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Hidden states, weight and bias; labels, a third of them without a target."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 37, 12), (101, 12), (101,)]
    inputs = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    labels = torch.randint(101, (1, 37), generator=generator)
    labels[0, ::3] = IGNORE_INDEX
    return inputs, labels


def plain(logits: torch.Tensor, labels: torch.Tensor, temperature: float = TEMPERATURE) -> TokenLogprobs:
    logps = torch.log_softmax(logits / temperature, dim=-1)
    chosen = logps.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    entropies = -(logps.exp() * logps).sum(dim=-1)
    has_target = labels != IGNORE_INDEX
    return TokenLogprobs(torch.where(has_target, chosen, 0), torch.where(has_target, entropies, 0))


def mixed(found: TokenLogprobs, entropy: str) -> torch.Tensor:
    """Something that a loss could be: no two tokens count alike."""
    weights = torch.linspace(-1.0, 2.0, found.logprobs.numel(), dtype=torch.float64).view_as(found.logprobs)
    loss = (weights * found.logprobs.double().exp()).sum()
    if entropy == "differentiable" and found.entropies is not None:
        loss = loss + (weights.flip(-1) * found.entropies.double()).sum()
    return loss


def worst(found: torch.Tensor | None, right: torch.Tensor | None) -> float:
    assert found is not None
    assert right is not None
    found, right = found.detach(), right.detach()
    return float((found.double() - right.double()).abs().max() / right.double().abs().max())


@pytest.mark.parametrize("entropy", ["none", "detached", "differentiable"])
@pytest.mark.parametrize("chunk_tokens", [None, 1, 7, 24])
@pytest.mark.parametrize(
    ("dtype", "error", "gradient_error"),
    [(torch.float64, 1e-13, 1e-12), (torch.float32, 1e-6, 5e-6), (torch.bfloat16, 1e-2, 7e-2)],
)
def test_equals_torch(
    dtype: torch.dtype, error: float, gradient_error: float, chunk_tokens: int | None, entropy: Any
) -> None:
    """Against torch in float64; in bfloat16 the logits are rounded, as those of a linear layer are."""
    inputs, labels = make_case(dtype)
    found = linear_logprobs(
        *inputs, labels, temperature=TEMPERATURE, entropy=entropy, chunk_tokens=chunk_tokens
    )
    torch.autograd.backward(mixed(found, entropy))
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    right = plain(nn.functional.linear(*wide), labels)
    torch.autograd.backward(mixed(right, entropy))
    assert found.logprobs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert worst(found.logprobs.detach(), right.logprobs.detach()) <= error
    assert (found.logprobs[labels == IGNORE_INDEX] == 0).all()
    assert (found.entropies is None) == (entropy == "none")
    if found.entropies is not None:
        assert found.entropies.requires_grad == (entropy == "differentiable")
        assert worst(found.entropies.detach(), right.entropies) <= error
    for tensor, expected in zip(inputs, wide, strict=True):
        assert worst(tensor.grad, expected.grad) <= gradient_error


@pytest.mark.parametrize("entropy", ["none", "differentiable"])
def test_of_logits(monkeypatch: pytest.MonkeyPatch, entropy: Any) -> None:
    """Three rows at a time, the last of them fewer."""
    monkeypatch.setattr(softmax, "_WIDE_ELEMENTS", {"cpu": 3 * 101})
    inputs, labels = make_case(torch.float64)
    logits = nn.functional.linear(*inputs).detach().requires_grad_()
    found = token_logprobs(logits, labels, temperature=TEMPERATURE, entropy=entropy)
    torch.autograd.backward(mixed(found, entropy))
    copy = logits.detach().clone().requires_grad_()
    right = plain(copy, labels)
    torch.autograd.backward(mixed(right, entropy))
    torch.testing.assert_close(found.logprobs, right.logprobs, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(logits.grad, copy.grad, rtol=1e-12, atol=1e-13)


def test_gradients_are_those_of_finite_differences() -> None:
    inputs, labels = make_case(torch.float64)
    small = [inputs[0].detach()[:, :5, :3], inputs[1].detach()[:7, :3], inputs[2].detach()[:7]]
    leaves = [tensor.clone().requires_grad_() for tensor in small]
    labels = torch.tensor([[3, IGNORE_INDEX, 0, 6, 1]])

    def values(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = linear_logprobs(*tensors, labels, temperature=1.7, entropy="differentiable", chunk_tokens=2)
        assert found.entropies is not None
        return found.logprobs, found.entropies

    assert torch.autograd.gradcheck(values, leaves)


@pytest.mark.parametrize("frozen", [(0,), (1, 2)])
def test_frozen_inputs_get_no_gradient(frozen: tuple[int, ...]) -> None:
    """An adapter's model: the head is frozen; or only the head is trained."""
    inputs, labels = make_case(torch.float64)
    for which in frozen:
        inputs[which].requires_grad_(False)
    torch.autograd.backward(mixed(linear_logprobs(*inputs, labels, chunk_tokens=5), "none"))
    wide = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    torch.autograd.backward(mixed(plain(nn.functional.linear(*wide), labels, 1.0), "none"))
    for number, (tensor, expected) in enumerate(zip(inputs, wide, strict=True)):
        if number in frozen:
            assert tensor.grad is None
        else:
            assert worst(tensor.grad, expected.grad) <= 1e-12


@pytest.mark.parametrize("entropy", ["none", "differentiable"])
def test_logits_never_exist_at_once(monkeypatch: pytest.MonkeyPatch, entropy: Any) -> None:
    """512 tokens with a vocabulary of 8,000, 64 at a time."""
    monkeypatch.setattr(linear_loss, "_MIN_CHUNK_TOKENS", 64)
    monkeypatch.setattr(linear_loss, "_CHUNK_ELEMENTS", 2**16)
    hidden = torch.randn(1, 512, 8, requires_grad=True)
    weight = torch.randn(8000, 8, requires_grad=True)
    labels = torch.randint(8000, (1, 512))
    with LargestTensor() as largest:
        found = linear_logprobs(hidden, weight, None, labels, entropy=entropy)
        torch.autograd.backward(found.logprobs.sum())
    assert largest.num_elements <= 64 * 8000
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() > 0


def test_bfloat16_weights_are_summed_wide() -> None:
    """Adding many chunks in bfloat16 would lose what is small against the sum."""
    hidden = torch.rand(1024, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.zeros(8, 4, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(1024, dtype=torch.int64)
    found = linear_logprobs(hidden, weight, None, labels, chunk_tokens=8)
    torch.autograd.backward(found.logprobs.sum())
    assert weight.grad is not None
    softmax_minus_one_hot = torch.full((8, 1), 0.125) - torch.eye(8)[:, :1]
    expected = -softmax_minus_one_hot * hidden.float().sum(dim=0)
    torch.testing.assert_close(weight.grad.float(), expected, rtol=2**-8, atol=0)


def test_nothing_to_learn() -> None:
    """Zeros with a graph, and zero gradients, even of hidden states that are not finite."""
    hidden = torch.full((1, 3, 4), float("nan"), requires_grad=True)
    weight, bias = torch.randn(5, 4, requires_grad=True), torch.randn(5, requires_grad=True)
    labels = torch.full((1, 3), IGNORE_INDEX)
    found = linear_logprobs(hidden, weight, bias, labels, entropy="differentiable")
    assert found.entropies is not None
    assert found.logprobs.tolist() == found.entropies.tolist() == [[0.0] * 3]
    torch.autograd.backward(found.logprobs.sum())
    for tensor in (hidden, weight, bias):
        assert tensor.grad is not None
        assert (tensor.grad == 0).all()
    logits = torch.full((1, 3, 4), float("nan"), requires_grad=True)
    torch.autograd.backward(token_logprobs(logits, labels).logprobs.sum())
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_large_and_forbidden_logits() -> None:
    """Shifted before anything else; a token of probability 0 adds 0 to the entropy, not NaN."""
    logits = torch.tensor(
        [[1e4, 0.0, -1e4, -torch.inf], [0.0, 0.0, -torch.inf, -torch.inf]], requires_grad=True
    )
    found = token_logprobs(logits, torch.tensor([2, 0]), entropy="differentiable")
    assert found.entropies is not None
    half = torch.tensor(0.5).log()
    torch.testing.assert_close(found.logprobs.detach(), torch.stack([torch.tensor(-2e4), half]))
    torch.testing.assert_close(found.entropies.detach(), torch.stack([torch.tensor(0.0), -half]))
    torch.autograd.backward(found.logprobs.sum() + found.entropies.sum())
    assert logits.grad is not None
    torch.testing.assert_close(
        logits.grad, torch.tensor([[-1.0, 0.0, 1.0, 0.0], [0.5, -0.5, 0.0, 0.0]]), rtol=0, atol=1e-6
    )


def test_nan_with_a_target_is_not_hidden() -> None:
    hidden = torch.full((1, 4), float("nan"), requires_grad=True)
    found = linear_logprobs(hidden, torch.eye(4), None, torch.tensor([1]), entropy="differentiable")
    assert found.logprobs.isnan().all()
    torch.autograd.backward(found.logprobs.sum())
    assert hidden.grad is not None
    assert hidden.grad.isnan().all()


def test_two_backwards() -> None:
    """Nothing of the forward is used up, unlike with the fused cross entropy."""
    inputs, labels = make_case(torch.float64)
    found = linear_logprobs(*inputs, labels)
    first = torch.autograd.grad(found.logprobs.sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(found.logprobs.sum(), inputs)
    assert all(map(torch.equal, first, second))


def test_what_is_refused() -> None:
    inputs, labels = make_case(torch.float32)
    with pytest.raises(UsageError, match=r"hidden of shape \[1, 37, 12\], labels of \[37\]"):
        linear_logprobs(*inputs, labels[0])
    with pytest.raises(UsageError, match=r"logits of shape \[1, 37, 12\], labels of \[37\]"):
        token_logprobs(inputs[0], labels[0])
    with pytest.raises(UsageError, match="temperature is 0"):
        linear_logprobs(*inputs, labels, temperature=0)
    with pytest.raises(UsageError, match="entropy is 'all'; choose one of none, detached, differentiable"):
        linear_logprobs(*inputs, labels, entropy="all")  # type: ignore[arg-type]


# ---- of models -----------------------------------------------------------------------------------------


def build(model_type: str, **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type,
        **{
            "vocab_size": 48,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **changes,
        },
    )
    return prepare_model(transformers.AutoModelForCausalLM.from_config(config).train())


@pytest.mark.parametrize(
    ("model_type", "changes", "fused"),
    [("qwen2", {"tie_word_embeddings": True}, True), ("qwen2", {}, False), ("gemma2", {"head_dim": 4}, True)],
)
def test_of_a_model(model_type: str, changes: dict[str, Any], fused: bool) -> None:
    """In its head, with Gemma 2's cap, or through all its logits."""
    model = build(model_type, **changes)
    assert fuses_loss(model)
    mark_fused(model, fused)
    tokens = [[5, 9, 13, 2, 40], [7], [8, 41, 3]]
    batch = pack_samples([{"input_ids": ids} for ids in tokens], pad_to_multiple_of=4)
    found = causal_lm_logprobs(model, batch, temperature=TEMPERATURE, entropy="differentiable")
    logits = model(**batch.model_inputs(), use_cache=False).logits
    right = plain(logits, batch.labels)
    for got, expected in zip(found, right, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(mixed(found, "differentiable"), parameters)
    expected_gradients = torch.autograd.grad(mixed(right, "differentiable"), parameters)
    for got, expected in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_bfloat16_model_and_autocast() -> None:
    """Log-probabilities are float32; under autocast the logits are made as the model makes them."""
    model = build("llama")
    batch = pack_samples([{"input_ids": [5, 9, 13, 2, 40]}])
    exact = causal_lm_logprobs(model, batch, entropy="detached")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = causal_lm_logprobs(model, batch, entropy="detached")
    low = causal_lm_logprobs(model.bfloat16(), batch, entropy="detached")
    for found in (cast, low):
        for got, expected in zip(found, exact, strict=True):
            assert got is not None
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, expected, rtol=0, atol=0.03)


def test_no_model_is_named() -> None:
    with pytest.raises(UsageError, match=r"reference=\.\.\. was given to odcengine.initialize"):
        causal_lm_logprobs(None, pack_samples([{"input_ids": [1, 2]}]))  # type: ignore[arg-type]
