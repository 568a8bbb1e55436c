"""What every transport must do, as functions that take a :class:`Backend` and raise where it does not.

A new transport subclasses ``Backend`` and runs ``SUCCESS`` on two nodes of two ranks, ``ADDRESSING`` also on
other layouts, and ``FAILURES`` on one node of three ranks; see ``test_shm.py``.

Expected values are integers below 251, exact in every dtype.
"""

from __future__ import annotations

import abc
import contextlib
import gc
import os
import random
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from distributed import RankResult, run_ranks, values
from odc_tools._stress import Stress, StressResult, run_stress

from odcengine._words import Word
from odcengine.control import ControlBlock, Meeting, Phase
from odcengine.errors import OdcError
from odcengine.topology import Topology
from odcengine.transport.base import ALIGNMENT, Transport, Window, WindowPlan, WindowSpec

LIMIT_S = 1.5  # of tests that run into a deadline
MARGIN_S = 20.0  # for a machine that stops a process for seconds; less than a backend's own limit


@dataclass(frozen=True)
class Backend(abc.ABC):
    """How to build one transport on several processes; picklable.

    Attributes:
        nodes: the ranks of each node.
        timeout_s: limit of every wait.
        device: where windows, sources and destinations lie.
        accumulators: dtypes that windows may be pushed into.
    """

    nodes: tuple[tuple[int, ...], ...]
    timeout_s: float = 30.0
    device: str = "cpu"
    accumulators: tuple[torch.dtype, ...] = (torch.float32, torch.float64)

    @property
    def name(self) -> str:
        """What the sockets of this test run are called after; unique to it."""
        return f"{type(self).__name__.lower()}-{os.getpid()}"

    @property
    def world_size(self) -> int:
        """Number of ranks of all nodes."""
        return sum(map(len, self.nodes))

    def control(self, rank: int, token: str) -> ControlBlock:
        """The control block of this rank."""
        world_size = self.world_size
        topology = Topology(rank, ("testhost",) * world_size, ("machine",) * world_size, self.nodes)
        return ControlBlock(topology, token=token, timeout_s=self.timeout_s, startup_timeout_s=30.0)

    @abc.abstractmethod
    def transport(self, control: ControlBlock) -> Transport:
        """The transport of this rank, without windows."""

    def run(self, function: Callable[..., Any], *args: Any, **settings: Any) -> list[RankResult]:
        """Starts the processes, as ``run_ranks``."""
        return run_ranks(function, *args, **settings)

    def make(self, rank: int, token: str) -> tuple[ControlBlock, Transport]:
        """Both of them."""
        control = self.control(rank, token)
        return control, self.transport(control)


def launch(
    backend: Backend,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    during: Callable[[list[int]], None] | None = None,
) -> list[RankResult]:
    """Run ``function(rank, world_size, backend, token, *args)`` on all ranks of the backend."""
    token = f"{backend.name}-{secrets.token_hex(8)}"
    return backend.run(
        function,
        backend.world_size,
        backend,
        token,
        *args,
        timeout_s=timeout_s,
        during=during,
        gpus=backend.device != "cpu",
    )


def pattern(
    window: Window, shard: int, epoch: int, offset: int = 0, count: int | None = None, device: str = "cpu"
) -> torch.Tensor:
    """What row ``shard`` of a window holds in an epoch: integers below 251."""
    count = window.spec.shape[1] - offset if count is None else count
    index = torch.arange(offset, offset + count, device=device)
    return ((index * 3 + shard * 31 + epoch * 7 + window.index * 11) % 251).to(window.spec.dtype)


def fill(transport: Transport, window: Window, epoch: int) -> None:
    """Write this rank's own window; the rows of other nodes as if they had been exchanged."""
    for node, row in enumerate(transport.grid.shards):
        shard = row[transport.grid.local]
        window.local[node].copy_(pattern(window, shard, epoch, device=str(window.local.device)))


def finish(control: ControlBlock, transport: Transport) -> None:
    """Close both, as the engine does."""
    transport.close()
    control.close()


