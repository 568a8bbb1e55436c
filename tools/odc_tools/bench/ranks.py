"""A rank of a benchmark: its device, how it meets the others, its transport, and what it writes.

``python -m odc_tools.bench.ranks OPTIONS`` is such a rank, started by odc-launch; OPTIONS is a JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from odc_tools.bench.record import describe as record_of
from odc_tools.bench.record import write as write_record
from odcengine.control import ControlBlock, Phase
from odcengine.device import choose_device
from odcengine.errors import ConfigError
from odcengine.ranks import read_rank_info
from odcengine.topology import Topology
from odcengine.transport.base import Grid, Transport

STARTED = time.perf_counter()
"""When this process began, nearly; budgets count from here."""


class Ranks:
    """This rank among the others.

    Attributes:
        rank: of this process.
        world_size: number of ranks, all on this machine.
        device: where this rank computes.
        timeout_s: limit of every wait.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.
        timeout_s: limit of every wait, in seconds.

    Raises:
        ConfigError: fewer than two ranks, or no device for this one.
    """

    def __init__(self, device: str, timeout_s: float) -> None:
        info = read_rank_info()
        self.rank, self.world_size = info.rank, info.world_size
        self.timeout_s = timeout_s
        self._error_file = info.error_file
        if self.world_size < 2:
            raise ConfigError("odc bench needs 2 ranks or more; one rank talks to nobody")
        if info.local_world_size not in (None, self.world_size):
            raise ConfigError(
                f"odc bench runs on one machine, but this one has {info.local_world_size} of "
                f"{self.world_size} ranks; start all ranks on one node"
            )
        chosen = choose_device(info, device)
        self.device = chosen.torch_device
        if not self.on_gpu:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
        dist.init_process_group(
            chosen.backend,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=self.device if "nccl" in chosen.backend else None,
        )

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def say(self, text: str) -> None:
        """Tell how far it is, on rank 0's stderr."""
        if self.rank == 0:
            print(f"odc bench: {time.perf_counter() - STARTED:5.0f} s  {text}", file=sys.stderr, flush=True)

    def sync(self) -> None:
        """Wait for this rank's device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """Wait for this rank's device and for all ranks."""
        self.sync()
        dist.all_reduce(torch.zeros(1))

    def largest(self, values: Sequence[float]) -> list[float]:
        """For each number the largest of all ranks."""
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        largest: list[float] = tensor.tolist()
        return largest

    def total(self, values: Sequence[float]) -> list[float]:
        """For each number the sum over all ranks."""
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor)
        total: list[float] = tensor.tolist()
        return total

    def of_first(self, value: float) -> float:
        """Rank 0's number."""
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(tensor, src=0)
        return float(tensor)

    @contextlib.contextmanager
    def control(self) -> Iterator[ControlBlock]:
        """A control block of all ranks; a failure inside of it is told to the others."""
        tokens = [secrets.token_hex(16)]
        dist.broadcast_object_list(tokens, src=0)
        size = self.world_size
        everyone = (tuple(range(size)),)
        topology = Topology(self.rank, ("localhost",) * size, ("machine",) * size, everyone)
        control = ControlBlock(
            topology,
            token=tokens[0],
            timeout_s=self.timeout_s,
            startup_timeout_s=self.timeout_s,
            error_file=self._error_file,
        )
        try:
            with control.phase(Phase.BETWEEN):
                yield control
        finally:
            control.close()


def make_transport(name: str | None, control: ControlBlock, device: torch.device) -> Transport:
    """A transport without windows.

    Args:
        name: one of odc.transport's one-sided ones; None for the device's.
        control: the node's control block.
        device: this rank's.

    Raises:
        ConfigError: there is no such transport for this device.
    """
    grid = Grid.of(control.topology)
    name = name or {"cpu": "shm", "cuda": "cuda_p2p"}[device.type]
    if name == "shm" and device.type == "cpu":
        from odcengine.transport.shm import ShmTransport

        return ShmTransport(control, grid)
    if name == "cuda_p2p" and device.type == "cuda":
        from odcengine.transport.cuda_p2p import CudaP2PTransport

        group = dist.group.WORLD
        assert group is not None  # Ranks has made it
        return CudaP2PTransport(control, grid, device, group)
    raise ConfigError(
        f"--transport {name}: not for ranks on {device.type}; expected shm on CPUs, cuda_p2p on GPUs"
    )


def describe(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """What was measured on what: the head of a result file."""
    record = record_of(options, ("torch", "triton", "transformers", "numpy"))
    if ranks.on_gpu:
        record["versions"]["cuda"] = torch.version.cuda
        record["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        record["device"] = torch.cuda.get_device_name(ranks.device)
    return record | {"ranks": ranks.world_size}


def write(record: dict[str, Any], file: str, ranks: Ranks) -> None:
    """Write the result, whole or not at all; rank 0 only."""
    if ranks.rank == 0:
        write_record(record, file)


def run(options: argparse.Namespace) -> int:
    """Measure as this rank.

    Returns:
        0 if everything was measured and right, 1 if a check failed, 2 for a mistake in the arguments.
    """
    ranks = Ranks(options.device, options.timeout_s)
    if options.ranks is not None and options.ranks != ranks.world_size:
        raise ConfigError(f"--ranks {options.ranks}: but {ranks.world_size} ranks were started; leave it out")
    if options.task == "primitives":
        from odc_tools.bench import primitives

        return primitives.run(options, ranks)
    from odc_tools.bench import training

    return training.run(options, ranks)


def main() -> int:
    """Run with the options of the command line."""
    options = argparse.Namespace(**json.loads(sys.argv[1]))
    try:
        return run(options)
    except ConfigError as error:
        if read_rank_info().rank == 0:
            for problem in error.problems:
                print(f"odc bench {options.task}: error: {problem}", file=sys.stderr)
        if dist.is_initialized():  # its threads would abort the process at its end
            dist.destroy_process_group()
        return 2


if __name__ == "__main__":
    sys.exit(main())
