"""The control block: what every rank is doing, in memory that its peers can read at any time.

One block a node, in shared memory; between nodes the same facts travel through a store (a key-value server
of torch.distributed). Transports, engine and watchdog use this one block: it carries sign of life, step,
micro-batch and phase of each rank, the epoch flag B, the node's barrier, and the abort code. Every wait of
odcengine goes through :meth:`ControlBlock.wait_until`, which ends when what is awaited happens, when a rank
fails or dies, or when an awaited rank shows no sign of life for longer than the limit.

Memory order: words are aligned 8-byte stores; a reader that must also see what the writer wrote *before*
takes and drops the writer's lock after it saw the word (see ``docs/protocol.md``). The memory itself, with
its locks, is in ``_slots.py``; who is to blame for a silence is found in ``_blame.py``; what a rank that
stops tells its node is in ``_failures.py``, what it leaves for the launcher in ``_error_record.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np

from odcengine._between_nodes import OtherNodes, Store
from odcengine._blame import Blame
from odcengine._equal_counts import EqualCounts
from odcengine._error_record import tell_uncaught, write_error_record
from odcengine._failures import Failures
from odcengine._hang import StackFile
from odcengine._meetings import Meeting, compare_tags, make_tag
from odcengine._memory import share_descriptors
from odcengine._slots import Slots, create_slots
from odcengine._words import ACTIVE, LEFT, Phase, Word
from odcengine.errors import DeadlineError, PeerError, UsageError
from odcengine.topology import Topology

__all__ = ["ControlBlock", "EventRecorder", "Meeting", "Phase", "Store", "Work"]

_FIRST_NAP_S, _LONGEST_NAP_S = 2e-5, 5e-4
_PEER_CHECK_S, _LOOK_FOR_CAUSE_S = 0.05, 6.0
_ON_ITS_WAY_S = 1.0  # that bytes of a rank that has failed since may take between two sockets
_SUSPENDED_S = 1.0  # a nap that took so long was none: the whole job may have been stopped for a while


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
        (fd,) = self.share([create_slots(self._size)] if self._me == 0 else None)
        self._slots = Slots(topology, fd)
        self._words, self._mine = self._slots.words, self._slots.mine
        stack_file = None
        if error_file is not None:
            stack_file = Path(error_file).with_name(f"stack-rank{topology.rank}.txt")
        self._blame = Blame(topology, self._slots, stack_file)
        self._failures = Failures(topology, self._slots)
        self._equal_counts = EqualCounts(self._slots, self._me)
        self._pid = os.getpid()
        self._barriers = 0
        self._other_nodes: OtherNodes | None = None
        if store is not None and topology.num_nodes > 1:
            self._other_nodes = OtherNodes(topology, store, self._signs, timeout_s)
        self._remove_excepthook: Callable[[], None] = lambda: None
        self.closed = False
        if not self._slots.claim():
            raise UsageError(f"{self.describe(self._me)}: two processes run as the same local rank")
        self._mine[Word.PID] = os.getpid()
        self._stacks = StackFile(stack_file)
        self._mine[Word.DUMPS] = self._stacks.active
        self.beat()
        self._mine[Word.STATE] = ACTIVE
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
        return [
            (int(words[Word.PROGRESS_NS]), self._slots.is_waiting(i)) for i, words in enumerate(self._words)
        ]

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
        if self.closed or not self.is_owner or self._failures.told:
            return
        secondary = isinstance(error, PeerError)
        culprit = error.rank if isinstance(error, PeerError) else self.topology.rank
        cause = f"{type(error).__name__}: {error}"
        place = f"{self.describe(self._me)} failed in {self._slots.where(self._me)}"
        message = str(error) if secondary else f"{place}: {cause}"
        self._failures.tell(message, culprit, secondary=secondary)
        for listener in self.failure_listeners:
            listener()
        if self._other_nodes is not None:
            self._other_nodes.tell_failure(message, culprit, secondary=secondary)
        self._write_error_record(error, secondary=secondary)

    def record_end(self, error: BaseException) -> None:
        """Write the launcher's error record and nothing else: a signal handler may call it.

        Args:
            error: why this process ends now.
        """
        if not self.closed and self.is_owner and not self._failures.told:
            self._write_error_record(error, secondary=False)

    def _write_error_record(self, error: BaseException, *, secondary: bool) -> None:
        if self._error_file is not None:
            step = int(self._mine[Word.STEP])
            write_error_record(self._error_file, self.topology, error, step=step, secondary=secondary)

    def install_excepthook(self) -> None:
        """Tell all ranks about an exception that ends this process outside of the engine's own calls."""
        self._remove_excepthook = tell_uncaught(weakref.WeakMethod(self.fail))

    @property
    def is_owner(self) -> bool:
        """False in a process that the rank has forked: it shares the memory, but must not speak for it."""
        return os.getpid() == self._pid

    @property
    def failed(self) -> bool:
        """Whether this rank has told the others that it stops."""
        return not self.closed and self._failures.told

    def check(self) -> None:
        """Raise if a rank of this node has failed, or, looked up now and then, one of another node.

        Raises:
            PeerError: names the rank, its host, the step and the cause.
        """
        self._failures.check()
        self._equal_counts.check_nobody_has_more(self.timeout_s)
        self._hear_other_nodes()

    def _hear_other_nodes(self, *, now: bool = False) -> None:
        if self._other_nodes is None:
            return
        try:
            self._other_nodes.exchange(now=now)
        except PeerError as error:
            if error.rank in self.topology.peers and error.rank != self.topology.rank:
                self._blame.tell_places([error.rank])  # another node has given up one of this node's ranks
            raise

    def _check_failures(self) -> None:
        self.check()
        self._failures.check_lives()

    def end_micro_batches(self, step: int, count: int) -> None:
        """Say that this rank has run all ``count`` micro-batches of its share of minibatch ``step``.

        Until the next barrier has passed, :meth:`check` raises where another rank of the node runs more: it
        would wait for a collective that this rank never enters.
        """
        self._equal_counts.end(step, count, self.timeout_s)

    def check_equal_counts(self, step: int, count: int) -> None:
        """Raise where a rank of the node ended minibatch ``step`` with fewer than ``count`` micro-batches.

        Raises:
            UsageError: names both ranks and counts.
        """
        self._equal_counts.check_nobody_ended(step, count)

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

        def look_around(start: int) -> None:
            self._check_failures()
            remote = elsewhere() if elsewhere is not None else ()
            missing = awaited()
            self._failures.check_nobody_left(missing, what)
            self._blame.check(
                missing,
                remote,
                self._other_nodes,
                everyone=everyone,
                start=start,
                limit_s=limit_s,
                what=what,
            )

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
                    self._failures.check()
                    if now >= next_check:
                        next_check = now + int(_PEER_CHECK_S * 1e9)
                        look_around(counted_from)
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

    # -- flag B and the node's barrier -----------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Raise flag B: everything this rank wrote before is there for a peer that saw ``epoch``."""
        with self._slots.locked(self._me, self.timeout_s):
            self._mine[Word.EPOCH] = epoch + 1
        self.beat()

    def wait_epoch(self, index: int, epoch: int) -> float:
        """Wait until local rank ``index`` has raised flag B to ``epoch``; returns seconds waited."""
        seconds = self.wait_until(
            lambda: bool(self._words[index, Word.EPOCH] > epoch),
            f"parameters of epoch {epoch} of {self.describe(index)}",
            lambda: (index,),
        )
        self._slots.synchronize_with((index,), self.timeout_s)
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
        with self._slots.locked(self._me, self.timeout_s):
            self._mine[word] = tag
            self._mine[Word.BARRIER] = arrivals
        self.beat()
        entered = self._words[:, Word.BARRIER]
        seconds = self.wait_until(
            lambda: bool((entered >= arrivals).all()),
            meeting.explain(number),
            lambda: np.flatnonzero(entered < arrivals).tolist(),
        )
        self._slots.synchronize_with(range(self._size), self.timeout_s)
        self._equal_counts.have_met()
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
        compare_tags(tags, self.topology.rank, self.describe_rank)

    # -- locks -----------------------------------------------------------------------------------------

    def try_lock(self, number: int) -> bool:
        """Take the node-wide lock ``number`` (from 0) if it is free; returns whether it was."""
        return self._slots.try_lock(number)

    def lock(self, number: int, what: str) -> float:
        """Take the node-wide lock ``number``; returns seconds waited, raises as :meth:`wait_until`.

        The deadline's message names the holder.
        """
        return self.wait_until(
            lambda: self._slots.try_lock(number), f"lock on {what}", lambda: self._slots.holders(number)
        )

    def unlock(self, number: int) -> None:
        """Give up lock ``number``."""
        self._slots.unlock(number)

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
        if self._other_nodes is None:
            return self._slots.draw(serial, self.timeout_s)
        number = self._other_nodes.draw(serial)
        self._slots.note_drawn(serial, number + 1, self.timeout_s)
        return number

    def num_drawn(self, serial: int) -> int:
        """How many numbers of minibatch ``serial`` are drawn, at least: what this node knows. No wait."""
        return self._slots.num_drawn(serial)

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
        return self._slots.describe(index)

    def describe_rank(self, rank: int) -> str:
        """Name a global rank in messages, with its process id where it is of this node."""
        peers = self.topology.peers
        return self.describe(peers.index(rank)) if rank in peers else self.topology.describe(rank)

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
        self._remove_excepthook()
        if self.is_owner:
            self._mine[Word.STATE] = LEFT
        del self._words, self._mine  # views of what goes now
        self._slots.close()
