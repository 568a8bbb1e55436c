"""The device of a rank, CPU or one GPU: its streams, its clock, and how the host waits for its results.

The engine, the sharding and the monitor do the same on both; what differs is here. On a CPU everything is
done when a call returns. On a GPU calls only enqueue work, so times are taken by events in the order of the
stream, and the host asks for numbers once a minibatch.
"""

from __future__ import annotations

import abc
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from odcengine.control import ControlBlock
from odcengine.errors import ConfigError
from odcengine.ranks import RankInfo

Mark = Any
"""A point in time of a device; see :meth:`Device.mark`."""

SHARE_VARIABLE = "ODC_SHARE_GPUS"
_LEFT_TO_DO = 2  # groups of a backward, a block and the embedding mostly, when more is drawn


def shares_gpus() -> bool:
    """Whether several ranks may compute on one GPU: ``ODC_SHARE_GPUS``, for trying things out.

    Raises:
        ConfigError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(SHARE_VARIABLE, "0")
    if value not in ("0", "1"):
        raise ConfigError(f"environment: {SHARE_VARIABLE}={value!r}; expected 1 (ranks share GPUs) or 0")
    return value == "1"


class Device(abc.ABC):
    """Where a rank computes.

    Attributes:
        torch_device: as torch names it, with its index.
    """

    torch_device: torch.device

    @property
    def type(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.torch_device.type

    @property
    def backend(self) -> str:
        """Backends of torch.distributed for tensors of the host and of the device."""
        if self.type == "cpu":
            return "gloo"
        return "cpu:gloo,cuda:gloo" if shares_gpus() else "cpu:gloo,cuda:nccl"  # NCCL wants a GPU a rank

    @abc.abstractmethod
    def mark(self) -> Mark:
        """A point in time: when what was enqueued on the current stream so far is done."""

    @abc.abstractmethod
    def seconds(self, start: Mark, end: Mark) -> float:
        """Seconds between two marks that have passed (after a fetch, all of before it have)."""

    @abc.abstractmethod
    def wait_for(self, mark: Mark, control: ControlBlock) -> None:
        """Wait until a mark has passed; raises PeerError where another rank fails or dies meanwhile."""

    @abc.abstractmethod
    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Forward and backward run inside of it."""

    @abc.abstractmethod
    def start_fetch(self, values: torch.Tensor) -> Callable[[ControlBlock], list[float]]:
        """Bring numbers of the device to the host.

        Args:
            values: 1-D; what they are at this point of the current stream.

        Returns:
            Called with the control block, waits for them and returns them; everything enqueued before is done
            then. It raises PeerError where another rank fails or dies meanwhile.
        """

    def gradients_enqueued(self) -> None:  # noqa: B027 - on a CPU what is enqueued is done
        """Called in each backward, in the order of the current stream, when one more group has them."""

    def micro_batch_enqueued(self) -> None:  # noqa: B027
        """Called after each backward."""

    def wait_until_nearly_done(self, control: ControlBlock, needless: Callable[[], bool]) -> None:  # noqa: B027
        """Wait until the device is in the last two groups of the last backward, or ``needless()`` is true.

        Whoever draws work must not draw what its device will only get to later: another rank may be free
        before. What is left of the backward hides how long the host takes for the next first kernel.
        """

    def sum_over_ranks(self, values: torch.Tensor) -> None:
        """Sum float64 numbers of all ranks' devices in place, in the order of the current stream."""
        if dist.get_world_size() > 1:
            dist.all_reduce(values)


class CpuDevice(Device):
    """The CPU: what is called is done."""

    torch_device = torch.device("cpu")

    def mark(self) -> Mark:
        return time.perf_counter()

    def seconds(self, start: Mark, end: Mark) -> float:
        return float(end - start)

    def wait_for(self, mark: Mark, control: ControlBlock) -> None:
        """It has passed."""

    def computing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def start_fetch(self, values: torch.Tensor) -> Callable[[ControlBlock], list[float]]:
        numbers: list[float] = values.tolist()
        return lambda control: numbers


