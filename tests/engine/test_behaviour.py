"""What users run into: mistakes are named, failures reach every rank, nothing hangs."""

from __future__ import annotations

import gc
import logging
import math
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from distributed import run_ranks, values
from torch import nn
from torch.distributed.fsdp import fully_shard
from transport.conformance import end_stopped, state

import odcengine
from engine.toy import Case, TinyLM, config_for, loss_of, make_model, micro_batches
from odcengine import OdcEngine, _boundary
from odcengine import engine as engine_module
from odcengine._words import Word
from odcengine.errors import ConfigError, UsageError
from odcengine.metrics import StepMetrics

CASE = Case("behaviour")


def _engine(**odc: Any) -> OdcEngine:
    odc = {"timeout_s": 60, "startup_timeout_s": 60, **odc}
    return odcengine.initialize(model=make_model(CASE), config=config_for(CASE, **odc))[0]


def _minibatch(engine: OdcEngine, rank: int, world_size: int, step: int, number: int = 2) -> None:
    for micro_batch in micro_batches("x", step, world_size, equal=True)[rank][:number]:
        loss, count = loss_of(engine, micro_batch)
        engine.backward(loss, count=count)


# ---- failures of a rank ------------------------------------------------------------------------------


LIMIT_S = 3.0


def _wait_for_stop(engine: OdcEngine, index: int) -> None:
    """From here on the limit is short: before, all ranks must come along, also where a machine is slow."""
    while state(int(engine._control._words[index, Word.PID])) != "T":
        engine._control.check()
        time.sleep(0.01)
    engine._control.timeout_s = LIMIT_S


def _fails(rank: int, world_size: int, how: str) -> None:
    engine = _engine()
    _minibatch(engine, rank, world_size, 0)
    engine.step()
    if rank == 1 and how == "raises between":
        _minibatch(engine, rank, world_size, 1, number=1)
        try:
            raise ValueError("bad sample 17")
        except ValueError as error:
            # What the interpreter does with an exception that nobody catches.
            sys.excepthook(type(error), error, error.__traceback__)
            raise
    for micro_batch in micro_batches("x", 1, world_size, equal=True)[rank]:
        loss, count = loss_of(engine, micro_batch)
        if rank == 1 and how == "raises in forward" and engine._micro_batches == 1:
            engine(micro_batch, "no such argument")
        if rank == 1 and how == "stops for ever" and engine._micro_batches == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 1 and how == "is killed" and engine._micro_batches == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and how == "leaves" and engine._micro_batches == 1:
            os._exit(7)
        engine.backward(loss, count=count)
    if how == "stops for ever":
        _wait_for_stop(engine, 1)
    engine.step()


@pytest.mark.parametrize(
    ("how", "patterns"),
    [
        ("raises between", ["rank 1 (host", "step 1, micro-batch 1", "bad sample 17"]),
        ("raises in forward", ["rank 1 (host", "step 1, micro-batch 1, forward", "TypeError"]),
        ("stops for ever", ["no sign of life for 3 s", "rank 1 (host", "step 1, micro-batch 1"]),
        ("is killed", ["rank 1 (host", "died or left without close()", "step 1, micro-batch 1"]),
        ("leaves", ["rank 1 (host", "died or left without close()", "step 1, micro-batch 1"]),
    ],
)
def test_survivors_name_the_rank_the_step_and_the_cause(how: str, patterns: list[str]) -> None:
    results = run_ranks(_fails, 3, how, during=end_stopped)
    for survivor in (results[0], results[2]):
        assert not survivor.hung, survivor.stack
        assert survivor.error_type in ("PeerError", "DeadlineError")
        assert all(pattern in str(survivor.error) for pattern in patterns), survivor.error
        assert survivor.seconds < 50  # not when the engine's limit has passed


SLOW_LIMIT_S = 4.0


