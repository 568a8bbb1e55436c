"""Mistakes in configuration files: all at once, with line, path and the right form (USER_CASES 8)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from odcengine.config import load_config
from odcengine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def problems(tmp_path: Path, text: str | bytes, name: str = "c.yaml") -> list[str]:
    """Returns the problems of a file, without the folder."""
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return [line.replace(f"{tmp_path}{os.sep}", "") for line in caught.value.problems]


def one(tmp_path: Path, text: str | bytes, name: str = "c.yaml") -> str:
    found = problems(tmp_path, text, name)
    assert len(found) == 1, found
    return found[0]


def of_mapping(mapping: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 8} | mapping)
    return list(caught.value.problems)


USER_CASE = """\
train_batch_size: 8
optimiser:
  type: AdamW
gradient_cliping: 1.0
optimizer:
  type: AdamW
  params:
    lr: 2e-5
zero_optimization:
  stage: auto
train_batch_size: 16
"""


def test_user_case_8_lists_all_mistakes_at_once(tmp_path: Path) -> None:
    assert problems(tmp_path, USER_CASE) == [
        "c.yaml:2: optimiser: unknown key; did you mean optimizer?",
        "c.yaml:4: gradient_cliping: unknown key; did you mean gradient_clipping?",
        "c.yaml:10: zero_optimization.stage: `auto` is not accepted here; expected 3",
        "c.yaml:11: train_batch_size: written twice, in lines 1 and 11; keep one",
    ]


def test_user_case_8_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(USER_CASE)
    done = subprocess.run(
        [sys.executable, "-m", "odcengine.config", "c.yaml"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 4
    assert all(line.startswith("c.yaml:") for line in done.stderr.splitlines())


def test_number_with_exponent_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("train_batch_size: 1e3\noptimizer: {type: AdamW, params: {lr: 2e-5, eps: 1E-6}}\n")
    config = load_config(path)
    assert config.train_batch_size == 1000
    assert config.optimizer is not None
    assert config.optimizer.params.lr == 2e-5


# --- the text itself ------------------------------------------------------------------------------

OK = "train_batch_size: 8\n"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("c.yaml", b"", ":1: the file is empty; expected a mapping"),
        ("c.yaml", b"# nothing\n", ":1: the file is empty"),
        ("c.json", b"  ", ":1: the file is empty"),
        ("c.yaml", b"- a\n- b\n", ":1: the top level is a list of 2; expected a mapping"),
        ("c.yaml", b"5\n", ":1: the top level is 5"),
        ("c.json", b"[]", ":1: the top level is a list of 0"),
        ("c.yaml", b"a: b\n\xff\n", ":2: byte 0xff is not UTF-8"),
        ("c.yaml", b"a: b\n\x00\n", ":2: not valid YAML: the character '\\x00' is not allowed"),
        ("c.yaml", b"odc:\n\tlockstep: true\n", ":2: not valid YAML: found a tab; indent with spaces"),
        ("c.yaml", b"a: [1\nb: 2\n", ":2: not valid YAML"),
        ("c.yaml", b"a: 1\n---\nb: 2\n", ":2: a second YAML document begins here"),
        ("c.yaml", b"a: " + b"[" * 3000, ":1: nested deeper than 32 levels"),
        ("c.json", b'{"a":' * 3000, ":1: nested deeper than 32 levels"),
        ("c.json", b"[" * 200000, ":1: nested deeper than 32 levels"),
        ("c.yaml", b"a: &a [*a]\n", ":1: a[0]: alias *a has no finished anchor before it"),
        ("c.yaml", b"a: *b\n", ":1: a: alias *b has no finished anchor before it"),
        ("c.yaml", b'a: "\\UFFFFFFFF"\n', ":1: not valid YAML"),
        ("c.yaml", b"%YAML " + b"9" * 5000 + b".1\n---\na: b\n", ":1: not valid YAML"),
        ("c.yaml", b"a: x\n" * 60000, ":1: the file has more than 262144 bytes"),
        ("c.json", b'{\n "a": 1,\n}', ":3: not valid JSON: '}' where a key in double quotes"),
        ("c.json", b'{\n // no\n "a": 1}', ":2: not valid JSON: '/' where a key in double quotes"),
        ("c.json", b"{\n 'a': 1}", ':2: not valid JSON: "\'" where a key'),
        ("c.json", b'{"a": 1}\nx', ":2: not valid JSON: text after the end of the object"),
        ("c.json", b'{"a": {"b": 1', ":1: not valid JSON: the end of the file where `,` or `}`"),
        ("c.json", b'{"a": \n nope}', ":2: not valid JSON: expecting value"),
        ("c.json", b'{"a": "\x01"}', ":1: not valid JSON: invalid control character"),
    ],
)
def test_unreadable_text(tmp_path: Path, name: str, text: bytes, expected: str) -> None:
    found = problems(tmp_path, text, name)
    assert found[0].startswith(name + expected), found


def test_alias_bomb(tmp_path: Path) -> None:
    """Nine aliases of nine aliases ... would be 9**9 values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    assert "more than 20000 values, aliases expanded" in one(tmp_path, "\n".join(lines))


