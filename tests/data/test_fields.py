"""What samples say beside their tokens, and samples of several sequences, in packed rows and the loader."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from odcengine.data import MinibatchLoader, TokenDataset, pack_samples
from odcengine.data.finite import check_fields_are_finite, check_sample_is_finite
from odcengine.data.pack import truncate_sample
from odcengine.errors import UsageError

NAN = float("nan")
SAMPLES: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "advantages": 0.5, "old": [NAN, NAN, -0.25, -0.5]},
    {"input_ids": [9], "advantages": -2.0, "old": torch.tensor([NAN])},
    {"input_ids": [3, 4], "advantages": np.float32(1.0), "old": np.array([NAN, -4.0]), "text": "unused"},
]
PAIR = {"sequences": [SAMPLES[0], SAMPLES[2]]}


def test_fields_are_shifted_like_labels() -> None:
    batch = pack_samples(SAMPLES, fields=("advantages", "old"), pad_to_multiple_of=8)
    assert batch.labels.tolist() == [[-100, 7, 8, -100, -100, 4, -100, -100]]
    assert batch.fields["old"].tolist() == [[0, -0.25, -0.5, 0, 0, -4, 0, 0]]
    assert batch.fields["advantages"].tolist() == [0.5, -2.0, 1.0]
    assert set(batch.fields) == {"advantages", "old"}
    assert batch.targets_per_sequence == (2, 0, 1)
    assert batch.num_sequences == batch.num_samples == 3
    assert batch.to("meta").fields["old"].device.type == "meta"
    assert batch.spread(batch.fields["advantages"]).tolist() == [[0.5] * 4 + [-2.0] + [1.0] * 2 + [0.0]]
    assert batch.sum_per_sequence(batch.fields["old"]).tolist() == [-0.75, 0, -4]
    pieces = batch.unpack(batch.fields["old"])
    assert [piece.tolist() for piece in pieces] == [[0, 0, -0.25, -0.5], [0], [0, -4]]
    again = [{**sample, "old": piece} for sample, piece in zip(SAMPLES, pieces, strict=True)]
    assert torch.equal(
        pack_samples(again, fields=["old"], pad_to_multiple_of=8).fields["old"], batch.fields["old"]
    )


def test_types_and_further_dimensions() -> None:
    samples = [
        {"input_ids": [1, 2], "top": np.arange(4).reshape(2, 2), "kind": 3, "wide": np.float64(0.1)},
        {"input_ids": [1, 2, 3], "top": np.arange(6).reshape(3, 2), "kind": np.uint32(4), "wide": 0.2},
    ]
    batch = pack_samples(samples, fields=("top", "kind", "wide"))
    assert batch.fields["top"].tolist() == [[[2, 3], [0, 0], [2, 3], [4, 5], [0, 0]]]
    assert [piece.shape for piece in batch.unpack(batch.fields["top"])] == [(2, 2), (3, 2)]
    assert batch.fields["kind"].dtype == torch.int64
    assert batch.fields["wide"].dtype == torch.float64


def test_no_samples() -> None:
    """The stand-in for an empty micro-batch has no fields, and nothing to sum."""
    batch = pack_samples([], fields=("old",))
    assert batch.is_dummy
    assert (batch.num_sequences, batch.targets_per_sequence, batch.sequences_per_sample) == (0, (), ())
    assert batch.spread(torch.zeros(0)).tolist() == [[0.0]]
    assert batch.sum_per_sequence(torch.ones(1, 1)).shape == (0,)
    assert batch.unpack(torch.ones(1, 1)) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"old": [0.0, 1.0]}, r"sample 1: old has shape \[2\], but there are 1 input_ids"),
        ({"old": None}, "sample 1 has no old; it has input_ids, advantages"),
        ({"old": 1.0}, r"sample 1: old has shape \[\], but \[4\] in sample 0"),
        ({"old": ["x"]}, "sample 1: old must be a number, or one for each token"),
        ({"advantages": NAN}, r"sample 1: advantages is not finite \(nan\)"),
        ({"input_ids": [1, 2], "old": [0.0, -np.inf]}, r"sample 1: old is not finite \(-inf\)"),
    ],
)
def test_fields_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    samples = [SAMPLES[0], {**SAMPLES[1], **changes}]
    with pytest.raises(UsageError, match=message):
        pack_samples(samples, fields=("old", "advantages"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"advantages": NAN},
            "sample 1: advantages is not finite \\(nan\\) \\(in a micro-batch of rank 1\\)",
        ),
        ({"weights": torch.tensor([1.0, np.inf, 1.0]).bfloat16()}, "sample 1: weights is not finite \\(inf"),
        ({"old_logprobs": [0.0, -1.0, -np.inf]}, "sample 1: old_logprobs is not finite \\(-inf"),
        ({"sequences": [{}, {"rewards": np.array([1, NAN])}]}, "sample 1, sequence 1: rewards is not finite"),
    ],
)
def test_numbers_that_are_not_finite_before_a_collation_of_ones_own(
    changes: dict[str, Any], message: str
) -> None:
    samples = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6], **changes}]
    loader = MinibatchLoader(
        samples,
        train_batch_size=2,
        rank=1,
        world_size=2,
        strategy="local_sort",
        max_tokens=3,
        shuffle=False,
        length_fn=lambda sample: 3,
        collate_fn=list,
    )
    with pytest.raises(UsageError, match=message):
        list(next(iter(loader)))


def test_what_no_loss_reads_may_be_anything_before_a_collation_of_ones_own() -> None:
    tokens = [3, 4, 5, 6]
    for sample in (
        "text",
        {"rewards": "good", "weights": None, "old_logprobs": [[1.0], []], "sequences": "ACGT"},
        {"input_ids": tokens, "old_logprobs": [NAN, -1.0, -1.0, -1.0]},
        {"input_ids": tokens, "old_logprobs": torch.tensor([NAN, NAN, -1, -1]), "loss_mask": [0, 0, 1, 1]},
        {"input_ids": tokens, "weights": np.array([[NAN], [1], [NAN], [1]]), "labels": [1, 4, -100, 6]},
        {"input_ids": tokens, "noise": NAN, "advantages": torch.zeros(1, device="meta")},
    ):
        check_sample_is_finite(sample, "sample 0")


def test_fields_that_a_script_has_changed() -> None:
    packed = pack_samples(
        [*SAMPLES, PAIR], sample_ids=[6, 7, 8, 9], fields=("advantages",), pad_to_multiple_of=16
    )
    per_token = torch.zeros(packed.labels.shape)
    check_fields_are_finite(packed)
    check_fields_are_finite(dataclasses.replace(packed, fields={"bias": torch.full((3, 3), NAN)}))
    check_fields_are_finite(
        dataclasses.replace(packed, fields={"noise": per_token.masked_fill(packed.labels < 0, NAN)})
    )
    check_fields_are_finite(packed.to("meta"))
    for field, number in (
        (torch.tensor([0, 0, 0, 0, np.inf]), "sample 9: advantages is not finite .inf"),
        (per_token.masked_fill(packed.labels == 4, NAN), "sample 8: advantages is not finite .nan"),
        (per_token[..., None].masked_fill(packed.labels[..., None] == 4, NAN), "sample 8: advantages is"),
    ):
        with pytest.raises(UsageError, match=number):
            check_fields_are_finite(dataclasses.replace(packed, fields={"advantages": field}))


def test_wrong_shapes_of_values() -> None:
    batch = pack_samples(SAMPLES)
    with pytest.raises(UsageError, match=r"spread: values of shape \[2\], must be \[3\]"):
        batch.spread(torch.zeros(2))
    with pytest.raises(UsageError, match=r"sum_per_sequence: values of shape \[7\], must be \[1, 7\]"):
        batch.sum_per_sequence(torch.zeros(7))
    with pytest.raises(UsageError, match=r"unpack: values of shape \[7\], must begin with \[1, 7\]"):
        batch.unpack(torch.zeros(7))


def test_several_sequences_of_a_sample() -> None:
    batch = pack_samples([SAMPLES[1], PAIR], fields=["advantages"])
    assert batch.cu_seqlens.tolist() == [0, 1, 5, 7]
    assert batch.position_ids.tolist() == [[0, 0, 1, 2, 3, 0, 1]]
    assert (batch.num_samples, batch.num_sequences, batch.sequences_per_sample) == (2, 3, (1, 2))
    assert batch.fields["advantages"].tolist() == [-2.0, 0.5, 1.0]
    with pytest.raises(UsageError, match="sample 0: sequences is"):
        pack_samples([{"sequences": []}])
    with pytest.raises(UsageError, match="sample 0, sequence 1 is a int without input_ids"):
        pack_samples([{"sequences": [SAMPLES[0], 3]}])


def test_loader_keeps_sequences_together() -> None:
    data = [PAIR, {"sequences": [SAMPLES[1], SAMPLES[2]]}, PAIR]
    loader = MinibatchLoader(
        data,
        train_batch_size=3,
        rank=0,
        world_size=1,
        strategy="lb_mini",
        max_tokens=9,
        fields=("old",),
    )
    assert loader.lengths.tolist() == [6, 3, 6]
    assert loader.num_targets is not None
    assert loader.num_targets.tolist() == [3, 1, 3]
    assert loader.longest == 4  # positions are those of a sequence
    batches = list(loader.minibatch(0))
    assert sorted(batch.num_samples for batch in batches) == [1, 2]
    assert all(batch.num_sequences == 2 * batch.num_samples for batch in batches)
    assert all("old" in batch.fields for batch in batches)
    loader.close()


def test_truncation() -> None:
    cut = truncate_sample(SAMPLES[0], 3, ("old", "advantages"))
    assert pack_samples([cut], fields=("old", "advantages")).fields["old"].tolist() == [[0, -0.25, 0]]
    with pytest.raises(UsageError, match="a sample of several sequences is not truncated"):
        MinibatchLoader(
            [PAIR],
            train_batch_size=1,
            rank=0,
            world_size=1,
            strategy="lb_mini",
            max_tokens=5,
            too_long="truncate",
        )


def test_padding_is_refused(tmp_path: Path) -> None:
    """Of a tokenizer's padding=True; without labels it would be learned."""
    sample = {"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0]}
    wanted = "its attention_mask has 2 zeros of 5, so it is padded"
    with pytest.raises(UsageError, match=f"sample 0: {wanted}"):
        pack_samples([sample])
    with pytest.raises(UsageError, match=wanted):
        TokenDataset.write(tmp_path / "padded", [sample])
    whole = {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}
    assert pack_samples([whole]).num_targets == 2
    TokenDataset.write(tmp_path / "whole", [whole])


@pytest.mark.parametrize("name", ["completion_mask", "response_mask", "assistant_masks", "action_mask"])
def test_masks_by_the_names_of_other_libraries(name: str) -> None:
    """Taken for a field of no meaning here, they would let prompts be learned."""
    sample = {"input_ids": [1, 2, 3], name: [0, 0, 1]}
    with pytest.raises(UsageError, match=f"sample 0 has {name}, but neither loss_mask nor labels"):
        pack_samples([sample])
    both = pack_samples([{**sample, "loss_mask": [0, 0, 1]}], fields=[name])
    assert both.num_targets == 1
    assert both.fields[name].tolist() == [[0, 1, 0]]
