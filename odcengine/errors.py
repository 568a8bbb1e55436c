"""Errors that users of odcengine see.

Every message names the thing, the place and the right form. The classes say who is to blame: the
configuration (:class:`ConfigError`), a call of the user's own script (:class:`UsageError`), or another
rank (:class:`PeerError`).
"""

from __future__ import annotations


class OdcError(RuntimeError):
    """Base class of the errors that odcengine raises itself."""


class ConfigError(OdcError, ValueError):
    """A configuration or an environment that cannot work; found before any process starts if possible.

    Args:
        problems: one line a problem, each naming its place and the right form.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class UsageError(OdcError):
    """A call that the engine cannot honour, for example ``backward`` after ``close``."""


class CheckpointError(OdcError):
    """A checkpoint that cannot be written or read; the message names the file, the reason and the rank."""


class PeerError(OdcError):
    """Another rank failed, left or stopped; this rank ends because of it.

    Args:
        message: names the rank, its host, the step and the cause.
        rank: the global rank that is to blame, or None where it is not known.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class DeadlineError(PeerError):
    """A wait ran past its deadline; the message names peer, operation, step and limit.

    Args:
        message: of the error.
        rank: the global rank that is to blame, or None where it is not known.
        report: where all ranks are, in lines; empty where that is not known.
    """

    def __init__(self, message: str, rank: int | None = None, report: str = "") -> None:
        super().__init__(message, rank)
        self.report = report
