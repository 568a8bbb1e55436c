"""Samples survive the way to another rank, and what cannot travel is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from odcengine.errors import UsageError
from odcengine.rollouts.samples import (
    Schema,
    merge,
    nbytes,
    nested,
    numels,
    packable,
    read,
    schema_of,
    to_tensors,
    write,
)

SAMPLES = [
    {
        "input_ids": [1, 2, 3],
        "loss_mask": np.array([False, True, True]),
        "old": torch.tensor([0.0, -1.0, -2.0], dtype=torch.bfloat16),
        "hidden": torch.arange(6.0).view(3, 2),
        "reward": 1,
        "text": "Gr\u00fc\u00dfe",
        "none": [],
    },
    {
        "input_ids": torch.tensor([7], dtype=torch.int32),
        "loss_mask": [True],
        "old": torch.tensor([0.5], requires_grad=True),
        "hidden": torch.zeros(1, 2, dtype=torch.float64)[:, [1, 0]],
        "reward": 0.25,
        "text": "",
        "none": [1.5],
    },
]


def travel(samples: list[dict[str, Any]]) -> tuple[Schema, list[dict[str, Any]]]:
    tensors = [to_tensors(sample, f"sample {number}") for number, sample in enumerate(samples)]
    schema = schema_of(tensors, "here")
    assert schema is not None
    sizes = [nbytes(schema, numels(sample, schema)) for sample in tensors]
    data = torch.full((sum(sizes),), 255, dtype=torch.uint8)
    start = 0
    for sample, size in zip(tensors, sizes, strict=True):
        assert write(sample, schema, data[start:]) == size
        start += size
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    return schema, [nested(read(data[start:], schema, copy=True)) for start in starts]


def test_every_kind_of_field_arrives() -> None:
    schema, (first, second) = travel(SAMPLES)
    kinds = {field.name: field.dtype for field in schema}
    # A field has the wider type of all samples.
    assert kinds == {
        "hidden": "float64",
        "input_ids": "int64",
        "loss_mask": "bool",
        "none": "float32",
        "old": "float32",
        "reward": "float32",
        "text": "text",
    }
    assert first["input_ids"].tolist() == [1, 2, 3]
    assert second["input_ids"].tolist() == [7]
    assert first["loss_mask"].tolist() == [False, True, True]
    assert first["old"].tolist() == [0, -1, -2]
    assert second["old"].tolist() == [0.5]
    assert not second["old"].requires_grad
    assert first["hidden"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert second["hidden"].shape == (1, 2)
    assert (first["reward"].shape, float(first["reward"]), float(second["reward"])) == ((), 1, 0.25)
    assert (first["text"], second["text"]) == ("Gr\u00fc\u00dfe", "")
    assert (first["none"].tolist(), second["none"].tolist()) == ([], [1.5])


def test_samples_of_several_sequences_arrive() -> None:
    pair = {
        "sequences": [{"input_ids": [1, 2], "logprob": -1.0}, {"input_ids": [1, 2, 3], "logprob": -2.0}],
        "margin": 0.5,
    }
    schema, (found,) = travel([pair])
    assert [sequence["input_ids"].tolist() for sequence in found["sequences"]] == [[1, 2], [1, 2, 3]]
    assert [float(sequence["logprob"]) for sequence in found["sequences"]] == [-1, -2]
    assert float(found["margin"]) == 0.5
    counts = [numels(to_tensors(pair, "pair"), schema)]
    assert packable(schema, counts) == ("logprob",)  # the margin belongs to neither


def test_what_a_packed_row_takes_along() -> None:
    """Numbers, and what has one value for each token in all samples."""
    tensors = [to_tensors(sample, "sample") for sample in SAMPLES]
    schema = schema_of(tensors, "here")
    assert schema is not None
    assert packable(schema, [numels(sample, schema) for sample in tensors]) == ("old", "reward")


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ([1, 2], "rank 1: sample 0 is a list; expected a mapping"),
        ({"when": object()}, "rank 1: sample 0: field 'when' is a object; expected a tensor"),
        ({"ragged": [[1], [2, 3]]}, "field 'ragged': its list does not become a tensor"),
        ({"array": np.array(["a"])}, "field 'array': its ndarray does not become a tensor"),
        ({"a/b": 1}, "field 'a/b': names are texts without '/'"),
        ({"sparse": torch.eye(2).to_sparse()}, "field 'sparse' is a tensor of layout torch.sparse_coo"),
    ],
)
def test_what_cannot_travel_is_named(sample: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        to_tensors(sample, "rank 1: sample 0")
    assert message in str(caught.value)


def test_samples_of_different_fields_are_refused() -> None:
    first, second, third, fourth = (
        schema_of([to_tensors(sample, "x")], "x")
        for sample in ({"a": 1}, {"a": 1, "b": 2}, {"a": [1]}, {"a": "one"})
    )
    assert first is not None
    assert second is not None
    assert third is not None
    assert fourth is not None
    with pytest.raises(UsageError, match="rank 0 and rank 3 have different fields: b only in one of them"):
        merge(first, second, "rank 0", "rank 3")
    for other in (third, fourth):
        with pytest.raises(UsageError, match=r"rank 0 has a: int64 \(0-D\), rank 3 a: .* needs one kind"):
            merge(first, other, "rank 0", "rank 3")
    with pytest.raises(UsageError, match="rank 2: sample 0 and sample 1 have different fields"):
        schema_of([to_tensors({"a": 1}, "x"), to_tensors({"b": 1}, "x")], "rank 2")
