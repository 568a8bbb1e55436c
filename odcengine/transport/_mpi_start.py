"""Starting MPI, and entering it: one runtime a process, whose calls of several threads are taken one by one.

MPI is started with MPI_THREAD_SERIALIZED: its threads may all call it, one at a time, which a lock sees to.
Open MPI 4 has no windows over TCP with the level above (MPI_THREAD_MULTIPLE), which mpi4py asks for by
default, so the level is chosen before mpi4py starts MPI by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib.util
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from odcengine.control import ControlBlock
from odcengine.errors import ConfigError, OdcError
from odcengine.ranks import RankInfo

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

NAP_S = 6e-5
"""Between two entries of the helper thread where MPI needs it: with the kernel's slack under 0.2 ms."""
IDLE_NAP_S = 5e-3
_SWITCH_INTERVAL_S = 1e-4  # Python's 5 ms would be the helper's delay beside a thread that runs Python code
_FIRST_LOOK_S = 1.0

_HOW_TO_START = (
    "start one MPI process a rank: `mpirun -np N odc-launch ...`, `odc-launch --launcher mpi`, or under "
    "SLURM `srun --mpi=pmix` (odc-launch --srun-arg=--mpi=pmix; `srun --mpi=list` shows what there is)"
)


class Mpi:
    """The process's MPI.

    Attributes:
        module: ``mpi4py.MPI``.
        version: the library, for logs and messages.
        kept: what must live until the process ends, because MPI may still write to it.
    """

    def __init__(self) -> None:
        self.module: Any = None
        self.version = ""
        self.kept: list[Any] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._finished_well = False
        self._inside_since: float | None = None  # where the thread of the rank is in a call
        self._polls: dict[Callable[[], None], float] = {}
        self._watchers: dict[Callable[[], None], Callable[[float], None]] = {}
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._user_switch_interval_s: float | None = None

    # -- calls -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def entered(self, control: ControlBlock) -> Iterator[Any]:
        """Be the one thread that calls MPI; raises as every wait of ``control`` where it is not let in."""
        if not self._lock.acquire(timeout=_FIRST_LOOK_S):
            control.wait_until(
                lambda: self._lock.acquire(blocking=False),
                "MPI, which another thread is in",
                list,
                everyone=True,
            )
        self._inside_since = time.monotonic()
        try:
            yield self.module
        finally:
            self._inside_since = None
            self._lock.release()

    def call(
        self,
        function: Callable[[], Result],
        what: str,
        control: ControlBlock,
        ranks: Callable[[], Sequence[int]],
        *,
        late_s: float = 0.0,
    ) -> Result:
        """Make a call that waits for other ranks, so that it can be given up.

        It runs in a thread of its own; this one waits with an eye on deadlines and failures. A call that is
        given up stays where it is, and the process ends around it.

        Args:
            function: makes the call.
            what: what is awaited, for messages.
            control: the node's control block.
            ranks: the global ranks that it waits for.
            late_s: seconds in which the call may still end by itself after another rank has failed, so that
                its own result or error is told.

        Returns:
            What the function returned.

        Raises:
            PeerError: as ``ControlBlock.wait_until``.
        """
        done: list[Result] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                with self._lock:
                    done.append(function())
            except BaseException as error:
                failed.append(error)

        threading.Thread(target=run, name="odc-mpi-call", daemon=True).start()
        control.wait_for_ranks(lambda: bool(done or failed), what, ranks, late_s=late_s)
        if failed:
            raise failed[0]
        return done[0]

    # -- progress --------------------------------------------------------------------------------------

    def serve(
        self, poll: Callable[[], None], nap_s: float, watch: Callable[[float], None] | None = None
    ) -> None:
        """Have the helper thread look after a transport from now on.

        Args:
            poll: called every ``nap_s`` seconds, alone in MPI.
            nap_s: seconds between two calls.
            watch: called, now and then, with the seconds for which the rank's own thread has been inside a
                call that should not wait.
        """
        self._polls[poll] = nap_s
        if watch is not None:
            self._watchers[poll] = watch
        if self._user_switch_interval_s is None and nap_s < _SWITCH_INTERVAL_S:
            self._user_switch_interval_s = sys.getswitchinterval()
            sys.setswitchinterval(min(self._user_switch_interval_s, _SWITCH_INTERVAL_S))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="odc-mpi", daemon=True)
            self._thread.start()
        self._wake.set()

    def stop_serving(self, poll: Callable[[], None]) -> None:
        """No call of ``poll`` begins after this; the caller must not be in MPI."""
        self._watchers.pop(poll, None)
        self._polls.pop(poll, None)
        if self._lock.acquire(timeout=_FIRST_LOOK_S):  # the one that runs has ended; else a call was given up
            self._lock.release()
        if not any(nap_s < _SWITCH_INTERVAL_S for nap_s in self._polls.values()):
            if self._user_switch_interval_s is not None:
                sys.setswitchinterval(self._user_switch_interval_s)
            self._user_switch_interval_s = None

    @contextlib.contextmanager
    def without_helper(self) -> Iterator[None]:
        """The helper thread rests inside of this block."""
        with self._lock:
            resting, self._polls = self._polls, {}
        try:
            yield
        finally:
            self._polls = resting | self._polls
            self._wake.set()

    def _serve(self) -> None:
        resumed = float("-inf")
        while True:
            looked = time.monotonic()
            if not self._lock.acquire(timeout=_FIRST_LOOK_S):
                since, now = self._inside_since, time.monotonic()
                if now - looked > 2 * _FIRST_LOOK_S:  # the process was stopped for a while, not the call
                    resumed = now
                if since is not None:
                    for watch in tuple(self._watchers.values()):
                        watch(now - max(since, resumed))
                continue
            try:
                polls = self._polls
                for poll in tuple(polls):
                    if poll in polls:
                        poll()
            finally:
                self._lock.release()
            if polls:
                time.sleep(min(polls.values(), default=IDLE_NAP_S))
            else:
                self._wake.clear()
                if not self._polls:
                    self._wake.wait()

    # -- start and end -----------------------------------------------------------------------------------

    def start(self, limit_s: float) -> str | None:
        """Start MPI, or adopt it where it runs; returns what is wrong, or None.

        MPI's start waits for all ranks, in a call that only a signal can end: after ``limit_s`` seconds it
        comes, and shows where the process was.
        """
        if self.module is None:
            try:
                self.module = _load()
            except ConfigError as error:
                return str(error)
        mpi: Any = self.module
        if mpi.Is_finalized():
            return "odc.transport: mpi: MPI has been finalized in this process, and cannot start twice"
        if not mpi.Is_initialized():
            with _ended_after(limit_s):
                mpi.Init_thread(mpi.THREAD_SERIALIZED)
            atexit.register(self.finish)
        if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
            return (
                "odc.transport: mpi needs MPI_THREAD_SERIALIZED, since a helper thread has to enter MPI, but "
                "MPI runs with less; let odcengine.initialize start it, or set mpi4py.rc.thread_level = "
                "'serialized' before mpi4py.MPI is imported"
            )
        text = mpi.Get_library_version().split("\0")[0].split("\n")[0]  # others continue for many lines
        self.version = " ".join(text.split(",")[0].split())
        return None

    @property
    def has_all_threads(self) -> bool:
        """MPI runs with MPI_THREAD_MULTIPLE."""
        return bool(self.module.Query_thread() == self.module.THREAD_MULTIPLE)

    def closed(self, *, well: bool) -> None:
        """A transport has been closed, in good order or after a failure."""
        self._finished_well = well

    def finish(self) -> None:
        """End MPI, which all ranks do together; after a failure leave it, since the others may be gone."""
        unhandled = getattr(sys, "last_value", None) is not None
        well = self._finished_well and not self._polls and not unhandled and os.getpid() == self._pid
        if well and not self.module.Is_finalized():
            self.module.Finalize()


