"""Attention within the samples of a packed row by torch's dense attention, one sample after the other.

What every device, every type of numbers and every head size can; a GPU in 16 bits has a faster way, in
``varlen.py``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from odcengine.data.batch import Segments


def sample_by_sample(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Causal attention within each segment of a row, or of each row of a batch.

    Args:
        query: ``[B, heads, T, head_dim]``.
        key: ``[B, kv_heads, T, head_dim]``; ``heads`` is a multiple of ``kv_heads``.
        value: ``[B, kv_heads, T, value_dim]``.
        segments: from 0 to ``T``, the same for all rows.
        dropout: probability of dropping an attention weight.
        scaling: factor of the scores; ``head_dim ** -0.5`` if None.
        sliding_window: tokens that a token sees at most, itself included; all before it if None.

    Returns:
        ``[B, T, heads, value_dim]``.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.is_cuda:
        # Of torch's kernels for 32-bit numbers, those that make no square of scores want as many heads.
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    attend = functools.partial(
        F.scaled_dot_product_attention,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    pieces = []
    for start, stop in itertools.pairwise(segments.boundaries):
        sample = [rows[:, :, start:stop] for rows in (query, key, value)]
        if sliding_window is None or stop - start <= sliding_window:
            pieces.append(attend(*sample, is_causal=True))
        else:
            pieces.append(attend(*(rows[:, :, :sliding_window] for rows in sample), is_causal=True))
            pieces.append(_behind_window(attend, sample, sliding_window))
    return torch.cat(pieces, dim=2).transpose(1, 2).contiguous()


def _behind_window(
    attend: Callable[..., torch.Tensor],
    sample: list[torch.Tensor],
    window: int,
) -> torch.Tensor:
    """Attention of a sample's tokens from ``window`` on.

    As many tokens as the window at a time: they see some of themselves and some of as many before them. So
    the work grows with the length and not with its square, and one small mask serves for all.
    """
    query, key, value = sample
    batch, num_tokens = len(query), query.shape[2] - window
    padding = (0, 0, 0, -num_tokens % window)  # at the end, where no other token sees it
    queries = F.pad(query[:, :, window:], padding).unfold(2, window, window)
    keys, values = (F.pad(rows, padding).unfold(2, 2 * window, window) for rows in (key, value))
    # [B, heads, blocks, dim, tokens] as a batch of blocks.
    blocks = [rows.permute(0, 2, 1, 4, 3).flatten(0, 1) for rows in (queries, keys, values)]
    positions = torch.arange(2 * window, device=query.device)
    distance = positions[window:, None] - positions
    output = attend(*blocks, attn_mask=(distance >= 0) & (distance < window))
    return output.view(batch, -1, *output.shape[1:]).transpose(1, 2).flatten(2, 3)[:, :, :num_tokens]
