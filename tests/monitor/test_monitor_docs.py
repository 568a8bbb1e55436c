"""docs/monitor.md is run as it is printed: its configuration, its commands, what it says they write."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from programs import run_program

from odcengine.data import TokenDataset

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "monitor.md").read_text()
PROGRAMS = {"odc-launch": "odc_launcher", "odc": "odc_tools"}

SCRIPT = """
import logging
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import odcengine

logging.basicConfig(level=logging.INFO, format="%(message)s")
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24,
                                     num_hidden_layers=2, num_attention_heads=2))
dataset = [{"input_ids": torch.randint(32, (5 + index % 40,)).tolist()} for index in range(128)]
engine, optimizer, loader, scheduler = odcengine.initialize(model=model, training_data=dataset)
for minibatch in loader:
    for micro_batch in minibatch:
        engine.backward(engine(micro_batch))
    engine.step()
engine.close()
"""


def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    TokenDataset.write(tmp_path / "tokens", ({"input_ids": [1] * length} for length in range(1, 30)))
    config = re.search(r"```yaml\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)
    assert config is not None
    (tmp_path / config[1]).write_text(config[2])
    commands = [
        shlex.split(line)
        for block in re.findall(r"```(?:sh)?\n(odc.*?)```", PAGE, re.DOTALL)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    assert [command[0] for command in commands] == ["odc-launch", *["odc"] * 5]
    outputs = []
    for program, *arguments in commands:
        done = run_program("-m", PROGRAMS[program], *arguments, folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout + done.stderr)
    shown = re.findall(r"\[rank (\d)\] (step \d/4: loss .*|summary: .*)", outputs[0])
    assert [rank for rank, _ in shown] == ["0"] * 6  # four steps and two lines of summary, on rank 0 only
    example = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert [_shape(line) for _, line in shown[1:2]] == [_shape(example[0].strip())]
    assert [_shape(line) for _, line in shown[4:]] == [_shape(line) for line in example[1].splitlines()]
    written = tmp_path / "monitored"
    assert [json.loads(line)["step"] for line in (written / "metrics.jsonl").open()] == [0, 1, 2, 3]
    assert list((written / "tensorboard").glob("events.*"))
    timelines = sorted(path.name for path in (written / "timelines").iterdir())
    assert timelines == ["step000001.json", "step000001.png", "step000003.json", "step000003.png"]
    assert (written / "step1.png").exists()
    assert (written / "both.png").exists()
    assert (tmp_path / "lengths.png").exists()
    assert _shape(outputs[3]) == _shape(example[2])
    assert "monitored is 1.000 times as fast as monitored" in outputs[4]
    for folder in (written / "report", tmp_path / "compared"):
        assert sorted(path.name for path in folder.iterdir()) == ["idle.png", "timeline.png"]


def _shape(line: str) -> str:
    """A line with its numbers taken out, also those with commas (a slow machine's may have none)."""
    line = re.sub(r"(?<=\d),(?=\d{3}\b)", "", line)
    return re.sub(r"[\d.:]+(e-\d+)?[kMG]?(?=[%,; /]|$)", "#", line)
