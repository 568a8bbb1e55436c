"""The monitor's parts by themselves: files cut off, missing packages, private data, pictures, clocks."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import math
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from odc_tools.cli import main as odc

from odcengine.data import pack_samples
from odcengine.errors import ConfigError
from odcengine.metrics import StepMetrics, Tally
from odcengine.monitor import Monitor, Recorder, Timeline, draw_timelines
from odcengine.monitor.progress import (
    Bar,
    Lines,
    Outlook,
    Summary,
    count,
    describe_step,
    duration,
    make_progress,
    shares,
)
from odcengine.monitor.recorder import MAX_EVENTS
from odcengine.monitor.timeline import align
from odcengine.monitor.writers import Background, Facts, JsonLines, TensorBoard, WandB, make_folder
from odcengine.topology import Topology

METRICS = StepMetrics(
    step=4,
    loss=2.5,
    count=100.0,
    grad_norm=0.75,
    applied=True,
    lr=1e-4,
    num_micro_batches=3,
    busy_s=(1.0, 0.5),
    wait_s=(0.0, 0.5),
    boundary_s=0.25,
    gather_s=0.1,
    push_s=0.1,
    num_samples=8,
    tokens=(700, 300),
    flops=1e9,
    load_s=0.01,
)
FACTS: Facts = {**dataclasses.asdict(METRICS), "idle_shares": METRICS.idle_shares, "tokens_per_s": 800.0}


# ---- JSON lines --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        (b"", b""),
        (b'{"step":0}\n', b'{"step":0}\n'),
        (b'{"step":0}\n{"step":1,"lo', b'{"step":0}\n'),
        (b'{"step":0,"lo', b""),
        (b'{"step":0}\n{"step":1}', b'{"step":0}\n{"step":1}\n'),
    ],
)
def test_a_line_cut_off_by_a_crash_is_removed(tmp_path: Path, before: bytes, kept: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before)
    writer = JsonLines(str(path))
    writer.write({"step": 5, "loss": math.nan, "mfu": None, "busy_s": (1.0, math.inf)})
    # Flushed: another process sees it before the file is closed.
    assert path.read_bytes() == kept + b'{"step":5,"loss":null,"mfu":null,"busy_s":[1.0,null]}\n'
    writer.close()


@pytest.mark.parametrize("before", [b"train_batch_size: 32\n", b'{\n "a": 1\n}', b"x" * (3 << 20)])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, before: bytes) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(before)
    with pytest.raises(ConfigError, match=r"config\.yaml exists and was not written by the monitor"):
        JsonLines(str(path))
    assert path.read_bytes() == before


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    """/proc takes no files, also not from root."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"monitor\.timeline_dir: /proc cannot be written to: "):
        make_folder("monitor.timeline_dir", "/proc")
    with pytest.raises(ConfigError, match=r"monitor\.tensorboard: /proc cannot be written to: "):
        TensorBoard("/proc")
    with pytest.raises(ConfigError, match=r"monitor\.tensorboard: .*/file cannot be made: File exists"):
        TensorBoard(str(tmp_path / "file"))
    make_folder("monitor.timeline_dir", str(tmp_path / "a" / "b"))
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_pictures_that_will_be_missing_are_named_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = SimpleNamespace(timeline_dir=str(tmp_path), timeline_every=1)
    Monitor._make_timeline_dir(SimpleNamespace(_options=options))  # type: ignore[arg-type]
    assert caplog.messages == []
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    Monitor._make_timeline_dir(SimpleNamespace(_options=options))  # type: ignore[arg-type]
    (message,) = caplog.messages
    assert "matplotlib is not installed; install it with pip install 'odcengine[monitor]'" in message


def test_lines_of_two_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writers = [JsonLines(str(path)) for _ in range(2)]
    for step in range(10):
        writers[step % 2].write({"step": step, "text": "x" * 3000})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(10))


# ---- the writing thread ------------------------------------------------------------------------------


class _Hangs:
    name = "a writer that hangs"

    def __init__(self) -> None:
        self.release = threading.Event()

    def write(self, facts: Facts) -> None:
        self.release.wait(120)

    def close(self) -> None:
        pass


def test_a_writer_that_hangs_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    writer = _Hangs()
    background = Background([writer])
    start = time.monotonic()
    for _ in range(10_050):
        background.write(FACTS)
    background.close(timeout_s=0.2)
    assert time.monotonic() - start < 60  # half of what the writer takes
    assert [r.getMessage() for r in caplog.records] == [
        "monitor: writing hangs; from here on steps are missing in what it writes",
        "monitor: writing did not end within 0.2 s and is given up",
    ]
    writer.release.set()


