"""Rollouts born anywhere are computed once, where the plan or the draw has it; the gradient is right."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import run_ranks, values
from engine.toy import assemble, shard, worst_error
from torch.distributed.tensor import DTensor

import odcengine
from odcengine import OdcEngine
from odcengine.balance import OnlineCost
from odcengine.data import MicroBatch, minibatch
from odcengine.losses import GrpoLoss
from odcengine.rollouts import calls
from rollouts.policy import EPS, KL, logprobs_of, make_policy, make_rollouts, plain_gradient, share_out

STEPS, COUNT = 3, 14
TIMES = {"timeout_s": 100, "startup_timeout_s": 120}
METHODS: dict[str, dict[str, Any]] = {
    "lb_mini": {"balance": {"strategy": "lb_mini"}, "odc": {"transport": "shm"}},
    "dynamic": {"balance": {"strategy": "dynamic"}, "odc": {"transport": "shm"}},
    "collective": {"balance": {"strategy": "lb_micro"}, "odc": {"transport": "collective"}},
    "two nodes": {"balance": {"strategy": "dynamic"}, "odc": {"sharding": "hybrid", "node_size": 1}},
}
LOSS = GrpoLoss(eps_low=EPS, eps_high=EPS, kl_coef=KL)


def _engine(method: str, **balance: Any) -> OdcEngine:
    config = METHODS[method]
    return odcengine.initialize(
        model=make_policy(1),
        reference=make_policy(2),
        config={
            "train_batch_size": 8,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "odc": {**TIMES, **config["odc"]},
            "balance": {"max_tokens_per_micro_batch": 48, **config["balance"], **balance},
        },
    )[0]


def _reference_logprobs(engine: OdcEngine, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
    assert engine.reference is not None
    found = LOSS.logprobs(engine.reference, micro_batch).logprobs
    return {"ref_logprobs": found, "tokens": micro_batch.spread(torch.ones(micro_batch.num_samples))}


def _learn(rank: int, world_size: int, method: str) -> dict[str, Any]:
    with _engine(method) as engine:
        gradients: list[dict[str, torch.Tensor]] = []

        def keep(*_: Any) -> None:
            gradients.append({n: shard(p.grad) for n, p in engine.module.named_parameters()})

        engine.optimizer.register_step_pre_hook(keep)
        computed, samples, tokens = [], [], []
        for step in range(STEPS):
            mine = share_out(step, make_rollouts(step, COUNT if step else 1), world_size)[rank]
            scored = engine.annotate(mine, lambda batch: _reference_logprobs(engine, batch))
            names = [sample["name"] for sample in scored]
            minibatch = engine.balance(scored)
            for micro_batch in minibatch:
                computed += [minibatch.samples(position)["name"] for position in micro_batch.sample_ids]
                engine.backward(engine(micro_batch, loss_fn=LOSS))
            metrics = engine.step()
            samples.append((metrics.num_samples, minibatch.num_samples_global, len(names)))
            tokens.append((metrics.num_tokens, metrics.flops))
        costs = engine._balancer._costs
        assert isinstance(costs, OnlineCost)
        return {
            "gradients": gradients,
            "computed": computed,
            "samples": samples,
            "tokens": tokens,
            "remembered": len(costs.state_dict()["steps"]),
        }


def _all_methods(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {method: _learn(rank, world_size, method) for method in METHODS}
    found["exchange"] = _exchange(rank, world_size)
    found["generate"] = _generate(rank)
    found["left"] = {strategy: _left_early(rank, strategy) for strategy in ("lb_mini", "dynamic")}
    found["left loader"] = _left_loader(rank)
    return found


def _exchange(rank: int, world_size: int) -> dict[str, Any]:
    """The parts that balance is made of, one after the other."""
    with _engine("lb_mini") as engine:
        mine = share_out(0, make_rollouts(0, COUNT), world_size)[rank]
        plan = engine.plan(mine)
        moved = engine.exchange(mine, plan)
        empty = engine.balance([])
        pairs = [{"a": [1.0] * (2 + rank), "b": rank}] * (3 - rank)
        batches = list(engine.balance(pairs, lengths=[5] * len(pairs), collate_fn=list))
        pair = {"sequences": [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}], "margin": 1.0}
        scored = engine.annotate([pair], lambda batch: {"at": batch.labels, "mean": batch.cu_seqlens[1:]})
        serials = [engine.draw()]
        engine.step()
        return {
            "plan": plan,
            "moved": {position: sample["name"] for position, sample in moved.items()},
            "born": [rollout["name"] for rollout in mine],
            "empty": (len(empty), empty.num_samples_global),
            "collated": [len(sample["a"]) for batch in batches for sample in batch],
            "drawn": serials,
            "pairs": [
                [(part["at"].tolist(), int(part["mean"])) for part in sample["sequences"]]
                for sample in scored
            ],
        }


def _generate(rank: int) -> dict[str, Any]:
    """Ranks generate different numbers of tokens, one of them none, and train in between."""
    prompts = torch.tensor([[0, 0, 3], [4, 5, 6]])
    asked = {"input_ids": prompts, "attention_mask": (prompts > 0).long(), "do_sample": False}
    plain, found = make_policy(1).eval(), []
    with _engine("lb_mini") as engine:
        for step in range(2):
            for whole in (True, False):
                if rank != step:
                    with engine.generating(whole=whole) as model:
                        answers = model.generate(**asked, max_new_tokens=3 + 8 * rank)
                        assert not model.training
                    right = plain.generate(**asked, max_new_tokens=3 + 8 * rank)
                    found.append(torch.equal(answers, right))
            assert engine.module.training
            assert all(isinstance(parameter, DTensor) for parameter in engine.parameters())
            for micro_batch in engine.balance(make_rollouts(step, 2)):
                engine.backward(engine(micro_batch))
            engine.step()
            whole_weights = {n: p.full_tensor() for n, p in engine.module.named_parameters()}
            plain.load_state_dict(whole_weights, strict=False)
        engine.update_reference()
        with engine.generating(), torch.no_grad():
            assert engine.reference is not None
            tokens = torch.tensor([1, 2, 3, 4])
            pair = [logprobs_of(model, tokens) for model in (engine.reference, plain)]
        return {"equal": found, "reference": float((pair[0] - pair[1]).abs().max())}


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """What this rank warns of loops that were left early."""
    told: list[str] = []
    with contextlib.ExitStack() as stack:
        for logger in (minibatch.logger, calls.logger):
            warn = mock.patch.object(logger, "warning", lambda text, *values: told.append(text % values))
            stack.enter_context(warn)
        yield told


def _left_early(rank: int, strategy: str) -> dict[str, list[str]]:
    """Loops over ``engine.balance`` that one rank, all ranks or an exception leave early."""
    found: dict[str, list[str]] = {}
    samples = make_rollouts(0, 7)

    def learn(name: str, count: int | None, *, step: bool = True) -> None:
        with _warnings() as told:
            batches = engine.balance(samples)
            given = iter(batches) if count is None else itertools.islice(batches, count)
            for micro_batch in given:
                engine.backward(engine(micro_batch))
            if step:
                engine.step()
        found[name] = told

    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "odc": {**TIMES},
        "balance": {"strategy": strategy, "max_tokens_per_micro_batch": 32},
    }
    with odcengine.initialize(model=make_policy(1), config=config)[0] as engine:
        learn("none", None)
        learn("one", 1 if rank else None)
        learn("all", 1)
        learn("not at all", 0, step=False)
        learn("after that", None)
        for name, steps in (("caught", True), ("raised", False)):
            with _warnings() as found[name]:
                try:
                    for micro_batch in engine.balance(samples):
                        raise MemoryError(micro_batch.num_samples)
                except MemoryError:
                    if steps:  # else it goes its way
                        engine.step()
    return found


def _left_loader(rank: int) -> list[list[str]]:
    """The same with minibatches of the loader: left early by rank 1, and passed over by both."""
    found = []
    engine, _, loader, _ = odcengine.initialize(
        model=make_policy(1),
        training_data=make_rollouts(0, 21),
        config={
            "train_batch_size": 7,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "odc": {**TIMES},
            "balance": {"max_tokens_per_micro_batch": 32},
        },
    )
    with engine:
        assert loader is not None
        for number, batches in enumerate(loader):
            with _warnings() as told:
                for micro_batch in itertools.islice(batches, (99, 99 - 98 * rank, 0)[number]):
                    engine.backward(engine(micro_batch))
                engine.step()
            found.append(told)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return values(run_ranks(_all_methods, 2, timeout_s=270))


@pytest.fixture(scope="module")
def right() -> list[dict[str, torch.Tensor]]:
    """The gradients of one process, which steps as the ranks do."""
    model, reference = make_policy(1), make_policy(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    for step in range(STEPS):
        gradients.append(plain_gradient(model, reference, make_rollouts(step, COUNT if step else 1)))
        optimizer.step()
    return gradients


@pytest.mark.parametrize("method", METHODS)
def test_gradient_is_that_of_one_process(
    method: str, ranks: list[dict[str, Any]], right: list[dict[str, torch.Tensor]]
) -> None:
    shards = [found[method]["gradients"] for found in ranks]
    gradients = [assemble(list(of_step)) for of_step in zip(*shards, strict=True)]
    assert worst_error(gradients, right) < 1e-10


@pytest.mark.parametrize("method", METHODS)
def test_each_rollout_is_computed_once(method: str, ranks: list[dict[str, Any]]) -> None:
    computed = Counter(name for found in ranks for name in found[method]["computed"])
    everything = [r["name"] for step in range(STEPS) for r in make_rollouts(step, COUNT if step else 1)]
    assert computed == Counter(everything)
    for step, told in enumerate(zip(*(found[method]["samples"] for found in ranks), strict=True)):
        count = COUNT if step else 1
        assert {(samples, total) for samples, total, _ in told} == {(count, count)}
        assert sum(scored for _, _, scored in told) == count
    # The monitor counts what was trained, not what was annotated.
    assert {found[method]["remembered"] for found in ranks} == {STEPS}  # steps that costs are learned from
    for step, (tokens, flops) in enumerate(ranks[0][method]["tokens"]):
        rollouts = make_rollouts(step, COUNT if step else 1)
        assert tokens == sum(len(rollout["input_ids"]) for rollout in rollouts)
        assert flops > 0


def test_a_loop_that_is_left_early_is_told(ranks: list[dict[str, Any]]) -> None:
    first, second = (found["left"]["lb_mini"] for found in ranks)
    for quiet in (first["none"], second["none"], first["one"]):
        assert quiet == []
    for told in (second["one"], first["all"], second["all"]):
        assert len(told) == 1
        assert re.search(
            r"rank \d left its loop over engine.balance\(\) after 1 of [2-5] micro-batches, with [1-6] "
            "samples left: they are in no step, no other rank has them",
            told[0],
        )
    assert second["one"][0].startswith("step 1: rank 1 ")
    for rank, found in enumerate((first, second)):
        (told,) = found["after that"]
        assert told.startswith(
            "balance: no engine.step() has followed the last engine.balance(), whose loop "
        )
        assert f"rank {rank} left after 0 of " in told
        assert "after 1 of" in found["caught"][0]
        assert found["raised"] == []


def test_a_loop_over_what_is_drawn_is_told_where_all_ranks_leave_it(ranks: list[dict[str, Any]]) -> None:
    for found in (found["left"]["dynamic"] for found in ranks):
        assert found["none"] == found["one"] == found["raised"] == []
        for told in (found["all"], found["caught"]):
            assert "after 1 micro-batches, before all 14 samples were drawn: they are in no step" in told[0]
            assert "no rank has drawn the rest" in told[0]
        assert "before all 14 samples were drawn" in found["after that"][0]


def test_a_minibatch_of_the_loader_that_is_left_early(ranks: list[dict[str, Any]]) -> None:
    first, second = (found["left loader"] for found in ranks)
    assert [len(told) for told in first] == [0, 0, 1]
    assert [len(told) for told in second] == [0, 1, 1]
    assert "step 1: rank 1 left its loop over the loader's minibatch after 1 of " in second[1][0]
    assert "step 2: rank 0 left its loop over the loader's minibatch after 0 of " in first[2][0]


def test_rollouts_go_where_the_plan_has_them(ranks: list[dict[str, Any]]) -> None:
    first, second = (found["exchange"] for found in ranks)
    assert first["plan"] == second["plan"]
    names = first["born"] + second["born"]
    assert sorted(names) == sorted(rollout["name"] for rollout in make_rollouts(0, COUNT))
    for rank, found in enumerate((first, second)):
        planned = {position for group in first["plan"].micro_batches[rank] for position in group}
        assert found["moved"] == {position: names[position] for position in planned}
    assert first["empty"] == second["empty"] == (0, 0)
    assert sorted(first["collated"] + second["collated"]) == [2, 2, 2, 3, 3]
    assert sorted(first["drawn"] + second["drawn"]) == [0, 1]
    # What is said of a position belongs to the token behind it: here that token itself.
    assert first["pairs"] + second["pairs"] == [[([0, 2, 3], 3), ([0, 5], 5)]] * 2


def test_generation_equals_that_of_the_whole_model(ranks: list[dict[str, Any]]) -> None:
    """With and without whole parameters, padded on the left, before and after packed rows were trained."""
    for found in ranks:
        assert found["generate"]["equal"] == [True, True]
        assert found["generate"]["reference"] < 1e-12


# ---- nodes, directories, learned costs ---------------------------------------------------------------------


def _two_by_two(rank: int, world_size: int) -> dict[str, Any]:
    """Two nodes of two ranks: each rank serves one of the other node."""
    config = {**METHODS["two nodes"], "odc": {"sharding": "hybrid", "node_size": 2}}
    METHODS["two nodes"] = config  # of this process
    return _learn(rank, world_size, "two nodes")


@pytest.mark.soak
def test_nodes_of_several_ranks(right: list[dict[str, torch.Tensor]]) -> None:
    found = values(run_ranks(_two_by_two, 4, timeout_s=270))
    gradients = [assemble(list(of_step)) for of_step in zip(*(f["gradients"] for f in found), strict=True)]
    assert worst_error(gradients, right) < 1e-10
    assert sum(len(f["computed"]) for f in found) == 2 * COUNT + 1


def _from_directory(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Model and reference from files, in bf16, with a loader beside; costs are learned from both."""
    engine, _, loader, _ = odcengine.initialize(
        reference=folder,
        training_data=[{"input_ids": [1, 2, 3, 4]}] * 8,
        config={
            "train_batch_size": 4,
            "model": {"path": folder},
            "bf16": {"enabled": True},
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "odc": TIMES,
            "balance": {"max_tokens_per_micro_batch": 48},
        },
    )
    with engine:
        assert loader is not None
        assert engine.reference is not None
        for minibatch in loader:
            for micro_batch in minibatch:
                engine.backward(engine(micro_batch))
            engine.step()
        both = engine.annotate(
            make_rollouts(rank, 4),
            lambda batch: {
                name: LOSS.logprobs(model, batch).logprobs
                for name, model in (("new", engine.module), ("ref", engine.reference))
            },
        )
        for step in range(8):
            for micro_batch in engine.balance(make_rollouts(step, 4)):
                engine.backward(engine(micro_batch))
            engine.step()
        plan = engine.plan(make_rollouts(9, 6))
        return {
            "difference": max(float((sample["new"] - sample["ref"]).abs().max()) for sample in both),
            "dtype": next(engine.reference.parameters()).dtype,
            "fitted": loader.cost.fit().num_steps,
            "plan": plan,
        }


@pytest.mark.soak
def test_models_from_directories(tmp_path: Path) -> None:
    make_policy(3).float().save_pretrained(tmp_path)
    found = values(run_ranks(_from_directory, 2, str(tmp_path), timeout_s=270))
    for of_rank in found:
        assert of_rank["difference"] == 0
        assert of_rank["dtype"] == torch.bfloat16
        assert of_rank["fitted"] == 10  # two minibatches of the loader, eight of the script's
    assert found[0]["plan"] == found[1]["plan"]
