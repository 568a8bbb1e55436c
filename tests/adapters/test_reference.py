"""The model without its adapters as reference of preference pairs: the gradient is that of one process."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from distributed import run_ranks, values
from engine.toy import assemble, shard, worst_error
from losses.policy import VOCAB, plain_dpo, plain_logprobs

import odcengine
from odcengine import OdcEngine
from odcengine.config import load_config
from odcengine.data import MicroBatch, pack_samples
from odcengine.errors import ConfigError, UsageError
from odcengine.losses import DpoLoss, LossSum, causal_lm_logprobs
from odcengine.models import WithoutAdapters, load_model, prepare_model
from odcengine.models.adapter import add_lora, freeze

pytest.importorskip("peft")

STEPS = 3
LOSS = DpoLoss(beta=0.5)
MODEL: dict[str, Any] = {
    "model_type": "gpt2",  # its norms compute in float64
    "vocab_size": VOCAB,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
LORA: dict[str, Any] = {"r": 3, "target_modules": ["c_attn", "c_proj"]}
SAVED = {"lora": {**LORA, "modules_to_save": ["wte"]}}  # tied to the head
CASES: dict[str, dict[str, Any]] = {
    "lb_mini": {"model": {"lora": LORA, "gradient_checkpointing": True}},
    "dynamic": {"model": SAVED, "balance": {"strategy": "dynamic"}},
    # Parameters stay whole after a forward, so peft meets others when it switches adapters on.
    "whole": {"model": {**SAVED, "freeze": ["*h.0*lora_A*"]}, "odc": {"reshard_after_forward": False}},
    "collective": {
        "model": {"lora": LORA},
        "balance": {"strategy": "lb_micro"},
        "odc": {"transport": "collective"},
    },
}
# Of each pair the tokens of the prompt, of the chosen and of the rejected answer.
LENGTHS = ((3, 6, 2), (1, 1, 7), (4, 3, 3), (2, 5, 4), (2, 1, 1))


def make_pairs(base: Any) -> list[dict[str, Any]]:
    """With log-probabilities of each token by the model without adapters."""
    generator = torch.Generator().manual_seed(2)
    pairs = []
    for prompt, *answers in LENGTHS:
        asked = torch.randint(3, VOCAB, (prompt,), generator=generator)
        sequences = []
        for answer in answers:
            tokens = torch.cat([asked, torch.randint(3, VOCAB, (answer,), generator=generator)])
            with torch.no_grad():
                known, _ = plain_logprobs(base, tokens, 1.0)
            mask = [False] * prompt + [True] * answer
            sequences.append({"input_ids": tokens.tolist(), "loss_mask": mask, "ref_logprobs": known})
        pairs.append({"sequences": sequences})
    return pairs


def base_model(**values: Any) -> Any:
    return load_model({**MODEL, **values}, dtype="float64", random_seed=0)


def adapted_model(section: dict[str, Any], **values: Any) -> Any:
    """As the configuration makes it."""
    lora = load_config(config_for({"model": section})).model.lora
    assert lora is not None
    model = add_lora(base_model(**values), lora, base=None, random_seed=0)
    freeze(model, section.get("freeze", ()))
    return model


def config_for(case: dict[str, Any], *, reference: bool = True) -> dict[str, Any]:
    section = copy.deepcopy(case["model"])
    section["lora"]["reference"] = reference
    return {
        "train_batch_size": len(LENGTHS),
        "seed": 0,
        "model": {"config": MODEL, "dtype": "float64", **section},
        "optimizer": {"type": "SGD", "params": {"lr": 2.0}},
        "balance": {"max_tokens_per_micro_batch": 22, **case.get("balance", {})},
        "odc": {"timeout_s": 60, "startup_timeout_s": 90, **case.get("odc", {})},
    }


def _train(case: dict[str, Any], *, reference: bool) -> dict[str, Any]:
    """With the adapters switched off as reference, or with log-probabilities that are known."""
    config = config_for(case, reference=reference)
    if not reference:
        config["data"] = {"fields": ["ref_logprobs"]}

    def loss_fn(model: Any, micro_batch: MicroBatch) -> LossSum:
        return LOSS(model, micro_batch, engine.reference)

    engine, optimizer, loader, _ = odcengine.initialize(
        config=config, training_data=make_pairs(base_model()), loss_fn=loss_fn
    )
    assert loader is not None
    assert isinstance(engine.reference, WithoutAdapters) == reference
    named = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    gradients: list[dict[str, torch.Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append({n: shard(p.grad) for n, p in named.items() if p.grad is not None})
    )
    steps, pushed, pulled, flags = [], [], [], []
    for _ in range(STEPS):
        (minibatch,) = loader
        traffic = None if engine.transport is None else engine.transport.traffic
        before = (0, 0) if traffic is None else (traffic.pushed_bytes, traffic.pulled_bytes)
        for micro_batch in minibatch:
            result = engine(micro_batch)
            flags.append(_flags(engine) == _flags(engine, named))
            engine.backward(result)
        if traffic is not None:
            pushed.append(traffic.pushed_bytes - before[0])
            pulled.append(traffic.pulled_bytes - before[1])
        step = engine.step()
        steps.append((step.loss, step.count, step.num_samples, step.num_tokens, step.flops))
        steps[-1] += (step.num_micro_batches,)
    if reference:
        with pytest.raises(UsageError, match="the reference is the model without its adapters, which noth"):
            engine.update_reference()
    engine.close()
    return {"gradients": gradients, "steps": steps, "pushed": pushed, "pulled": pulled, "flags": flags}


def _flags(engine: OdcEngine, named: dict[str, Any] | None = None) -> list[tuple[str, bool, bool]]:
    """What of the model is trained, and that it is in training mode; as it is, or as it was at the start."""
    return [
        (
            name,
            p.requires_grad if named is None else name in named,
            named is not None or engine.module.training,
        )
        for name, p in engine.module.named_parameters()
    ]


def _run(rank: int, world_size: int) -> dict[str, Any]:
    return {
        name: {way: _train(case, reference=way == "off") for way in ("off", "known")}
        for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return values(run_ranks(_run, 2, timeout_s=300))


@pytest.fixture(scope="module")
def right() -> dict[str, tuple[list[float], list[dict[str, torch.Tensor]]]]:
    """Of one process: the reference is another model, which never had adapters."""
    pairs, found = make_pairs(base_model()), {}
    for name, case in CASES.items():
        model = adapted_model(case["model"])
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        losses, gradients = [], []
        for _ in range(STEPS):
            loss, _ = plain_dpo(model, pairs, LOSS)
            torch.autograd.backward(loss)
            losses.append(float(loss.detach()))
            gradients.append({name: p.grad.clone() for name, p in trained.items() if p.grad is not None})
            with torch.no_grad():
                for parameter in trained.values():
                    if parameter.grad is not None:
                        parameter -= 2.0 * parameter.grad
                        parameter.grad = None
        found[name] = losses, gradients
    return found


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_that_of_one_process(
    name: str, ranks: list[dict[str, Any]], right: dict[str, tuple[list[float], list[Any]]]
) -> None:
    losses, expected = right[name]
    assert losses[0] - losses[-1] > 0.05  # the adapters have moved the model away from the reference
    for way in ("off", "known"):
        shards = [found[name][way]["gradients"] for found in ranks]
        gradients = [assemble(list(of_step)) for of_step in zip(*shards, strict=True)]
        assert worst_error(gradients, expected) < 1e-10
        for found in ranks:
            assert [step[0] for step in found[name][way]["steps"]] == pytest.approx(losses, rel=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_only_pulls_are_added(name: str, ranks: list[dict[str, Any]]) -> None:
    """Counts, FLOPs and pushes are those of a run whose reference is known; parameters are pulled again."""
    for found in ranks:
        off, known = found[name]["off"], found[name]["known"]
        assert [step[1:] for step in off["steps"]] == [step[1:] for step in known["steps"]]
        assert off["steps"][0][1:3] == (len(LENGTHS), len(LENGTHS))
        assert off["flags"]
        assert all(off["flags"])
    for step in range(STEPS if name != "collective" else 0):
        of_all = [
            [sum(found[name][way][key][step] for found in ranks) for way in ("off", "known")]
            for key in ("pushed", "pulled")
        ]
        assert of_all[0][0] == of_all[0][1] > 0
        assert of_all[1][1] > 0
        assert (of_all[1][0] > of_all[1][1]) == (name != "whole")  # what is there is not pulled again


@pytest.mark.parametrize("section", [{"lora": LORA}, SAVED, {"lora": {**LORA, "use_dora": True}}])
def test_it_is_the_model_without_adapters(section: dict[str, Any]) -> None:
    """In evaluation mode, also while the model trains; what is trained and the modes stay as they are."""
    dropout = {"resid_pdrop": 0.5, "attn_pdrop": 0.5}
    model = prepare_model(adapted_model(section, **dropout))
    freeze(model, ["*h.1*lora_B*"])
    base = prepare_model(base_model(**dropout)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1
    model.transformer.h[0].eval()  # the script's own affair
    modes = [module.training for module in model.modules()]
    trained = [parameter.requires_grad for parameter in model.parameters()]
    assert any(modes)
    reference = WithoutAdapters(model)
    assert reference.train() is reference
    assert reference.config is model.config
    batch = pack_samples([{"input_ids": [1, 2, 3, 4]}, {"input_ids": [5, 6, 7]}])
    found, own, right = (causal_lm_logprobs(m, batch).logprobs for m in (reference, model, base))
    assert not found.requires_grad
    torch.testing.assert_close(found, right.detach(), rtol=1e-12, atol=1e-12)
    assert float((own - right).detach().abs().max()) > 1e-3
    with pytest.raises(ValueError, match="input_ids"):
        reference(use_cache=False)
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == trained
    again = causal_lm_logprobs(model.eval(), batch).logprobs  # the adapters are on again
    assert float((again - right).detach().abs().max()) > 1e-3


def test_what_is_no_reference() -> None:
    with pytest.raises(
        ConfigError, match="GPT2LMHeadModel has no adapter of peft that could be switched off"
    ):
        WithoutAdapters(base_model())
    biased = adapted_model({"lora": {**LORA, "bias": "none"}})
    biased.base_model.model.transformer.h[0].ln_1.bias.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"h\.0\.ln_1\.bias \(of 1 such parameters\) is trained and stays"):
        WithoutAdapters(biased)
    for section, told in (
        ({"lora": {"reference": True, "bias": "all"}}, "needs bias: none, for biases"),
        ({"lora": {"reference": True}, "reference": "models/other"}, "keep one of the two"),
    ):
        with pytest.raises(ConfigError, match=told):
            load_config({"train_batch_size": 1, "model": {"config": MODEL, **section}})
    with pytest.raises(ConfigError, match=r"odc\.backend: deepspeed; expected false"):
        load_config(
            {
                "train_batch_size": 1,
                "model": {"config": MODEL, "lora": {"reference": True}},
                "odc": {"backend": "deepspeed"},
            }
        )
    kept = load_config({"train_batch_size": 1, "model": {"lora": {"path": "a", "reference": True}}})
    assert kept.model.lora is not None
    assert kept.model.lora.reference
    assert load_config(kept.resolved()) == kept
    with pytest.raises(ConfigError, match="the adapter's own settings count; remove bias, r"):
        load_config({"train_batch_size": 1, "model": {"lora": {"path": "a", "bias": "all", "r": 4}}})


def _given(rank: int, world_size: int) -> list[str]:
    """A script's own peft model, with the same names for the reference as for a model of its own."""
    told = []
    config = config_for({"model": {"lora": LORA}}, reference=False)
    config["model"] = {}
    model, other = adapted_model({"lora": LORA}), adapted_model({"lora": LORA})
    for reference in (WithoutAdapters(other), model):
        with pytest.raises(ConfigError) as refusal:
            odcengine.initialize(model=model, config=config, reference=reference)
        told.append(str(refusal.value))
    twice = {**config_for({"model": {"lora": LORA}}), "odc": config["odc"]}
    with pytest.raises(ConfigError) as refusal:
        odcengine.initialize(config=twice, reference=WithoutAdapters(model))
    told.append(str(refusal.value))
    engine, *_ = odcengine.initialize(model=model, config=config, reference=WithoutAdapters(model))
    with engine:
        pairs = make_pairs(base_model())
        samples = engine.annotate(
            pairs, lambda batch: {"found": causal_lm_logprobs(engine.reference, batch).logprobs}
        )
        for sequence in itertools.chain(*(sample["sequences"] for sample in samples)):
            mask = torch.tensor(sequence["loss_mask"])
            torch.testing.assert_close(
                sequence["found"][mask], torch.as_tensor(sequence["ref_logprobs"])[mask]
            )
        for batch in engine.balance(samples):
            engine.backward(engine(batch, loss_fn=LOSS))
        told.append(f"{engine.step().loss:.6f}")
    return told


def test_a_model_that_the_script_gives() -> None:
    """Without a loader, by annotate and balance."""
    [[other, shared, twice, loss]] = values(run_ranks(_given, 1, timeout_s=120))
    assert "WithoutAdapters(...) of another model than the one that is trained" in other
    assert "or for a model with adapters of peft odcengine.models.WithoutAdapters(model)" in shared
    assert "leave reference=... away, or set the key to false" in twice
    assert loss == "0.693147"  # nothing has been learned yet
