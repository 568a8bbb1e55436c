"""Sums over ranks of numbers that a script has: metrics, rewards."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

from odcengine.errors import UsageError
from odcengine.start import Job


def sum_over_ranks(values: Mapping[str, torch.Tensor | float], job: Job) -> dict[str, float]:
    """The sums of all ranks' numbers, by the hosts.

    Args:
        values: scalars; the same names on all ranks.
        job: the ranks, with the deadline of waiting for them.

    Raises:
        UsageError: other ranks have other names.
        PeerError: another rank failed, died or gave no sign of life.
    """
    names = sorted(values)
    given = [values[name] for name in names]
    scalars = [  # Python's numbers keep all their digits
        (value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64))
        .detach()
        .reshape(())
        for value in given
    ]
    on_device = [number for number, scalar in enumerate(scalars) if scalar.device.type != "cpu"]
    numbers = [0.0 if number in on_device else float(scalar) for number, scalar in enumerate(scalars)]
    if on_device:
        fetched = torch.stack([scalars[number].double() for number in on_device])
        for number, value in zip(on_device, job.device.start_fetch(fetched)(job.control), strict=True):
            numbers[number] = value
    message = torch.tensor(numbers, dtype=torch.float64)
    if job.topology.world_size > 1:
        names_hash = float(zlib.crc32("\n".join(names).encode()))
        ends = torch.tensor([names_hash, -names_hash], dtype=torch.float64)
        work = dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=job.host_group, async_op=True)
        job.control.wait_work(work, "the names of sums")
        if ends.sum():
            raise UsageError(
                f"sum_over_ranks: other ranks have other names than {', '.join(names)}; start from zeros for "
                "all of them, so that a rank without micro-batches has them too"
            )
        work = dist.all_reduce(message, group=job.host_group, async_op=True)
        job.control.wait_work(work, f"the sums of {', '.join(names)}")
    return dict(zip(names, message.tolist(), strict=True))
