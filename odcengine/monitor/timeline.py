"""The timeline of a minibatch: what every rank did when, as a Chrome trace and as a picture.

The file is JSON in the Trace Event Format (object form), which https://ui.perfetto.dev and chrome://tracing
open: a process a host, a thread a rank, one complete event (``"ph": "X"``, times in microseconds from the
start of the minibatch) for everything recorded.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from odcengine._collectives import all_gather
from odcengine.control import ControlBlock
from odcengine.errors import ConfigError
from odcengine.monitor.figure import new_figure, save
from odcengine.monitor.recorder import KINDS, NumberedEvent
from odcengine.topology import Topology

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

_FORMAT = "odcengine timeline 1"
_COLUMNS = 5

# What is drawn under which name, and in which colour; later ones over earlier ones.
_LAYERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("forward", "#7fa8d6", ("forward",)),
    ("backward", "#34659d", ("backward",)),
    ("boundary", "#9a9a9a", ("collect", "agree", "update", "publish", "fetch")),
    ("loading data", "#b58fc4", ("load",)),
    ("gather", "#3f9b4f", ("gather",)),
    ("push", "#a5d46a", ("push",)),
    ("in a collective (data and waiting)", "#f0953b", ("all_gather", "reduce_scatter")),
    ("waiting for other ranks", "#d9413f", ("barrier", "wait")),
)


@dataclass(frozen=True)
class Timeline:
    """What every rank did in one minibatch.

    Attributes:
        step: number of the optimizer step, from 0.
        label: how ranks communicated, for titles.
        hosts: host of each rank.
        groups: names of the groups of parameters.
        idle_shares: for each rank the share of the minibatch that it waited.
        events: for each rank its events, in seconds of rank 0's clock.
        num_dropped: events that found no room, over all ranks.
    """

    step: int
    label: str
    hosts: tuple[str, ...]
    groups: tuple[str, ...]
    idle_shares: tuple[float, ...]
    events: tuple[tuple[NumberedEvent, ...], ...]
    num_dropped: int = 0

    def to_trace(self) -> dict[str, Any]:
        """The timeline as an object of the Trace Event Format."""
        begin = min((event[1] for events in self.events for event in events), default=0.0)
        hosts = list(dict.fromkeys(self.hosts))
        trace: list[dict[str, Any]] = []
        for pid, host in enumerate(hosts):
            trace.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": host}})
        for rank, events in enumerate(self.events):
            place = {"pid": hosts.index(self.hosts[rank]), "tid": rank}
            trace.append({"ph": "M", "name": "thread_name", **place, "args": {"name": f"rank {rank}"}})
            trace.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": rank}})
            for kind, start, end, micro_batch, group in events:
                args: dict[str, Any] = {}
                if micro_batch >= 0:
                    args["micro_batch"] = micro_batch
                if group >= 0:
                    args["group"] = self.groups[group]
                trace.append(
                    {
                        "ph": "X",
                        "name": kind,
                        "cat": "odc",
                        "ts": round((start - begin) * 1e6, 3),
                        "dur": round((end - start) * 1e6, 3),
                        **place,
                        "args": args,
                    }
                )
        return {
            "traceEvents": trace,
            "displayTimeUnit": "ms",
            "otherData": {
                "format": _FORMAT,
                "step": self.step,
                "label": self.label,
                "hosts": list(self.hosts),
                "groups": list(self.groups),
                "idle_shares": list(self.idle_shares),
                "num_dropped": self.num_dropped,
            },
        }

    @classmethod
    def from_trace(cls, trace: Any) -> Timeline:
        """The timeline of what :meth:`to_trace` returned.

        Raises:
            ValueError: it is something else.
        """
        about = trace.get("otherData") if isinstance(trace, dict) else None
        if not isinstance(about, dict) or about.get("format") != _FORMAT:
            raise ValueError("it was not written by odcengine's monitor")
        groups = {name: index for index, name in enumerate(about["groups"])}
        events: list[list[NumberedEvent]] = [[] for _ in about["hosts"]]
        for event in trace["traceEvents"]:
            if event["ph"] == "X":
                start, args = event["ts"] / 1e6, event["args"]
                group = groups.get(args.get("group"), -1)
                micro_batch = args.get("micro_batch", -1)
                events[event["tid"]].append(
                    (event["name"], start, start + event["dur"] / 1e6, micro_batch, group)
                )
        return cls(
            step=about["step"],
            label=about["label"],
            hosts=tuple(about["hosts"]),
            groups=tuple(about["groups"]),
            idle_shares=tuple(about["idle_shares"]),
            events=tuple(map(tuple, events)),
            num_dropped=about["num_dropped"],
        )

    def save(self, path: Path) -> None:
        """Write :meth:`to_trace` as JSON; the file is complete or not there."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(self.to_trace(), separators=(",", ":")), encoding="ascii")
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: Path) -> Timeline:
        """Read what :meth:`save` wrote.

        Raises:
            ConfigError: there is no such file, or it holds something else.
        """
        try:
            return cls.from_trace(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}: is no timeline ({error}); expected a JSON file from monitor.timeline_dir"
            ) from None


