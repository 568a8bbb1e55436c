"""The monitor in real runs: numbers against the data, files, timelines, and writers that break."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_ranks, values
from torch import nn

import odcengine
from odcengine.control import Phase, Word
from odcengine.data import pack_samples
from odcengine.metrics import StepMetrics
from odcengine.models import model_flops
from odcengine.monitor import monitor as monitor_module
from odcengine.monitor.recorder import KINDS

VOCAB, STEPS, BATCH = 32, 4, 6
LENGTHS = np.random.default_rng(3).integers(4, 40, STEPS * BATCH).tolist()
NO_TARGETS = 7  # this sample has nothing to learn


def _model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )


def _data() -> list[dict[str, list[int]]]:
    generator = np.random.default_rng(4)
    return [
        {
            "input_ids": generator.integers(0, VOCAB, length).tolist(),
            "loss_mask": [index != NO_TARGETS] * length,
        }
        for index, length in enumerate(LENGTHS)
    ]


def _config(**sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "train_batch_size": BATCH,
        "steps_per_print": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "balance": {"max_tokens_per_micro_batch": 60},
        "data": {"shuffle": False},
        "odc": {"timeout_s": 60, "startup_timeout_s": 90},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section} if isinstance(section, dict) else section
    return base


Run = tuple[list[StepMetrics], list[str]]


def _train(rank: int, world_size: int, config: dict[str, Any]) -> Run:
    """Train on the loader; returns the metrics of every step and the lines that were logged."""
    lines = _Lines()
    engine, _, loader, _ = odcengine.initialize(model=_model(), config=config, training_data=_data())
    assert loader is not None
    metrics = []
    for minibatch in loader:
        for micro_batch in minibatch:
            engine.backward(engine(micro_batch))
        metrics.append(engine.step())
    engine.close()
    return metrics, lines.lines


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        logger = logging.getLogger("odcengine.monitor")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _runs(config: dict[str, Any], world_size: int = 2) -> list[Run]:
    return values(run_ranks(_train, world_size, config))


def _of_step(step: int) -> list[int]:
    return LENGTHS[step * BATCH : (step + 1) * BATCH]


# ---- what is counted ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sections",
    [{}, {"odc": {"transport": "collective"}, "train_micro_batch_size_per_gpu": 1, "train_batch_size": 5}],
    ids=["on demand", "collective with stand-ins"],
)
def test_samples_tokens_and_flop_count_once_over_all_ranks(sections: dict[str, Any]) -> None:
    runs = _runs(_config(**sections))
    batch = sections.get("train_batch_size", BATCH)
    config = _model().config
    for step, (of_0, of_1) in enumerate(zip(runs[0][0], runs[1][0], strict=True)):
        lengths = LENGTHS[step * batch : (step + 1) * batch]
        assert of_0.tokens is not None
        assert of_0.flops is not None
        assert (of_0.num_samples, of_0.num_tokens) == (len(lengths), sum(lengths))
        assert of_0.flops == pytest.approx(model_flops(config, lengths))
        assert (of_0.tokens, of_0.flops, of_0.num_samples) == (of_1.tokens, of_1.flops, of_1.num_samples)
        assert of_0.load_s > 0
        assert of_0.tokens_per_s == pytest.approx(sum(lengths) / of_0.step_s)
        assert of_0.step_s == pytest.approx(
            max(b + w for b, w in zip(of_0.busy_s, of_0.wait_s, strict=True)) + of_0.boundary_s
        )


def _without_loader(rank: int, world_size: int, packed: bool) -> StepMetrics:
    config = _config(train_batch_size="auto")
    engine, *_ = odcengine.initialize(model=_model(), config=config)
    for sample in _data()[: 2 - rank]:  # ranks have different numbers of micro-batches
        if packed:
            engine.backward(engine(pack_samples([sample])))
        else:
            logits = engine(input_ids=torch.tensor([sample["input_ids"]])).logits
            engine.backward(logits.float().square().sum(), count=1)
    metrics = engine.step()
    engine.close()
    return metrics


def test_without_a_loader_only_packed_batches_tell_their_tokens() -> None:
    packed = values(run_ranks(_without_loader, 2, True))
    assert packed[0].tokens == packed[1].tokens == (sum(LENGTHS[:2]), LENGTHS[0])
    assert packed[0].num_samples == 3
    for metrics in values(run_ranks(_without_loader, 2, False)):
        assert (metrics.tokens, metrics.num_samples, metrics.flops) == (None, None, None)
        assert metrics.num_tokens is metrics.tokens_per_s is None


# ---- what is shown and written -----------------------------------------------------------------------


def test_lines_and_json_say_what_the_metrics_say(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "metrics.jsonl"
    monitor = {"jsonl": str(path), "peak_tflops": 1e-3}
    (metrics, shown), (_, shown_on_1) = _runs(_config(monitor=monitor))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS))
    for line, of_step in zip(lines, metrics, strict=True):
        assert line["loss"] == of_step.loss
        assert line["num_tokens"] == of_step.num_tokens == sum(_of_step(of_step.step))
        assert line["busy_s"] == list(of_step.busy_s)
        assert line["idle_shares"] == list(of_step.idle_shares)
        assert line["mfu"] == pytest.approx((of_step.flops or math.nan) / (of_step.step_s * 2e9))
    steps = [line for line in shown if line.startswith("step ")]
    assert [line.split(":")[0] for line in steps] == ["step 1/4", "step 2/4", "step 4/4"]
    pattern = (
        r"loss \d\.\d{4}, [\d.]+k? tokens/s, idle [\d.]+% [\d.]+%, \d:\d\d:\d\d left, "
        r"MFU [\d.]+%, grad norm \S+, lr 0.1$"
    )
    assert re.search(pattern, steps[2]), steps[2]
    summary = [line for line in shown if line.startswith("summary: ")]
    told = rf"summary: 4 steps in \d+:\d\d:\d\d, 0 skipped; 24 samples, {sum(LENGTHS)} tokens; last loss "
    told += r"\d\.\d{4}"
    assert re.fullmatch(told, summary[0]), summary[0]
    assert "of the time at the boundary" in summary[1]
    assert summary[2] == "summary: 1 samples had no token with a target and taught nothing"
    assert shown_on_1 == []


def test_the_docs_explain_every_key_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _runs(_config(monitor={"jsonl": str(path)}), world_size=1)
    page = (Path(__file__).parents[2] / "docs" / "monitor.md").read_text()
    section = page.partition("## JSON lines")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(
        json.loads(path.read_text().splitlines()[0])
    )


@pytest.mark.parametrize("sections", [{"monitor": {"progress": "off"}}, {"steps_per_print": 0}])
def test_progress_can_be_switched_off(sections: dict[str, Any]) -> None:
    assert [shown for _, shown in _runs(_config(**sections), world_size=1)] == [[]]


def test_a_full_disk_is_reported_once_and_training_goes_on() -> None:
    (metrics, shown), _ = _runs(_config(monitor={"jsonl": "/dev/full"}))
    assert len(metrics) == STEPS
    warnings = [line for line in shown if "switched off" in line]
    assert len(warnings) == 1
    assert re.search(r"monitor.jsonl is switched off, training goes on: OSError: .*No space", warnings[0])
    assert any(line.startswith("summary: ") for line in shown)


def test_a_path_that_cannot_be_written_is_named_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    results = run_ranks(_train, 2, _config(monitor={"jsonl": str(tmp_path / "file" / "metrics.jsonl")}))
    assert results[0].error_type == "ConfigError"
    assert "monitor.jsonl: " in str(results[0].error)
    assert results[1].error_type == "PeerError"
    assert "monitor.jsonl: " in str(results[1].error)


# ---- the timeline of a minibatch ---------------------------------------------------------------------


def _check_trace(trace: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """Check a trace against the Trace Event Format; returns the events of each thread."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] == "ms"
    threads: dict[int, list[dict[str, Any]]] = {}
    named = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in "MX"
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            assert set(event["args"]) <= {"name", "sort_index"}
            named.add((event["name"], event["pid"], event["tid"]))
        else:
            assert set(event) == {"ph", "name", "cat", "ts", "dur", "pid", "tid", "args"}
            assert event["name"] in KINDS
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert ("thread_name", event["pid"], event["tid"]) in named
            threads.setdefault(event["tid"], []).append(event)
    for events in threads.values():  # what overlaps is nested, or Perfetto drops it
        stack: list[float] = []
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while stack and stack[-1] <= event["ts"] + 0.002:
                stack.pop()
            end = event["ts"] + event["dur"]
            assert not stack or end <= stack[-1] + 0.002, event
            stack.append(end)
    return threads


