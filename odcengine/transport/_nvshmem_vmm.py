"""Whether NVSHMEM's heap needs ``NVSHMEM_DISABLE_CUDA_VMM=1`` here, as on some virtual machines.

NVSHMEM builds its heap from CUDA's virtual memory management. Where that fails it may end the process, and it
cannot be started twice in one; so each rank lets a process of its own try, all ranks together, before the
library is started in the rank itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

import torch
import torch.distributed as dist

from odcengine._collectives import exchange_texts
from odcengine.transport.heap import SIZE_VARIABLE

logger = logging.getLogger(__name__)

VMM_VARIABLE = "NVSHMEM_DISABLE_CUDA_VMM"
TIMEOUT_S = 120.0
_MODULE = "odcengine.transport._nvshmem_probe"
_POLL_S = 0.2
_ID_NBYTES = 4096  # more than a unique id has
_MAX_LINE = 256
_SMALL_HEAP = str(64 << 20)
_RUNNING, _WORKS, _FAILED = 0, 1, 2


@dataclass
class Trial:
    """A probe that runs on this rank.

    Attributes:
        process: the probe.
        id_pipe: descriptor from which rank 0's unique id is read, or to which it is written for another's.
        output: what the probe prints.
    """

    process: subprocess.Popen[bytes]
    id_pipe: int
    output: IO[bytes] = field(repr=False)

    @classmethod
    def start(cls, command: Sequence[str], rank: int, env: Mapping[str, str], output: IO[bytes]) -> Trial:
        """Start a probe; its last argument is its end of the pipe."""
        read_end, write_end = os.pipe()
        ours, theirs = (read_end, write_end) if rank == 0 else (write_end, read_end)
        try:
            process = subprocess.Popen(
                [*command, str(theirs)],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs,),
            )
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return cls(process, ours, output)

    def state(self) -> int:
        """Running, works, or failed."""
        code = self.process.poll()
        return _RUNNING if code is None else _WORKS if code == 0 else _FAILED

    def end(self) -> str:
        """End it where it still runs; returns the last line that it printed, or how it ended."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.id_pipe >= 0:
            os.close(self.id_pipe)
        self.output.seek(0)
        lines = self.output.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with {self.process.returncode}"


def choose_vmm(
    rank: int,
    world_size: int,
    gpu: int,
    group: dist.ProcessGroup,
    *,
    environ: dict[str, str] | None = None,
    command: Sequence[str] = (sys.executable, "-m", _MODULE),
    timeout_s: float = TIMEOUT_S,
) -> str | None:
    """Find out whether the heap works as it is, and else set ``NVSHMEM_DISABLE_CUDA_VMM``. Collective.

    The user's own value of the variable is left alone, without a trial.

    Args:
        rank: global rank.
        world_size: number of ranks.
        gpu: index of this rank's GPU.
        group: process group of all ranks, for tensors of the host.
        environ: this process's variables; changed where the variable is set.
        command: the probe (tests give another).
        timeout_s: longest time of one trial, in seconds.

    Returns:
        What was found, in words, which rank 0 has logged; None where nothing was tried.
    """
    env = os.environ if environ is None else environ
    if _any_rank(VMM_VARIABLE in env, group):
        return None
    why = _try(rank, world_size, gpu, group, command, {**env, SIZE_VARIABLE: _SMALL_HEAP}, timeout_s)
    if why is None:
        return _told(rank, logging.INFO, f"NVSHMEM's heap works without {VMM_VARIABLE}")
    disabled = {**env, SIZE_VARIABLE: _SMALL_HEAP, VMM_VARIABLE: "1"}
    still = _try(rank, world_size, gpu, group, command, disabled, timeout_s)
    if still is not None:
        text = f"a trial of NVSHMEM's heap failed, with and without {VMM_VARIABLE}: {still}"
        return _told(rank, logging.WARNING, text)
    env[VMM_VARIABLE] = "1"
    text = (
        f"NVSHMEM's heap fails here ({why}) and works with {VMM_VARIABLE}=1, which is set now; "
        f"{SIZE_VARIABLE} is a hard limit then"
    )
    return _told(rank, logging.WARNING, text)


def _told(rank: int, level: int, text: str) -> str:
    """Rank 0 says it for all."""
    if rank == 0:
        logger.log(level, "%s", text)
    return text


def _try(
    rank: int,
    world_size: int,
    gpu: int,
    group: dist.ProcessGroup,
    command: Sequence[str],
    env: Mapping[str, str],
    timeout_s: float,
) -> str | None:
    """One trial of all ranks; returns None where it works, else why the first that failed did."""
    deadline = time.monotonic() + timeout_s
    words = [*command, str(rank), str(world_size), str(gpu)]
    with tempfile.TemporaryFile() as output:
        trial = Trial.start(words, rank, env, output)
        try:
            _hand_over_id(trial, rank, group, deadline)
            state = _watch(trial.state, group, deadline)
        finally:
            own = trial.state()
            last_line = trial.end()
    if state == _WORKS:
        return None
    failures = exchange_texts(last_line[:_MAX_LINE] if own == _FAILED else "", group)
    found = [f"rank {other}: {text}" for other, text in enumerate(failures) if text]
    return found[0] if found else f"no answer within {timeout_s:g} s"


def _hand_over_id(trial: Trial, rank: int, group: dist.ProcessGroup, deadline: float) -> None:
    """The unique id goes from rank 0's probe to those of all others; it is empty where that failed."""
    data = _read_all(trial, deadline)[:_ID_NBYTES] if rank == 0 else b""
    length, content = torch.tensor([len(data)]), torch.zeros(_ID_NBYTES, dtype=torch.uint8)
    content[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    dist.broadcast(length, src=0, group=group)
    dist.broadcast(content, src=0, group=group)
    if rank != 0:
        with contextlib.suppress(OSError):  # a probe that is gone
            os.write(trial.id_pipe, bytes(content[: int(length)].tolist()))
        os.close(trial.id_pipe)
        trial.id_pipe = -1


def _read_all(trial: Trial, deadline: float) -> bytes:
    """What a probe writes until it closes its pipe, or the deadline."""
    data = b""
    while (left := deadline - time.monotonic()) > 0:
        if select.select([trial.id_pipe], [], [], left)[0]:
            part = os.read(trial.id_pipe, _ID_NBYTES)
            if not part:
                break
            data += part
    return data


def _watch(state: Callable[[], int], group: dist.ProcessGroup, deadline: float) -> int:
    """Until the probes of all ranks work, or one has failed: the others may wait for it for ever."""
    while True:
        mine = _FAILED if time.monotonic() > deadline and state() == _RUNNING else state()
        counts = torch.tensor([float(mine == _FAILED), float(mine == _RUNNING)])
        dist.all_reduce(counts, group=group)
        if counts[0]:
            return _FAILED
        if not counts[1]:
            return _WORKS
        time.sleep(_POLL_S)


def _any_rank(flag: bool, group: dist.ProcessGroup) -> bool:
    value = torch.tensor([float(flag)])
    dist.all_reduce(value, group=group)
    return bool(value)
