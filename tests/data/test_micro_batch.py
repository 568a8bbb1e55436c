"""Packing: positions, boundaries and targets of packed rows (USER_CASES 10)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from odcengine.data import IGNORE_INDEX, MicroBatch, pack_samples
from odcengine.errors import UsageError
from odcengine.losses import causal_lm_loss_sum
from odcengine.models import prepare_model


def make_samples(lengths: list[int]) -> list[dict[str, Any]]:
    """Samples with distinct tokens, everything to be learned."""
    first = np.cumsum([10, *lengths])
    return [
        {"input_ids": np.arange(start, start + length)} for start, length in zip(first, lengths, strict=False)
    ]


@pytest.mark.parametrize(
    ("multiple", "num_padding"),
    [(1, 0), (2, 0), (8, 2)],
)
def test_three_samples(multiple: int, num_padding: int) -> None:
    """Lengths 3, 1, 2: without padding, at a multiple of 2 already, and with two tokens of padding."""
    batch = pack_samples(make_samples([3, 1, 2]), pad_to_multiple_of=multiple)
    padding = list(range(num_padding))
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 14, 15] + [0] * num_padding]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, *padding]]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert batch.cu_segments.tolist() == [0, 3, 4, 6] + ([8] if num_padding else [])
    # The last token of a sample never has the next sample's first token as its target.
    skip = IGNORE_INDEX
    assert batch.labels.tolist() == [[11, 12, skip, skip, 15, skip] + [skip] * num_padding]
    assert (batch.num_tokens, batch.num_targets, batch.num_samples, batch.max_seqlen) == (6, 3, 3, 3)
    assert batch.cu_seqlens.dtype == batch.cu_segments.dtype == torch.int32
    assert {batch.input_ids.dtype, batch.labels.dtype, batch.position_ids.dtype} == {torch.int64}


def test_one_token_samples() -> None:
    """Boundaries cannot be guessed from positions here."""
    batch = pack_samples(make_samples([1, 1, 1]))
    assert batch.cu_seqlens.tolist() == [0, 1, 2, 3]
    assert batch.position_ids.tolist() == [[0, 0, 0]]
    assert batch.num_targets == 0


def test_masks_and_labels_mean_the_same() -> None:
    tokens = [5, 6, 7, 8]
    masked = pack_samples([{"input_ids": tokens, "loss_mask": [1, 0, 1, 1]}])
    labelled = pack_samples([{"input_ids": torch.tensor(tokens), "labels": torch.tensor([5, -100, 7, 8])}])
    assert masked.labels.tolist() == labelled.labels.tolist() == [[-100, 7, 8, -100]]
    # The first token is to be learned, but nothing precedes it.
    assert masked.num_targets == 2


def test_labels_may_differ_from_tokens() -> None:
    batch = pack_samples([{"input_ids": [5, 6, 7], "labels": [-100, 60, 70]}])
    assert batch.labels.tolist() == [[60, 70, -100]]


def test_dummy_has_nothing_to_learn() -> None:
    dummy = pack_samples([])
    assert dummy.is_dummy
    assert (dummy.num_tokens, dummy.num_targets, dummy.num_samples, dummy.sample_ids) == (0, 0, 0, ())
    assert dummy.input_ids.shape == (1, 1)
    assert dummy.cu_segments.tolist() == [0, 1]
    assert pack_samples([], pad_to_multiple_of=8).input_ids.shape == (1, 8)


def test_model_inputs_carry_the_boundaries_and_no_labels() -> None:
    batch = pack_samples(make_samples([3, 1]), pad_to_multiple_of=8)
    inputs = batch.model_inputs()
    assert set(inputs) == {
        "input_ids",
        "position_ids",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "odc_segments",
    }
    assert inputs["cu_seq_lens_q"].tolist() == [0, 3, 4, 8]
    # The padding is the longest segment: kernels size their work by it.
    assert inputs["max_length_q"] == 4


@pytest.mark.parametrize("boundaries", [[0, 3, 5], [0, 3, 3, 4], [1, 4], [4], []])
def test_boundaries_that_do_not_fit_are_refused(boundaries: list[int]) -> None:
    """Once a micro-batch and on the host: kernels trust them, and would read beyond the row."""
    batch = pack_samples(make_samples([3, 1]))
    with pytest.raises(UsageError, match="must grow from 0 to 4"):
        dataclasses.replace(batch, cu_segments=torch.tensor(boundaries, dtype=torch.int32))
    with pytest.raises(UsageError, match="longest segment has 3 tokens, but max_seqlen is 2"):
        dataclasses.replace(batch, max_seqlen=2)


def test_to_moves_every_tensor() -> None:
    batch = pack_samples(make_samples([2, 3]), sample_ids=[7, 9])
    moved = batch.to("meta", non_blocking=True)
    for name in ("input_ids", "labels", "position_ids", "cu_seqlens", "cu_segments"):
        assert getattr(moved, name).device.type == "meta"
        assert getattr(batch, name).device.type == "cpu"
    assert moved.sample_ids == (7, 9)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"input_ids": []}, r"sample 4: input_ids has shape \[0\]"),
        ({"input_ids": [[1, 2]]}, r"shape \[1, 2\]"),
        ({"input_ids": [1.0]}, "float64"),
        ({"input_ids": [1, 2], "labels": [1]}, r"labels has shape \[1\], but input_ids has \[2\]"),
        ({"input_ids": [1, 2], "labels": [1.5, 2.0]}, "sample 4: labels have type float64"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1, 1]}, r"loss_mask has shape \[3\]"),
        ({"text": "a"}, "sample 4 is a dict without input_ids"),
        ([1, 2], "sample 4 is a list without input_ids"),
    ],
)
def test_bad_samples_are_named(sample: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pack_samples([sample], sample_ids=[4])


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="pad_to_multiple_of is 0"):
        pack_samples([], pad_to_multiple_of=0)
    with pytest.raises(UsageError, match="1 samples, but 2 sample_ids"):
        pack_samples(make_samples([1]), sample_ids=[1, 2])


# ---- user case 10 through a model ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny Llama in fp32 whose attention honours boundaries."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return prepare_model(transformers.LlamaForCausalLM(config).eval())


def logits(model: Any, batch: MicroBatch) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**batch.model_inputs(), use_cache=False).logits[0]
    return found


@pytest.mark.parametrize("lengths", [[3, 1, 2], [1, 1, 1]])
@pytest.mark.parametrize("multiple", [1, 8])
def test_case_10_samples_do_not_see_each_other(model: Any, lengths: list[int], multiple: int) -> None:
    """Changing the first sample changes no logit of the others by more than 1e-5."""
    samples = make_samples(lengths)
    before = logits(model, pack_samples(samples, pad_to_multiple_of=multiple))
    samples[0] = {"input_ids": samples[0]["input_ids"][::-1] + 5}
    after = logits(model, pack_samples(samples, pad_to_multiple_of=multiple))
    first = lengths[0]
    assert (after[first:] - before[first:]).abs().max() <= 1e-5
    assert (after[:first] - before[:first]).abs().max() > 1e-3


@pytest.mark.parametrize("lengths", [[3, 1, 2], [1, 1, 1]])
def test_case_10_padding_never_counts(model: Any, lengths: list[int]) -> None:
    """Loss, gradient and counts are those of the row without padding, whatever the padding's tokens."""
    results = []
    for multiple, token in ((1, 0), (8, 0), (8, 7), (64, 31)):
        batch = pack_samples(make_samples(lengths), pad_to_multiple_of=multiple, pad_token_id=token)
        model.zero_grad()
        loss = causal_lm_loss_sum(model, batch)
        torch.autograd.backward(loss)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        results.append((loss.item(), gradient, batch.num_tokens, batch.num_targets, batch.num_samples))
    value, gradient, *counts = results[0]
    assert counts == [sum(lengths), sum(lengths) - 3, 3]
    assert (value > 0) == (gradient.abs().max().item() > 0) == (counts[1] > 0)
    for other_loss, other_gradient, *other_counts in results[1:]:
        assert other_counts == counts
        assert other_loss == pytest.approx(value, rel=1e-6, abs=1e-9)
        torch.testing.assert_close(other_gradient, gradient, atol=1e-6, rtol=1e-5)
