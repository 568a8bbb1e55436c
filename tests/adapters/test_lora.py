"""LoRA and partial freezing on two ranks: gradients, memory, traffic, checkpoints and what leaves."""

from __future__ import annotations

import contextlib
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, values
from odc_tools.cli import main
from torch.distributed.tensor import DTensor

import odcengine
from odcengine.balance import CostModel
from odcengine.config import load_config
from odcengine.errors import ConfigError
from odcengine.models import load_model
from odcengine.models.adapter import add_lora, freeze, make_masters
from odcengine.models.shapes import model_shapes
from odcengine.sharding.wrap import block_modules, check_model

peft = pytest.importorskip("peft")

VOCAB, STEPS = 33, 2
MODEL: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
PLAIN = {"r": 3, "target_modules": ["q_proj", "down_proj"]}
CASES: dict[str, dict[str, Any]] = {  # the rest of the `model` section
    "lora": {"lora": PLAIN, "gradient_checkpointing": True},
    "saved": {"lora": {**PLAIN, "modules_to_save": ["embed_tokens"], "bias": "lora_only"}},
    "dora": {"lora": {**PLAIN, "use_dora": True, "use_rslora": True}},
    "all-linear": {"lora": {"r": 2}, "freeze": ["*.layers.0.*"]},
    "partial": {"freeze": ["model.embed_tokens.*", "*.layers.0.*", "*bias"]},
}


def micro_batches(step: int) -> list[list[torch.Tensor]]:
    """For each of two ranks: none to three rows of tokens."""
    chance = random.Random(step)
    generator = torch.Generator().manual_seed(step)
    counts = [(3, 0), (1, 2)][step % 2]
    return [
        [torch.randint(VOCAB, (1, chance.randrange(3, 9)), generator=generator) for _ in range(count)]
        for count in counts
    ]


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    tokens = tokens.to(next(model.parameters()).device)
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(wide, tokens[0, 1:], reduction="sum")


def config_for(section: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": "auto",
        "steps_per_print": 0,
        "model": section,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
        "odc": {"timeout_s": 60},
        **more,
    }


def local(tensor: Any) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.detach().to_local().clone()


def train(
    rank: int, section: dict[str, Any], *, steps: int = STEPS, model: Any = None, **more: Any
) -> tuple[odcengine.OdcEngine, dict[str, Any]]:
    """Train; the engine is left open, the caller closes it."""
    engine, optimizer, _, _ = odcengine.initialize(model=model, config=config_for(section, **more))
    gradients: list[dict[str, torch.Tensor]] = []
    named = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append({n: local(p.grad) for n, p in named.items() if p.grad is not None})
    )
    pushed = []
    assert engine.transport is not None
    for step in range(engine.global_steps, steps):
        engine.transport.traffic.pushed_bytes = 0
        for tokens in micro_batches(step)[rank]:
            engine.backward(loss_of(engine, tokens), count=tokens.numel() - 1)
        pushed.append(engine.transport.traffic.pushed_bytes)
        engine.step()
    groups = engine._sharding.groups
    return engine, {
        "gradients": gradients,
        "pushed": pushed,
        "trained": {name: (p.numel(), tuple(p.shape)) for name, p in named.items()},
        "weights": {name: local(p) for name, p in named.items()},
        "accumulators": sum(w.local.nbytes for w in engine._sharding._accumulators),  # type: ignore[attr-defined]
        "padded": sum(entry.numel for group in groups for entry in group.trainable),
        "held": sum(len(group["params"]) for group in optimizer.param_groups),
        "dtypes": sorted({(str(p.dtype), p.requires_grad) for p in engine.module.parameters()}),
        "full": sorted(name for name, p in engine.module.named_parameters() if not isinstance(p, DTensor)),
    }


