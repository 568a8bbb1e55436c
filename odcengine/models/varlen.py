"""Attention within the samples of a packed row by torch's FlashAttention kernels for variable lengths.

One launch does the whole row whatever its samples are, forward and backward, and no kernel waits for the
host: the boundaries are a tensor on the device. Only 16-bit numbers, head sizes up to 256 and plain causal
attention (also within a sliding window) are computed so; :func:`can_use_varlen` says where.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

_MAX_HEAD_DIM = 256
# What the kernels copy at a time, in elements: torch pads other head sizes for its dense attention only.
_HEAD_DIM_MULTIPLE = 8


Kernels = tuple[Callable[..., Any], frozenset[str]]
"""torch's function, and the names of its arguments."""


@functools.cache
def varlen_kernels() -> Kernels | None:
    """What :func:`varlen_attention` calls, or None where torch has nothing that can be used."""
    if torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = frozenset(inspect.signature(varlen_attn).parameters)
    return (varlen_attn, names) if {"scale", "window_size"} <= names else None


def can_use_varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float = 0.0) -> bool:
    """Whether :func:`varlen_attention` can compute these; turning off flash attention in torch is respected.

    Args:
        query: ``[1, heads, T, head_dim]``.
        key: ``[1, kv_heads, T, head_dim]``.
        value: ``[1, kv_heads, T, value_dim]``.
        dropout: probability of dropping an attention weight.
    """
    head_dim = query.shape[-1]
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and head_dim == key.shape[-1] == value.shape[-1]
        and head_dim <= _MAX_HEAD_DIM
        and head_dim % _HEAD_DIM_MULTIPLE == 0
        and query.shape[1] % key.shape[1] == 0
        and dropout == 0.0
        and kernels_run_on(query.device)
    )


def kernels_run_on(device: torch.device) -> bool:
    """Whether a device has the kernels; the part of :func:`can_use_varlen` that does not look at tensors."""
    return (
        device.type == "cuda"
        and torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and varlen_kernels() is not None
    )


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    max_length: int,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """Causal attention within each segment of a packed row, in one launch.

    Args:
        query: ``[1, heads, T, head_dim]``, bfloat16 or float16, on a GPU.
        key: ``[1, kv_heads, T, head_dim]``; ``heads`` is a multiple of ``kv_heads``. The kernels read each of
            them where it is.
        value: like ``key``.
        cu_seq_lens: boundaries of the segments on the device, int32 ``[segments + 1]``, from 0 to ``T``.
        max_length: tokens of the longest segment.
        scaling: factor of the scores; ``head_dim ** -0.5`` if None.
        sliding_window: tokens that a token sees at most, itself included; all before it if None.
        kernels: :func:`varlen_kernels`, for a caller that dynamo traces: it cannot look for them.

    Returns:
        ``[1, T, heads, head_dim]``.
    """
    found = kernels or varlen_kernels()
    if found is None:
        raise RuntimeError("varlen_attention: this torch cannot; ask can_use_varlen first")
    function, names = found
    rows = [_as_rows(tensor) for tensor in (query, key, value)]
    # The kernels always take fewer key-value heads; from torch 2.12 on, the function wants to be told so.
    options = {"enable_gqa": True} if "enable_gqa" in names and query.shape[1] != key.shape[1] else {}
    # How many tokens before itself a token sees (-1: all), and how many behind.
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    output: torch.Tensor = function(
        *rows, cu_seq_lens, cu_seq_lens, max_length, max_length, scale=scaling, window_size=window, **options
    )
    return output[None]


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``[1, heads, T, dim]`` as ``[T, heads, dim]``: a view if the numbers of a head lie together."""
    rows = tensor[0].transpose(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