class _Breaks:
    name = "a writer that breaks"

    def __init__(self) -> None:
        self.calls = 0

    def write(self, facts: Facts) -> None:
        self.calls += 1
        raise ValueError("no more")

    def close(self) -> None:
        self.calls += 100


def test_a_broken_writer_is_switched_off_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = _Breaks(), JsonLines(str(tmp_path / "metrics.jsonl"))
    background = Background([broken, sound])
    for _ in range(3):
        background.write(FACTS)
    background.close(timeout_s=10)
    assert broken.calls == 101  # one step, and it was closed
    assert [r.getMessage() for r in caplog.records] == [
        "a writer that breaks is switched off, training goes on: ValueError: no more"
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


# ---- TensorBoard and W&B -----------------------------------------------------------------------------


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoard(str(tmp_path / "curves"))
    writer.write({**FACTS, "step": 0, "tokens_per_s": None})
    writer.write({**FACTS, "step": 1})
    writer.close()
    curves = EventAccumulator(str(tmp_path / "curves"))
    curves.Reload()
    assert [(e.step, e.value) for e in curves.Scalars("train/loss")] == [(0, 2.5), (1, 2.5)]
    assert [(e.step, e.value) for e in curves.Scalars("speed/tokens_per_s")] == [(1, 800.0)]
    assert [(e.step, e.value) for e in curves.Scalars("idle/rank_1")] == [(0, 0.5), (1, 0.5)]
    assert curves.Scalars("idle/mean")[0].value == 0.25


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch.utils.tensorboard", "wandb", "matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"monitor\.tensorboard: .* pip install 'odcengine\[monitor\]'"):
        TensorBoard(str(tmp_path))
    with pytest.raises(ConfigError, match=r"monitor\.wandb_project: .* pip install wandb"):
        WandB("mine", {})
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ConfigError, match=r"matplotlib; .* pip install 'odcengine\[monitor\]'"):
        draw_timelines([("a", _timeline())], tmp_path / "a.png")


def test_wandb_gets_numbers_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    calls: list[tuple[str, Any]] = []

    class Settings:
        def __init__(self) -> None:
            self.console, self.disable_code, self.disable_git, self.x_disable_meta = (
                "auto",
                False,
                False,
                False,
            )

    run = SimpleNamespace(
        log=lambda data, step: calls.append(("log", (data, step))),
        finish=lambda: calls.append(("finish", None)),
    )

    def init(**arguments: Any) -> Any:
        calls.append(("init", arguments))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Settings=Settings, init=init))
    writer = WandB("mine", {"seed": 1})
    assert calls == []  # nothing is sent before there is a step
    writer.write(FACTS)
    writer.close()
    assert [name for name, _ in calls] == ["init", "log", "finish"]
    arguments = calls[0][1]
    assert set(arguments) == {"project", "config", "settings"}
    assert (arguments["project"], arguments["config"]) == ("mine", {"seed": 1})
    settings = vars(arguments["settings"])
    assert settings == {"console": "off", "disable_code": True, "disable_git": True, "x_disable_meta": True}
    data, step = calls[1][1]
    assert step == 4
    assert data["train/loss"] == 2.5
    assert all(isinstance(value, float) for value in data.values())
    assert "hunter2" not in repr(calls)


# ---- what a person sees ------------------------------------------------------------------------------


def test_a_line_names_what_is_known() -> None:
    assert describe_step(METRICS, Outlook(mfu=0.41, num_steps=9, left_s=3725)) == (
        "loss 2.5000, 800 tokens/s, idle 0.0% 50.0%, 1:02:05 left, MFU 41.0%, grad norm 0.75, lr 0.0001"
    )
    unknown = dataclasses.replace(METRICS, tokens=None, loss=math.nan, applied=False)
    assert describe_step(unknown, Outlook()) == (
        "loss nan (skipped), idle 0.0% 50.0%, grad norm 0.75, lr 0.0001"
    )
    assert shares([0.01] * 60 + [0.09]) == "1.1% (rank 60: 9.0%)"
    assert [count(n) for n in (7, 999, 1234, 5.67e6, 2e9)] == ["7", "999", "1.23k", "5.67M", "2G"]
    assert [count(n) for n in (999.4, 999.5, 999_499, 999_500)] == ["999", "1k", "999k", "1M"]
    assert duration(2 * 86400 + 61) == "2 d 0:01:01"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    threads = set(threading.enumerate())
    bar = make_progress("auto", 10)
    assert isinstance(bar, Bar)
    bar.show(METRICS, Outlook(num_steps=20, left_s=30.0))
    assert set(threading.enumerate()) <= threads
    bar.close(["summary: [all] is well"])
    shown = terminal.getvalue()
    assert "5/20" in shown
    assert "loss 2.5000, 800 tokens/s" in shown
    assert "0:00:30 left" in shown
    assert "summary: [all] is well" in shown