def own_shard(transport: Transport) -> int:
    """The global rank."""
    return transport.grid.shards[transport.grid.node][transport.grid.local]


def check_gather(transport: Transport, window: Window, epoch: int, device: str) -> None:
    """Gather into a buffer whose own row must stay as it is."""
    world_size, own = transport.control.topology.world_size, own_shard(transport)
    out = torch.full((world_size, window.spec.shape[1]), 255, dtype=torch.uint8).to(window.spec.dtype)
    out = out.to(device)
    transport.gather(window, out, epoch)
    for shard in range(world_size):
        expected = pattern(window, shard, epoch, device=device)
        if shard == own:
            expected = torch.full_like(expected, 255)
        assert torch.equal(out[shard], expected), (window.spec, shard, epoch, out[shard], expected)


def specs(num_nodes: int, entries: Sequence[tuple[int, torch.dtype]]) -> list[WindowSpec]:
    """Windows named by their position."""
    return [WindowSpec(f"window {i}", (num_nodes, n), dtype) for i, (n, dtype) in enumerate(entries)]


def plan_of(transport: Transport, *entries: tuple[int, torch.dtype]) -> WindowPlan:
    """A plan of windows with these elements a node and dtypes."""
    return WindowPlan.of(specs(transport.grid.num_nodes, entries))


@contextlib.contextmanager
def raises(kinds: type[Exception] | tuple[type[Exception], ...], text: str = "") -> Iterator[None]:
    """``pytest.raises`` without pytest, which ranks do not import."""
    message = None
    try:
        yield
    except kinds as error:
        message = str(error)
    assert message is not None, f"did not raise {kinds}"
    assert text in message, message


# -- what works ------------------------------------------------------------------------------------------


def _layout(rank: int, world: int, backend: Backend, token: str) -> None:
    control, transport = backend.make(rank, token)
    dtypes = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
    entries = [(n, dtype) for n in (0, 1, 7, 129) for dtype in dtypes]
    entries.append((0, torch.float64))
    windows = transport.allocate(plan_of(transport, *entries))
    assert [window.index for window in windows] == list(range(len(entries)))
    for window, (n, dtype) in zip(windows, entries, strict=True):
        assert window.local.shape == (transport.grid.num_nodes, n)
        assert window.local.dtype == dtype
        assert window.local.device.type == torch.device(backend.device).type
        assert not window.local.any()
        assert not n or window.local.data_ptr() % ALIGNMENT == 0
    for window in windows:
        fill(transport, window, 0)
    transport.signal_published(0)
    for window in windows:
        check_gather(transport, window, 0, backend.device)
    with raises(OdcError, "once"):
        transport.allocate(plan_of(transport, (4, torch.uint8)))
    finish(control, transport)


def windows_of_all_sizes(backend: Backend) -> None:
    """Empty, odd and large windows of all dtypes: aligned, zero-filled, gathered exactly."""
    values(launch(backend, _layout))


def _pull(rank: int, world: int, backend: Backend, token: str) -> None:
    control, transport = backend.make(rank, token)
    windows = transport.allocate(plan_of(transport, (101, torch.uint8), (64, torch.float32)))
    for window in windows:
        fill(transport, window, 0)
    transport.signal_published(0)
    for window in windows:
        for peer in transport.grid.visits():
            transport.wait_published(peer, 0)
            for node, row in enumerate(transport.grid.shards):
                for offset, count in ((0, 64), (1, 1), (63, 1), (17, 31), (64, 0)):
                    out = torch.zeros(count, dtype=window.spec.dtype, device=backend.device)
                    transport.pull(window, peer, node, out, offset)
                    expected = pattern(window, row[peer], 0, offset, count, backend.device)
                    assert torch.equal(out, expected), (window.spec, peer, node, offset, count)
        for offset, count in ((0, 64), (17, 31), (0, 64)):
            rows = torch.zeros(world, count, dtype=window.spec.dtype, device=backend.device)
            transport.read_all(window, rows, offset)
            for shard in range(world):
                expected = pattern(window, shard, 0, offset, count, backend.device)
                assert torch.equal(rows[shard], expected), (window.spec, shard, offset, count)
    for offset, count in ((0, 65), (63, 2), (63, 4), (64, 1), (65, 1)):
        with raises((RuntimeError, IndexError, ValueError)):
            transport.pull(windows[1], 0, 0, torch.zeros(count, device=backend.device), offset)
        with raises((RuntimeError, IndexError, ValueError)):
            transport.read_all(windows[1], torch.zeros(world, count, device=backend.device), offset)
    finish(control, transport)


