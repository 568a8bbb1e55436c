"""Packed attention on a GPU: FlashAttention's kernels for variable lengths against samples one by one.

The reference is computed in float32; "within the noise of 16 bits" means: not farther from it than twice what
separate samples in 16 bits are, with transformers' or torch's own attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from odcengine.data import MicroBatch, pack_samples
from odcengine.data.batch import Segments
from odcengine.losses import causal_lm_loss_sum
from odcengine.models import check_isolation, packed, packed_attention, prepare_model
from odcengine.models.sample_attention import sample_by_sample
from odcengine.models.varlen import can_use_varlen, varlen_attention

transformers = pytest.importorskip("transformers")

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LENGTHS = [1, 17, 4096, 17, 1, 300]
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@contextmanager
def no_waiting() -> Iterator[None]:
    """The host may not wait for the device within: torch raises where it would."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The windows with which the kernels were called."""
    windows: list[int | None] = []

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        windows.append(kwargs["sliding_window"])
        return varlen_attention(*args, **kwargs)

    monkeypatch.setattr(packed, "varlen_attention", watched)
    return windows


def boundaries_of(lengths: list[int]) -> list[int]:
    return list(itertools.accumulate(lengths, initial=0))


def random_rows(heads: int, kv_heads: int, dim: int, num_tokens: int, dtype: torch.dtype) -> Rows:
    """Laid out as a model's projections are: heads of a token side by side."""
    torch.manual_seed(0)

    def random(count: int) -> torch.Tensor:
        rows = torch.randn(1, num_tokens, count, dim, device=DEVICE, dtype=torch.float32).to(dtype)
        return rows.transpose(1, 2).requires_grad_()

    return random(heads), random(kv_heads), random(kv_heads)


def with_gradients(output: torch.Tensor, rows: Rows) -> list[torch.Tensor]:
    """The output and the gradients of a fixed random function of it, in float32."""
    torch.manual_seed(1)
    weights = torch.randn(output.shape, device=DEVICE, dtype=torch.float32).to(output.dtype)
    found = [output, *torch.autograd.grad(output, rows, weights)]
    return [tensor.detach().float() for tensor in found]


def widened(rows: Rows) -> Rows:
    query, key, value = (tensor.detach().float().requires_grad_() for tensor in rows)
    return query, key, value


def one_by_one(rows: Rows, lengths: list[int], **options: Any) -> list[torch.Tensor]:
    """Output and gradients by torch's dense attention, one sample after the other."""
    query, key, value = rows
    segments = Segments(boundaries_of(lengths))
    return with_gradients(sample_by_sample(query, key, value, segments, **options), rows)


def far(found: list[torch.Tensor], right: list[torch.Tensor]) -> list[float]:
    """Distances relative to the largest value; gradients are zero where a token sees only itself."""
    pairs = zip(found, right, strict=True)
    return [float((a - b).abs().max() / b.abs().max().clamp(min=0.01)) for a, b in pairs]


def call(rows: Rows, lengths: list[int], **options: Any) -> torch.Tensor:
    boundaries = boundaries_of(lengths)
    query, key, value = rows
    output, weights = packed_attention(
        nn.Module(),
        query,
        key,
        value,
        None,
        cu_seq_lens_q=torch.tensor(boundaries, dtype=torch.int32).to(DEVICE),
        odc_segments=Segments(boundaries),
        **options,
    )
    assert weights is None
    return output


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "scaling"),
    [
        (12, 2, 128, torch.bfloat16, None),
        (12, 2, 128, torch.float16, 0.05),
        (4, 4, 64, torch.bfloat16, None),
        (8, 1, 256, torch.bfloat16, None),
        (4, 2, 80, torch.bfloat16, 0.2),
    ],
)
def test_packed_against_separate_samples(
    launches: list[int | None],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    scaling: float | None,
    window: int | None,
) -> None:
    rows = random_rows(heads, kv_heads, dim, sum(LENGTHS), dtype)
    assert can_use_varlen(*rows)
    found = with_gradients(call(rows, LENGTHS, scaling=scaling, sliding_window=window), rows)
    assert launches == [window]
    separate = one_by_one(rows, LENGTHS, scaling=scaling, sliding_window=window)
    right = one_by_one(widened(rows), LENGTHS, scaling=scaling, sliding_window=window)
    assert found[0].shape == (1, sum(LENGTHS), heads, dim)
    resolution = torch.finfo(dtype).eps
    for distance, noise in zip(far(found, right), far(separate, right), strict=True):
        assert distance <= 2 * noise + resolution
        assert noise <= 8 * resolution  # the reference is one


