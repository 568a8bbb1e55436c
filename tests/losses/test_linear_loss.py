"""Head and cross entropy in one step: equal to the two steps, and never more logits than a chunk's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from largest_tensor import LargestTensor
from torch import nn

from odcengine.data import IGNORE_INDEX
from odcengine.errors import UsageError
from odcengine.losses import linear_cross_entropy_sum, softmax, token_cross_entropy_sum


def make_case(
    dtype: torch.dtype, num_tokens: int = 37, vocab: int = 101, width: int = 12
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"hidden": (1, num_tokens, width), "weight": (vocab, width), "bias": (vocab,)}
    inputs = {
        name: torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }
    labels = torch.randint(vocab, (1, num_tokens), generator=generator)
    labels[0, ::3] = IGNORE_INDEX
    return inputs, labels


def fused(inputs: dict[str, torch.Tensor], labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return linear_cross_entropy_sum(inputs["hidden"], inputs["weight"], inputs["bias"], labels, **options)


def worst(found: torch.Tensor | None, right: torch.Tensor) -> float:
    assert found is not None
    return float((found.double() - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [None, 1, 7, 24, 1000])
@pytest.mark.parametrize(
    ("dtype", "loss_error", "gradient_error"),
    [(torch.float64, 1e-13, 1e-13), (torch.float32, 1e-6, 1e-6), (torch.bfloat16, 5e-4, 1.3e-2)],
)
def test_equals_torch(
    dtype: torch.dtype, loss_error: float, gradient_error: float, chunk_tokens: int | None, with_bias: bool
) -> None:
    """Against torch in float64; in bfloat16 the logits are rounded, as those of a linear layer are."""
    inputs, labels = make_case(dtype)
    bias = inputs["bias"] if with_bias else None
    loss = linear_cross_entropy_sum(
        inputs["hidden"], inputs["weight"], bias, labels, chunk_tokens=chunk_tokens
    )
    torch.autograd.backward(3.0 * loss)
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    logits = nn.functional.linear(wide["hidden"], wide["weight"], wide["bias"] if with_bias else None)
    right = nn.functional.cross_entropy(logits[0], labels[0], ignore_index=IGNORE_INDEX, reduction="sum")
    torch.autograd.backward(3.0 * right)
    assert loss.shape == ()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert abs(float(loss.detach()) - float(right.detach())) <= loss_error * float(right.detach())
    for name in ("hidden", "weight", *(["bias"] if with_bias else [])):
        expected = wide[name].grad
        assert expected is not None
        assert worst(inputs[name].grad, expected) <= gradient_error, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_of_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Logits are widened in pieces, the last of them shorter; the values do not tell."""
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    targets = torch.tensor([0, 49, 7, 7, 3, 2, 1])
    wide = logits.float().clone().requires_grad_()
    right = nn.functional.cross_entropy(wide, targets, reduction="sum")
    (expected,) = torch.autograd.grad(right, wide)
    monkeypatch.setattr(softmax, "_WIDE_ELEMENTS", {"cpu": 3 * 50})
    with LargestTensor(logits) as largest:
        loss = softmax.softmax_loss_(logits, targets, True)
    assert largest.num_elements <= 3 * 50
    torch.testing.assert_close(loss, right.detach(), rtol=1e-6, atol=0)
    assert worst(logits, expected.double()) <= (1e-6 if dtype == torch.float32 else 2**-8)


