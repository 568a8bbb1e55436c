"""Peak memory of one method that is alone in its process."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
import torch.distributed as dist

from odc_tools.bench.ranks import Ranks
from odcengine._collectives import all_gather, reduce_scatter


class PeakMemory:
    """What a rank has taken since this object was made.

    On a GPU torch's allocator counts its own; the rest (symmetric memory, buffers of NCCL, kernels' code) is
    what the device lacks besides. On a CPU it is the resident memory of the process.

    Args:
        ranks: this rank.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        if ranks.on_gpu:
            # NCCL makes its buffers at the first call; they belong to no method.
            rows = torch.zeros(ranks.world_size, 2**20, device=ranks.device)
            all_gather(rows.view(-1), rows[ranks.rank])
            reduce_scatter(torch.empty_like(rows[0]), rows.view(-1))
            dist.all_reduce(rows)
            del rows
        self.release()
        ranks.meet()
        self._before = self._outside() if ranks.on_gpu else _resident("VmRSS")

    def release(self) -> None:
        """Give cached memory back."""
        gc.collect()
        if self._ranks.on_gpu:
            torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Peaks count from here: making the model is no part of training."""
        self.release()
        if self._ranks.on_gpu:
            torch.cuda.reset_peak_memory_stats(self._ranks.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def _outside(self) -> int:
        """Bytes of the device that torch's allocator does not have."""
        free, total = torch.cuda.mem_get_info(self._ranks.device)
        return total - free - torch.cuda.memory_reserved(self._ranks.device)

    def read(self) -> dict[str, float]:
        """Peaks in bytes, of the rank that has the most.

        Returns:
            ``peak_bytes``: all together; on GPUs also ``allocated_bytes`` and ``reserved_bytes`` of torch's
            allocator and ``outside_bytes`` of the rest; ``peak_bytes`` is allocated and outside.
        """
        if not self._ranks.on_gpu:
            (peak,) = self._ranks.largest([_resident("VmHWM") - self._before])
            return {"peak_bytes": peak}
        self._ranks.sync()
        allocated = torch.cuda.max_memory_allocated(self._ranks.device)
        reserved = torch.cuda.max_memory_reserved(self._ranks.device)
        outside = self._outside() - self._before
        values = self._ranks.largest([allocated + outside, allocated, reserved, outside])
        names = ("peak_bytes", "allocated_bytes", "reserved_bytes", "outside_bytes")
        return dict(zip(names, values, strict=True))


def _resident(key: str) -> int:
    """Bytes that Linux counts for this process under a key of its status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status has no {key}")
