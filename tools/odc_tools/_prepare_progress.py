"""How far ``odc prepare`` is, for the user."""

from __future__ import annotations

import sys
import time
from typing import Any

from odc_tools._sources import Chunk, Source

_LINE_EVERY_S = 10.0  # where there is no bar


class Progress:
    """A bar on a terminal (by rich, if it is installed), else a line now and then, on stderr."""

    def __init__(self, sources: list[Source]) -> None:
        self._total = max(1, sum(source.size for source in sources))
        self._before: dict[Source, int] = {}
        position = 0
        for source in sources:
            self._before[source] = position
            position += source.size
        self._started = self._shown = time.perf_counter()
        self._tokens = 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import (
                    BarColumn,
                    Progress,
                    TaskProgressColumn,
                    TextColumn,
                    TimeRemainingColumn,
                )
            except ImportError:
                return self
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                auto_refresh=False,  # no thread beside processes that fork
            )
            self._task = self._bar.add_task("tokenising", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, chunk: Chunk, num_records: int, num_tokens: int) -> None:
        """Account for a finished chunk.

        Args:
            chunk: the chunk.
            num_records: records up to now.
            num_tokens: tokens of this chunk.
        """
        self._tokens += num_tokens
        now = time.perf_counter()
        done = min(self._total, self._before[chunk.source] + chunk.position)
        rate = self._tokens / max(now - self._started, 1e-9)
        text = f"{num_records:,} records, {self._tokens:,} tokens, {rate:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=text)
            if now - self._shown > 0.1:
                self._bar.refresh()
                self._shown = now
        elif now - self._shown > _LINE_EVERY_S:
            print(f"odc prepare: {done / self._total:.0%}, {text}", file=sys.stderr, flush=True)
            self._shown = now