def _ranks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Everything that two ranks try, one after the other."""
    base, found = str(Path(folder) / "base"), {}
    for name, section in CASES.items():
        engine, found[name] = train(rank, {"path": base, "dtype": "float64", **section})
        engine.close()
    found["hybrid"] = _hybrid(rank, base)
    engine, found["bf16"] = train(rank, {"path": base, **CASES["lora"]}, bf16={"enabled": True})
    engine.close()
    engine, found["mixed"] = train(rank, {"path": base, **CASES["lora"]})
    engine.close()
    found["out"] = _save_and_resume(rank, folder, base)
    found["refused"] = _refused(base)
    return found


def _hybrid(rank: int, base: str) -> dict[str, Any]:
    """Two nodes of one rank: frozen parameters travel between nodes once, trained ones once a step."""
    section = {"path": base, "dtype": "float64", **CASES["lora"]}
    odc = {"timeout_s": 60, "sharding": "hybrid", "node_size": 1}
    engine, _, _, _ = odcengine.initialize(config=config_for(section, odc=odc))
    for tokens in micro_batches(0)[rank]:
        engine.backward(loss_of(engine, tokens), count=tokens.numel() - 1)
    exchanged = engine.step().exchanged_bytes
    trained = sum(entry.numel * 8 for group in engine._sharding.groups for entry in group.trainable)
    frozen = sum(group.nbytes for group in engine._sharding.groups) - trained
    with torch.no_grad():
        logits = engine(input_ids=torch.arange(5)[None], use_cache=False).logits.clone()
    engine.close()
    return {"exchanged": exchanged, "trained": trained, "frozen": frozen, "logits": logits}


def _save_and_resume(rank: int, folder: str, base: str) -> dict[str, Any]:
    """Train on, save, resume; write the adapter; go on from it as a new one."""
    section = {"path": base, "dtype": "float32", **CASES["saved"]}
    checkpoint = {"dir": str(Path(folder) / "checkpoints")}
    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    engine, before = train(rank, section, checkpoint=checkpoint, optimizer=adam)
    engine.save_checkpoint()
    engine.save_pretrained(Path(folder) / "live")
    logits = _logits(engine)
    more, _ = _more(rank, engine), engine.close()
    engine, _ = train(rank, section, checkpoint=checkpoint, optimizer=adam)
    resumed, begun = _logits(engine), engine.global_steps
    again = _more(rank, engine)
    engine.close()
    adapter = {"path": base, "dtype": "float32", "lora": {"path": str(Path(folder) / "live")}}
    engine, _ = train(rank, adapter, steps=0)
    second = _logits(engine)
    engine.close()
    return {
        "logits": logits,
        "resumed": resumed,
        "begun": begun,
        "second": second,
        "more": more,
        "again": again,
        "full": before["full"],
    }


def _logits(engine: odcengine.OdcEngine) -> torch.Tensor:
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=torch.arange(8)[None], use_cache=False).logits.clone()
    engine.train()
    return logits


def _more(rank: int, engine: odcengine.OdcEngine) -> float:
    for tokens in micro_batches(1)[rank]:
        engine.backward(loss_of(engine, tokens), count=tokens.numel() - 1)
    return engine.step().grad_norm


def _refused(base: str) -> list[str]:
    """Raised on both ranks before anything is shared."""
    told = []
    for section in (
        {"path": base, "lora": {"target_modules": ["no_such_module"]}},
        {"path": base, "lora": {"path": "/no/such/adapter"}},
        {"path": base, "freeze": ["layers.*"]},
        {"path": base, **CASES["saved"]},
    ):
        with pytest.raises(ConfigError) as refusal:
            odcengine.initialize(config=config_for(section))
        told.append(str(refusal.value))
    return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora")
    load_model(MODEL, dtype="bfloat16", random_seed=5).save_pretrained(path / "base")  # type: ignore[operator]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / "base" / name).write_text("{}")
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return values(run_ranks(_ranks, 2, str(folder), timeout_s=200))


def one_process(folder: Path, section: dict[str, Any], dtype: str | None = "float64") -> Any:
    """The model of a section as ``odcengine.initialize`` makes it, whole."""
    settings = load_config(config_for({"path": "x", **section})).model
    model = load_model(
        folder / "base", dtype=dtype, gradient_checkpointing=section.get("gradient_checkpointing", False)
    )
    if settings.lora is not None:
        model = add_lora(model, settings.lora, base=None)
    freeze(model, settings.freeze or ())
    return model.train()


def reference(folder: Path, section: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Gradients of the same minibatches in one process."""
    model = one_process(folder, section)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.3)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = [tokens for share in micro_batches(step) for tokens in share]
        count = sum(tokens.numel() - 1 for tokens in rows)
        for tokens in rows:
            loss_of(model, tokens).backward()
        for p in trained.values():  # not the loss: norms round to float32 on the way
            if p.grad is not None:
                p.grad /= count
        found.append({name: p.grad.clone() for name, p in trained.items() if p.grad is not None})
        optimizer.step()
    return found


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(name: str, ranks: list[dict[str, Any]], folder: Path) -> None:
    right = reference(folder, CASES[name])
    for step, expected in enumerate(right):
        shards = [rank[name]["gradients"][step] for rank in ranks]
        assert shards[0].keys() == shards[1].keys() == expected.keys()
        scale = max(float(value.abs().max()) for value in expected.values())
        for key, value in expected.items():
            found = torch.cat([shard[key] for shard in shards])
            assert float((found - value).abs().max()) <= 1e-10 * scale, key


