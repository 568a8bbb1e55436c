"""The examples of docs/deepspeed.md run as they are shown there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import run_program

from odcengine.data import TokenDataset

pytest.importorskip("deepspeed")
pytest.importorskip("accelerate")

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs/deepspeed.md").read_text()
MODEL = """{
  "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16,
  "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2
}"""
ON_CPUS = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
COMMANDS = re.findall(r"^\.venv/bin/odc-launch (.*examples/deepspeed/\w+\.py)$", PAGE, re.MULTILINE)


def _run(command: str, folder: Path) -> str:
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(MODEL)
    TokenDataset.write(
        folder / "tokens", [{"input_ids": [1, 2, *([3] * (1 + n * 7 % 40))]} for n in range(80)]
    )
    for name in ("examples", "configs"):
        (folder / name).symlink_to(ROOT / name)
    small = ["--model", "model", "--data", "tokens", "--steps", "2", "--batch", "6"]
    done = run_program("-m", "odc_launcher", *command.split(), *small, folder=folder, **ON_CPUS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_shows_all_examples() -> None:
    shown = {command.split("/")[-1] for command in COMMANDS}
    there = {path.name for path in (ROOT / "examples/deepspeed").glob("*.py")} - {"workload.py"}
    assert shown == there
    configs = {path.name for path in (ROOT / "configs/deepspeed").iterdir()}
    assert configs == set(re.findall(r"configs/deepspeed/(\w+\.json)", PAGE))


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[] if "own_loop" in command else [pytest.mark.soak], id=command[-20:])
        for command in COMMANDS
    ],
)
def test_example(command: str, tmp_path: Path) -> None:
    output = _run(command, tmp_path)
    if "trainer" in command:
        assert len(re.findall(r"'grad_norm'", output)) == 2
        return
    found = re.findall(r"step (\d) rank (\d): (\d+) micro-batches.*gradient norm (\S+)", output)
    assert len(found) == 4
    norms = {step: {norm for s, _, _, norm in found if s == step} for step in "01"}
    assert all(len(values) == 1 for values in norms.values())  # equal on both ranks
    assert sum(int(count) for *_, count, _ in found) == 12


LEFT_OPEN = """
import atexit, logging, sys, time
import torch.distributed as dist
sys.path[:0] = [{tests!r}]
from zero3.toy import Case, make_engine, train_engine
import odcengine

atexit.register(lambda: print("groups at the end:", dist.is_initialized(), flush=True))
engine = make_engine(Case("open"))
rank = dist.get_rank()
odcengine.attach(engine, timeout_s=20)  # nobody keeps the handle
train_engine(engine, rank, 2, Case("open"), steps=2)
time.sleep(1.5 * rank)
"""


def test_an_engine_that_is_left_open_ends_in_order(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEFT_OPEN.format(tests=str(ROOT / "tests")))
    words = ["-m", "odc_launcher", "--nproc-per-node", "2", "train.py"]
    done = run_program(*words, folder=tmp_path, **ON_CPUS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("groups at the end: False") == 2
    assert "died or left" not in done.stdout + done.stderr
