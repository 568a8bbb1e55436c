"""The control block between nodes: two nodes of one host that know each other through a TCPStore only."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import RankResult, run_ranks, values
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]
from transport.conformance import MARGIN_S, Report, end_stopped, report_of, state

from odcengine._between_nodes import OtherNodes
from odcengine._slots import Slots
from odcengine._words import Word
from odcengine.control import ControlBlock, Meeting, Phase
from odcengine.errors import PeerError
from odcengine.topology import Topology

Nodes = tuple[tuple[int, ...], ...]
TWO_BY_TWO: Nodes = ((0, 1), (2, 3))
TWO_BY_ONE: Nodes = ((0,), (1,))
THREE_BY_ONE: Nodes = ((0,), (1,), (2,))
LIMIT_S = 1.5  # of deadlines between nodes, which look at each other that much more often
SLOW_LIMIT_S = 4.0  # where ranks must not run into it
LONG_LIMIT_S = 60.0
LOOK_S = 2.0  # until a node has looked at the others, with the long limit


class Place:
    """A rank with its control block, and gloo for collectives over all ranks."""

    def __init__(self, rank: int, nodes: Nodes, token: str, timeout_s: float = LONG_LIMIT_S) -> None:
        world = sum(map(len, nodes))
        hosts = tuple(f"host{node}" for r in range(world) for node, ranks in enumerate(nodes) if r in ranks)
        self.topology = Topology(rank, hosts, hosts, nodes)
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout = datetime.timedelta(seconds=60)
        self.store = TCPStore(address, port, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
        dist.init_process_group("gloo", store=PrefixStore("gloo", self.store), rank=rank, world_size=world)
        self.control = ControlBlock(
            self.topology,
            token=f"{token}-{self.topology.node}",
            timeout_s=timeout_s,
            startup_timeout_s=60.0,
            store=self.store,
        )
        dist.barrier()  # all are there

    def leave(self, others: int) -> None:
        """End when ``others`` ranks have called this: rank 0 serves the store that they still ask."""
        with contextlib.suppress(RuntimeError):  # rank 0 has gone already, as it should not have
            self.store.add("leaving", self.topology.rank > 0)
            deadline = time.monotonic() + 60
            while self.topology.rank == 0 and self.store.add("leaving", 0) < others:
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def meet_all(self) -> float:
        """A collective over all ranks, as at the boundary of a minibatch."""
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        return self.control.wait_work(work, "the agreement on norm and counts")

    def barrier_and_meet(self) -> None:
        """The boundary: the node's barrier, then all ranks."""
        self.control.barrier(Meeting.END_OF_STEP, 7)
        self.control.enter(Phase.AGREE)
        self.meet_all()


def launch(function: Callable[..., Any], nodes: Nodes, *args: Any, **options: Any) -> list[RankResult]:
    return run_ranks(function, sum(map(len, nodes)), nodes, secrets.token_hex(8), *args, **options)


def _fails(rank: int, world: int, nodes: Nodes, token: str, culprit: int, how: str, limit_s: float) -> Report:
    place = Place(rank, nodes, token, limit_s)
    control = place.control
    control.enter(Phase.FORWARD, step=7, micro_batch=3)
    if rank == culprit:
        place.store.set("pid", str(os.getpid()))
        time.sleep(0.5)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1000)
        with control.phase(Phase.BACKWARD):
            raise ValueError("boom 42")
    elif how == "stop":
        control.timeout_s = LONG_LIMIT_S  # until it has stopped: all must come along
        pid = int(place.store.get("pid"))
        while state(pid) != "T":
            time.sleep(0.01)
        control.timeout_s = limit_s
    report = report_of(place.barrier_and_meet, control=control)
    place.leave(others=world - 2)
    return report


def test_exception_on_one_node_is_seen_on_the_other() -> None:
    culprit = 3
    results = launch(_fails, TWO_BY_TWO, culprit, "raise", LONG_LIMIT_S)
    assert results[culprit].error == "ValueError: boom 42"
    for report in values([result for result in results if result.rank != culprit]):
        assert report.error_type == "PeerError", report
        assert report.culprit == culprit, report
        assert f"rank {culprit} (host host1, pid " in report.message, report
        assert "step 7, micro-batch 3, backward: ValueError: boom 42" in report.message, report
        assert report.seconds < 0.5 + LOOK_S + MARGIN_S, report


def test_killed_rank_of_another_node_is_named() -> None:
    """Its node sees it die and tells the others through the store."""
    results = launch(_fails, TWO_BY_TWO, 3, "kill", LONG_LIMIT_S)
    for report in values(results[:3]):
        assert report.error_type == "PeerError", report
        assert report.culprit == 3, report
        assert "rank 3 (host host1, pid " in report.message, report
        assert report.seconds < 0.5 + LOOK_S + MARGIN_S, report


