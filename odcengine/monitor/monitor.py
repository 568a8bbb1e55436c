"""The monitor of one rank: counts and records what it does; on rank 0 it shows and writes what all did."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from odcengine.config import Config
from odcengine.control import EventRecorder, Phase
from odcengine.data import MinibatchLoader
from odcengine.metrics import FlopsOf, StepMetrics, Tally
from odcengine.monitor.progress import Outlook, Progress, Summary, make_progress
from odcengine.monitor.recorder import Recorder
from odcengine.monitor.timeline import Timeline, draw_timelines, gather_events
from odcengine.monitor.writers import Background, Facts, JsonLines, TensorBoard, WandB, Writer, make_folder
from odcengine.start import Job

logger = logging.getLogger(__name__)

_CLOSE_S, _CLOSE_AFTER_FAILURE_S = 30.0, 3.0
_PICTURES = 8  # drawn at close: the newest timelines; `odc report timeline` draws the others
_STEPS_FOR_SPEED = 20


class Recorded(Protocol):
    """What the monitor needs of what moves parameters and gradients."""

    recorder: EventRecorder | None

    @property
    def groups(self) -> Sequence[Any]: ...


class Monitor:
    """Counts, records, shows and writes; made by ``odcengine.initialize`` on every rank.

    Only :meth:`end_step` of a recorded step is collective. What fails in showing or writing is reported once
    and switched off.

    Attributes:
        tally: what this rank has computed in the minibatch.
        recorder: this rank's events.

    Args:
        config: the configuration; ``monitor`` is the section of this class.
        job: ranks and control block.
        sharding: what moves parameters and gradients, or None.
        loader: the engine's loader, or None.
        flops_of: model FLOP of a forward and backward over sequences of given lengths, or None.

    Raises:
        ConfigError: a package is missing, or a file or folder cannot be made (on rank 0).
    """

    def __init__(
        self,
        config: Config,
        job: Job,
        sharding: Recorded,
        loader: MinibatchLoader | None,
        *,
        flops_of: FlopsOf | None,
    ) -> None:
        self._config = config
        self._options = config.monitor
        self._job = job
        self._sharding = sharding
        self._loader = loader
        self._groups = tuple(group.label for group in sharding.groups)
        lengths = loader.lengths if loader is not None and loader.knows_lengths else None
        sequences = None if lengths is None or loader is None else loader.sequences
        self.tally = Tally(lengths, sequences=sequences, has_loader=loader is not None, flops_of=flops_of)
        self.recorder = Recorder()
        self._recording = False
        self._reports = job.topology.rank == 0
        self._summary = Summary()
        self._ends: deque[float] = deque(maxlen=_STEPS_FOR_SPEED)
        self._timelines: deque[Path] = deque(maxlen=_PICTURES)
        self._progress: Progress | None = None
        self._background = Background([])
        if loader is not None:
            loader.on_load = self._loaded
        if self._reports:
            self._progress = make_progress(self._options.progress, config.steps_per_print)
            self._background = Background(self._make_writers())
            self._make_timeline_dir()

    def _make_writers(self) -> list[Writer]:
        options, writers = self._options, list[Writer]()
        if options.jsonl is not None:
            writers.append(JsonLines(options.jsonl))
        if options.tensorboard is not None:
            writers.append(TensorBoard(options.tensorboard))
        if options.wandb_project is not None:
            writers.append(WandB(options.wandb_project, self._config.resolved()))
        return writers

    def _make_timeline_dir(self) -> None:
        folder = self._options.timeline_dir
        if folder is None:
            return
        make_folder("monitor.timeline_dir", folder)
        if self._options.timeline_every > 0 and importlib.util.find_spec("matplotlib") is None:
            logger.warning(
                "monitor.timeline_dir: JSON only and no pictures, because matplotlib is not installed; "
                "install it with pip install 'odcengine[monitor]'"
            )

    def _loaded(self, start: float, end: float, sample_ids: tuple[int, ...] | None) -> None:
        self.tally.loaded(end - start, sample_ids, has_gradients=torch.is_grad_enabled())
        if self._recording:
            self.recorder.add("load", start, end)

    def balanced(self, start: float, end: float, num_samples: int, lengths: Sequence[int]) -> None:
        """``engine.balance`` has packed a micro-batch, of sequences of these lengths, in these seconds."""
        self.tally.balanced(end - start, num_samples, np.asarray(lengths, dtype=np.int64))
        if self._recording:
            self.recorder.add("load", start, end)

    def begin_step(self, step: int) -> None:
        """A minibatch begins: count from 0, and record it if it is its turn."""
        self.tally.reset()
        every = self._options.timeline_every
        self._record(every > 0 and (step + 1) % every == 0)

    def _record(self, on: bool) -> None:
        self._recording = on
        self._sharding.recorder = self._job.control.recorder = self.recorder if on else None

    def end_step(self, metrics: StepMetrics, since: float) -> None:
        """A minibatch has ended. Collective for a recorded one.

        Args:
            metrics: of the step.
            since: when the minibatch began, in seconds of ``time.perf_counter()``.

        Raises:
            PeerError: a rank failed before it handed in its timeline.
        """
        if self._recording:
            self._record(False)
            with self._job.control.phase(Phase.REPORT):
                self._end_timeline(metrics, since)
        if self._reports:
            try:
                self._report(metrics)
            except Exception as error:
                self._reports = False
                logger.warning(
                    "monitor: it is switched off, training goes on: %s: %s", type(error).__name__, error
                )

    def _end_timeline(self, metrics: StepMetrics, since: float) -> None:
        num_dropped = self.recorder.num_dropped
        gathered = gather_events(
            self.recorder.take(since), num_dropped, self._job.control, self._job.host_group
        )
        if gathered is None or self._options.timeline_dir is None:
            return
        timeline = Timeline(
            step=metrics.step,
            label=self._method(),
            hosts=self._job.topology.hosts,
            groups=self._groups,
            idle_shares=metrics.idle_shares,
            events=gathered[0],
            num_dropped=gathered[1],
        )
        path = Path(self._options.timeline_dir, f"step{metrics.step:06}.json")
        self._timelines.append(path)
        self._background.run(f"writing {path}", lambda: timeline.save(path))

    def _method(self) -> str:
        odc = self._config.odc
        if self._job.topology.world_size == 1:
            return "one rank"
        if odc.transport == "collective":
            return "collective"
        return "lock-step" if odc.lockstep else "on demand"

    def _report(self, metrics: StepMetrics) -> None:
        now = time.time()
        self._ends.append(time.perf_counter())
        minibatch = None if self._loader is None else self._loader.current
        self._summary.add(metrics, None if minibatch is None else minibatch.num_samples_without_targets)
        mfu, left = self._mfu(metrics), self._steps_left()
        self._background.write(_facts(metrics, now, mfu))
        if self._progress is not None:
            num_steps = None if left is None else metrics.step + 1 + left
            self._progress.show(metrics, Outlook(mfu, num_steps, self._left_s(left)))

    def note(self, step: int, facts: Facts, line: str | None = None) -> None:
        """Write what is no step's own: an evaluation, numbers of the script.

        Args:
            step: where it stands among the steps.
            facts: numbers by the names of their curves.
            line: to be shown, too.
        """
        if not self._reports:
            return
        self._background.write({"step": step, "time": time.time(), **facts})
        progress = self._progress
        if progress is not None and line is not None:
            self._guard("showing a line", lambda: progress.note(line))

    def _mfu(self, metrics: StepMetrics) -> float | None:
        peak = self._options.peak_tflops
        if peak is None or metrics.flops is None or not metrics.step_s:
            return None
        return metrics.flops / (metrics.step_s * peak * 1e12 * len(metrics.busy_s))

    def _steps_left(self) -> int | None:
        loader = self._loader
        if loader is None:
            return None
        done = loader.epoch * len(loader) + loader.index
        return max(0, self._config.data.num_epochs * len(loader) - done)

    def _left_s(self, steps: int | None) -> float | None:
        if steps is None or len(self._ends) < 2:
            return None
        ends = list(self._ends)
        return steps * statistics.median(b - a for a, b in itertools.pairwise(ends))

    def close(self, *, failed: bool = False) -> None:
        """Show the summary, draw the newest timelines, end the writers. Never raises.

        Args:
            failed: the run ends because of an error: only write what is left.
        """
        if self._loader is not None:
            self._loader.on_load = None
        progress, self._progress, self._reports = self._progress, None, False
        if progress is not None:
            lines = [] if failed else self._summary.lines()
            self._guard("the summary", lambda: progress.close(lines))
        self._background.close(_CLOSE_AFTER_FAILURE_S if failed else _CLOSE_S)
        if not failed:
            self._guard("drawing timelines", self._draw)

    def _draw(self) -> None:
        for path in self._timelines:
            if path.exists():
                timeline = Timeline.load(path)
                draw_timelines([(timeline.label, timeline)], path.with_suffix(".png"))

    def _guard(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            logger.warning("monitor: %s failed: %s: %s", what, type(error).__name__, error)


def _facts(metrics: StepMetrics, now: float, mfu: float | None) -> Facts:
    """A step as a line of the JSON file; ``docs/monitor.md`` explains the keys."""
    facts: dict[str, Any] = {
        "step": metrics.step,
        "time": now,
        "loss": metrics.loss,
        "count": metrics.count,
        "grad_norm": metrics.grad_norm,
        "lr": metrics.lr,
        "applied": metrics.applied,
        "num_micro_batches": metrics.num_micro_batches,
        "num_samples": metrics.num_samples,
        "num_tokens": metrics.num_tokens,
        "tokens_per_s": metrics.tokens_per_s,
        "mfu": mfu,
        "step_s": metrics.step_s,
        "boundary_s": metrics.boundary_s,
        "gather_s": metrics.gather_s,
        "push_s": metrics.push_s,
        "load_s": metrics.load_s,
        "crossed_bytes": metrics.crossed_bytes,
        "exchanged_bytes": metrics.exchanged_bytes,
        "exchange_s": metrics.exchange_s,
        "busy_s": metrics.busy_s,
        "wait_s": metrics.wait_s,
        "idle_shares": metrics.idle_shares,
        "tokens": metrics.tokens,
    }
    return facts
