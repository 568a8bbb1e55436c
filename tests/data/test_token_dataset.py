"""Token data sets in memory and on disk."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from odcengine.data import TokenDataset
from odcengine.data import dataset as dataset_module
from odcengine.data.dataset import DatasetWriter, TokenBatch
from odcengine.data.token_batch import arrow_schema
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


def test_large_sets_in_many_record_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are found over record batches, and read as views of the mapped file."""
    monkeypatch.setattr(dataset_module, "_TOKENS_PER_RECORD_BATCH", 5000)
    rng = np.random.default_rng(0)
    samples = [
        {"input_ids": rng.integers(100, size=n), "loss_mask": rng.integers(2, size=n)}
        for n in rng.integers(1, 100, size=2000)
    ]
    memory = TokenDataset.from_samples(samples)
    disk = TokenDataset.write(tmp_path / "tokens", iter(samples))
    assert len(disk._batches) > 5
    for dataset in (memory, disk, pickle.loads(pickle.dumps(disk)), pickle.loads(pickle.dumps(memory))):
        assert len(dataset) == 2000
        assert dataset.lengths.tolist() == [len(sample["input_ids"]) for sample in samples]
        assert dataset.num_targets.tolist() == [int(sample["loss_mask"][1:].sum()) for sample in samples]
        for index in [*range(-2000, 2000, 7), 1999]:
            assert dataset[index]["input_ids"].tolist() == samples[index]["input_ids"].tolist()
            assert dataset[index]["loss_mask"].tolist() == samples[index]["loss_mask"].astype(bool).tolist()
    assert len(pickle.dumps(disk)) < 1000  # its path, not its tokens
    tokens = disk[1234]["input_ids"]
    assert tokens.base is not None
    assert not tokens.flags.writeable


def test_any_reader_of_arrow(tmp_path: Path) -> None:
    TokenDataset.write(tmp_path / "tokens", SAMPLES)
    with pyarrow.ipc.open_file(tmp_path / "tokens" / "samples.arrow") as reader:
        table = reader.read_all()
    assert table.to_pydict() == {
        "input_ids": [[1, 2, 3], [70000], [4, 5, 6, 7], [8, 9]],
        "loss_mask": [[0, 1, 1], [1], [0, 0, 1, 1], [1, 1]],
        "num_targets": [2, 0, 2, 1],
    }


def test_vocabulary_on_disk(tmp_path: Path) -> None:
    dataset = TokenDataset.write(tmp_path / "tokens", SAMPLES)
    assert dataset.metadata["max_token_id"] == 70000
    dataset.check_vocabulary(70001)
    with pytest.raises(ConfigError, match="sample 1 has the token id 70000"):
        dataset.check_vocabulary(70000)


def test_damage_is_found(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    with pytest.raises(ConfigError, match="not a data set"):
        TokenDataset.open(path)
    TokenDataset.write(path, SAMPLES)
    samples, meta = path / "samples.arrow", json.loads((path / "meta.json").read_text())
    content = samples.read_bytes()
    samples.write_bytes(content[:-4])
    with pytest.raises(
        ConfigError, match=rf"has {len(content) - 4} bytes instead of {len(content)}\); prepare"
    ):
        TokenDataset.open(path)
    samples.write_bytes(bytes(len(content)))
    with pytest.raises(ConfigError, match=r"damaged data set \(.*prepare it again"):
        TokenDataset.open(path)
    samples.write_bytes(content)
    for change, message in (
        (
            {"version": 1},
            "a data set of version 1, but this odcengine reads versions 2 and 3; prepare it again",
        ),
        ({"format": "other"}, "not of format odcengine-tokens"),
        ({"num_samples": 5}, "has 4 num_samples instead of 5"),
        ({"num_tokens": 11}, "has 10 num_tokens instead of 11"),
    ):
        (path / "meta.json").write_text(json.dumps({**meta, **change}))
        with pytest.raises(ConfigError, match=message):
            TokenDataset.open(path)
    del meta["num_bytes"]
    (path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match="damaged data set"):
        TokenDataset.open(path)


def _replace_samples(path: Path, table: pyarrow.Table) -> None:
    """Write another table in the place of a data set's samples, of the size that its description says."""
    with pyarrow.ipc.new_file(path / "samples.arrow", table.schema) as writer:
        writer.write_table(table)
    meta = json.loads((path / "meta.json").read_text())
    meta["num_bytes"] = (path / "samples.arrow").stat().st_size
    (path / "meta.json").write_text(json.dumps(meta))


def test_foreign_arrow_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    TokenDataset.write(path, SAMPLES)
    table = pyarrow.table({"text": ["a"]})
    _replace_samples(path, table)
    with pytest.raises(ConfigError, match=r"samples.arrow has the columns .*text: string"):
        TokenDataset.open(path)


def test_missing_values_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    TokenDataset.write(path, SAMPLES[:1])
    schema = arrow_schema(pyarrow)
    table = pyarrow.table({"input_ids": [[1, None, 3]], "loss_mask": [[0, 1, 1]], "num_targets": [2]}, schema)
    _replace_samples(path, table)
    with pytest.raises(ConfigError, match=r"damaged data set \(record batch 0: 1 of 3 values are missing\)"):
        TokenDataset.open(path)


def test_reading_imports_no_pandas(tmp_path: Path) -> None:
    """It would take a third of a second and tens of MiB on every rank."""
    TokenDataset.write(tmp_path / "tokens", SAMPLES)
    code = (
        "import sys; from odcengine.data import TokenDataset; data = TokenDataset.open(sys.argv[1]); "
        "print(data[2]['input_ids'].tolist(), 'pandas' in sys.modules)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "tokens")]
    env = os.environ | {"PYTHONPATH": str(Path(dataset_module.__file__).parents[2])}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.split() == ["[4,", "5,", "6,", "7]", "False"], done.stderr


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data in memory need none; on disk the error says what to install."""
    TokenDataset.write(tmp_path / "tokens", SAMPLES)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    check(TokenDataset.from_samples(SAMPLES))
    for action in (
        lambda: TokenDataset.open(tmp_path / "tokens"),
        lambda: TokenDataset.write(tmp_path / "b", []),
    ):
        with pytest.raises(ConfigError, match=r"data sets on disk need pyarrow, .* pip install 'pyarrow>="):
            action()
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


def test_abandoned_writer_leaves_nothing(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "tokens") as writer:
        writer.add(TokenBatch.of([(np.ones(3, np.uint32), np.ones(3, np.uint8))]))
    assert list(tmp_path.iterdir()) == []


def test_arrays_that_do_not_fit() -> None:
    tokens, mask = np.arange(3, dtype=np.uint32), np.ones(3, dtype=np.uint8)
    with pytest.raises(UsageError, match="do not fit together"):
        TokenBatch(tokens, mask, np.array([0, 2]))
    with pytest.raises(UsageError, match="sample 1 has no tokens"):
        TokenBatch(tokens, mask, np.array([0, 2, 2, 3]))