@pytest.mark.parametrize("name", CASES)
def test_only_what_is_trained_has_gradient_memory_and_traffic(
    name: str, ranks: list[dict[str, Any]], folder: Path
) -> None:
    model = one_process(folder, CASES[name])
    trained = {n: (p.numel(), tuple(p.shape)) for n, p in model.named_parameters() if p.requires_grad}
    padded = sum(-(-shape[0] // 2) * numel // shape[0] for numel, shape in trained.values())
    for rank, found in enumerate(r[name] for r in ranks):
        assert found["trained"] == trained
        assert found["held"] == len(trained)
        assert found["padded"] == padded
        assert found["accumulators"] == 8 * padded  # float64
        assert found["full"] == []
        # Each backward hands over each trained parameter once: the rows of both owners.
        assert found["pushed"] == [len(micro_batches(s)[rank]) * 2 * 8 * padded for s in range(STEPS)]
    assert padded < 0.75 * sum(p.numel() for p in model.parameters())


def test_frozen_parameters_cross_nodes_once(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["hybrid"] for rank in ranks)
    assert first["frozen"] > 3 * first["trained"] > 0
    # Sums to the other node and trained parameters from it; nothing of the base.
    assert first["exchanged"] == second["exchanged"] == 2 * first["trained"]
    assert torch.equal(first["logits"], second["logits"])


def test_frozen_weights_stay_in_16_bits(ranks: list[dict[str, Any]]) -> None:
    for name in ("bf16", "mixed"):
        for found in (rank[name] for rank in ranks):
            assert found["dtypes"] == [("torch.bfloat16", False), ("torch.float32", True)]
            assert found["accumulators"] == 4 * found["padded"]
    # With bf16 what travels is bf16; else fp32 adapters are pulled beside a bf16 base, in one group.
    pushed = [[sum(rank[name]["pushed"]) for rank in ranks] for name in ("bf16", "mixed")]
    assert [2 * nbytes for nbytes in pushed[0]] == pushed[1]


def _peft_logits(base: Path, adapter: Path) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(8)[None], use_cache=False).logits
    return found


def _export(folder: Path, out: str, *options: str) -> tuple[int, str]:
    """``odc export``; its exit code and what it says."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(["export", str(folder / "checkpoints"), str(folder / out), *options])
    return code, said.getvalue()


def test_saved_resumed_and_loaded_by_peft(ranks: list[dict[str, Any]], folder: Path) -> None:
    import transformers

    out = ranks[0]["out"]
    assert out["begun"] == STEPS
    assert torch.equal(out["resumed"], out["logits"])
    assert torch.equal(out["second"], out["logits"])
    assert out["again"] == pytest.approx(out["more"], rel=1e-6)
    code, said = _export(folder, "exported")
    assert code == 0, said
    assert "the adapter of" in said
    for name in ("live", "exported"):
        files = {path.name for path in (folder / name).iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors"} <= files
        settings = json.loads((folder / name / "adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == str(folder / "base")
        torch.testing.assert_close(
            _peft_logits(folder / "base", folder / name), out["logits"], rtol=1e-5, atol=1e-6
        )
    # The base is not in the checkpoint, only what says which it was.
    (step,) = (path for path in (folder / "checkpoints").iterdir() if path.name.startswith("step_"))
    from torch.distributed.checkpoint import FileSystemReader

    saved = FileSystemReader(step).read_metadata().state_dict_metadata
    names = [name for name in saved if name.startswith("model.")]
    assert any("lora_A" in name for name in names)
    assert not any("base_layer.weight" in name or "original_module" in name for name in names)
    # Merged it is a model of transformers, with the base's dtype and tokenizer.
    code, said = _export(folder, "merged", "--merge")
    assert code == 0, said
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged", dtype="auto").eval()
    assert model.dtype == torch.bfloat16
    assert (folder / "merged" / "tokenizer.json").is_file()
    with torch.no_grad():
        merged = model.float()(input_ids=torch.arange(8)[None], use_cache=False).logits
    exact = out["logits"]
    torch.testing.assert_close(merged, exact, rtol=0.05, atol=0.02)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    with torch.no_grad():
        without = plain.eval()(input_ids=torch.arange(8)[None], use_cache=False).logits
    assert float((exact - without).abs().max()) > 5 * float((merged - exact).abs().max())


def test_merge_needs_a_base_with_weights(folder: Path, ranks: list[dict[str, Any]]) -> None:
    (folder / "empty").mkdir()
    (folder / "empty" / "config.json").write_text((folder / "base" / "config.json").read_text())
    code, said = _export(folder, "other", "--merge", "--base", str(folder / "empty"))
    assert code == 1
    assert "empty has no weights" in said
    assert not (folder / "other").exists()


def test_mistakes_are_named(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        targets, path, freezing, mixed = rank["refused"]
        assert "no_such_module" in targets
        assert "/no/such/adapter has no adapter_config.json" in path
        assert "'layers.*' fits no parameter" in freezing
        assert "model.embed_tokens.weight" in freezing
        assert "base_layer.bias has dtype torch.bfloat16" in mixed
        assert "bf16: {enabled: true}" in mixed


@pytest.mark.parametrize("key", ["target_modules", "modules_to_save"])
def test_one_misspelt_name_among_right_ones(key: str) -> None:
    section = {"target_modules": ["q_proj"], key: ["q_proj", "v_porj"]}
    lora = load_config({"train_batch_size": 1, "model": {"config": MODEL, "lora": section}}).model.lora
    assert lora is not None
    with pytest.raises(ConfigError, match=f"{key}: 'v_porj' is the end of no module.*did you mean v_proj"):
        add_lora(load_model(MODEL), lora, base=None)


def test_a_model_that_the_script_gives() -> None:
    """An adapter of the script's own is kept as it is; the section then is refused."""
    from odcengine.build import _build_model

    made = peft.get_peft_model(load_model(MODEL), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert _build_model(load_config(config_for({})), made) is made
    with pytest.raises(ConfigError, match="has an adapter of peft already"):
        _build_model(load_config(config_for({"lora": {}})), made)
    given = _build_model(load_config(config_for({"lora": PLAIN})), load_model(MODEL))
    assert {name.split(".")[-2] for name, p in given.named_parameters() if p.requires_grad} == {"default"}


class Params4bit(torch.nn.Parameter):
    """By the name that bitsandbytes gives it."""


def test_quantised_weights_are_refused() -> None:
    model: Any = load_model(MODEL)
    check_model(model, block_modules(model), "cpu")
    model.is_quantized, model.quantization_method = True, "gptq"
    with pytest.raises(ConfigError, match=r"quantised \(gptq\).*bfloat16"):
        check_model(model, block_modules(model), "cpu")
    model.is_quantized = False
    packed = Params4bit(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    model.model.layers[0].mlp.up_proj.weight = packed
    with pytest.raises(ConfigError, match=r"up_proj\.weight is packed by bitsandbytes"):
        check_model(model, block_modules(model), "cpu")


def test_masters_are_made_of_what_is_trained() -> None:
    model = load_model(MODEL, dtype="bfloat16")
    freeze(model, ["*layers.0.*"])
    make_masters(model)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.bfloat16 if "layers.0" in name else torch.float32), name


def test_plan_knows_what_is_trained(folder: Path) -> None:
    for section in ({"lora": {"r": 4}}, CASES["dora"], CASES["saved"], CASES["partial"]):
        settings = load_config(config_for({"path": str(folder / "base"), **section}))
        shapes = model_shapes(settings)
        model = one_process(folder, section, dtype=None)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert shapes["num_trained"] == trained
        assert shapes["num_parameters"] == sum(p.numel() for p in model.parameters())


def test_cost_of_tokens_whose_weights_are_frozen() -> None:
    model = load_model(MODEL)
    full = CostModel.for_model(model)
    half = CostModel.for_model(model, trained=0.0)
    assert half.linear == pytest.approx(full.linear * 4 / 6)
    assert half.quadratic == full.quadratic
