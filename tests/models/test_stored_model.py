"""A directory of safetensors is loaded by every rank for its own part; no rank ever holds the model."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, values

import odcengine
from odcengine.data import TokenDataset
from odcengine.errors import ConfigError
from odcengine.models import load, load_model, open_model
from odcengine.models.safetensors_files import parse_size, plan_files

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 37,  # no multiple of the number of ranks
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}


def _save(folder: Path, dtype: str | None = None, **values_: Any) -> Any:
    model: Any = load_model({**SMALL, **values_}, random_seed=3, dtype=dtype)
    model.save_pretrained(folder, max_shard_size="4KB")
    return model


def _config(folder: Path, data: Path | None = None, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": 6,
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "odc": {"timeout_s": 60},
        "model": {"path": str(folder)},
        "balance": {"max_tokens_per_micro_batch": 64},
        **more,
    }
    if data is not None:
        config["data"] = {"path": str(data)}
    return config


def _train(rank: int, world_size: int, config: dict[str, Any], whole: bool) -> dict[str, Any]:
    """Weights before and after two steps; ``whole``: with a model that every rank has loaded."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("odcengine").addHandler(handler)
    logging.getLogger("odcengine").setLevel(logging.INFO)
    model = None
    if whole:
        section = dict(config["model"])
        model = load_model(section.pop("path"), dtype=section.pop("dtype", None))
        config = {**config, "model": section}
    engine, _, loader, _ = odcengine.initialize(model=model, config=config)
    assert not any(p.is_meta for p in engine.module.parameters())
    state = {name: p.detach().full_tensor().clone() for name, p in engine.module.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    losses = []
    assert loader is not None
    for minibatch in loader:
        for micro_batch in minibatch:
            engine.backward(engine(micro_batch))
        losses.append(engine.step().loss)
        if len(losses) == 2:
            break
    tied = engine.module.lm_head.weight is engine.module.model.embed_tokens.weight
    engine.close()
    return {"state": state, "buffers": buffers, "losses": losses, "tied": tied, "lines": lines}


def _data(folder: Path) -> Path:
    TokenDataset.write(folder, [{"input_ids": [1 + n % 30, 2, 3, 4 + n % 9]} for n in range(20)])
    return folder


@pytest.mark.parametrize(
    ("world_size", "more"),
    [(3, {}), (1, {}), (2, {"bf16": {"enabled": True}})],
    ids=["3 ranks", "1 rank", "bf16"],
)
def test_the_same_as_loaded_whole(world_size: int, more: dict[str, Any], tmp_path: Path) -> None:
    _save(tmp_path / "model", "bfloat16" if more else None, tie_word_embeddings=world_size != 1)
    config = _config(tmp_path / "model", _data(tmp_path / "data"), **more)
    (found, *_), (right, *_) = (
        values(run_ranks(_train, world_size, config, whole)) for whole in (False, True)
    )
    for part in ("state", "buffers"):
        assert found[part].keys() == right[part].keys()
        for name, tensor in right[part].items():
            assert torch.equal(found[part][name], tensor), name
            assert found[part][name].dtype == tensor.dtype
    assert found["losses"] == pytest.approx(right["losses"], rel=1e-6)
    assert found["tied"] == (world_size != 1)
    assert not [line for line in found["lines"] if "logits of whole" in line]  # the head computes the loss


def test_what_cannot_be_matched_is_loaded_whole(tmp_path: Path) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(
        "mixtral", **{k: v for k, v in SMALL.items() if k != "model_type"}, num_local_experts=2
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "experts")
    assert open_model(tmp_path / "experts") is None
    model = _save(tmp_path / "model")
    assert open_model(tmp_path / "model" / "config.json") is None  # random weights
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    for path in (tmp_path / "model").glob("model*"):
        path.unlink()
    assert open_model(tmp_path / "model") is None


def test_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the local cache, laid out as huggingface_hub does."""
    from huggingface_hub import constants

    repository = tmp_path / "models--somebody--small"
    _save(repository / "snapshots" / "0123abcd")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert load._folder_of("somebody/small") == repository / "snapshots" / "0123abcd"
    assert load._folder_of("somebody/else") is None


def test_on_the_meta_device_until_it_is_filled(tmp_path: Path) -> None:
    _save(tmp_path)
    state = torch.get_rng_state()
    stored = open_model(tmp_path, dtype="float64", gradient_checkpointing=True)
    assert stored is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert {p.device.type for p in stored.model.parameters()} == {"meta"}
    assert {p.dtype for p in stored.model.parameters()} == {torch.float64}
    assert {b.device.type for b in stored.model.buffers()} == {"cpu"}
    assert torch.nn.Linear(1, 1).weight.device.type == "cpu"  # the switch is off again


@pytest.mark.parametrize("damage", ["missing", "truncated", "index", "header"])
def test_incomplete_weights_are_named(damage: str, tmp_path: Path) -> None:
    _save(tmp_path)
    path = sorted(tmp_path.glob("model-*.safetensors"))[1]
    name = path.name
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "header":
        path.write_bytes(b"\xff" * 200)
    else:
        name = "model.safetensors.index.json"
        (tmp_path / name).write_text('{"weight_map": 3}')
    with pytest.raises(ConfigError, match=name):
        open_model(tmp_path)


def test_other_files_on_another_rank(tmp_path: Path) -> None:
    for rank in range(2):
        _save(tmp_path / str(rank), num_hidden_layers=3)
    shutil.rmtree(tmp_path / "1")
    load_model(SMALL).save_pretrained(tmp_path / "1")  # type: ignore[operator]
    told = [result.error or "" for result in run_ranks(_start, 2, str(tmp_path))]
    assert any(
        "model's files (names, sizes, places of tensors) of ranks [1] differs" in error for error in told
    )


def _start(rank: int, world_size: int, folder: str) -> None:
    import os

    os.chdir(Path(folder) / str(rank))
    odcengine.initialize(config=_config(Path(".")))


# ---- memory --------------------------------------------------------------------------------------------


def _peak(rank: int, world_size: int, folder: str, whole: bool) -> int:
    """Bytes by which the process has grown at most."""

    def high() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    open_model(Path(folder).parent / "small")  # transformers is imported, and whatever else it takes once
    before = high()
    # Collectives have no windows, so that only the loading is measured.
    config = _config(Path(folder), odc={"timeout_s": 60, "transport": "collective"})
    model = load_model(folder) if whole else None
    if whole:
        config.pop("model")
    engine, *_ = odcengine.initialize(model=model, config=config)
    grown = high() - before
    engine.close()
    return grown


def test_memory(tmp_path: Path) -> None:
    """A model of 192 MiB, whose largest tensor has 32: a rank of 4 needs its 48, and a piece of a tensor."""
    config: dict[str, Any] = {
        **SMALL,
        "vocab_size": 16384,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
    }
    import transformers

    _save(tmp_path / "small")
    values_ = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values_))
    (tmp_path / "large").mkdir()
    shapes = {name: (torch.float32, tuple(p.shape)) for name, p in model.named_parameters()}
    plan = plan_files(shapes, parse_size("100MB"))
    plan.create(tmp_path / "large")  # zeros, which take no room on the disk
    (tmp_path / "large" / "config.json").write_text(
        json.dumps({**config, "architectures": ["LlamaForCausalLM"], "dtype": "float32"})
    )
    total = sum(p.numel() * 4 for p in model.parameters())
    largest = max(p.numel() * 4 for p in model.parameters())
    assert total > 180 << 20
    slack = 32 << 20
    grown = values(run_ranks(_peak, 4, str(tmp_path / "large"), False))
    assert max(grown) < total // 4 + largest + slack, [g >> 20 for g in grown]
    assert max(grown) < total - largest
