"""The control block: what every rank is doing, in memory that its peers can read at any time.

One block a node, in shared memory; between nodes the same facts travel through a store (a key-value server
of torch.distributed). Transports, engine and watchdog use this one block: it carries sign of life, step,
micro-batch and phase of each rank, the epoch flag B, the node's barrier, and the abort code. Every wait of
odcengine goes through :meth:`ControlBlock.wait_until`, which ends when what is awaited happens, when a rank
fails or dies, or when an awaited rank shows no sign of life for longer than the limit.

Memory order: words are aligned 8-byte stores; a reader that must also see what the writer wrote *before*
takes and drops the writer's lock after it saw the word (see ``docs/protocol.md``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol

import numpy as np

from odcengine._between_nodes import OtherNodes, Store
from odcengine._hang import DEADLINE_EXIT_CODE, RankState, StackFile, ask_for_stack, report
from odcengine._memory import FileLocks, create_memory, map_memory, share_descriptors
from odcengine._words import MEETING_RANGE, Meeting, Phase, Word, explain_tag, make_tag
from odcengine.errors import DeadlineError, PeerError, UsageError
from odcengine.topology import Topology

__all__ = ["ControlBlock", "EventRecorder", "Meeting", "Phase", "Store", "Work"]

logger = logging.getLogger(__name__)

_MESSAGE_BYTES = 4096
_FIRST_NAP_S, _LONGEST_NAP_S = 2e-5, 5e-4
_PEER_CHECK_S, _LOOK_FOR_CAUSE_S = 0.05, 6.0
_GIVE_UP_S = 1.0  # then a failure is told or read without the lock of its slot
_ON_ITS_WAY_S = 1.0  # that bytes of a rank that has failed since may take between two sockets
_STOPPED_S = 1.0  # a waiting rank that has not looked around for so long is not waiting but stopped
_SUSPENDED_S = 1.0  # a nap that took so long was none: the whole job may have been stopped for a while
_WORDS_PER_SLOT = 32
_ACTIVE, _LEFT = 1, 2
_PRIMARY, _SECONDARY = 1, 2
_ALIVE_LOCK, _SLOT_LOCK, _FIRST_USER_LOCK = 0, 1, 2  # each times the group's size, plus the local index


def _within(seconds: float, ready: Callable[[], bool]) -> bool:
    """Whether ``ready`` is true at some time in the next seconds."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(_LONGEST_NAP_S)
    return True


class Work(Protocol):
    """The part of an asynchronous collective that waiting needs."""

    def is_completed(self) -> bool: ...
    def wait(self) -> bool: ...


class EventRecorder(Protocol):
    """Takes down what this rank did; see ``odcengine.monitor``."""

    def add(self, kind: str, start: float, end: float, group: int = -1) -> None: ...


