"""docs/adapters.md: its commands in their order, and its figures."""

from __future__ import annotations

import re
from pathlib import Path

import odc_launcher.memory as memory
import pytest
from odc_tools.cli import main
from programs import run_program
from test_clusters import architecture, gib

from odcengine.config import load_config
from odcengine.data import TokenDataset
from odcengine.models import load_model
from odcengine.models.shapes import model_shapes

pytest.importorskip("peft")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/adapters.md").read_text()


def test_commands_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = load_model({"model_type": "llama", "num_attention_heads": 2, **shape})
    model.save_pretrained(tmp_path / "models" / "my-llama")  # type: ignore[operator]
    TokenDataset.write(tmp_path / "tokens", [{"input_ids": [1, 2, 3, 4 + n % 20]} for n in range(8)])
    (yaml,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "config.yaml").write_text(yaml)
    (tmp_path / "train.py").write_text((ROOT / "examples/sft/train.py").read_text())
    (commands,) = re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    launch, *exports = [command.split() for command in commands.splitlines()]
    done = run_program("-m", "odc_launcher", *launch[1:], folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.chdir(tmp_path)
    for name, *words in exports:
        assert name == "odc"
        assert main(words) == 0
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")


def test_memory_is_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_config(ROOT / "configs/lora_gpu.yaml").resolved()
    totals = []
    for lora in (None, settings["model"]["lora"]):
        model = {"config": architecture("7B"), "dtype": "bfloat16", "lora": lora}
        config = load_config({**settings, "model": model})
        shapes = model_shapes(config)
        monkeypatch.setattr(memory, "read_shapes", lambda *_, found=shapes: found)
        plan = memory.describe_memory(config, "c.yaml", 2, 1, {})
        totals.append(gib(plan["full"]["total"]))
        text = "\n".join(memory.render_memory(plan))
    assert f"all weights {totals[0]},\nadapters of rank 16 on all linear layers {totals[1]}." in PAGE
    assert "7,655,986,688 parameters (40,370,176 trained)" in text
    assert "weights that stay as they are" in text


def test_links_lead_somewhere() -> None:
    for page in ("adapters.md", "integration.md"):
        text = (ROOT / "docs" / page).read_text()
        links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
        assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