def test_bfloat16_weights_are_summed_wide() -> None:
    """Adding many chunks in bfloat16 would lose what is small against the sum."""
    torch.manual_seed(0)
    hidden = torch.rand(4096, 4).bfloat16().requires_grad_()
    weight = torch.zeros(8, 4, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(4096, dtype=torch.int64)
    torch.autograd.backward(linear_cross_entropy_sum(hidden, weight, None, labels, chunk_tokens=8))
    assert weight.grad is not None
    softmax = torch.full((8, 1), 0.125) - torch.eye(8)[:, :1]
    expected = softmax * hidden.detach().float().sum(dim=0)
    torch.testing.assert_close(weight.grad.float(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("frozen", [("hidden",), ("weight",), ("hidden", "bias")])
def test_frozen_inputs_get_no_gradient(frozen: tuple[str, ...]) -> None:
    inputs, labels = make_case(torch.float64)
    for name in frozen:
        inputs[name].requires_grad_(False)
    torch.autograd.backward(fused(inputs, labels, chunk_tokens=5))
    got = {name: tensor.grad for name, tensor in inputs.items()}
    for tensor in inputs.values():
        tensor.grad = None
    logits = nn.functional.linear(inputs["hidden"], inputs["weight"], inputs["bias"])
    torch.autograd.backward(token_cross_entropy_sum(logits, labels))
    for name, tensor in inputs.items():
        if name in frozen:
            assert got[name] is None
        else:
            torch.testing.assert_close(got[name], tensor.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("num_tokens", "vocab"), [(4096, 32000), (1600, 60000)])
def test_logits_never_exist_at_once(num_tokens: int, vocab: int) -> None:
    """All logits would be 524 MB in float32 in the first case."""
    hidden = torch.randn(1, num_tokens, 8, requires_grad=True)
    weight = torch.randn(vocab, 8, requires_grad=True)
    labels = torch.randint(vocab, (1, num_tokens))
    with LargestTensor() as largest:
        torch.autograd.backward(linear_cross_entropy_sum(hidden, weight, None, labels))
    assert largest.num_elements <= max(2**24, 512 * vocab)
    assert largest.num_elements < num_tokens * vocab / 3
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() > 0


def test_without_gradients_only_the_loss_is_computed() -> None:
    inputs, labels = make_case(torch.float64, vocab=1000)
    with torch.no_grad(), LargestTensor(*inputs.values()) as largest:
        loss = fused(inputs, labels, chunk_tokens=4)
    assert not loss.requires_grad
    assert largest.num_elements == 4 * 1000  # a chunk; the gradient of the weight would be 12 * 1000


def test_nothing_to_learn() -> None:
    """Zero with a graph, and zero gradients, even of hidden states that are not finite."""
    hidden = torch.full((1, 3, 4), float("nan"), requires_grad=True)
    weight, bias = torch.randn(5, 4, requires_grad=True), torch.randn(5, requires_grad=True)
    loss = linear_cross_entropy_sum(hidden, weight, bias, torch.full((1, 3), IGNORE_INDEX))
    assert loss.requires_grad
    assert float(loss.detach()) == 0.0
    torch.autograd.backward(loss)
    for tensor in (hidden, weight, bias):
        assert tensor.grad is not None
        assert tensor.grad.shape == tensor.shape
        assert (tensor.grad == 0).all()


def test_large_logits_do_not_overflow() -> None:
    hidden = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    loss = linear_cross_entropy_sum(hidden, torch.eye(3), None, torch.tensor([2]))
    torch.autograd.backward(loss)
    assert float(loss.detach()) == 2e4
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [[1.0, 0.0, -1.0]]


def test_nan_with_a_target_is_not_hidden() -> None:
    hidden = torch.full((1, 4), float("nan"), requires_grad=True)
    loss = linear_cross_entropy_sum(hidden, torch.eye(4), None, torch.tensor([1]))
    torch.autograd.backward(loss)
    assert loss.isnan()
    assert hidden.grad is not None
    assert hidden.grad.isnan().all()


def test_backward_twice_and_wrong_shapes_are_refused() -> None:
    inputs, labels = make_case(torch.float32)
    loss = fused(inputs, labels)
    torch.autograd.backward(loss, retain_graph=True)
    with pytest.raises(UsageError, match="a second backward"):
        torch.autograd.backward(loss)
    with pytest.raises(UsageError, match=r"hidden of shape \[1, 37, 12\], labels of \[37\]"):
        fused(inputs, labels[0])
    with pytest.raises(RuntimeError, match="out of bounds"):
        fused(inputs, labels.clamp(min=0) + 100)