class ControlBlock:
    """This rank's view of the control block of its node. Creating one is collective.

    Attributes:
        recorder: gets every phase and every wait while it is set.
        failure_listeners: called when this rank has told the others that it stops.

    Args:
        topology: ranks and nodes; the block covers the ranks of this rank's node.
        token: unguessable text, equal on the ranks of the node and new for every block.
        timeout_s: longest time in seconds without any sign of life of an awaited rank (``odc.timeout_s``).
        startup_timeout_s: deadline in seconds for the ranks to find each other.
        store: key-value store between nodes; needed with more than one node.
        error_file: where to write one JSON record if this rank fails (for the launcher), or None.

    Raises:
        DeadlineError: a rank of the node did not come in time.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        token: str,
        timeout_s: float,
        startup_timeout_s: float,
        store: Store | None = None,
        error_file: str | None = None,
    ) -> None:
        self.topology = topology
        self.timeout_s = timeout_s
        self.recorder: EventRecorder | None = None
        self.failure_listeners: list[Callable[[], None]] = []
        self.startup_timeout_s = startup_timeout_s
        self._token = token
        self._num_exchanges = 0
        self._error_file = error_file
        self._size = len(topology.peers)
        self._me = topology.local_rank
        words_nbytes = self._size * _WORDS_PER_SLOT * 8
        fds = None
        if self._me == 0:
            fds = [create_memory("odc-control", words_nbytes + self._size * _MESSAGE_BYTES)]
        (self._fd,) = self.share(fds)
        self._map: mmap.mmap = map_memory(self._fd)
        self._locks = FileLocks(self._fd)
        shape = (self._size, _WORDS_PER_SLOT)
        self._words = np.ndarray(shape, dtype=np.int64, buffer=self._map)
        self._mine = self._words[self._me]
        self._messages = np.ndarray(
            (self._size, _MESSAGE_BYTES), dtype=np.uint8, buffer=self._map, offset=words_nbytes
        )
        self._pid = os.getpid()
        self._barriers = 0
        self._ended: tuple[int, int] | None = None  # see end_micro_batches
        self._other_nodes: OtherNodes | None = None
        if store is not None and topology.num_nodes > 1:
            self._other_nodes = OtherNodes(topology, store, self._signs, timeout_s)
        self._excepthooks: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self.closed = False
        if not self._locks.try_acquire(self._offset(_ALIVE_LOCK, self._me)):
            raise UsageError(f"{self.describe(self._me)}: two processes run as the same local rank")
        self._mine[Word.PID] = os.getpid()
        self._stacks = StackFile(self._stack_path(topology.rank))
        self._mine[Word.DUMPS] = self._stacks.active
        self.beat()
        self._mine[Word.STATE] = _ACTIVE
        self.wait_until(
            lambda: bool((self._words[:, Word.STATE] != 0).all()),
            "start of the control block",
            lambda: np.flatnonzero(self._words[:, Word.STATE] == 0).tolist(),
            timeout_s=startup_timeout_s,
        )

    # -- what this rank says ---------------------------------------------------------------------------

    def beat(self) -> None:
        """Give a sign of life; called wherever this rank makes progress."""
        self._mine[Word.ALIVE_NS] = self._mine[Word.PROGRESS_NS] = time.monotonic_ns()
        self._hear_other_nodes()

    def enter(self, phase: Phase, *, step: int | None = None, micro_batch: int | None = None) -> None:
        """Say what this rank does from now on; a sign of life.

        Args:
            phase: the phase.
            step: optimizer step, from 0; None keeps the last one.
            micro_batch: index of the micro-batch in this rank's minibatch, from 0; None keeps the last one.
        """
        self._mine[Word.PHASE] = phase
        if step is not None:
            self._mine[Word.STEP] = step
        if micro_batch is not None:
            self._mine[Word.MICRO_BATCH] = micro_batch
        self.beat()

    def _signs(self) -> list[tuple[int, bool]]:
        return [(int(words[Word.PROGRESS_NS]), self._is_waiting(i)) for i, words in enumerate(self._words)]

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Be in ``phase`` inside the block, then in the one before; a failure inside tells all ranks."""
        before, start = int(self._mine[Word.PHASE]), time.perf_counter()
        self.enter(phase)
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise
        self.enter(Phase(before))
        if self.recorder is not None:
            self.recorder.add(phase.name.lower(), start, time.perf_counter())

    # -- failures --------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one stops because of ``error``; the first call counts.

        Also writes the launcher's error record. Never raises.
        """
        if self.closed or not self.is_owner or self._mine[Word.ABORT]:
            return
        secondary = isinstance(error, PeerError)
        culprit = error.rank if isinstance(error, PeerError) else self.topology.rank
        cause = f"{type(error).__name__}: {error}"
        place = f"{self.describe(self._me)} failed in {self._where(self._me)}"
        message = str(error) if secondary else f"{place}: {cause}"
        encoded = message.encode(errors="replace")[: _MESSAGE_BYTES - 1]
        with self._slot_lock(self._me, give_up_s=_GIVE_UP_S):
            self._messages[self._me, : len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)
            self._messages[self._me, len(encoded)] = 0
            self._mine[Word.CULPRIT] = 0 if culprit is None else culprit + 1
            self._mine[Word.ABORT] = _SECONDARY if secondary else _PRIMARY
        for listener in self.failure_listeners:
            listener()
        if self._other_nodes is not None:
            self._other_nodes.tell_failure(message, culprit, secondary=secondary)
        self._write_error_record(error, secondary)

    def record_end(self, error: BaseException) -> None:
        """Write the launcher's error record and nothing else: a signal handler may call it.

        Args:
            error: why this process ends now.
        """
        if not self.closed and self.is_owner and not self._mine[Word.ABORT]:
            self._write_error_record(error, secondary=False)

    @property
    def is_owner(self) -> bool:
        """False in a process that the rank has forked: it shares the memory, but must not speak for it."""
        return os.getpid() == self._pid

    @property
    def failed(self) -> bool:
        """Whether this rank has told the others that it stops."""
        return not self.closed and bool(self._mine[Word.ABORT])

    def check(self) -> None:
        """Raise if a rank of this node has failed, or, looked up now and then, one of another node.

        Raises:
            PeerError: names the rank, its host, the step and the cause.
        """
        if self._words[:, Word.ABORT].any():
            self._raise_abort()
        if self._ended is not None:
            self._check_nobody_has_more(*self._ended)
        self._hear_other_nodes()

    def _hear_other_nodes(self, *, now: bool = False) -> None:
        if self._other_nodes is None:
            return
        try:
            self._other_nodes.exchange(now=now)
        except PeerError as error:
            if error.rank in self.topology.peers and error.rank != self.topology.rank:
                self._tell_places([error.rank])  # another node has given up one of this node's ranks
            raise

    def _raise_abort(self) -> None:
        codes = self._words[:, Word.ABORT]
        index = int(np.argmax(codes == _PRIMARY)) if (codes == _PRIMARY).any() else int(codes.argmax())
        if index == self._me:
            raise UsageError(
                f"{self.describe(self._me)} goes on after a failure in this job; "
                f"the engine cannot: {self._message(index)}"
            )
        with self._slot_lock(index, give_up_s=_GIVE_UP_S):
            message, culprit = self._message(index), int(self._words[index, Word.CULPRIT]) - 1
        raise PeerError(message, culprit if culprit >= 0 else None)

    def _check_failures(self) -> None:
        self.check()
        self._check_peers_live()

    def _check_peers_live(self) -> None:
        for index in range(self._size):
            if index == self._me or self._words[index, Word.STATE] != _ACTIVE:
                continue
            if self._locks.holder(self._offset(_ALIVE_LOCK, index)) is not None:
                continue
            self.check()  # it may have said why
            if self._words[index, Word.STATE] == _LEFT:
                continue
            raise PeerError(
                f"{self.describe(index)} died or left without close() in {self._where(index)}",
                self.topology.peers[index],
            )

    def _message(self, index: int) -> str:
        raw: bytes = self._messages[index].tobytes()
        return raw[: raw.index(0)].decode(errors="replace")

    def _write_error_record(self, error: BaseException, secondary: bool) -> None:
        if self._error_file is None:
            return
        # Who notices that a rank is silent is the first to fail: there is nobody else to tell the cause.
        secondary = secondary and not isinstance(error, DeadlineError)
        told = f"\n{error.report}" if isinstance(error, DeadlineError) and error.report else ""
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        record = {
            "rank": self.topology.rank,
            "host": self.topology.hosts[self.topology.rank],
            "pid": os.getpid(),
            "time": time.time(),
            "type": type(error).__name__,
            "message": f"{error}{told}",
            "secondary": secondary,
            "step": int(self._mine[Word.STEP]),
            "traceback": trace,
        }
        temporary = f"{self._error_file}.{os.getpid()}"
        with contextlib.suppress(OSError):
            Path(temporary).write_text(json.dumps(record), encoding="utf-8")
            os.replace(temporary, self._error_file)

    def install_excepthook(self) -> None:
        """Tell all ranks about an exception that ends this process outside of the engine's own calls."""
        before, block = sys.excepthook, weakref.ref(self)

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            alive = block()
            if alive is not None:
                alive.fail(error)
            before(kind, error, trace)
            if isinstance(error, DeadlineError):
                raise SystemExit(DEADLINE_EXIT_CODE)  # in an exception hook it sets the exit code

        self._excepthooks = (before, hook)
        sys.excepthook = hook

    def end_micro_batches(self, step: int, count: int) -> None:
        """Say that this rank has run all ``count`` micro-batches of its share of minibatch ``step``.

        Until the next barrier has passed, :meth:`check` raises where another rank of the node runs more: it
        would wait for a collective that this rank never enters.
        """
        with self._slot_lock(self._me):
            self._mine[Word.ENDED_COUNT] = count
            self._mine[Word.ENDED_STEP] = step + 1
        self._ended = (step, count)

    def check_equal_counts(self, step: int, count: int) -> None:
        """Raise where a rank of the node ended minibatch ``step`` with fewer than ``count`` micro-batches.

        Raises:
            UsageError: names both ranks and counts.
        """
        ended = (self._words[:, Word.ENDED_STEP] == step + 1) & (self._words[:, Word.ENDED_COUNT] < count)
        if ended.any():
            fewer = int(ended.argmax())
            self._raise_unequal(step, self._me, count, fewer, int(self._words[fewer, Word.ENDED_COUNT]))

    def _check_nobody_has_more(self, step: int, count: int) -> None:
        more = self._running_more(step, count)
        if more is not None:
            self._synchronize_with((more,))  # words of one moment: what was read before is not read again
            if self._running_more(step, count) == more:
                at_least = int(self._words[more, Word.MICRO_BATCH]) + 1
                self._raise_unequal(step, more, at_least, self._me, count)

    def _running_more(self, step: int, count: int) -> int | None:
        # In the opposite order of writing: a rank moves its micro-batch on before it enters the next one.
        beyond = (self._words[:, Word.STEP] == step) & (self._words[:, Word.MICRO_BATCH] >= count)
        beyond &= np.isin(self._words[:, Word.PHASE], (Phase.FORWARD, Phase.BACKWARD))
        return int(beyond.argmax()) if beyond.any() else None

    def _raise_unequal(self, step: int, more: int, at_least: int, fewer: int, count: int) -> None:
        raise UsageError(
            f"{self.describe(more)} has at least {at_least} micro-batches in step {step}, "
            f"{self.describe(fewer)} only {count}. odc.transport: collective and odc.lockstep need the same "
            "number on every rank (balance.strategy: lb_micro or local_sort); the on-demand transports do not"
        )

    # -- waiting ---------------------------------------------------------------------------------------

    def wait_until(
        self,
        ready: Callable[[], bool],
        what: str,
        awaited: Callable[[], Sequence[int]],
        *,
        everyone: bool = False,
        elsewhere: Callable[[], Sequence[int]] | None = None,
        timeout_s: float | None = None,
        idle: bool = True,
        late_s: float = 0.0,
    ) -> float:
        """Wait for ``ready`` with an eye on failures, deaths and deadlines.

        An awaited rank is alive while it makes progress, or while a rank that *it* waits for does; time spent
        waiting for slow but moving ranks never counts against the limit. A failure that follows what is
        awaited does not count either: the next wait finds it.

        Args:
            ready: returns True when the wait is over; called often, and not again after that.
            what: what is awaited, for messages.
            awaited: returns the local indices that have not arrived yet; called now and then.
            everyone: all ranks of the job are awaited and nobody can tell who has arrived; then the limit
                counts from the last progress of any rank.
            elsewhere: returns the global ranks of other nodes that have not arrived yet; called now and then.
            timeout_s: limit in seconds without a sign of life; the block's own by default.
            idle: this is time lost by waiting, and recorded as such; not while data is on its way.
            late_s: seconds in which what a rank sent before it failed may still arrive.

        Returns:
            Seconds spent.

        Raises:
            PeerError: another rank failed, died or left.
            DeadlineError: an awaited rank gave no sign of life within the limit.
        """
        if ready():
            return 0.0
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        begun = now = counted_from = time.monotonic_ns()
        nap_s, next_check = _FIRST_NAP_S, begun
        try:
            while not ready():
                time.sleep(nap_s)
                nap_s = min(nap_s * 1.5, _LONGEST_NAP_S)
                last, now = now, time.monotonic_ns()
                if now - last > _SUSPENDED_S * 1e9:
                    counted_from = now
                try:
                    if self._words[:, Word.ABORT].any():
                        self._raise_abort()
                    if now >= next_check:
                        next_check = now + int(_PEER_CHECK_S * 1e9)
                        self._check_failures()
                        remote = elsewhere() if elsewhere is not None else ()
                        self._check_deadline(awaited(), remote, everyone, counted_from, limit_s, what)
                except PeerError as error:
                    if ready() or (not isinstance(error, DeadlineError) and _within(late_s, ready)):
                        break
                    raise
        except DeadlineError:
            raise  # it still is a victim of the rank that it waited for: others must not blame it
        except BaseException:
            self._mine[Word.WAITS_FOR] = 0
            raise
        self._mine[Word.WAITS_FOR] = 0
        end = time.monotonic_ns()
        if self.recorder is not None and idle:
            self.recorder.add("wait", begun / 1e9, end / 1e9)
        return (end - begun) / 1e9

    def wait_for_ranks(
        self,
        ready: Callable[[], bool],
        what: str,
        ranks: Callable[[], Sequence[int]],
        *,
        idle: bool = True,
        late_s: float = 0.0,
    ) -> float:
        """:meth:`wait_until`, for global ranks of any node that have not arrived yet."""
        peers = self.topology.peers
        return self.wait_until(
            ready,
            what,
            lambda: [peers.index(rank) for rank in ranks() if rank in peers],
            elsewhere=lambda: [rank for rank in ranks() if rank not in peers],
            idle=idle,
            late_s=late_s,
        )

    def wait_work(self, work: Work, what: str) -> float:
        """Wait for an asynchronous collective over all ranks; as :meth:`wait_until`."""
        others = [index for index in range(self._size) if index != self._me]
        # A rank that has the result may fail of what it says, before the others have the last bytes of it.
        seconds = self.wait_until(
            work.is_completed, what, lambda: others, everyone=True, late_s=_ON_ITS_WAY_S
        )
        try:
            work.wait()
        except RuntimeError as error:
            self.raise_cause(error, what)
        return seconds

    def raise_cause(self, error: RuntimeError, what: str) -> NoReturn:
        """A collective failed with an error that names no rank: find out who failed or left, and raise that.

        Raises:
            PeerError: what the rank that failed has said, or else the backend's error.
        """
        deadline = time.monotonic() + _LOOK_FOR_CAUSE_S
        while time.monotonic() < deadline:
            self._hear_other_nodes(now=True)
            self._check_failures()
            time.sleep(_PEER_CHECK_S)
        raise PeerError(
            f"{self.describe(self._me)}: {what} failed, as it does when another rank has gone: {error}"
        ) from error

    def _check_deadline(
        self,
        awaited: Sequence[int],
        elsewhere: Sequence[int],
        everyone: bool,
        start: int,
        limit_s: float,
        what: str,
    ) -> None:
        for index in awaited:
            if self._words[index, Word.STATE] == _LEFT:
                self.check()  # it may have failed before it left
                raise PeerError(
                    f"{self.describe(index)} has closed its engine, but {self.describe(self._me)} waits in "
                    f"{self._where(self._me)} for: {what}",
                    self.topology.peers[index],
                )
        now = time.monotonic_ns()
        signs = {index: int(self._words[index, Word.ALIVE_NS]) for index in awaited if index != self._me}
        found: dict[int, tuple[int, bool]] = {}
        if (everyone or elsewhere) and self._other_nodes is not None:
            found = self._other_nodes.signs_of_life(limit_s)
        remote = {rank: sign for rank, sign in found.items() if everyone or rank in elsewhere}
        by_rank = {self.topology.peers[index]: sign for index, sign in signs.items()}
        by_rank |= {rank: sign for rank, (sign, _) in remote.items()}
        newest = max(by_rank.values(), default=0)
        # Passing on the sign of the rank waited for keeps victims out of the blame; a circle of waiting
        # ranks only passes the same sign around, and so still ends.
        self._mine[Word.ALIVE_NS] = max(int(self._mine[Word.ALIVE_NS]), newest)
        if by_rank:
            self._mine[Word.LOOKED_NS] = now
            self._mine[Word.WAITS_FOR] = min(by_rank, key=lambda rank: by_rank[rank]) + 1
        latest = now - int(limit_s * 1e9)
        if start > latest or (everyone and newest > latest):
            return
        silent = [index for index, sign in signs.items() if sign < latest]
        silent_remote = [rank for rank, (sign, _) in remote.items() if sign < latest]
        if not everyone:
            # Nodes pass no signs on, so one that waits itself is given up only when nobody moves any more.
            moved = max([sign for sign, _ in found.values()] + self._words[:, Word.PROGRESS_NS].tolist())
            silent_remote = [rank for rank in silent_remote if moved < latest or not remote[rank][1]]
        if not silent and not silent_remote:
            return
        # Those who wait for somebody themselves are victims.
        silent = list(dict.fromkeys(self._follow(index, latest) for index in silent))
        stuck = [index for index in silent if not self._is_waiting(index)]
        stuck_remote = [rank for rank in silent_remote if not remote[rank][1]]
        if stuck or stuck_remote:
            silent, silent_remote = stuck, stuck_remote
        names = [f"{self.describe(index)}, in {self._where(index)}" for index in silent]
        names += [self.topology.describe(rank) for rank in silent_remote]
        blamed = [*(self.topology.peers[index] for index in silent), *silent_remote]
        told = self._tell_places(blamed)
        raise DeadlineError(
            f"no sign of life for {limit_s:g} s (odc.timeout_s) from {'; '.join(names)}. "
            f"{self.describe(self._me)} waited in {self._where(self._me)} for: {what}",
            blamed[0],
            report=told,
        )

    def _tell_places(self, blamed: Sequence[int]) -> str:
        """Log where the ranks of this node are, and have them write their stacks; returns what was logged."""
        states = []
        for index, rank in enumerate(self.topology.peers):
            words = self._words[index]
            if words[Word.STATE] != _ACTIVE:
                continue
            states.append(
                RankState(
                    rank,
                    self._place(index),
                    int(words[Word.WAITS_FOR]) - 1 if self._is_waiting(index) else None,
                    (time.monotonic_ns() - int(words[Word.PROGRESS_NS])) / 1e9,
                )
            )
            alive = index == self._me or self._locks.holder(self._offset(_ALIVE_LOCK, index)) is not None
            if words[Word.DUMPS] and alive:
                ask_for_stack(int(words[Word.PID]))
        lines = [report(states, blamed, self.topology.world_size - self._size)]
        folder = self._stack_path(self.topology.rank)
        if folder is not None:
            lines.append(f"the Python stacks of their threads: {folder.with_name('stack-rank*.txt')}")
        told = "\n".join(lines)
        logger.error("%s", told)
        return told

    def _stack_path(self, rank: int) -> Path | None:
        return None if self._error_file is None else Path(self._error_file).with_name(f"stack-rank{rank}.txt")

    def _is_waiting(self, index: int) -> bool:
        looked = int(self._words[index, Word.LOOKED_NS])
        return bool(self._words[index, Word.WAITS_FOR]) and time.monotonic_ns() - looked < _STOPPED_S * 1e9

    def _follow(self, index: int, latest: int) -> int:
        """The end of the chain of ranks of this node in which each waits for the next; itself in a circle.

        A rank that has not looked around lately may be stopped, or a victim that got no time to look: it is
        one where the rank that it waits for does not wait and gave no sign since ``latest`` (ns).
        """
        end, seen = index, {self._me}
        while end not in seen:
            seen.add(end)
            rank = int(self._words[end, Word.WAITS_FOR]) - 1
            if rank not in self.topology.peers:
                return end
            awaited = self.topology.peers.index(rank)
            words = self._words[awaited]
            no_suspect = awaited == self._me or words[Word.WAITS_FOR] or words[Word.ALIVE_NS] >= latest
            if no_suspect and not self._is_waiting(end):
                return end
            end = awaited
        return index

    # -- flag B and the node's barrier -----------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Raise flag B: everything this rank wrote before is there for a peer that saw ``epoch``."""
        with self._slot_lock(self._me):
            self._mine[Word.EPOCH] = epoch + 1
        self.beat()

    def wait_epoch(self, index: int, epoch: int) -> float:
        """Wait until local rank ``index`` has raised flag B to ``epoch``; returns seconds waited."""
        seconds = self.wait_until(
            lambda: bool(self._words[index, Word.EPOCH] > epoch),
            f"parameters of epoch {epoch} of {self.describe(index)}",
            lambda: (index,),
        )
        self._synchronize_with((index,))
        return seconds

    def barrier(self, meeting: Meeting, number: int = 0) -> float:
        """Meet all ranks of the node; what each wrote before is seen by all after.

        Args:
            meeting: where this rank is in its program; must be equal on all ranks.
            number: which of these meetings, 0 to 2**48 - 1; must be equal on all ranks.

        Returns:
            Seconds waited.

        Raises:
            UsageError: ranks meet at different places; names who is where.
            PeerError: as :meth:`wait_until`.
        """
        self._barriers += 1
        arrivals, tag = self._barriers, make_tag(meeting, number)
        # A rank can be one barrier ahead while this one still reads, never two: hence two words.
        word = Word.TAG_ODD if arrivals % 2 else Word.TAG_EVEN
        with self._slot_lock(self._me):
            self._mine[word] = tag
            self._mine[Word.BARRIER] = arrivals
        self.beat()
        entered = self._words[:, Word.BARRIER]
        seconds = self.wait_until(
            lambda: bool((entered >= arrivals).all()),
            meeting.explain(number),
            lambda: np.flatnonzero(entered < arrivals).tolist(),
        )
        self._synchronize_with(range(self._size))
        self._ended = None
        self.compare_tags(dict(zip(self.topology.peers, self._words[:, word].tolist(), strict=True)))
        return seconds

    def compare_tags(self, tags: Mapping[int, int]) -> None:
        """Raise where ranks that have met were at different places.

        Args:
            tags: of each global rank the place, from ``make_tag``; this rank's own among them.

        Raises:
            UsageError: names who is where.
            PeerError: the same, where another rank has ended its script.
        """
        meetings = {rank: Meeting(tag // MEETING_RANGE) for rank, tag in tags.items()}
        leave = set(meetings.values()) <= {Meeting.CLOSE, Meeting.EXIT}
        if len({tag % MEETING_RANGE if leave else tag for tag in tags.values()}) == 1:
            return
        places = [f"{self.describe_rank(rank)} is at {explain_tag(tag)}" for rank, tag in tags.items()]
        message = (
            f"ranks ran different programs: {'; '.join(places)}. Every rank must call step() the same number "
            "of times, also with no micro-batch, and close() after that"
        )
        ended = [rank for rank, meeting in meetings.items() if meeting is Meeting.EXIT]
        if ended and self.topology.rank not in ended:
            raise PeerError(message, ended[0])
        raise UsageError(message)

    def _synchronize_with(self, indices: Iterable[int]) -> None:
        for index in indices:
            if index != self._me:
                with self._slot_lock(index):
                    pass

    # -- locks -----------------------------------------------------------------------------------------

    def try_lock(self, number: int) -> bool:
        """Take the node-wide lock ``number`` (from 0) if it is free; returns whether it was."""
        return self._locks.try_acquire(self._offset(_FIRST_USER_LOCK, 0) + number)

    def lock(self, number: int, what: str) -> float:
        """Take the node-wide lock ``number``; returns seconds waited, raises as :meth:`wait_until`.

        The deadline's message names the holder.
        """
        offset = self._offset(_FIRST_USER_LOCK, 0) + number
        return self.wait_until(
            lambda: self._locks.try_acquire(offset), f"lock on {what}", lambda: self._holder(offset)
        )

    def unlock(self, number: int) -> None:
        """Give up lock ``number``."""
        self._locks.release(self._offset(_FIRST_USER_LOCK, 0) + number)

    def _holder(self, offset: int) -> Sequence[int]:
        pid = self._locks.holder(offset)
        found = np.flatnonzero(self._words[:, Word.PID] == pid).tolist() if pid else []
        return found or [index for index in range(self._size) if index != self._me]

    @contextlib.contextmanager
    def _slot_lock(self, index: int, *, give_up_s: float | None = None) -> Iterator[None]:
        """Hold the lock of a slot; after ``give_up_s`` go on without it, else raise at the deadline.

        An exception from a signal handler (Ctrl-C) can come between taking a lock and releasing it. Who
        tells or reads of a failure must get through all the same.
        """
        offset, taken = self._offset(_SLOT_LOCK, index), True
        if not self._locks.try_acquire(offset):
            deadline = time.monotonic() + (self.timeout_s if give_up_s is None else give_up_s)
            while not self._locks.try_acquire(offset):
                if time.monotonic() < deadline:
                    time.sleep(_FIRST_NAP_S)
                elif give_up_s is not None:
                    taken = False
                    break
                else:
                    holders = self._holder(offset) or [self._me]
                    raise DeadlineError(
                        f"the control slot of {self.describe(index)} was locked for {self.timeout_s:g} s "
                        f"(odc.timeout_s) by {'; '.join(map(self.describe, holders))}",
                        self.topology.peers[holders[0]],
                    )
        try:
            yield
        finally:
            if taken:
                self._locks.release(offset)

    def _offset(self, kind: int, index: int) -> int:
        return kind * self._size + index

    # -- drawing work ----------------------------------------------------------------------------------

    def draw(self, serial: int) -> int:
        """The next number of minibatch ``serial`` that no rank has drawn yet; a sign of life.

        Args:
            serial: number of the minibatch, from 1; the same on all ranks, and growing. Between the last
                draw from one and the first from the next lies a barrier.

        Returns:
            A number from 0; each goes to one rank.

        Raises:
            UsageError: another rank draws from a later minibatch already.
            PeerError: a rank failed.
        """
        self.check()
        self.beat()
        if self._other_nodes is not None:
            return self._other_nodes.draw(serial)
        shared = self._words[0]
        with self._slot_lock(0):
            if shared[Word.DRAWN_FROM] > serial:
                raise UsageError(
                    f"{self.describe(self._me)}: minibatch {serial} of the loader is over, another rank is "
                    f"at minibatch {shared[Word.DRAWN_FROM]}; every rank iterates over every minibatch and "
                    "calls step() after each"
                )
            if shared[Word.DRAWN_FROM] < serial:
                shared[Word.DRAWN_FROM], shared[Word.DRAWN] = serial, 0
            number = int(shared[Word.DRAWN])
            shared[Word.DRAWN] = number + 1
        return number

    # -- the rest --------------------------------------------------------------------------------------

    def share(self, descriptors: list[int] | None) -> list[int]:
        """Hand descriptors from the node's first rank to its others. Collective over the node."""
        self._num_exchanges += 1
        first = self._num_exchanges == 1  # it makes the block itself, so there is nothing to look at yet
        # Everybody on the host can list the names of sockets in use: the next one must not follow from it.
        secret = f"{self._token}-{self.topology.node}-{self._num_exchanges}"
        return share_descriptors(
            descriptors,
            name=f"odc-{hashlib.sha256(secret.encode()).hexdigest()[:32]}",
            index=self._me,
            count=self._size,
            timeout_s=self.startup_timeout_s,
            check=None if first else self._check_failures,
        )

    def describe(self, index: int) -> str:
        """Name local rank ``index`` in messages, with host and process id."""
        text = self.topology.describe(self.topology.peers[index])
        pid = int(self._words[index, Word.PID])
        return f"{text[:-1]}, pid {pid})" if pid else text

    def describe_rank(self, rank: int) -> str:
        """Name a global rank in messages, with its process id where it is of this node."""
        peers = self.topology.peers
        return self.describe(peers.index(rank)) if rank in peers else self.topology.describe(rank)

    def _where(self, index: int) -> str:
        text, waits_for = self._place(index), int(self._words[index, Word.WAITS_FOR]) - 1
        return (
            f"{text} (itself waiting for rank {waits_for})" if waits_for >= 0 and index != self._me else text
        )

    def _place(self, index: int) -> str:
        words = self._words[index]
        text = f"step {words[Word.STEP]}"
        phase = Phase(int(words[Word.PHASE]))
        if phase in (Phase.FORWARD, Phase.BACKWARD, Phase.BETWEEN):
            text += f", micro-batch {words[Word.MICRO_BATCH]}"
        return f"{text}, {phase.label}"

    def part_from_nodes(self) -> None:
        """Ask the store between nodes no more. Rank 0, which serves it, waits until nobody does.

        Raises:
            PeerError: as :meth:`wait_until`.
        """
        nodes = self._other_nodes
        if nodes is None:
            return
        if self.topology.rank == 0:
            what = "the ranks of other nodes to close their engines"
            self.wait_until(nodes.all_left, what, list, everyone=True)
        else:
            nodes.say_left()
        self._other_nodes = None

    def close(self) -> None:
        """Leave in good order and let go of the memory. The caller has passed the last barrier."""
        if self.closed:
            return
        self.closed = True
        self._stacks.close()
        if self._excepthooks is not None and sys.excepthook is self._excepthooks[1]:
            sys.excepthook = self._excepthooks[0]
        if self.is_owner:
            self._mine[Word.STATE] = _LEFT
        del self._words, self._mine, self._messages
        with contextlib.suppress(BufferError):  # a traceback still holds a view; unmapped when it goes
            self._map.close()
        os.close(self._fd)  # drops this process's locks, the one that says "alive" included