def _slow(rank: int, world_size: int, folder: str) -> float:
    engine = _engine()
    _minibatch(engine, rank, world_size, 0)
    engine.step()  # what is slow the first time
    engine._control.timeout_s = SLOW_LIMIT_S
    started = time.monotonic()
    Path(folder, f"waits{rank}").touch()
    number, end = 0, math.inf
    while rank == 1 and time.monotonic() < end:  # longer than the limit after all wait, but it moves
        if end == math.inf and len(list(Path(folder).glob("waits*"))) == world_size:
            end = time.monotonic() + 1.2 * SLOW_LIMIT_S
        time.sleep(0.3)
        _minibatch(engine, rank, world_size, number)
        number += 1
    engine.step()
    engine.close()
    return time.monotonic() - started


def test_slow_but_moving_ranks_are_waited_for(tmp_path: Path) -> None:
    waited = values(run_ranks(_slow, 3, str(tmp_path)))
    assert min(waited) > SLOW_LIMIT_S


# ---- programs that differ between ranks --------------------------------------------------------------


def _different_step_counts(rank: int, world_size: int) -> None:
    engine = _engine()
    for step in range(3 if rank else 2):
        _minibatch(engine, rank, world_size, step)
        engine.step()
    engine.close()


def test_unequal_numbers_of_steps_are_named_at_the_barrier() -> None:
    results = run_ranks(_different_step_counts, 2)
    for result in results:
        assert "rank 0" in str(result.error)
        assert "is at close()" in str(result.error)
        assert "is at the end of step 2" in str(result.error)


def _unequal_collective(rank: int, world_size: int, odc: dict[str, Any]) -> None:
    engine = _engine(**odc)
    _minibatch(engine, rank, world_size, 0)
    engine.step()
    _minibatch(engine, rank, world_size, 1, number=1 + (rank == 0))
    engine.step()


@pytest.mark.parametrize(
    ("odc", "pattern"),
    [
        ({"transport": "collective"}, "rank 0 .* has at least 2 micro-batches in step 1, rank 1 .* only 1"),
        ({"lockstep": True}, "lock-step gather of module group 0.*end of step 1|end of step 1.*lock-step"),
    ],
)
def test_baselines_demand_equal_counts(odc: dict[str, Any], pattern: str) -> None:
    results = run_ranks(_unequal_collective, 2, odc)
    assert not any(result.hung for result in results)
    assert re.search(pattern, " ".join(str(result.error) for result in results)), results


# ---- changing parameters outside of step() -----------------------------------------------------------


def _load_weights(rank: int, world_size: int, publish: bool) -> torch.Tensor:
    engine = _engine()
    _minibatch(engine, rank, world_size, 0)
    engine.step()
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.mul_(0.5)
    if publish:
        engine.publish()
    engine.eval()
    with torch.no_grad():
        logits = engine(torch.arange(5)[None], 0).clone()
    engine.close()
    return logits


def test_changed_parameters_need_publish() -> None:
    for result in run_ranks(_load_weights, 2, False):
        assert result.error_type in ("UsageError", "PeerError")
        assert "was changed after it was published" in str(result.error)
        assert "engine.publish() on every rank" in str(result.error)


def test_published_changes_are_seen_by_all_ranks() -> None:
    first, second = values(run_ranks(_load_weights, 2, True))
    assert torch.equal(first, second)


def _change_unseen(rank: int, world_size: int, how: str) -> None:
    engine = _engine()
    _minibatch(engine, rank, world_size, 0, number=1)
    if how == "in the minibatch":
        with torch.no_grad():
            next(engine.parameters()).mul_(0.5)
    engine.step()
    for parameter in engine.parameters():
        if how == "data":
            parameter.data.mul_(0.5)
        if how == "local":
            parameter.to_local().detach().mul_(0.5)
    _minibatch(engine, rank, world_size, 1)


@pytest.mark.parametrize("how", ["data", "local", "in the minibatch"])
def test_changes_that_versions_do_not_show_are_noticed(how: str) -> None:
    for result in run_ranks(_change_unseen, 2, how):
        assert "was changed after it was published" in str(result.error), result


