"""Every file in configs/ trains: two steps of the example on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import run_program

from odcengine.config import load_config
from odcengine.data import TokenDataset

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted(path.name for path in (ROOT / "configs").iterdir() if path.is_file())
MODEL = """{
  "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16,
  "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2
}"""


@pytest.mark.parametrize(
    "name",  # of the two with adapters the smaller one is enough in every run
    [pytest.param(n, marks=[pytest.mark.soak] if n == "lora_gpu.yaml" else []) for n in CONFIGS],
)
def test_config_trains(name: str, tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / name)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    named = config.data.path is not None  # it names model and data itself
    made = config.model.config is not None  # it says what the model is
    model = tmp_path / (config.model.path or "model")
    data = config.data.path or "tokens"
    if not model.exists():
        model.mkdir(parents=True)
        (model / "config.json").write_text(MODEL)
    (tmp_path / data).parent.mkdir(exist_ok=True)
    TokenDataset.write(tmp_path / data, [{"input_ids": [1, 2, 3, 4 + n % 20]} for n in range(80)])
    if config.data.eval_path is not None:
        TokenDataset.write(tmp_path / config.data.eval_path, [{"input_ids": [1, 2, 3]}])  # of one rank
    done = run_program(
        *("-m", "odc_launcher", "--nproc-per-node", config.launch.nproc_per_node or 2),
        *("--config", ROOT / "configs" / name, ROOT / "examples/sft/train.py"),
        *(() if named or made else ("--model", "model")),
        *(() if named else ("--data", data)),
        *("--steps", "2"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_example_without_data_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        f"train_batch_size: 4\noptimizer: {{type: SGD}}\nmodel: {{config: {MODEL}}}"
    )
    done = run_program(
        *("-m", "odc_launcher", "--nproc-per-node", "1", "--config", "config.yaml"),
        ROOT / "examples/sft/train.py",
        folder=tmp_path,
    )
    assert done.returncode
    assert "ConfigError: no data: give --data DIRECTORY, or data.path in the configuration" in done.stderr
