"""Token data sets in memory and on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odcengine.data import TokenDataset
from odcengine.errors import ConfigError, UsageError

SAMPLES: list[dict[str, Any]] = [
    {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
    {"input_ids": [70000], "loss_mask": [1]},
    {"input_ids": [4, 5, 6, 7], "labels": [-100, -100, 6, 7]},
    {"input_ids": [8, 9]},
]


def check(dataset: TokenDataset) -> None:
    assert len(dataset) == 4
    assert dataset.num_tokens == 10
    assert dataset.lengths.tolist() == [3, 1, 4, 2]
    assert dataset.num_targets.tolist() == [2, 0, 2, 1]
    assert [dataset[index]["input_ids"].tolist() for index in range(4)] == [
        [1, 2, 3],
        [70000],
        [4, 5, 6, 7],
        [8, 9],
    ]
    assert dataset[-1]["loss_mask"].tolist() == [True, True]
    assert dataset[2]["loss_mask"].tolist() == [False, False, True, True]
    with pytest.raises(IndexError, match="sample 4 of a data set of 4"):
        dataset[4]


def test_memory() -> None:
    check(TokenDataset.from_samples(SAMPLES))


def test_disk(tmp_path: Path) -> None:
    check(TokenDataset.write(tmp_path / "deep" / "tokens", iter(SAMPLES)))
    check(TokenDataset.open(tmp_path / "deep" / "tokens"))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["tokens"]


def test_rewriting_replaces(tmp_path: Path) -> None:
    TokenDataset.write(tmp_path / "tokens", SAMPLES)
    assert len(TokenDataset.write(tmp_path / "tokens", SAMPLES[:1])) == 1


def test_same_samples_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        TokenDataset.write(tmp_path / name, SAMPLES)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_empty(tmp_path: Path) -> None:
    for dataset in (TokenDataset.from_samples([]), TokenDataset.write(tmp_path / "empty", [])):
        assert len(dataset) == 0
        dataset.check_vocabulary(10)


def test_interrupted_write_leaves_the_old_one(tmp_path: Path) -> None:
    TokenDataset.write(tmp_path / "tokens", SAMPLES)
    broken = [*SAMPLES, {"input_ids": []}]
    with pytest.raises(UsageError, match="sample 4: input_ids"):
        TokenDataset.write(tmp_path / "tokens", broken)
    check(TokenDataset.open(tmp_path / "tokens"))
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


def test_foreign_directory_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="is no data set of odcengine"):
        TokenDataset.write(tmp_path, SAMPLES)
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"input_ids": [1, -2]}, "sample 0: token ids run from -2 to 1"),
        ({"input_ids": [0.5]}, "float64"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask has shape"),
        ({"input_ids": [1, 2], "labels": [1, 9]}, "same token or -100"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels must have the shape"),
    ],
)
def test_bad_samples(sample: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TokenDataset.from_samples([sample])


def test_token_outside_the_vocabulary() -> None:
    dataset = TokenDataset.from_samples(SAMPLES)
    dataset.check_vocabulary(70001)
    with pytest.raises(
        ConfigError, match="sample 1 has the token id 70000, but the model's vocabulary ends at 99"
    ):
        dataset.check_vocabulary(100)


def test_damage_is_found(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    with pytest.raises(ConfigError, match="not a data set"):
        TokenDataset.open(path)
    TokenDataset.write(path, SAMPLES)
    with open(path / "tokens.bin", "ab") as file:
        file.write(b"1234")
    with pytest.raises(ConfigError, match=r"tokens.bin has 44 bytes instead of 40.*prepare it again"):
        TokenDataset.open(path)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, "version": 9}))
    with pytest.raises(ConfigError, match="not of format odcengine-tokens, version 1"):
        TokenDataset.open(path)


def test_arrays_that_do_not_fit() -> None:
    tokens, mask = np.arange(3), np.ones(3)
    with pytest.raises(UsageError, match="do not fit together"):
        TokenDataset(tokens, mask, np.array([0, 2]))
    with pytest.raises(UsageError, match="sample 1 has no tokens"):
        TokenDataset(tokens, mask, np.array([0, 2, 2, 3]))
