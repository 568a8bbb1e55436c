"""What stock DeepSpeed cannot do, what an attached engine does without, and why its fences are there."""

from __future__ import annotations

import sys
import time
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import run_ranks, values
from torch.profiler import ProfilerActivity, profile

from odcengine.control import Meeting
from odcengine.transport.shm import ShmTransport
from zero3.toy import (
    Case,
    boundary_of,
    error_of,
    loss_of,
    make_engine,
    micro_batches,
    reference,
    train_engine,
    whole_weights,
)

pytest.importorskip("deepspeed")

ODC = {"timeout_s": 30, "startup_timeout_s": 60}
FENCES = Case("fences", clip=0.05, lr=0.5)
WORLD_SIZE = 3


def _train_without(rank: int, world_size: int) -> dict[str, Any]:
    """The usual run under delays: with all fences, without A, without B."""
    import odcengine
    from odcengine.deepspeed.stage3 import OnDemandStage3

    barrier, signal = ShmTransport.barrier, ShmTransport.signal_published
    write = OnDemandStage3._reassign_or_swap_out_partitioned_parameters

    def no_barrier(self: ShmTransport, meeting: Meeting, number: int = 0) -> float:
        return 0.0 if meeting is Meeting.END_OF_STEP else barrier(self, meeting, number)

    def slow_write(self: Any, sub_group_id: int) -> None:
        time.sleep(0.02 * (rank == world_size - 1))
        write(self, sub_group_id)

    patches = {
        "none": mock.patch.object(ShmTransport, "signal_published", signal),
        "A": mock.patch.object(ShmTransport, "barrier", no_barrier),
        "B": mock.patch.object(ShmTransport, "wait_published", return_value=0.0),
    }
    found = {}
    for fence, patch in patches.items():
        engine = make_engine(FENCES)
        attached = odcengine.attach(engine, **ODC)
        with (
            patch,
            mock.patch.object(OnDemandStage3, "_reassign_or_swap_out_partitioned_parameters", slow_write),
        ):
            norms = train_engine(
                engine,
                rank,
                world_size,
                FENCES,
                before=lambda step, number: time.sleep(0.02 * ((rank + step + number) % world_size)),
            )
            attached._odc.control.barrier(Meeting.PUBLISH, 99)  # without B, for all weights to be there
        found[fence] = {"norms": norms, "weights": whole_weights(engine)}
        attached.close()
    return found


def test_both_fences_are_needed(three: list[dict[str, Any]]) -> None:
    ranks = [rank["fences"] for rank in three]
    right = reference(FENCES, WORLD_SIZE)
    norm = torch.tensor(right["norms"])
    errors = {
        fence: (
            max(error_of(rank[fence]["weights"], right["weights"]) for rank in ranks),
            max(float(((torch.tensor(rank[fence]["norms"]) - norm) / norm).abs().max()) for rank in ranks),
        )
        for fence in ranks[0]
    }
    assert max(errors["none"]) < 1e-5, errors
    # Without A the norm misses late pushes, which clipping turns into wrong weights.
    assert errors["A"][1] > 1e-3, errors
    assert errors["A"][0] > 1e-5, errors
    assert errors["B"][0] > 1e-5, errors


def _count_collectives(rank: int, world_size: int, attach: bool) -> tuple[int, int]:
    """Collectives that torch's profiler sees inside of minibatches, and at their ends."""
    import odcengine

    case = Case("counted", {"experts": attach, "checkpointing": True})
    engine = make_engine(case)
    attached = odcengine.attach(engine, **ODC) if attach else None

    def seen(profiled: Any) -> int:
        return sum("c10d::" in event.name for event in profiled.events())

    inside = at_end = 0
    for step in range(3):
        share = micro_batches(case.name, step, world_size, equal=not attach)[rank]
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for micro_batch in share:
                engine.backward(loss_of(engine, micro_batch))
        inside += seen(profiled)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            boundary_of(engine)
        at_end += seen(profiled)
    if attached is not None:
        attached.close()
    return inside, at_end