def _raw_backward(rank: int, world_size: int, transport: str) -> None:
    engine = _engine(transport=transport)
    assert "the user's code between engine calls" in engine._control._slots.place(rank)  # no longer starting
    loss, _ = loss_of(engine, micro_batches("x", 0, world_size, equal=True)[rank][0])
    loss.backward()


@pytest.mark.parametrize("transport", ["shm", "collective"])
def test_a_backward_that_would_not_be_counted_is_refused(transport: str) -> None:
    for result in run_ranks(_raw_backward, 2, transport):
        assert "Call engine.backward(loss) instead of loss.backward()" in str(result.error), result
        assert "failed in" not in str(result.error) or "micro-batch 0, backward" in str(result.error), result


def _drop(rank: int, world_size: int) -> tuple[list[int], list[bool]]:
    counts, warned = [], []
    for _ in range(4):
        engine = _engine()
        _minibatch(engine, rank, world_size, 0)
        engine.step()
        torch.distributed.barrier()  # all are done with each other's windows
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del engine
            gc.collect()
        warned.append(any("dropped without close()" in str(w.message) for w in caught))
        counts.append(Path("/proc/self/maps").read_text().count("memfd:odc-"))
    return counts, warned


def test_engines_that_are_dropped_give_their_memory_back() -> None:
    for counts, warned in values(run_ranks(_drop, 2)):
        assert counts == [0] * 4
        assert warned == [True] * 4


