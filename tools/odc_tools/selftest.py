"""``odc selftest``: tests odcengine on the machine it is to run on.

Three parts, each on real ranks started by odc-launch: random transport operations with exact sums;
minibatches of a tiny model without growth of memory, descriptors or shared mappings; and ranks that are
killed, stopped or raise at random times, after which no process and nothing in the file system may be left
and the right rank must have been named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from odcengine._version import __version__
from odcengine.errors import ConfigError

RSS_TOLERANCE_BYTES = 4 * 2**20
"""How much the resident memory of a rank may grow after warm-up: the allocator's own noise."""

_GRACE_S = 8.0  # of the trainings that are broken on purpose: for those that are left to say why they end
_TIMEOUT_S, _STOP_TIMEOUT_S = 60.0, 4.0  # their limits; the short one only where a rank is stopped
_LAUNCHER_TERM_S = 5.0  # odc-launch's time between SIGTERM and SIGKILL
_KILL_S = 10.0  # for processes to be gone after SIGKILL
_MARGIN_S = 30.0  # for starting interpreters to end on a busy machine
_MARK = "ODC_SELFTEST"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HOWS = ("kill", "raise", "stop", "crash")


@dataclass
class Row:
    """One line of the result.

    Attributes:
        test: what was tested.
        amount: how much of it.
        outcome: what was seen.
        problems: what was wrong; none if it passed.
        seconds: time it took.
    """

    test: str
    amount: str
    outcome: str = ""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


class _NotReached(Exception):
    """The ranks did not get as far as they had to before one of them could be broken."""


class _Stopped(BaseException):
    """A signal asks the test to end."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument(
        "--operations", type=int, metavar="N", help="random transport operations (default: 20000)"
    )
    parser.add_argument("--minibatches", type=int, metavar="N", help="minibatches (default: 80)")
    parser.add_argument("--kills", type=int, metavar="N", help="trainings that are broken (default: 2)")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks, 2 or more (default: 2)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of everything random (default: 0)")
    parser.add_argument(
        "--soak",
        action="store_true",
        help="the long run: 1,000,000 operations, 2,000 minibatches and 100 kills over 2 to 4 ranks, "
        "about half an hour; --operations, --minibatches, --kills and --ranks still count",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON")


def run(options: argparse.Namespace) -> int:
    """Runs the test and prints a table.

    Returns:
        0 if everything passed, 128 + N where signal N ended the test, else 1.
    """
    if sys.platform != "linux":
        raise ConfigError("odc selftest needs Linux: its ranks share memory through memfd")
    defaults = (1_000_000, 2_000, 100) if options.soak else (20_000, 80, 2)
    wanted = (options.operations, options.minibatches, options.kills)
    operations, minibatches, kills = (
        default if value is None else value for value, default in zip(wanted, defaults, strict=True)
    )
    for name, value in (("operations", operations), ("minibatches", minibatches), ("kills", kills)):
        if value < 0:
            raise ConfigError(f"--{name} {value}: it must be 0 or more")
    if options.ranks is not None and options.ranks < 2:
        raise ConfigError(f"--ranks {options.ranks}: it must be 2 or more; one rank talks to nobody")
    ranks = [options.ranks] if options.ranks else [2, 3, 4] if options.soak else [2]
    rows = []
    try:
        with _stopped_by_signals():
            for row in _rows(operations, minibatches, kills, ranks, options.seed, options.soak):
                rows.append(row)
                print(_format(row), flush=True)
    except _Stopped as stopped:
        print(f"odc selftest: ended by {stopped.number.name}; its ranks are ended too", file=sys.stderr)
        return 128 + stopped.number
    passed = not any(row.problems for row in rows)
    print("passed" if passed else "FAILED", flush=True)
    if options.json:
        record = {
            "passed": passed,
            "seed": options.seed,
            **_versions(),
            "rows": [asdict(row) for row in rows],
        }
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if passed else 1


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Turns the first INT, TERM or HUP into :class:`_Stopped`; later ones do not disturb the cleaning up.

    What was ignored before (by nohup, say) stays ignored.
    """
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            raise _Stopped(signal.Signals(number))

    before = {number: signal.getsignal(number) for number in _ENDING}
    caught = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    try:
        for number in caught:
            signal.signal(number, stop)
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number] or signal.SIG_DFL)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"odcengine": __version__, "python": platform.python_version(), "torch": version("torch")}


def _format(row: Row) -> str:
    lines = [f"{row.test:<16} {row.amount:<42} {row.seconds:7.1f} s  {'FAILED' if row.problems else 'ok'}"]
    lines += [f"  {line}" for line in [row.outcome] if line]
    lines += [f"  ! {problem}" for problem in row.problems[:20]]
    return "\n".join(lines)


