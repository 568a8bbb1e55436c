"""GRPO and its variants: one loss over all ranks, equal to the papers' formulas in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from distributed import run_ranks, values
from policy import LENGTHS, VOCAB, make_answers, plain_grpo, plain_logprobs, random_split

import odcengine
from odcengine.data import pack_samples
from odcengine.errors import UsageError
from odcengine.losses import (
    GRPO_METRICS,
    GrpoLoss,
    LossSum,
    TokenLogprobs,
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


# ---- one micro-batch -----------------------------------------------------------------------------------


def one_token(advantage: float, log_ratio: float, **options: Any) -> tuple[LossSum, torch.Tensor]:
    """An answer of one token, whose probability has changed by so much; its loss and gradient."""
    sample = {"input_ids": [1, 2], "advantages": advantage, "old_logprobs": [0.0, -1.0 - log_ratio]}
    batch = pack_samples([sample], fields=("advantages", "old_logprobs"))
    logprobs = torch.tensor([[-1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    result = GrpoLoss(**options).of(TokenLogprobs(logprobs), batch)
    (gradient,) = torch.autograd.grad(result.loss_sum, logprobs)
    return result, gradient[0]


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "options", "loss", "slope", "clipped"),
    [
        (2.0, math.log(1.1), {}, -2.2, -2.2, None),
        (2.0, math.log(1.3), {}, -2.4, 0.0, "clipped_high"),
        (2.0, math.log(1.25), {"eps_high": 0.28}, -2.5, -2.5, None),
        (2.0, math.log(0.1), {}, -0.2, -0.2, None),  # worse than before: to be corrected without limit
        (-2.0, math.log(0.7), {}, 1.6, 0.0, "clipped_low"),
        (-2.0, math.log(4.0), {}, 8.0, 8.0, None),
        (-2.0, math.log(4.0), {"dual_clip": 3.0}, 6.0, 0.0, "clipped_dual"),
        (2.0, 1000.0, {}, -2.4, 0.0, "clipped_high"),  # the ratio overflows where it does not count
        (-2.0, 1000.0, {"dual_clip": 3.0}, 6.0, 0.0, "clipped_dual"),
        (0.0, 1000.0, {}, 0.0, 0.0, None),
        (-2.0, 1000.0, {}, math.inf, math.inf, None),  # the engine skips such a step
    ],
)
def test_clipping(
    advantage: float, log_ratio: float, options: Any, loss: float, slope: float, clipped: str | None
) -> None:
    result, gradient = one_token(advantage, log_ratio, **options)
    assert float(result.loss_sum.detach()) == pytest.approx(loss)
    assert gradient.tolist() == pytest.approx([slope, 0.0])
    for name in ("clipped_high", "clipped_low", "clipped_dual"):
        assert result.metrics[name] == (name == clipped)
    assert set(result.metrics) == set(GRPO_METRICS)


def test_without_old_logprobs_the_ratio_is_one() -> None:
    """A single update after sampling: the gradient is that of REINFORCE."""
    batch = pack_samples([{"input_ids": [1, 2, 3], "advantages": [0.0, 2.0, -3.0]}], fields=["advantages"])
    logprobs = torch.tensor([[-1.0, -2.0, torch.nan]], requires_grad=True)  # nothing follows the last token
    result = GrpoLoss().of(TokenLogprobs(logprobs), batch)
    (gradient,) = torch.autograd.grad(result.loss_sum, logprobs)
    assert float(result.loss_sum.detach()) == 1.0
    assert gradient.tolist() == [[-2.0, 3.0, 0.0]]
    assert result.count == 2
    assert result.metrics["approx_kl"] == 0


@pytest.mark.parametrize(("normalize_by", "count"), [("token", 3), ("sequence", 2), ("dr_grpo", 3 * 10)])
def test_what_counts(normalize_by: Any, count: float) -> None:
    """Of three answers one is empty; nothing counts in the stand-in for no answer, which has a graph."""
    samples = [
        {"input_ids": [1, 2], "loss_mask": [0, 1], "advantages": 1.0},
        {"input_ids": [3, 4], "loss_mask": [0, 0], "advantages": 1.0},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "advantages": 1.0},
    ]
    loss = GrpoLoss(normalize_by=normalize_by, max_completion_length=10, kl_coef=0.1, ratio="sequence")
    samples = [{**sample, "ref_logprobs": [0.0] * len(sample["input_ids"])} for sample in samples]
    for batch, right in (
        (pack_samples(samples, fields=["advantages", "ref_logprobs"]), count),
        (pack_samples([]), 0),
    ):
        logprobs = torch.full(batch.labels.shape, -0.5, requires_grad=True)
        result = loss.of(TokenLogprobs(logprobs), batch)
        assert result.count == right
        (gradient,) = torch.autograd.grad(result.loss_sum, logprobs)
        assert gradient.isfinite().all()
        assert (gradient != 0).sum() == result.metrics["tokens"]


def test_low_precision_models() -> None:
    """Log-probabilities and losses are float32; a field may be wider and changes nothing."""
    model = prepare_model(build("gpt2").bfloat16())
    answers = [
        {**answer, "old_logprobs": answer["old_logprobs"].float()}
        for answer in make_answers(build("gpt2"), 1.0)
    ]
    loss = GrpoLoss(kl_coef=0.1, entropy_coef=0.01)
    result = loss(model, pack_samples(answers, fields=FIELDS))
    exact = loss(prepare_model(build("gpt2")), pack_samples(answers, fields=FIELDS))
    assert result.loss_sum.dtype == torch.float32
    assert exact.loss_sum.dtype == torch.float64
    assert abs(float(result.loss_sum.detach() - exact.loss_sum.detach())) < 0.02 * exact.count
    torch.autograd.backward(result.loss_sum)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize_by": "tokens"}, "normalize_by is 'tokens'; choose one of token, sequence, dr_grpo"),
        ({"normalize_by": "dr_grpo"}, "give max_completion_length"),
        ({"eps_low": 1.5}, "eps_low is 1.5, but must be in 0 to 1"),
        ({"eps_high": -0.1}, "eps_high is -0.1"),
        ({"dual_clip": 0.5}, "dual_clip is 0.5, but must be above 1, or None"),
        ({"kl": "k0"}, "kl is 'k0', but must be one of k1, k2, k3"),
        ({"kl_coef": -1.0}, "kl_coef is -1.0"),
        ({"entropy_coef": math.nan}, "entropy_coef is nan"),
        ({"ratio": "batch"}, "ratio is 'batch'"),
        ({"temperature": 0.0}, "temperature is 0.0"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GrpoLoss(**options)


def test_fields_that_are_missing() -> None:
    sample = {"input_ids": [1, 2], "advantages": 1.0, "old_logprobs": -1.0, "ref_logprobs": [0.0, -1.0]}
    found = TokenLogprobs(torch.zeros(1, 2))
    with pytest.raises(UsageError, match="has no field advantages, but old_logprobs; name it in"):
        GrpoLoss().of(found, pack_samples([sample], fields=["old_logprobs"]))
    with pytest.raises(UsageError, match="the field old_logprobs has one number for each sequence"):
        GrpoLoss().of(found, pack_samples([sample], fields=["advantages", "old_logprobs"]))
    with pytest.raises(UsageError, match="has no field ref_logprobs"):
        GrpoLoss(kl_coef=1.0).of(found, pack_samples([sample], fields=["advantages"]))
    with pytest.raises(UsageError, match="entropy_coef needs entropies"):
        GrpoLoss(entropy_coef=1.0).of(found, pack_samples([sample], fields=["advantages"]))