def pull_from_any_offset(backend: Backend) -> None:
    """Parts of a row arrive exactly; what lies outside of the row is refused, not filled with something."""
    values(launch(backend, _pull))


def _scatter_add(rank: int, world: int, backend: Backend, token: str) -> None:
    control, transport = backend.make(rank, token)
    windows = transport.allocate(plan_of(transport, *((67, dtype) for dtype in backend.accumulators)))
    sources = (torch.bfloat16, torch.float32)
    rounds = 6
    transport.signal_published(0)
    for peer in range(transport.grid.node_size):
        transport.wait_published(peer, 0)  # flag B says that the accumulator is empty
    for number in range(rounds):
        for window in windows:
            rows = torch.stack([pattern(window, shard, rank + number) for shard in range(world)])
            rows = rows.to(backend.device, sources[number % 2])
            if number % 3 == 2:  # rows that are contiguous but do not touch, into the middle
                transport.scatter_add(window, rows[:, 5:40], 20)
            else:
                transport.scatter_add(window, rows)
    transport.barrier(Meeting.END_OF_STEP, 0)
    for window in windows:
        for node, row in enumerate(transport.grid.shards):
            shard = row[transport.grid.local]
            expected = torch.zeros(67, dtype=window.spec.dtype)
            for peer in transport.control.topology.peers:
                for number in range(rounds):
                    values_pushed = pattern(window, shard, peer + number)
                    if number % 3 == 2:
                        expected[20:55] += values_pushed[5:40]
                    else:
                        expected += values_pushed
            assert torch.equal(window.local[node].cpu(), expected), (window.spec, node)
    for offset, count in ((66, 2), (67, 1)):
        with raises((RuntimeError, IndexError, ValueError)):
            transport.push_add(windows[0], 0, 0, torch.ones(count, device=backend.device), offset)
    finish(control, transport)


def scatter_add_sums_exactly(backend: Backend) -> None:
    """bf16 and fp32 sources into fp32 and fp64, at offsets, from rows with gaps; all ranks at once."""
    values(launch(backend, _scatter_add))


def _one_hot_spot(rank: int, world: int, backend: Backend, token: str) -> None:
    control, transport = backend.make(rank, token)
    (window,) = transport.allocate(plan_of(transport, (257, torch.float32)))
    ones = torch.ones(257, device=backend.device)
    rounds = 400
    transport.barrier(Meeting.END_OF_STEP, 0)
    for _ in range(rounds):
        transport.push_add(window, 0, 0, ones)
    transport.barrier(Meeting.END_OF_STEP, 1)
    if transport.grid.local == 0:
        total = rounds * transport.grid.node_size
        assert torch.equal(window.local[0].cpu(), torch.full((257,), float(total))), window.local[0]
    finish(control, transport)


def no_update_is_lost(backend: Backend) -> None:
    """All ranks add to the same few elements as fast as they can."""
    values(launch(backend, _one_hot_spot))


