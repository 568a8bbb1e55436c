"""Preference pairs from a data set on disk on two ranks: one process's gradient, and a model that learns."""

from __future__ import annotations

import json
import math
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_ranks, values
from policy import VOCAB, build, plain_dpo, plain_logprobs

import odcengine
from odcengine.data import TokenDataset
from odcengine.losses import DpoLoss
from odcengine.models import load_model

ROOT = Path(__file__).resolve().parents[2]
LOSS = DpoLoss(beta=0.3)
# Of each pair the tokens of the prompt, of the chosen and of the rejected answer.
LENGTHS = ((3, 6, 2), (1, 1, 7), (4, 3, 3), (2, 5, 4), (2, 1, 1))
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def _reference() -> Any:
    model, generator = build("gpt2"), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def _pairs() -> list[dict[str, Any]]:
    """With log-probabilities of each token by the reference."""
    generator, reference = torch.Generator().manual_seed(2), _reference()
    pairs = []
    for prompt, *answers in LENGTHS:
        asked = torch.randint(3, VOCAB, (prompt,), generator=generator)
        sequences = []
        for answer in answers:
            tokens = torch.cat([asked, torch.randint(3, VOCAB, (answer,), generator=generator)])
            with torch.no_grad():
                known, _ = plain_logprobs(reference, tokens, 1.0)
            mask = [False] * prompt + [True] * answer
            sequences.append({"input_ids": tokens.tolist(), "loss_mask": mask, "ref_logprobs": known})
        pairs.append({"sequences": sequences})
    return pairs


def _on_disk(pairs: list[dict[str, Any]], *, known: bool) -> list[dict[str, Any]]:
    """As a data set takes them: one number for each answer, or none."""
    return [
        {
            "sequences": [
                {
                    **sequence,
                    "ref_logprobs": float(
                        sequence["ref_logprobs"][np.flatnonzero(sequence["loss_mask"])].sum()
                    )
                    if known
                    else None,
                }
                for sequence in pair["sequences"]
            ]
        }
        for pair in pairs
    ]


def _gradients(data: Path, known: bool, strategy: str) -> tuple[float, float, Any, list[list[int]]]:
    odc = {"timeout_s": 60, "startup_timeout_s": 90}
    engine, optimizer, loader, _ = odcengine.initialize(
        model=build("gpt2"),
        reference=None if known else _reference(),
        training_data=TokenDataset.open(data),
        loss_fn=lambda model, micro_batch: LOSS(model, micro_batch, engine.reference),
        config={
            "train_batch_size": len(LENGTHS),
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "data": {"fields": ["ref_logprobs"] if known else []},
            "balance": {"strategy": strategy, "max_tokens_per_micro_batch": 22},
            "odc": {**odc, "transport": "collective"} if strategy == "lb_micro" else odc,
        },
    )
    assert loader is not None
    gradients: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        for name, parameter in engine.module.named_parameters():
            gradients[name] = parameter.grad.full_tensor().clone()  # type: ignore[union-attr]

    optimizer.register_step_pre_hook(keep)
    (minibatch,) = loader
    micro_batches = []
    for micro_batch in minibatch:
        micro_batches.append(list(micro_batch.sequences_per_sample))
        engine.backward(engine(micro_batch))
    step = engine.step()
    engine.close()
    assert step.num_samples == len(LENGTHS)
    return step.loss, step.count, gradients, micro_batches