class CudaDevice(Device):
    """One GPU.

    Forward and backward run on a stream of higher priority than the transport's pushes, so that their
    kernels take the multiprocessors first and pushes what they leave.

    Args:
        index: the GPU, as this process numbers those that it sees.
    """

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(index)
        self._draws = False
        self._gradients: deque[torch.cuda.Event] = deque(maxlen=1 + _LEFT_TO_DO)  # of a backward, the last
        self._nearly_done: torch.cuda.Event | None = None
        self._stream = torch.cuda.Stream(index, priority=-1)  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def wait_for(self, mark: Mark, control: ControlBlock) -> None:
        _wait(mark.query, "the GPU's work of the minibatch", control)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        outer = torch.cuda.current_stream(self.torch_device)
        if outer == self._stream:
            yield
            return
        # Both ways, so that memory of either stream may be used, freed and used again on the other.
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)

    def gradients_enqueued(self) -> None:
        if self._draws:
            self._gradients.append(_recorded_event())

    def micro_batch_enqueued(self) -> None:
        if self._draws:
            full = len(self._gradients) == self._gradients.maxlen
            self._nearly_done = self._gradients[0] if full else _recorded_event()
            self._gradients.clear()

    def wait_until_nearly_done(self, control: ControlBlock, needless: Callable[[], bool]) -> None:
        self._draws = True
        event, self._nearly_done = self._nearly_done, None
        if event is not None:
            done: Callable[[], bool] = event.query
            what = "the GPU's work before more is drawn"
            _wait(lambda: done() or needless(), what, control, idle=False)  # the GPU is not

    def start_fetch(self, values: torch.Tensor) -> Callable[[ControlBlock], list[float]]:
        landing = torch.empty(values.numel(), dtype=torch.float64, pin_memory=True)
        landing.copy_(values, non_blocking=True)
        event = _recorded_event()

        def finish(control: ControlBlock) -> list[float]:
            _wait(event.query, "the GPU's work of the minibatch", control)
            numbers: list[float] = landing.tolist()
            return numbers

        return finish


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _wait(ready: Callable[[], bool], what: str, control: ControlBlock, *, idle: bool = True) -> None:
    others = [index for index in range(len(control.topology.peers)) if index != control.topology.local_rank]
    control.wait_until(ready, what, lambda: others, everyone=True, idle=idle)


def choose_device(info: RankInfo, wanted: str) -> Device:
    """The device of this rank, made current.

    Args:
        info: this rank.
        wanted: ``auto`` (a GPU where torch sees one), ``cpu`` or ``cuda``.

    Raises:
        ConfigError: a GPU is wanted and there is none for this rank.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return CpuDevice()
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        raise ConfigError(
            "odc.device: cuda, but torch finds no GPU ("
            f"{'no driver, or CUDA_VISIBLE_DEVICES hides it' if built else 'a torch without CUDA'}); "
            "expected cpu or auto here"
        )
    visible, local = torch.cuda.device_count(), info.local_rank or 0
    if shares_gpus():
        return CudaDevice(local % visible)
    if visible > 1 and local >= visible:
        raise ConfigError(
            f"local rank {local} of {info.local_world_size} finds {visible} GPUs; start at most one rank a "
            "GPU (odc-launch --nproc-per-node), or set odc.device: cpu; to try things out, "
            f"{SHARE_VARIABLE}=1 lets ranks share GPUs"
        )
    # A scheduler may show each rank its own GPU only; then that is number 0 for all of them.
    return CudaDevice(local if visible > 1 else 0)


def identity_of(device: Device) -> str:
    """What tells a GPU from all others of all machines, and its kind, as ``id|kind``.

    CPUs have no id, and GPUs that ranks may share.
    """
    if device.type != "cuda":
        return "|CPU"
    properties = torch.cuda.get_device_properties(device.torch_device)
    if shares_gpus():  # told, so that a rank with another value is named
        return f"|{properties.name} ({SHARE_VARIABLE}=1)"
    return f"{properties.uuid}|{properties.name}"


def unmapped_pair(index: int, num_peers: int) -> str | None:
    """A GPU of this node whose memory this rank's cannot address, in words; None where there is none.

    Args:
        index: this rank's GPU, as this process numbers those that it sees: a scheduler may show it only its
            own, and then nothing is known before memory is mapped.
        num_peers: ranks of the node, one a GPU.
    """
    for other in range(min(torch.cuda.device_count(), num_peers)):
        if other != index and not torch.cuda.can_device_access_peer(index, other):
            names = [torch.cuda.get_device_name(number) for number in (index, other)]
            return (
                f"GPU {index} ({names[0]}) cannot address the memory of GPU {other} ({names[1]}); "
                "`nvidia-smi topo -p2p r` shows the pairs"
            )
    return None


def check_devices(identities: list[str], describe: list[str]) -> None:
    """Refuse ranks on different kinds of devices, and two ranks on one GPU.

    Args:
        identities: of all ranks, from :func:`identity_of`.
        describe: all ranks' names for messages.

    Raises:
        ConfigError: names the ranks.
    """
    ids, kinds = zip(*(identity.split("|", 1) for identity in identities), strict=True)
    odd = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if odd is not None:
        raise ConfigError(
            f"{describe[odd]} computes on {kinds[odd]}, {describe[0]} on {kinds[0]}; all ranks of a job need "
            "the same kind of device (choose machines alike, or set odc.device)"
        )
    first: dict[str, int] = {}
    for rank, uuid in enumerate(ids):
        if uuid and first.setdefault(uuid, rank) != rank:
            raise ConfigError(
                f"{describe[first[uuid]]} and {describe[rank]} are on the same GPU; give each rank one "
                "of its own (as many ranks a node as GPUs; LOCAL_RANK or CUDA_VISIBLE_DEVICES may be wrong); "
                f"to try things out, {SHARE_VARIABLE}=1 lets ranks share GPUs"
            )
