"""The engine on GPUs: the same minibatches as on CPU ranks, against the same reference in one process."""

from __future__ import annotations

import functools
import math
import os
import signal
import time
from typing import Any

import pytest
import torch
from distributed import RankResult, run_ranks, values

import odcengine
from engine.test_exactness import BY_NAME, CASES, _norm_tolerance, reference_of
from engine.toy import STEPS, compare, config_for, loss_of, make_model, micro_batches, reference, train
from odcengine.data import pack_samples
from odcengine.models import prepare_model

pytestmark = pytest.mark.multi_gpu

NUM_GPUS = torch.cuda.device_count()
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {}),
    "2x1": (2, {"sharding": "hybrid", "node_size": 1}),
    "collective": (2, {"transport": "collective"}),
    "lockstep": (2, {"lockstep": True}),
    "nvshmem": (2, {"transport": "nvshmem"}),
    "unmapped": (2, {"transport": "nvshmem", "unmapped": True}),
    # Two emulated hosts, full sharding over both: each has a control block of its own.
    "two_hosts": (2, {"transport": "nvshmem", "unmapped": True, "sharding": "full", "node_size": 1}),
    "4_ranks": (4, {}),
    "2x2": (4, {"sharding": "hybrid", "node_size": 2}),
    "8_ranks": (8, {}),
}
EQUAL_COUNTS = ("collective", "lockstep")  # these need the same number of micro-batches on every rank
# Ranks run different experts, or evaluate while others do not; FSDP2's own reduction even needs the same
# parameters to have gradients.
STUCK = {
    "lockstep": ("conditional_wrapped", "evaluation_between"),
    "collective": ("conditional_wrapped", "evaluation_between", "conditional", "fp32"),
}


def _run_all(
    rank: int, world_size: int, names: list[str], equal: bool, odc: dict[str, Any]
) -> dict[str, Any]:
    return {name: train(rank, world_size, BY_NAME[name], equal=equal, **odc) for name in names}


@functools.cache
def _layout(layout: str) -> list[RankResult]:
    world_size, odc = LAYOUTS[layout]
    names = [case.name for case in CASES if case.name not in STUCK.get(layout, ())]
    shared = math.ceil(world_size / NUM_GPUS)  # ranks of a GPU
    return run_ranks(
        _run_all, world_size, names, layout in EQUAL_COUNTS, odc, timeout_s=90 * shared, gpus=True
    )


def _reference_in_process(rank: int, _: int, name: str, world_size: int, equal: bool) -> dict[str, Any]:
    return reference(BY_NAME[name], world_size, equal=equal, device="cuda")


@functools.cache
def _reference_on_gpu(name: str, world_size: int, equal: bool) -> dict[str, Any]:
    """For bf16: a GPU's kernels round their partial sums elsewhere than a CPU's."""
    (found,) = values(run_ranks(_reference_in_process, 1, name, world_size, equal, gpus=True))
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BY_NAME)
def test_equals_one_process(name: str, layout: str) -> None:
    world_size = LAYOUTS[layout][0]
    if LAYOUTS[layout][1].get("transport") == "nvshmem" and world_size > NUM_GPUS:
        pytest.skip("NVSHMEM needs a GPU for each rank")
    if name in STUCK.get(layout, ()):
        pytest.skip("ranks run different modules, which collectives cannot")
    equal = layout in EQUAL_COUNTS
    case = BY_NAME[name]
    in_bf16 = case.exact_steps < STEPS
    if in_bf16:
        right = _reference_on_gpu(name, world_size, equal)
    else:
        right = reference(case, world_size, equal=True) if equal else reference_of(name, world_size)
    errors = compare(case, [result[name] for result in values(_layout(layout))], right)
    noise = 2e-2 if in_bf16 else 0.0
    assert errors["gradient"] <= max(case.grad_tolerance, noise)
    assert errors["weights"] <= max(case.weight_tolerance, noise)
    assert errors["loss"] <= max(case.grad_tolerance, noise)
    assert errors["evaluation"] <= 1e-10
    norms = [norm for norm in values(_layout(layout))[0][name]["norms"] if norm == norm]
    assert norms == pytest.approx(right["norms"], rel=_norm_tolerance(case))


