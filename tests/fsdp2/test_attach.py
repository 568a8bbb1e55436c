"""``odcengine.attach`` after ``fully_shard``: the trainer's gradients, mistakes, and letting go."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import run_ranks, values
from engine.toy import Case, loss_of, micro_batches
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.profiler import ProfilerActivity, profile

import odcengine
from odcengine.errors import ConfigError, PeerError, UsageError
from odcengine.fsdp2 import guard, steps

from .toy import BF16, error_between, make_optimizer, meet, reference, sharded, train

ODC = {"timeout_s": 30, "startup_timeout_s": 60}
CASES = {
    "plain": Case("plain"),
    "lora": Case("lora", {"lora": True, "frozen": True, "tied": False}),
    "experts": Case("experts", {"experts": True, "checkpointing": True, "unused": True}),
}


def _equal(rank: int, case: Case, attach: bool, **options: Any) -> dict[str, Any]:
    """Equal counts, which FSDP2 can run by itself."""
    model = sharded(case, **options)
    optimizer = make_optimizer(model)
    if not attach:
        return train(model, optimizer, case, rank, equal=True)
    with odcengine.attach(model, optimizer, **ODC) as handle:
        return train(model, optimizer, case, rank, equal=True, collect=handle.collect)


def _unequal(
    rank: int, case: Case, *, hold_back: bool = False, factor: float | None = None, **odc: Any
) -> Any:
    model = sharded(case)
    if factor is not None:
        for module in (*model.blocks, model):
            module.set_gradient_divide_factor(factor)
    optimizer = make_optimizer(model)
    handle = odcengine.attach(model, optimizer, **ODC, **odc)
    assert "the user's code between engine calls" in handle._control._slots.place(
        handle._control.topology.local_rank
    )
    found = train(model, optimizer, case, rank, equal=False, collect=handle.collect, hold_back=hold_back)
    found["minibatches"] = handle.num_minibatches
    handle.close()
    return found


def _pair(rank: int, world_size: int) -> dict[str, Any]:
    """What two ranks try, one after the other."""
    meet(rank, world_size)
    plain = CASES["plain"]
    found: dict[str, Any] = {}
    for name in ("plain", "lora"):
        found[f"{name} stock"] = _equal(rank, CASES[name], False)
        found[f"{name} attached"] = _equal(rank, CASES[name], True)
    low = Case("low", dtype=torch.float32)
    found["bf16 stock"] = _equal(rank, low, False, mp_policy=BF16)
    found["bf16 attached"] = _equal(rank, low, True, mp_policy=BF16)
    found["kept attached"] = _equal(rank, plain, True, reshard_after_forward=False)
    for name, case in CASES.items():
        found[f"{name} unequal"] = _unequal(rank, case)
    found["held back"] = _unequal(rank, plain, hold_back=True)
    found["sum"] = _unequal(rank, plain, grad_reduce="sum")
    found["factor"] = _unequal(rank, plain, factor=0.5)
    found["hybrid"] = _unequal(rank, plain, sharding="hybrid", node_size=1)
    found["deterministic"] = _unequal(rank, plain, deterministic=True)
    found["collectives"] = _collectives(rank)
    found["detached"] = _detached(rank)
    found["later"] = _attached_later(rank)
    found["trainer"] = _other_flows(rank)
    found["refused"] = _refusals(rank)
    found["unlike"] = {kind: _ended_unlike(rank, kind) for kind in UNLIKE}
    return found


def _collectives(rank: int) -> tuple[int, int]:
    """Collectives inside of a minibatch, attached and not."""
    counts = []
    for attach in (True, False):
        model = sharded(CASES["plain"])
        optimizer = make_optimizer(model)
        handle = odcengine.attach(model, optimizer, **ODC) if attach else None
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for micro_batch in micro_batches("count", 0, 2, True)[rank]:
                loss_of(model, micro_batch)[0].backward()
        counts.append(sum(event.count for event in profiled.key_averages() if "gloo:" in event.key))
        if handle is not None:
            handle.collect()
            handle.close()
    return counts[0], counts[1]


def _detached(rank: int) -> dict[str, Any]:
    """Attached for a step, then FSDP2 by itself: as if it never had been."""
    case = CASES["plain"]
    model = sharded(case)
    optimizer = make_optimizer(model)
    with odcengine.attach(model, optimizer, **ODC) as handle:
        first = train(model, optimizer, case, rank, equal=True, steps=1, collect=handle.collect)
    with pytest.raises(UsageError, match="closed"):
        handle.collect()
    rest = train(model, optimizer, case, rank, equal=True, first=1, steps=2)
    again = odcengine.attach(model, optimizer, **ODC)
    again.close()
    return {
        **rest,
        "gradients": first["gradients"] + rest["gradients"],
        "norms": first["norms"] + rest["norms"],
    }


def _attached_later(rank: int) -> dict[str, Any]:
    """The other way round, after an evaluation that left the root whole."""
    case = CASES["plain"]
    model = sharded(case)
    optimizer = make_optimizer(model)
    first = train(model, optimizer, case, rank, equal=True, steps=1)
    with torch.no_grad():
        model(torch.arange(4)[None], 0)
    with odcengine.attach(model, optimizer, **ODC) as handle:
        rest = train(model, optimizer, case, rank, equal=True, first=1, steps=2, collect=handle.collect)
    return {
        **rest,
        "gradients": first["gradients"] + rest["gradients"],
        "norms": first["norms"] + rest["norms"],
    }


def _other_flows(rank: int) -> dict[str, Any]:
    """Skipped steps, two optimizers, no optimizer, loads, drawn work, states made by checkpointing tools."""
    case = CASES["plain"]
    model = sharded(case)
    parameters = list(model.parameters())
    pair = [torch.optim.SGD(parameters[:3], lr=0.1), torch.optim.AdamW(parameters[3:], lr=0.1)]
    found: dict[str, Any] = {}
    with odcengine.attach(model, pair, **ODC) as handle:
        get_optimizer_state_dict(model, pair[1])  # steps with gradients of zero, to make states
        micro_batch = micro_batches("flows", 0, 2, True)[rank][0]
        outputs = []
        for step in range(3):
            while (number := handle.draw()) < 3:  # three micro-batches for all ranks
                loss_of(model, micro_batch)[0].backward()
                assert number >= 0
            handle.collect()
            if step == 1:  # as trainers do where the norm is not finite
                for optimizer in pair:
                    optimizer.zero_grad()
                continue
            for optimizer in pair:
                optimizer.step()
        with torch.no_grad():
            outputs.append(model(torch.arange(5)[None], 0).clone())
        found["minibatches"] = handle.num_minibatches
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        set_model_state_dict(model, {name: tensor * 2 for name, tensor in state.items()})
        handle.publish()
        with torch.no_grad():
            outputs.append(model(torch.arange(5)[None], 0).clone())
    with odcengine.attach(model, **ODC) as handle:  # the trainer publishes itself
        alone = make_optimizer(model)
        for _ in range(2):
            if rank == 0:
                loss_of(model, micro_batch)[0].backward()
            handle.collect()
            alone.step()
            handle.publish()
        with torch.no_grad():
            outputs.append(model(torch.arange(5)[None], 0).clone())
    found["outputs"] = outputs
    return found


def _refusals(rank: int) -> dict[str, str]:
    """Found before anything has changed, on each rank for itself."""
    case, told = CASES["plain"], {}

    def refused(name: str, target: Any, *arguments: Any, **options: Any) -> None:
        with pytest.raises((ConfigError, UsageError)) as refusal:
            odcengine.attach(target, *arguments, **{**ODC, **options})
        told[name] = str(refusal.value)

    two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    refused("hsdp", sharded(case, two))
    refused("offload", sharded(case, offload_policy=CPUOffloadPolicy(pin_memory=False)))
    model = sharded(case)
    strange = make_optimizer(torch.nn.Linear(2, 2))
    refused("optimizer", model, strange)
    refused("no optimizer", model, "adam")
    refused("option", model, None, lockstep=True)
    refused("collective", model, None, transport="collective")
    refused("device", model, None, transport="nvshmem")
    refused("plain", torch.nn.Linear(2, 2))
    loss_of(model, micro_batches("pending", 0, 2, True)[rank][0])[0].backward()
    refused("pending", model)
    model.zero_grad()
    optimizer = make_optimizer(model)
    handle = odcengine.attach(model, optimizer, **ODC)
    refused("second", model, optimizer)
    handle.close()
    return told


UNLIKE = {
    "one skips": (
        "rank 1 (",
        ": no optimizer.step(); rank 0 (",
        ": optimizer.step() of optimizers 0, 1",
    ),
    "one collects twice": ("minibatch 0", "rank 1 (", "came straight to the next collect()"),
    "all collect twice": ("collect() was called twice in minibatch 0",),
    "one of two": ("rank 1 (", ": optimizer.step(); rank 0 (", ": optimizer.step() of optimizers 0, 1"),
    "one publishes nothing": ("rank 1 (", ": no optimizer.step(); rank 0 ("),
    "one skips the last": (
        "is at close(), the last minibatch with optimizer.step(); rank 1 (",
        "is at close(), the last minibatch without optimizer.step()",
    ),
    "all skip": ("no error",),
}


def _ended_unlike(rank: int, kind: str) -> str:
    """Ranks end a minibatch in different ways, which no rank can see by itself."""
    model = sharded(CASES["plain"])
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters[:3], lr=0.1), torch.optim.SGD(parameters[3:], lr=0.1)]
    publishes = kind == "one publishes nothing"
    micro_batch = micro_batches("unlike", 0, 2, True)[rank][0]
    odd = rank == 1
    try:
        with odcengine.attach(model, *(() if publishes else (optimizers,)), **ODC) as handle:
            loss_of(model, micro_batch)[0].backward()
            handle.collect()
            if kind == "all collect twice" or (kind == "one collects twice" and odd):
                handle.collect()
            for number, optimizer in enumerate(optimizers):
                skips = "skip" in kind or publishes or (kind == "one of two" and number)
                if not skips or not (odd or kind == "all skip"):
                    optimizer.step()
            if publishes:
                handle.publish()
            if "last" not in kind:
                if rank == 0:  # the other has no micro-batch
                    loss_of(model, micro_batch)[0].backward()
                handle.collect()
    except (UsageError, PeerError) as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module")
def pair() -> list[dict[str, Any]]:
    return values(run_ranks(_pair, 2, timeout_s=290))


def _of(pair: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [rank[name] for rank in pair]


def _whole(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    from engine.toy import assemble

    return {
        "gradients": [
            assemble([r["gradients"][n] for r in ranks]) for n in range(len(ranks[0]["gradients"]))
        ],
        "weights": assemble([r["weights"] for r in ranks]),
        "norms": ranks[0]["norms"],
    }


@pytest.mark.parametrize("name", ["plain", "lora"])
def test_attaching_changes_no_gradient(name: str, pair: list[dict[str, Any]]) -> None:
    stock = _whole(_of(pair, f"{name} stock"))
    assert error_between(_of(pair, f"{name} attached"), stock) < 1e-10


def test_mixed_precision(pair: list[dict[str, Any]]) -> None:
    """Pushes are in the policy's reduce_dtype, as FSDP2's are: equal but for the order of additions."""
    stock = _whole(_of(pair, "bf16 stock"))
    assert error_between(_of(pair, "bf16 attached"), stock) < 2e-3  # a turned bit of a bf16 weight


@pytest.mark.parametrize("name", ["kept attached", "detached", "later"])
def test_a_model_that_is_kept_whole_or_attached_for_a_while(name: str, pair: list[dict[str, Any]]) -> None:
    assert error_between(_of(pair, name), _whole(_of(pair, "plain stock"))) < 1e-10


@pytest.mark.parametrize("name", CASES)
def test_unequal_counts_equal_one_process(name: str, pair: list[dict[str, Any]]) -> None:
    ranks = _of(pair, f"{name} unequal")
    assert error_between(ranks, reference(CASES[name], 2)) < 1e-10
    assert [rank["minibatches"] for rank in ranks] == [3, 3]


@pytest.mark.parametrize(
    ("name", "scale"),
    [("held back", 0.5), ("sum", 1.0), ("factor", 2.0), ("hybrid", 0.5), ("deterministic", 0.5)],
)
def test_what_the_trainer_sets(name: str, scale: float, pair: list[dict[str, Any]]) -> None:
    assert error_between(_of(pair, name), reference(CASES["plain"], 2, scale=scale)) < 1e-10


def test_no_collective_inside_a_minibatch(pair: list[dict[str, Any]]) -> None:
    for attached, stock in _of(pair, "collectives"):
        assert attached == 0
        assert stock > 8  # so the count sees them


def test_other_ways_to_end_a_minibatch(pair: list[dict[str, Any]]) -> None:
    first, second = _of(pair, "trainer")
    assert first["minibatches"] == second["minibatches"] == 3
    for ours, theirs in zip(first["outputs"], second["outputs"], strict=True):
        assert torch.equal(ours, theirs)
    outputs = first["outputs"]
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hsdp", "the mesh has 2 axes. HSDP keeps whole copies"),
        ("offload", "CPUOffloadPolicy"),
        ("optimizer", "2 parameters of the SGD are none of the model's"),
        ("no optimizer", "optimizer is a str"),
        ("option", "odc.lockstep: an attached FSDP2 model does not know it"),
        ("collective", "collective is stock FSDP2"),
        ("device", "odc.transport: nvshmem is for ranks on cuda, but the model is on cpu; expected auto"),
        ("plain", "got a Linear; expected the engine"),
        ("pending", "has a gradient of a backward that no step has used"),
        ("second", "attached already"),
    ],
)
def test_refusals(name: str, message: str, pair: list[dict[str, Any]]) -> None:
    for told in _of(pair, "refused"):
        assert message in told[name]


@pytest.mark.parametrize("kind", UNLIKE)
def test_minibatches_that_ranks_end_in_different_ways(kind: str, pair: list[dict[str, Any]]) -> None:
    for told in _of(pair, "unlike"):
        for words in UNLIKE[kind]:
            assert words in told[kind]


def test_many_ranks_and_optimizers_that_ended_a_minibatch_unlike() -> None:
    ways = [steps.way_of(range(60))] * 12 + [steps.way_of([])] * 3 + [steps.way_of([1])]
    assert max(ways) < 2**48  # as a meeting's number
    with pytest.raises(UsageError) as refusal:
        steps.check_alike(ways, [False] * 16, used=True, minibatch=4, describe="rank {}".format)
    told = str(refusal.value)
    assert "minibatch 4 in different ways: rank 15: optimizer.step() of optimizers 1; " in told
    assert "ranks 12, 13, 14 (3 of them): no optimizer.step(); ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (12" in told


def test_what_needs_four_ranks_to_be_there() -> None:
    """Two of four ranks share shards after the forward; and a mesh of two of the job's four ranks."""
    mesh = SimpleNamespace(ndim=1, size=lambda: 4)
    group = SimpleNamespace(
        mesh_info=SimpleNamespace(mesh=mesh, shard_mesh_size=4),
        post_forward_mesh_info=SimpleNamespace(shard_mesh_size=2),
        offload_policy=None,
        _all_reduce_hook=print,
    )
    number, hook = guard._problems_of(group, 4)
    assert "reshard_after_forward is a number" in number
    assert "set_all_reduce_hook" in hook
    group.post_forward_mesh_info = group._all_reduce_hook = None
    (fewer,) = guard._problems_of(group, 8)
    assert "the mesh has 4 of the 8 ranks" in fewer


