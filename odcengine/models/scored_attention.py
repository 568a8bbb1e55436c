"""Attention that changes its scores before the softmax: capped scores (Gemma 2), sinks (gpt-oss).

No kernel of torch computes these, so scores are made as a matrix: for a block of queries at a time, and only
their inputs are kept for the backward. Memory grows with the length of a sample, not with its square; the
work is that of dense products, without what a fused kernel saves.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from odcengine.data.batch import Segments

# Scores of a block, in elements: 64 MiB in float32 on a CPU; 512 MiB on a GPU, which launches each operation.
_BLOCK_ELEMENTS = 2**24
_GPU_BLOCK_ELEMENTS = 2**27


def changes_scores(arguments: dict[str, Any]) -> bool:
    """Whether transformers' arguments of an attention ask for what only :func:`scored_attention` computes."""
    return arguments.get("softcap") is not None or arguments.get("s_aux") is not None


def scored_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    segments: Segments | None = None,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    block_elements: int | None = None,
) -> torch.Tensor:
    """Causal attention with ``softcap * tanh(scores / softcap)``, and a sink beside the scores of each head.

    Args:
        query: ``[B, heads, T, head_dim]``.
        key: ``[B, kv_heads, S, head_dim]``; ``heads`` is a multiple of ``kv_heads``. The last query sees the
            last key.
        value: ``[B, kv_heads, S, value_dim]``.
        segments: attend within each of them, from 0 to ``T``, which is ``S`` then; else within each row.
        attention_mask: ``[B, 1, T, S]``, bool (True: seen) or added to the scores, in place of causality and
            window.
        dropout: probability of dropping an attention weight.
        scaling: factor of the scores; ``head_dim ** -0.5`` if None.
        sliding_window: tokens that a token sees at most, itself included; all before it if None.
        softcap: largest absolute score (Gemma 2, arXiv 2408.00118, section 2); no limit if None.
        s_aux: ``[heads]``, a score that takes its share of the softmax and adds nothing to the output
            (attention sinks, arXiv 2309.17453; one a head as in gpt-oss); none if None.
        block_elements: scores alive at a time; chosen by the device if None.

    Returns:
        ``[B, T, heads, value_dim]``. The softmax is computed in float32 at least.
    """
    if block_elements is None:
        block_elements = _GPU_BLOCK_ELEMENTS if query.is_cuda else _BLOCK_ELEMENTS
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    boundaries = (0, query.shape[2]) if segments is None else segments.boundaries
    behind = key.shape[2] - query.shape[2]  # keys before the first query
    pieces = []
    for start, stop in itertools.pairwise(boundaries):
        if start == stop:
            continue
        first_key = 0 if segments is None else start
        step = max(1, block_elements // (query.shape[0] * query.shape[1] * (stop + behind - first_key)))
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            if attention_mask is None:
                low, high = first_key, end + behind
                if sliding_window is not None:
                    low = max(low, begin + behind - sliding_window + 1)
                seen = _causal(begin + behind - low, end - begin, high - low, sliding_window, query.device)
            else:
                low, high, seen = 0, key.shape[2], attention_mask[:, :, begin:end]
            block = (query[:, :, begin:end], key[:, :, low:high], value[:, :, low:high], seen)
            arguments = (*block, s_aux, softcap, scale, dropout)
            if end - begin < stop - start and torch.is_grad_enabled():
                pieces.append(checkpoint(_attend, *arguments, use_reentrant=False))
            else:
                pieces.append(_attend(*arguments))
    if not pieces:
        return query.new_empty(query.shape[0], 0, query.shape[1], value.shape[-1])
    return torch.cat(pieces, dim=2).transpose(1, 2).contiguous()


def _causal(first: int, queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which keys are seen, bool ``[queries, keys]``; the first query is at the position of key ``first``."""
    distance = torch.arange(first, first + queries, device=device)[:, None] - torch.arange(
        keys, device=device
    )
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    s_aux: torch.Tensor | None,
    softcap: float | None,
    scale: float,
    dropout: float,
) -> torch.Tensor:
    batch, num_queries = query.shape[0], query.shape[2]
    kv_heads = key.shape[1]
    grouped = query.reshape(batch, kv_heads, -1, *query.shape[2:])  # the queries of a key-value head together
    scores = torch.matmul(grouped, key.unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if seen.dtype == torch.bool:
        # A padding token sees nothing: the lowest number, unlike -inf, gives it no NaN.
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    else:
        scores = scores + seen
    if s_aux is not None:
        sinks = s_aux.to(scores.dtype).view(1, -1, 1, 1).expand(batch, -1, num_queries, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]].to(value.dtype)
    if dropout:
        weights = F.dropout(weights, dropout)
    output = torch.matmul(weights.view(batch, kv_heads, -1, *weights.shape[2:]), value.unsqueeze(2))
    return output.flatten(1, 2)
