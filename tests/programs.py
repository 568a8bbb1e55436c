"""Runs commands of Python, as ``subprocess.run`` does, without starting an interpreter for each process.

A training script needs four seconds of a core for its imports before its first line, on every rank of
odc-launch. Here the command's process is forked from the server of :mod:`distributed`, which has imported
what they need, and so are the Python processes that it starts itself. All else is as in a terminal:
odc-launch's own process starts the ranks, reads what they print and ends with their exit code; each process
has its own session, signals, environment, working folder, ``sys.argv``, ``sys.path`` and exit handlers.
Where GPUs are seen, only the first process is forked: CUDA does not work in forks of those that have used it.

What is read while Python starts or a library is imported (``MALLOC_``, ``HF_``) is the test process's own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

from distributed import CONTEXT, warm_up

ROOT = Path(__file__).resolve().parent.parent
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "OMP_", "ODC", "MALLOC_")
SOURCES = os.pathsep.join(str(ROOT / part) for part in ("", "launcher", "tools"))


class Program:
    """``python WORDS`` that runs in a folder.

    Args:
        words: a script or ``-m`` and a module, and arguments; of any type, as text.
        folder: where it runs.
        together: stderr goes where stdout goes.
        env: variables of its environment, beside this process's own without those that ranks are given;
            the checkout's packages are on its ``PYTHONPATH``.
    """

    def __init__(self, *words: object, folder: Path, together: bool = False, **env: str) -> None:
        warm_up()
        self.words = [str(word) for word in words]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(OF_RANKS)}
        self._own = tempfile.TemporaryDirectory()
        self._outputs = [Path(self._own.name, name) for name in ("stdout", "stderr")]
        for path in self._outputs:
            path.touch()
        self._process = CONTEXT.Process(
            daemon=True,  # what a failed test leaves behind is not waited for
            target=_program,
            args=(
                self.words,
                str(folder),
                {**inherited, "PYTHONPATH": SOURCES, **env},
                str(self._outputs[0]),
                str(self._outputs[0 if together else 1]),
            ),
        )
        self._process.start()

    def signal(self, number: signal.Signals) -> None:
        """Sends the process a signal."""
        os.kill(self._process.pid or 0, number)

    def read_until(self, pattern: str, timeout_s: float = 200.0) -> re.Match[str]:
        """What was found on stdout, as soon as it is there.

        Raises:
            AssertionError: it has ended without, or it is late.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ended = not self._process.is_alive()
            text = self._outputs[0].read_text(errors="replace")
            if found := re.search(pattern, text):
                return found
            assert not ended, text
            assert time.monotonic() < deadline, text
            time.sleep(0.01)

    def end(self, timeout_s: float = 400.0) -> subprocess.CompletedProcess[str]:
        """Waits until it has ended.

        Raises:
            subprocess.TimeoutExpired: it had not, and was killed.
        """
        self._process.join(timeout_s)
        late = self._process.is_alive()
        if late:
            self.kill()
        out, err = (path.read_text() for path in self._outputs)
        self._own.cleanup()
        if late:
            raise subprocess.TimeoutExpired(self.words, timeout_s, out, err)
        return subprocess.CompletedProcess(self.words, self._process.exitcode or 0, out, err)

    def kill(self) -> None:
        """Ends it and what it has started; ranks are killed when their launcher dies."""
        if self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it has no group yet
                os.killpg(self._process.pid or 0, signal.SIGKILL)
            self._process.kill()
            self._process.join(10)


