"""The demo's data: functions of the standard library, tokenised so that nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import sentencepiece
from scripts import load_script

from odcengine.data import TokenDataset

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "demo" / "prepare.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    return load_script(SCRIPT, "demo_prepare")


SOURCE = '''\
"""A module."""
import functools
\f

@functools.cache
def area(
    width: float, height: float
) -> float:
    """The area of a rectangle."""
    # Overflow gives inf.
    return width * height

class Thing:
    def method(self):
        r"""Two
        lines \\d."""

        def inner():
            """Nested."""
            return 1
# Further left.
        return inner()   # a remark

    async def wait(self): "One line."; return 2

    def nothing(self):
        """Only documented."""

    def silent(self):
        return 3

def area_again():
    """The area of a rectangle."""
    return 0
'''


def test_extraction(demo: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "shapes.py").write_text(SOURCE)
    examples = demo.extract_examples([tmp_path / "shapes.py"])
    texts = {example.prompt: example.completion for example in examples}
    assert texts == {
        "@functools.cache\ndef area(\n    width: float, height: float\n) -> float:\n"
        '    """The area of a rectangle."""\n': "    # Overflow gives inf.\n    return width * height\n",
        'def method(self):\n    r"""Two\n    lines \\d."""\n': "\n    def inner():\n"
        '        """Nested."""\n        return 1\n# Further left.\n    return inner()   # a remark\n',
        'def inner():\n    """Nested."""\n': "    return 1\n",
        'def area_again():\n    """The area of a rectangle."""\n': "    return 0\n",
    }


def test_same_text_counts_once_and_broken_files_are_passed_over(demo: ModuleType, tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(SOURCE)
    (tmp_path / "c.py").write_text("def broken(:\n")
    (tmp_path / "d.py").write_bytes(b'"""\xff"""\n')
    (tmp_path / "e.py").write_bytes(b"# -*- coding: latin-1 -*-\ndef f():\n    '''\xe4'''\n    return 1\n")
    examples = demo.extract_examples(demo.source_files(tmp_path))
    assert len(examples) == 5
    assert examples[-1].prompt == "def f():\n    '''\u00e4'''\n"


def test_files_of_tests_and_packages_are_left_out(demo: ModuleType, tmp_path: Path) -> None:
    for name in ("b/one.py", "a.py", "test/x.py", "b/tests/y.py", "site-packages/z.py", "idle_test/w.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    # The folder itself may lie below one of those names.
    names = [path.relative_to(tmp_path).as_posix() for path in demo.source_files(tmp_path)]
    assert names == ["a.py", "b/one.py"]


def test_standard_library(tmp_path: Path) -> None:
    """The command as a user runs it, with a small tokenizer."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path / "demo"), "--max-tokens", "1024"],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["data", "tokenizer", "tokens"]

    text = (tmp_path / "demo" / "instructions.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    assert len(records) > 5000
    assert all(set(record) == {"prompt", "completion"} for record in records)
    assert f"{len(records):,} different functions" in lines[0]

    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "demo" / "tokenizer.model"))
    dataset = TokenDataset.open(tmp_path / "demo" / "tokens")
    dataset.check_vocabulary(4096)
    assert dataset.lengths.max() <= 1024
    assert f"; {len(records) - len(dataset):,} longer than 1,024 tokens left out" in lines[0]
    assert np.percentile(dataset.lengths, 99) > 4 * dataset.lengths.mean()

    # Every character survives, and exactly the completion and the end are to be learned.
    kept = iter(records)
    for index in range(300):
        sample = dataset[index]
        mask = sample["loss_mask"]
        tokens = sample["input_ids"].tolist()
        start = int(np.argmax(mask))
        assert mask[start:].all()
        assert tokens[0] == tokenizer.bos_id()
        assert tokens[-1] == tokenizer.eos_id()
        pair = {
            "prompt": tokenizer.decode(tokens[1:start]),
            "completion": tokenizer.decode(tokens[start:-1]),
        }
        assert any(record == pair for record in kept)


def test_folder_without_functions(demo: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no Python functions with docstrings; give a folder"):
        demo.prepare(tmp_path / "out", stdlib=tmp_path)
    assert not (tmp_path / "out").exists()
