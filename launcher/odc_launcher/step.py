"""Runs the command of a job plan: srun, mpirun or sbatch. Thin; what it runs was planned in job.py."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from odc_launcher import failure, report, slurm
from odc_launcher.children import ChildSetup, caught_signals, read_signals
from odc_launcher.early import EarlySignals
from odc_launcher.job import JobPlan
from odc_launcher.local import TERM_GRACE_S
from odc_launcher.request import parse_signals
from odcengine.errors import ConfigError
from odcengine.preemption import REQUEUE_EXIT_CODE

_COMMAND_TIMEOUT_S = 60.0
_SUBMIT_TIMEOUT_S = 300.0  # a busy controller's answer is worth waiting for: the job may be there already
_POLL_S = 0.5
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STEP_FILE = "step"
_PATIENCE_S = 20.0  # with tasks that do not tell that they run; their folder may be on another host


def find_program(*names: str) -> str | None:
    """The first of these programs that is installed."""
    return next((name for name in names if shutil.which(name) is not None), None)


def version_of(program: str) -> str:
    """What a program prints for ``--version``."""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{program} --version does not run: {error}") from error
    return done.stdout + done.stderr


def node_address(host: str) -> str | None:
    """The address of a node whose name this host does not know, as SLURM has it."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", host],
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
        for word in done.stdout.split():
            if word.startswith("NodeAddr="):
                return word.removeprefix("NodeAddr=")
    return None


def announce(log_dir: str, environ: Mapping[str, str]) -> None:
    """Rank 0's launcher tells the launch above that it runs, and as which step of SLURM, to be signalled."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    with contextlib.suppress(OSError):  # without it signals go through srun or mpirun after a while
        os.makedirs(log_dir, exist_ok=True)
        part = Path(log_dir, _STEP_FILE + ".part")
        part.write_text(".".join(environ[name] for name in names if name in environ))
        part.replace(Path(log_dir, _STEP_FILE))


def submit(plan: JobPlan) -> int:
    """Submits the batch script; prints the job's number on stdout.

    Returns:
        0, or sbatch's exit code.
    """
    environ = {name: value for name, value in os.environ.items() if name not in plan.unset} | plan.env
    assert plan.stdin is not None
    waits = any(line.split()[1:2] in (["--wait"], ["-W"]) for line in plan.stdin.splitlines())
    try:
        done = subprocess.run(
            plan.argv,
            input=os.fsencode(plan.stdin),
            env=environ,
            stdout=subprocess.PIPE,
            timeout=None if waits else _SUBMIT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        told = "it may have submitted the job all the same (squeue shows it)"
        _note(f"sbatch has not answered for {_SUBMIT_TIMEOUT_S:g} s; {told}")
        return 1
    except OSError as error:
        _note(f"sbatch does not run: {error}")
        return 1
    if done.returncode:
        _note(f"sbatch refused the job (exit code {done.returncode}); it says why above")
        return done.returncode
    number = done.stdout.decode().strip().partition(";")[0]
    if not number:  # --test-only, say
        _note("sbatch has submitted nothing; it says why above")
        return 0
    _note(f"job {number} submitted: {plan.summary}; its output is in slurm-{number}.out unless set otherwise")
    print(number, flush=True)
    return 0


def requeue(environ: Mapping[str, str], exit_code: int, max_requeues: int) -> None:
    """Makes SLURM run the job again where the ranks ask for it. A failure is told and changes nothing."""
    argv = slurm.requeue_argv(environ, exit_code, max_requeues)
    if argv is None:
        return
    if _is_cancelled(argv[-1]):
        _note(f"the ranks ended with {exit_code}, but the job was cancelled: it is not requeued")
        return
    _note(f"the ranks ended with {exit_code}, to go on in a new run: {' '.join(argv)}")
    try:
        done = subprocess.run(argv, timeout=_COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        _note(f"the job is not requeued: {error}")
    else:
        if done.returncode:
            _note(f"the job is not requeued: scontrol ended with {done.returncode}")


def _is_cancelled(job: str) -> bool:
    """Whether somebody has cancelled the job; SLURM would run it again all the same."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        argv = ("scontrol", "show", "job", "--oneliner", job)
        shown = subprocess.run(argv, timeout=_COMMAND_TIMEOUT_S, check=False, capture_output=True, text=True)
        return "JobState=CANCELLED" in shown.stdout
    return False