def _epochs(
    rank: int, world: int, backend: Backend, token: str, epochs: int, delay: str, idle: tuple[int, ...]
) -> None:
    control, transport = backend.make(rank, token)
    dice = random.Random(rank)
    params, grads = transport.allocate(plan_of(transport, (513, torch.uint8), (65, torch.float32)))
    peers = control.topology.peers
    for epoch in range(epochs):
        if delay == "publisher" and rank == peers[epoch % len(peers)]:
            time.sleep(0.003)
        fill(transport, params, epoch)
        grads.local.zero_()
        transport.signal_published(epoch)
        if not (rank in idle and epoch % 4):
            for peer in transport.grid.visits():  # a push, too, may only follow its owner's flag
                transport.wait_published(peer, epoch)
            for _ in range(dice.randrange(3) if delay == "random" else 1):
                if delay == "random":
                    time.sleep(dice.random() * 0.004)
                check_gather(transport, params, epoch, backend.device)
            rows = torch.stack([pattern(grads, shard, epoch + rank) for shard in range(world)])
            transport.scatter_add(grads, rows.to(backend.device))
        transport.barrier(Meeting.END_OF_STEP, epoch)
        workers = [peer for peer in peers if not (peer in idle and epoch % 4)]
        for node, row in enumerate(transport.grid.shards):
            expected = torch.zeros(65)
            for worker in workers:
                expected += pattern(grads, row[transport.grid.local], epoch + worker)
            assert torch.equal(grads.local[node].cpu(), expected), (epoch, node)
    finish(control, transport)


def no_pull_sees_an_older_epoch(backend: Backend) -> None:
    """One publisher is late in every epoch; all others pull at once."""
    values(launch(backend, _epochs, 120, "publisher", ()))


def skewed_ranks(backend: Backend) -> None:
    """Ranks work for random times, and do random amounts of work."""
    values(launch(backend, _epochs, 40, "random", ()))


def rank_without_work(backend: Backend) -> None:
    """A rank that has no micro-batch for several epochs still serves the others."""
    values(launch(backend, _epochs, 30, "none", (backend.nodes[0][-1],)))


def _barrier(rank: int, world: int, backend: Backend, token: str) -> None:
    control, transport = backend.make(rank, token)
    dice = random.Random(rank)
    (window,) = transport.allocate(plan_of(transport, (1025, torch.float64)))
    ones = torch.ones(1025, dtype=torch.float64, device=backend.device)
    for step in range(60):
        for _ in range(3):
            if dice.random() < 0.1:
                time.sleep(dice.random() * 0.01)
            for peer in transport.grid.visits():
                transport.push_add(window, peer, 0, ones)
        transport.barrier(Meeting.END_OF_STEP, 2 * step)
        pushes = 3.0 * transport.grid.node_size
        assert torch.equal(window.local[0], torch.full_like(ones, pushes)), (step, window.local[0])
        window.local.zero_()
        transport.barrier(Meeting.END_OF_STEP, 2 * step + 1)
    finish(control, transport)


def barrier_shows_every_push(backend: Backend) -> None:
    """What was pushed before the barrier is all there after it."""
    values(launch(backend, _barrier))


def _two(rank: int, world: int, backend: Backend, token: str) -> None:
    pairs = [backend.make(rank, f"{token}-{number}") for number in range(2)]
    windows = [transport.allocate(plan_of(transport, (33, torch.float32))) for _, transport in pairs]
    for epoch in range(10):
        for number, (_, transport) in enumerate(pairs):
            fill(transport, windows[number][0], epoch + number)
            transport.signal_published(epoch)
        for number, (_, transport) in reversed(list(enumerate(pairs))):
            for peer in transport.grid.visits():
                transport.wait_published(peer, epoch)
                out = torch.empty(33, device=backend.device)
                transport.pull(windows[number][0], peer, 0, out)
                shard = transport.grid.shards[0][peer]
                expected = pattern(windows[number][0], shard, epoch + number, device=backend.device)
                assert torch.equal(out, expected)
        for _, transport in pairs:
            transport.barrier(Meeting.END_OF_STEP, epoch)
    finish(*pairs[0])
    pairs[1][1].barrier(Meeting.END_OF_STEP, 10)  # the other one lives on
    finish(*pairs[1])


def two_in_one_process(backend: Backend) -> None:
    """Two transports with their own control blocks do not see each other."""
    values(launch(backend, _two))