@contextlib.contextmanager
def _ended_after(limit_s: float) -> Iterator[None]:
    """End the process by SIGALRM, with its stack, if the block takes longer; a script's own timer stays."""
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
        and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    )
    if not ours:
        yield
        return
    with contextlib.suppress(ValueError, io.UnsupportedOperation):  # stderr may be no file
        faulthandler.register(signal.SIGALRM, chain=True)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.unregister(signal.SIGALRM)


def _load() -> Any:
    """``mpi4py.MPI``, without its starting MPI by itself."""
    if importlib.util.find_spec("mpi4py") is None:
        raise ConfigError(
            "odc.transport: mpi needs mpi4py, which is not installed; pip install 'odcengine[mpi]'"
        )
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"odc.transport: mpi: mpi4py finds no MPI library ({' '.join(str(error).split())}); install "
            "Open MPI or MPICH, or load the cluster's module"
        ) from error
    return MPI


@functools.cache
def process_mpi() -> Mpi:
    """The one of this process."""
    return Mpi()


def start_mpi(info: RankInfo, exchange: Callable[[str], Sequence[str]], limit_s: float) -> Mpi:
    """Start MPI on all ranks, or adopt it where it runs. Collective.

    Args:
        info: this rank.
        exchange: gathers one text from every rank, in rank order.
        limit_s: seconds for MPI's own start.

    Returns:
        MPI, whose ranks are those of the job.

    Raises:
        ConfigError: mpi4py or MPI is missing, or the processes were not started as ranks of MPI. The same on
            all ranks, for the first that cannot go on.
    """
    mpi = process_mpi()
    # Each looks before the next is tried: MPI's start would hang, or end the process, on its own.
    steps: list[Callable[[], str | None]]
    steps = [lambda: _check_place(info), lambda: mpi.start(limit_s), lambda: _check_world(info, mpi)]
    for step in steps:
        problems = exchange(step() or "ok")
        bad = next((rank for rank, problem in enumerate(problems) if problem != "ok"), None)
        if bad is not None:
            raise ConfigError(f"rank {bad}: {problems[bad]}")
    if info.rank == 0:
        logger.info("%s", mpi.version)
    return mpi


