"""Blocks of a model through ``torch.compile``: fewer kernels, and fewer calls of the host to start them.

Each block is compiled by itself, with sizes that may change, and blocks of one class share what was compiled.
The boundaries of packed samples change with every micro-batch, so nothing compiled may depend on them: dynamo
would compile again whenever one of them differs. Attention of packed rows takes care of that here. Where
FlashAttention's kernels for variable lengths can be used, their call is part of the block's one graph, with
the boundaries as a tensor and the longest sample as an integer of any value. Elsewhere attention runs as
without compilation, between the graphs of what comes before and after it.

This module imports dynamo, which takes a while; only what compiles imports it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._inductor import list_options

from odcengine.data.batch import Segments
from odcengine.models.packed import check_arguments, packed_attention
from odcengine.models.scored_attention import changes_scores
from odcengine.models.varlen import can_use_varlen, kernels_run_on, varlen_attention, varlen_kernels

_KERNELS = varlen_kernels()
# Marks it: dynamo cannot trace the question to the device, and its answer does not change.
torch.compiler.assume_constant_result(kernels_run_on)  # type: ignore[no-untyped-call]
_uncompiled = torch.compiler.disable(  # type: ignore[no-untyped-call]
    packed_attention, reason="attention goes through the samples one by one"
)


def compile_blocks(blocks: Iterable[nn.Module], *, backend: str = "inductor") -> None:
    """Compile blocks in place; each is compiled when it first runs, and again where it runs differently.

    Args:
        blocks: modules with a forward of their own. Their parameters, names and hooks stay as they are.
        backend: what makes kernels of the graphs: a back end of ``torch.compile``.
    """
    options = _inductor_options() if backend == "inductor" else None
    for block in blocks:
        block.compile(dynamic=True, backend=backend, options=options)


def _inductor_options() -> dict[str, bool]:
    """What keeps inductor from compiling for ranges of lengths.

    On GPUs torch 2.11 fuses the sums of a norm's gradients over features and over tokens only for 4,096
    tokens or more, at least twice the features, and guards each of these bounds: three ranges of lengths,
    each compiled by itself, for half a minute, at a moment of its own on each rank. Told not to look it
    always fuses.
    """
    known = list_options()
    if "triton.mix_order_reduction_non_strict_mode" in known:
        return {"triton.mix_order_reduction_non_strict_mode": True}
    return {"triton.mix_order_reduction": False} if "triton.mix_order_reduction" in known else {}


def compiled_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    cu_seq_lens_q: torch.Tensor,
    odc_segments: Segments | None,
    sliding_window: int | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """:func:`~odcengine.models.packed_attention` of a packed row, while dynamo traces it."""
    whole = not changes_scores(kwargs) and can_use_varlen(query, key, value, dropout)
    if odc_segments is not None and whole:
        # The row's length is not compared with the boundaries, which would make them part of the graph;
        # MicroBatch did that.
        check_arguments(module, query, key, attention_mask, is_causal, kwargs)
        return varlen_attention(
            query,
            key,
            value,
            cu_seq_lens_q,
            odc_segments.longest,
            scaling=scaling,
            sliding_window=sliding_window,
            kernels=_KERNELS,
        ), None
    output: tuple[torch.Tensor, None] = _uncompiled(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        cu_seq_lens_q=cu_seq_lens_q,
        odc_segments=odc_segments,
        sliding_window=sliding_window,
        **kwargs,
    )
    return output
