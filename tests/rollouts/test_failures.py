"""What goes wrong with rollouts is told on all ranks, with the place and the right form; nothing hangs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed import run_ranks

import odcengine
from odcengine import OdcEngine
from odcengine.balance import make_plan
from odcengine.data import pack_samples
from rollouts.policy import make_policy, make_rollouts

CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "odc": {"timeout_s": 100, "startup_timeout_s": 120},
    "balance": {"max_tokens_per_micro_batch": 32},
}


def _engine(**balance: Any) -> OdcEngine:
    return odcengine.initialize(
        model=make_policy(1),
        config={**CONFIG, "balance": {"max_tokens_per_micro_batch": 32, **balance}},
    )[0]


def _bad_sample(engine: OdcEngine, rank: int) -> None:
    samples = make_rollouts(0, 3)
    if rank == 1:
        samples[2]["advantages"] = object()
    engine.balance(samples)


def _other_fields(engine: OdcEngine, rank: int) -> None:
    samples = make_rollouts(0, 3)
    for sample in samples[: 3 * rank]:
        del sample["old_logprobs"]
    engine.balance(samples)


def _too_long(engine: OdcEngine, rank: int) -> None:
    engine.balance([{"input_ids": [1] * (20 + 13 * rank)}])


def _not_finite(engine: OdcEngine, rank: int) -> None:
    samples = make_rollouts(0, 3)
    if rank == 1:
        samples[2]["advantages"] = float("nan")
    list(engine.balance(samples))


def _not_finite_and_collated(engine: OdcEngine, rank: int) -> None:
    samples = make_rollouts(0, 3)
    if rank == 1:
        samples[2]["old_logprobs"][-1] = float("-inf")
    engine.balance(samples, collate_fn=list)


def _not_finite_since(engine: OdcEngine, rank: int) -> None:
    """A field that the script has put into the micro-batch."""
    for batch in engine.balance(make_rollouts(0, 3)):
        advantages = batch.fields["advantages"] * (float("nan") if rank == 1 else 1)
        engine(dataclasses.replace(batch, fields={**batch.fields, "advantages": advantages}))
    engine.step()


def _of_completions_only(engine: OdcEngine, rank: int) -> None:
    samples = make_rollouts(0, 3)
    if rank == 1:
        samples[1]["old_logprobs"] = samples[1]["old_logprobs"][-1:]
    engine.annotate(samples, lambda batch: {})  # which may replace them
    list(engine.balance(samples))


def _outside_of_the_vocabulary(engine: OdcEngine, rank: int) -> None:
    samples = make_rollouts(0, 3)
    if rank == 1:
        samples[1]["input_ids"] = samples[1]["input_ids"].clone()
        samples[1]["input_ids"][-1] = engine.module.config.vocab_size
    engine.balance(samples)


def _data_outside_of_the_vocabulary(engine: OdcEngine, rank: int) -> None:
    data = [{"input_ids": [1, 2, 3]}, {"input_ids": [1, -2, 3]}]
    odcengine.initialize(model=make_policy(1), config=CONFIG, training_data=data)


def _packed_outside_of_the_vocabulary(engine: OdcEngine, rank: int) -> None:
    if rank == 1:
        engine(pack_samples([{"input_ids": [1, 2]}, {"input_ids": [1, 2], "labels": [1, -1]}]))
    engine.step()


def _another_program(engine: OdcEngine, rank: int) -> None:
    if rank == 0:
        engine.balance(make_rollouts(0, 2))
    engine.step()


def _another_plan(engine: OdcEngine, rank: int) -> None:
    plan = make_plan([5, 6], num_ranks=2, strategy=("lb_mini", "local_sort")[rank], max_tokens=32)
    engine.exchange([{"input_ids": [1] * (5 + rank)}], plan)


def _plan_of_others(engine: OdcEngine, rank: int) -> None:
    plan = make_plan([5, 6], num_ranks=2, strategy="lb_mini", max_tokens=32)
    engine.exchange([{"input_ids": [1, 2]}], plan)


def _over(engine: OdcEngine, rank: int) -> None:
    first = engine.balance(make_rollouts(0, 2))
    engine.balance(make_rollouts(1, 2))
    list(first)


def _too_much(engine: OdcEngine, rank: int) -> None:
    engine.balance([{"input_ids": [1, 2], "image": torch.zeros(200_000)}])


def _annotates_badly(engine: OdcEngine, rank: int) -> None:
    engine.annotate(make_rollouts(0, 2), lambda batch: {"value": torch.zeros(3, 3)})


def _generates_in_the_middle(engine: OdcEngine, rank: int) -> None:
    for micro_batch in engine.balance(make_rollouts(0, 2)):
        engine.backward(engine(micro_batch))
    with engine.generating():
        pass


def _no_reference(engine: OdcEngine, rank: int) -> None:
    engine.update_reference()


CASES: dict[str, tuple[Callable[[OdcEngine, int], None], dict[str, Any], list[str]]] = {
    "a sample that cannot travel": (
        _bad_sample,
        {},
        ["rank 1: sample 2: field 'advantages' is a object; expected a tensor", "rank 1 (host"],
    ),
    "fields differ": (
        _other_fields,
        {},
        ["rank 0 and rank 1 have different fields: old_logprobs"],
    ),
    "too long": (
        _too_long,
        {},
        ["sample 1 has 33 tokens, but a micro-batch holds at most 32 (sample 0 of those that rank 1 gave)"],
    ),
    "not finite": (_not_finite, {}, ["advantages is not finite (nan) (sample 2 of those that rank 1 gave)"]),
    "not finite and collated": (
        _not_finite_and_collated,
        {},
        ["rank 1: sample 2: old_logprobs is not finite (-inf)", "rank 1 (host"],
    ),
    "not finite since": (_not_finite_since, {}, [": advantages is not finite (nan)", "rank 1 (host"]),
    "of completions only": (
        _of_completions_only,
        {},
        ["old_logprobs has shape [1], but there are", "(sample 1 of those that rank 1 gave)"],
    ),
    "outside of the vocabulary": (
        _outside_of_the_vocabulary,
        {},
        ["sample 1 has the token id 11, but the model's vocabulary is 0 to 10"],
    ),
    "outside of the vocabulary in data": (
        _data_outside_of_the_vocabulary,
        {},
        ["sample 1 has the token id -2, but the model's vocabulary is 0 to 10"],
    ),
    "outside of the vocabulary when packed": (
        _packed_outside_of_the_vocabulary,
        {},
        ["sample 1 has the label -1, but the model's vocabulary is 0 to 10; a token that is not to be"],
    ),
    "another program": (
        _another_program,
        {},
        ["ranks ran different programs", "plan(), exchange(), balance() or annotate() in step 0"],
    ),
    "another plan": (_another_plan, {}, ["the plan of ranks [1] differs from rank 0's"]),
    "a plan of other samples": (
        _plan_of_others,
        {},
        ["the plan is of 2 samples with 11 tokens"],
    ),
    "an old minibatch": (_over, {"strategy": "dynamic"}, ["is over"]),
    "too much for the store": (
        _too_much,
        {"strategy": "dynamic", "sample_store_mib": 1},
        ["the 2 samples of all ranks have 1.5 MiB", "more than balance.sample_store_mib: 1"],
    ),
    "annotations of another shape": (_annotates_badly, {}, ["annotate: the function gave value as [3, 3]"]),
    "generating in the middle": (_generates_in_the_middle, {}, ["generating: call it between minibatches"]),
    "no reference": (_no_reference, {}, ["give reference=... to odcengine.initialize"]),
}


def _all_cases(rank: int, world_size: int) -> dict[str, str]:
    told = {}
    for name, (function, balance, _) in CASES.items():
        try:
            with _engine(**balance) as engine:
                function(engine, rank)
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


@pytest.fixture(scope="module")
def told() -> list[dict[str, str]]:
    """What each rank raised; one that hung would have none."""
    return [result.value or {} for result in run_ranks(_all_cases, 2, timeout_s=270)]


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_are_told(name: str, told: list[dict[str, str]]) -> None:
    for found in told:
        assert name in found, f"not told; other cases: {found}"
    for pattern in CASES[name][2]:
        assert any(pattern in found[name] for found in told), [found[name] for found in told]
    assert not any("DeadlineError" in found[name] for found in told)