def test_progress_follows_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_progress("auto", 10), Lines)  # pytest's stderr is no terminal
    assert isinstance(make_progress("lines", 10), Lines)
    assert make_progress("lines", None) is make_progress("auto", 0) is make_progress("off", 10) is None
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert isinstance(make_progress("bar", 10), Lines)


def test_summary_adds_up() -> None:
    summary = Summary()
    assert summary.lines() == []
    summary.add(METRICS, 2)
    summary.add(dataclasses.replace(METRICS, applied=False, boundary_s=0.75), None)
    assert summary.lines() == [
        "summary: 2 steps in 0:00:03, 1 skipped; 16 samples, 2k tokens; last loss 2.5000",
        "summary: median 686 tokens/s; idle 0.0% 50.0%; 33.3% of the time at the boundary",
        "summary: 2 samples had no token with a target and taught nothing",
    ]


def test_tally_counts_only_what_a_backward_followed() -> None:
    tally = Tally(np.array([5, 7, 11]), has_loader=True, flops_of=lambda lengths: 2.0 * lengths.sum())
    tally.loaded(0.5, None)  # planning
    tally.loaded(0.25, (0, 2))
    tally.backward()
    tally.backward()  # a second loss on the same micro-batch
    tally.loaded(0.25, ())  # a stand-in
    tally.backward()
    tally.loaded(0.0, (1,))  # looked at, never computed
    assert (tally.samples, tally.tokens, tally.flops, tally.load_s) == (2, 16, 32, 1.0)


def test_tally_counts_samples_once_that_are_evaluated_before() -> None:
    """A script goes through a planned minibatch for log-probabilities first, then trains on it."""
    for has_gradients, says_so in (
        (True, True),
        (False, False),
    ):  # a forward without them; a loop without them
        tally = Tally(np.array([5, 7]), has_loader=True, flops_of=lambda lengths: 2.0 * lengths.sum())
        for sample in (0, 1):
            tally.loaded(0.0, (sample,), has_gradients=has_gradients)
            if says_so:
                tally.evaluated()
        for sample in (0, 1):
            tally.loaded(0.0, (sample,))
            tally.evaluated()  # of a reference model, beside the one that is trained
            tally.forward(None)
            tally.backward()
        assert (tally.samples, tally.micro_batches, tally.tokens, tally.flops) == (2, 2, 12, 24)
        tally.loaded(0.0, (0,))
        tally.forward(None, training=False)  # with gradients that nobody wanted
        tally.evaluation_ended()
        tally.loaded(0.0, (1,))
        tally.evaluated()
        tally.backward()  # the script has called the model by itself
        assert (tally.samples, tally.tokens) == (3, 19)


def test_tally_asks_the_host_what_a_micro_batch_of_the_script_holds() -> None:
    batch = pack_samples([{"input_ids": [1] * length} for length in (5, 7)], pad_to_multiple_of=16)
    tally = Tally(None, has_loader=False, flops_of=lambda lengths: 2.0 * lengths.sum())
    tally.forward(batch.to("meta"))  # whose tensors nobody can read, as reading a GPU's makes the host wait
    tally.backward()
    assert (tally.samples, tally.tokens, tally.flops) == (2, 12, 24)
    for unknown in (torch.zeros(1, 8), SimpleNamespace(segments=[3, 4])):  # nobody knows what is in it
        tally.reset()
        tally.forward(unknown)
        tally.backward()
        assert math.isnan(tally.samples)


# ---- recorder and timeline ---------------------------------------------------------------------------


def test_recorder_numbers_micro_batches_and_bounds_memory() -> None:
    recorder = Recorder()
    recorder.add("forward", 0.0, 0.5)  # an evaluation before the minibatch
    for kind, start, end in [
        ("load", 1.0, 1.1),
        ("gather", 1.2, 1.3),
        ("forward", 1.1, 1.4),
        ("backward", 1.4, 1.6),
        ("load", 1.6, 1.7),
        ("forward", 1.7, 1.8),
        ("backward", 1.8, 2.0),
        ("wait", 2.1, 2.2),
        ("barrier", 2.0, 2.2),
    ]:
        recorder.add(kind, start, end, 3 if kind == "gather" else -1)
    events = recorder.take(since=1.0)
    assert [(kind, number) for kind, _, _, number, _ in events] == [
        ("load", 0),
        ("forward", 0),
        ("gather", 0),
        ("backward", 0),
        ("load", 1),
        ("forward", 1),
        ("backward", 1),
        ("barrier", -1),
        ("wait", -1),
    ]
    assert events[2][4] == 3
    assert recorder.take(since=0.0) == []
    for _ in range(MAX_EVENTS + 5):
        recorder.add("wait", 0.0, 1.0)
    assert recorder.num_dropped == 5


