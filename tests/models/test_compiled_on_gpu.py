"""Compiled blocks on a GPU: FlashAttention's kernels are part of the graph, the host launches less."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from odcengine.data import MicroBatch, pack_samples
from odcengine.losses import causal_lm_loss_sum
from odcengine.models import enable_checkpointing, prepare_model
from odcengine.models.compiled import compile_blocks
from odcengine.sharding.wrap import block_modules

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]

ROWS = [(700, 300, 24), (2048,), (1, 1, 1500, 9), (640, 640, 640), (333,), (5, 1200, 70, 800)]


def _models(checkpointing: bool, **values: Any) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The same weights in float32, in 16 bits, and in 16 bits with compiled blocks."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    config = transformers.Qwen2Config(**{**shape, **values})
    model = prepare_model(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)).train()
    if checkpointing:
        enable_checkpointing(model)
    plain = model.to("cuda", torch.bfloat16)
    exact, fast = copy.deepcopy(plain).float(), copy.deepcopy(plain)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_blocks(block_modules(fast))
    return exact, plain, fast


def _row(number: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(number)
    return pack_samples(
        [{"input_ids": torch.randint(1024, (n,), generator=generator).numpy()} for n in ROWS[number]]
    ).to("cuda")


def _run(model: nn.Module, row: MicroBatch) -> list[torch.Tensor]:
    """The loss and the gradients, in float32."""
    model.zero_grad()
    loss = causal_lm_loss_sum(model, row)
    loss.backward()
    return [loss.detach().float(), *(p.grad.float() for p in model.parameters() if p.grad is not None)]


def _error(found: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    assert len(found) == len(right)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_graph_for_all_rows(checkpointing: bool) -> None:
    exact, plain, fast = _models(checkpointing)
    counters = torch._dynamo.utils.counters
    graphs = []
    for number in range(len(ROWS)):
        row = _row(number)
        right = _run(exact, row)
        # As far from float32 as 16 bits without compilation are, or nearer.
        assert _error(_run(fast, row), right) <= 1.5 * _error(_run(plain, row), right)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1] * len(ROWS)
    assert not counters["graph_break"]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_host_does_not_wait_and_launches_less(checkpointing: bool) -> None:
    _, plain, fast = _models(checkpointing)
    row, other = _row(0), _row(3)
    launches = []
    for model in (plain, fast):
        _run(model, row)  # compiles
        _run(model, row)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            _run(model, other)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            _run(model, row)
            torch.cuda.synchronize()
        launches.append(sum("Launch" in event.key and event.count for event in recorded.key_averages()))
    print(f"launches of 4 layers, checkpointing {checkpointing}: {launches[0]}, compiled {launches[1]}")
    assert launches[1] < 0.6 * launches[0]


def test_sliding_windows_and_other_heads() -> None:
    """A window shorter than a sample; heads too large for the kernels: blocks are compiled in pieces."""
    windows = {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2}
    for values in (windows, {"head_dim": 320, "hidden_size": 1280}):
        exact, plain, fast = _models(False, **values)
        for number in (0, 1, 3):
            row = _row(number)
            right = _run(exact, row)
            assert _error(_run(fast, row), right) <= 1.5 * _error(_run(plain, row), right)