def _killed(rank: int, world_size: int, how: str) -> str:
    case = BY_NAME["untied"]
    engine, _, _, _ = odcengine.initialize(model=make_model(case), config=config_for(case, timeout_s=5))
    with engine:
        for step in range(4):
            for micro_batch in micro_batches(case.name, 1, world_size, equal=True)[rank]:
                loss, count = loss_of(engine, micro_batch)
                if rank == 1 and step == 2:
                    if how == "raise":
                        raise ValueError("out of luck")
                    os.kill(os.getpid(), signal.SIGKILL)
                engine.backward(loss, count=count)
            engine.step()
    return "done"


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_survivor_names_the_lost_rank(how: str) -> None:
    survivor = run_ranks(_killed, 2, how, timeout_s=90, gpus=True)[0]
    assert not survivor.hung, survivor.stack
    assert survivor.error_type == "PeerError", survivor
    assert survivor.error is not None
    assert "rank 1" in survivor.error, survivor.error
    assert ("out of luck" if how == "raise" else "died") in survivor.error, survivor.error


def _changed_behind_its_back(rank: int, world_size: int) -> None:
    case = BY_NAME["untied"]
    engine, _, _, _ = odcengine.initialize(model=make_model(case), config=config_for(case))
    with torch.no_grad():
        next(iter(engine.parameters())).data.to_local().add_(1.0)
    for micro_batch in micro_batches(case.name, 1, world_size, equal=True)[rank]:
        loss, count = loss_of(engine, micro_batch)
        engine.backward(loss, count=count)
    engine.step()


def test_writes_that_versions_do_not_show_are_found_at_the_boundary() -> None:
    for result in run_ranks(_changed_behind_its_back, 2, timeout_s=60, gpus=True):
        assert result.error is not None
        assert "was changed after it was published" in result.error, result.error


def _syncs(rank: int, world_size: int) -> list[str]:
    case = BY_NAME["untied"]
    engine, _, _, _ = odcengine.initialize(model=make_model(case), config=config_for(case))
    device = torch.device("cuda", torch.cuda.current_device())
    batches = [
        tuple(part.to(device) if isinstance(part, torch.Tensor) else part for part in micro_batch)
        for micro_batch in micro_batches(case.name, 1, world_size, equal=True)[rank]
    ]
    found: list[str] = []
    for step in range(2):
        torch.cuda.synchronize()
        if step:
            torch.cuda.set_sync_debug_mode("error")  # a host synchronisation raises
        for tokens, targets, branch in batches:
            logits = engine(tokens, branch)
            loss = torch.nn.functional.cross_entropy(logits[0], targets[0], reduction="sum")
            engine.backward(loss, count=targets.numel())
        torch.cuda.set_sync_debug_mode("default")
        engine.step()
    engine.close()
    return found


def test_no_host_synchronisation_inside_a_minibatch() -> None:
    values(run_ranks(_syncs, 2, timeout_s=60, gpus=True))


def _syncs_of_packed_rows(rank: int, world_size: int, source: str) -> int:
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, **shape)
    )
    samples = [{"input_ids": [token % 64 for token in range(length)]} for length in (30, 20, 33, 9)]
    loads = source.startswith("loader")
    engine, _, loader, _ = odcengine.initialize(
        model=prepare_model(model),
        training_data=samples * 3 if loads else None,
        config={
            "train_batch_size": len(samples) if loads else "auto",
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "balance": {
                "strategy": "dynamic" if source.endswith("dynamic") else "lb_mini",
                "max_tokens_per_micro_batch": 40,
            },
        },
    )
    rows = [pack_samples([sample]).to("cuda") for sample in samples]
    minibatches = iter(loader) if loads else None
    count = 0
    for step in range(3):
        micro_batches: Any = rows
        if source.startswith("balance"):
            micro_batches = engine.balance(samples)
        elif minibatches is not None:
            micro_batches = next(minibatches)
        torch.cuda.synchronize()
        if step:  # the first one compiles kernels
            torch.cuda.set_sync_debug_mode("error")
        for micro_batch in micro_batches:
            engine.backward(engine(micro_batch))
            count += 1
        torch.cuda.set_sync_debug_mode("default")
        engine.step()
    engine.close()
    return count


