"""Models by directory, file, mapping or name, and what is said where that cannot work."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, values

import odcengine
from odcengine.data import TokenDataset
from odcengine.errors import ConfigError
from odcengine.models import check_tokenizer, find_vocabulary, load_model, vocabulary_size

transformers = pytest.importorskip("transformers")

VALUES: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def save(folder: Path, **changes: Any) -> Path:
    """A directory with weights."""
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(**{**VALUES, **changes})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def write_config(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def same(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_directory_with_weights(tmp_path: Path) -> None:
    save(tmp_path)
    model = load_model(tmp_path)
    assert type(model) is transformers.LlamaForCausalLM
    assert model.training
    assert same(model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    assert same(model, load_model(str(tmp_path), random_seed=3))


def test_random_weights_are_the_seeds_alone(tmp_path: Path) -> None:
    """From a directory, its config.json, or a mapping: the same, and no trace in torch's generator."""
    write_config(tmp_path, **VALUES)
    models = [load_model(source) for source in (tmp_path, tmp_path / "config.json", VALUES)]
    torch.rand(7)
    models.append(load_model(VALUES))
    assert all(same(models[0], model) for model in models[1:])
    assert not same(models[0], load_model(VALUES, random_seed=1))
    assert VALUES["model_type"] == "llama"
    state = torch.random.get_rng_state()
    load_model(VALUES)
    assert torch.equal(state, torch.random.get_rng_state())


def test_dtype(tmp_path: Path) -> None:
    def dtypes(model: torch.nn.Module) -> set[torch.dtype]:
        return {parameter.dtype for parameter in model.parameters()}

    assert dtypes(load_model({**VALUES, "dtype": "bfloat16"})) == {torch.float32}
    assert dtypes(load_model(VALUES, dtype="bfloat16")) == {torch.bfloat16}
    assert dtypes(load_model(VALUES, dtype=torch.float64)) == {torch.float64}
    load_model(VALUES, dtype="bfloat16").save_pretrained(tmp_path)  # type: ignore[operator]
    assert dtypes(load_model(tmp_path)) == {torch.bfloat16}
    assert dtypes(load_model(tmp_path, dtype="float32")) == {torch.float32}
    with pytest.raises(ConfigError, match=r"model\.dtype: float16 is not supported; expected one of float32"):
        load_model(VALUES, dtype="float16")


def test_gradient_checkpointing_keeps_less(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[bool, int] = {}
    for checkpointing in (False, True):
        model = load_model(VALUES, gradient_checkpointing=checkpointing)
        sizes: list[int] = []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(torch.arange(32)[None], use_cache=False)
        kept[checkpointing] = sum(sizes)
    assert kept[True] < kept[False] / 2


def test_tokenizer_that_does_not_fit() -> None:
    class SentencePiece:
        def vocab_size(self) -> int:
            return 65

    model = load_model(VALUES, tokenizer=range(64))
    assert vocabulary_size(model) == find_vocabulary(model) == 64
    images = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 16,
        "patch_size": 8,
    }
    for other in (torch.nn.Embedding(4, 4), transformers.ViTModel(transformers.ViTConfig(**images))):
        assert find_vocabulary(other) is None
    for tokenizer in (SentencePiece(), range(65), 65):
        with pytest.raises(
            ConfigError, match="the tokenizer has 65 tokens, but LlamaForCausalLM has embeddings for 64"
        ):
            check_tokenizer(model, tokenizer)
    with pytest.raises(ConfigError, match="Linear is no model of transformers"):
        check_tokenizer(torch.nn.Linear(1, 1), 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "transformers knows no model_type 'lama'; did you mean llama"),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_sise": 16}, "llama has no 'hidden_sise'; did you mean hidden_size"),
        ({"hidden_size": "wide"}, "expected int, got str"),
        ({"hidden_size": 18}, "not a multiple of the number of attention heads"),
        ({"model_type": "bert"}, "not a causal language model: bert is an encoder"),
        ({"model_type": "t5"}, "not a causal language model: t5 is an encoder-decoder"),
        ({"model_type": "vit"}, "not a causal language model: vit is nothing that predicts"),
    ],
)
def test_wrong_values(changes: dict[str, Any], message: str) -> None:
    changed = {**VALUES, **changes}
    if changes.get("model_type", "") not in ("", None):
        changed = changes
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(changed)
    assert str(caught.value).startswith("model")
    assert "\n" not in str(caught.value)


