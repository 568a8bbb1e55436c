"""Held-out data between two steps: the same loss as in one process, and training does not notice."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, values

import odcengine
from odcengine import OdcEngine
from odcengine.data import MicroBatch, pack_samples
from odcengine.errors import UsageError
from odcengine.losses import LossSum, causal_lm_loss_sum
from odcengine.models import load_model

VOCAB, BATCH = 16, 4
MODEL = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
WAYS: dict[str, dict[str, Any]] = {
    "on demand": {},
    "drawn": {"balance": {"strategy": "dynamic"}},
    "sequences": {"odc": {"normalize_by": "sequences"}},
    "collective": {"odc": {"transport": "collective"}, "balance": {"strategy": "lb_micro"}},
}


def _samples(count: int, seed: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number in range(count):
        tokens = torch.randint(0, VOCAB, (3 + number * 5 % 9,), generator=generator).tolist()
        samples.append(
            {"input_ids": tokens, "loss_mask": [int(at > number % 3) for at in range(len(tokens))]}
        )
    return samples


TRAINING, HELD_OUT = _samples(10, 0), _samples(7, 1)  # an epoch has 3 steps, the last of 2 samples


def _model() -> Any:
    return load_model(MODEL, dtype="float64", random_seed=3)


def _config(way: dict[str, Any], **sections: Any) -> dict[str, Any]:
    odc = {"timeout_s": 60, "startup_timeout_s": 90, **way.get("odc", {})}
    balance = {"max_tokens_per_micro_batch": 24, "learn_costs": False, **way.get("balance", {})}
    return {
        "train_batch_size": BATCH,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "data": {"num_epochs": 2, **sections.pop("data", {})},
        "odc": odc,
        "balance": balance,
        **sections,
    }


def _with_lengths(model: Any, micro_batch: MicroBatch) -> LossSum:
    """A loss of the script's own, with something to tell."""
    loss = causal_lm_loss_sum(model, micro_batch)
    return LossSum(loss, float(micro_batch.num_samples), {"tokens": torch.tensor(micro_batch.num_tokens)})


def _with_unit(model: Any, micro_batch: MicroBatch) -> LossSum:
    """The same, with something that is a mean over targets, not over what the loss is divided by."""
    loss = _with_lengths(model, micro_batch)
    metrics = {"targets": torch.tensor(micro_batch.num_targets), "surprise": loss.loss_sum}
    return LossSum(loss.loss_sum, loss.count, metrics, unit="targets")


def _train(engine: OdcEngine, loader: Any, *, looks: bool) -> list[tuple[float, float, int | None, float]]:
    """Two epochs; looks at the data in every way that must not change anything."""
    found = []
    for _ in range(2):
        for minibatch in loader:
            if looks:
                engine.evaluate(HELD_OUT[:1])  # fewer than ranks; the loader was asked already
                if loader.strategy != "dynamic":
                    for micro_batch in minibatch:
                        with torch.no_grad():
                            engine(micro_batch)
                    with torch.no_grad():
                        for micro_batch in minibatch:
                            engine.module(**micro_batch.model_inputs())
                    engine.eval()
                    for micro_batch in minibatch:
                        engine(micro_batch)  # somebody forgot torch.no_grad()
                    engine.train()
            for micro_batch in minibatch:
                engine.backward(engine(micro_batch))
            metrics = engine.step()
            found.append((metrics.loss, metrics.count, metrics.num_samples, metrics.grad_norm))
    return found


def _modes_of_parts(engine: OdcEngine) -> tuple[bool, bool]:
    """Whether the whole and a part train after an evaluation; the script has the part not train."""
    *_, part = engine.module.modules()
    part.eval()
    engine.evaluate(HELD_OUT[:1])
    found = engine.module.training, part.training
    part.train()
    return found


def _run_way(rank: int, name: str, folder: Path) -> dict[str, Any]:
    way = WAYS[name]
    engine, _, loader, _ = odcengine.initialize(config=_config(way), model=_model(), training_data=TRAINING)
    plain = _train(engine, loader, looks=False)
    engine.close()

    jsonl = folder / f"{name}.jsonl"
    engine, _, loader, _ = odcengine.initialize(
        config=_config(way, data={"eval_every_n_steps": 2}, monitor={"jsonl": str(jsonl)}),
        model=_model(),
        training_data=TRAINING,
        eval_data=HELD_OUT,
    )
    found = {
        "plain": plain,
        "before": engine.evaluate(),
        "one": engine.evaluate(HELD_OUT[:1], name="one"),
        "own loss": engine.evaluate(HELD_OUT, loss_fn=_with_lengths),
        "unit": engine.evaluate(HELD_OUT[:1], loss_fn=_with_unit, name="unit"),
        "mode": engine.module.training,
        "modes": _modes_of_parts(engine),
        "looked": _train(engine, loader, looks=True),
        "after": engine.evaluate(),
        "is kept": engine.evaluation is not None and engine.evaluation.step == 6,
    }
    engine.report({"script/number": torch.tensor(0.5)})
    for wrong in ("number", "/number"):
        with pytest.raises(UsageError, match="has no group; name it like train/number"):
            engine.report({wrong: 1.0})
    engine.close()
    return found