@pytest.mark.parametrize("lengths", [[1], [1] * 64, [128], list(range(1, 200)), [65536]])
def test_other_rows(lengths: list[int]) -> None:
    """Rows of one-token samples (a dummy is one), of one sample, of many, and a long one."""
    rows = random_rows(12, 2, 128, sum(lengths), torch.bfloat16)
    found = with_gradients(call(rows, lengths), rows)
    separate = one_by_one(rows, lengths)
    assert all(bool(tensor.isfinite().all()) for tensor in found)
    assert max(far(found, separate)) <= 4 * torch.finfo(torch.bfloat16).eps


def test_samples_do_not_see_each_other() -> None:
    """Exactly: changing one sample changes no bit of the others."""
    rows = random_rows(12, 2, 128, 4096 + 17 + 300, torch.bfloat16)
    lengths = [17, 4096, 300]
    with torch.no_grad():
        before = call(rows, lengths)
        for tensor in rows:
            tensor[:, :, 17:4113] += 1
        after = call(rows, lengths)
    assert torch.equal(before[:, :17], after[:, :17])
    assert torch.equal(before[:, 4113:], after[:, 4113:])
    assert not torch.equal(before[:, 17:4113], after[:, 17:4113])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 16])
def test_the_host_does_not_wait(dtype: torch.dtype, window: int | None) -> None:
    """Neither by the kernels for variable lengths nor sample by sample, forward and backward."""
    lengths = [5, 60, 1, 33]
    boundaries = boundaries_of(lengths)
    rows = random_rows(4, 2, 64, sum(lengths), dtype)
    cu_seq_lens = torch.tensor(boundaries, dtype=torch.int32).to(DEVICE)

    def step() -> None:
        query, key, value = rows
        output, _ = packed_attention(
            nn.Module(),
            query,
            key,
            value,
            None,
            cu_seq_lens_q=cu_seq_lens,
            odc_segments=Segments(boundaries),
            sliding_window=window,
        )
        torch.autograd.grad(output, rows, torch.ones_like(output))

    step()
    with no_waiting():
        step()


def test_moving_a_micro_batch_does_not_wait() -> None:
    batch = pack_samples([{"input_ids": list(range(1, 5000))}, {"input_ids": [1, 2, 3]}])
    with no_waiting():
        moved = batch.to(DEVICE)
    assert moved.input_ids.device.type == DEVICE
    for name in ("input_ids", "labels", "position_ids", "cu_seqlens", "cu_segments"):
        assert torch.equal(getattr(moved, name).cpu(), getattr(batch, name)), name
    assert moved.segments is batch.segments


def test_where_the_kernels_cannot_be_used(launches: list[int | None]) -> None:
    lengths = [5, 60, 1, 33]
    bf16 = torch.bfloat16
    cases: list[tuple[Rows, dict[str, Any]]] = [
        (random_rows(4, 2, 64, 99, torch.float32), {}),
        (random_rows(4, 2, 20, 99, bf16), {}),
        (random_rows(2, 1, 320, 99, bf16), {}),
        ((*random_rows(4, 2, 64, 99, bf16)[:2], random_rows(4, 2, 32, 99, bf16)[2]), {}),
        (random_rows(4, 2, 64, 99, bf16), {"dropout": 1e-9}),
    ]
    for rows, options in cases:
        found = with_gradients(call(rows, lengths, **options), rows)
        right = one_by_one(widened(rows), lengths)
        assert max(far(found, right)) <= 8 * torch.finfo(bf16).eps
    assert not launches
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        call(random_rows(4, 2, 64, 99, bf16), lengths)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert not launches


# ---- whole models ------------------------------------------------------------------------------------


def make_model(**changes: Any) -> Any:
    """Two layers with the attention of Qwen2.5 1.5B, in float32."""
    torch.manual_seed(0)
    values = {
        "vocab_size": 1000,
        "hidden_size": 1536,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        **changes,
    }
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**values)).to(DEVICE).train()


def in_bfloat16(model: Any) -> Any:
    """The parameters; frequencies of positions stay in float32, as they do in training."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def make_batch(lengths: list[int]) -> MicroBatch:
    generator = torch.Generator().manual_seed(0)
    samples = [{"input_ids": torch.randint(1000, (length,), generator=generator)} for length in lengths]
    return pack_samples(samples)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def separate_samples(model: Any, batch: MicroBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by transformers' own attention and torch's loss, one sample after the other."""
    total = 0.0
    for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
        tokens = batch.input_ids[:, start:stop].to(DEVICE)
        if tokens.shape[1] > 1:
            logits = model(tokens, use_cache=False).logits[0, :-1].float()
            loss = nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")
            torch.autograd.backward(loss)
            total += float(loss.detach())
    return total, gradients(model)