def test_recording_an_event_is_cheap() -> None:
    """The best of ten: others may take the processor away in between."""
    seconds = []
    for _ in range(10):
        recorder = Recorder()
        start = time.thread_time()
        for _ in range(2_000):
            recorder.add("gather", 0.0, 1.0, 3)
        seconds.append((time.thread_time() - start) / 2_000)
    assert min(seconds) < 20e-6  # some 0.2 us on an idle machine


def test_clocks_of_machines_meet_at_the_agreement() -> None:
    topology = Topology(
        rank=0,
        nodes=((0, 1), (2,)),
        hosts=("a", "a", "b"),
        machines=("a", "a", "b"),
    )
    events = [
        (("forward", 10.0, 11.0, 0, -1), ("agree", 12.0, 12.5, -1, -1)),
        (("agree", 12.1, 12.5, -1, -1),),
        (("forward", 910.0, 912.0, 0, -1), ("agree", 912.0, 912.75, -1, -1)),
    ]
    aligned = align(events, topology)
    assert aligned[:2] == events[:2]
    assert aligned[2] == (("forward", 9.75, 11.75, 0, -1), ("agree", 11.75, 12.5, -1, -1))


def _timeline(ranks: int = 2, label: str = "on demand") -> Timeline:
    of_rank = (
        ("load", 10.0, 10.1, 0, -1),
        ("forward", 10.1, 10.5, 0, -1),
        ("gather", 10.1, 10.2, 0, 1),
        ("wait", 10.1, 10.15, 0, -1),
        ("backward", 10.5, 11.0, 0, -1),
        ("push", 10.9, 11.0, 0, 0),
        ("barrier", 11.0, 11.2, -1, -1),
        ("update", 11.2, 11.3, -1, -1),
    )
    return Timeline(
        step=3,
        label=label,
        hosts=tuple(f"host{rank // 8}" for rank in range(ranks)),
        groups=("the root", "block.0"),
        idle_shares=tuple(0.01 * (rank % 5) for rank in range(ranks)),
        events=tuple(of_rank for _ in range(ranks)),
    )


def test_timeline_survives_its_file(tmp_path: Path) -> None:
    timeline = _timeline(ranks=9)
    path = tmp_path / "t.json"
    timeline.save(path)
    loaded = Timeline.load(path)
    assert os.listdir(tmp_path) == ["t.json"]
    assert (loaded.step, loaded.label, loaded.hosts) == (3, "on demand", timeline.hosts)
    for before, after in zip(timeline.events, loaded.events, strict=True):
        for (kind, start, end, number, group), found in zip(before, after, strict=True):
            assert (found[0], *found[3:]) == (kind, number, group)
            assert found[1:3] == pytest.approx((start - 10.0, end - 10.0), abs=1e-8)


def _colours(path: Path) -> set[tuple[int, ...]]:
    from matplotlib.image import imread

    pixels = (imread(path)[:, :, :3] * 255).round().astype(int).reshape(-1, 3)
    return {tuple(pixel) for pixel in np.unique(pixels, axis=0).tolist()}


def test_odc_report_draws_runs_one_above_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    _timeline(label="collective").save(Path(files[0]))
    _timeline(ranks=64).save(Path(files[1]))
    picture = str(tmp_path / "both.png")
    assert odc(["report", "timeline", *files, "-o", picture, "--names", "before", "after"]) == 0
    assert capsys.readouterr().out == f"drew {picture}\n"
    assert Path(picture).read_bytes().startswith(b"\x89PNG")
    # Waiting, forward, backward, gather, push: all are there to be seen.
    assert {(217, 65, 63), (127, 168, 214), (52, 101, 157), (63, 155, 79), (165, 212, 106)} <= _colours(
        Path(picture)
    )


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (None, [], "cannot be read: No such file"),
        ("{", [], "is no timeline"),
        ("[1]", [], "was not written by odcengine's monitor"),
        ('{"traceEvents": [], "otherData": {"format": "odcengine timeline 1"}}', [], "is no timeline"),
        ("good", ["--names", "a", "b"], "2 names for 1 timelines"),
        ("good", ["-o", "nowhere/x.png"], "nowhere/x.png cannot be written"),
        ("good", ["-o", "x.pdf"], "must end in .png"),
    ],
)
def test_odc_report_names_what_is_wrong(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "t.json"
    if text == "good":
        _timeline().save(path)
    elif text is not None:
        path.write_text(text)
    if "-o" not in arguments:
        arguments = [*arguments, "-o", "x.png"]
    assert odc(["report", "timeline", str(path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_logger_name_in_the_docs_is_right() -> None:
    page = (Path(__file__).parents[2] / "docs" / "monitor.md").read_text()
    assert f"logger `{logging.getLogger(Lines.__module__).name}`" in page
