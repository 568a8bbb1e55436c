"""A line of the doctor's report, and what findings depend on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from odcengine.host.nvshmem_env import Job

OK, WARNING, ERROR = "ok", "warning", "error"
LEVELS = (OK, WARNING, ERROR)


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        level: ``ok``, ``warning`` or ``error``.
        check: what was looked at.
        text: what was found.
        remedy: what to do; empty where all is well.
        hosts: where; empty for what concerns all.
    """

    level: str
    check: str
    text: str
    remedy: str = ""
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Context:
    """What the findings depend on beside the facts.

    Attributes:
        job: of the configuration.
        device: ``odc.device``.
        has_config: whether a configuration file was given.
    """

    job: Job
    device: str = "auto"
    has_config: bool = False


Findings = Iterator[Finding]