LAYERS = {"intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
PACKED: dict[str, Any] = {
    "config": {
        "train_batch_size": 4,
        "model": {"config": {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, **LAYERS}},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    },
    "training_data": [{"input_ids": [1, 2, 3]}] * 4,
}


def _evaluation_mode(rank: int, world_size: int) -> tuple[bool, float, int, bool]:
    engine, _, loader, _ = odcengine.initialize(**PACKED)
    assert loader is not None
    trains = engine.module.training
    engine.eval()  # without dropout: a choice of the script
    for minibatch in loader:
        for micro_batch in minibatch:
            engine.backward(engine(micro_batch))
        count = engine.step().count
    with mock.patch("odcengine.engine.logger.warning") as warning:
        for _ in range(3):
            for minibatch in loader:  # and no step
                for micro_batch in minibatch:
                    engine.backward(engine(micro_batch))
    warned = [call.args[0] for call in warning.call_args_list]
    engine.step()
    engine.close()
    return trains, count, len(warned), "engine.step() was not called" in warned[0]


def test_evaluation_mode_and_a_step_that_is_forgotten() -> None:
    assert values(run_ranks(_evaluation_mode, 2)) == [(True, 8.0, 1, True)] * 2


def _whole_minibatch(rank: int, world_size: int) -> None:
    engine, _, loader, _ = odcengine.initialize(**PACKED)
    assert loader is not None
    engine(next(iter(loader)))


def test_a_whole_minibatch_is_refused() -> None:
    for result in run_ranks(_whole_minibatch, 2):
        assert "for micro_batch in minibatch: engine.backward" in str(result.error), result


def _load_after_evaluation(rank: int, world_size: int) -> None:
    engine = _engine()
    engine.eval()
    with torch.no_grad():
        engine(torch.arange(5)[None], 0)
        next(engine.train().parameters()).mul_(0.5)
    _minibatch(engine, rank, world_size, 0)


def test_a_load_after_an_evaluation_is_seen_too() -> None:
    for result in run_ranks(_load_after_evaluation, 2):
        assert "was changed after it was published" in str(result.error)


def _thaw(rank: int, world_size: int) -> None:
    case = Case("thaw", {"frozen": True})
    engine = odcengine.initialize(model=make_model(case), config=config_for(case))[0]
    for parameter in engine.parameters():
        parameter.requires_grad_(True)
    _minibatch(engine, rank, world_size, 0)


def test_thawing_after_initialize_is_refused() -> None:
    for result in run_ranks(_thaw, 2):
        assert "was thawed after odcengine.initialize" in str(result.error)


# ---- numbers -----------------------------------------------------------------------------------------


def _bad_gradient(rank: int, world_size: int) -> dict[str, Any]:
    """Also by the way of GPUs, whose hosts learn of it after the update; fused optimizers run on CPUs too."""
    found: dict[str, Any] = {"in turn": _train_badly(rank, world_size, _engine())}
    with mock.patch.object(_boundary.Boundary, "_runs_ahead", return_value=True):
        engine = odcengine.initialize(
            model=make_model(Case("x")),
            config=config_for(Case("x")),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
        )[0]
        found["ahead"] = _train_badly(rank, world_size, engine)
    return found


def _train_badly(rank: int, world_size: int, engine: OdcEngine) -> tuple[list[bool], list[str]]:
    applied = []
    told: list[str] = []
    for step in range(4):
        for micro_batch in micro_batches("x", step, world_size, equal=True)[rank]:
            loss, count = loss_of(engine, micro_batch)
            if step == 1 and rank == 1:
                loss = loss * float("inf")
            if step == 2:
                loss, count = loss * 0, 0
            engine.backward(loss, count=count)
        before = [p.detach().to_local().clone() for p in engine.parameters()]
        with mock.patch.object(_boundary.logger, "warning", lambda text, *values: told.append(text % values)):
            applied.append(engine.step().applied)
        same = all(torch.equal(a, b.to_local()) for a, b in zip(before, engine.parameters(), strict=True))
        assert same != applied[-1]
    engine.close()
    return applied, told


def test_non_finite_gradients_and_nothing_to_learn_skip_the_step_on_all_ranks() -> None:
    for rank, found in enumerate(values(run_ranks(_bad_gradient, 3))):
        for applied, told in found.values():
            assert applied == [True, False, False, True]
            assert told == [
                "step 1 is skipped on all ranks: its gradient is not finite, nor is the loss of rank 1",
                "step 2 is skipped on all ranks: it has nothing to learn",
            ] * (rank == 0)


def _times(rank: int, world_size: int) -> list[StepMetrics]:
    """Several times, until the machine has held up neither rank for long; all ranks see the same times."""
    engine = _engine()
    steps: list[StepMetrics] = []
    while len(steps) < 2 or (len(steps) < 12 and not _tells_who_waited(steps[-1])):
        _minibatch(engine, rank, world_size, len(steps), number=1)
        if rank == 0:
            time.sleep(0.4)
        _minibatch(engine, rank, world_size, len(steps), number=1)
        steps.append(engine.step())
    engine.close()
    return steps


def _tells_who_waited(metrics: StepMetrics) -> bool:
    return (
        metrics.busy_s[0] > 0.4 > metrics.busy_s[1]
        and metrics.wait_s[1] > 0.3 > metrics.wait_s[0]
        and metrics.idle_shares[1] > 0.5 > metrics.idle_shares[0]
    )


def test_times_tell_who_waited() -> None:
    steps, others = values(run_ranks(_times, 2))
    for metrics, other in zip(steps, others, strict=True):
        for field in ("busy_s", "wait_s", "loss", "grad_norm", "count", "num_micro_batches"):
            assert getattr(metrics, field) == getattr(other, field)
        assert metrics.busy_s[0] > 0.4
        assert metrics.num_micro_batches == 4
    assert _tells_who_waited(steps[-1]), steps


# ---- one process, two engines, other optimizers ------------------------------------------------------


def _two_engines(rank: int, world_size: int) -> list[float]:
    first, second = _engine(), _engine()
    losses = []
    for step in range(3):
        for engine in (first, second):
            _minibatch(engine, rank, world_size, step, number=(rank + step) % 3)
            losses.append(engine.step().loss)
    first.close()
    _minibatch(second, rank, world_size, 3)
    second.step()
    second.close()
    return losses


def test_two_engines_in_one_process() -> None:
    for losses in values(run_ranks(_two_engines, 2)):
        assert losses[0::2] == pytest.approx(losses[1::2], rel=1e-12)


def _own_optimizer(rank: int, world_size: int, build: Callable[[TinyLM], Any]) -> tuple[float, float]:
    model = make_model(CASE)
    source = build(model)
    engine, optimizer, _, scheduler = odcengine.initialize(
        model=model,
        config=config_for(CASE),
        optimizer=source,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    )
    assert scheduler is engine.scheduler
    for step in range(2):
        _minibatch(engine, rank, world_size, step)
        engine.step()
    engine.close()
    weights = [p.detach().to_local().sum().item() for p in engine.parameters()]
    return optimizer.param_groups[0]["lr"], sum(weights)


def _made_before(model: TinyLM) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)


