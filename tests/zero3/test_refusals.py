"""What cannot work on demand is refused when an engine is attached, with the reason; nothing has changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import run_ranks, values

from zero3.toy import Case, make_engine

pytest.importorskip("deepspeed")


def _set(path: str, value: Any) -> Callable[[Any], Any]:
    """Patch an attribute of the engine or of what hangs on it."""

    def patch(engine: Any) -> Any:
        target = engine
        *parents, name = path.split(".")
        for part in parents:
            target = getattr(target, part)
        return mock.patch.object(target, name, value)

    return patch


# Feature -> how an engine that has it differs, and a part of the reason. Building each for real would need
# its hardware, kernels or models; what is read here is what DeepSpeed sets for them.
FEATURES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "offload_optimizer": (_set("optimizer.offload_optimizer", True), "offload_optimizer: its shards move"),
    "offload_param": (_set("optimizer.offload_param", True), "offload_param (also to NVMe)"),
    "nvme": (_set("optimizer.parameter_offload.offload_device", "nvme"), "offload_param (also to NVMe)"),
    "zenflow": (_set("optimizer.zenflow", True), "zenflow"),
    "muon": (_set("optimizer.use_muon", True), "Muon"),
    "hpz": (_set("optimizer.zero_hpz_partition_size", 2), "zero_hpz_partition_size"),
    "qwz": (_set("optimizer.parameter_offload.zero_quantized_weights", True), "zero_quantized_weights"),
    "qwz frozen": (_set("optimizer.zero_quantized_nontrainable_weights", True), "nontrainable_weights"),
    "qgz": (_set("optimizer.all2all_process_group", object()), "zero_quantized_gradients"),
    "sequence parallel": (_set("optimizer.sequence_parallel_size", 2), "sequence_parallel_size"),
    "moe": (_set("has_moe_layers", True), "mixture of experts"),
    "mpu": (_set("optimizer.model_parallel_group", object()), "tensor parallelism"),
    "autotp": (_set("autotp_size", lambda: 2), "tensor parallelism"),
    "deepcompile": (_set("is_deepcompile_enabled", lambda: True), "deepcompile"),
    "autocast": (_set("torch_autocast_enabled", lambda: True), "torch_autocast"),
    "sanity checks": (_set("optimizer.enable_sanity_checks", True), "enable_sanity_checks"),
    "granularity": (_set("zero_module_granularity_threshold", lambda: 9), "granularity_threshold"),
}


def _refused(rank: int, world_size: int) -> dict[str, str]:
    import deepspeed

    import odcengine
    from odcengine.deepspeed import guard
    from odcengine.deepspeed.guard import check_engine
    from odcengine.errors import ConfigError, UsageError

    found = {}

    def attach(name: str, engine: Any, **odc: Any) -> None:
        before = (type(engine.optimizer), engine.optimizer.__dict__.keys() if engine.optimizer else None)
        with pytest.raises((ConfigError, UsageError)) as caught:
            odcengine.attach(engine, startup_timeout_s=30, **odc)
        after = (type(engine.optimizer), engine.optimizer.__dict__.keys() if engine.optimizer else None)
        assert before == after
        found[name] = str(caught.value)

    engine = make_engine(Case("refused"))
    for name, (patch, _) in FEATURES.items():
        with patch(engine):
            attach(name, engine)
    with mock.patch.dict(guard.TESTED, {"0.19.8": {**guard.TESTED["0.19.8"], "free_param": "another"}}):
        attach("version", engine)
    with mock.patch("torch.distributed.get_world_size", lambda group=None: 1 if group is not None else 2):
        attach("groups", engine)
    attach("collective", engine, transport="collective")
    attach("unknown key", engine, lockstep=True)
    attach("wrong value", engine, transport="ship")
    attach("wrong device", engine, transport="cuda_p2p")
    attach("misspelt key", engine, tranport="shm")
    tokens = torch.arange(5)[None]
    engine.backward(engine(tokens, 0).sum())
    attach("late", engine)  # its gradients would be lost
    engine.step()
    check_engine(engine)  # between minibatches it may be attached
    attach("not an engine", SimpleNamespace(optimizer=None))
    attach("stage 2", make_engine(Case("stage2", config={"zero_optimization": {"stage": 2}})))
    deepspeed.runtime.zero.partition_parameters.Init.param_id = 0
    return found


@pytest.fixture(scope="module")
def refused() -> dict[str, str]:
    first, second = values(run_ranks(_refused, 2, timeout_s=150))
    assert first == second
    return first


@pytest.mark.parametrize("name", FEATURES)
def test_feature_is_refused_with_the_reason(name: str, refused: dict[str, str]) -> None:
    assert FEATURES[name][1] in refused[name]
    assert any(word in refused[name] for word in ("remove", "use ", "not supported"))


def test_other_refusals(refused: dict[str, str]) -> None:
    assert "functions that it relies on: free_param" in refused["version"]
    assert "odc.allow_untested: true" in refused["version"]
    assert "process group of 1 of 2 ranks" in refused["groups"]
    assert "stock DeepSpeed" in refused["collective"]
    assert "odc.lockstep: an attached DeepSpeed engine does not know it" in refused["unknown key"]
    assert (
        "odc.tranport: an attached DeepSpeed engine does not know it; did you mean transport?"
        in (refused["misspelt key"])
    )
    assert "gradients of backwards without a step" in refused["late"]
    assert "odc.transport" in refused["wrong value"]
    assert "odc.transport: cuda_p2p is for ranks on cuda, but the engine is on cpu" in refused["wrong device"]
    assert "expected the engine that deepspeed.initialize returns" in refused["not an engine"]
    assert "expected that of ZeRO stage 3" in refused["stage 2"]


def test_an_untested_version_can_be_allowed() -> None:
    from odcengine.deepspeed import guard

    assert guard.check_version(allow_untested=False) is None  # the installed one was tested
    with mock.patch.dict(guard.TESTED, {"0.19.8": {**guard.TESTED["0.19.8"], "free_param": "another"}}):
        assert "free_param" in str(guard.check_version(allow_untested=True))


def test_fingerprints_are_of_functions_that_exist() -> None:
    from odcengine.deepspeed import guard

    found = guard.fingerprints()
    assert found.keys() == guard.TESTED["0.19.8"].keys()
    assert len(set(found.values())) == len(found), json.dumps(found)  # "missing" would come twice


def test_layout() -> None:
    from odcengine.deepspeed.layout import LARGE_SHARD, ParamSpec, ZeroLayout, fetch_runs

    def spec(numel: int, trained: bool = True, dtype: torch.dtype = torch.bfloat16) -> ParamSpec:
        return ParamSpec("p", 2 * numel - 1, numel, dtype, trained)

    large = LARGE_SHARD
    layout = ZeroLayout.of(
        [spec(3), spec(5), spec(large), spec(7), spec(1), spec(9, False), spec(2, False, torch.float32)]
    )
    a, b, c, d, e, f, g = layout.slots
    assert [s.accumulator for s in layout.slots] == [0, 0, 1, 2, 2, -1, -1]
    assert layout.accumulator_numels == (8, large, 8)
    assert (b.offset, b.grad_offset, e.grad_offset) == (6, 3, 7)
    assert layout.trained_nbytes == 2 * (3 + 5 + large + 7 + 1)
    assert f.offset % 16 == g.offset % 16 == 0
    assert layout.row_nbytes % 16 == 0
    assert layout.row_nbytes >= g.end
    # Large ones alone; neighbours of one dtype together; a gap or another dtype separates.
    assert fetch_runs([e, a, c, b, d]) == [[a, b], [c], [d, e]]
    assert fetch_runs([a, d, g, f]) == [[a], [d], [f], [g]]
