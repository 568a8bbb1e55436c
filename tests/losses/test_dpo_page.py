"""docs/dpo.md: its configuration is that of configs/, its commands run in their order."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import sentencepiece
import yaml
from programs import run_program

from odcengine.config import load_config
from odcengine.data import TokenDataset
from odcengine.models import load_model

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "dpo.md").read_text()
COMMANDS = [
    line.split() for line in PAGE.replace("\\\n", " ").splitlines() if line.strip().startswith(".venv/bin/")
]
MODULES = {"odc": ["-m", "odc_tools"], "odc-launch": ["-m", "odc_launcher"], "python": []}


def test_configuration_is_that_of_the_file() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    for block, name in zip(blocks, ("dpo_cpu.yaml", "dpo_lora_cpu.yaml"), strict=True):
        shown, written = yaml.safe_load(block), load_config(ROOT / "configs" / name).resolved()
        for section, keys in shown.items():
            for key, value in keys.items():
                found = written[section][key]
                if isinstance(value, dict):
                    found = {inner: found[inner] for inner in value}
                assert found == value, (name, section, key)
    programs = ["python", "odc", "odc-launch", "odc", "odc-launch", "odc-launch", "odc"]
    assert [words[0].removeprefix(".venv/bin/") for words in COMMANDS] == programs


@pytest.mark.soak
def test_commands(tmp_path: Path) -> None:
    """On fewer and shorter instructions, with a smaller model."""
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    folder = tmp_path / "demo_out"
    folder.mkdir()
    examples = [
        {
            "prompt": f"def f{number}(a):\n",
            "completion": f"    b = a + {number}\n    c = b * 2\n    return c - {number % 7}\n",
        }
        for number in range(400)
    ]
    lines = [json.dumps(example) for example in examples]
    (folder / "instructions.jsonl").write_text("\n".join(lines) + "\n")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([e["prompt"] + e["completion"] for e in examples]),
        model_writer=model,
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    config = {"model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    load_model(config).save_pretrained(folder / "exported")  # type: ignore[operator]
    for program, *words in COMMANDS:
        done = run_program(*MODULES[program.removeprefix(".venv/bin/")], *words, folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    lines_of = [json.loads(line) for line in (folder / "dpo" / "metrics.jsonl").open()]
    margins = [line["dpo/margin"] for line in lines_of if "dpo/margin" in line]
    assert len(margins) == 20
    assert margins[-1] > margins[0] + 0.01
    lines_of = [json.loads(line) for line in (folder / "dpo_lora" / "metrics.jsonl").open()]
    margins = [line["dpo/margin"] for line in lines_of if "dpo/margin" in line]
    assert margins[0] == pytest.approx(0, abs=1e-5)
    assert margins[-1] > 0.01
    assert (folder / "dpo_exported" / "model.safetensors").is_file()
    assert (folder / "dpo_adapter" / "adapter_model.safetensors").is_file()
    pairs, known = TokenDataset.open(folder / "pairs"), TokenDataset.open(folder / "pairs_known")
    assert len(pairs) == len(known)
    assert "ref_logprobs" in known[0]["sequences"][0]
