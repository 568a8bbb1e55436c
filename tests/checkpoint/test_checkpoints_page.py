"""What docs/checkpoints.md shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import run_program

import odcengine
from odcengine.data import TokenDataset
from odcengine.models import load_model

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/checkpoints.md").read_text()
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def run(words: list[str], folder: Path) -> str:
    modules = {"odc-launch": "odc_launcher", "odc": "odc_tools"}
    done = run_program("-m", modules[words[0]], *words[1:], folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    load_model(MODEL).save_pretrained(tmp_path / "models" / "my-llama")  # type: ignore[operator]
    TokenDataset.write(tmp_path / "tokens", [{"input_ids": [1, 2, 3, 4 + n % 20]} for n in range(20)])
    (tmp_path / "config.yaml").write_text(blocks("yaml")[0])
    (tmp_path / "train.py").write_text((ROOT / "examples/sft/train.py").read_text())
    return tmp_path


def test_commands_in_their_order(folder: Path) -> None:
    first, second, export = (text.split() for text in blocks("sh"))
    assert len(re.findall(r"step \d+.*loss", run(first, folder))) == 3
    again = run(second, folder)
    assert re.search(r"checkpoint runs/one/step_2 loaded: 2 steps done", again)
    assert len(re.findall(r"step \d+.*loss", again)) == 3  # from the third to the fifth
    assert "runs/one/step_4 after 4 steps" in run(export, folder)
    assert (folder / "exported" / "model.safetensors").exists()
    listing = {path.name for path in (folder / "runs/one/step_4").iterdir()}
    for name in re.findall(r"^    (\S+)", PAGE[PAGE.index("## On the disk") :], re.MULTILINE):
        assert name in listing, name


def test_calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    config = {**yaml.safe_load(blocks("yaml")[0]), "steps_per_print": 0}
    engine, _, loader, _ = odcengine.initialize(config=config)
    names = {"engine": engine, "loader": loader}
    for text in blocks("python"):
        exec(compile(text, "docs/checkpoints.md", "exec"), names)
    assert names["client_state"] == {"best": 1.5, "score": 2}
    assert loader is not None
    assert loader.epoch == 2
    engine.close()
    assert (folder / "exported-live" / "config.json").exists()
    assert {"step_6", "later", "latest"} <= {path.name for path in (folder / "runs/one").iterdir()}


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", PAGE)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
