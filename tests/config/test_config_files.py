"""Valid configurations: values, defaults, example files, command line, reference page, no torch."""

from __future__ import annotations

import copy
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from odcengine._config_check import section_models
from odcengine._config_cli import main
from odcengine._config_reference import reference
from odcengine.config import PARAMS, Config, load_config
from odcengine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path for path in (ROOT / "configs").iterdir() if path.is_file())


def run(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_defaults() -> None:
    config = load_config({"train_batch_size": 8})
    assert config.notices == ()
    assert config.gradient_clipping == 0.0
    assert config.optimizer is None
    assert config.scheduler is None
    assert config.zero_optimization.stage == 3
    assert not config.bf16.enabled
    assert (config.odc.transport, config.odc.sharding, config.odc.wrap) == ("auto", "auto", "auto")
    assert config.balance.strategy == "lb_mini"
    assert config.data.max_length == config.balance.max_tokens_per_micro_batch == 8192
    assert config.launch.signals == ("INT", "TERM", "HUP", "USR1", "USR2")


@pytest.mark.parametrize("odc", [{"transport": "collective"}, {"lockstep": True}])
def test_strategy_follows_the_transport(odc: dict[str, Any]) -> None:
    assert load_config({"train_batch_size": 8, "odc": odc}).balance.strategy == "lb_micro"
    given = {"train_batch_size": 8, "odc": odc, "balance": {"strategy": "local_sort"}}
    assert load_config(given).balance.strategy == "local_sort"


def test_longest_sample_follows_the_token_limit() -> None:
    config = load_config({"train_batch_size": 8, "balance": {"max_tokens_per_micro_batch": 100}})
    assert config.data.max_length == 100
    config = load_config({"train_batch_size": 8, "data": {"max_length": 50}})
    assert config.data.max_length == 50


def test_values_and_types() -> None:
    config = load_config(
        {
            "train_batch_size": 1e3,
            "gradient_clipping": 1,
            "optimizer": {"type": "sgd", "params": {"lr": 1, "momentum": 0.9, "nesterov": True}},
            "scheduler": {"type": "multisteplr", "params": {"milestones": [3, 5]}},
            "odc": {"wrap": ["Block", "Head"], "node_size": 2},
            "launch": {"signals": ["SIGUSR1", "term", "TERM"], "log_dir": Path("logs")},
        }
    )
    assert config.train_batch_size == 1000
    assert isinstance(config.train_batch_size, int)
    assert isinstance(config.gradient_clipping, float)
    assert config.optimizer is not None
    assert config.scheduler is not None
    assert config.optimizer.type == "SGD"
    assert config.scheduler.type == "MultiStepLR"
    assert config.scheduler.params.milestones == (3, 5)
    assert config.odc.wrap == ("Block", "Head")
    assert config.launch.signals == ("USR1", "TERM")
    assert config.launch.log_dir == "logs"


def test_config_is_immutable_and_copies() -> None:
    config = load_config({"train_batch_size": 8, "optimizer": {"type": "Adam"}})
    with pytest.raises(ValidationError):
        config.train_batch_size = 9
    with pytest.raises(ValidationError):
        config.odc.transport = "shm"
    hash(config)
    assert load_config(config) is config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config


def test_the_mapping_of_the_caller_stays_as_it_is() -> None:
    source = {
        "train_batch_size": "auto",
        "bfloat16": {"enabled": True},
        "odc": None,
        "optimizer": {"type": "FusedAdam", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 3, "overlap_comm": True},
    }
    before = copy.deepcopy(source)
    load_config(source)
    assert source == before


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_file(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Loads; says nothing beyond DeepSpeed's keys; printed resolved, it gives the same again."""
    assert main([str(path)]) == 0
    out, err = capsys.readouterr()
    told = [line for line in err.splitlines() if " does not exist (looked for " not in line]  # models, data
    assert (told == []) == (path.name != "deepspeed_zero3.json")
    (tmp_path / "resolved.yaml").write_text(out)
    again = load_config(tmp_path / "resolved.yaml")
    assert all("train_batch_size: auto" in notice for notice in again.notices)
    assert again.resolved() == load_config(path).resolved()
    assert load_config(json.loads(json.dumps(again.resolved()))).resolved() == again.resolved()


def test_examples_are_all_there() -> None:
    names = {"deepspeed_zero3.json", "sft_collective.yaml", "sft_cpu.yaml", "sft_hybrid.yaml"}
    assert names <= {path.name for path in EXAMPLES}


def test_example_baseline_differs_only_in_how_it_communicates() -> None:
    ours = load_config(ROOT / "configs/sft_cpu.yaml").resolved()
    baseline = load_config(ROOT / "configs/sft_collective.yaml").resolved()
    assert {key for key in ours if ours[key] != baseline[key]} == {"odc", "balance"}


def test_every_shipped_optimizer_and_scheduler_name_loads() -> None:
    required = {"step_size": 1, "milestones": [1], "gamma": 0.5}
    for section, kinds in PARAMS.items():
        for kind, model in kinds.items():
            params = {
                name: required[name] for name, field in model.model_fields.items() if field.is_required()
            }
            for spelling in (kind, kind.lower(), kind.upper()):
                config = load_config({"train_batch_size": 8, section: {"type": spelling, "params": params}})
                assert getattr(config, section).type == kind
                assert type(getattr(config, section).params) is model


# --- command line ---------------------------------------------------------------------------------


def test_command_line_prints_the_resolved_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("train_micro_batch_size_per_gpu: 4\nbf16: {enabled: auto}\n")
    done = run("-m", "odcengine.config", "c.yaml", "--world-size", "3", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "note: c.yaml:2: bf16.enabled: auto -> true",
        "note: c.yaml: train_batch_size: 12 = 4 samples x 1 accumulation steps x 3 ranks",
    ]
    resolved = yaml.safe_load(done.stdout)
    assert resolved["train_batch_size"] == 12
    assert resolved["bf16"] == {"enabled": True}
    assert list(resolved) == list(Config.model_fields)


def test_command_line_batch_contradiction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "train_batch_size: 16\ntrain_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: 2\n"
    )
    assert main([str(path), "--world-size", "4"]) == 0
    assert main([str(path), "--world-size", "3"]) == 2
    assert "16 is not train_micro_batch_size_per_gpu 2 x" in capsys.readouterr().err


def test_command_line_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for args in ([], ["a", "--reference"], ["a", "--world-size", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(args)
        assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_command_line_survives_a_closed_pipe() -> None:
    command = f"{sys.executable} -m odcengine.config --reference | head -n 1"
    done = subprocess.run(
        ["bash", "-c", command],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout == "# Configuration\n"
    assert done.stderr == ""


def test_loading_imports_no_torch() -> None:
    code = (
        "import sys, odcengine.config as c; c.load_config('configs/sft_cpu.yaml');"
        "sys.exit(sorted(m for m in ('torch', 'numpy', 'transformers') if m in sys.modules) or 0)"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


# --- batch sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "micro", "steps", "world", "expected"),
    [
        (32, None, None, 4, (32, None)),
        (10, 4, None, 2, (10, 4)),
        (32, None, 4, 3, (32, None)),
        (32, 2, 4, 4, (32, 2)),
        (None, 2, None, 4, (8, 2)),
        (None, 2, 3, 4, (24, 2)),
        ("auto", 2, 3, 4, (24, 2)),
        ("auto", "auto", "auto", 4, (32, None)),
        ("auto", "auto", 2, 4, (64, None)),
        ("auto", None, None, 1, (8, None)),
    ],
)
def test_batch_sizes(
    total: Any, micro: Any, steps: Any, world: int, expected: tuple[int, int | None]
) -> None:
    config = load_config(
        {
            "train_batch_size": total,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": steps,
        }
    )
    batch = config.resolve_batch(world)
    assert batch[:2] == expected


def test_batch_notices() -> None:
    config = load_config({"train_batch_size": 2, "gradient_accumulation_steps": 4})
    no_effect, idle = config.resolve_batch(4).notices
    assert no_effect.startswith("gradient_accumulation_steps: 4 has no effect")
    assert idle == "train_batch_size: 2 samples for 4 ranks: some ranks have no work"


def test_contradictory_batch_sizes_name_all_values() -> None:
    config = load_config(
        {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 4,
        }
    )
    with pytest.raises(ConfigError, match=r"32 is not .* 2 x gradient_accumulation_steps 4 x 3 ranks = 24"):
        config.resolve_batch(3)
    with pytest.raises(ConfigError, match="world size is 0"):
        config.resolve_batch(0)


# --- reference page -------------------------------------------------------------------------------


def models() -> Iterator[type[BaseModel]]:
    yield Config
    yield from section_models().values()
    for kinds in PARAMS.values():
        yield from kinds.values()
    for section in PARAMS:
        annotation = Config.model_fields[section].annotation
        yield from get_args(get_args(get_args(annotation)[0])[0])


def test_every_field_has_a_description_of_one_line() -> None:
    for model in models():
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
            assert "\n" not in field.description


def test_reference_page_is_up_to_date() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    assert page == reference(), "run: python -m odcengine.config --reference > docs/configuration.md"


def test_reference_page_has_every_key() -> None:
    page = reference()
    for model in models():
        for name in model.model_fields:
            assert f"`{name}`" in page or f"\n## {name}\n" in page, name


def test_yaml_in_the_reference_page_loads(tmp_path: Path) -> None:
    block = reference().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "c.yaml").write_text(block)
    assert load_config(tmp_path / "c.yaml").notices == ()


PATHS = """\
train_batch_size: 8
model:
  path: models/none/here
  reference: some-org/not-downloaded
  lora:
    path: adapter
data:
  path: data/sft
  eval_path: adapter
checkpoint:
  dir: file/saved
  resume: /none/step_7
monitor:
  jsonl: .
  tensorboard: writable/new/deep
launch:
  log_dir: closed/logs
  hostfile: hosts
  container_image: images/none.sqsh
"""


def test_paths_that_are_not_there_are_told_with_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(PATHS)
    (tmp_path / "file").touch()
    for name in ("adapter", "writable", "closed"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "closed" not in str(path) and allowed(path, mode))
    host = socket.gethostname()

    def missing(name: str) -> str:
        return f"{name} does not exist (looked for {tmp_path / name} on {host})"

    expected = [
        f"c.yaml:3: model.path: {missing('models/none/here')}",
        f"c.yaml:4: model.reference: {missing('some-org/not-downloaded')}; as a name on the Hugging Face Hub "
        f"it is not downloaded yet ({tmp_path / 'hub'}), which the ranks would have to do",
        "c.yaml:6: model.lora.path: adapter has no adapter_config.json; expected an adapter as peft saves it",
        f"c.yaml:8: data.path: {missing('data/sft')}",
        "c.yaml:9: data.eval_path: adapter has no meta.json; expected a directory that odc prepare made",
        f"c.yaml:11: checkpoint.dir: file/saved cannot be a folder: {tmp_path / 'file'} is a file",
        f"c.yaml:12: checkpoint.resume: {missing('/none/step_7')}",
        "c.yaml:14: monitor.jsonl: . is a folder; expected a file",
        f"c.yaml:17: launch.log_dir: closed/logs cannot be made: {tmp_path / 'closed'} is not writable for "
        f"this user on {host}",
        f"c.yaml:18: launch.hostfile: {missing('hosts')}",
        f"c.yaml:19: launch.container_image: {missing('images/none.sqsh')}",
    ]
    assert main(["c.yaml"]) == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [f"warning: {line}" for line in expected]
    assert main(["c.yaml", "--paths"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.splitlines()) == ("", expected)


def test_paths_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["model/config.json", "adapter/adapter_config.json", "data/meta.json", "hosts", "metrics.jsonl"]
    for name in (*files, "hub/models--org--name/x", "saved/step_7/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "c.yaml").write_text(
        "train_batch_size: 8\n"
        "model: {path: model, reference: org/name, lora: {path: adapter}}\n"
        "data: {path: data, eval_path: data}\n"
        "checkpoint: {dir: saved, resume: saved/step_7}\n"
        "monitor: {jsonl: metrics.jsonl, timeline_dir: new, timeline_every: 5}\n"
        "launch: {hostfile: hosts, container_image: 'nvcr.io#nvidia/pytorch:26.01-py3', log_dir: logs}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert main(["c.yaml", "--paths"]) == 0
    assert capsys.readouterr().err == ""
