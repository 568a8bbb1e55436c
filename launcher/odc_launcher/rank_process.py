"""One rank of this host: its process, its output, its files."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

from odc_launcher import failure, report
from odc_launcher.output import LineSplitter, LogFile
from odc_launcher.plan import LaunchPlan, RankPlan
from odcengine.errors import ConfigError

NEVER = float("inf")


class RankProcess:
    """A rank's process and its output.

    Attributes:
        plan: what is started.
        log: where its output goes.
        splitter: cuts its output into lines for the screen.
        process: None before it is started.
        pipe: its output's read end; None once that is closed.
        end: how it ended; None before.
        told_to_end: the launcher has signalled it to end.
        given_up: other ranks have left because they gave it up.
        term_at, kill_at: when this rank alone is sent TERM and KILL (monotonic seconds).
        log_error_told: the user knows that its log cannot be written.
    """

    def __init__(self, plan: RankPlan, log: LogFile) -> None:
        self.plan = plan
        self.log = log
        self.splitter = LineSplitter()
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: int | None = None
        self.end: failure.RankEnd | None = None
        self.told_to_end = False
        self.given_up = False
        self.term_at = self.kill_at = NEVER
        self.log_error_told = False

    @property
    def alive(self) -> bool:
        return self.process is not None and self.end is None

    def signal(self, number: signal.Signals, *, group: bool) -> None:
        """Sends a signal to the rank or to its whole group.

        The ended rank is not reaped before everything is over, so its number still names its group and
        nobody else's.
        """
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group:
                os.killpg(self.process.pid, number)
            elif self.end is None:
                os.kill(self.process.pid, number)

    def poll(self) -> int | None:
        """The return code once the process has ended; leaves it unreaped."""
        assert self.process is not None
        result = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def open_logs(plan: LaunchPlan, heading: str) -> list[RankProcess]:
    """Opens every log before anything is started, and removes error files of an earlier launch.

    Args:
        plan: the ranks.
        heading: separates what they print from what an earlier launch wrote into the same file.

    Raises:
        ConfigError: a file cannot be written.
    """
    ranks: list[RankProcess] = []
    path = plan.log_dir
    try:
        os.makedirs(plan.log_dir, exist_ok=True)
        for rank in plan.ranks:
            path = rank.error_path
            for old in (path, report.stack_path(rank.log_path, rank.rank)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(old)
            path = rank.log_path
            ranks.append(RankProcess(rank, LogFile(path, heading)))
    except OSError as error:
        for opened in ranks:
            opened.log.close()
        raise ConfigError(
            f"cannot write logs: {path}: {error.strerror}; choose another folder with --log-dir"
        ) from error
    return ranks