def run_program(
    *words: object, folder: Path, timeout_s: float = 400.0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Starts a :class:`Program` and waits until it has ended."""
    return Program(*words, folder=folder, **env).end(timeout_s)


def _program(words: list[str], folder: str, env: dict[str, str], out: str, err: str) -> NoReturn:
    """In the process that the server has forked."""
    os.setsid()
    for descriptor, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(folder)
    gc.freeze()  # what the server has imported
    multiprocessing.current_process()._config["daemon"] = False
    subprocess.Popen = _Popen
    os.execv = _execv
    _interpret(words, env)


def _interpret(words: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """What ``python WORDS`` does from its first line on; ends the process."""
    import torch

    os.environ.clear()
    os.environ.update(env)
    if env.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    words = [word for number, word in enumerate(words) if number or word != "-u"]
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else list(words)
    first = os.getcwd() if is_module else str(Path(words[0]).resolve().parent)
    sys.path[:0] = [first, *env.get("PYTHONPATH", "").split(os.pathsep)]
    code, interrupted = 0, False
    try:
        try:
            if is_module:
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                _run_script(os.path.abspath(words[0]))
        except Exception:
            code = 1
            sys.excepthook(*sys.exc_info())
    except SystemExit as end:  # an exception hook may choose the code, too
        if isinstance(end.code, int):
            code = end.code
        elif end.code is not None:
            print(end.code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        interrupted = True
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _run_script(path: str) -> None:
    """As the main module, with the path in ``__file__`` only: ``sys.argv`` has what was typed."""
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))


def _execv(program: str, args: Sequence[str], exec_: Any = os.execv) -> NoReturn:
    """``os.execv``, which starts no other Python than the one that runs."""
    if program != sys.executable or _sees_gpus(os.environ):
        exec_(program, args)
    atexit._clear()
    _interpret(args[1:], dict(os.environ))


def _sees_gpus(env: Mapping[str, str]) -> bool:
    """Whether a process may have used CUDA, which does not work in forks of it."""
    return env.get("CUDA_VISIBLE_DEVICES") != "" and Path("/dev/nvidiactl").exists()


def _threads_sleep() -> bool:
    """Whether all other threads of this process wait: such hold no lock that a child needs."""
    mine, others = str(threading.get_native_id()), Path("/proc/self/task")
    for task in others.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            if task.name != mine and state != "S":
                return False
    return True


class _Popen(subprocess.Popen):
    """Forks where Python is to be started on files that are open already; else starts a program as always."""

    _KNOWN = frozenset(
        ("env", "stdin", "stdout", "stderr", "start_new_session", "pass_fds", "preexec_fn")  # odc-launch's
    )

    def __init__(self, args: Any, **settings: Any) -> None:
        if not self._can_fork(args, settings):
            super().__init__(args, **settings)
            return
        # What poll, wait and __del__ look at.
        self.args, self.returncode = args, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock, self._sigint_wait_secs = True, threading.Lock(), 0.25
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._become(args, **settings)
            except BaseException:
                traceback.print_exc()
            os._exit(255)

    def _can_fork(self, args: Any, settings: Mapping[str, Any]) -> bool:
        return (
            args[0] == sys.executable
            and not _sees_gpus(settings.get("env") or os.environ)
            and settings.keys() <= self._KNOWN
            and subprocess.PIPE not in settings.values()
            and _threads_sleep()
        )

    def _become(
        self,
        args: Sequence[str],
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        start_new_session: bool = False,
        pass_fds: Sequence[int] = (),
        preexec_fn: Any = None,
    ) -> NoReturn:
        """In the child: what exec would have left behind, and then the command."""
        environment = dict(os.environ if env is None else env)
        if start_new_session:
            os.setsid()
        for descriptor, wanted in enumerate((stdin, stdout, stderr)):
            if wanted is not None:
                source = os.open(os.devnull, os.O_RDWR) if wanted == subprocess.DEVNULL else wanted
                os.dup2(source, descriptor)
        if preexec_fn is not None:
            preexec_fn()
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # Python does so when it starts
        keep = {0, 1, 2, *pass_fds}
        for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
            if descriptor not in keep:
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(descriptor)
        resource_tracker._resource_tracker._fd = None
        atexit._clear()
        _interpret(args[1:], environment)
