"""Capped scores and sinks: against the formula in one matrix, and against transformers' own models."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from odcengine.data.batch import Segments
from odcengine.models import load_model, prepare_model
from odcengine.models.scored_attention import scored_attention

pytest.importorskip("transformers")

from models.families import FAMILIES

BOUNDARIES = (0, 5, 5, 6, 13)


def naive(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softcap: Any, sinks: Any, window: int | None
) -> torch.Tensor:
    """The whole row's scores, with all that is not seen left out."""
    heads, length = query.shape[1], query.shape[2]
    keys, values = (rows.repeat_interleave(heads // rows.shape[1], dim=1) for rows in (key, value))
    scores = query @ keys.transpose(2, 3) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    sample = torch.zeros(length, dtype=torch.int64)
    for start, stop in itertools.pairwise(BOUNDARIES):
        sample[start:stop] = start
    seen = (distance >= 0) & (sample[:, None] == sample)
    if window is not None:
        seen &= distance < window
    weights = torch.where(seen, scores, -torch.inf).exp()
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return (weights / total @ values).transpose(1, 2)


@pytest.mark.parametrize("block_elements", [None, 24])  # 24: some blocks have a query, some two
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.8, False), (None, True), (0.8, True)])
def test_values_and_gradients(
    softcap: float | None, with_sinks: bool, window: int | None, block_elements: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 13, 8), (1, 2, 13, 8), (1, 2, 13, 6)]
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes
    ]
    sinks = (
        torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True) if with_sinks else None
    )
    right = naive(*inputs, softcap, sinks, window)
    found = scored_attention(
        *inputs,
        segments=Segments(BOUNDARIES),
        scaling=0.3,
        sliding_window=window,
        softcap=softcap,
        s_aux=sinks,
        block_elements=block_elements,
    )
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    wanted = [*inputs, *([sinks] if sinks is not None else [])]
    weights = torch.randn(right.shape, generator=generator, dtype=torch.float64)
    expected = torch.autograd.grad(right, wanted, weights)
    for gradient, other in zip(torch.autograd.grad(found, wanted, weights), expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["Gemma 2", "gpt-oss"])
def test_generation_and_padded_batches(name: str) -> None:
    """A prepared model still generates what transformers' own attention does: caches, masks, windows."""
    model: Any = load_model(FAMILIES[name].config).eval()
    inputs = {
        "input_ids": torch.tensor([[0, 0, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]),
    }
    whole = {"input_ids": inputs["input_ids"][1:]}
    arguments: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    model.set_attn_implementation("eager")
    with torch.no_grad():
        tokens = [model.generate(**given, **arguments) for given in (inputs, whole)]
        logits = model(**inputs, use_cache=False).logits
        prepare_model(model)
        again = [model.generate(**given, **arguments) for given in (inputs, whole)]
        after = model(**inputs, use_cache=False).logits
    for before, found in zip(tokens, again, strict=True):
        assert found.tolist() == before.tolist()
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(after[seen], logits[seen], rtol=0, atol=1e-5)
