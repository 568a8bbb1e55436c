"""What docs/evaluation.md shows works as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from programs import run_program

from odcengine.data import TokenDataset

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/evaluation.md").read_text()
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def block(language: str) -> str:
    """The only block of a language that the page has; its command is the one of none."""
    begin = "odc" if language == "" else ""
    (found,) = re.findall(rf"^```{language}\n({begin}.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return str(found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    samples = [{"input_ids": [1, 2, 3, 4 + number % 20]} for number in range(96)]
    TokenDataset.write(tmp_path / "tokens", samples)
    TokenDataset.write(tmp_path / "tokens" / "held_out", samples[:5])
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "evaluated.yaml").write_text(block("yaml"))
    (tmp_path / "train.py").write_text((ROOT / "examples/sft/train.py").read_text())
    return tmp_path


def test_command(folder: Path) -> None:
    program, *words = block("").split()
    assert program == "odc-launch"
    done = run_program("-m", "odc_launcher", *words, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "evaluated" / "metrics.jsonl").open()]
    evaluated = [line for line in lines if "eval/loss" in line]
    assert [line["step"] for line in evaluated] == [0, 2, 3]
    assert evaluated[-1]["eval/loss"] < evaluated[0]["eval/loss"]
    assert re.findall(r"^\| `([\w/]+)` \|", PAGE, re.MULTILINE) == list(evaluated[0])
    numbers = re.compile(r"[\d.]+(e\+\d+)?")
    shown = [line for line in done.stdout.splitlines() if "eval after" in line]
    assert len(shown) == 3
    for line in shown:
        assert numbers.sub("#", line[line.index("eval after") :]) == numbers.sub("#", block("text").strip())


def test_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    exec(compile(block("python"), "docs/evaluation.md", "exec"), names)
    assert names["best"] == names["result"].loss  # type: ignore[attr-defined]
    assert (folder / "best" / "model.safetensors").exists()