def traces() -> dict[str, Any]:
    """What this process holds of transports, and what is in the file system."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "mappings": [line for line in maps.splitlines() if "odc-" in line],
        "dev_shm": [name for name in os.listdir("/dev/shm") if "odc" in name],
    }


def _nothing_left(rank: int, world: int, backend: Backend, token: str) -> None:
    before = traces()
    for number in range(2):
        control, transport = backend.make(rank, f"{token}-{number}")
        windows = transport.allocate(
            plan_of(transport, (1000, torch.uint8), (0, torch.uint8), (50, torch.float32))
        )
        assert not traces()["dev_shm"]
        fill(transport, windows[0], 0)
        transport.signal_published(0)
        check_gather(transport, windows[0], 0, backend.device)
        rows = torch.ones(world, 50, device=backend.device)
        transport.scatter_add(windows[2], rows)
        finish(control, transport)
        del windows, transport, control
        after = traces()
        assert after == before, (number, before, after)


def nothing_is_left_after_close(backend: Backend) -> None:
    """No descriptor, mapping, socket or file stays behind."""
    values(launch(backend, _nothing_left))
    sockets = Path("/proc/net/unix").read_text().splitlines()
    assert not [line for line in sockets if f"@odc-{backend.name}" in line]


def _close(rank: int, world: int, backend: Backend, token: str) -> float:
    control, transport = backend.make(rank, token)
    (window,) = transport.allocate(plan_of(transport, (4097, torch.uint8)))
    fill(transport, window, 3)
    start = time.monotonic()
    transport.signal_published(3)
    if transport.grid.local != 0:
        for _ in range(10):
            check_gather(transport, window, 3, backend.device)
            time.sleep(0.05)
    del window
    finish(control, transport)
    return time.monotonic() - start


def close_waits_for_readers(backend: Backend) -> None:
    """A rank that closes first keeps its window until the others have read it."""
    seconds = values(launch(backend, _close))
    for ranks in backend.nodes:
        assert seconds[ranks[0]] > 0.3, seconds


def _stress(rank: int, world: int, backend: Backend, token: str, seed: int) -> StressResult:
    control, transport = backend.make(rank, token)
    result = run_stress(transport, Stress(seed=seed, epochs=12, operations=60))
    finish(control, transport)
    return result


def random_operations(backend: Backend) -> None:
    """Random pulls, pushes and delays, compared with a serial replay. Millions: ``odc selftest --soak``."""
    results = values(launch(backend, _stress, 7))
    assert sum(result.operations for result in results) > 600
    assert all(result.checked_sums > 0 for result in results)


ADDRESSING = (
    windows_of_all_sizes,
    pull_from_any_offset,
    scatter_add_sums_exactly,
    no_update_is_lost,
    random_operations,
)
SUCCESS = (
    *ADDRESSING,
    no_pull_sees_an_older_epoch,
    skewed_ranks,
    rank_without_work,
    barrier_shows_every_push,
    two_in_one_process,
    nothing_is_left_after_close,
    close_waits_for_readers,
)


# -- what fails ------------------------------------------------------------------------------------------

CULPRIT = 1


@dataclass(frozen=True)
class Report:
    """How a rank ended."""

    error_type: str
    message: str
    culprit: int | None
    seconds: float


def report_of(function: Callable[[], Any], *, control: ControlBlock | None = None) -> Report:
    """Run a function that must fail because of a peer; tells the others as the engine does."""
    start = time.monotonic()
    try:
        function()
    except OdcError as error:
        seconds = time.monotonic() - start
        if control is not None:
            control.fail(error)
        return Report(type(error).__name__, str(error), getattr(error, "rank", None), seconds)
    raise AssertionError("the rank went on as if nothing had happened")


def _fail_in(rank: int, world: int, backend: Backend, token: str, place: str, how: str) -> Report:
    control, transport = backend.make(rank, token)
    (window,) = transport.allocate(plan_of(transport, (65, torch.float32)))
    control.enter(Phase.FORWARD, step=7, micro_batch=3)
    transport.barrier(Meeting.END_OF_STEP, 0)
    if rank != CULPRIT:
        transport.signal_published(0)
        if how == "stop":
            wait_for_stop(control)

        def work() -> None:
            if place == "publish":
                out = torch.empty(world, 65, device=backend.device)
                transport.gather(window, out, 0)
            else:
                transport.barrier(Meeting.END_OF_STEP, 7)
                transport.barrier(Meeting.END_OF_STEP, 8)

        return report_of(work, control=control)
    time.sleep(0.3)
    control.enter(Phase.BACKWARD)
    if place == "after arriving":  # the peers get through this barrier, not through the next
        transport.barrier(Meeting.END_OF_STEP, 7)
    if how == "stop":
        stop_here()
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        os._exit(0)
    with control.phase(Phase.BACKWARD):
        raise ValueError("boom 42")
    raise AssertionError


def stop_here() -> None:
    """What the culprit does, after its last sign of life."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)


