"""What README.md says to type works as it stands there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import SOURCES, run_program

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
TOOLS = {"odc-launch": "odc_launcher", "odc": "odc_tools"}


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, "" for plain ones."""
    found: list[str] = []
    inside: str | None = None
    for line in README.splitlines(keepends=True):
        if line.startswith("```"):
            inside = line.strip()[3:] if inside is None else None
            if inside == language:
                found.append("")
        elif inside == language:
            found[-1] += line
    return found


def commands() -> list[list[str]]:
    """Command lines of README's plain blocks, without the make targets."""
    lines = "".join(blocks("")).replace("\\\n", " ").splitlines()
    return [line.split() for line in lines if line.strip() and not line.startswith("make ")]


def python_words(words: list[str]) -> list[str]:
    """A command of the README as arguments of Python."""
    name = words[0].removeprefix(".venv/bin/")
    return [*(["-m", TOOLS[name]] if name in TOOLS else []), *words[1:]]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the checkout's files, where commands may write; the example's model is a smaller one."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    file = tmp_path / "examples/sft/llama_7m/config.json"
    model = json.loads(file.read_text())
    file.write_text(
        json.dumps({**model, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2})
    )
    return tmp_path


def test_commands_are_known() -> None:
    programs = {words[0] for words in commands()}
    assert programs == {"odc-launch", ".venv/bin/python", ".venv/bin/odc-launch", ".venv/bin/odc"}


@pytest.mark.timeout(1800)  # eight programs
def test_prepare_then_train(checkout: Path) -> None:
    """In README's order; the launcher's example with a script of its own is the next test."""
    mine = [words for words in commands() if words[0] != "odc-launch"]
    assert len(mine) == 8
    for words in mine:
        done = run_program(*python_words(words), folder=checkout)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (checkout / "demo_out" / "tokens").is_dir()
    written = checkout / "demo_out" / "run"
    # The second run went on from the checkpoint of step 4.
    lines = [json.loads(line) for line in (written / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [0, 1, 2, 3, 4, 4, 5, 6]
    evaluated = [(line["step"], line["eval/loss"]) for line in lines if "eval/loss" in line]
    assert [step for step, _ in evaluated] == [0, 4, 5, 7]  # at first, every fourth, and where the runs ended
    assert evaluated[-1][1] < evaluated[0][1]
    assert {"step_4", "step_6", "latest"} <= {path.name for path in (written / "checkpoints").iterdir()}
    assert (checkout / "demo_out" / "exported" / "model.safetensors").exists()
    assert list((written / "tensorboard").glob("events.*"))
    assert (written / "timelines" / "step000003.png").exists()
    pictures = {path.name for path in (written / "report").iterdir()}
    assert pictures == {"idle.png", "timeline.png", "lengths.png"}


def test_the_script_and_the_configuration(checkout: Path) -> None:
    """With Python's own start on every rank."""
    import transformers

    from odcengine.data import TokenDataset

    config: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**config, num_hidden_layers=2, num_attention_heads=2)
    )
    model.save_pretrained(checkout / "path/to/model")  # with weights: from_pretrained gives evaluation mode
    samples = [{"input_ids": list(range(1, 3 + number % 50))} for number in range(70)]
    TokenDataset.write(checkout / "path/to/tokens", samples)
    (script,) = blocks("python")
    (checkout / "train.py").write_text(script + 'print("last loss", metrics.loss)\n')
    (checkout / "config.yaml").write_text(blocks("yaml")[0])
    (words,) = [words for words in commands() if words[0] == "odc-launch"]
    done = subprocess.run(
        [sys.executable, *python_words(words)],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"\] last loss (\S+)", done.stdout)
    assert len(losses) == 2
    assert 3 < float(losses[0]) == float(losses[1]) < 6
    assert "Warning" not in done.stdout
    assert re.findall(r"step (\d)/3: loss ", done.stdout) == ["1", "2", "3"]  # on rank 0 only


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
