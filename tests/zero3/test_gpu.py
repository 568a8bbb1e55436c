"""An attached engine on GPUs: the toy's cases, and a model with large parameters against stock DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import init_process_group, run_ranks, values

from zero3.test_exactness import CASES, _train_all
from zero3.toy import error_of, reference

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.multi_gpu

ENV = {"DS_ACCELERATOR": "cuda", "DS_BUILD_OPS": "0"}
NAMES = tuple(case.name for case in CASES)


def _train_on_gpus(rank: int, world_size: int, odc: dict[str, Any]) -> dict[str, Any]:
    init_process_group()
    return _train_all(rank, world_size, odc, NAMES)


@pytest.mark.parametrize("transport", ["cuda_p2p", "nvshmem"])
def test_equals_one_process(transport: str) -> None:
    if transport == "nvshmem" and torch.cuda.device_count() < 2:
        pytest.skip("NVSHMEM needs a GPU for each rank")
    ranks = values(run_ranks(_train_on_gpus, 2, {"transport": transport}, env=ENV, gpus=True, timeout_s=280))
    kind = {"cuda_p2p": "CudaP2PTransport", "nvshmem": "NvshmemTransport"}[transport]
    assert {(case["device"], case["transport"]) for rank in ranks for case in rank.values()} == {
        ("cuda", kind)
    }
    errors = {
        case.name: max(error_of(rank[case.name]["weights"], reference(case, 2)["weights"]) for rank in ranks)
        for case in CASES
    }
    assert {name: error for name, error in errors.items() if error > 5e-5} == {}


def _large(rank: int, world_size: int, attach: bool) -> dict[str, Any]:
    """A model whose matrices are moved by themselves, in bf16; random delays between ranks where it may."""
    import deepspeed
    import transformers

    import odcengine

    deepspeed.logger.setLevel("ERROR")
    init_process_group()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
    )
    model = transformers.LlamaForCausalLM(config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1_000_000},
        },
    )
    attached = odcengine.attach(engine, timeout_s=60) if attach else None
    losses, norms = [], []
    generator = torch.Generator().manual_seed(5)
    for step in range(6):
        batches = torch.randint(512, (2, 3, 1, 256), generator=generator).cuda()
        for number in range(3):
            if attach and (step + number + rank) % 3 == 0:
                torch.cuda._sleep(50_000_000)
            loss = engine(input_ids=batches[rank, number], labels=batches[rank, number]).loss
            engine.backward(loss / 3)
            losses.append(float(loss.detach()))
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    assert engine.device.type == "cuda"
    if attached is not None:
        assert type(attached.transport).__name__ == "CudaP2PTransport"
        attached.close()
    return {"losses": losses, "norms": norms}


def test_large_parameters_as_stock_deepspeed() -> None:
    stock = values(run_ranks(_large, 2, False, env=ENV, gpus=True, timeout_s=200))
    ranks = values(run_ranks(_large, 2, True, env=ENV, gpus=True, timeout_s=200))
    for mine, theirs in zip(ranks, stock, strict=True):
        assert mine["norms"] == pytest.approx(theirs["norms"], rel=2e-2)
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=5e-3)
