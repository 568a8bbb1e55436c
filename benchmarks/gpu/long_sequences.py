"""Times attention over packed samples, and the loss of long rows, on one GPU; prints tables in Markdown.

Attention has the shape of Qwen2.5 1.5B (12 heads, 2 key-value heads, 128 numbers each), the loss its head
(hidden size 1536, 151,936 words); all in bfloat16, forward and backward. Memory is what comes on top of
inputs and their gradients at most. From the root of the repository:

    PYTHONPATH=. python benchmarks/gpu/long_sequences.py [--repeats 10] [--only attention|loss] [--flash FA3]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from odcengine.data.batch import Segments
from odcengine.losses import linear_cross_entropy_sum, softmax
from odcengine.models import packed_attention

HEADS, KV_HEADS, HEAD_DIM = 12, 2, 128
WIDTH, VOCAB = 1536, 151_936
ROWS: dict[str, list[int]] = {
    "1 sample of 65,536 tokens": [65_536],
    "8 samples of 8,192 tokens": [8192] * 8,
    "64 samples of 1,024 tokens": [1024] * 64,
    "1,024 samples of 64 tokens": [64] * 1024,
    # A few long samples and many short ones, as in long-context tuning.
    "36 samples of 64 to 32,768 tokens": [32_768, 16_384, 4096, 4096, *[1024] * 4, *[256] * 12, *[64] * 16],
}
LOSS_TOKENS = (8192, 32_768, 65_536)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def measure(step: Callable[[], None], repeats: int, gradients: int) -> str:
    """Median, range and memory of a step, as cells of a table; ``gradients``: their bytes."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - gradients
    times = []
    for _ in range(repeats):
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return f"{statistics.median(times):.2f} | {min(times):.2f} to {max(times):.2f} | {extra / 2**30:.2f}"


def row_of(name: str, step: Callable[[], None], repeats: int, gradients: int, work: float) -> None:
    """Print a line of a table; ``work``: FLOPs of a step."""
    try:
        cells = measure(step, repeats, gradients)
    except (RuntimeError, ImportError) as error:  # a kernel that is not there, or too little memory
        torch.cuda.empty_cache()
        say(f"| {name} | {type(error).__name__}: {str(error).splitlines()[0][:80]} | | | |")
        return
    say(f"| {name} | {cells} | {work / float(cells.split()[0]) / 1e9:.0f} |")


# ---- attention -----------------------------------------------------------------------------------------

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(boundaries: list[int]) -> Attend:
    cu_seq_lens = torch.tensor(boundaries, dtype=torch.int32).cuda()
    segments, module = Segments(boundaries), nn.Module()

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return packed_attention(
            module, query, key, value, None, cu_seq_lens_q=cu_seq_lens, odc_segments=segments
        )[0]

    return attend


