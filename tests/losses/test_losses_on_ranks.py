"""GRPO and DPO on ranks: one loss over all of them, whatever the cut, equal to plain torch in one process."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from distributed import run_ranks, values
from policy import (
    FIELDS,
    LENGTHS,
    VOCAB,
    build,
    make_answers,
    make_pairs,
    plain_dpo,
    plain_grpo,
    plain_logprobs,
    random_split,
)

import odcengine
from odcengine.data import pack_samples
from odcengine.errors import UsageError
from odcengine.losses import (
    DPO_METRICS,
    GRPO_METRICS,
    DpoLoss,
    GrpoLoss,
    causal_lm_logprobs,
    linear_loss,
)
from odcengine.models import prepare_model

transformers = pytest.importorskip("transformers")

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
    "head_frozen": ("phi", {}),
    "collective": ("gpt2", {"transport": "collective"}),
}
NUM_SPLITS = 2
PREFERENCES = {
    "dpo": (DpoLoss(beta=0.5, label_smoothing=0.1), "lb_mini", {}),
    "ipo": (DpoLoss(beta=0.7, kind="ipo", average=True), "lb_micro", {"transport": "collective"}),
}


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
    if name == "head_frozen":
        model.lm_head.requires_grad_(False)
    engine, optimizer, _, _ = odcengine.initialize(
        model=prepare_model(model),
        config={
            "train_batch_size": len(LENGTHS),
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "odc": {"timeout_s": 60, "startup_timeout_s": 60, **odc},
        },
    )
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        for parameter, tensor in engine.module.named_parameters():
            if tensor.requires_grad:
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


def _prefer(rank: int, world_size: int, name: str) -> Any:
    """Through the loader, whose micro-batches have room for one pair or two."""
    small_chunks()
    loss, strategy, odc = PREFERENCES[name]
    model = build("gpt2")
    engine, optimizer, loader, _ = odcengine.initialize(
        model=model,
        training_data=make_pairs(model),
        loss_fn=loss,
        config={
            "train_batch_size": 3,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "data": {"fields": ["ref_logprobs"]},
            "balance": {"strategy": strategy, "max_tokens_per_micro_batch": 21},
            "odc": {"timeout_s": 60, "startup_timeout_s": 60, **odc},
        },
    )
    assert loader is not None
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        for parameter, tensor in engine.module.named_parameters():
            if tensor.requires_grad:
                gradients[parameter] = tensor.grad.full_tensor().clone()  # type: ignore[union-attr]

    optimizer.register_step_pre_hook(keep)
    totals = dict.fromkeys(DPO_METRICS, torch.zeros(()))
    for minibatch in loader:
        for micro_batch in minibatch:
            result = engine(micro_batch)
            engine.backward(result)
            totals = {key: value + result.metrics[key] for key, value in totals.items()}
        step = engine.step()
    found = (step.loss, step.count, gradients, engine.sum_over_ranks({**totals, "ranks": 1.0}))
    message = ""
    try:
        with engine:
            engine.sum_over_ranks({"name" * (rank + 1): 1.0})
    except UsageError as error:
        message = str(error)
    return (*found, message)


def _train_all(rank: int, world_size: int) -> dict[str, Any]:
    found = {name: _train(rank, world_size, name) for name in ENGINES}
    return {**found, **{name: _prefer(rank, world_size, name) for name in PREFERENCES}}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products on several threads take long where others are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def _results() -> list[Any]:
    return values(run_ranks(_train_all, 2, timeout_s=500))


def right_gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.autograd.backward(loss)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@functools.cache
def _right(family: str, case: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of all answers in one process."""
    model, loss = build(family), LOSSES[case]
    right = plain_grpo(model, make_answers(model, loss.temperature), loss)
    return float(right.detach()), right_gradients(model, right)


def worst(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert found.keys() == right.keys()
    largest = max(float(gradient.abs().max()) for gradient in right.values())
    assert largest > 1e-4
    return max(float((found[name] - gradient).abs().max()) for name, gradient in right.items()) / largest


@pytest.mark.parametrize("name", PREFERENCES)
def test_pairs_of_a_loader(name: str) -> None:
    """Both answers of a pair are where the loader put the pair; the mean is over all pairs."""
    model = build("gpt2")
    pairs = make_pairs(model)
    right, rewards = plain_dpo(model, pairs, PREFERENCES[name][0])
    expected = right_gradients(model, right)
    for loss, count, gradients, totals, message in (rank[name] for rank in _results()):
        assert count == len(pairs)
        assert loss == pytest.approx(float(right.detach()), rel=1e-10)
        assert worst(gradients, expected) <= 1e-10
        assert totals["ranks"] == 2
        assert totals["pairs"] == len(pairs)
        assert totals["accuracy"] == (rewards[:, 0] > rewards[:, 1]).sum()
        assert totals["margin"] == pytest.approx(float((rewards[:, 0] - rewards[:, 1]).sum()))
        assert totals["chosen_reward"] == pytest.approx(float(rewards[:, 0].sum()))
        assert totals["rejected_reward"] == pytest.approx(float(rewards[:, 1].sum()))
        assert "other ranks have other names than name" in message


def test_any_split_gives_the_papers_loss() -> None:
    """Loss and gradients of two ranks with random cuts, through the engine, against plain float64."""
    ranks = _results()
    for name, (family, _) in ENGINES.items():
        model = build(family)
        for case in LOSSES:
            right, expected = _right(family, case)
            if name == "head_frozen":
                expected = {key: value for key, value in expected.items() if "lm_head" not in key}
            for seed in range(NUM_SPLITS):
                for rank in ranks:
                    got, gradients, _ = rank[name]["found"][case, seed]
                    assert got == pytest.approx(right, rel=1e-10, abs=1e-12), (name, case)
                    assert worst(gradients, expected) <= 1e-10, (name, case, seed)
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
