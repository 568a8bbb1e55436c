"""Weights out, as transformers and peft store them: from a running engine and from its checkpoint, alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, values
from programs import run_program
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import odcengine
from odcengine.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]
IDS = [[3, 1, 4, 1, 5, 9, 2, 6]]
SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"model_type": "llama", "tie_word_embeddings": True, **SMALL},
    "experts": {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1, **SMALL},
}


def _make(name: str) -> Any:
    import transformers

    values_ = dict(MODELS[name])
    config = transformers.AutoConfig.for_model(values_.pop("model_type"), **values_)
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config)


def _with_adapter(base: Any) -> Any:
    import peft

    torch.manual_seed(2)
    return peft.get_peft_model(
        base, peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    )


def _train(rank: int, world_size: int, folder: str, name: str, adapter: bool, bf16: bool) -> torch.Tensor:
    """A few steps, both ways out; returns the logits of the trained model."""
    out = Path(folder)
    model = _make(name)
    if adapter and rank == 0:
        model.save_pretrained(out / "base")
    config = {
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "odc": {"timeout_s": 100},
        "bf16": {"enabled": bf16},
        "model": {},
    }
    engine, *_ = odcengine.initialize(model=_with_adapter(model) if adapter else model, config=config)
    for _ in range(3):
        for _ in range(rank):
            logits = engine(input_ids=torch.tensor(IDS), use_cache=False).logits.float()
            loss = torch.nn.functional.cross_entropy(
                logits[0, :-1], torch.tensor(IDS[0][1:]), reduction="sum"
            )
            engine.backward(loss, count=7)
        engine.step()
    engine.save_pretrained(out / "live", max_shard_size="6KB", tokenizer=out / "tokenizer")
    engine.save_checkpoint(out / "checkpoints")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        engine.save_pretrained(out / "live")
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=torch.tensor(IDS), use_cache=False).logits.clone()
    engine.close()
    return logits


def _export(folder: Path, *options: str) -> str:
    done = run_program("-m", "odc_tools", "export", *options, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def _logits(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor(IDS), use_cache=False).logits


def _tokenizer(folder: Path) -> None:
    (folder / "tokenizer").mkdir()
    for name in ("tokenizer.json", "special_tokens_map.json", "unrelated.bin"):
        (folder / "tokenizer" / name).write_text("{}")


@pytest.mark.parametrize("name", MODELS)
def test_equal_logits_in_transformers(name: str, tmp_path: Path) -> None:
    _tokenizer(tmp_path)
    logits = values(run_ranks(_train, 3, str(tmp_path), name, False, False))[0]
    told = _export(tmp_path, "checkpoints", "exported")
    assert "checkpoints/step_3 after 3 steps" in told
    assert "It has no tokenizer" in told
    assert torch.equal(_logits(tmp_path / "exported"), _logits(tmp_path / "live"))
    torch.testing.assert_close(_logits(tmp_path / "live"), logits, rtol=1e-5, atol=1e-6)
    live, exported = _tensors(tmp_path / "live"), _tensors(tmp_path / "exported")
    assert live.keys() == exported.keys()
    assert all(torch.equal(live[key], exported[key]) for key in live)
    assert ("lm_head.weight" in live) == (name != "tied")  # a tied weight is stored once
    names = {path.name for path in (tmp_path / "live").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "special_tokens_map.json"} <= names
    assert "unrelated.bin" not in names
    index = json.loads((tmp_path / "live" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(live)
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in live.values())
    assert len(set(index["weight_map"].values())) > 1
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    config = json.loads((tmp_path / "live" / "config.json").read_text())
    assert config["architectures"] == [type(_make(name)).__name__]
    assert "attn_implementation" not in json.dumps(config)
    leftovers = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert leftovers == []
    if name == "experts":  # as others know this architecture
        assert any("experts.0.w1" in key for key in live)


def test_dtype(tmp_path: Path) -> None:
    """What was computed in bfloat16 leaves in it; --dtype gives the masters."""
    _tokenizer(tmp_path)
    values(run_ranks(_train, 2, str(tmp_path), "tied", False, True))
    _export(tmp_path, "checkpoints/step_3", "masters", "--dtype", "float32", "--tokenizer", "tokenizer")
    masters, low = _tensors(tmp_path / "masters"), _tensors(tmp_path / "live")
    assert {tensor.dtype for tensor in low.values()} == {torch.bfloat16}
    assert all(torch.equal(low[key], masters[key].bfloat16()) for key in masters)
    for folder, dtype in (("masters", "float32"), ("live", "bfloat16")):
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == dtype
    assert (tmp_path / "masters" / "tokenizer.json").is_file()
    # It is a checkpoint of torch.distributed.checkpoint: torch's own tools take it.
    dcp_to_torch_save(tmp_path / "checkpoints" / "step_3", tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in masters.items())
    assert float(state["optimizer"]["model.norm.weight.step"]) == 3


def test_adapters_are_whole(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    _tokenizer(tmp_path)
    logits = values(run_ranks(_train, 3, str(tmp_path), "tied", True, False))[0]
    _export(tmp_path, "checkpoints", "exported")
    for folder in ("live", "exported"):
        with safe_open(next((tmp_path / folder).glob("*.safetensors")), "pt") as file:
            names = list(file.keys())
        assert all("lora_" in name and ".default." not in name for name in names)
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        model = peft.PeftModel.from_pretrained(base, tmp_path / folder).eval()
        with torch.no_grad():
            found = model(input_ids=torch.tensor(IDS), use_cache=False).logits
        torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-6)
    rows = {name: t.shape for name, t in _tensors(tmp_path / "exported").items() if "q_proj.lora_B" in name}
    assert len(rows) == 2
    assert all(shape == (16, 3) for shape in rows.values())
