"""The loss on a GPU: its kernel, a row of 65,536 tokens with 151,936 words, and a host that does not wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_ranks, values
from torch import nn

from odcengine.data import IGNORE_INDEX
from odcengine.losses import LogitTransform, linear_cross_entropy_sum, softmax, token_cross_entropy_sum

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

GIB = 2**30


def test_the_kernel_works_here() -> None:
    """Otherwise the tests of this file would try torch's operations twice."""
    assert softmax._kernel(torch.device(DEVICE, torch.cuda.current_device())) is not None


@pytest.fixture(params=["kernel", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(softmax, "_kernel", lambda device: None)
    return str(request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("vocab", [1, 5, 1000, 16384, 16385, 151_936, 151_937])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_softmax_of_logits(vocab: int, dtype: torch.dtype) -> None:
    """Against torch in float64, logits of a confident model; the right word is first, last and between."""
    torch.manual_seed(0)
    logits = (4 * torch.randn(70, vocab, device=DEVICE)).to(dtype)
    targets = torch.randint(vocab, (70,), device=DEVICE)
    targets[0], targets[1] = 0, vocab - 1
    logits[2, targets[2]] = 40.0  # next to certain: what is left of its gradient must not be rounded away
    wide = logits.double().requires_grad_()
    right = nn.functional.cross_entropy(wide, targets, reduction="sum")
    (gradient,) = torch.autograd.grad(right, wide)
    before = logits.clone()
    expected = pytest.approx(float(right.detach()), rel=1e-5, abs=1e-6)
    assert float(softmax.softmax_loss_(logits.clone(), targets, False)) == expected
    loss = softmax.softmax_loss_(logits, targets, True)
    assert loss.dtype == torch.float32
    assert float(loss) == expected
    assert not torch.equal(logits, before) or vocab == 1
    error = (logits.double() - gradient).abs()
    assert float((error - torch.finfo(dtype).eps * gradient.abs()).max()) <= 1e-6


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("transform", [LogitTransform(cap=30.0), LogitTransform(0.125), LogitTransform(2, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_and_cap(transform: LogitTransform, dtype: torch.dtype) -> None:
    """Logits of Gemma 2's vocabulary, scaled and capped before the softmax, against torch in float64."""
    torch.manual_seed(0)
    logits = (20 * torch.randn(20, 256_000, device=DEVICE)).to(dtype)
    targets = torch.randint(256_000, (20,), device=DEVICE)
    wide = logits.double().requires_grad_()
    changed = transform.scale * wide
    if transform.cap is not None:
        changed = transform.cap * torch.tanh(changed / transform.cap)
    right = nn.functional.cross_entropy(changed, targets, reduction="sum")
    (gradient,) = torch.autograd.grad(right, wide)
    loss = softmax.softmax_loss_(logits, targets, True, transform)
    assert float(loss) == pytest.approx(float(right.detach()), rel=1e-5)
    error = (logits.double() - gradient).abs()
    assert float((error - torch.finfo(dtype).eps * gradient.abs()).max()) <= 5e-5


def test_labels_outside_the_vocabulary_do_not_go_unnoticed() -> None:
    """A wrong num_targets makes ignored labels targets; nobody waits on a GPU to find out."""
    hidden = torch.randn(4, 8, device=DEVICE)
    weight = torch.randn(50, 8, device=DEVICE)
    for label in (IGNORE_INDEX, 50, -1):
        labels = torch.tensor([1, 2, 3, label], device=DEVICE)
        assert linear_cross_entropy_sum(hidden, weight, None, labels, num_targets=4).isnan()


def test_nan_is_not_hidden() -> None:
    logits = torch.zeros(2, 1000, device=DEVICE, dtype=torch.bfloat16)
    logits[0, 999] = float("nan")
    loss = softmax.softmax_loss_(logits, torch.tensor([1, 1], device=DEVICE), True)
    assert loss.isnan()
    assert logits[0].isnan().all()
    assert logits[1].isfinite().all()


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_host_does_not_wait(way: str, with_bias: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(1, 1000, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(5000, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(5000, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) if with_bias else None
    labels = torch.randint(5000, (1, 1000), device=DEVICE)
    labels[0, ::3] = IGNORE_INDEX
    num_targets = int((labels != IGNORE_INDEX).sum())

    def step() -> None:
        loss = linear_cross_entropy_sum(
            hidden, weight, bias, labels, num_targets=num_targets, chunk_tokens=100
        )
        torch.autograd.backward(loss)
        torch.autograd.backward(token_cross_entropy_sum(torch.nn.functional.linear(hidden, weight), labels))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert way in ("kernel", "torch")


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, step: int = 2048
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Loss and gradients in float32 throughout, by softmax and one-hot vectors, a few tokens at a time."""
    wide, loss = weight.detach().float(), 0.0
    for_hidden = torch.zeros(hidden.shape, device=DEVICE)
    for_weight = torch.zeros_like(wide)
    for start in range(0, len(labels), step):
        inputs, targets = hidden.detach()[start : start + step].float(), labels[start : start + step]
        known = targets != IGNORE_INDEX
        inputs, targets = inputs[known], targets[known]
        log_softmax = (inputs @ wide.t()).log_softmax(-1)
        loss -= float(log_softmax.gather(1, targets[:, None]).double().sum())
        gradient = log_softmax.exp_()
        gradient[torch.arange(len(targets), device=DEVICE), targets] -= 1
        part = torch.zeros(len(known), hidden.shape[1], device=DEVICE)
        part[known] = gradient @ wide
        for_hidden[start : start + step] = part
        for_weight += gradient.t() @ inputs
    return loss, for_hidden, for_weight


def relative(found: torch.Tensor | None, right: torch.Tensor) -> float:
    assert found is not None
    return float((found.float() - right).norm() / right.norm())


def test_a_long_row_with_a_large_vocabulary(way: str) -> None:
    """Qwen2.5 1.5B's head on 65,536 tokens: 20 GB of logits in bfloat16; 2.5 GiB must do."""
    torch.manual_seed(0)
    num_tokens, vocab, width = 65_536, 151_936, 1536
    hidden = torch.randn(num_tokens, width, device=DEVICE).bfloat16().requires_grad_()
    weight = (0.05 * torch.randn(vocab, width, device=DEVICE)).bfloat16().requires_grad_()
    labels = torch.randint(vocab, (num_tokens,), device=DEVICE)
    labels[::8] = IGNORE_INDEX
    num_targets = num_tokens - num_tokens // 8
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = linear_cross_entropy_sum(hidden, weight, None, labels, num_targets=num_targets)
    torch.autograd.backward(loss)
    torch.cuda.synchronize()
    gradients = (hidden.numel() + weight.numel()) * 2
    extra = torch.cuda.max_memory_allocated() - before - gradients
    assert extra <= 2.5 * GIB, f"{extra / GIB:.2f} GiB beside the inputs and their gradients"
    right_loss, for_hidden, for_weight = reference(hidden, weight, labels)
    assert float(loss.detach()) == pytest.approx(right_loss, rel=1e-4)
    assert relative(hidden.grad, for_hidden) <= 1e-2
    assert relative(weight.grad, for_weight) <= 1e-2
    assert hidden.grad is not None
    assert (hidden.grad[::8] == 0).all()
    assert way in ("kernel", "torch")


# ---- under FSDP2 -----------------------------------------------------------------------------------------


def _loss_under_fsdp(rank: int, world_size: int, tied: bool) -> dict[str, Any]:
    """One rank whose weights are whole only inside of the forward: against the plain loss of all logits."""
    import torch.distributed as dist
    import transformers
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from odcengine.data import pack_samples
    from odcengine.losses import causal_lm_loss_sum
    from odcengine.losses.fused_head import fuses_loss, mark_fused
    from odcengine.models import prepare_model

    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=5000,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model: Any = prepare_model(transformers.Qwen2ForCausalLM(config))  # on the CPU; FSDP2 moves it
    fuses = fuses_loss(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to("cuda")
    batch = pack_samples([{"input_ids": list(range(1, length))} for length in (3, 700, 1400)]).to("cuda")
    losses, gradients = [], []
    for fused in (True, False):
        mark_fused(model, fused)
        loss = causal_lm_loss_sum(model, batch)
        torch.autograd.backward(loss)
        losses.append(float(loss.detach()))
        gradients.append({n: p.grad.to_local().cpu() for n, p in model.named_parameters()})
        model.zero_grad()
    dist.destroy_process_group()
    norms = [float(gradient.norm()) for gradient in gradients[1].values()]
    pairs = zip(*(found.values() for found in gradients), norms, strict=True)
    # With a floor: noise is all there is of a small one.
    distance = max(float((a - b).norm()) / (norm + 1e-3 * max(norms)) for a, b, norm in pairs)
    return {"fuses": fuses, "losses": losses, "distance": distance}


@pytest.mark.parametrize("tied", [False, True])
def test_head_under_fsdp(tied: bool) -> None:
    pytest.importorskip("transformers")
    (found,) = values(run_ranks(_loss_under_fsdp, 1, tied, timeout_s=120, gpus=True))
    assert found["fuses"]
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-4)
    assert found["distance"] <= 0.05