def test_alias_is_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(OK + "optimizer: {type: SGD, params: {lr: &x 0.1, momentum: *x}}\n")
    config = load_config(path)
    assert config.optimizer is not None
    assert config.optimizer.type == "SGD"
    assert config.optimizer.params.momentum == 0.1


def test_tags_and_merge_keys_and_odd_keys(tmp_path: Path) -> None:
    text = OK + (
        "seed: !!python/object/apply:os.system [ls]\n"
        "odc: &o {lockstep: false}\n"
        "balance:\n"
        "  <<: *o\n"
        "? [a, b]\n"
        ": 1\n"
        "7: 1\n"
        "true: 1\n"
    )
    found = problems(tmp_path, text)
    assert "c.yaml:2: seed: the tag 'tag:yaml.org,2002:python/object/apply:os.system'" in found[0]
    assert "c.yaml:5: balance.'<<': merge keys are not supported" in found[2]
    assert "c.yaml:6: a key must be a plain name" in found[3]
    assert found[4].startswith("c.yaml:8: 7: unknown key")
    assert found[5].startswith("c.yaml:9: true: unknown key")


def test_yaml_1_1_words_are_text(tmp_path: Path) -> None:
    found = problems(
        tmp_path, OK + "on: 1\nodc:\n  lockstep: yes\n  timeout_s: 10:00\n  deterministic: off\n"
    )
    assert found[0].startswith("c.yaml:2: on: unknown key")
    assert found[1] == (
        "c.yaml:4: odc.lockstep: got 'yes'; it is text in YAML 1.2, write true; expected true or false"
    )
    assert found[2].startswith("c.yaml:5: odc.timeout_s: got '10:00'; expected a number > 0")
    assert "write false" in found[3]


def test_duplicate_keys_name_both_lines_in_json_too(tmp_path: Path) -> None:
    text = '{\n"train_batch_size": 8,\n"odc": {"lockstep": false,\n"lockstep": true}\n}'
    expected = "c.json:4: odc.lockstep: written twice, in lines 3 and 4; keep one"
    assert one(tmp_path, text, "c.json") == expected


def test_json_lines_and_paths(tmp_path: Path) -> None:
    text = '{\n"train_batch_size": 8,\n"optimizer": {"type": "AdamW",\n"params": {"betas": [0.9,\n1.5]}}}'
    assert one(tmp_path, text, "c.json") == (
        "c.json:5: optimizer.params.betas[1]: got 1.5; expected a list of 2, each a number >= 0 and < 1"
    )


def test_json_by_content_where_the_extension_does_not_say(tmp_path: Path) -> None:
    path = tmp_path / "ds_config"
    path.write_text('{\n\t"train_batch_size": 8,\n\t"optimizer": {"type": "Adam\\/W"}\n}')
    with pytest.raises(ConfigError, match=r"ds_config:3: optimizer.type: 'Adam/W' is unknown"):
        load_config(path)
    path.with_suffix(".JSON").write_bytes(b'\xef\xbb\xbf{"train_batch_size": 8}')
    assert load_config(path.with_suffix(".JSON")).train_batch_size == 8