def dense(boundaries: list[int], backend: SDPBackend, copy: bool) -> Attend:
    """torch's dense attention, one sample after the other, by one of its kernels."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if copy:
            key, value = (rows.repeat_interleave(HEADS // KV_HEADS, dim=1) for rows in (key, value))
        with sdpa_kernel(backend):
            pieces = []
            for start, stop in itertools.pairwise(boundaries):
                q, k, v = (rows[:, :, start:stop] for rows in (query, key, value))
                pieces.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not copy))
        return torch.cat(pieces, dim=2).transpose(1, 2)

    return attend


def of_transformers(boundaries: list[int]) -> Attend | None:
    """FlashAttention 2 as transformers calls it, if the package flash-attn is installed."""
    from transformers.utils.import_utils import is_flash_attn_2_available

    if not is_flash_attn_2_available():
        return None
    from transformers.integrations.flash_attention import flash_attention_forward

    config = SimpleNamespace(_attn_implementation="flash_attention_2")
    module: Any = SimpleNamespace(config=config, is_causal=True)
    cu_seq_lens = torch.tensor(boundaries, dtype=torch.int32).cuda()
    longest = Segments(boundaries).longest

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = flash_attention_forward(
            module,
            query,
            key,
            value,
            None,
            cu_seq_lens_q=cu_seq_lens,
            cu_seq_lens_k=cu_seq_lens,
            max_length_q=longest,
            max_length_k=longest,
        )[0]
        return output

    return attend


def attention(repeats: int) -> None:
    say("## Attention over packed samples, forward and backward\n")
    for title, lengths in ROWS.items():
        boundaries = list(itertools.accumulate(lengths, initial=0))
        torch.manual_seed(0)
        query, key, value = (
            torch.randn(1, boundaries[-1], heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
            .transpose(1, 2)
            .requires_grad_()
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        weights = torch.randn(1, boundaries[-1], HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        methods: dict[str, Attend | None] = {
            "odcengine": ours(boundaries),
            "sample by sample, flash": dense(boundaries, SDPBackend.FLASH_ATTENTION, copy=False),
            "sample by sample, cuDNN": dense(boundaries, SDPBackend.CUDNN_ATTENTION, copy=False),
            "sample by sample, memory-efficient": dense(
                boundaries, SDPBackend.EFFICIENT_ATTENTION, copy=True
            ),
            "transformers, flash-attn": of_transformers(boundaries),
        }
        say(f"### {title}\n")
        say("| method | ms | range | GiB | TFLOP/s |\n|---|---|---|---|---|")
        gradients = 2 * sum(tensor.numel() for tensor in (query, key, value))
        # Two products forward, five backward, of half the square each.
        work = 3.5 * sum(2.0 * length**2 * HEADS * HEAD_DIM for length in lengths)

        def step(attend: Attend, rows: Any = (query, key, value), weights: torch.Tensor = weights) -> None:
            torch.autograd.grad(attend(*rows), rows, weights)

        for name, attend in methods.items():
            if attend is None:
                say(f"| {name} | not installed | | | |")
            else:
                row_of(name, functools.partial(step, attend), repeats, gradients, work)
        say("")


# ---- loss ----------------------------------------------------------------------------------------------

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def fused(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> None:
    loss = linear_cross_entropy_sum(hidden, weight, None, labels, num_targets=len(labels))
    torch.autograd.grad(loss, (hidden, weight))


@contextmanager
def without_kernel() -> Iterator[None]:
    kernel = softmax._kernel
    softmax._kernel = lambda device: None  # type: ignore[assignment]
    try:
        yield
    finally:
        softmax._kernel = kernel


def fused_without_kernel(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> None:
    with without_kernel():
        fused(hidden, weight, labels)


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, step: int) -> None:
    """torch's linear layer and cross entropy, ``step`` tokens at a time, each with its backward."""
    for rows, targets in zip(torch.split(hidden.detach(), step), torch.split(labels, step), strict=True):
        inputs = rows.requires_grad_()
        loss = F.cross_entropy(F.linear(inputs, weight).float(), targets, reduction="sum")
        torch.autograd.backward(loss)
    weight.grad = None


def losses(repeats: int) -> None:
    say(f"## Head and loss, hidden size {WIDTH:,}, {VOCAB:,} words, forward and backward\n")
    methods: dict[str, Step] = {
        "odcengine": fused,
        "odcengine, without its kernel": fused_without_kernel,
        "plain, 1,024 at a time": functools.partial(plain, step=1024),
        "plain, 4,096 at a time": functools.partial(plain, step=4096),
        "plain, all at once": functools.partial(plain, step=10**9),
    }
    for tokens in LOSS_TOKENS:
        torch.manual_seed(0)
        hidden = torch.randn(tokens, WIDTH, device="cuda", dtype=torch.bfloat16).requires_grad_()
        weight = (0.05 * torch.randn(VOCAB, WIDTH, device="cuda")).bfloat16().requires_grad_()
        labels = torch.randint(VOCAB, (tokens,), device="cuda")
        gradients = (hidden.numel() + weight.numel()) * 2
        say(f"### {tokens:,} tokens\n")
        say("| method | ms | range | GiB | TFLOP/s |\n|---|---|---|---|---|")
        for name, method in methods.items():
            work = 6.0 * tokens * WIDTH * VOCAB
            row_of(name, functools.partial(method, hidden, weight, labels), repeats, gradients, work)
        say("")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="timed steps of each method")
    parser.add_argument("--only", choices=("attention", "loss"), help="one of the two parts")
    parser.add_argument("--flash", metavar="NAME", help="FlashAttention for torch to use, such as FA3")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("long_sequences.py: torch sees no GPU")
    if options.flash:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl(options.flash)
    gpu = torch.cuda.get_device_name()
    say(f"{gpu}, torch {torch.__version__}, bfloat16, {options.repeats} steps each\n")
    if options.only != "loss":
        attention(options.repeats)
    if options.only != "attention":
        losses(options.repeats)


if __name__ == "__main__":
    main()
