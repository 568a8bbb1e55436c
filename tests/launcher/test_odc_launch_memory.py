"""Memory in the plan: shown where the configuration names a model, left to the ranks where it does not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from launch_helpers import Launcher, finish
from odc_launcher import memory

from odcengine.config import Config, load_config
from odcengine.errors import ConfigError

GIB = 1 << 30
GROUPS: list[dict[str, Any]] = [
    {"name": f"layers.{n}", "shapes": [[102_400, 1000]], "itemsize": 2, "frozen": [], "frozen_itemsize": 0}
    for n in range(10)
]
SHAPES = {
    "num_parameters": 1_024_000_000,
    "num_trained": 1_024_000_000,
    "reference": None,
    "groups": GROUPS,
}


def config(**odc: Any) -> Config:
    return load_config(
        {
            "train_batch_size": 64,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW"},
            "model": {"path": "m"},
            "odc": odc,
        }
    )


@pytest.fixture
def describe(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(memory, "read_shapes", lambda *_: SHAPES)

    def call(
        world_size: int, nodes: int, environ: dict[str, str] | None = None, **odc: Any
    ) -> dict[str, Any]:
        device = odc.pop("device_bytes", None)
        return memory.describe_memory(config(**odc), "c.yaml", world_size, nodes, environ or {}, device)

    return call


def test_one_node(describe: Any) -> None:
    found = describe(8, 1)
    assert (found["taken"], found["hybrid"], found["heap"]) == ("full", None, None)
    assert found["full"]["window"] == 256_000_000
    assert found["full"]["accumulator"] == 512_000_000
    text = "\n".join(memory.render_memory(found))
    assert "memory of each of 8 ranks, 1,024,000,000 parameters, AdamW (sharding: full):" in text
    assert "hybrid" not in text
    assert "not in it: a reference model that the script gives (reference=...)" in text


def test_reference_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shards and their published copy in 16 bits, and its gathered blocks; no gradients, no states."""
    frozen = [{**group, "shapes": [], "frozen": group["shapes"], "frozen_itemsize": 2} for group in GROUPS]
    found = []
    for reference in (None, frozen, [{**group, "name": ""} for group in frozen]):
        shapes = {**SHAPES, "reference": reference}
        monkeypatch.setattr(memory, "read_shapes", lambda *_, shapes=shapes: shapes)
        found.append(memory.describe_memory(config(transport="nvshmem"), "c.yaml", 32, 4, {}))
    without, blocks, root = (data["hybrid"] for data in found)
    shard = 1_024_000_000 * 2 // 32
    assert blocks["frozen"] - without["frozen"] == shard
    assert blocks["window"] - without["window"] == 4 * shard
    assert blocks["reference"] == 5 * shard
    assert blocks["total"] - without["total"] == 5 * shard  # gathered when the model's blocks are not
    assert root["total"] - without["total"] == 5 * shard + 1_024_000_000 * 2
    assert found[1]["heap"]["needed"] - found[0]["heap"]["needed"] == 4 * shard
    text = "\n".join(memory.render_memory(found[1]))
    assert "1,024,000,000 parameters and 1,024,000,000 of the reference model, AdamW" in text
    assert "of this, window and weights of the reference" in text
    assert "not in it" not in text


def test_several_nodes_show_the_price_of_hybrid(describe: Any) -> None:
    found = describe(32, 4)
    assert found["taken"] == "hybrid"
    assert found["hybrid"]["window"] == 4 * found["full"]["window"]
    text = "\n".join(memory.render_memory(found))
    more = (found["hybrid"]["total"] - found["full"]["total"]) / GIB
    assert f"hybrid takes {more:.2f} GiB more a rank" in text
    assert describe(32, 4, sharding="full")["taken"] == "full"
    assert describe(8, 1, sharding="hybrid", node_size=2)["nodes"] == 4


def test_heap_of_nvshmem(describe: Any) -> None:
    found = describe(32, 4, transport="nvshmem")
    assert found["hybrid"]["heap"] > 6 * 1_024_000_000 // 8 > found["full"]["window"]
    assert found["heap"]["bytes"] == found["hybrid"]["heap"]
    assert "NVSHMEM's heap, which holds the windows" in "\n".join(memory.render_memory(found))
    heap = describe(8, 1, transport="nvshmem")["heap"]
    assert heap["bytes"] % (512 << 20) == 0
    assert heap["bytes"] >= heap["needed"] > 750_000_000
    given = describe(8, 1, {"NVSHMEM_SYMMETRIC_SIZE": "4G"}, transport="nvshmem")["heap"]
    assert given["bytes"] == 4 * GIB
    with pytest.raises(ConfigError, match=r"NVSHMEM_SYMMETRIC_SIZE=1M is 1048576 bytes a GPU, but"):
        describe(8, 1, {"NVSHMEM_SYMMETRIC_SIZE": "1M"}, transport="nvshmem")


def test_warning_where_it_does_not_fit(describe: Any) -> None:
    assert memory.memory_warnings(describe(8, 1, device_bytes=80 * GIB)) == []
    (warning,) = memory.memory_warnings(describe(8, 1, device_bytes=GIB))
    assert "its GPU has 1.00 GiB" in warning
    large = {"NVSHMEM_SYMMETRIC_SIZE": "79G"}
    assert memory.memory_warnings(describe(8, 1, large, transport="nvshmem", device_bytes=80 * GIB))


def test_what_cannot_be_known_is_left_to_the_ranks(tmp_path: Path) -> None:
    assert "names no model" in memory.describe_memory(None, None, 2, 1, {})["unknown"]
    path = tmp_path / "c.yaml"
    path.write_text("train_batch_size: 8\noptimizer: {type: SGD}\nmodel: {path: /no/such/model}\n")
    start = time.monotonic()
    told = memory.read_shapes(str(path), {}, timeout_s=0.2)
    assert told == "the model was not read within 0.2 s"
    assert time.monotonic() - start < 50
    assert memory.render_memory({"unknown": "decided in the ranks: x"}) == ["memory: decided in the ranks: x"]


def test_plan_of_a_model(launcher: Launcher) -> None:
    launcher.write("open('started', 'w')")
    model = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    model |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    settings = {"train_batch_size": 8, "optimizer": {"type": "Adam"}, "model": {"config": model}}
    (launcher.folder / "c.json").write_text(json.dumps(settings))
    words = ["--config", "c.json", "--nproc-per-node", "2", "--plan=json", "script.py"]
    code, out, err = finish(launcher.start(*words), 170)
    assert code == 0, err
    found = json.loads(out)["memory"]
    assert found["num_parameters"] == 2 * 64 * 32 + 32 + 2 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32)
    assert found["full"]["weights"] == found["num_parameters"] * 4 // 2
    aligned = found["full"]["accumulator"] - found["full"]["weights"]  # both fp32, one window a group
    assert 0 <= aligned < 3 * 256
    assert not (launcher.folder / "started").exists()
