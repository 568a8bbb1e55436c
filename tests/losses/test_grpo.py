"""GRPO and its variants: one loss over all ranks, equal to the papers' formulas in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_ranks, values
from policy import LENGTHS, VOCAB, make_answers, plain_grpo, plain_logprobs, random_split

import odcengine
from odcengine.data import pack_samples
from odcengine.losses import (
    GRPO_METRICS,
    GrpoLoss,
    causal_lm_logprobs,
    linear_loss,
)
from odcengine.models import prepare_model

transformers = pytest.importorskip("transformers")

FIELDS = ("advantages", "old_logprobs", "ref_logprobs")
LOSSES = {
    "grpo": GrpoLoss(normalize_by="sequence", kl_coef=0.04),
    "dapo": GrpoLoss(eps_high=0.28, entropy_coef=0.01, temperature=0.7),
    "dr_grpo": GrpoLoss(normalize_by="dr_grpo", max_completion_length=16),
    "gspo": GrpoLoss(normalize_by="sequence", ratio="sequence", eps_low=0.03, eps_high=0.04),
    "dual": GrpoLoss(dual_clip=1.1, kl_coef=0.1, kl="k2", temperature=1.3),
    "k1": GrpoLoss(normalize_by="dr_grpo", max_completion_length=9, kl_coef=0.1, kl="k1", entropy_coef=0.1),
}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("gpt2", {}),
    "head_alone": ("phi", {"wrap": ["PhiDecoderLayer", "Linear"]}),  # its head has a bias
    "collective": ("gpt2", {"transport": "collective"}),
}
NUM_SPLITS = 2


def build(family: str) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}}.get(
        family, {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    )
    config = transformers.AutoConfig.for_model(
        family, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, pad_token_id=0, **shape
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def small_chunks() -> None:
    linear_loss._MIN_CHUNK_TOKENS = 3
    linear_loss._CHUNK_ELEMENTS = 3 * VOCAB


def _train(rank: int, world_size: int, name: str) -> Any:
    small_chunks()
    family, odc = ENGINES[name]
    model = build(family)
    answers = {case: make_answers(model, loss.temperature) for case, loss in LOSSES.items()}
    if name == "tied":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine, optimizer, _, _ = odcengine.initialize(
        model=prepare_model(model),
        config={
            "train_batch_size": len(LENGTHS),
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "odc": {"timeout_s": 30, "startup_timeout_s": 30, **odc},
        },
    )
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        for parameter, tensor in engine.module.named_parameters():
            gradients[parameter] = tensor.grad.full_tensor().clone()  # type: ignore[union-attr]

    optimizer.register_step_pre_hook(keep)
    found = {}
    for case, loss in LOSSES.items():
        for seed in range(NUM_SPLITS):
            split = random_split(len(LENGTHS), world_size, seed, equal=name == "collective")[rank]
            metrics = dict.fromkeys(GRPO_METRICS, 0.0)
            for number, indices in enumerate(split):
                batch = pack_samples(
                    [answers[case][index] for index in indices],
                    fields=FIELDS,
                    pad_to_multiple_of=1 + 4 * (number % 2),
                )
                if number % 2:  # the logprobs first, the loss outside of the model
                    result = loss.of(engine(batch, loss_fn=loss.logprobs), batch)
                else:
                    result = engine(batch, loss_fn=loss)
                engine.backward(result)
                metrics = {key: value + float(result.metrics[key]) for key, value in metrics.items()}
            step = engine.step()
            found[case, seed] = (step.loss, dict(gradients), metrics)
            gradients.clear()
    with torch.no_grad():  # on demand another rank need not do the same
        batch = pack_samples(answers["grpo"][:3]) if rank or name == "collective" else None
        logprobs = None
        if batch is not None:
            logprobs = batch.unpack(engine(batch, loss_fn=causal_lm_logprobs).logprobs)
    engine.close()
    return {"found": found, "logprobs": logprobs}


def _train_all(rank: int, world_size: int) -> dict[str, Any]:
    return {name: _train(rank, world_size, name) for name in ENGINES}


def test_any_split_gives_the_papers_loss() -> None:
    """Loss and gradients of two ranks with random cuts, through the engine, against plain float64."""
    ranks = values(run_ranks(_train_all, 2, timeout_s=120))
    for name, (family, _) in ENGINES.items():
        model = build(family)
        for case, loss in LOSSES.items():
            answers = make_answers(model, loss.temperature)
            model.zero_grad()
            right = plain_grpo(model, answers, loss)
            right.backward()
            expected = {key: tensor.grad for key, tensor in model.named_parameters()}
            largest = max(float(gradient.abs().max()) for gradient in expected.values())
            assert largest > 1e-4
            for seed in range(NUM_SPLITS):
                for rank in ranks:
                    got, gradients, _ = rank[name]["found"][case, seed]
                    assert got == pytest.approx(float(right.detach()), rel=1e-10, abs=1e-12), (name, case)
                    assert gradients.keys() == expected.keys()
                    for key, gradient in expected.items():
                        error = float((gradients[key] - gradient).abs().max())
                        assert error <= 1e-10 * largest, (name, case, seed, key)
                totals, first = (
                    [sum(rank[name]["found"][case, which][2][key] for rank in ranks) for key in GRPO_METRICS]
                    for which in (seed, 0)
                )
                assert totals[0] == sum(length - prompt for length, prompt in LENGTHS)
                assert totals == pytest.approx(first, rel=1e-10)
        for found, answer in zip(ranks[1][name]["logprobs"], make_answers(model, 1.0), strict=False):
            with torch.no_grad():
                right, _ = plain_logprobs(model, torch.tensor(answer["input_ids"]), 1.0)
            prompt = answer["loss_mask"].index(True) if any(answer["loss_mask"]) else len(right)
            right[:prompt] = 0
            torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)