def gather_events(
    events: Sequence[NumberedEvent],
    num_dropped: int,
    control: ControlBlock,
    host_group: dist.ProcessGroup,
) -> tuple[tuple[tuple[NumberedEvent, ...], ...], int] | None:
    """Bring all ranks' events to rank 0, on rank 0's clock. Collective over ``host_group``.

    Ranks of one machine share a clock. Another machine's clock is set so that the agreement on norm and
    counts, the one point where all ranks of a job meet, ends at the same time as on rank 0's machine: right
    within the time of a small all-reduce.

    Args:
        events: this rank's.
        num_dropped: how many it has no record of.
        control: the control block; every wait goes through it.
        host_group: gloo group of all ranks.

    Returns:
        On rank 0 the events of each rank and the sum of ``num_dropped``, on the others None.

    Raises:
        PeerError: another rank failed or did not come.
    """
    topology = control.topology
    rows = torch.tensor(
        [
            (KINDS.index(kind), round(start * 1e9), round(end * 1e9), micro_batch, group)
            for kind, start, end, micro_batch, group in events
            if kind in KINDS
        ],
        dtype=torch.int64,
    ).view(-1, _COLUMNS)
    if topology.world_size == 1:
        return (_decode(rows),), num_dropped
    sizes = torch.zeros(topology.world_size, 2, dtype=torch.int64)
    own = torch.tensor([[len(rows), num_dropped]])
    work = all_gather(sizes, own, group=host_group, async_op=True)
    control.wait_work(work, "the sizes of the timeline")
    padded = torch.zeros(int(sizes[:, 0].max()), _COLUMNS, dtype=torch.int64)
    padded[: len(rows)] = rows
    received = None
    if topology.rank == 0:
        received = [torch.empty_like(padded) for _ in range(topology.world_size)]
    gathered = dist.gather(padded, received, dst=0, group=host_group, async_op=True)
    control.wait_work(gathered, "the timeline")
    if received is None:
        return None
    decoded = [_decode(r[:size]) for r, size in zip(received, sizes[:, 0].tolist(), strict=True)]
    return tuple(align(decoded, topology)), int(sizes[:, 1].sum())


def _decode(rows: torch.Tensor) -> tuple[NumberedEvent, ...]:
    return tuple(
        (KINDS[kind], start / 1e9, end / 1e9, micro_batch, group)
        for kind, start, end, micro_batch, group in rows.tolist()
    )


def align(events: Sequence[tuple[NumberedEvent, ...]], topology: Topology) -> list[tuple[NumberedEvent, ...]]:
    """Put the events of all machines on the clock of rank 0's, as :func:`gather_events` says."""
    ends: dict[str, list[float]] = {}
    for machine, of_rank in zip(topology.machines, events, strict=True):
        ends.setdefault(machine, []).extend(end for kind, _, end, _, _ in of_rank if kind == "agree")
    meet = {machine: statistics.median(times) for machine, times in ends.items() if times}
    ours = meet.get(topology.machines[0])
    aligned = []
    for machine, of_rank in zip(topology.machines, events, strict=True):
        shift = 0.0 if ours is None or machine not in meet else ours - meet[machine]
        aligned.append(
            tuple((kind, start + shift, end + shift, m, g) for kind, start, end, m, g in of_rank)
            if shift
            else of_rank
        )
    return aligned