def _example(name: str, *words: str) -> None:
    before = sys.argv
    sys.argv = [f"{name}.py", *words]
    try:
        runpy.run_path(str(ROOT / "examples" / "dpo" / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv = before


def _run(rank: int, world_size: int, folder: Path) -> list[Any]:
    found = [
        _gradients(folder / "pairs", False, "lb_mini"),
        _gradients(folder / "known", True, "dynamic"),
        _gradients(folder / "known", True, "lb_micro"),
    ]
    os.chdir(folder)
    os.environ["ODC_CONFIG"] = "dpo.json"
    _example("train", "--beta", "0.5")
    _example("precompute", "--out", "toy_known")
    os.environ["ODC_CONFIG"] = "short.json"
    _example("precompute", "--out", "short_known")
    os.environ["ODC_CONFIG"] = "known.json"
    _example("train", "--data", "toy_known", "--steps", "1")
    os.environ["ODC_CONFIG"] = "lora.json"
    _example("train")
    _example("precompute", "--out", "lora_known")
    return found


def _toy_pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """Chosen are answers of small numbers."""
    generator = np.random.default_rng(seed)
    pairs = []
    for _ in range(count):
        asked = generator.integers(0, VOCAB, 3).tolist()
        sequences = []
        for low in (0, VOCAB // 2):
            answer = generator.integers(low, low + VOCAB // 2, 1 + generator.integers(4)).tolist()
            sequences.append({"input_ids": asked + answer, "loss_mask": [0] * 3 + [1] * len(answer)})
        pairs.append({"sequences": sequences})
    return pairs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dpo")
    TokenDataset.write(folder / "pairs", _on_disk(_pairs(), known=False))
    TokenDataset.write(folder / "known", _on_disk(_pairs(), known=True))
    TokenDataset.write(folder / "toy", _toy_pairs(96, 0))
    TokenDataset.write(folder / "toy" / "held_out", _toy_pairs(5, 1))
    load_model(MODEL, random_seed=1).save_pretrained(folder / "model")  # type: ignore[operator]
    config = {
        "train_batch_size": 8,
        "model": {"path": "model", "reference": "model"},
        "data": {"path": "toy", "eval_path": "toy/held_out"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "monitor": {"jsonl": "dpo.jsonl"},
        "odc": {"timeout_s": 60, "startup_timeout_s": 90},
    }
    (folder / "dpo.json").write_text(json.dumps(config))
    # In a random model of this size low ranks alone learn next to nothing.
    saved = ["lm_head", "embed_tokens"]
    faster = {"type": "AdamW", "params": {"lr": 3e-2}}
    lora = {"path": "model", "lora": {"r": 4, "modules_to_save": saved, "reference": True}}
    (folder / "lora.json").write_text(
        json.dumps(config | {"model": lora, "monitor": {"jsonl": "lora.jsonl"}, "optimizer": faster})
    )
    config |= {"model": {"path": "model"}, "data": {"fields": ["ref_logprobs"]}}
    config |= {"monitor": {"jsonl": "known.jsonl"}}
    (folder / "known.json").write_text(json.dumps(config))
    # Pairs have 8 to 14 tokens; some are too long.
    config |= {"balance": {"max_tokens_per_micro_batch": 11}, "data": {"path": "toy", "too_long": "skip"}}
    (folder / "short.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[list[Any]]:
    return values(run_ranks(_run, 2, folder, timeout_s=300))


def test_gradient_is_that_of_one_process(ranks: list[list[Any]]) -> None:
    model = build("gpt2")
    right, _ = plain_dpo(model, _pairs(), LOSS)
    torch.autograd.backward(right)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 1e-4
    for way in range(3):
        for rank in ranks:
            loss, count, gradients, _ = rank[way]
            assert (loss, count) == (pytest.approx(float(right.detach()), rel=1e-10), len(LENGTHS))
            assert gradients.keys() == expected.keys()
            for name, gradient in gradients.items():
                assert float((gradient - expected[name]).abs().max()) <= 1e-10 * largest, name
        # Both answers of each pair were in one micro-batch.
        counts = [number for rank in ranks for micro_batch in rank[way][3] for number in micro_batch]
        assert counts == [2] * len(LENGTHS)


def test_pairs_that_training_skips_are_left_out(ranks: list[list[Any]], folder: Path) -> None:
    lengths = TokenDataset.open(folder / "toy").lengths
    kept = TokenDataset.open(folder / "short_known").lengths
    assert 0 < len(kept) < len(lengths)
    assert kept.tolist() == [length for length in lengths.tolist() if length <= 11]


@pytest.mark.parametrize("written", ["dpo.jsonl", "lora.jsonl"])
def test_the_example_learns(written: str, ranks: list[list[Any]], folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / written).open()]
    told = [line for line in lines if "dpo/margin" in line]
    assert [line["step"] for line in told] == list(range(12))
    assert told[0]["dpo/margin"] == pytest.approx(0, abs=1e-5)  # the model is the reference
    assert told[-1]["dpo/margin"] > 0.5
    assert told[-1]["dpo/accuracy"] >= 0.75
    for line in told:
        margin = line["dpo/chosen_reward"] - line["dpo/rejected_reward"]
        assert line["dpo/margin"] == pytest.approx(margin)
    (evaluated,) = [line for line in lines if "eval/loss" in line]
    assert evaluated["step"] == 12
    assert evaluated["eval/accuracy"] >= 0.6
    assert evaluated["eval/count"] == evaluated["eval/pairs"] == 5
    rewards = evaluated["eval/chosen_reward"], evaluated["eval/rejected_reward"]
    assert evaluated["eval/margin"] == pytest.approx(rewards[0] - rewards[1], rel=1e-4)
    # The same names in training and evaluation.
    names = [{key.partition("/")[2] for key in line if "/" in key} for line in (told[0], evaluated)]
    assert names[0] == {"accuracy", "margin", "chosen_reward", "rejected_reward"}
    assert names[0] < names[1]
    assert evaluated["eval/loss"] < math.log(2)


def test_a_reference_computed_before(ranks: list[list[Any]], folder: Path) -> None:
    """The reference is the model before its first step, so nothing is gained over it there."""
    pairs, known, without = (TokenDataset.open(folder / name) for name in ("toy", "toy_known", "lora_known"))
    assert known.lengths.tolist() == pairs.lengths.tolist()
    assert all(len(pair["sequences"]) == 2 for pair in known)  # type: ignore[attr-defined]
    for number in range(3):  # by the model whose adapters are off: the same
        both = zip(known[number]["sequences"], without[number]["sequences"], strict=True)
        for sequence, other in both:
            assert other["ref_logprobs"] == pytest.approx(sequence["ref_logprobs"], abs=1e-4)
    lines = [json.loads(line) for line in (folder / "known.jsonl").open()]
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert [path.name for path in folder.glob("*.npy")] == []