def test_no_collective_inside_a_minibatch(three: list[dict[str, Any]], pair: list[dict[str, Any]]) -> None:
    counts = [rank["collectives"] for rank in three]
    assert [inside for inside, _ in counts] == [0, 0, 0]
    assert [at_end for _, at_end in counts] == [3, 3, 3]  # the norm, once a step
    stock = [rank["stock collectives"] for rank in pair]
    assert all(inside > 3 * 2 * 4 for inside, _ in stock), stock  # so the count sees them


def _stock_unequal(rank: int, world_size: int) -> None:
    import datetime

    import deepspeed

    import odcengine  # noqa: F401 - not attached

    deepspeed.init_distributed("gloo", timeout=datetime.timedelta(seconds=5), verbose=False)
    case = Case("stock")
    engine = make_engine(case)
    for number in range(2 - rank):
        engine.backward(loss_of(engine, micro_batches(case.name, 0, world_size, True)[rank][number]))
    engine.step()


def test_stock_deepspeed_cannot_run_unequal_counts() -> None:
    results = run_ranks(_stock_unequal, 2, timeout_s=40)
    assert not any(result.ok for result in results), results


def _mixed(rank: int, world_size: int, attach: bool) -> dict[str, torch.Tensor]:
    import odcengine

    case = Case(
        "low",
        {"frozen": True},
        {"data_types": {"grad_accum_dtype": "fp32"}},
        odc={"grad_reduce": "sum"},
        optimizer="AdamW",
        lr=1e-2,
        low=torch.bfloat16,
        clip=0.05,
    )
    engine = make_engine(case)
    if attach:
        attached = odcengine.attach(engine, **ODC, **case.odc)
        train_engine(engine, rank, world_size, case)
        weights = whole_weights(engine)
        attached.close()
        return weights
    shares = {step: micro_batches(case.name, step, 3) for step in range(5)}

    def all_in_one(name: str, step: int, *_: Any) -> list[list[tuple]]:
        return [[micro_batch for share in shares[step] for micro_batch in share]]

    with mock.patch("zero3.toy.micro_batches", all_in_one):
        train_engine(engine, 0, 1, case)
    return whole_weights(engine)


def test_bf16_equals_stock_deepspeed_on_one_rank(three: list[dict[str, Any]]) -> None:
    ranks = [rank["mixed"] for rank in three]
    (stock,) = values(run_ranks(_mixed, 1, False, timeout_s=120))
    for weights in ranks:
        for name, value in weights.items():
            assert torch.allclose(value, stock[name], rtol=2**-6, atol=1e-4), name
        # Sums in another order may turn the last bit of a weight, rarely; mostly all are equal.
        equal = sum(int((value == stock[name]).sum()) for name, value in weights.items())
        assert equal >= 0.97 * sum(value.numel() for value in weights.values())


def _overflow(rank: int, world_size: int) -> tuple[list[int], dict[str, torch.Tensor]]:
    """The loss of rank 1 is infinite in step 1."""
    import odcengine

    case = Case("overflow", {"tied": False}, low=torch.bfloat16)
    engine = make_engine(case)
    attached = odcengine.attach(engine, **ODC)
    skipped = []
    for step in range(3):
        for micro_batch in micro_batches(case.name, step, world_size, True)[rank]:
            factor = float("inf") if (rank, step) == (1, 1) else 0.1
            engine.backward(loss_of(engine, micro_batch) * factor)
        engine.step()
        skipped.append(engine.skipped_steps)
    weights = whole_weights(engine)
    attached.close()
    return skipped, weights


