"""Where the time of one minibatch goes: a trace of torch.profiler, and how the host feeds the device."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from odc_tools.bench.ranks import Ranks

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_CALLS = frozenset({"cuda_runtime", "cuda_driver"})
_LAUNCHES = ("Launch", "Memcpy", "Memset")
_ON_HOST = frozenset({"cpu_op", "user_annotation"}) | _CALLS
_LONG_GAP_US = 10.0
_MOST = 30


class Profile:
    """Records one minibatch on rank 0; on other ranks it only takes the times.

    Args:
        ranks: this rank.
        folder: where the Chrome trace goes.
        name: of the method.
    """

    def __init__(self, ranks: Ranks, folder: str, name: str) -> None:
        self._path = Path(folder) / f"{name.replace('/', '-')}.json"
        self._profile: profile | None = None
        if ranks.rank == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            activities = [ProfilerActivity.CPU]
            if ranks.on_gpu:
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
        self._start = self._host_s = self._wall_s = 0.0

    def __enter__(self) -> Profile:
        if self._profile is not None:
            self._profile.start()
        return self

    def begin(self) -> None:
        """The minibatch begins."""
        self._start = time.perf_counter()

    def host_done(self) -> None:
        """The host has enqueued everything."""
        self._host_s = time.perf_counter() - self._start

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wall_s = time.perf_counter() - self._start
        if self._profile is not None:
            self._profile.stop()

    def figures(self, *, layers: int, micro_batches: int) -> dict[str, Any]:
        """Write the trace and count in it; on other ranks than 0 nothing.

        Args:
            layers: of the model.
            micro_batches: that this rank has run.

        Returns:
            ``host_s`` until everything was enqueued, ``wall_s`` until the device was done (both with the
            profiler's own cost), and the figures of :func:`read_trace`.
        """
        if self._profile is None:
            return {}
        self._profile.export_chrome_trace(str(self._path))
        events = json.loads(self._path.read_text(encoding="utf-8"))["traceEvents"]
        found = read_trace(events)
        per_layer = found["launches"] / (layers * micro_batches) if micro_batches else 0.0
        return {
            "trace": str(self._path),
            "torch": torch.__version__,
            "host_s": self._host_s,
            "wall_s": self._wall_s,
            "micro_batches": micro_batches,
            "launches_per_layer": per_layer,
            **found,
        }


def read_trace(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Count in a Chrome trace of torch.profiler.

    Args:
        events: its ``traceEvents``; times are in microseconds.

    Returns:
        ``operators``: calls of torch's operators on the host; ``launches``: kernels, copies and fills that it
        enqueued; ``kernels``: of them on the device; ``device_busy_s``: time in which at least one ran;
        ``device_idle_s``: time between the first and the last in which none did; ``long_gaps`` and
        ``long_gaps_s``: number and sum of the times of more than 10 us in which none did; ``host_self_s``:
        by name, the seconds of what the host spent most time on, without what it called, over all threads.
    """
    operators = launches = 0
    threads: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    intervals: list[tuple[float, float]] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        category = event.get("cat")
        if category in _ON_DEVICE:
            intervals.append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
            continue
        if category in _ON_HOST:
            threads.setdefault((event.get("pid"), event.get("tid")), []).append(event)
        if category in _CALLS:
            launches += any(word in event["name"] for word in _LAUNCHES)
        elif category == "cpu_op":
            operators += 1
    intervals.sort()
    gaps: list[float] = []
    busy = end = 0.0
    for i, (first, last) in enumerate(intervals):
        if i and first > end:
            gaps.append(first - end)
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    long_gaps = [gap for gap in gaps if gap > _LONG_GAP_US]
    return {
        "operators": operators,
        "launches": launches,
        "kernels": len(intervals),
        "device_busy_s": busy / 1e6,
        "device_idle_s": sum(gaps) / 1e6,
        "long_gaps": len(long_gaps),
        "long_gaps_s": sum(long_gaps) / 1e6,
        "host_self_s": _self_times(threads.values()),
    }


def _self_times(threads: Iterable[list[dict[str, Any]]]) -> dict[str, float]:
    """Seconds that calls took themselves, longest first, by name."""
    spent: dict[str, float] = {}
    for events in threads:
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        callers: list[dict[str, Any]] = []
        for event in events:
            while callers and event["ts"] >= callers[-1]["ts"] + callers[-1]["dur"]:
                callers.pop()
            if callers:
                spent[callers[-1]["name"]] -= event["dur"] / 1e6
            spent[event["name"]] = spent.get(event["name"], 0.0) + event["dur"] / 1e6
            callers.append(event)
    most = sorted(spent.items(), key=lambda item: -item[1])
    return dict(most[:_MOST])