def test_killed_rank_that_is_alone_on_its_node_is_noticed() -> None:
    """Nobody sees it die; the collective fails, or at the latest the limit passes."""
    report = values(launch(_fails, TWO_BY_ONE, 1, "kill", LIMIT_S)[:1])[0]
    assert report.error_type in ("PeerError", "DeadlineError"), report
    assert "the agreement on norm and counts" in report.message, report
    assert report.seconds < 0.5 + LIMIT_S + LOOK_S + MARGIN_S, report


@pytest.mark.parametrize("nodes", [TWO_BY_TWO, THREE_BY_ONE], ids=["2x2", "3x1"])
def test_stopped_rank_of_another_node_is_named(nodes: Nodes) -> None:
    """Within its node or between nodes: those that wait for it are not blamed."""
    culprit = nodes[-1][-1]
    results = launch(_fails, nodes, culprit, "stop", LIMIT_S, during=end_stopped)
    reports = values([result for result in results if result.rank != culprit])
    for report in reports:
        assert report.culprit == culprit, report
        assert f"rank {culprit} (host host" in report.message, report
        assert report.seconds < LIMIT_S + 0.5 + MARGIN_S, report
    check_limit(reports)


def check_limit(reports: list[Report]) -> None:
    """Somebody waited for the limit; the others may have been told by it, and have come later."""
    waited = [report.seconds for report in reports if report.error_type == "DeadlineError"]
    assert waited, reports
    assert min(waited) > LIMIT_S - 0.1, reports


def _slow(rank: int, world: int, nodes: Nodes, token: str) -> float:
    place = Place(rank, nodes, token, timeout_s=SLOW_LIMIT_S)
    place.store.add("waiting", 1)
    end = math.inf
    while rank == world - 1 and time.monotonic() < end:
        if end == math.inf and place.store.add("waiting", 0) == world:
            end = time.monotonic() + 1.3 * SLOW_LIMIT_S
        time.sleep(0.2)
        place.control.enter(Phase.BACKWARD)
    waited = place.control.barrier(Meeting.END_OF_STEP, 0)
    waited += place.meet_all()
    dist.barrier()
    place.control.close()
    return waited


@pytest.mark.parametrize("nodes", [TWO_BY_TWO, THREE_BY_ONE], ids=["2x2", "3x1"])
def test_progress_on_another_node_counts_as_sign_of_life(nodes: Nodes) -> None:
    """All others wait for longer than the limit for one rank that moves."""
    waited = values(launch(_slow, nodes))
    assert all(seconds > SLOW_LIMIT_S for seconds in waited[:-1]), waited


def _circle(rank: int, world: int, nodes: Nodes, token: str) -> Report:
    """A collective that never ends although all ranks are in it, as when the network between nodes hangs."""
    place = Place(rank, nodes, token, timeout_s=LIMIT_S)

    class Hanging:
        def is_completed(self) -> bool:
            return False

        def wait(self) -> bool:
            return True

    report = report_of(lambda: place.control.wait_work(Hanging(), "a collective"), control=place.control)
    place.leave(others=world - 1)
    return report


def test_hanging_collective_ends() -> None:
    """Ranks that wait for each other must not pass for moving, within a node or between nodes."""
    reports = values(launch(_circle, TWO_BY_TWO))
    for report in reports:
        assert report.seconds < LIMIT_S + 0.5 + MARGIN_S, report
        assert "a collective" in report.message, report
    check_limit(reports)


def _store_dies(rank: int, world: int, nodes: Nodes, token: str, folder: str) -> Report | None:
    place = Place(rank, nodes, token)
    if rank == 0:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    report = report_of(lambda: place.control.wait_epoch(1 - place.topology.local_rank, 5))
    if rank > 1:  # the other rank of this node is to find the store gone by itself
        Path(folder, f"told{rank}").touch()
        while len(list(Path(folder).glob("told*"))) < 2:
            time.sleep(0.01)
    return report


def test_lost_store_blames_the_rank_that_served_it(tmp_path: Path) -> None:
    """No raw error of torch, which would make each rank the first to fail."""
    results = launch(_store_dies, TWO_BY_TWO, str(tmp_path))
    for report in values(results[1:]):
        assert report.error_type == "PeerError", report
        assert report.culprit == 0, report
        assert report.seconds < 0.3 + LOOK_S + MARGIN_S, report


def _store_freezes(rank: int, world: int, nodes: Nodes, token: str, folder: str) -> Report | None:
    """The server's process is stopped, or its host is cut off: connections stay, and nothing answers."""
    place = Place(rank, nodes, token, LIMIT_S)
    if rank == 0:
        Path(folder, "pid.new").write_text(str(os.getpid()))
        Path(folder, "pid.new").rename(Path(folder, "pid"))
        os.kill(os.getpid(), signal.SIGSTOP)
    while not Path(folder, "pid").exists() or state(int(Path(folder, "pid").read_text())) != "T":
        time.sleep(0.01)
    return report_of(
        lambda: place.control.wait_epoch(1 - place.topology.local_rank, 5), control=place.control
    )


