"""The loss computed by the heads of real (tiny, random) models: exact, small, and left alone where wrong."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed import run_ranks, values
from largest_tensor import LargestTensor
from torch import nn

import odcengine
from odcengine.data import MicroBatch, pack_samples
from odcengine.errors import UsageError
from odcengine.losses import causal_lm_loss_sum, linear_loss, token_cross_entropy_sum
from odcengine.losses.fused_head import fuses_loss, loss_head, mark_fused
from odcengine.models import prepare_model

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "phi": {"model_type": "phi"},  # its head has a bias
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
}
CHANGING: dict[str, dict[str, Any]] = {
    "gemma2": {"model_type": "gemma2", "head_dim": 4, "tie_word_embeddings": True},
    "granite": {"model_type": "granite", "logits_scaling": 8.0},
}
# fp32 inside: RMSNorm of llama and qwen2; gpt2 and phi have none.
ERRORS = {"gpt2": 1e-10, "phi": 1e-10, "llama": 5e-6, "qwen2": 5e-6, "gemma2": 5e-6, "granite": 5e-6}
SAMPLES = [[5, 9, 13, 2, 40], [7], [8, 8, 41, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
PROMPTS = [2, 0, 0, 5]  # tokens at the start that are not learned


def build(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    values = {**{**FAMILIES, **CHANGING}.get(family, {"model_type": family}), **changes}
    if values["model_type"] == "gpt2":
        values = {"vocab_size": 48, "bos_token_id": 1, "eos_token_id": 2, **values}
    else:
        values = {**SHAPE, **values}
    config = transformers.AutoConfig.for_model(**values)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def make_batch(**options: Any) -> MicroBatch:
    samples = [
        {"input_ids": tokens, "loss_mask": [position >= prompt for position in range(len(tokens))]}
        for tokens, prompt in zip(SAMPLES, PROMPTS, strict=True)
    ]
    return pack_samples(samples, **options)


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.autograd.backward(loss)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert found.keys() == right.keys()
    scale = max(float(gradient.abs().max()) for gradient in right.values())
    return max(float((found[name] - right[name]).abs().max()) for name in right) / scale


def unfused_loss(model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
    logits = model(**micro_batch.model_inputs(), use_cache=False).logits
    return token_cross_entropy_sum(logits, micro_batch.labels)


def watch_head(model: nn.Module) -> list[torch.Size]:
    """The shapes of what the head returns."""
    shapes: list[torch.Size] = []
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    head.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    return shapes


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "_MIN_CHUNK_TOKENS", 4)
    monkeypatch.setattr(linear_loss, "_CHUNK_ELEMENTS", 4 * 48)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_separate_samples(family: str, checkpointing: bool) -> None:
    """The reference: transformers alone, a sample at a time, torch's cross entropy, all in float64."""
    model = build(family)
    right = torch.zeros((), dtype=torch.float64)
    for tokens, prompt in zip(SAMPLES, PROMPTS, strict=True):
        first = max(prompt, 1)
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, first - 1 : -1]
        targets = torch.tensor(tokens[first:], dtype=torch.int64)
        right = right + nn.functional.cross_entropy(logits, targets, reduction="sum")
    expected = gradients(model, right)
    prepare_model(model)
    assert fuses_loss(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shapes = watch_head(model)
    for multiple in (1, 8):
        loss = causal_lm_loss_sum(model, make_batch(pad_to_multiple_of=multiple))
        assert float(loss.detach()) == pytest.approx(float(right.detach()), rel=ERRORS[family])
        assert worst(gradients(model, loss), expected) <= ERRORS[family]
    assert shapes == [(1, 1, 1)] * 2


def test_the_whole_models_largest_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 tokens x 20,000: nothing near that is made in forward and backward; without fusing it is."""
    num_tokens, vocab = 1024, 20000
    monkeypatch.setattr(linear_loss, "_MIN_CHUNK_TOKENS", 16)
    monkeypatch.setattr(linear_loss, "_CHUNK_ELEMENTS", 2**20)
    model = prepare_model(build("llama", vocab_size=vocab, max_position_embeddings=num_tokens).float())
    batch = pack_samples([{"input_ids": [number % vocab for number in range(num_tokens)]}])
    with LargestTensor() as largest:
        torch.autograd.backward(causal_lm_loss_sum(model, batch))
    assert largest.num_elements <= 2**20
    mark_fused(model, False)
    with LargestTensor() as largest:
        torch.autograd.backward(causal_lm_loss_sum(model, batch))
    assert largest.num_elements == num_tokens * vocab


def test_nothing_remains_on_the_model() -> None:
    model: Any = prepare_model(build("llama"))
    names = [list(dict(model.named_parameters())), list(model.state_dict()), list(vars(model.lm_head))]
    batch = make_batch()
    causal_lm_loss_sum(model, batch)

    def fail(*_: Any) -> None:
        raise ValueError("sample 17 is broken")

    for module in (model.model.norm, model.lm_head):
        hook = module.register_forward_hook(fail)
        with pytest.raises(ValueError, match="sample 17"):
            causal_lm_loss_sum(model, batch)
        hook.remove()
    assert names == [
        list(dict(model.named_parameters())),
        list(model.state_dict()),
        list(vars(model.lm_head)),
    ]
    assert model(batch.input_ids, use_cache=False).logits.shape == (1, 19, 48)


def test_two_models_and_a_copy() -> None:
    """One that computes its loss in the head, one that does not, and a copy, called in turns."""
    fused, plain = prepare_model(build("llama")), build("llama")
    twin = copy.deepcopy(fused)
    prepare_model(plain)
    mark_fused(plain, False)
    shapes = [watch_head(model) for model in (fused, plain, twin)]
    losses = [
        float(causal_lm_loss_sum(model, make_batch()).detach())
        for model in (fused, plain, twin)
        for _ in "12"
    ]
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-12)
    assert [seen[0].numel() for seen in shapes] == [1, 19 * 48, 1]


def test_frozen_head_and_evaluation() -> None:
    model: Any = prepare_model(build("llama"))
    model.lm_head.requires_grad_(False)
    right = gradients(model, unfused_loss(model, make_batch()))
    assert "lm_head.weight" not in right
    assert worst(gradients(model, causal_lm_loss_sum(model, make_batch())), right) <= 5e-6
    with torch.no_grad():
        loss = causal_lm_loss_sum(model.eval(), make_batch())
    assert not loss.requires_grad
    assert float(loss) == pytest.approx(float(unfused_loss(model, make_batch()).detach()), rel=1e-12)


class Wrapper(nn.Module):
    """Hands everything that it has not itself on to the model, as PEFT's do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


class LowRank(nn.Module):
    """An adapter around a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.adapter = nn.Linear(base.in_features, base.out_features, dtype=torch.float64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.base(hidden) + self.adapter(hidden)
        return logits


def test_wrapped_model() -> None:
    model = Wrapper(build("llama"))
    prepare_model(model)
    shapes = watch_head(model)
    loss = causal_lm_loss_sum(model, make_batch())
    assert shapes == [(1, 1, 1)]
    assert float(loss.detach()) == pytest.approx(float(unfused_loss(model, make_batch()).detach()), rel=1e-12)


def test_adapter_around_the_head(caplog: pytest.LogCaptureFixture) -> None:
    """Put in after or before the proof: the logits are used, and say so."""
    model = prepare_model(build("llama"))
    model.lm_head = LowRank(model.lm_head)  # type: ignore[arg-type]
    shapes = watch_head(model)
    loss = causal_lm_loss_sum(model, make_batch())
    assert shapes == [(1, 19, 48)]
    right = unfused_loss(model, make_batch())
    torch.testing.assert_close(loss, right)
    with caplog.at_level(logging.INFO):
        prepare_model(model)
    assert not fuses_loss(model)
    assert "its output embedding is not a plain linear layer" in caplog.text


def capped(forward: Callable[..., Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = change(output.logits)
        return output

    return call


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: 30 * torch.tanh(logits / 30),  # no attribute says so
        lambda logits: logits.clamp(-1e6, 1e6),  # changes no value of the tiny input
        lambda logits: logits.mul_(1.0),
        lambda logits: logits + torch.linspace(-1, 1, 48),  # a bias of its own
    ],
)
@pytest.mark.parametrize("family", ["llama", "granite"])
def test_what_is_done_to_logits_is_found(
    change: Callable[[torch.Tensor], torch.Tensor], family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the model scales its logits as well: all logits are used, and the log says why."""
    model = build(family, **({"logits_scaling": 8.0} if family == "granite" else {}))
    model.forward = capped(model.forward, change)
    with caplog.at_level(logging.INFO):
        prepare_model(model)
    assert not fuses_loss(model)
    assert "whole micro-batches in memory, because the model does not return what its output" in caplog.text
    torch.testing.assert_close(
        causal_lm_loss_sum(model, make_batch()), unfused_loss(model, make_batch()), rtol=1e-12, atol=0
    )


def test_model_changed_after_the_proof() -> None:
    model = prepare_model(build("llama"))
    model.forward = capped(model.forward, lambda logits: logits / 2)
    with pytest.raises(UsageError, match="does not return what its head returns"):
        causal_lm_loss_sum(model, make_batch())
    assert "forward" not in vars(loss_head(model))


def test_autocast_uses_the_logits() -> None:
    model = prepare_model(build("llama").float())
    shapes = watch_head(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        causal_lm_loss_sum(model, make_batch())
    assert shapes == [(1, 19, 48)]


def test_wrong_count_of_targets() -> None:
    batch = make_batch()
    with pytest.raises(UsageError, match=r"num_targets=3, but \d+ of its labels are targets"):
        causal_lm_loss_sum(prepare_model(build("llama")), dataclasses.replace(batch, num_targets=3))


# ---- sharded -------------------------------------------------------------------------------------------


def _train(rank: int, world_size: int, family: str, fused: bool, low: bool, odc: dict[str, Any]) -> Any:
    linear_loss._MIN_CHUNK_TOKENS = 4
    linear_loss._CHUNK_ELEMENTS = 4 * 48
    model = build(family)
    if low:
        model.float()
    if family == "llama":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    shapes = watch_head(model)
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "bf16": {"enabled": low},
        "data": {"shuffle": False},
        "balance": {"strategy": "lb_micro", "max_tokens_per_micro_batch": 16},
        "odc": {"timeout_s": 60, "startup_timeout_s": 90, **odc},
    }
    data = [{"input_ids": tokens} for tokens in [*SAMPLES, *reversed(SAMPLES), SAMPLES[0], SAMPLES[2]]]
    engine, optimizer, loader, _ = odcengine.initialize(
        model=model, config=config, training_data=data, loss_fn=None if fused else unfused_loss
    )
    assert loader is not None
    shapes.clear()
    found: dict[str, torch.Tensor] = {}
    losses: list[float] = []

    def keep(*_: Any) -> None:
        for name, parameter in engine.module.named_parameters():
            local = parameter.grad.to_local().clone()  # type: ignore[union-attr]
            found[f"{len(losses)} {name}"] = local

    optimizer.register_step_pre_hook(keep)
    for minibatch in loader:
        for micro_batch in minibatch:
            engine.backward(engine(micro_batch))
        losses.append(engine.step().loss)
    engine.close()
    return {"gradients": found, "losses": losses, "sizes": {shape.numel() for shape in shapes}}


CASES: list[tuple[str, bool, dict[str, Any]]] = [
    ("gpt2", False, {}),
    ("gpt2", False, {"transport": "collective"}),
    ("llama", False, {}),
    ("llama", False, {"wrap": ["LlamaDecoderLayer", "Linear"]}),  # the head is a group of its own
    ("qwen2", False, {"transport": "collective"}),
    ("qwen2", True, {}),
    ("gemma2", False, {}),  # its head computes the loss of capped logits
    ("granite", False, {"wrap": ["GraniteDecoderLayer", "Linear"]}),  # of scaled ones
]


def _train_all(rank: int, world_size: int) -> list[Any]:
    return [
        [_train(rank, world_size, family, fused, low, odc) for fused in (True, False)]
        for family, low, odc in CASES
    ]


def test_sharded() -> None:
    """Through the engine on two ranks, against the same run with all logits: both minibatches' gradients."""
    for results in values(run_ranks(_train_all, 2, timeout_s=300)):
        for (family, low, _), (fused, plain) in zip(CASES, results, strict=True):
            assert fused["sizes"] == {1}
            assert min(plain["sizes"]) >= 48
            assert len(fused["losses"]) == 2
            assert fused["losses"] == pytest.approx(plain["losses"], rel=1e-2 if low else 1e-7)
            error = worst(fused["gradients"], plain["gradients"])
            assert error <= (2e-2 if low else ERRORS[family]), (family, error)