def _made_from(model: TinyLM) -> Any:
    return lambda parameters: torch.optim.SGD(parameters, lr=0.1)


def test_the_scripts_own_optimizer_and_scheduler() -> None:
    before = values(run_ranks(_own_optimizer, 2, _made_before))
    after = values(run_ranks(_own_optimizer, 2, _made_from))
    assert before[0][0] == 0.1 * 0.5**2
    assert [w for _, w in before] == pytest.approx([w for _, w in after], rel=1e-12)


def test_one_process_without_a_launcher() -> None:
    results = run_ranks(_alone, 1)
    assert values(results)[0] == ("single process", 1)


def _alone(rank: int, world_size: int) -> tuple[str, int]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    engine = _engine()
    _minibatch(engine, 0, 1, 0)
    assert engine.step().applied
    engine.close()
    from odcengine.ranks import read_rank_info

    return read_rank_info().source, engine.topology.world_size


# ---- bad input to initialize -------------------------------------------------------------------------


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.blocks[1].weight = self.blocks[0].weight


class _Odd(nn.Module):
    """Another shape on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3 + int(os.environ["RANK"]))


class _Nested(nn.Module):
    """Blocks in lists of lists and in dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            [nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.ModuleDict({"a": nn.Linear(4, 4)})]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for block in stage.values() if isinstance(stage, nn.ModuleDict) else stage:
                x = torch.tanh(block(x))
        return x


def _nested(rank: int, world_size: int) -> tuple[int, bool]:
    config = config_for(CASE)
    config["odc"]["wrap"] = "auto"
    engine = odcengine.initialize(model=_Nested(), config=config)[0]
    engine.backward(engine(torch.ones(2, 4)).sum(), count=2)
    applied = engine.step().applied
    engine.close()
    return len(engine._sharding._fsdp_modules), applied


def test_blocks_in_nested_containers() -> None:
    assert values(run_ranks(_nested, 2)) == [(4, True)] * 2  # three blocks and the root


def _of_parameters(*shapes_and_dtypes: Any) -> nn.Module:
    model = nn.Module()
    for number, (shape, dtype) in enumerate(shapes_and_dtypes):
        model.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape, dtype=dtype)))
    return model


def _scalar() -> nn.Module:
    return _of_parameters(((), torch.float32))


def _empty() -> nn.Module:
    return _of_parameters(((0, 3), torch.float32))


def _mixed() -> nn.Module:
    return _of_parameters(((2,), torch.float32), ((2,), torch.float64))


def _complex() -> nn.Module:
    return _of_parameters(((2,), torch.complex64))


def _frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def _meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(2, 2)


def _half() -> nn.Module:
    return TinyLM().half()


def _compiled() -> nn.Module:
    return cast(nn.Module, torch.compile(TinyLM()))  # nothing is compiled before the first call