def _rows(
    operations: int, minibatches: int, kills: int, ranks: Sequence[int], seed: int, soak: bool
) -> Iterator[Row]:
    for world_size in ranks if operations else ():
        yield _timed(check_transport, world_size, -(-operations // len(ranks)), seed, soak)
    for world_size in ranks[:2] if minibatches else ():
        share = -(-minibatches // len(ranks[:2]))
        yield _timed(check_minibatches, world_size, share, seed)
    if kills:
        yield _timed(check_failures, ranks, kills, seed)


def _timed(function: Any, *args: Any) -> Row:
    start = time.monotonic()
    row: Row = function(*args)
    row.seconds = time.monotonic() - start
    return row


# -- starting ranks ----------------------------------------------------------------------------------------


class Ranks:
    """Ranks of one task under odc-launch, in a folder of their own.

    Args:
        folder: an empty folder.
        task: name of the task.
        world_size: number of ranks.
        spec: what the task is to do.
    """

    def __init__(self, folder: Path, task: str, world_size: int, spec: Mapping[str, Any]) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.world_size = world_size
        self.mark = secrets.token_hex(16)
        (folder / "tmp").mkdir()
        words = json.dumps({"folder": str(folder), "token": secrets.token_hex(16), **spec})
        env = {name: value for name, value in os.environ.items() if not name.startswith(("ODC_", "MASTER_"))}
        # The folders that this process imports from, so that a checkout works like an installation.
        path = [str(Path(entry or ".").resolve()) for entry in sys.path]
        env |= {_MARK: self.mark, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": os.pathsep.join(path)}
        argv = [sys.executable, "-m", "odc_launcher", "--nproc-per-node", str(world_size)]
        argv += ["--log-dir", str(self.logs), "--show", "none", "--grace-s", str(_GRACE_S), "--oversubscribe"]
        argv += ["-m", "odc_tools._selftest_ranks", task, words]
        self.output = folder / "launcher.txt"
        self._argv, self._env = argv, env
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start them; :meth:`kill` ends them also where this is interrupted."""
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                self._argv,
                env=self._env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The launcher."""
        if self._process is None:
            raise RuntimeError("the ranks were not started")
        return self._process

    def wait(self, timeout_s: float) -> int | None:
        """The launcher's exit code; None, and everything killed, where it did not end in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self) -> None:
        """End whatever is left, and wait until it is gone."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(_KILL_S)
        deadline = time.monotonic() + _KILL_S
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.02)

    def processes(self) -> dict[int, int | None]:
        """All living processes of these ranks, however they were started: process id -> rank."""
        found = {}
        mark = f"{_MARK}={self.mark}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    environ = (entry / "environ").read_bytes().split(b"\0")
                    state = (entry / "stat").read_bytes().rpartition(b") ")[2][:1]
                except OSError:
                    continue
                if mark in environ and state not in (b"Z", b"X"):
                    rank = [int(word[5:]) for word in environ if word.startswith(b"RANK=")]
                    found[int(entry.name)] = rank[0] if rank else None
        return found

    def results(self) -> list[dict[str, Any]]:
        """What every rank has written."""
        return [
            json.loads((self.folder / f"result{rank}.json").read_text()) for rank in range(self.world_size)
        ]

    def told(self) -> str:
        """What the launcher printed."""
        return self.output.read_text(errors="replace")

    def left_files(self) -> list[str]:
        """Files that the ranks left in the temporary folder or in shared memory."""
        tmp = self.folder / "tmp"
        # torch makes that one, for kernels that it compiles
        left = [f"tmp/{name}" for name in os.listdir(tmp) if not name.startswith("torchinductor_")]
        shared = Path("/dev/shm")
        names = os.listdir(shared) if shared.is_dir() else []
        return left + [f"/dev/shm/{name}" for name in names if "odc" in name]


@contextmanager
def _ranks(task: str, world_size: int, spec: Mapping[str, Any]) -> Iterator[Ranks]:
    with _undisturbed():
        folder = tempfile.TemporaryDirectory(prefix="odc-selftest-", ignore_cleanup_errors=True)
        ranks = Ranks(Path(folder.name), task, world_size, spec)
    try:
        ranks.start()
        yield ranks
    finally:
        with _undisturbed():
            ranks.kill()
            folder.cleanup()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Holds signals back, so that they do not leave something half made or half removed."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _finish(ranks: Ranks, timeout_s: float, row: Row) -> list[dict[str, Any]]:
    """Results of ranks that must succeed; fewer than ranks where they do not."""
    code = ranks.wait(timeout_s)
    if code != 0:
        row.problems.append("the ranks did not end in time" if code is None else f"exit code {code}")
        row.problems += ranks.told().splitlines()
        return []
    row.problems += [f"left behind: {name}" for name in ranks.left_files()]
    return ranks.results()


# -- the three parts ---------------------------------------------------------------------------------------


def check_transport(world_size: int, operations: int, seed: int, hot: bool) -> Row:
    """Random operations; on 4 ranks as two nodes whose ranks are not consecutive."""
    nodes = [[0, 3], [1, 2]] if world_size == 4 else [list(range(world_size))]
    row = Row("transport", f"{operations:,} operations, {world_size} ranks, {len(nodes)} node(s)")
    per_epoch = 200
    epochs = max(-(-operations // (world_size * per_epoch)), 2)
    spec = {"nodes": nodes, "seed": seed, "epochs": epochs, "operations": per_epoch}
    with _ranks("transport", world_size, spec | {"hot_rounds": 3000 if hot else 0}) as ranks:
        results = _finish(ranks, 120 + operations / 200, row)
    if results:
        done = sum(result["operations"] for result in results)
        sums = sum(result["checked_sums"] for result in results)
        row.amount = f"{done:,} operations, {world_size} ranks, {len(nodes)} node(s)"
        row.outcome = f"{sums:,} sums and every pull exact"
        if done < operations * 0.8:
            row.problems.append(f"only {done} operations were done")
        if hot:
            lost, without = (sum(r[f"lost_{w}_locks"] for r in results) for w in ("with", "without"))
            row.outcome += f"; additions lost with locks {lost}, without {without}"
            if lost:
                row.problems.append(f"{lost} additions were lost although locks were held")
    return row


def check_minibatches(world_size: int, minibatches: int, seed: int) -> Row:
    """Several engines one after the other; nothing that a rank holds may grow."""
    engines = min(4, minibatches, max(2, minibatches // 20))
    row = Row("minibatches", f"{minibatches:,} minibatches, {world_size} ranks, {engines} engine(s)")
    spec = {"minibatches": minibatches, "engines": engines, "seed": seed, "timeout_s": 60}
    with _ranks("minibatches", world_size, spec) as ranks:
        results = _finish(ranks, 120 + minibatches, row)
    growth = [0]
    for rank, result in enumerate(results):
        growth.append(_check_growth(rank, result["held"], row.problems))
        first, last = result["first_loss"], result["last_loss"]
        if minibatches >= 100 and not last < first:
            row.problems.append(f"rank {rank}: the loss went from {first} to {last}")
    if results:
        micro_batches = sum(result["micro_batches"] for result in results)
        row.outcome = (
            f"{micro_batches:,} micro-batches; resident memory grew by at most {max(growth) / 2**20:.1f} MiB "
            f"a rank (allowed: {RSS_TOLERANCE_BYTES / 2**20:.0f})"
        )
    return row


def _check_growth(rank: int, held: list[dict[str, Any]], problems: list[str]) -> int:
    """Compare with the first engine: warm with end, and closed with closed. Returns the growth in bytes."""
    by_place = {entry["at"]: entry for entry in held}
    warm = by_place["engine 0, warm"]
    growth = 0
    for place, entry in by_place.items():
        if place == "engine 0, warm":
            continue
        closed = place.endswith("closed")
        base = by_place["engine 0, closed"] if closed else warm
        for name in ("fds", "threads"):
            if entry[name] > base[name]:
                problems.append(f"rank {rank}, {place}: {entry[name]} {name}, {base[name]} before")
        expected = 0 if closed else warm["shared_mappings"]
        if entry["shared_mappings"] != expected:
            problems.append(f"rank {rank}, {place}: {entry['shared_mappings']} mappings, not {expected}")
        growth = max(growth, entry["rss_bytes"] - warm["rss_bytes"])
    if growth > RSS_TOLERANCE_BYTES:
        problems.append(f"rank {rank}: resident memory grew by {growth / 2**20:.1f} MiB")
    return growth


def check_failures(world_sizes: Sequence[int], rounds: int, seed: int) -> Row:
    """Break a rank of a training at a random time: by SIGKILL, SIGSTOP, an exception or SIGSEGV, in turn."""
    dice = random.Random(seed)
    row = Row("failures", f"{rounds} trainings broken, {'/'.join(map(str, world_sizes))} ranks")
    longest = dict.fromkeys(_HOWS, 0.0)
    counts = dict.fromkeys(_HOWS, 0)
    early = 0
    for number in range(rounds):
        how = _HOWS[number % len(_HOWS)]
        at_start = number % 5 == 4  # while ranks import, meet and shard
        world_size = world_sizes[number // len(_HOWS) % len(world_sizes)]
        victim = dice.randrange(world_size)
        label = (
            f"round {number} ({how} rank {victim} of {world_size}{' during the start' if at_start else ''})"
        )
        limit = _STOP_TIMEOUT_S if how == "stop" else _TIMEOUT_S
        with _ranks("train", world_size, {"seed": number, "timeout_s": limit}) as ranks:
            try:
                seconds, problems = _break(ranks, how, victim, at_start, dice)
            except _NotReached as error:
                seconds, problems = 0.0, [str(error)]
        longest[how] = max(longest[how], seconds)
        counts[how] += 1
        early += at_start
        row.problems += [f"{label}: {problem}" for problem in problems]
    row.outcome = (
        "; ".join(f"{counts[how]} x {how}, ended within {longest[how]:.1f} s" for how in _HOWS if counts[how])
        + f"; {early} of them during the start"
    )
    return row


def _break(
    ranks: Ranks, how: str, victim: int, at_start: bool, dice: random.Random
) -> tuple[float, list[str]]:
    pid = _wait_for_rank(ranks, victim)
    if not at_start:
        _wait_for_training(ranks)
    time.sleep(dice.random() * (3.0 if at_start else 1.0))
    numbers = {
        "kill": signal.SIGKILL,
        "stop": signal.SIGSTOP,
        "raise": signal.SIGUSR1,
        "crash": signal.SIGSEGV,
    }
    training = all((ranks.folder / f"training{rank}").exists() for rank in range(ranks.world_size))
    broken = time.monotonic()
    _signal(pid, numbers[how])
    if how == "stop" and not training:
        # Its peers wait for odc.startup_timeout_s, or inside of torch: the user ends the job.
        time.sleep(0.2)
        ranks.process.send_signal(signal.SIGTERM)
    limit = _GRACE_S + _LAUNCHER_TERM_S + _MARGIN_S + (_STOP_TIMEOUT_S if how == "stop" else 0.0)
    code = ranks.wait(limit)
    seconds = time.monotonic() - broken
    problems = []
    left = ranks.processes()
    if code is None:
        problems.append(f"the launcher had not ended after {limit:.0f} s")
    elif code == 0:
        problems.append("the launcher ended with exit code 0")
    if left and code is not None:
        problems.append(f"processes left: {left}")
    problems += [f"left behind: {name}" for name in ranks.left_files()]
    told = ranks.told()
    if how == "stop" and training:
        expected = f"from rank {victim} (host "  # in the survivors' deadline error
    elif how == "stop":
        expected = ""
    else:
        expected = f"rank {victim} on "
    if expected not in told or (how == "raise" and training and "raised on request" not in told):
        problems.append(f"the right rank was not named: {told}")
    if training:
        problems += _check_survivors(ranks, how, victim)
    return seconds, problems


def _check_survivors(ranks: Ranks, how: str, victim: int) -> list[str]:
    """Every other rank must have ended by itself, because of the victim, and have said so."""
    problems = []
    for rank in range(ranks.world_size):
        file = ranks.logs / f"rank{rank}.error.json"
        if rank == victim:
            continue
        if not file.exists():
            problems.append(f"rank {rank} left no record of why it ended")
            continue
        record = json.loads(file.read_text())
        # Who notices that a rank is silent tells the cause itself.
        if not record["secondary"] and record["type"] != "DeadlineError":
            problems.append(f"rank {rank} calls itself the first to fail: {record['message']}")
        if f"rank {victim} (host " not in record["message"]:
            problems.append(f"rank {rank} blames another: {record['message']}")
    return problems


def _wait_for_rank(ranks: Ranks, rank: int) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ended = ranks.process.poll() is not None  # asked first: a rank is looked for once more after it
        for pid, owner in ranks.processes().items():
            if owner == rank and pid != ranks.process.pid:
                return pid
        if ended:
            raise _too_early(ranks, f"rank {rank} was running")
        time.sleep(0.02)
    raise _NotReached(f"rank {rank} did not start within 60 s: {ranks.told()}")


def _wait_for_training(ranks: Ranks) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        ended = ranks.process.poll() is not None
        if all((ranks.folder / f"training{rank}").exists() for rank in range(ranks.world_size)):
            return
        if ended:
            raise _too_early(ranks, "all ranks were training")
        time.sleep(0.02)
    raise _NotReached(f"the ranks did not train within 120 s: {ranks.told()}")


def _too_early(ranks: Ranks, before: str) -> _NotReached:
    code = ranks.process.returncode
    return _NotReached(f"the launcher ended with exit code {code} before {before}: {ranks.told()}")
