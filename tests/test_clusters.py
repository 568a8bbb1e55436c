"""What is shipped for clusters: batch scripts, and the memory that configurations state."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from odc_launcher import memory

from odcengine.config import load_config
from odcengine.models.shapes import model_shapes

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.name for path in (ROOT / "examples/slurm").glob("*.sbatch"))
# hidden_size, intermediate_size, layers, attention heads, key-value heads, vocab_size, tied embeddings
QWEN = {
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
}
PARAMETERS = {"1.5B": 1_543_714_304, "7B": 7_615_616_512, "32B": 32_763_876_352}
SHAPES = {"1gpu": (1, 1), "8gpu": (8, 1), "4x8gpu": (32, 4)}


def architecture(size: str) -> dict[str, Any]:
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = QWEN[size]
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


def planned(
    settings: dict[str, Any], size: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """The plan's memory for a configuration, without the model's files."""
    model = {"config": architecture(size), "dtype": "bfloat16"}
    config = load_config({**settings, "model": model})
    shapes = model_shapes(config)
    monkeypatch.setattr(memory, "read_shapes", lambda *_: shapes)
    return memory.describe_memory(config, "c.yaml", *SHAPES[layout], {})


def gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"


@pytest.mark.parametrize(
    ("name", "size", "layout"),
    [
        ("qwen2.5_1.5b_1gpu.yaml", "1.5B", "1gpu"),
        ("qwen2.5_7b_8gpu.yaml", "7B", "8gpu"),
        ("qwen2.5_32b_4x8gpu.yaml", "32B", "4x8gpu"),
    ],
)
def test_memory_in_the_comments_is_the_plans(
    name: str, size: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "configs" / name).read_text()
    settings = load_config(ROOT / "configs" / name).resolved()
    found = planned(settings, size, layout, monkeypatch)
    assert found["num_parameters"] == PARAMETERS[size]
    assert found["taken"] == ("hybrid" if layout == "4x8gpu" else "full")
    chosen = found[found["taken"]]
    comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    stated = re.findall(r"(\w+) (\d+\.\d\d GiB)", comment)
    expected = [(key, gib(value)) for key, value in chosen.items() if value and key in dict(stated)]
    assert stated == expected
    assert len(stated) == sum(bool(chosen[key]) for key in chosen if key != "total")
    assert f"{gib(chosen['total'])} in all" in comment


def test_memory_in_the_docs_is_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/slurm.md").read_text()
    rows = re.findall(r"^\| Qwen2\.5 (\S+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    assert [row[0] for row in rows] == list(QWEN)
    settings: dict[str, Any] = {
        "train_batch_size": 64,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
    }
    for size, *cells in rows:
        for layout, cell in zip(SHAPES, cells, strict=True):
            found = planned(settings, size, layout, monkeypatch)
            told = gib(found["full"]["total"])
            if found["hybrid"] is not None:
                told = f"{told} full, {gib(found['hybrid']['total'])} hybrid"
            assert cell.strip() == told, (size, layout)


# -- batch scripts -----------------------------------------------------------------------------------------


def options(script: str) -> dict[str, str]:
    """What a script asks SLURM for."""
    found = {}
    for line in script.splitlines():
        if line.startswith("#SBATCH "):
            name, _, value = line.split()[1].partition("=")
            found[name] = value
    return found


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The project's folder, with odc-launch as a dry run and srun on the PATH."""
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = tmp_path / "bin"
    programs.mkdir()
    launch = f"{sys.executable} -m odc_launcher"
    (programs / "odc-launch").write_text(
        f'#!/bin/sh\necho "$@" >> called\n[ "$1" = doctor ] && exit 0\nexec {launch} --dry-run "$@"\n'
    )
    (programs / "srun").write_text("#!/bin/sh\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("name", SCRIPTS)
def test_batch_script_starts_the_step_that_it_says(name: str, checkout: Path) -> None:
    script = (ROOT / "examples/slurm" / name).read_text()
    asked = options(script)
    nodes = int(asked["--nodes"])
    tasks = int(asked.get("--ntasks-per-node", asked.get("--ntasks", "1")))
    job = {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": f"localhost,n[2-{nodes}]" if nodes > 1 else "localhost",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS": str(nodes * tasks),
        "SLURM_TASKS_PER_NODE": f"{tasks}(x{nodes})" if nodes > 1 else str(tasks),
        "SLURM_CPUS_PER_TASK": asked["--cpus-per-task"],
        "SLURM_JOB_CPUS_PER_NODE": str(int(asked["--cpus-per-task"]) * tasks),
    }
    if "--array" in asked:
        job |= {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "2"}
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("SLURM", "RANK", "WORLD", "MASTER"))}
    env = clean | job | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "launcher")))}
    env["PATH"] = f"{checkout / 'bin'}{os.pathsep}{env['PATH']}"
    words = ["bash", str(checkout / "examples/slurm" / name), "--steps", "3"]
    done = subprocess.run(words, env=env, cwd=checkout, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    command = shlex.split(done.stdout, comments=True)
    step = command[command.index("srun") :]
    for option in (f"--nodes={nodes}", f"--ntasks={nodes * tasks}", "--cpus-per-task=12"):
        assert option in step
    assert {"--kill-on-bad-exit=1", "--wait=0", "--export=ALL"} <= set(step)
    assert step[-3:] == ["examples/sft/train.py", "--steps", "3"]
    config = step[step.index("--config") + 1]
    load_config(config)
    assert Path(config).is_relative_to(checkout)
    if name == "container.sbatch":
        assert f"--container-image={checkout}/images/odcengine.sqsh" in step
        assert f"--container-mounts={checkout}:{checkout}" in step
        assert f"--container-workdir={checkout}" in step
    if name == "four_nodes.sbatch":
        assert (checkout / "called").read_text().startswith("doctor --config configs/qwen2.5_32b")
    if name == "array.sbatch":
        member = load_config(config)
        assert member.optimizer is not None
        assert member.optimizer.params.lr == 2e-5
        assert member.checkpoint.dir == "runs/lr_2e-5/checkpoints"
        assert member.monitor.jsonl == "runs/lr_2e-5/metrics.jsonl"


def test_the_page_on_slurm_names_every_script() -> None:
    page = (ROOT / "docs/slurm.md").read_text()
    assert [name for name in SCRIPTS if f"examples/slurm/{name}" not in page] == []
