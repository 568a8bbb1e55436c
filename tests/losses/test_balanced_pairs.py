"""Preference pairs given to ``engine.balance`` are planned, packed and counted as the loader's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from distributed import run_ranks, values
from engine.toy import assemble, shard, worst_error
from policy import VOCAB, build, plain_dpo, plain_logprobs

import odcengine
from odcengine import OdcEngine
from odcengine.balance import CostModel, OnlineCost, Plan
from odcengine.data import MicroBatch, MinibatchLoader
from odcengine.errors import UsageError
from odcengine.losses import DpoLoss
from odcengine.models import model_flops

MAX_TOKENS, STEPS = 26, 2
STRATEGIES = ("lb_mini", "dynamic", "lb_micro")
LOSS = DpoLoss(beta=0.3)
# Of each pair the tokens of the prompt and of both answers, the chosen one first. The first four have 16 in
# all, in sequences of other lengths.
LENGTHS = ((1, 1, 13), (4, 4, 4), (2, 10, 2), (1, 7, 7), (3, 3, 7), (1, 2, 2), (2, 1, 4))
# Costs that squares decide, so that a plan which took a pair for one sequence would be another one.
COST = CostModel(linear=0.01, quadratic=1.0)


def make_pairs() -> list[dict[str, Any]]:
    generator, reference = torch.Generator().manual_seed(2), build("gpt2")
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    pairs = []
    for number, (prompt, *answers) in enumerate(LENGTHS):
        asked = torch.randint(3, VOCAB, (prompt,), generator=generator)
        sequences = []
        for answer in answers:
            tokens = torch.cat([asked, torch.randint(3, VOCAB, (answer,), generator=generator)])
            with torch.no_grad():
                known, _ = plain_logprobs(reference, tokens, 1.0)
            mask = [False] * prompt + [True] * answer
            sequences.append({"input_ids": tokens.tolist(), "loss_mask": mask, "ref_logprobs": known})
        pairs.append({"sequences": sequences, "name": f"pair {number}"})
    return pairs


def share_of(rank: int) -> list[dict[str, Any]]:
    """Most pairs were made on rank 0."""
    pairs = make_pairs()
    return pairs[:-2] if rank == 0 else pairs[-2:]


def _engine(strategy: str) -> OdcEngine:
    odc: dict[str, Any] = {"timeout_s": 60, "startup_timeout_s": 90}
    return odcengine.initialize(
        model=build("gpt2"),
        loss_fn=LOSS,
        config={
            "train_batch_size": len(LENGTHS),
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "balance": {"strategy": strategy, "max_tokens_per_micro_batch": MAX_TOKENS},
            "odc": {**odc, "transport": "collective"} if strategy == "lb_micro" else odc,
        },
    )[0]


def _train(rank: int, strategy: str) -> dict[str, Any]:
    with _engine(strategy) as engine:
        gradients: list[dict[str, torch.Tensor]] = []

        def keep(*_: Any) -> None:
            gradients.append({n: shard(p.grad) for n, p in engine.module.named_parameters()})

        engine.optimizer.register_step_pre_hook(keep)
        rows, steps = [], []
        for _ in range(STEPS):
            minibatch = engine.balance(share_of(rank))
            for micro_batch in minibatch:
                rows.append(_row_of(micro_batch))
                engine.backward(engine(micro_batch))
            steps.append(engine.step())
        costs = engine._balancer._costs
        assert isinstance(costs, OnlineCost)
        learned = costs.state_dict()["steps"]
        engine._balancer._costs = COST
        plans = [engine.plan(share_of(rank)), engine.balance(share_of(rank)).plan]
        return {
            "gradients": gradients,
            "rows": rows,
            "steps": [(s.loss, s.count, s.num_samples, s.num_tokens, s.flops) for s in steps],
            "work": [step["work"] for step in learned],
            "flops": model_flops(engine.module.config, sequence_lengths()),
            "plans": plans,
        }


def _row_of(micro_batch: MicroBatch) -> dict[str, Any]:
    return {
        "pairs": list(micro_batch.sample_ids),
        "sequences": list(micro_batch.sequences_per_sample),
        "boundaries": micro_batch.cu_seqlens.tolist(),
        "positions": micro_batch.position_ids[0].tolist(),
    }


def _run(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {strategy: _train(rank, strategy) for strategy in STRATEGIES}
    with _engine("lb_mini") as engine:
        pairs = share_of(rank)
        engine._balancer._costs = COST
        # Other lengths than those of the tokens are the script's: it knows what costs.
        given = engine.plan(pairs, lengths=[20 - len(pairs)] * len(pairs))
        found["given"] = given.costs
        engine.step()
        with pytest.raises(UsageError, match=r"sample 0, sequence 1 is a dict without input_ids"), engine:
            engine.balance([{"sequences": [pairs[0]["sequences"][0], {"ref_logprobs": 1.0}]}])
    return found


def sequence_lengths() -> list[int]:
    return [prompt + answer for prompt, *answers in LENGTHS for answer in answers]


def plan_of_the_loader(strategy: str) -> Plan:
    loader = MinibatchLoader(
        make_pairs(),
        train_batch_size=len(LENGTHS),
        rank=0,
        world_size=2,
        strategy=strategy,
        max_tokens=MAX_TOKENS,
        shuffle=False,
        cost=COST,
        draw=lambda serial, total: total,
    )
    return loader.minibatch(0).plan


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return values(run_ranks(_run, 2, timeout_s=270))


@pytest.fixture(scope="module")
def right() -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses and gradients of one process, a sequence at a time."""
    model = build("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss, _ = plain_dpo(model, make_pairs(), LOSS)
        torch.autograd.backward(loss)
        losses.append(float(loss.detach()))
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    return losses, gradients


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradient_is_that_of_one_process(
    strategy: str,
    ranks: list[dict[str, Any]],
    right: tuple[list[float], list[dict[str, torch.Tensor]]],
) -> None:
    shards = [found[strategy]["gradients"] for found in ranks]
    gradients = [assemble(list(of_step)) for of_step in zip(*shards, strict=True)]
    assert worst_error(gradients, right[1]) < 1e-10
    for found in ranks:
        assert [step[0] for step in found[strategy]["steps"]] == pytest.approx(right[0], rel=1e-10)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plan_is_that_of_the_loader(strategy: str, ranks: list[dict[str, Any]]) -> None:
    expected, lengths = plan_of_the_loader(strategy), sequence_lengths()
    for found in ranks:
        assert found[strategy]["plans"] == [expected, expected]
    costs = [0.01 * (a + b) + a * a + b * b for a, b in zip(lengths[::2], lengths[1::2], strict=True)]
    for micro_batches, planned in zip(expected.micro_batches, expected.costs, strict=True):
        assert [sum(costs[at] for at in group) for group in micro_batches] == pytest.approx(list(planned))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_hold_whole_pairs(strategy: str, ranks: list[dict[str, Any]]) -> None:
    rows = [row for found in ranks for row in found[strategy]["rows"]]
    computed = sorted(pair for row in rows for pair in row["pairs"])
    assert computed == sorted([*range(len(LENGTHS))] * STEPS)
    lengths = sequence_lengths()
    for row in rows:
        of_row = [length for pair in row["pairs"] for length in lengths[2 * pair : 2 * pair + 2]]
        assert row["sequences"] == [2] * len(row["pairs"])
        assert row["boundaries"] == [0, *itertools.accumulate(of_row)]
        assert row["positions"] == [position for length in of_row for position in range(length)]
        assert sum(of_row) <= MAX_TOKENS


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_counted(strategy: str, ranks: list[dict[str, Any]]) -> None:
    """Samples are pairs; tokens, FLOPs and what costs are learned from are of sequences."""
    lengths = sequence_lengths()
    squares = sum(length * length for length in lengths)
    for found in (found[strategy] for found in ranks):
        for _, count, num_samples, num_tokens, flops in found["steps"]:
            assert (count, num_samples, num_tokens) == (len(LENGTHS), len(LENGTHS), sum(lengths))
            assert flops / found["flops"] == pytest.approx(1, rel=1e-9)
        for work in found["work"]:
            assert [sum(column) for column in zip(*work, strict=True)][1:] == [sum(lengths), squares]
        assert len(found["work"]) == STEPS


def test_lengths_that_a_script_gives(ranks: list[dict[str, Any]]) -> None:
    """Rank 0 said 15 for each of its five pairs, rank 1 said 18 for each of two."""
    costs = sorted(cost for rank in ranks[0]["given"] for cost in rank)
    assert sum(costs) == pytest.approx(5 * (0.15 + 15**2) + 2 * (0.18 + 18**2))
    assert ranks[0]["given"] == ranks[1]["given"]