def run(
    plan: JobPlan, environ: Mapping[str, str] | None = None, early: EarlySignals | None = None
) -> failure.Outcome:
    """Starts the step and waits for it; signals are passed on to all of its ranks.

    Args:
        plan: the step.
        environ: what its command inherits; by default this process's environment.
        early: what has come before; a signal of ``preemption`` among it ends the job before it starts.

    Returns:
        With exit code 0, or that of the rank that failed first, or that of srun or mpirun where no rank tells
        of a failure, or 75 where a signal of ``preemption`` ended what could not act on it.

    Raises:
        ConfigError: the log folder cannot be written, or the command cannot be started.
    """
    assert plan.log_dir is not None
    try:
        os.makedirs(plan.log_dir, exist_ok=True)
        failure.remove_ends(plan.log_dir)
        Path(plan.log_dir, _STEP_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write logs: {plan.log_dir}: {error.strerror}; choose another folder with --log-dir"
        ) from error
    inherited = os.environ if environ is None else environ
    env = {name: value for name, value in inherited.items() if name not in plan.unset} | plan.env
    with caught_signals(parse_signals(plan.request.signals)[0]) as (caught, wakeup):
        if early is not None and early.came is not None:
            _note(f"{early.came.name} came before the ranks were started: to go on in a new run")
            return failure.Outcome(REQUEUE_EXIT_CODE, None, stopped=True, asked_by=early.came.name)
        # Held back until the child has set its own handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, caught)
        try:
            process = subprocess.Popen(
                plan.argv,
                env=env,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=ChildSetup(caught, signal.SIGTERM),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"{plan.argv[0]} cannot be started: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, caught)
        watch = _Watch(plan, process, wakeup)
        returncode = watch.wait()
    ends, signals, sent = failure.read_ends(plan.log_dir), plan.request.preemption_signals, watch.asked_by
    preempted = None
    if sent is not None or not watch.stopping:  # else mpirun has made a TERM for the ranks of it
        preempted = failure.preempted(ends, plan.world_size, signals, sent)
    for line in report.report(ends, preempted=preempted):
        _note(line)
    first = failure.primary(ends)
    code = failure.exit_code(returncode if first is None else first.returncode)
    if first is None and returncode:
        _note(f"{plan.argv[0]} ended with {failure.describe(returncode)}; it says why above")
        # Its tasks may have been ended before they could tell.
        told = next((number.name for number in signals - {signal.SIGTERM} if code == 128 + number), None)
        preempted = sent or (None if watch.stopping else told)
        if preempted is not None:
            _note(f"{preempted} came before the ranks could tell how they ended: to go on in a new run")
    silent = set(range(plan.world_size)) - {end.rank for end in ends}
    if code and silent and preempted is None and not watch.stopping:
        _note(
            f"no word of {report.ranges(silent)} in {plan.log_dir}: they ended before they could tell, or "
            "their hosts do not share that folder (--log-dir) and have it themselves"
        )
    if preempted is not None:
        code = REQUEUE_EXIT_CODE
    asked_by = sent or failure.asked_by(ends)
    return failure.Outcome(code, first, stopped=watch.stopping, asked_by=asked_by)


class _Watch:
    """Waits for srun or mpirun and passes signals on.

    Attributes:
        stopping: a signal has asked for the end.
        asked_by: the signal of ``preemption`` that has come; None also where a second one took its place.
    """

    def __init__(self, plan: JobPlan, process: subprocess.Popen[bytes], wakeup: int) -> None:
        self._plan = plan
        self._process = process
        self._wakeup = wakeup
        self.stopping = False
        self.asked_by: str | None = None
        self._num_asked = 0
        self._waiting: list[signal.Signals] = []  # the tasks have not told yet that they run
        self._patient_until = 0.0
        self._term_at = self._kill_at = float("inf")

    def wait(self) -> int:
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        while self._process.poll() is None:
            poll.poll(_POLL_S * 1000)
            for number in read_signals(self._wakeup):
                self._take(number)
            now = time.monotonic()
            patient = self._plan.mode == "slurm" or now < self._patient_until
            if self._waiting and not (patient and self._step() is None):
                for number in self._waiting:
                    self._pass_on(number)
                self._waiting.clear()
            if now >= self._term_at:  # srun and mpirun end their ranks at once then
                self._process.send_signal(signal.SIGTERM)
                self._term_at, self._kill_at = float("inf"), now + 2 * TERM_GRACE_S
            if now >= self._kill_at:
                self._process.kill()
                self._kill_at = float("inf")
        return int(self._process.wait())

    def _take(self, number: signal.Signals) -> None:
        if number in self._plan.request.preemption_signals:
            self._num_asked += 1
            self.asked_by = number.name if self._num_asked == 1 else None
        if number in _STOPS:
            if self.stopping:
                self.asked_by = None
                _note(f"{number.name} again: ending all ranks")
                self._term_at = 0.0
                return
            self.stopping = True
            grace_s = self._plan.request.grace_after(number)
            _note(
                f"{number.name}: passed on to the ranks, which have {grace_s:g} s to end; "
                "a second one kills them"
            )
            self._term_at = time.monotonic() + grace_s + TERM_GRACE_S
        else:
            _note(f"{number.name}: passed on to the ranks")
        # mpirun would take another signal than those that end it for one to tasks that are not there yet.
        if (self._plan.mode == "slurm" or number not in _STOPS) and self._step() is None:
            self._waiting.append(number)
            self._patient_until = time.monotonic() + _PATIENCE_S
        else:
            self._pass_on(number)

    def _pass_on(self, number: signal.Signals) -> None:
        """To every process of the step; srun itself would kill the ranks at once for INT and TERM."""
        if self._plan.mode == "slurm":
            command = ["scancel", f"--signal={number.name.removeprefix('SIG')}", str(self._step())]
            try:
                done = subprocess.run(command, timeout=_COMMAND_TIMEOUT_S, check=False)
                if done.returncode == 0:
                    return
            except (OSError, subprocess.TimeoutExpired) as error:
                _note(f"scancel does not run ({error}); {number.name} goes to srun")
        self._process.send_signal(number)

    def _step(self) -> str | None:
        assert self._plan.log_dir is not None
        try:
            return Path(self._plan.log_dir, _STEP_FILE).read_text()
        except OSError:
            return None


def _note(text: str) -> None:
    print(f"odc-launch: {text}", file=sys.stderr, flush=True)
