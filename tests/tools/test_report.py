"""``odc report``: pictures and figures of runs whose files are written here."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from odc_tools import report_run
from odc_tools.cli import main
from odc_tools.report_run import Run, compare

from odcengine.data import TokenDataset
from odcengine.monitor.timeline import Timeline

matplotlib = pytest.importorskip("matplotlib")


def facts(step: int, num_ranks: int, tokens_per_s: float | None = 1000.0) -> dict[str, Any]:
    idle = [0.01 * rank + 0.001 * step for rank in range(num_ranks)]
    return {"step": step, "tokens_per_s": tokens_per_s, "idle_shares": idle}


def write_run(
    folder: Path, steps: list[dict[str, Any]], *, name: str = "metrics.jsonl", rest: str = ""
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(step) + "\n" for step in steps) + rest)
    return folder


def write_timeline(folder: Path, step: int, label: str = "on demand") -> None:
    (folder / "timelines").mkdir(exist_ok=True)
    events = ((("forward", 0.0, 1.0, 0, -1), ("backward", 1.0, 2.5, 0, -1)),) * 2
    Timeline(step, label, ("a", "a"), (), (0.0, 0.1), events).save(
        folder / "timelines" / f"step{step:06}.json"
    )


def is_picture(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("num_ranks", [1, 2, 16, 40])
@pytest.mark.parametrize("num_steps", [1, 30, 1001])
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], num_ranks: int, num_steps: int) -> None:
    run = write_run(tmp_path / "run", [facts(step, num_ranks) for step in range(num_steps)])
    assert main(["report", "run", str(run)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"run: {num_steps} steps, 0 to {num_steps - 1}"
    assert told[1] == "  median 1,000 tokens/s"
    found = re.fullmatch(r"  idle ([\d.]+)% on average, most on rank (\d+): ([\d.]+)%", told[2])
    assert found is not None
    assert float(found[1]) == pytest.approx(0.5 * (num_ranks - 1) + 0.05 * (num_steps - 1), abs=0.051)
    assert int(found[2]) == num_ranks - 1
    assert float(found[3]) == pytest.approx(1.0 * (num_ranks - 1) + 0.05 * (num_steps - 1), abs=0.051)
    assert told[3:] == [
        f"drew {run}/report/idle.png",
        "no timeline: run has none; set monitor.timeline_every and timeline_dir",
    ]
    assert is_picture(run / "report" / "idle.png")
    assert [path.name for path in (run / "report").iterdir()] == ["idle.png"]


def test_two_runs_with_timelines_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = write_run(tmp_path / "new", [facts(step, 2, 1500.0 if step else 10.0) for step in range(9)])
    old = write_run(tmp_path / "old", [facts(step, 4) for step in range(7)])
    for step in (2, 5, 8):
        write_timeline(new, step)
    for step in (2, 5):
        write_timeline(old, step, "collective")
    TokenDataset.write(tmp_path / "tokens", ({"input_ids": [1] * length} for length in range(1, 200)))
    words = ["report", "run", str(new), "--against", str(old), "--data", str(tmp_path / "tokens")]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "new is 1.500 times as fast as old: tokens/s, median of the 7 steps that both have" in told
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"idle.png", "timeline.png", "lengths.png"}
    assert all(is_picture(path) for path in (tmp_path / "out").iterdir())
    assert main([*words, "--step", "8"]) == 2
    assert "--step 8: old has timelines of the steps 2, 5" in capsys.readouterr().err
    assert not (new / "report").exists() or "timeline.png" not in {p.name for p in (new / "report").iterdir()}


def test_the_newest_timeline_that_both_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [Run.read(write_run(tmp_path / name, [facts(0, 2)])) for name in ("a", "b")]
    drawn: list[list[tuple[str, int]]] = []
    monkeypatch.setattr(
        report_run,
        "draw_timelines",
        lambda panels, path: drawn.append([(name, timeline.step) for name, timeline in panels]),
    )
    for name, steps in (("a", (1, 3, 9)), ("b", (3, 4))):
        for step in steps:
            write_timeline(tmp_path / name, step)
    runs = [Run.read(tmp_path / name) for name in ("a", "b")]
    report_run.draw_timeline(runs, tmp_path / "x.png")
    report_run.draw_timeline(runs[:1], tmp_path / "x.png")
    report_run.draw_timeline(runs[:1], tmp_path / "x.png", 1)
    assert drawn == [
        [("a (on demand)", 3), ("b (on demand)", 3)],
        [("a (on demand)", 9)],
        [("a (on demand)", 1)],
    ]


def test_lines_of_a_run_that_was_resumed_or_is_still_writing(tmp_path: Path) -> None:
    steps = [facts(0, 2), facts(1, 2), facts(2, 2), {**facts(1, 3), "tokens_per_s": None}, facts(2, 3)]
    run = Run.read(write_run(tmp_path / "run", steps, rest='{"step": 3, "idle_sh'))
    assert [step["step"] for step in run.steps] == [0, 1, 2]
    shares = run.idle_shares
    assert shares.shape == (3, 3)
    assert math.isnan(shares[0, 2])
    assert shares[1].tolist() == facts(1, 3)["idle_shares"]
    assert np.isnan(run.numbers("tokens_per_s")).tolist() == [False, True, False]
    other = Run.read(write_run(tmp_path / "other", [facts(1, 2)]))
    assert compare(run, other) == "run and other have no step in common whose tokens are known"


def test_losses_of_held_out_data_are_told(tmp_path: Path) -> None:
    losses = {0: 2.5, 4: 1.25, 8: 1.5}
    lines = [{"step": step, "eval/loss": loss, "eval/perplexity": 3.0} for step, loss in losses.items()]
    lines += [{"step": 8, "other/loss": None, "dpo/accuracy": 0.5}]
    run = Run.read(write_run(tmp_path / "run", [facts(step, 2) for step in range(9)] + lines))
    assert len(run.steps) == 9
    assert run.summary()[3:] == ["  eval/loss 1.5000 after 8 steps; lowest of 3: 1.2500 after 4"]


def test_a_reader_of_the_output_that_has_gone(tmp_path: Path) -> None:
    TokenDataset.write(tmp_path / "tokens", [{"input_ids": [1, 2]}])
    reading, writing = os.pipe()
    os.close(reading)
    words = ["prepare", "--info", str(tmp_path / "tokens")]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "odc_tools", *words],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_many_steps_are_drawn_as_means() -> None:
    steps = np.arange(1001.0)
    values = np.stack([steps, np.full(1001, math.nan)], axis=1)
    values[0, 0] = math.nan
    thin_steps, thin = report_run._thinned(steps, values)
    assert len(thin_steps) == len(thin) == 334
    assert thin_steps[:2].tolist() == [1.0, 4.0]
    assert thin[:2, 0].tolist() == [1.5, 4.0]
    assert thin_steps[-1] == thin[-1, 0] == 999.5
    assert np.isnan(thin[:, 1]).all()


def test_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(*words: object) -> str:
        assert main(["report", *map(str, words)]) == 2
        return capsys.readouterr().err

    assert "no such folder or file" in refusal("run", tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "data.jsonl").write_text('{"text": "something else"}\n')
    assert "no file that monitor.jsonl wrote" in refusal("run", tmp_path / "empty")
    both = write_run(tmp_path / "both", [facts(0, 2)])
    write_run(tmp_path / "both" / "b", [facts(0, 2)], name="m.jsonl")
    assert "several: " in refusal("run", both)
    assert main(["report", "run", str(both / "b" / "m.jsonl")]) == 0
    assert is_picture(both / "b" / "report" / "idle.png")
    broken = write_run(tmp_path / "broken", [facts(0, 2)], rest="what\n")
    assert "metrics.jsonl:2: is no line of monitor.jsonl" in refusal("run", broken)
    begun = write_run(tmp_path / "begun", [], rest='{"step": 0, "lo')
    assert "there is no step in it yet" in refusal("run", begun)
    (tmp_path / "file").write_text("")
    assert "File exists" in refusal("run", both / "b", "--out", tmp_path / "file")
    assert "must end in .png" in refusal("lengths", tmp_path, "-o", "lengths.pdf")
    assert "not a data set of odcengine" in refusal("lengths", tmp_path / "empty", "-o", tmp_path / "x.png")
    TokenDataset.write(tmp_path / "none", [])
    assert "the data set has no samples" in refusal("lengths", tmp_path / "none", "-o", tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'odcengine[monitor]'" in refusal("run", both / "b")


@pytest.mark.parametrize("lengths", [[7], [5, 5, 5], [1, 100000], list(range(1, 50))])
def test_histograms_of_all_kinds(tmp_path: Path, lengths: list[int]) -> None:
    TokenDataset.write(tmp_path / "tokens", ({"input_ids": [1] * length} for length in lengths))
    assert main(["report", "lengths", str(tmp_path / "tokens"), "-o", str(tmp_path / "x.png")]) == 0
    assert is_picture(tmp_path / "x.png")