def distances(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative to the norm of each parameter's gradient, with a floor: of a small one, all is noise."""
    assert found.keys() == right.keys()
    norms = {name: float(gradient.norm()) for name, gradient in right.items()}
    floor = 1e-3 * max(norms.values())
    return {name: float((found[name] - right[name]).norm()) / (norms[name] + floor) for name in right}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_model_in_bfloat16(launches: list[int | None], checkpointing: bool) -> None:
    batch = make_batch([1, 17, 4096, 300])
    reference = make_model()
    right_loss, right = separate_samples(reference, batch)
    model = in_bfloat16(reference)
    noisy_loss, noisy = separate_samples(model, batch)
    prepare_model(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    launches.clear()
    loss = causal_lm_loss_sum(model, batch.to(DEVICE))
    torch.autograd.backward(loss)
    assert launches == [None] * (4 if checkpointing else 2)  # a layer each time, and again in the backward
    found = gradients(model)
    assert abs(float(loss.detach()) - right_loss) <= 2 * abs(noisy_loss - right_loss) + 5e-4 * right_loss
    noise = distances(noisy, right)
    for name, distance in distances(found, right).items():
        assert distance <= 2 * noise[name] + 2**-8, name
    assert noise["model.embed_tokens.weight"] <= 0.05  # the reference is one


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_the_host_waits_for_nothing_of_a_model(kind: torch.dtype, checkpointing: bool) -> None:
    """A micro-batch from the host's memory to the gradients, nor for what transformers does on the way."""
    model = make_model(hidden_size=256, num_attention_heads=4)
    prepare_model(in_bfloat16(model) if kind == torch.bfloat16 else model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = make_batch([1, 17, 300])
    torch.autograd.backward(causal_lm_loss_sum(model, batch.to(DEVICE)))
    with no_waiting():
        torch.autograd.backward(causal_lm_loss_sum(model, batch.to(DEVICE)))


def test_model_in_float32(launches: list[int | None]) -> None:
    """Sample by sample on the GPU, to the precision of float32."""
    batch = make_batch([1, 17, 700, 300])
    model = make_model()
    right_loss, right = separate_samples(model, batch)
    prepare_model(model)
    loss = causal_lm_loss_sum(model, batch.to(DEVICE))
    torch.autograd.backward(loss)
    assert not launches
    assert float(loss.detach()) == pytest.approx(right_loss, rel=1e-5)
    assert max(distances(gradients(model), right).values()) <= 1e-4


def test_prepared_on_the_cpu_and_moved(launches: list[int | None]) -> None:
    """As FSDP2 does it; the probe passes on the GPU as well."""
    torch.manual_seed(0)
    model: Any = prepare_model(make_model(hidden_size=256, num_attention_heads=4).cpu())
    assert not launches
    in_bfloat16(model).to(DEVICE)
    check_isolation(model)
    assert launches
    batch = make_batch([1, 17, 300])
    with torch.no_grad():
        loss = float(causal_lm_loss_sum(model, batch.to(DEVICE)))
    right, _ = separate_samples(model, batch)
    assert loss == pytest.approx(right, rel=1e-3)


def test_dummy_row(launches: list[int | None]) -> None:
    """One token that nothing is learned from: zero gradients, all of them."""
    model = prepare_model(in_bfloat16(make_model()))
    launches.clear()
    loss = causal_lm_loss_sum(model, pack_samples([]).to(DEVICE))
    torch.autograd.backward(loss)
    assert len(launches) == 2
    assert float(loss.detach()) == 0.0
    assert all(bool((gradient == 0).all()) for gradient in gradients(model).values())


def alone(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Logits of the samples one after the other."""
    rows = [
        model(batch.input_ids[:, start:stop].to(DEVICE), use_cache=False).logits[0].float()
        for start, stop in itertools.pairwise(batch.cu_seqlens.tolist())
    ]
    return torch.cat(rows)


def test_sliding_window_of_a_model(launches: list[int | None]) -> None:
    """The kernels' window is transformers' window; the probe alone would not tell."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=64,
    )
    model: Any = transformers.MistralForCausalLM(config).to(DEVICE).eval()
    model.set_attn_implementation("eager")
    batch = make_batch([300, 17, 64, 65])
    with torch.no_grad():
        right = alone(model, batch)
        noisy = alone(in_bfloat16(model), batch)
        prepare_model(model)
        launches.clear()
        found = model(**batch.to(DEVICE).model_inputs(), use_cache=False).logits[0].float()
    assert launches == [64, 64]
    (distance,), (noise,) = far([found], [right]), far([noisy], [right])
    assert distance <= 2 * noise + 2**-8


def test_evaluation_without_boundaries(launches: list[int | None]) -> None:
    model = in_bfloat16(make_model()).eval()
    inputs = {
        "input_ids": torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]], device=DEVICE),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], device=DEVICE),
    }
    with torch.no_grad():
        before = model(**inputs).logits
        prepare_model(model)
        launches.clear()
        after = model(**inputs).logits
        model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert not launches
    real = inputs["attention_mask"].bool()
    assert max(far([after[real].float()], [before[real].float()])) <= 2**-6