def _without_loader(rank: int) -> float:
    """Nothing was packed before, and no data is held out."""
    engine, *_ = odcengine.initialize(config=_config({}), model=_model())
    with pytest.raises(UsageError, match=r"give evaluate\(data\), initialize\(eval_data"):
        engine.evaluate()
    loss = engine.evaluate(HELD_OUT).loss
    batch = pack_samples(TRAINING[:2])
    engine.backward(engine(batch))
    with pytest.raises(UsageError, match="evaluate: call it between minibatches"):
        engine.evaluate(HELD_OUT)
    engine.step()
    with pytest.raises(UsageError, match="rank 1 was given other data than rank 0"), engine:
        engine.evaluate(HELD_OUT[rank:])  # ends the job
    return loss


def _run(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    return {**{name: _run_way(rank, name, folder) for name in WAYS}, "without": _without_loader(rank)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("evaluation")
    found = values(run_ranks(_run, 2, folder))
    for name in WAYS:
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        found[0][name]["lines"] = [json.loads(line) for line in lines]
    return found


@functools.cache
def _right(count: int) -> tuple[float, int]:
    """Sum of the losses of the first held-out samples and their number of targets, a sample at a time."""
    model, total, targets = _model().eval(), 0.0, 0
    for sample in HELD_OUT[:count]:
        tokens = torch.tensor([sample["input_ids"]])
        logps = model(tokens).logits[0].log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        mask = torch.tensor(sample["loss_mask"][1:], dtype=torch.bool)
        total -= float(logps[mask].sum().detach())
        targets += int(mask.sum())
    return total, targets


@pytest.mark.parametrize("name", WAYS)
def test_loss_is_that_of_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    for found in (rank[name] for rank in ranks):
        for key, count in (("before", len(HELD_OUT)), ("one", 1)):
            total, targets = _right(count)
            result, divisor = found[key], count if name == "sequences" else targets
            assert result.loss == pytest.approx(total / divisor, rel=1e-10)
            assert result.perplexity == pytest.approx(math.exp(total / targets), rel=1e-10)
            assert (result.count, result.num_samples, result.step) == (divisor, count, 0)
            assert result.num_tokens == sum(len(sample["input_ids"]) for sample in HELD_OUT[:count])
        own = found["own loss"]
        assert own.loss == pytest.approx(_right(len(HELD_OUT))[0] / len(HELD_OUT), rel=1e-10)
        assert own.means == {"tokens": pytest.approx(own.num_tokens / len(HELD_OUT))}
        assert own.perplexity is None
        total, targets = _right(1)
        in_targets = found["unit"]
        assert (in_targets.unit, in_targets.num_units, in_targets.count) == ("targets", targets, 1)
        assert in_targets.means == {"surprise": pytest.approx(total / targets, rel=1e-10)}
        assert f", 1 samples, {targets} targets in " in str(in_targets)
        assert found["mode"]
        assert found["modes"] == (True, False)
        assert found["is kept"]


@pytest.mark.parametrize("name", WAYS)
def test_training_does_not_notice(name: str, ranks: list[dict[str, Any]]) -> None:
    """Neither its losses and gradients, nor what it counts: samples that were only looked at count once."""
    for found in (rank[name] for rank in ranks):
        assert [samples for _, _, samples, _ in found["looked"]] == [4, 4, 2] * 2
        for looked, plain in zip(found["looked"], found["plain"], strict=True):
            assert looked == pytest.approx(plain, rel=1e-10)
        assert found["after"].loss != pytest.approx(found["before"].loss, rel=1e-3)


@pytest.mark.parametrize("name", WAYS)
def test_what_is_written(name: str, ranks: list[dict[str, Any]]) -> None:
    found = ranks[0][name]
    lines = [
        line for line in found["lines"] if "eval/loss" in line and line["eval/num_samples"] == len(HELD_OUT)
    ]
    # By the script, every second step, at the end of each epoch, and by the script.
    assert [line["step"] for line in lines] == [0, 0, 2, 3, 4, 6, 6]
    for line, result in ((lines[0], found["before"]), (lines[-1], found["after"])):
        assert line["eval/loss"] == result.loss
        assert line["eval/perplexity"] == result.perplexity
        assert line["eval/count"] == result.count
    assert lines[-1]["eval/loss"] == lines[-2]["eval/loss"]
    assert [line["one/loss"] for line in found["lines"] if "one/loss" in line] == [found["one"].loss]
    (in_targets,) = [line for line in found["lines"] if "unit/loss" in line]
    assert in_targets["unit/targets"] == _right(1)[1]
    assert in_targets["unit/surprise"] == found["unit"].means["surprise"]
    steps = [line["step"] for line in found["lines"] if "loss" in line]
    assert steps == list(range(6))
    assert found["lines"][-1]["script/number"] == 0.5
    assert found["lines"][-1]["step"] == 5


def test_without_a_loader(ranks: list[dict[str, Any]]) -> None:
    total, targets = _right(len(HELD_OUT))
    assert [rank["without"] for rank in ranks] == [pytest.approx(total / targets, rel=1e-10)] * 2