def _check_place(info: RankInfo) -> str | None:
    place = info.mpi
    if importlib.util.find_spec("mpi4py") is None:
        return None  # said by the next step
    if place is None:
        return (
            f"odc.transport: mpi: this process was started by {info.source}, without the variables of "
            f"mpirun, PMIx or PMI, so MPI would count it as the only one; {_HOW_TO_START}"
        )
    if place.rank != info.rank or place.size not in (None, info.world_size):
        return _contradiction(info, place.words)
    return None


def _check_world(info: RankInfo, mpi: Mpi) -> str | None:
    world = mpi.module.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    if (rank, size) != (info.rank, info.world_size):
        return _contradiction(info, f"{mpi.version} (rank {rank} of {size})")
    return None


def _contradiction(info: RankInfo, words: str) -> str:
    return (
        f"odc.transport: mpi: {info.source} says rank {info.rank} of {info.world_size}, but {words} counts "
        f"otherwise; {_HOW_TO_START}"
    )


def window_error(mpi: Mpi, error: Exception) -> OdcError:
    """Why MPI made no window, as far as it can be told."""
    if mpi.has_all_threads:
        return ConfigError(
            f"odc.transport: mpi: {mpi.version} made no window ({error}). It runs with MPI_THREAD_MULTIPLE, "
            "under which Open MPI 4 has none over TCP: let odcengine.initialize start MPI, or set "
            "mpi4py.rc.thread_level = 'serialized' before mpi4py.MPI is imported"
        )
    return OdcError(
        f"odc.transport: mpi: {mpi.version} made no window ({error}). Between hosts without RDMA Open MPI 4 "
        "needs its component for TCP, which Debian and Ubuntu switch off: `mpirun --mca osc pt2pt`, or "
        "OMPI_MCA_osc=pt2pt in the environment; `ompi_info | grep osc` lists the components"
    )