@pytest.mark.parametrize("source", ["script", "balance", "balance dynamic", "loader", "loader dynamic"])
def test_no_host_synchronisation_with_packed_rows(source: str) -> None:
    """Who brings micro-batches of one's own must not wait for each of them."""
    assert sum(values(run_ranks(_syncs_of_packed_rows, 2, source, timeout_s=60, gpus=True)))


def _sleep(*_: Any) -> None:
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # cycles: half a second, or more


def _draws(rank: int, world_size: int) -> list[tuple[float, float]]:
    """Of each draw the seconds that it took, and that the device needed after it.

    Every backward takes half a second before its first group has gradients, and another one before the last.
    """
    case = BY_NAME["untied"]
    engine, _, _, _ = odcengine.initialize(model=make_model(case), config=config_for(case))
    (micro_batch, *_) = micro_batches(case.name, 0, world_size, equal=True)[rank]

    def end_late(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(_sleep)

    engine.module.embed.register_forward_hook(end_late)
    seconds = []
    for totals in ([None], [None, None], [99, 0]):  # the first minibatch compiles kernels
        for total in totals:
            torch.distributed.barrier(engine._host_group)
            start = time.perf_counter()
            engine.draw(total)
            drawn = time.perf_counter()
            torch.cuda.synchronize()
            seconds.append((drawn - start, time.perf_counter() - drawn))
            loss, count = loss_of(engine, micro_batch)  # the host waits for its copies
            _sleep()
            engine.backward(loss, count=count)
        engine.step()
        torch.cuda.synchronize()
    engine.close()
    return seconds


def test_who_draws_waits_until_the_device_is_nearly_done() -> None:
    for _, first, second, another, needless in values(run_ranks(_draws, 2, timeout_s=90, gpus=True)):
        assert max(first[0], another[0], needless[0]) < 0.1
        assert min(second) > 0.3
        assert needless[1] > 0.6


def _same_gpu(rank: int, world_size: int) -> None:
    case = BY_NAME["untied"]
    odcengine.initialize(model=make_model(case), config=config_for(case))


def test_two_ranks_on_one_gpu_are_refused() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "0", "ODC_SHARE_GPUS": "0"}
    for result in run_ranks(_same_gpu, 2, timeout_s=60, gpus=True, env=env):
        assert result.error is not None
        assert "are on the same GPU" in result.error, result.error


def _not_finite(rank: int, world_size: int) -> list[tuple[bool, float, bool]]:
    case = BY_NAME["untied"]
    engine, _, _, _ = odcengine.initialize(model=make_model(case), config=config_for(case))
    found = []
    for step in range(4):
        before = [p.detach().to_local().clone() for p in engine.parameters()]  # type: ignore[attr-defined]
        for micro_batch in micro_batches(case.name, 1, world_size, equal=True)[rank]:
            loss, count = loss_of(engine, micro_batch)
            spoiled = step == 1 and rank == 1
            engine.backward(loss * math.inf if spoiled else loss, count=count)
        metrics = engine.step()
        after = [p.detach().to_local() for p in engine.parameters()]  # type: ignore[attr-defined]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        found.append((metrics.applied, metrics.grad_norm, same))
    steps = {int(state["step"]) for state in engine.optimizer.state.values()}
    assert steps == {3}, steps
    engine.close()
    return found


def test_gradient_that_is_not_finite_changes_nothing_on_any_rank() -> None:
    for found in values(run_ranks(_not_finite, 2, timeout_s=60, gpus=True)):
        assert [applied for applied, _, _ in found] == [True, False, True, True]
        assert [same for _, _, same in found] == [False, True, False, False]
        assert not math.isfinite(found[1][1])
        assert all(math.isfinite(norm) for _, norm, _ in (found[0], *found[2:]))
