"""Signs of life and failures between nodes, through a store (a key-value server of torch.distributed)."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from odcengine.errors import PeerError
from odcengine.topology import Topology

_INTERVAL_S = 2.0
_LOOK_WHO_LEFT_S = 0.02


class Store(Protocol):
    """The part of torch.distributed's store that is used."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...
    def delete_key(self, key: str) -> bool: ...


class TimedStore:
    """A store whose calls end.

    A call of a store waits for its server in C++, and so for ever where that process is frozen or its host is
    cut off: no deadline of Python's own is looked at meanwhile. So calls run on a thread that may be left.

    Args:
        store: the store.
        timeout_s: longest time until it answers.
    """

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lost = False
        self._calls: _Calls = queue.SimpleQueue()
        threading.Thread(target=_answer, args=(store, self._calls), name="odc-store", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def set(self, key: str, value: str) -> None:
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        found: bytes = self._call("get", key)
        return found

    def check(self, keys: list[str]) -> bool:
        return bool(self._call("check", keys))

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete_key", key))

    def _call(self, name: str, *args: Any) -> Any:
        """Raises RuntimeError, as torch's stores do, where no answer comes in time; from then on at once."""
        outcome: list[Any] = []
        done = threading.Event()
        if not self._lost:
            self._calls.put((name, args, outcome, done))
            self._lost = not done.wait(self._timeout_s)
        if self._lost:
            raise RuntimeError(f"it has not answered for {self._timeout_s:g} s (odc.timeout_s)")
        value, error = outcome
        if error is not None:
            raise error
        return value


_Calls = queue.SimpleQueue[tuple[str, tuple[Any, ...], list[Any], threading.Event] | None]


def _answer(store: Store, calls: _Calls) -> None:
    """Do one call after the other until there is a None."""
    while (call := calls.get()) is not None:
        name, args, outcome, done = call
        try:
            outcome += (getattr(store, name)(*args), None)
        except Exception as error:
            outcome += (None, error)
        done.set()


class OtherNodes:
    """What this rank shows to the ranks of other nodes, and what it knows of them.

    Args:
        topology: ranks and nodes.
        store: reached by all ranks; served by rank 0.
        signs: returns, for each rank of this node, CLOCK_MONOTONIC (ns) of its own last progress and whether
            it waits. Only progress of its own, no sign that was passed on: that would go round between nodes.
        timeout_s: longest time without a sign of life; signs are exchanged several times as often.
    """

    def __init__(
        self,
        topology: Topology,
        store: Store,
        signs: Callable[[], Sequence[tuple[int, bool]]],
        timeout_s: float,
    ) -> None:
        self._topology = topology
        self._store = TimedStore(store, timeout_s)
        self._signs = signs
        self._seen: dict[int, tuple[int, int, bool]] = {}  # rank: progress, when it moved, waits
        self._interval_s = min(_INTERVAL_S, timeout_s / 6)
        self._next_exchange = 0.0
        self._next_look = 0
        self._num_left = 0
        self._next_count = 0.0
        self._drawn_from: int | None = None  # the minibatch that this rank has drawn from last

    def draw(self, serial: int) -> int:
        """The next number of minibatch ``serial`` that no rank of the job has drawn, from 0."""
        try:
            number = self._store.add(f"odc-draw-{serial}", 1) - 1
            before, self._drawn_from = self._drawn_from, serial
            if number == 0 and before not in (None, serial):
                self._store.delete_key(f"odc-draw-{before}")  # a barrier lies between: nobody draws from it
        except RuntimeError as error:
            raise PeerError(
                f"the store between the nodes does not answer ({error}); is rank 0 gone?"
            ) from error
        return number

    def say_left(self) -> None:
        """This rank asks the store no more. Never raises."""
        with contextlib.suppress(RuntimeError):
            self._store.add("left", 1)

    def all_left(self) -> bool:
        """Whether all ranks but the one that serves the store have said so; looked up now and then."""
        if time.monotonic() >= self._next_count:
            self._next_count = time.monotonic() + _LOOK_WHO_LEFT_S
            with self._store_errors():
                self._num_left = self._store.add("left", 0)
        return self._num_left >= self._topology.world_size - 1

    def exchange(self, *, now: bool = False) -> None:
        """Show this node's progress and look for failures of others; only now and then unless ``now``.

        Raises:
            PeerError: a rank of another node failed, or the store does not answer.
        """
        if not now and time.monotonic() <= self._next_exchange:
            return
        self._next_exchange = time.monotonic() + self._interval_s
        record = None
        with self._store_errors():
            self._store.set(f"alive/{self._topology.node}", json.dumps(self._signs()))
            for key in ("abort/secondary", "abort/primary"):
                if self._store.check([key]):
                    record = json.loads(self._store.get(key))
        if record is not None and record["rank"] != self._topology.rank:
            raise PeerError(record["message"], record["rank"])

    def tell_failure(self, message: str, rank: int | None, *, secondary: bool) -> None:
        """Tell all nodes that ``rank`` is to blame for this rank's end. Never raises."""
        key = "abort/secondary" if secondary else "abort/primary"
        with contextlib.suppress(Exception):  # the store's host may be the one that died
            self._store.set(key, json.dumps({"message": message, "rank": rank}))

    def signs_of_life(self, limit_s: float) -> dict[int, tuple[int, bool]]:
        """For each rank of other nodes when it was last seen to make progress, and whether it waits.

        Times are CLOCK_MONOTONIC of this machine in ns. Looked up seldom: all nodes ask rank 0's store.

        Raises:
            PeerError: the store does not answer.
        """
        now = time.monotonic_ns()
        if now >= self._next_look:
            self._next_look = now + int(max(self._interval_s, limit_s / 20) * 1e9)
            for node, ranks in enumerate(self._topology.nodes):
                if node != self._topology.node:
                    self._look_at(node, ranks, now)
        return {rank: (when, waits) for rank, (_, when, waits) in self._seen.items()}

    def _look_at(self, node: int, ranks: Sequence[int], now: int) -> None:
        key = f"alive/{node}"
        with self._store_errors():
            text = self._store.get(key) if self._store.check([key]) else b"[]"
        for rank, (progress, waits) in zip(ranks, json.loads(text), strict=False):
            seen = self._seen.get(rank)
            when = now if seen is None or seen[0] != progress else seen[1]
            self._seen[rank] = (progress, when, waits)

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Blame rank 0, whose process serves the store, where the store does not answer."""
        try:
            yield
        except RuntimeError as error:
            me, server = self._topology.describe(self._topology.rank), self._topology.describe(0)
            raise PeerError(f"{me} lost the store of {server}: {error}", 0) from error
