"""Sizes of the two kernels that push gradients: alone, and beside a matrix product.

    torchrun --nproc-per-node 2 benchmarks/gpu/push_kernels.py

128 MiB of fp32 accumulator a shard, bf16 sources; every rank adds to its own shard and to its peers'. The
product runs on a stream of higher priority. Medians of three rounds in which the product alone, the push
alone and both together take turns, of the rank that takes longest; at most 8 ranks.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from odcengine.transport import _kernels

NUMEL = 32 << 20


def milliseconds(work: Callable[[], object], repeats: int = 15, warm: int = 3) -> float:
    for _ in range(warm):
        work()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    longest = torch.tensor(start.elapsed_time(end) / repeats, device="cuda")
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    own = symmetric_memory.empty(NUMEL, dtype=torch.float32, device=device).zero_()
    handle = symmetric_memory.rendezvous(own, dist.group.WORLD.group_name)
    owners = [handle.get_buffer(peer, (NUMEL,), torch.float32) for peer in range(world_size)]
    addresses = torch.tensor([owner.data_ptr() for owner in owners], device=device)
    source = torch.randn(world_size, NUMEL, device=device).bfloat16()
    left, right = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(left)
    low, high = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-1)

    def multiply() -> None:
        torch.mm(left, right, out=product)

    def beside(push: Callable[[], object]) -> None:
        current = torch.cuda.current_stream()
        low.wait_stream(current)
        high.wait_stream(current)
        with torch.cuda.stream(low):
            push()
        with torch.cuda.stream(high):
            multiply()
        current.wait_stream(high)
        current.wait_stream(low)

    def show(name: str, push: Callable[[], object]) -> None:
        alone, ratios = [], []
        for _ in range(3):
            multiplied = milliseconds(multiply)
            alone.append(milliseconds(push))
            ratios.append(milliseconds(lambda: beside(push)) / multiplied)
        if rank == 0:
            print(
                f"{name:32s} {statistics.median(alone):7.3f} ms alone, both take "
                f"{statistics.median(ratios):.3f} of the product alone",
                flush=True,
            )

    for lines, warps in ((32, 4), (32, 8), (64, 4), (64, 8)):
        descriptors = [
            _kernels.TensorDescriptor.from_tensor(owner.view(-1, 256), [lines, 256]) for owner in owners
        ]
        descriptors += [None] * (_kernels.MAX_BULK_ROWS - world_size)
        for programs in (11, 17, 23, 31, 32):  # 32: each program adds to some owners only
            show(
                f"bulk {lines}x256, {warps} warps, {programs} CTAs",
                lambda d=descriptors, n=programs, h=lines, w=warps: _kernels.bulk_add_kernel[(n,)](
                    *d, addresses, source, NUMEL, rank, ROWS=world_size, WIDTH=256, HEIGHT=h, num_warps=w
                ),
            )
    for programs in (61, 131, 132):
        show(
            f"atomics, {programs} CTAs",
            lambda n=programs: _kernels.scatter_add_kernel[(n,)](
                addresses,
                source,
                NUMEL,
                NUMEL,
                world_size,
                0,
                rank,
                element=_kernels.tl.float32,
                BLOCK=2048,
                num_warps=8,
            ),
        )
    wide, output = source.float().view(-1), torch.empty(NUMEL, device=device)
    show("NCCL reduce-scatter, fp32", lambda: dist.reduce_scatter_tensor(output, wide))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