def test_store_that_does_not_answer_blames_the_rank_that_serves_it(tmp_path: Path) -> None:
    """No call into it may wait for ever, on the other nodes or on the server's own."""
    results = launch(_store_freezes, TWO_BY_TWO, str(tmp_path), during=end_stopped, timeout_s=60)
    for report in values(results[1:]):
        assert report.error_type in ("PeerError", "DeadlineError"), report
        assert report.culprit == 0, report
        assert report.seconds < 2 * LIMIT_S + LOOK_S + MARGIN_S, report


def test_calls_of_a_store_that_does_not_answer_end() -> None:
    asked = threading.Event()

    class Frozen(HashStore):
        def set(self, key: str, value: str) -> None:  # type: ignore[override]
            asked.wait(30)

    node = OtherNodes(Topology(1, ("a", "b"), ("a", "b"), TWO_BY_ONE), Frozen(), lambda: [(0, False)], 0.2)
    start = time.monotonic()
    with pytest.raises(PeerError, match=r"lost the store of rank 0 .*not answered for 0.2 s"):
        node.exchange(now=True)
    node.tell_failure("boom", 1, secondary=False)  # at once, and never raises
    node.say_left()
    assert 0.2 <= time.monotonic() - start < 0.2 + MARGIN_S
    asked.set()


def test_numbers_drawn_leave_one_key_in_the_store() -> None:
    """Keys of minibatches that are over go; two nodes that take turns get each number once."""
    store = HashStore()
    hosts = ("host0", "host1")
    nodes = [
        OtherNodes(Topology(rank, hosts, hosts, TWO_BY_ONE), store, lambda: [(0, False)], LIMIT_S)
        for rank in range(2)
    ]
    for serial in range(1, 40):
        drawn = [nodes[(serial + turn) % 2].draw(serial) for turn in range(5)]
        assert drawn == list(range(5))
    assert store.num_keys() == 1


def _draw_or_look(rank: int, world: int, nodes: Nodes, token: str) -> tuple[list[int], list[int]]:
    """The first rank of each node draws all there is, of two minibatches; the others look on."""
    place, total, drawn, seen = Place(rank, nodes, token), 20, list[int](), list[int]()
    for serial in (1, 2):
        seen.append(place.control.num_drawn(serial))
        place.control.barrier(Meeting.END_OF_STEP, serial)
        if rank == place.topology.peers[0]:
            while (number := place.control.draw(serial)) < total:
                drawn.append(number)
        deadline = time.monotonic() + 30
        while place.control.num_drawn(serial) < total:
            assert time.monotonic() < deadline, place.control.num_drawn(serial)
        place.barrier_and_meet()  # who draws from the next minibatch forgets this one for all nodes
        seen.append(place.control.num_drawn(serial))
    place.leave(others=world - 1)
    return drawn, seen


@pytest.mark.parametrize("nodes", [TWO_BY_TWO, ((0, 1),)])
def test_ranks_know_what_was_drawn_by_others_of_their_node(nodes: Nodes) -> None:
    results = values(launch(_draw_or_look, nodes))
    numbers = [number for drawn, _ in results for number in drawn]
    assert sorted(numbers) == sorted([*range(20), *range(20)])
    for _, seen in results:
        assert seen[0] == seen[2] == 0
        assert 20 < seen[1] <= 20 + len(nodes)  # each node has drawn one too many
        assert 20 < seen[3] <= 20 + len(nodes)


def test_nobody_sees_the_count_of_an_older_minibatch() -> None:
    """What is seen without the lock after each store, whether ranks draw here or from the store."""

    class Row(dict[int, int]):
        def __setitem__(self, word: int, value: int) -> None:
            super().__setitem__(word, value)
            seen.append(slots.num_drawn(serial))

    slots = Slots.__new__(Slots)
    row = Row({Word.DRAWN_FROM: 0, Word.DRAWN: 0})
    slots.words, slots.locked = [row], lambda *_: contextlib.nullcontext()  # type: ignore
    seen: list[int] = []
    for serial in (1, 2):
        for number in range(3):
            assert slots.draw(serial, LIMIT_S) == number
    assert seen == [0, 0, 1, 2, 3] * 2
    seen.clear()
    for serial in (3, 4):
        for count in (2, 1, 5):
            slots.note_drawn(serial, count, LIMIT_S)
    assert seen == [0, 2, 5, 5] * 2


def _late_to_close(rank: int, world: int, nodes: Nodes, token: str) -> tuple[float, float]:
    """When a rank began to leave, and when it had left; ranks of one host share the clock."""
    place = Place(rank, nodes, token, LONG_LIMIT_S)
    for _ in range(4 if rank else 0):
        time.sleep(0.2)
        place.control.beat()  # asks the store, which rank 0 serves
    begun = time.monotonic()
    place.control.part_from_nodes()
    left = time.monotonic()
    place.control.beat()
    place.control.close()
    return begun, left


def test_rank_that_serves_the_store_leaves_last() -> None:
    first, *others = values(launch(_late_to_close, THREE_BY_ONE))
    assert first[1] > max(begun for begun, _ in others), (first, others)