def draw_timelines(timelines: Sequence[tuple[str, Timeline]], path: Path) -> None:
    """Draw timelines one above the other on a common time axis, a row a rank, as PNG.

    Args:
        timelines: a name and a timeline for each panel, from the top.
        path: the picture.

    Raises:
        ConfigError: matplotlib is missing.
    """
    figure = new_figure(13, height_of(timelines))
    plot_timelines(timelines, figure)
    save(figure, path)


def height_of(timelines: Sequence[tuple[str, Timeline]]) -> float:
    """Inches that :func:`plot_timelines` needs."""
    heights = _heights(timelines)
    return sum(heights) + 0.75 * len(heights) + 0.9


def _heights(timelines: Sequence[tuple[str, Timeline]]) -> list[float]:
    rows = [len(timeline.events) for _, timeline in timelines]
    return [max(0.55 * count, 1.1) if count <= 16 else 9.0 for count in rows]


def plot_timelines(timelines: Sequence[tuple[str, Timeline]], figure: FigureBase) -> None:
    """Draw what :func:`draw_timelines` does into a figure, or part of one, of constrained layout."""
    from matplotlib.patches import Patch

    panels = figure.subplots(
        len(timelines), 1, squeeze=False, sharex=True, height_ratios=_heights(timelines)
    )[:, 0]
    shown: dict[str, str] = {}
    for panel, (name, timeline) in zip(panels, timelines, strict=True):
        begin = min((event[1] for events in timeline.events for event in events), default=0.0)
        for label, colour, kinds in _LAYERS:
            for rank, events in enumerate(timeline.events):
                bars = [(e[1] - begin, e[2] - e[1]) for e in events if e[0] in kinds]
                if bars:
                    shown[label] = colour
                    panel.broken_barh(bars, (rank - 0.4, 0.8), facecolors=colour, linewidth=0)
        panel.set_title(f"{name}, step {timeline.step}: {_idle(timeline.idle_shares)}", loc="left")
        panel.set_ylim(len(timeline.events) - 0.4, -0.6)
        few = len(timeline.events) <= 16
        ticks = range(0, len(timeline.events), 1 if few else max(1, len(timeline.events) // 16))
        panel.set_yticks(list(ticks), [f"rank {rank}" for rank in ticks])
        panel.tick_params(axis="y", length=0)
        panel.grid(axis="x", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
    panels[-1].set_xlabel("seconds from the start of the minibatch")
    panels[-1].set_xlim(left=0.0)
    order = [(label, shown[label]) for label, _, _ in _LAYERS if label in shown]
    figure.legend(
        handles=[Patch(color=colour, label=label) for label, colour in order],
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )


def _idle(shares: Sequence[float]) -> str:
    if len(shares) <= 8:
        return "idle " + ", ".join(f"{share:.1%}" for share in shares)
    worst = max(range(len(shares)), key=shares.__getitem__)
    return f"idle {statistics.fmean(shares):.1%} on average, most on rank {worst}: {shares[worst]:.1%}"


def draw_files(paths: Iterable[Path], out: Path, names: Sequence[str] = ()) -> None:
    """Draw timeline files one above the other.

    Args:
        paths: JSON files that the monitor wrote, from the top.
        out: the picture (PNG).
        names: titles of the panels; by default how the ranks communicated.

    Raises:
        ConfigError: a file is no timeline, or matplotlib is missing.
    """
    timelines = [Timeline.load(path) for path in paths]
    titles = list(names) or [timeline.label for timeline in timelines]
    if len(titles) != len(timelines):
        raise ConfigError(f"{len(titles)} names for {len(timelines)} timelines; give one for each")
    draw_timelines(list(zip(titles, timelines, strict=True)), out)