HALF = Case("half", config={"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}, clip=0.5)


def _half(rank: int, world_size: int) -> dict[str, Any]:
    """fp16 with its loss scale, which DeepSpeed does not offer on CPUs; then an infinite loss on rank 1."""
    from deepspeed.accelerator import get_accelerator

    import odcengine

    with mock.patch.object(get_accelerator(), "is_fp16_supported", return_value=True):
        engine = make_engine(HALF)
        attached = odcengine.attach(engine, **ODC)
        norms = train_engine(engine, rank, world_size, HALF)
        weights = whole_weights(engine)
        scales = []
        for step in range(2):
            for micro_batch in micro_batches(HALF.name, step, world_size, True)[rank]:
                factor = float("inf") if (rank, step) == (1, 0) else 0.1
                engine.backward(loss_of(engine, micro_batch) * factor)
            engine.step()
            scales.append((engine.optimizer.loss_scale, engine.skipped_steps))
        finite = all(bool(value.isfinite().all()) for value in whole_weights(engine).values())
        attached.close()
    return {"norms": norms, "weights": weights, "scales": scales, "finite": finite}


def _pair(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """What two ranks try out one after the other."""
    return {
        "overflow": _overflow(rank, world_size),
        "half": _half(rank, world_size),
        "written": _evaluate_and_write(rank, world_size),
        "checkpoint": _checkpoint(rank, world_size, folder),
        "no boundary": {kind: _without_boundary(rank, kind) for kind in WITHOUT_BOUNDARY},
        "stock collectives": _count_collectives(rank, world_size, False),
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory: Any) -> list[dict[str, Any]]:
    return values(run_ranks(_pair, 2, str(tmp_path_factory.mktemp("checkpoints")), timeout_s=250))


WITHOUT_BOUNDARY = {
    "never": ("2 micro-batches had", "it has trained nothing; engine.step() was not called after them)"),
    "counts": (
        "2 micro-batches had",
        "trained nothing; engine.step() only counts until it was called 4 times",
    ),
    "by hand": ("2 micro-batches had", "trained nothing; engine.step() does nothing while set_gradient"),
    "last": (
        "1 micro-batches had",
        "the last boundary was that of minibatch 0; engine.step() was not called",
    ),
    "exit": ("2 micro-batches had", "trained nothing; engine.step() was not called after them)"),
    "all": (),
}


def _without_boundary(rank: int, kind: str) -> list[str]:
    """Gradients that no step has used when the engine is closed."""
    import odcengine
    from odcengine.deepspeed import attach

    accumulation = {"gradient_accumulation_steps": 4 if kind == "counts" else 1}
    engine = make_engine(Case(kind, config=accumulation, managed=kind in ("counts", "by hand")))
    attached = odcengine.attach(engine, **ODC)
    (micro_batch, *_) = micro_batches("boundary", 0, 2, True)[rank]
    if kind == "by hand":
        engine.set_gradient_accumulation_boundary(False)
    for number in range(2):
        engine.backward(loss_of(engine, micro_batch))
        if kind in ("counts", "by hand") or (kind in ("last", "all") and number == 0):
            engine.step()
    if kind == "all":
        boundary_of(engine)
    told: list[str] = []
    with mock.patch.object(attach.logger, "warning", lambda text, *values: told.append(text % values)):
        attached._close(Meeting.EXIT if kind == "exit" else Meeting.CLOSE)
    return told


def _three(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "fences": _train_without(rank, world_size),
        "collectives": _count_collectives(rank, world_size, True),
        "mixed": _mixed(rank, world_size, True),
    }


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    return values(run_ranks(_three, WORLD_SIZE, timeout_s=250))


def test_all_ranks_skip_a_step_that_is_not_finite(pair: list[dict[str, Any]]) -> None:
    ranks = [rank["overflow"] for rank in pair]
    assert [skipped for skipped, _ in ranks] == [[0, 1, 1], [0, 1, 1]]
    assert all(bool(value.isfinite().all()) for _, weights in ranks for value in weights.values())
    assert error_of(ranks[0][1], ranks[1][1]) == 0.0


def test_fp16_and_its_loss_scale(pair: list[dict[str, Any]]) -> None:
    right = reference(HALF, 2)
    for rank in (rank["half"] for rank in pair):
        assert error_of(rank["weights"], right["weights"]) < 3e-3
        assert rank["norms"] == pytest.approx(right["norms"], rel=5e-3)
        assert rank["scales"] == [(128.0, 1), (128.0, 1)]  # halved once, on all ranks
        assert rank["finite"]


@pytest.mark.parametrize("kind", WITHOUT_BOUNDARY)
def test_gradients_that_no_boundary_has_followed(kind: str, pair: list[dict[str, Any]]) -> None:
    for rank, told in enumerate(rank["no boundary"][kind] for rank in pair):
        assert len(told) == bool(WITHOUT_BOUNDARY[kind])
        for text in told:
            assert text.startswith(f"rank {rank}: ")
            for words in WITHOUT_BOUNDARY[kind]:
                assert words in text


def _evaluate_and_write(rank: int, world_size: int) -> dict[str, Any]:
    """A forward on one rank only, a write of a whole parameter by all, and then more training."""
    import deepspeed

    import odcengine

    case = Case("written")
    engine = make_engine(case)
    attached = odcengine.attach(engine, **ODC)
    train_engine(engine, rank, world_size, case, steps=2)
    if rank == 0:
        with torch.no_grad():
            engine(torch.arange(5)[None], 0)
    weight = engine.module.blocks[0].down.weight
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        if rank == 0:
            weight.data.fill_(0.25)
    with deepspeed.zero.GatheredParameters([weight]):
        written = weight.detach().clone()
    with pytest.raises(odcengine_error("UsageError"), match="safe_get_full_grad"):
        deepspeed.utils.safe_get_full_grad(weight)
    with pytest.raises(odcengine_error("UsageError"), match="offload_states"):
        engine.optimizer.offload_states()
    with pytest.raises(odcengine_error("UsageError"), match="attached already"):
        odcengine.attach(engine)
    train_engine(engine, rank, world_size, case, first=2, steps=2)
    shards = [(p.ds_tensor.data_ptr(), p.ds_tensor.clone()) for p in engine.module.parameters()]
    attached.close()
    for (address, shard), parameter in zip(shards, engine.module.parameters(), strict=True):
        # As bytes: DeepSpeed leaves the padding of the last shards as it finds it, NaN sometimes.
        assert torch.equal(parameter.ds_tensor.view(torch.uint8), shard.view(torch.uint8))
        assert parameter.ds_tensor.data_ptr() != address  # the window is gone
    with pytest.raises(odcengine_error("UsageError"), match="closed"):
        engine(torch.arange(5)[None], 0)
    return {"written": written}


def odcengine_error(name: str) -> type[Exception]:
    import odcengine.errors

    kind: type[Exception] = getattr(odcengine.errors, name)
    return kind


def test_evaluation_on_one_rank_and_a_write_on_all(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert bool((rank["written"]["written"] == 0.25).all())


def _checkpoint(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Train 2, save, train 2; load, train the same 2 again."""
    import odcengine

    case = Case("saved", {"frozen": True}, optimizer="AdamW", lr=1e-2)
    engine = make_engine(case)
    attached = odcengine.attach(engine, **ODC)
    train_engine(engine, rank, world_size, case, steps=2)
    engine.save_checkpoint(folder)
    before = whole_weights(engine)
    train_engine(engine, rank, world_size, case, first=2, steps=2)
    first = whole_weights(engine)
    engine.load_checkpoint(folder)
    loaded = whole_weights(engine)
    train_engine(engine, rank, world_size, case, first=2, steps=2)
    again = whole_weights(engine)
    engine.save_16bit_model(folder)
    attached.close()
    return {"before": before, "loaded": loaded, "first": first, "again": again}


def test_checkpoints(pair: list[dict[str, Any]]) -> None:
    for rank in (rank["checkpoint"] for rank in pair):
        assert error_of(rank["loaded"], rank["before"]) == 0.0
        assert error_of(rank["again"], rank["first"]) <= 2e-5
        assert error_of(rank["first"], rank["before"]) > 1e-3


def _unequal_boundaries(rank: int, world_size: int, kind: str) -> None:
    import odcengine

    case = Case("unequal")
    engine = make_engine(case)
    odcengine.attach(engine, timeout_s=20, startup_timeout_s=60)
    train_engine(engine, rank, world_size, case, steps=2)
    if rank == 1:
        if kind == "raises":
            try:
                raise ValueError("out of data")
            except ValueError:
                sys.excepthook(*sys.exc_info())  # as at a script's end
        return
    boundary_of(engine)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("raises", "out of data"), pytest.param("leaves", "rank 1", marks=pytest.mark.soak)],
)
def test_a_rank_that_stops_is_named(kind: str, message: str) -> None:
    results = run_ranks(_unequal_boundaries, 2, kind, timeout_s=120)
    assert not any(result.hung for result in results)
    assert message in str(results[0].error)
    assert results[0].error_type in ("PeerError", "UsageError")
