"""Samples of several sequences: on disk, in memory, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odcengine.balance import CostModel
from odcengine.balance.plan import make_plan
from odcengine.data import MinibatchLoader, TokenDataset
from odcengine.data.dataset import DatasetWriter
from odcengine.data.token_batch import TokenBatch
from odcengine.errors import ConfigError, UsageError
from odcengine.metrics import Tally


def _sequence(length: int, reference: float | None) -> dict[str, Any]:
    sample = {"input_ids": list(range(1, length + 1)), "loss_mask": [int(at > 0) for at in range(length)]}
    return sample if reference is None else {**sample, "ref_logprobs": reference}


def _pairs(count: int, *, known: bool = True) -> list[dict[str, Any]]:
    return [
        {
            "sequences": [
                _sequence(2 + number % 5, -float(number) if known else None),
                _sequence(1 + number % 3, -number / 2 if known else None),
            ]
        }
        for number in range(count)
    ]


@pytest.mark.parametrize("known", [True, False])
def test_pairs_come_back(tmp_path: Path, known: bool) -> None:
    pairs = _pairs(700, known=known)  # more than are written at once
    for dataset in (TokenDataset.from_samples(pairs), TokenDataset.write(tmp_path / "pairs", pairs)):
        assert len(dataset) == len(pairs)
        for number in (0, 1, 255, 256, 699, -1):
            for got, sequence in zip(dataset[number]["sequences"], pairs[number]["sequences"], strict=True):
                assert got["input_ids"].tolist() == sequence["input_ids"]
                assert got["loss_mask"].tolist() == [bool(value) for value in sequence["loss_mask"]]
                assert got.get("ref_logprobs") == sequence.get("ref_logprobs")
        lengths = [[len(sequence["input_ids"]) for sequence in pair["sequences"]] for pair in pairs]
        assert dataset.lengths.tolist() == [sum(of_pair) for of_pair in lengths]
        assert dataset.num_targets.tolist() == [sum(of_pair) - 2 for of_pair in lengths]
        assert dataset.sequences is not None
        assert dataset.sequences[0].tolist() == [length for of_pair in lengths for length in of_pair]
        assert dataset.sequences[1].tolist() == list(range(0, 1401, 2))
    with pytest.raises(
        ConfigError, match="sample 3 has the token id 5, but the model's vocabulary ends at 4"
    ):
        dataset.check_vocabulary(5)


def test_kinds_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sample 1 has no sequences, unlike those before"):
        TokenDataset.from_samples([*_pairs(1), _sequence(3, None)])
    with pytest.raises(UsageError, match="ref_logprobs are known of some sequences only"):
        TokenDataset.from_samples([*_pairs(1), *_pairs(1, known=False)])
    with pytest.raises(UsageError, match=r"sample 0: sequence 1: ref_logprobs is \[0\.5\], but must be one"):
        TokenDataset.from_samples(
            [{"sequences": [_sequence(2, 1.0), {**_sequence(2, 1.0), "ref_logprobs": [0.5]}]}]
        )
    with pytest.raises(UsageError, match="sample 0: sequences is 3, but must be a list"):
        TokenDataset.from_samples([{"sequences": 3}])
    batches = [
        TokenDataset.from_samples(samples)._batches[0] for samples in (_pairs(1), [_sequence(3, None)])
    ]
    with DatasetWriter(tmp_path / "mixed") as writer:
        writer.add(batches[0])
        told = "with tokens only follow samples with sequence_lengths, ref_logprobs"
        with pytest.raises(UsageError, match=told):
            writer.add(batches[1])
    with pytest.raises(UsageError, match="reaches from one sample into another"):
        TokenBatch(np.ones(4, np.uint32), np.ones(4, np.uint8), np.array([0, 2, 4]), np.array([0, 3, 4]))


def _loader(samples: Any, **options: Any) -> MinibatchLoader:
    options = {"train_batch_size": len(samples), "rank": 0, "world_size": 2, "strategy": "lb_mini", **options}
    return MinibatchLoader(samples, max_tokens=options.pop("max_tokens", 1000), **options)


def test_what_pairs_cost() -> None:
    """Attention stops between the answers: two of 100 tokens cost less than one sequence of 200."""
    lengths = [(100, 100), (190, 10)]
    pairs = [{"sequences": [_sequence(length, None) for length in of_pair]} for of_pair in lengths]
    cost = CostModel(linear=1.0, quadratic=1.0)
    right = [sum(length + length**2 for length in of_pair) for of_pair in lengths]
    for samples in (pairs, TokenDataset.from_samples(pairs)):
        loader = _loader(samples, shuffle=False, cost=cost)
        assert loader.lengths.tolist() == [200, 200]
        assert loader.longest == 190
        plan = loader.minibatch(0).plan
        assert sorted(plan.loads) == right
        tally = Tally(
            loader.lengths,
            sequences=loader.sequences,
            has_loader=True,
            flops_of=lambda found: float((found**2).sum()),
        )
        tally.loaded(0.0, (1, 0))
        tally.backward()
        squares = sum(length**2 for of_pair in lengths for length in of_pair)
        assert (tally.samples, tally.tokens, tally.squares, tally.flops) == (2, 400, squares, squares)
    plain = make_plan([200, 200], num_ranks=2, strategy="lb_mini", max_tokens=None, cost=cost)
    assert plain.loads == (200 + 200**2,) * 2


def test_pairs_stay_together_and_are_not_cut() -> None:
    pairs = _pairs(40)
    dataset = TokenDataset.from_samples(pairs)
    loader = _loader(dataset, max_tokens=20, train_batch_size=10, world_size=1, fields=["ref_logprobs"])
    seen = []
    for minibatch in loader:
        for batch in minibatch:
            assert set(batch.sequences_per_sample) == {2}
            assert batch.num_tokens <= 20
            seen += batch.sample_ids
            known = [s["ref_logprobs"] for index in batch.sample_ids for s in pairs[index]["sequences"]]
            assert batch.fields["ref_logprobs"].tolist() == known
    assert sorted(seen) == list(range(40))
    with pytest.raises(UsageError, match="a sample of several sequences is not truncated"):
        _loader(dataset, max_tokens=5, too_long="truncate")
    skipping = _loader(dataset, max_tokens=5, too_long="skip", train_batch_size=1)
    assert len(skipping) == int((dataset.lengths <= 5).sum())