def test_fsdp1_is_told_what_to_use() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    torch.nn.Module.__init__(wrapped)
    with pytest.raises(UsageError, match="fully_shard"):
        odcengine.attach(wrapped)


def _alone(rank: int, world_size: int) -> dict[str, Any]:
    meet(rank, world_size)
    case = CASES["plain"]
    model = sharded(case)
    optimizer = make_optimizer(model)
    with odcengine.attach(model, optimizer, **ODC) as handle:
        drawn = [handle.draw(), handle.draw()]
        found = train(model, optimizer, case, rank, equal=True, collect=handle.collect)
        drawn.append(handle.draw())
    return {"found": found, "stock": _equal(rank, case, False), "drawn": drawn, "n": handle.num_minibatches}


def test_one_rank_stays_as_it_is() -> None:
    (rank,) = values(run_ranks(_alone, 1))
    assert error_between([rank["found"]], _whole([rank["stock"]])) == 0.0
    assert rank["drawn"] == [0, 1, 0]
    assert rank["n"] == 3


# -- mistakes in the loop, which end the job on all ranks ------------------------------------------------


def _mistake(rank: int, world_size: int, kind: str) -> None:
    meet(rank, world_size)
    case = CASES["plain"]
    model = sharded(case)
    optimizer = make_optimizer(model)
    handle = odcengine.attach(
        model, *(() if kind == "unpublished" else (optimizer,)), **{**ODC, "timeout_s": 20}
    )
    micro_batch = micro_batches("mistake", 0, 2, True)[rank][0]

    def compute() -> None:
        loss_of(model, micro_batch)[0].backward()

    compute()
    if kind == "no collect" and rank == 1:
        optimizer.step()
    elif kind == "never" and rank == 1:
        return  # its script ends
    elif kind == "raises" and rank == 1:
        try:
            raise ValueError("out of data")
        except ValueError:
            sys.excepthook(*sys.exc_info())  # as at a script's end
        return
    handle.collect()
    if kind == "backward":
        compute()
        optimizer.step()
    elif kind == "stranger":
        make_optimizer(model).step()
    elif kind == "unpublished":
        optimizer.step()
        compute()
    elif kind == "written":
        optimizer.step()
        with torch.no_grad():
            model.norm.weight.mul_(2.0)
        compute()
    elif kind == "held":
        optimizer.step()
        model.set_requires_gradient_sync(False)
        compute()
        handle.collect()


MISTAKES = {
    "no collect": "optimizer.step() without collect()",
    "never": "rank 1",
    "raises": "out of data",
    "backward": "optimizer.step() without collect()",
    "stranger": "a SGD that attach was not given",
    "unpublished": "parameters were changed after collect() and not published; give attach the optimizer",
    "written": "was changed after it was published",
    "held": "set_requires_gradient_sync(False)",
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k in ("no collect", "raises") else [pytest.mark.soak]) for k in MISTAKES],
)
def test_mistakes_are_told_on_all_ranks(kind: str) -> None:
    results = run_ranks(_mistake, 2, kind, timeout_s=120)
    assert not any(result.hung for result in results)
    told = [str(result.error) for result in results]
    assert any(MISTAKES[kind] in text for text in told), told
    waiting = results[0].error
    assert waiting is not None
    if kind in ("no collect", "raises"):
        assert results[0].error_type == "PeerError"
        assert MISTAKES[kind] in waiting