def wait_for_stop(control: ControlBlock) -> None:
    """Wait until the culprit has stopped; the short limit counts from here on, not while ranks come along."""
    pid = int(control._words[CULPRIT, Word.PID])
    deadline = time.monotonic() + 40.0
    while state(pid) != "T":
        assert time.monotonic() < deadline, "the culprit did not stop"
        time.sleep(0.01)
    control.timeout_s = LIMIT_S


def end_stopped(pids: list[int]) -> None:
    """Wait until every process has ended or is stopped, then kill the stopped ones."""
    deadline = time.monotonic() + 50.0
    while time.monotonic() < deadline:
        states = [state(pid) for pid in pids]
        if all(letter in "TZX" for letter in states):
            for pid, letter in zip(pids, states, strict=True):
                if letter == "T":
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.02)


def state(pid: int) -> str:
    """The letter that /proc has for a process; X when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "X"


def survivors(results: list[RankResult]) -> list[Report]:
    """Reports of all ranks but the culprit."""
    return values([result for result in results if result.rank != CULPRIT])


def _check_stopped(backend: Backend, place: str, operation: str) -> None:
    reports = survivors(launch(backend, _fail_in, place, "stop", during=end_stopped))
    check_deadline(reports)
    for report in reports:
        assert "step 7, micro-batch 3, backward" in report.message, report
        assert f"{LIMIT_S:g} s" in report.message, report
        assert operation in report.message, report


def check_deadline(reports: Sequence[Report]) -> None:
    """One of them waited for the limit, at least; the others may have been told by it."""
    waited = [report.seconds for report in reports if report.error_type == "DeadlineError"]
    assert waited, reports
    assert min(waited) > LIMIT_S, reports
    for report in reports:
        assert report.culprit == CULPRIT, report
        assert report.seconds < LIMIT_S + MARGIN_S, report
        assert "rank 1 (host testhost, pid " in report.message, report


def stopped_before_the_barrier(backend: Backend) -> None:
    """SIGSTOP: a deadline that names rank, host, operation and limit."""
    _check_stopped(backend, "barrier", "the end of step 7")


def stopped_before_publishing(backend: Backend) -> None:
    """The same at flag B."""
    _check_stopped(backend, "publish", "parameters of epoch 0")


def _check_gone(backend: Backend, place: str, how: str) -> None:
    for report in survivors(launch(backend, _fail_in, place, how)):
        assert report.error_type == "PeerError", report
        assert report.culprit == CULPRIT, report
        assert report.seconds < 0.3 + MARGIN_S, report
        assert "rank 1 (host testhost, pid " in report.message, report
        assert "step 7, micro-batch 3, backward" in report.message, report


def killed_before_the_barrier(backend: Backend) -> None:
    """SIGKILL: noticed long before the limit."""
    _check_gone(backend, "barrier", "kill")


def killed_before_publishing(backend: Backend) -> None:
    """The same at flag B."""
    _check_gone(backend, "publish", "kill")


def killed_after_arriving(backend: Backend) -> None:
    """A rank that dies behind a barrier is noticed at the next."""
    _check_gone(backend, "after arriving", "kill")


def exited_without_close(backend: Backend) -> None:
    """A rank that ends with exit code 0 in the middle is a failure for the others as well."""
    _check_gone(backend, "barrier", "exit")


def peer_raises(backend: Backend) -> None:
    """The others get the message of the rank that raised."""
    for place in ("barrier", "publish"):
        results = launch(backend, _fail_in, place, "raise")
        assert results[CULPRIT].error == "ValueError: boom 42"
        for report in survivors(results):
            assert report.error_type == "PeerError", report
            assert report.culprit == CULPRIT, report
            assert report.seconds < 0.3 + MARGIN_S, report
            assert "rank 1 (host testhost, pid " in report.message, report
            assert "step 7, micro-batch 3, backward: ValueError: boom 42" in report.message, report


class Pauses(threading.Thread):
    """Looks for how long this process is held up, whatever it does.

    Attributes:
        longest_s: the longest time, in seconds.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest_s = 0.0
        self.start()

    def run(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(0.01)
            now = time.monotonic()
            self.longest_s, last = max(self.longest_s, now - last), now


def _slow(rank: int, world: int, backend: Backend, token: str) -> tuple[list[float], str, float]:
    """Seconds of waiting for the culprit at its two places, the error, and the machine's longest pause."""
    pauses = Pauses()
    control, transport = backend.make(rank, token)
    transport.allocate(plan_of(transport, (65, torch.float32)))
    control.timeout_s = 1.0
    waited = []
    try:
        for phase in (Phase.PUBLISH, Phase.BACKWARD):
            if rank == CULPRIT:
                for micro_batch in range(8):
                    time.sleep(0.2)
                    control.enter(phase, micro_batch=micro_batch)
            start = time.monotonic()
            if phase == Phase.PUBLISH:
                transport.signal_published(0)
                for peer in transport.grid.visits():
                    transport.wait_published(peer, 0)
            else:
                transport.barrier(Meeting.END_OF_STEP, 0)
            waited.append(time.monotonic() - start)
        control.timeout_s = backend.timeout_s
        finish(control, transport)
    except OdcError as error:
        control.fail(error)
        return waited, str(error), pauses.longest_s
    return waited, "", pauses.longest_s


def slow_but_moving(backend: Backend) -> None:
    """A peer that takes longer than the limit, but shows that it moves, is waited for."""
    for _ in range(5):
        found = values(launch(backend, _slow))
        if max(pause for *_, pause in found) < 0.4:
            break  # else the machine itself has held up a rank about as long as the limit
    for rank, (waited, error, _) in enumerate(found):
        assert not error, found
        assert rank == CULPRIT or min(waited) > 1.0, found


def _programs(rank: int, world: int, backend: Backend, token: str) -> Report:
    control, transport = backend.make(rank, token)
    transport.allocate(plan_of(transport, (65, torch.float32)))
    if rank == CULPRIT:
        return report_of(transport.close, control=control)
    return report_of(lambda: transport.barrier(Meeting.END_OF_STEP, 4), control=control)


def different_programs(backend: Backend) -> None:
    """One rank is at the end of a step, another at close: both are told where each is."""
    for report in values(launch(backend, _programs)):
        if report.error_type == "PeerError":  # it heard of another's before it saw the tags itself
            assert "UsageError" in report.message, report
        else:
            assert report.error_type == "UsageError", report
        assert "rank 0 (host testhost, pid" in report.message, report
        assert "is at the end of step 4" in report.message, report
        assert "is at close()" in report.message, report


FAILURES = (
    stopped_before_the_barrier,
    stopped_before_publishing,
    killed_before_the_barrier,
    killed_before_publishing,
    killed_after_arriving,
    exited_without_close,
    peer_raises,
    slow_but_moving,
    different_programs,
)
