"""The memory that ``odc-launch --plan`` predicts is what the engine allocates."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, values

import odcengine
from odcengine import _in_flight as in_flight
from odcengine import _model_memory as memory
from odcengine.config import load_config
from odcengine.errors import ConfigError
from odcengine.models import load_model
from odcengine.models.shapes import main, model_shapes

# 21 x 24 embeddings, tied: neither 2 nor 4 ranks divide the rows, so shards are padded.
MODEL = {
    "model_type": "qwen2",
    "vocab_size": 21,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def config(**odc: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 4,
        "steps_per_print": 0,
        "model": {
            "config": MODEL | {"tie_word_embeddings": odc.pop("tied", True)},
            "reference": odc.pop("reference", None),
        },
        "bf16": {"enabled": odc.pop("bf16", False)},
        "optimizer": odc.pop("optimizer", {"type": "AdamW", "params": {"lr": 1e-3}}),
        "odc": {"transport": "shm", **odc},
    }


def groups_of(settings: dict[str, Any], which: str = "groups") -> list[memory.GroupShapes]:
    shapes = model_shapes(load_config(settings))
    return [memory.GroupShapes.of(group) for group in shapes[which] or ()]


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _measure(rank: int, world_size: int, settings: dict[str, Any]) -> dict[str, Any]:
    from odcengine.sharding.on_demand import plan_windows

    torch.set_num_threads(1)
    logger, log = logging.getLogger("odcengine.build"), Lines()
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    engine, optimizer, _, _ = odcengine.initialize(config=settings)
    with engine:
        ids = torch.arange(8)[None]
        engine.backward(engine(input_ids=ids).logits.float().sum(), count=1)
        engine.step()
        assert engine.transport is not None
        grid, groups = engine.transport.grid, engine._sharding.groups
        plan = plan_windows(groups, grid.num_nodes)
        by_kind = {"parameters": 0, "accumulator": 0, "reference": 0}
        for spec, start, end in zip(
            plan.specs, plan.offsets, (*plan.offsets[1:], plan.total_nbytes), strict=True
        ):
            by_kind[spec.name.split()[0]] += end - start
            if "reference" in spec.name:
                by_kind["reference"] += end - start
        frozen = [] if engine.reference is None else list(engine.reference.parameters())
        states = [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        ]
        return {
            "window": by_kind["parameters"],
            "accumulator": by_kind["accumulator"],
            "weights": sum(p.to_local().nbytes for p in engine.module.parameters()),  # type: ignore[attr-defined]
            "optimizer": sum(state.to_local().nbytes for state in states),  # type: ignore[attr-defined]
            "frozen": sum(p.to_local().nbytes for p in frozen),  # type: ignore[attr-defined]
            "published": by_kind["reference"],
            "num_nodes": grid.num_nodes,
            "log": [line for line in log.lines if line.startswith("memory of")],
        }


@pytest.mark.parametrize(
    ("world_size", "odc", "training"),
    [
        (2, {}, memory.Training()),
        (4, {"sharding": "hybrid", "node_size": 2, "bf16": True, "reference": 4}, memory.Training(bf16=True)),
    ],
)
def test_prediction(world_size: int, odc: dict[str, Any], training: memory.Training, tmp_path: Path) -> None:
    """In bf16 and on two nodes with a reference model of other sizes, that has weights in a file."""
    with_reference = "reference" in odc
    if with_reference:
        layers = {"num_hidden_layers": odc["reference"], "tie_word_embeddings": False}
        load_model(MODEL | layers).save_pretrained(tmp_path)  # type: ignore[operator]
        odc = odc | {"reference": str(tmp_path)}
    settings = config(**odc)
    found = values(run_ranks(_measure, world_size, settings))
    reference = groups_of(config(**odc), "reference")
    planned = memory.plan_memory(
        groups_of(config(**odc)), world_size, found[0]["num_nodes"], training, reference
    )
    for measured in found:
        assert measured["window"] == planned.window
        assert measured["accumulator"] == planned.accumulator
    assert max(measured["frozen"] for measured in found) <= planned.frozen
    assert planned.reference == found[0]["published"] + planned.frozen
    assert sum(measured["frozen"] for measured in found) == 2 * sum(group.numel for group in reference)
    (line,) = found[0]["log"]
    assert all(measured["log"] == [] for measured in found[1:])
    assert ("the reference model has" in line) == with_reference
    windows = found[0]["window"] + found[0]["accumulator"]
    assert f"windows {windows / 2**30:.3g} GiB" in line
    assert f"weights {(found[0]['weights'] + found[0]['frozen']) / 2**30:.3g} GiB" in line
    # Padding is not stored: the fullest rank has all of it, the sum all of the model.
    assert max(measured["weights"] for measured in found) <= planned.weights
    assert max(measured["optimizer"] for measured in found) <= planned.optimizer
    numel = sum(group.numel for group in groups_of(config(**odc)))
    assert sum(measured["weights"] for measured in found) == 4 * numel
    assert sum(measured["optimizer"] for measured in found) == 4 * training.states * numel


def test_two_references_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.reference names a/model; leave reference=... away"):
        odcengine.initialize(config=config(reference="a/model"), reference=MODEL)


def test_seven_billion_parameters_on_eight_gpus() -> None:
    """USER_CASES 6: at least 5.25e9 bytes of symmetric memory."""
    blocks = [memory.GroupShapes(f"layers.{n}", ((70_000, 1000),), 2) for n in range(100)]
    planned = memory.plan_memory(blocks, 8, 1, memory.Training(bf16=True))
    assert 0 <= planned.window - 7_000_000_000 * 2 // 8 < 100 * 256
    assert 0 <= planned.accumulator - 7_000_000_000 * 4 // 8 < 100 * 256
    assert planned.heap_needed >= 5.25e9
    assert planned.weights == 7_000_000_000 * 4 // 8
    assert planned.optimizer == 2 * planned.weights


def test_the_price_of_hybrid_sharding() -> None:
    """Windows over G = N / M ranks instead of N; weights and states stay sharded over all."""
    blocks = [memory.GroupShapes("layer", ((4096, 1024),), 4)]
    full, hybrid = (memory.plan_memory(blocks, 32, m, memory.Training(bf16=True)) for m in (1, 4))
    assert (hybrid.window, hybrid.accumulator) == (4 * full.window, 4 * full.accumulator)
    assert (hybrid.weights, hybrid.optimizer) == (full.weights, full.optimizer)
    assert full.exchange == 0
    assert hybrid.exchange == 4 * 4096 * 1024 // 32 * 4


def test_padding_is_gathered() -> None:
    """8 experts on 64 ranks: each has room for one, and a layer is gathered with all of it."""
    layer = [memory.GroupShapes("layer", ((8, 1024, 512),), 2)]
    few, many = (memory.plan_memory(layer, ranks, 1, memory.Training(bf16=True)) for ranks in (8, 64))
    whole = 8 * 1024 * 512 * 2
    assert few.window == many.window == whole // 8
    assert few.gathered == 3 * whole  # parameters, and their gradients in two orders
    assert many.gathered == (8 + 1 + 8) * whole


def test_settings_of_optimizers() -> None:
    assert memory.optimizer_states("AdamW") == 2
    assert memory.optimizer_states("Adam", amsgrad=True) == 3
    assert memory.optimizer_states("SGD") == 0
    assert memory.optimizer_states("SGD", momentum=True) == 1


def test_stored_dtype_counts_without_reading_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"dtype": "bfloat16"}))
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    path = tmp_path / "c.yaml"
    path.write_text(f"train_batch_size: 8\noptimizer: {{type: SGD}}\nmodel: {{path: {tmp_path}}}\n")
    assert main([str(path)]) == 0
    shapes = json.loads(capsys.readouterr().out)
    assert {group["itemsize"] for group in shapes["groups"]} == {2}
    assert sum(len(group["shapes"]) for group in shapes["groups"]) == 3 * 12 + 3
    path.write_text("train_batch_size: 8\noptimizer: {type: SGD}\nmodel: {path: /no/such/model}\n")
    assert main([str(path)]) == 2
    assert "/no/such/model" in capsys.readouterr().err


def test_only_so_much_is_exchanged_at_once() -> None:
    assert in_flight.peak([]) == 0
    assert in_flight.peak([5, 3, 9]) == 17
    limit = in_flight.LIMIT_NBYTES
    assert in_flight.peak([limit // 4] * 100) == limit
    assert in_flight.peak([limit, 3 * limit, limit // 2]) == 4 * limit  # two always may
    blocks = [memory.GroupShapes(f"layer{n}", ((8192, 8192),), 4) for n in range(64)]
    hybrid = memory.plan_memory(blocks, 32, 4, memory.Training(bf16=True))
    assert hybrid.exchange == limit