def test_wrong_places(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{")
    write_config(tmp_path, model_type="own", auto_map={"AutoConfig": "own.Config"})
    places: list[tuple[str | Path, str]] = [
        (tmp_path / "none", "does not exist; looked for it at"),
        ("./none", "does not exist; looked for it at"),
        ("a/b/c", "does not exist; looked for it at"),
        ("~nobody-of-this-name/x", "does not exist: Could not determine home directory"),
        (tmp_path / "empty", "has no config.json"),
        (tmp_path / "weights.bin", "is a file, but not a config.json"),
        (tmp_path / "bad", "is not a valid JSON file"),
        (tmp_path, "needs code of its own, which is not run here"),
    ]
    for source, message in places:
        with pytest.raises(ConfigError, match=message):
            load_model(source)


def test_hub_name_without_a_network() -> None:
    with pytest.raises(ConfigError, match="'nobody/nothing' is no directory") as caught:
        load_model("nobody/nothing")
    assert "as a name on the Hugging Face Hub it cannot be read" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_incomplete_and_broken_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**VALUES)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)  # without the head
    with pytest.raises(ConfigError, match=r"no weights for 1 tensors of LlamaForCausalLM.*lm_head\.weight"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigError, match="cannot be loaded: Error while deserializing header"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["model.safetensors.index.json", "model.safetensors.incomplete", "model.gguf", "consolidated.00.pth"],
)
def test_weights_that_are_not_there_do_not_become_random(tmp_path: Path, name: str) -> None:
    """An interrupted download must not train from nothing without a word."""
    write_config(tmp_path, **VALUES)
    load_model(tmp_path)
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"has {name}, but no .*safetensors or .*bin: the weights are inc"):
        load_model(tmp_path)
    load_model(tmp_path / "config.json")


def test_missing_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'odcengine\[hf\]'"):
        load_model(VALUES)


# ---- through the configuration -------------------------------------------------------------------------


def config_with(**model: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 4,
        "seed": 7,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "balance": {"max_tokens_per_micro_batch": 16},
        "odc": {"timeout_s": 60, "startup_timeout_s": 90},
        **({"model": model} if model else {}),
    }


def _whole_weights(rank: int, world_size: int) -> dict[str, Any]:
    samples = [{"input_ids": [1, 2, 3 + number]} for number in range(4)]
    config = config_with(config=VALUES, gradient_checkpointing=True)
    engine, _, loader, _ = odcengine.initialize(
        config=config, training_data=TokenDataset.from_samples(samples)
    )
    assert loader is not None
    start = {name: p.full_tensor().clone() for name, p in engine.module.named_parameters()}  # type: ignore
    for minibatch in loader:
        for micro_batch in minibatch:
            engine.backward(engine(micro_batch))
        engine.step()
    checkpointing = engine.module.is_gradient_checkpointing
    engine.close()
    return {"start": start, "checkpointing": checkpointing}


def _mistake(rank: int, world_size: int) -> list[str]:
    messages = []
    given = load_model(VALUES)
    bad_token = TokenDataset.from_samples([{"input_ids": [1, 64]}] * 4)
    for model, config, data in [
        (None, config_with(), None),
        (given, config_with(path="somewhere"), None),
        (None, config_with(path="./nowhere"), None),
        (None, config_with(config=VALUES), bad_token),
    ]:
        try:
            odcengine.initialize(model=model, config=config, training_data=data)
        except ConfigError as error:
            messages.append(str(error))
    return messages


def test_initialize_makes_the_model_of_the_configuration() -> None:
    expected = dict(load_model(VALUES, random_seed=7).named_parameters())
    for result in values(run_ranks(_whole_weights, 2)):
        assert result["checkpointing"]
        assert result["start"].keys() == expected.keys()
        assert all(torch.equal(result["start"][name], expected[name]) for name in expected)


def test_mistakes_in_the_configuration() -> None:
    (messages,) = values(run_ranks(_mistake, 1))
    for message, part in zip(
        messages,
        [
            "odcengine.initialize was given none, and the configuration names none",
            "odcengine.initialize was given one, but the configuration's `model` section",
            "model: './nowhere' does not exist",
            "sample 0 has the token id 64, but the model's vocabulary ends at 63",
        ],
        strict=True,
    ):
        assert part in message
    with pytest.raises(ConfigError, match=r"model\.config: is for random weights, but model\.path names"):
        odcengine.load_config(config_with(path="x", config=VALUES))
    with pytest.raises(ConfigError, match=r"model\.dtype: got 'float16'; .*expected one of float32"):
        odcengine.load_config(config_with(path="x", dtype="float16"))
    with pytest.raises(ConfigError, match=r"model\.config: got 3; expected a mapping"):
        odcengine.load_config(config_with(config=3))