def _seconds(events: Sequence[dict[str, Any]], *kinds: str) -> float:
    return sum(event["dur"] for event in events if event["name"] in kinds) / 1e6


@pytest.mark.parametrize(
    "odc",
    [{}, {"lockstep": True}, {"transport": "collective"}, {"sharding": "hybrid", "node_size": 1}],
    ids=str,
)
def test_timelines_account_for_the_measured_times(tmp_path: Path, odc: dict[str, Any]) -> None:
    monitor = {"timeline_every": 2, "timeline_dir": str(tmp_path / "timelines")}
    runs = _runs(_config(odc=odc, monitor=monitor))
    found = sorted(path.name for path in (tmp_path / "timelines").iterdir())
    assert found == ["step000001.json", "step000001.png", "step000003.json", "step000003.png"]
    outside: dict[str, list[float]] = {"wait": [], "boundary": []}  # seconds that are in no event
    for step in (1, 3):
        trace = json.loads((tmp_path / "timelines" / f"step{step:06}.json").read_text())
        threads = _check_trace(trace)
        assert trace["otherData"]["idle_shares"] == list(runs[0][0][step].idle_shares)
        assert sorted(threads) == [0, 1]
        for rank, events in threads.items():
            metrics = runs[rank][0][step]
            kinds = [event["name"] for event in events]
            forwards = kinds.count("forward")
            assert forwards == kinds.count("backward") >= 1
            assert [kinds.count(k) for k in ("barrier", "collect", "agree", "update", "publish")] == [1] * 5
            gathers, pushes = ("gather", "push")
            if odc.get("transport") == "collective":
                gathers, pushes = ("all_gather", "reduce_scatter")
            assert kinds.count(gathers) >= 3 * forwards  # two blocks and the root
            # In lock-step the barrier before a push counts as pushing, but shows as waiting.
            assert _seconds(events, gathers) == pytest.approx(metrics.gather_s, abs=2e-4)
            if not odc.get("lockstep"):
                assert _seconds(events, pushes) == pytest.approx(metrics.push_s, abs=2e-4)
            assert _seconds(events, "load") == pytest.approx(metrics.load_s, abs=2e-4)
            if odc.get("transport") != "collective":
                at_boundary = next(e["ts"] for e in events if e["name"] == "collect")
                waits = [e for e in events if e["name"] == "wait" and e["ts"] < at_boundary]
                outside["wait"].append(metrics.wait_s[rank] - _seconds(waits, "wait"))
            boundary = _seconds(events, "collect", "agree", "update", "publish")
            outside["boundary"].append(metrics.boundary_s - boundary)
            of_micro_batches = [e["args"]["micro_batch"] for e in events if e["name"] == "forward"]
            assert of_micro_batches == list(range(forwards))
            groups = {e["args"]["group"] for e in events if e["name"] == gathers}
            assert groups == {"the root", "model.layers.0", "model.layers.1"}
    # Between two events there is next to nothing, unless others take the processor away just there.
    for times in outside.values():
        assert not times or -1e-6 <= min(times) < 5e-4, outside


