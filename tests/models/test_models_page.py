"""docs/models.md: its configurations are valid, its commands are run (its tables: test_matrix.py)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from programs import run_program

import odcengine
from odcengine.data import TokenDataset
from odcengine.models import load_model

pytest.importorskip("transformers")

from models.families import SHAPE

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with weights at the place that the page names, and data."""
    load_model({**SHAPE, "model_type": "llama"}).save_pretrained(  # type: ignore[operator]
        tmp_path / "models" / "my-llama"
    )
    samples = [{"input_ids": [1 + number % 7] * (2 + number % 5)} for number in range(16)]
    TokenDataset.write(tmp_path / "tokens", samples)
    return tmp_path


def test_configurations_are_valid() -> None:
    found = blocks("yaml")
    assert len(found) >= 3
    for text in found:
        odcengine.load_config({"train_batch_size": 4, **yaml.safe_load(text)})


def test_python_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (text,) = blocks("python")
    exec(compile(text, "docs/models.md", "exec"), {})


def test_commands_run(folder: Path) -> None:
    """The page's first configuration is the file that its command starts with."""
    (folder / "config.yaml").write_text(blocks("yaml")[0])
    (folder / "train.py").write_text((ROOT / "examples/sft/train.py").read_text())
    (text,) = blocks("sh")
    (command,) = text.strip().splitlines()
    name, *words = command.split()
    assert name == "odc-launch"
    done = run_program("-m", "odc_launcher", *words, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"step \d+.*loss", done.stdout + done.stderr)) == 4