class DistributedDataParallel(nn.Module):
    """By its name alone; the real one needs a process group before initialize makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.module = TinyLM()


def _sharded() -> nn.Module:
    model = TinyLM()
    torch.distributed.init_process_group("gloo")
    fully_shard(model)
    return model


BAD = {
    "half precision": (_half, {}, "has dtype torch.float16, in which small gradients"),
    "sharded": (_sharded, {}, "is a DTensor, so the model is sharded already"),
    "compiled": (_compiled, {}, "it is wrapped in OptimizedModule; give the model that torch.compile was"),
    "DDP": (DistributedDataParallel, {}, "it is wrapped in DistributedDataParallel; give the model itself"),
    "no parameters": (nn.ReLU, {}, "ReLU has no parameters"),
    "nothing trainable": (_frozen, {}, "no parameter of Linear requires a gradient"),
    "meta device": (_meta, {}, "parameter weight is on meta"),
    "tied across groups": (
        _Tied,
        {},
        "blocks.0.weight (group blocks.0) and blocks.1.weight (group blocks.1) are one tied parameter",
    ),
    "models differ": (_Odd, {}, "requires_grad of its tensors) of ranks [1] differs from rank 0's"),
    "scalar": (_scalar, {}, "parameter p0 has shape []"),
    "empty": (_empty, {}, "parameter p0 has shape [0, 3]"),
    "mixed dtypes": (_mixed, {}, "p0 has dtype torch.float32 and p1 torch.float64 in one group (the root)"),
    "complex": (_complex, {}, "parameter p0 has dtype torch.complex64"),
    "container": (_Nested, {"odc": {"wrap": ["ModuleList"]}}, "odc.wrap: ModuleList only holds modules"),
    "unknown block class": (TinyLM, {"odc": {"wrap": ["Blok"]}}, "odc.wrap: Blok: no module of TinyLM"),
    "unknown key": (TinyLM, {"optimiser": {}}, "optimiser"),
    "no optimizer": (TinyLM, {"optimizer": None}, "optimizer: the configuration has none"),
    "node size": (TinyLM, {"odc": {"node_size": 3}}, "node_size: 3 does not divide the 2 ranks of host"),
    "no mapping": (TinyLM, "configs/no_such_file.yaml", "no_such_file.yaml"),
}


def _initialize(rank: int, world_size: int, name: str) -> None:
    make, changes, _ = BAD[name]
    config: Any = changes
    if not isinstance(changes, str):
        config = config_for(Case("bad", config=changes))
        if "wrap" not in changes.get("odc", {}):
            config["odc"]["wrap"] = "auto"
        config = {key: value for key, value in config.items() if value is not None}
    odcengine.initialize(model=make(), config=config)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    for result in run_ranks(_initialize, 2, name):
        assert not result.hung, result.stack
        assert result.error_type in ("ConfigError", "PeerError")
        assert BAD[name][2] in str(result.error), result.error


def test_no_configuration_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ODC_CONFIG", raising=False)
    with pytest.raises(ConfigError, match="or start the script with odc-launch --config"):
        odcengine.initialize(model=nn.Linear(1, 1))


def test_an_initialize_that_fails_leaves_nothing_for_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OdcEngine, "_resume", mock.Mock(side_effect=UsageError("no")))
    config = {**SMALL, "odc": {"wrap": ["Linear"]}}
    with mock.patch.object(engine_module, "atexit") as exits, pytest.raises(UsageError):
        odcengine.initialize(model=nn.Sequential(nn.Linear(1, 1)), config=config)
    assert len(exits.register.call_args_list) == 1
    assert exits.unregister.call_args_list == exits.register.call_args_list
    with pytest.raises(ConfigError, match=r"was given a str; give a torch\.nn\.Module"):
        odcengine.initialize(model="a/model", config=SMALL)


SMALL: dict[str, Any] = {"train_batch_size": "auto", "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def _misuse(rank: int, world_size: int) -> list[str]:
    engine = _engine()
    messages = []
    for call in (
        lambda: engine.backward(torch.ones(3, requires_grad=True), count=1),
        lambda: engine.backward(torch.ones((), requires_grad=True)),
        lambda: engine.backward(torch.ones((), requires_grad=True), count=-1),
        lambda: engine.backward(torch.ones((), requires_grad=True).item(), count=1),  # type: ignore[arg-type]
    ):
        try:
            call()
        except UsageError as error:
            messages.append(str(error))
        engine._control._mine[10] = 0  # forget the failure: each of these ends the job
    engine.optimizer.step()  # between minibatches it finds nothing to do
    _minibatch(engine, rank, world_size, 0)
    try:
        engine.optimizer.step()
    except UsageError as error:
        messages.append(str(error))
    engine._control._mine[10] = 0
    with mock.patch("odcengine.engine.logger.warning") as warning:
        engine.close()
    engine.optimizer.step()  # the optimizer is the script's again
    text, *values = warning.call_args.args
    return [*messages, text % tuple(values)]


def test_misuse_of_backward_is_named() -> None:
    messages = values(run_ranks(_misuse, 1))[0]
    assert "the loss has shape [3]" in messages[0]
    assert "give count=..." in messages[1]
    assert "count is -1.0" in messages[2]
    assert "the loss is a float; give a tensor with its graph" in messages[3]
    assert "Call engine.step() on every rank instead" in messages[4]
    assert "2 micro-batches had a backward and no engine.step()" in messages[5]


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
SCHEDULE = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 1}}


def _port_of_a_script(
    rank: int, world_size: int, divide: bool, num_epochs: int, schedule: dict[str, Any]
) -> str:
    """Two epochs of two steps; returns what was warned of."""
    pytest.importorskip("transformers")
    warned: list[str] = []
    keep = logging.Handler(logging.WARNING)
    keep.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("odcengine").addHandler(keep)
    engine, _, loader, _ = odcengine.initialize(
        config={
            **SMALL,
            "train_batch_size": 4,
            "model": {"config": LLAMA},
            "data": {"num_epochs": num_epochs},
            "scheduler": schedule,
        },
        training_data=[{"input_ids": [3, 4, 5, 6][: 2 + n % 3]} for n in range(8)],
    )
    for _ in range(2):
        for minibatch in loader:
            for micro_batch in minibatch:
                loss = engine(micro_batch)
                engine.backward(loss / 2 if divide else loss)
            engine.step()
    with pytest.raises(UsageError, match=r"Call engine\.save_pretrained\(folder\) on all ranks"):
        engine.module.save_pretrained("never-written")
    engine.close()
    return "\n".join(warned)


def test_habits_of_other_loops_are_warned_of() -> None:
    quiet, _ = values(run_ranks(_port_of_a_script, 2, False, 2, SCHEDULE))
    assert "backward: the loss was divided" not in quiet
    assert "behind the end of the schedule" not in quiet
    loud, other = values(run_ranks(_port_of_a_script, 2, True, 1, SCHEDULE))
    assert loud.count("backward: the loss was divided after engine(micro_batch) had returned it") == 1
    assert loud.count("behind the end of the schedule") == 1
    assert re.search(
        r"step 2 has lr \S+ and is behind the end of the schedule WarmupDecayLR, which was made for the 2 "
        r"steps of data\.num_epochs: 1\.",
        loud,
    )
    assert "divided" not in other
    assert "behind the end" not in other
    for chosen in ({"total_num_steps": 2}, None):  # a length of the script's own, and a schedule without one
        schedule = {**SCHEDULE, "params": chosen} if chosen else {"type": "WarmupLR", "params": {}}
        assert "behind the end" not in values(run_ranks(_port_of_a_script, 1, False, 1, schedule))[0]


def _after_close(rank: int, world_size: int) -> str:
    with _engine() as engine:
        engine.step()
    with pytest.raises(UsageError) as caught:
        engine.step()
    return str(caught.value)


def test_a_closed_engine_says_so() -> None:
    assert "the engine is closed" in values(run_ranks(_after_close, 2))[0]