SLOW_STEPS = 3


def _slow_rank(rank: int, world_size: int, folder: str) -> list[StepMetrics]:
    """Rank 1 has no work at all and waits at the end for rank 0."""
    monitor = {"timeline_every": 1, "timeline_dir": folder}
    engine, *_ = odcengine.initialize(
        model=_model(), config=_config(train_batch_size="auto", monitor=monitor)
    )
    metrics = []
    for _ in range(SLOW_STEPS):
        for sample in _data()[:3] if rank == 0 else []:
            _await_the_other(engine, rank)
            engine.backward(engine(pack_samples([sample])))
        metrics.append(engine.step())
    engine.close()
    return metrics


def _await_the_other(engine: odcengine.OdcEngine, rank: int) -> None:
    """Return when the other rank waits at the end of its minibatch, however late it came there."""
    words, other = engine._control._words, 1 - rank
    deadline = time.monotonic() + 50
    while words[other, Word.PHASE] != Phase.BARRIER or not words[other, Word.WAITS_FOR]:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_rank_without_work_shows_that_it_waits(tmp_path: Path) -> None:
    metrics = values(run_ranks(_slow_rank, 2, str(tmp_path)))
    outside = []
    for step in range(SLOW_STEPS):
        threads = _check_trace(json.loads((tmp_path / f"step{step:06}.json").read_text()))
        assert [e["name"] for e in threads[1]][:2] == ["barrier", "wait"]
        outside.append(_seconds(threads[1], "barrier") - metrics[0][step].wait_s[1])
        end_of_work = max(e["ts"] + e["dur"] for e in threads[0] if e["name"] == "backward")
        barrier = next(e for e in threads[1] if e["name"] == "barrier")
        assert barrier["ts"] + barrier["dur"] > end_of_work  # one clock: A ends after the last push
    # Arriving takes no time, unless others take the processor away just there.
    assert -1e-6 <= min(outside) < 1e-3, outside


def _dies_before_handing_in(rank: int, world_size: int, folder: str) -> None:
    if rank == 1:
        monitor_module.gather_events = lambda *_: os._exit(9)  # type: ignore[assignment]
    monitor = {"timeline_every": 1, "timeline_dir": folder}
    _train(rank, world_size, _config(monitor=monitor))


def test_a_rank_that_dies_before_it_hands_in_its_timeline_is_named(tmp_path: Path) -> None:
    survivor, dead = run_ranks(_dies_before_handing_in, 2, str(tmp_path))
    assert dead.exit_code == 9
    assert survivor.error_type == "PeerError"
    assert re.search(
        r"rank 1 .* died or left without close\(\) in .*handing in its timeline", str(survivor.error)
    )
