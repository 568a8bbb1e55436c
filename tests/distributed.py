"""Runs a function on several real processes, with a deadline, and names the ranks that failed or hung.

Processes are forked from a server that has imported torch already, so starting one takes milliseconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing as mp
import os
import pickle
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONTEXT = mp.get_context("forkserver")
# What ranks import, so that each finds it there; where a library is missing, its tests are skipped.
CONTEXT.set_forkserver_preload(
    [
        *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.utils.checkpoint"),
        *("transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2"),
        *("transformers.models.auto.modeling_auto", "pyarrow", "pytest"),
        *("matplotlib.figure", "matplotlib.backends.backend_agg"),
        *("odcengine.build", "odcengine._config_check", "odcengine.data", "odcengine.models"),
    ]
)

_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])


@dataclass
class RankResult:
    """What became of one rank: exactly one of value, error, exit code and hang says it."""

    rank: int
    value: Any = None
    error: str | None = None
    error_type: str | None = None
    exit_code: int | None = None
    hung: bool = False
    seconds: float = 0.0
    stack: str = field(default="", repr=False)

    @property
    def ok(self) -> bool:
        return self.error is None and not self.hung and self.exit_code == 0


def free_port() -> int:
    """A port for rank 0's store, outside the range from which connections get theirs.

    Between the asking and the store's start a connection of another test could take an ephemeral one; each of
    pytest-xdist's workers has ports of its own.
    """
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", 20_000 + _WORKERS * secrets.randbelow(12_000 // _WORKERS) + _WORKER))
            return int(probe.getsockname()[1])


def _child(
    task: bytes,
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    timeout_s: float,
    env: dict[str, str],
    gpus: int | None,
) -> None:
    """One rank. What it runs is unpickled, and its module imported, when the environment is the test's."""
    import torch

    gc.freeze()  # what the server has imported: the engine's full collections look at the test's own objects
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if gpus is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests of CPU ranks are that on any machine
    elif 0 < gpus < world_size:
        os.environ.update(ODC_SHARE_GPUS="1", LOCAL_RANK=str(rank % gpus))  # DeepSpeed's device is LOCAL_RANK
    os.environ.update(env)
    with open(Path(folder) / f"stack{rank}", "w") as stack:
        faulthandler.enable(stack)
        faulthandler.dump_traceback_later(max(timeout_s - 2.0, 0.5), file=stack)
        result: dict[str, Any] = {}
        try:
            function, args = pickle.loads(task)
            result["value"] = function(rank, world_size, *args)
        except BaseException as error:
            result["error"] = f"{type(error).__name__}: {error}"
            result["error_type"] = type(error).__name__
            traceback.print_exc()
        temporary = Path(folder) / f"result{rank}.tmp"
        temporary.write_bytes(pickle.dumps(result))
        temporary.rename(Path(folder) / f"result{rank}")
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        sys.stderr.flush()


def _nothing() -> None:
    """Started once, so that no test's deadline includes the import of torch."""


@functools.cache
def warm_up() -> None:
    process = CONTEXT.Process(target=_nothing)
    process.start()
    process.join(200)


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def init_process_group() -> None:
    """As a script of the user does it that brings its own process group, for GPUs that may be shared."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    shared = os.environ.get("ODC_SHARE_GPUS") == "1"
    dist.init_process_group("cpu:gloo,cuda:gloo" if shared else "cpu:gloo,cuda:nccl")


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    env: dict[str, str] | None = None,
    env_of_ranks: Sequence[dict[str, str]] | None = None,
    gpus: bool = False,
    during: Callable[[list[int]], None] | None = None,
) -> list[RankResult]:
    """Run ``function(rank, world_size, *args)`` on ``world_size`` processes and wait for all of them.

    Ranks see no GPU unless ``gpus``, and share them where there are fewer than ranks. ``env`` is for all,
    ``env_of_ranks`` for each. ``during`` is called once with the process ids while they run (to kill or stop
    one). Ranks that have not ended at the deadline are killed and reported with their Python stacks.
    Never raises for a rank's failure.
    """
    warm_up()
    port, start = free_port(), time.monotonic()
    task = pickle.dumps((function, args))
    num_gpus = _num_gpus() if gpus else None
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            CONTEXT.Process(
                target=_child,
                args=(task, rank, world_size, port, folder, timeout_s, settings, num_gpus),
            )
            for rank, settings in enumerate(env_of_ranks or [env or {}] * world_size)
        ]
        for process in processes:
            process.start()
        results = [RankResult(rank) for rank in range(world_size)]
        ended: dict[int, float] = {}
        try:
            if during is not None:
                during([process.pid or 0 for process in processes])
            while len(ended) < world_size and time.monotonic() - start < timeout_s:
                for rank, process in enumerate(processes):
                    if rank not in ended and not process.is_alive():
                        ended[rank] = time.monotonic() - start
                time.sleep(0.005)
        finally:
            for rank, process in enumerate(processes):
                if process.is_alive():
                    results[rank].hung = True
                    os.kill(process.pid or 0, signal.SIGKILL)
                process.join(10)
        for rank, (process, result) in enumerate(zip(processes, results, strict=True)):
            result.seconds = ended.get(rank, timeout_s)
            result.exit_code = process.exitcode
            stored = Path(folder) / f"result{rank}"
            if stored.exists():
                for name, value in pickle.loads(stored.read_bytes()).items():
                    setattr(result, name, value)
            stack = Path(folder) / f"stack{rank}"
            result.stack = stack.read_text() if stack.exists() else ""
    return results


def values(results: list[RankResult]) -> list[Any]:
    """The values of all ranks; fails with every rank's trouble if one has any."""
    bad = [r for r in results if not r.ok]
    if bad:
        lines = [f"rank {r.rank}: exit {r.exit_code}, hung {r.hung}, {r.error}\n{r.stack}" for r in bad]
        raise AssertionError("\n".join(lines))
    return [r.value for r in results]
