"""Attention by kernels for variable lengths: how they are called, with a readable kernel in their place.

The real ones are run by tests/models/test_packed_on_gpu.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from odcengine.data import pack_samples
from odcengine.data.batch import Segments
from odcengine.errors import UsageError
from odcengine.models import packed, packed_attention, prepare_model, varlen
from odcengine.models.varlen import can_use_varlen, varlen_attention

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


class Kernel:
    """What torch's function is documented to compute, with explicit scores and masks; remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        **options: Any,
    ) -> torch.Tensor:
        self.calls.append({"max": (max_q, max_k), "scale": scale, "window": window_size, **options})
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        groups = query.shape[1] // key.shape[1]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        before, behind = (10**9 if side == -1 else side for side in window_size)
        pieces = []
        for start, stop in itertools.pairwise(cu_seq_q.tolist()):
            q, k, v = (
                rows[start:stop].repeat_interleave(repeat, 1).transpose(0, 1)
                for rows, repeat in ((query, 1), (key, groups), (value, groups))
            )
            positions = torch.arange(stop - start)
            distance = positions[:, None] - positions
            scores = (q @ k.transpose(1, 2)) * scale
            scores.masked_fill_((distance > before) | (-distance > behind), -torch.inf)
            pieces.append((scores.softmax(-1) @ v).transpose(0, 1))
        return torch.cat(pieces)


@pytest.fixture(params=["2.11", "2.12"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """In place of torch's function, with the arguments that it has in two versions."""
    names = {"scale", "window_size", *(["enable_gqa"] if request.param == "2.12" else [])}
    found = Kernel()
    monkeypatch.setattr(varlen, "varlen_kernels", lambda: (found, frozenset(names)))
    monkeypatch.setattr(packed, "can_use_varlen", lambda *_: True)
    return found


Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def rows(heads: int, kv_heads: int, num_tokens: int = 9, dim: int = 8) -> Rows:
    torch.manual_seed(0)

    def random(count: int) -> torch.Tensor:
        return torch.randn(1, count, num_tokens, dim, dtype=torch.float64).requires_grad_()

    return random(heads), random(kv_heads), random(kv_heads)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_equals_sample_by_sample(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, kv_heads: int, scaling: float | None
) -> None:
    """The same through both paths, gradients too."""
    inputs = rows(4, kv_heads)
    boundaries = torch.tensor([0, 4, 5, 9], dtype=torch.int32)
    outputs, gradients = [], []
    for usable in (True, False):
        monkeypatch.setattr(packed, "can_use_varlen", lambda *_, usable=usable: usable)
        output, weights = packed_attention(
            nn.Module(), *inputs, None, scaling=scaling, cu_seq_lens_q=boundaries
        )
        assert weights is None
        assert output.shape == (1, 9, 4, 8)
        outputs.append(output)
        gradients.append(torch.autograd.grad((output * torch.arange(8)).sum(), inputs))
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    (call,) = kernel.calls
    assert (call["max"], call["scale"], call["window"]) == ((4, 4), scaling, (-1, 0))


def test_fewer_key_value_heads_are_announced_where_torch_wants_it(kernel: Kernel) -> None:
    names = varlen.varlen_kernels()
    assert names is not None
    boundaries = torch.tensor([0, 9], dtype=torch.int32)
    for kv_heads in (4, 2):
        varlen_attention(*rows(4, kv_heads), boundaries, 9)
    same, fewer = kernel.calls
    assert "enable_gqa" not in same
    assert fewer.get("enable_gqa", False) == ("enable_gqa" in names[1])


def test_numbers_of_a_head_are_brought_together(kernel: Kernel) -> None:
    query, key, value = rows(4, 4)
    apart = query.detach().transpose(2, 3).contiguous().transpose(2, 3)
    assert apart.stride(-1) != 1
    output = varlen_attention(apart, key, value, torch.tensor([0, 9], dtype=torch.int32), 9)
    right = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(output, right.transpose(1, 2))


@pytest.mark.parametrize("kernel", ["2.12"], indirect=True)
def test_sliding_window_of_a_model(kernel: Kernel) -> None:
    """Samples longer than the window: what transformers' own attention gives each alone."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SHAPE, sliding_window=4)
    model = transformers.MistralForCausalLM(config).double().eval()
    samples = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 6, 7], [9, 8, 7, 6, 5]]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        alone = [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in samples]
        prepare_model(model)
        kernel.calls.clear()
        batch = pack_samples([{"input_ids": tokens} for tokens in samples])
        logits = model(**batch.model_inputs(), use_cache=False).logits[0]
    torch.testing.assert_close(logits, torch.cat(alone), atol=1e-6, rtol=0)
    assert [call["window"] for call in kernel.calls] == [(3, 0)] * 2
    short = pack_samples([{"input_ids": [1, 2, 3, 4]}])
    model(**short.model_inputs(), use_cache=False)
    assert kernel.calls[-1]["window"] == (-1, 0)


@pytest.mark.usefixtures("kernel")
def test_wrong_calls_are_refused_here_too() -> None:
    inputs = rows(4, 2)
    boundaries = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(UsageError, match="from 0 to 8, but the row from 0 to 9"):
        packed_attention(nn.Module(), *inputs, None, cu_seq_lens_q=boundaries)
    whole = torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(UsageError, match="head_mask is not supported"):
        packed_attention(nn.Module(), *inputs, None, cu_seq_lens_q=whole, head_mask=torch.ones(4))


def test_not_on_a_cpu() -> None:
    query, key, value = rows(4, 2)
    assert not can_use_varlen(query.bfloat16(), key.bfloat16(), value.bfloat16())


def test_the_hosts_boundaries_travel_with_the_batch() -> None:
    """What GPU paths read in place of the device's: nothing of it is a container that FSDP would rebuild."""
    batch = pack_samples([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}], pad_to_multiple_of=8)
    moved = batch.to("meta")
    segments = moved.model_inputs()["odc_segments"]
    assert type(segments) is Segments
    assert segments is batch.segments
    assert segments.boundaries == (0, 3, 4, 8)
    assert segments.longest == 4
