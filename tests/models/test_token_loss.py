"""The summed token loss against torch's, its memory, and rows with nothing to learn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from odcengine.data import IGNORE_INDEX, MicroBatch, pack_samples
from odcengine.errors import UsageError
from odcengine.losses import causal_lm_loss_sum, token_cross_entropy_sum


def make_case(
    dtype: torch.dtype, num_tokens: int = 37, vocab: int = 101
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(1, num_tokens, vocab, generator=generator)).to(dtype)
    labels = torch.randint(vocab, (1, num_tokens), generator=generator)
    labels[0, ::3] = IGNORE_INDEX
    return logits.requires_grad_(), labels


def torch_reference(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits.detach().double().requires_grad_()
    loss = nn.functional.cross_entropy(wide[0], labels[0], ignore_index=IGNORE_INDEX, reduction="sum")
    (gradient,) = torch.autograd.grad(3.0 * loss, wide)
    return loss.detach(), gradient


@pytest.mark.parametrize("chunk_tokens", [None, 1, 8, 37, 1000])
@pytest.mark.parametrize(
    ("dtype", "loss_error", "gradient_error"),
    [(torch.float64, 1e-12, 1e-12), (torch.float32, 1e-6, 1e-6), (torch.bfloat16, 1e-6, 1.3e-2)],
)
def test_equals_torch(
    dtype: torch.dtype, loss_error: float, gradient_error: float, chunk_tokens: int | None
) -> None:
    """In bfloat16 the loss is that of the (rounded) logits in float32; only the gradient is rounded again."""
    logits, labels = make_case(dtype)
    loss = token_cross_entropy_sum(logits, labels, chunk_tokens=chunk_tokens)
    torch.autograd.backward(3.0 * loss)
    expected, gradient = torch_reference(logits, labels)
    assert loss.shape == ()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert abs(float(loss.detach()) - float(expected)) <= loss_error * float(expected)
    assert logits.grad is not None
    assert logits.grad.dtype == dtype
    assert (logits.grad.double() - gradient).abs().max() <= gradient_error * gradient.abs().max()
    assert (logits.grad[0, ::3] == 0).all()


def test_gradcheck() -> None:
    logits, labels = make_case(torch.float64, num_tokens=5, vocab=7)
    assert torch.autograd.gradcheck(lambda x: token_cross_entropy_sum(x, labels, chunk_tokens=2), (logits,))


def test_logits_are_not_changed() -> None:
    """Float32 logits are not copied before use, so an in-place step would show here."""
    logits, labels = make_case(torch.float32)
    before = logits.detach().clone()
    torch.autograd.backward(token_cross_entropy_sum(logits, labels))
    assert torch.equal(logits.detach(), before)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[[1e4, 0.0, -1e4]]], requires_grad=True)
    loss = token_cross_entropy_sum(logits, torch.tensor([[2]]))
    torch.autograd.backward(loss)
    assert float(loss.detach()) == 2e4
    assert logits.grad is not None
    assert logits.grad.tolist() == [[[1.0, 0.0, -1.0]]]


def test_no_second_copy_of_the_logits() -> None:
    """Largest storages that the operations make: a chunk, and once the gradient of the logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.seen: dict[int, int] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            for tensor in output if isinstance(output, (tuple, list)) else [output]:
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    self.seen[storage.data_ptr()] = storage.nbytes()
            return output

    logits = torch.randn(1, 1000, 64, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(64, (1, 1000))
    with Sizes() as sizes:
        torch.autograd.backward(token_cross_entropy_sum(logits, labels, chunk_tokens=10))
    large = [size for pointer, size in sizes.seen.items() if pointer != logits.data_ptr() and size > 10_000]
    assert large == [logits.numel() * 2]


def test_row_without_targets() -> None:
    """Zero with a graph, and zero gradients, even beside logits that are not finite."""
    logits = torch.full((1, 3, 4), float("nan"), requires_grad=True)
    loss = token_cross_entropy_sum(logits, torch.full((1, 3), IGNORE_INDEX))
    assert loss.requires_grad
    assert float(loss.detach()) == 0.0
    torch.autograd.backward(loss)
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_nan_with_a_target_is_not_hidden() -> None:
    logits = torch.full((1, 1, 4), float("nan"), requires_grad=True)
    loss = token_cross_entropy_sum(logits, torch.tensor([[1]]))
    torch.autograd.backward(loss)
    assert loss.isnan()
    assert logits.grad is not None
    assert logits.grad.isnan().all()


def test_labels_outside_the_vocabulary_and_shapes() -> None:
    logits = torch.zeros(1, 2, 4)
    for label in (4, -1):
        with pytest.raises(RuntimeError, match="out of bounds"):
            token_cross_entropy_sum(logits, torch.tensor([[0, label]]))
    with pytest.raises(UsageError, match=r"logits of shape \[1, 2, 4\], labels of \[1, 3\]"):
        token_cross_entropy_sum(logits, torch.zeros(1, 3, dtype=torch.int64))


# ---- the loss of a model ---------------------------------------------------------------------------------


class Bigram(nn.Module):
    """The smallest causal language model: the logits are a row of a table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, 16, dtype=torch.float64)
        self.called_with: set[str] = set()

    def forward(self, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        self.called_with = set(arguments)
        logits: torch.Tensor = self.table(input_ids)
        return logits


def pack(*masks: list[int]) -> MicroBatch:
    return pack_samples([{"input_ids": range(1, 1 + len(mask)), "loss_mask": mask} for mask in masks])


def test_model_loss_adds_up_over_any_split() -> None:
    model = Bigram()
    whole = causal_lm_loss_sum(model, pack([0, 1, 1], [1, 0, 1, 1], [1]))
    parts = [causal_lm_loss_sum(model, pack(mask)) for mask in ([0, 1, 1], [1, 0, 1, 1], [1])]
    torch.testing.assert_close(sum(parts), whole)
    assert {"position_ids", "cu_seq_lens_q", "use_cache"} <= model.called_with
    # The bigrams that are targets: 1-2 2-3 of the first sample, 2-3 3-4 of the second.
    log_softmax = model.table.weight.log_softmax(dim=-1)
    expected = -(log_softmax[1, 2] + 2 * log_softmax[2, 3] + log_softmax[3, 4])
    torch.testing.assert_close(whole, expected)


@pytest.mark.parametrize("batch", [pack([0, 0, 0]), pack([1]), pack_samples([])])
def test_masked_micro_batch_gives_zero_gradients(batch: MicroBatch) -> None:
    model = Bigram()
    loss = causal_lm_loss_sum(model, batch)
    assert float(loss.detach()) == 0.0
    torch.autograd.backward(loss)
    assert model.table.weight.grad is not None
    assert (model.table.weight.grad == 0).all()


def test_model_of_transformers() -> None:
    """The whole way: prepared model, packed row, the loss that transformers computes for each sample."""
    transformers = pytest.importorskip("transformers")
    from odcengine.models import prepare_model

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).double().eval()
    samples = [[5, 9, 13, 2], [7, 8], [4, 4, 4, 4, 4]]
    expected = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for tokens in samples:
            ids = torch.tensor([tokens])
            expected += model(ids, labels=ids, use_cache=False).loss * (len(tokens) - 1)
    batch = pack_samples([{"input_ids": tokens} for tokens in samples])
    loss = causal_lm_loss_sum(prepare_model(model), batch)
    # transformers converts logits to float32 for its loss.
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=0)
