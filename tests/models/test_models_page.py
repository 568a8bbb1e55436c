"""docs/models.md: its commands are run, and its table of model families is what the families do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import odcengine
from odcengine.data import TokenDataset, pack_samples
from odcengine.errors import UsageError
from odcengine.losses import causal_lm_loss_sum
from odcengine.losses.fused_head import fuses_loss
from odcengine.models import load_model, prepare_model

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"model_type": "llama"},
    "Mistral": {"model_type": "mistral"},
    "Mixtral": {"model_type": "mixtral"},
    "Qwen2": {"model_type": "qwen2"},
    "Qwen3": {"model_type": "qwen3", "head_dim": 8},
    "Qwen3 MoE": {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "Gemma": {"model_type": "gemma", "head_dim": 8},
    "Gemma 3 (text)": {"model_type": "gemma3_text", "head_dim": 8},
    "Phi-3": {"model_type": "phi3"},
    "Phi": {"model_type": "phi"},
    "GPT-2": {"model_type": "gpt2", **GPT2},
    "GPT-NeoX": {"model_type": "gpt_neox"},
    "OLMo 2": {"model_type": "olmo2"},
    "StarCoder2": {"model_type": "starcoder2"},
    "SmolLM3": {"model_type": "smollm3"},
    "Granite": {"model_type": "granite", "logits_scaling": 8.0},
    "Cohere": {"model_type": "cohere"},
    "Gemma 2": {"model_type": "gemma2", "head_dim": 8},
    "gpt-oss": {"model_type": "gpt_oss", "head_dim": 8, "num_local_experts": 4},
    "Falcon": {"model_type": "falcon"},
    "BLOOM": {"model_type": "bloom"},
    "Mamba": {"model_type": "mamba"},
}
SAMPLES = [[5, 9, 13, 2, 40], [7], [8, 8, 41, 3]]


def row_of(name: str, model: Any) -> str:
    """The line of the table that is true of the model."""
    kind = f"| {name} | `{model.config.model_type}` "
    try:
        prepare_model(model)
    except UsageError as error:
        reason = "attention cannot be exchanged" if "exchanged" in str(error) else ""
        found = re.search(r"attention with (\w+)", str(error))
        return kind + f"| refused: {f'attention with {found[1]}' if found else reason} | |"
    return kind + f"| yes | {'in the head' if fuses_loss(model) else 'all logits'} |"


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str) -> None:
    """A tiny random model: the table's line, and where it is packed the loss and gradient of its samples."""
    values = FAMILIES[name]
    model: Any = load_model(values if "n_embd" in values else {**SHAPE, **values}).eval()
    alone = torch.zeros(())
    for tokens in SAMPLES:
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
        targets = torch.tensor(tokens[1:], dtype=torch.int64)
        alone = alone + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    torch.autograd.backward(alone)
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    row = row_of(name, model)
    if row not in PAGE.splitlines():
        pytest.fail(f"the table lacks the line\n{row}", pytrace=False)
    if "refused" in row:
        return
    loss = causal_lm_loss_sum(model, pack_samples([{"input_ids": tokens} for tokens in SAMPLES]))
    torch.testing.assert_close(loss, alone, rtol=1e-5, atol=0)
    torch.autograd.backward(loss)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name_, parameter in model.named_parameters():
        if name_ in expected:
            assert float((parameter.grad - expected[name_]).abs().max()) <= 1e-4 * scale, name_


def test_table_has_no_other_families() -> None:
    table = PAGE[PAGE.index("## Families") :]
    rows = re.findall(r"^\| ([^|]+) \| `\w+` \|", table, re.MULTILINE)
    assert rows == ["family", *FAMILIES]


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
    path = os.pathsep.join(str(ROOT / part) for part in ("", "launcher", "tools"))
    done = subprocess.run(
        [sys.executable, "-m", "odc_launcher", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"step \d+.*loss", done.stdout + done.stderr)) == 4