@pytest.mark.parametrize("name", ["missing.yaml", ".", "a\0b", "x" * 5000, "", os.devnull])
def test_unreadable_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read the file|not a regular file"):
        load_config(name)


@pytest.mark.parametrize("source", [None, 5, ["a"], object()])
def test_source_of_a_wrong_type(source: Any) -> None:
    with pytest.raises(ConfigError, match="a configuration is a path or a mapping"):
        load_config(source)


def test_lone_surrogates(tmp_path: Path) -> None:
    found = problems(tmp_path, '{"train_batch_size": 8, "\\ud800": 1, "seed": "\\udfff"}', "c.json")
    assert all(line.isascii() for line in found)
    assert "seed: is not valid Unicode text" in found[1]


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train_batch_size: true", "got true; expected a whole number >= 1 or null"),
        ("train_batch_size: 0", "got 0; expected a whole number >= 1 or null"),
        ("train_batch_size: 1.5", "got 1.5; expected a whole number >= 1 or null"),
        ("train_batch_size: .nan", "got nan"),
        ("train_batch_size: .inf", "got inf"),
        ("train_batch_size: -.inf", "got -inf"),
        ("train_batch_size: 99999999999", "at most 2147483647"),
        ("train_batch_size: " + "9" * 5000, "got inf"),
        ("train_batch_size: '8'", "got '8'; it is text, remove the quotes; expected a whole number"),
        ("train_batch_size: [8]", "got a list of 1"),
        ("train_batch_size: {a: 8}", "got a mapping"),
        (OK + "gradient_clipping: false", "got false; expected a number >= 0"),
        (OK + "gradient_clipping: 1e999", "got inf"),
        (OK + "gradient_clipping: nan", "got 'nan'"),
        (OK + "gradient_clipping: -1", "got -1"),
        (OK + "odc: {timeout_s: 0}", "expected a number > 0 and <= 1e+07"),
        (OK + "odc: {timeout_s: 1e300}", "expected a number > 0 and <= 1e+07"),
        (OK + "odc: {reshard_after_forward: 2}", "resharding to a smaller group is not supported"),
        (OK + "odc: {wrap: LlamaDecoderLayer}", "got one name; expected auto or a list of class names"),
        (OK + "odc: {wrap: []}", "expected auto or a list of class names"),
        (OK + "odc: {wrap: ['a b']}", "expected auto or a list of class names"),
        (OK + "odc: {device: cuda, transport: mpi}", "ranks on cuda cannot use odc.transport: mpi"),
        (OK + "odc: {transport: shmm}", "got 'shmm'; did you mean shm? expected one of auto, shm"),
        (OK + "odc: {backend: deepspeed, lockstep: true}", "measures fsdp2 only; expected false"),
        (OK + "odc: {backend: deepspeed, wrap: [A]}", "DeepSpeed shards parameter by parameter; remove it"),
        (
            OK + "odc: {backend: deepspeed}\nmodel: {reference: m}",
            "not with odc.backend: deepspeed; expected null",
        ),
        (OK + "deepspeed: {a: 1}", "is for odc.backend: deepspeed only; remove it, or set the backend"),
        (OK + "odc: {deterministic: true}\nbalance: {strategy: dynamic}", "dynamic gives work to whoever"),
        (OK + "odc: {deterministic: true}\nbalance: {learn_costs: true}", "depend on measured times"),
        (OK + "odc: {deterministic: true, backend: deepspeed}", "sums in rank order with fsdp2 only"),
        (OK + "odc: 5", "got 5; expected a mapping with the keys backend"),
        (OK + "odc: {device: cpu, transport: cuda_p2p}", "ranks on cpu cannot use odc.transport: cuda_p2p"),
        (OK + "odc: {unmapped: true}", "is a test switch of odc.transport: nvshmem"),
        (OK + "balance: {strategy: dynamic}\nodc: {lockstep: true}", "dynamic cannot run with odc.lockstep"),
        (OK + "balance: {max_tokens_per_micro_batch: -1}", "got -1; expected a whole number >= 1"),
        (OK + "data: {too_long: cut}", "expected one of error, truncate, skip"),
        (OK + "launch: {signals: [KILL]}", "'KILL' cannot be caught; expected names out of HUP"),
        (OK + "launch: {signals: [FOO]}", "'FOO' is no signal"),
        (OK + "launch: {signals: INT}", "expected a list of signal names"),
        (OK + "launch: {signals: [[INT]]}", "expected names out of"),
        (OK + "launch: {log_dir: ''}", "got ''; expected text or null"),
        (OK + "optimizer: 5", "got 5; expected a mapping with the keys type and params, or null"),
        (OK + "optimizer: {params: {lr: 1}}", "optimizer.type: missing; expected one of Adam, AdamW, SGD"),
        (OK + "optimizer: {type: 5}", "got 5; expected one of Adam, AdamW, SGD"),
        (OK + "optimizer: {type: AdmW}", "'AdmW' is unknown; did you mean AdamW?"),
        (OK + "optimizer: {type: OneBitAdam}", "'OneBitAdam' is not in this version"),
        (OK + "optimizer: {type: AdamW, params: 5}", "got 5; expected a mapping with the keys lr, betas"),
        (OK + "optimizer: {type: AdamW, params: {learning_rate: 1}}", "unknown key; optimizer.params has lr"),
        (OK + "optimizer: {type: AdamW, params: {beta: 1}}", "unknown key; did you mean betas?"),
        (OK + "optimizer: {type: AdamW, params: {betas: [0.9]}}", "a list of 2, each a number"),
        (
            OK + "optimizer: {type: AdamW, params: {max_grad_norm: 1}}",
            "use the top-level key gradient_cl",
        ),
        (OK + "scheduler: {type: OneCycle}", "'OneCycle' is not in this version"),
        (OK + "scheduler: {type: StepLR}", "scheduler.params.step_size: missing; expected a whole number"),
        (OK + "scheduler: {type: WarmupLR, params: {last_batch_iteration: 7}}", "resumed from a checkpoint"),
        (OK + "lr: 1e-3", "unknown key here; it belongs at optimizer.params.lr"),
        (OK + "offload_param: {device: cpu}", "it belongs at zero_optimization.offload_param"),
        (OK + "overlap_com: true", "unknown key"),
        (OK + "zero_optimization: {overlap_com: true}", "did you mean overlap_comm?"),
        (OK + "zero_optimization: {stage: 2}", "stage 2 is not supported: parameters are always sharded"),
        (OK + "zero_optimization: {stage: true}", "got true; expected 3"),
        (OK + "preemption: {signals: [USR1]}", "give its directory in checkpoint.dir"),
        (OK + "monitor: {progress: on}", "got 'on'; expected one of auto, bar, lines, off"),
        (OK + "monitor: {peak_tflops: 0}", "expected a number > 0 or null"),
        (OK + "monitor: {timeline_every: 5}", "has no effect without monitor.timeline_dir"),
        (OK + "monitor: {timeline_dir: t}", "has no effect without monitor.timeline_every"),
        (OK + "monitor: {timeline_evry: 5}", "unknown key; did you mean timeline_every?"),
        (OK + "data: {max_length: auto}", "`auto` is not accepted here; expected a whole number >= 1"),
        ("seed: 1", "train_batch_size: missing; give it or train_micro_batch_size_per_gpu"),
        ("gradient_accumulation_steps: 4", "train_batch_size: missing"),
        ("train_batch_size:", "train_batch_size: missing"),
    ],
)
def test_wrong_value(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in one(tmp_path, text)


def test_many_mistakes_in_one_go(tmp_path: Path) -> None:
    """A wrong value in a section hides none of the others, nor the contradictions of valid ones."""
    text = """\
train_batch_size: 30
train_micro_batch_size_per_gpu: 4
gradient_accumulation_steps: 4
optimizer: {type: SGD, params: {lr: x, nesterov: true, fused: true, foreach: true}}
scheduler: {type: StepLR, params: {stepsize: 5}}
odc: {transport: collective, lockstep: true, node_size: 2, timeout_s: never}
balance: {strategy: lb_mini, max_tokens_per_micro_batch: 100}
data: {max_length: 200}
"""
    found = problems(tmp_path, text)
    starts = [
        "c.yaml:1: train_batch_size: 30 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_s",
        "c.yaml:4: optimizer.params.lr: got 'x'",
        "c.yaml:4: optimizer.params.foreach: excludes fused: true",
        "c.yaml:4: optimizer.params.nesterov: needs momentum > 0",
        "c.yaml:5: scheduler.params.step_size: missing",
        "c.yaml:5: scheduler.params.stepsize: unknown key; did you mean step_size?",
        "c.yaml:6: odc.timeout_s: got 'never'",
        "c.yaml:6: odc.lockstep: measures a one-sided transport",
        "c.yaml:6: odc.node_size: needs the windows of a one-sided transport",
        "c.yaml:7: balance.strategy: lb_mini cannot run with odc.transport: collective",
        "c.yaml:8: data.max_length: 200 is more than balance.max_tokens_per_micro_batch 100",
    ]
    assert len(found) == len(starts), found
    for line, start in zip(found, starts, strict=True):
        assert line.startswith(start), found


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        (
            {"odc": {"transport": "collective", "sharding": "hybrid"}},
            "odc.sharding: hybrid needs the win",
        ),
        ({"odc": {"sharding": "full", "node_size": 2}}, "odc.node_size: has no use with odc.sharding: full"),
        (
            {"odc": {"lockstep": True}, "balance": {"strategy": "lb_mini"}},
            "balance.strategy: lb_mini cannot run with odc.lockstep: true",
        ),
        ({"data": {"max_length": 8193}}, "data.max_length: 8193 is more than"),
    ],
)
def test_contradiction(mapping: dict[str, Any], expected: str) -> None:
    found = of_mapping(mapping)
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_no_contradiction_is_reported_for_a_value_that_is_wrong_itself() -> None:
    found = of_mapping({"odc": {"sharding": "fulll", "node_size": 2}, "data": {"max_length": "a"}})
    assert [line.partition(":")[0] for line in found] == ["odc.sharding", "data.max_length"]
    limits = of_mapping(
        {"balance": {"max_tokens_per_micro_batch": 0}, "data": {"max_length": 100000}},
    )
    assert [line.partition(":")[0] for line in limits] == ["balance.max_tokens_per_micro_batch"]


def test_mapping_with_odd_content() -> None:
    loop: dict[str, Any] = {}
    loop["odc"] = loop
    assert "nested deeper" in of_mapping(loop)[0]
    odd: dict[Any, Any] = {"seed": {1}, 5: 1, "data": {"shuffle": b"x"}, "steps_per_print": 10**5000}
    found = of_mapping(odd)
    assert found == [
        "seed: is an object of type set; expected plain data",
        "the key 5 is not text",
        "data.shuffle: is an object of type bytes; expected plain data",
        "steps_per_print: got a very large number; expected a whole number >= 0 or null, at most 2147483647",
    ]


def test_nul_in_text(tmp_path: Path) -> None:
    """No path and no name can hold it; the system's message would not name the key."""
    path = tmp_path / "c.yaml"
    for text in (
        'train_batch_size: 4\ndata: {path: "a\\0b"}',
        '{"train_batch_size": 4,\n"data": {"path": "a\\u0000b"}}',
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"c\.yaml:2: data\.path: holds a NUL character"):
            load_config(path)
    with pytest.raises(ConfigError, match=r"data\.path: holds a NUL character"):
        load_config({"train_batch_size": 4, "data": {"path": "a\0b"}})
