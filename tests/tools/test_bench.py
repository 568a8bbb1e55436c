"""``odc bench`` on real ranks: on CPUs here, on GPUs where there are some."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, values
from odc_tools.bench import add_arguments
from programs import run_program

from odcengine._version import __version__
from odcengine.transport.base import Window
from odcengine.transport.shm import ShmTransport

ROOT = Path(__file__).resolve().parents[2]

requires_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def bench(
    *words: str, cwd: Path, starter: tuple[str, ...] = (), timeout_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    return run_program(*starter, "-m", "odc_tools", "bench", *words, folder=cwd, timeout_s=timeout_s)


def result(done: subprocess.CompletedProcess[str], file: Path) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, Any] = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert record["versions"]["odcengine"] == __version__
    assert record["versions"]["torch"] == version("torch")
    assert {"task", "date", "arguments", "commit", "device", "ranks"} <= set(record)
    assert record["wrong"] == []
    return record


def test_primitives(tmp_path: Path) -> None:
    file = tmp_path / "primitives.json"
    words = ("--device", "cpu", "--sizes-mib", "0.05,0.25", "--rounds", "3", "--repeats", "2", "--json")
    done = bench("primitives", *words, str(file), "--commit", "abc", cwd=tmp_path)
    record = result(done, file)
    assert (record["ranks"], record["commit"], record["transport"]) == (2, "abc", "ShmTransport")
    assert [size["mib"] for size in record["sizes"]] == [0.05, 0.25]
    for size in record["sizes"]:
        assert set(size["ways"]) == {
            *("pull", "all_gather", "push_fp32", "push_bf16", "reduce_scatter"),
            *("incast_pull", "incast_push"),
        }
        for way in size["ways"].values():
            assert len(way["samples_s"]) == 3
            assert 0 < way["seconds"]["p10"] <= way["seconds"]["median"] <= way["seconds"]["p90"]
            assert way["gb_per_s"] > 0
        medians = {name: way["seconds"]["median"] for name, way in size["ways"].items()}
        assert size["ratios"]["pull"] == pytest.approx(medians["all_gather"] / medians["pull"])
        assert size["ratios"]["push_bf16"] == pytest.approx(medians["reduce_scatter"] / medians["push_bf16"])
    assert "reduce_scatter" in done.stdout


def test_training(tmp_path: Path) -> None:
    file, traces = tmp_path / "training.json", tmp_path / "traces"
    words = ["--device", "cpu", "--workload", "longalign", "--shape", "tiny", "--length-scale", "0.002"]
    words += ["--seeds", "0-1", "--sequences", "3", "--rounds", "2", "--profile", str(traces)]
    words += ["--methods", "fsdp2/lb_micro", "fsdp2-symm/lb_micro", "odc/lb_micro", "odc/lb_mini"]
    words += ["limit/lb_mini", "fsdp2/local_sort"]
    done = bench("training", *words, "--json", str(file), cwd=tmp_path)
    record = result(done, file)
    methods = ["fsdp2/lb_micro", "odc/lb_micro", "odc/lb_mini", "limit/lb_mini", "fsdp2/local_sort"]
    assert record["methods"] == methods
    assert record["skipped"] == {"fsdp2-symm/lb_micro": "symmetric memory needs GPUs"}
    assert record["complete"]
    assert len(record["steps"]) == 3 * 2 * len(methods)
    assert [len(minibatch["lengths"]) for minibatch in record["minibatches"]] == [6, 6]
    orders = set()
    for start in range(0, len(record["steps"]), len(methods)):
        turn = record["steps"][start : start + len(methods)]
        assert sorted(step["method"] for step in turn) == sorted(methods)
        orders.add(tuple(step["method"] for step in turn))
        assert all(step["wall_s"] > 0 for step in turn)
        by_method = {step["method"]: step for step in turn}
        losses = [by_method[name]["loss"] for name in methods if not name.startswith("limit")]
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-3)
        assert losses[0] == pytest.approx(6.24, abs=0.2)  # ln 512: the model knows nothing
        norms = [by_method[name]["grad_norm"] for name in methods if not name.startswith("limit")]
        assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-2)
        assert len(by_method["odc/lb_mini"]["busy_s"]) == 2
    assert len(orders) > 1  # methods take turns in being first
    assert by_method["limit/lb_mini"]["grad_norm"] == 0.0  # nothing is pushed any more
    assert record["agreement"]["odc/lb_mini"]["loss"] > 0  # it is another model, not the same numbers
    summary = record["summary"]
    assert set(summary) == set(methods)
    assert summary["odc/lb_mini"]["share_of_limit"] > 0
    assert 0 < summary["odc/lb_mini"]["utilisation"] <= 1
    assert [verdict["goal"] for verdict in record["verdicts"]][-1] == "utilisation, odc/lb_mini"
    for name in methods:
        trace = json.loads((traces / f"{name.replace('/', '-')}.json").read_text())
        assert any(event.get("cat") == "cpu_op" for event in trace["traceEvents"])
        assert record["profile"][name]["operators"] > 100
        assert 0 < record["profile"][name]["host_s"] <= record["profile"][name]["wall_s"]
        assert name in done.stdout


def test_plans_with_costs_of_the_warm_up(tmp_path: Path) -> None:
    file = tmp_path / "learned.json"
    words = ["--device", "cpu", "--workload", "longalign", "--shape", "tiny", "--length-scale", "0.004"]
    words += [
        "--seeds",
        "0-5",
        "--rounds",
        "1",
        "--learn-costs",
        "--methods",
        "fsdp2/lb_micro",
        "odc/lb_mini",
    ]
    done = bench("training", *words, "--json", str(file), cwd=tmp_path)
    record = result(done, file)
    learned = record["learned"]
    assert learned["num_steps"] == 5  # the first minibatch is not learned from
    wall_s = [step["wall_s"] for step in record["steps"] if step["method"] == "odc/lb_mini"]
    for minibatch in record["minibatches"]:  # predictions are in seconds now, and not in FLOP
        assert min(wall_s) / 50 < minibatch["predicted"]["odc/lb_mini"] < max(wall_s) * 50
    measured = [step for step in record["steps"] if step["round"] == 0]
    assert len(measured) == 6 * 2


def test_several_workloads_with_the_same_models(tmp_path: Path) -> None:
    """The first one warms up and learns for all; each has its file, and its share of the time."""
    words = ["--device", "cpu", "--workload", "longalign:3", "grpo", "swesmith", "--shape", "tiny"]
    words += ["--length-scale", "0.002", "--seeds", "0-5", "--rounds", "1", "--learn-costs", "--warm-up", "5"]
    words += ["--methods", "fsdp2/lb_micro", "odc/lb_mini", "odc/dynamic"]
    done = bench("training", *words, "--json", str(tmp_path / "all.json"), cwd=tmp_path)
    warm, learned = {"longalign-3": 5, "grpo": 1, "swesmith": 1}, []
    for name, number in warm.items():
        record = result(done, tmp_path / f"all-{name}.json")
        assert record["arguments"]["workload"] == name.removesuffix("-3")
        assert record["arguments"]["sequences"] == (3 if name == "longalign-3" else None)
        rounds = [step["round"] for step in record["steps"]]
        assert rounds.count(-1) == number * 3
        assert rounds.count(0) == 6 * 3
        assert len({step["minibatch"] for step in record["steps"] if step["round"] == 0}) == 6
        assert [step["first"] for step in record["steps"]].count(True) == (3 if name == "longalign-3" else 0)
        learned.append(record["learned"]["num_steps"])
    # Planned steps until then, warming up and measured; the very first one compiles kernels.
    assert learned == [4, 4 + 6 + 1, 4 + 6 + 1 + 6 + 1]
    assert not list(tmp_path.glob("all.json"))
    assert "longalign: warm-up 5 of 5" in done.stdout + done.stderr


def test_memory_under_torchrun_and_a_budget(tmp_path: Path) -> None:
    """Ranks that torchrun started; with no time left it still measures something, and says what it cut."""
    starter = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = ["training", "--device", "cpu", "--workload", "balanced-2k", "--shape", "tiny"]
    words += ["--length-scale", "0.01", "--seeds", "0-3", "--methods", "fsdp2/lb_micro", "odc/lb_micro"]
    file = tmp_path / "memory.json"
    done = bench(*words, "--memory", "--json", str(file), cwd=tmp_path, starter=starter)
    record = result(done, file)
    assert all(peaks["peak_bytes"] > 0 for peaks in record["memory"].values())
    assert [verdict["goal"] for verdict in record["verdicts"]] == ["peak memory in GiB, odc/lb_micro"]
    file = tmp_path / "budget.json"
    done = bench(*words, "--budget-s", "1", "--json", str(file), cwd=tmp_path)
    record = result(done, file)
    assert len(record["steps"]) == (2 + 1) * 2  # two warm minibatches, one of them measured
    assert [note.split(",")[0] for note in record["notes"]] == [
        "2 of 4 minibatches were left out",
        "1 of 4 measurements were made",
    ]
    assert all(note in done.stdout for note in record["notes"])


class _Broken(ShmTransport):
    """Loses one element of what it pulls."""

    def pull(self, window: Window, peer: int, node: int, out: torch.Tensor, offset: int = 0) -> None:
        super().pull(window, peer, node, out, offset)
        out[-1] += 1


def _measure_broken(rank: int, world_size: int, file: str) -> int:
    from odc_tools.bench import primitives
    from odc_tools.bench import ranks as ranks_module

    from odcengine.transport.base import Grid

    ranks_module.make_transport = lambda name, control, device: _Broken(control, Grid.of(control.topology))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(
        ["primitives", "--sizes-mib", "0.01", "--rounds", "1", "--json", file, "--device", "cpu"]
    )
    return primitives.run(options, ranks_module.Ranks("cpu", 60.0))


def test_wrong_data_is_found(tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    results = run_ranks(_measure_broken, 2, str(file))
    assert [rank.value for rank in results] == [1, 1], results
    wrong = json.loads(file.read_text())["wrong"]
    assert wrong == ["0.01 MiB: a pulled shard", "0.01 MiB: the shard that all pulled"]


def _empty_micro_batches(rank: int, world_size: int) -> list[tuple[float, float]]:
    """A minibatch that rank 0 has all of: rank 1 runs an empty micro-batch, or none on demand."""
    from odc_tools.bench.methods import make_method
    from odc_tools.bench.ranks import Ranks
    from odc_tools.bench.schedule import MethodName
    from odc_tools.bench.workloads import build_model, draw_tokens, model_config

    from odcengine.data.pack import pack_samples

    ranks, config = Ranks("cpu", 60.0), model_config("tiny")
    tokens = draw_tokens(0, 0, [30, 7, 12], config.vocab_size)
    samples = [{"input_ids": ids} for ids in tokens]
    whole, empty = [pack_samples(samples)], [pack_samples([])]
    outcomes = []
    for name in ("fsdp2/lb_micro", "odc/lb_micro"):
        model = build_model(config, seed=0, device="cpu", checkpointing=True)
        method = make_method(MethodName.parse(name), model, ranks, {"timeout_s": 60.0})
        for _ in range(2):
            other = empty if method.name.collective else []
            method.run(whole if rank == 0 else other, 49 - 3)
            outcome = method.outcome()
            outcomes.append((outcome.loss or 0.0, outcome.grad_norm or 0.0))
        method.close()
    return outcomes


def test_empty_micro_batches_add_nothing() -> None:
    first, second = values(run_ranks(_empty_micro_batches, 2))
    assert first == second
    for fsdp2, odc in zip(first[:2], first[2:], strict=True):
        assert odc == pytest.approx(fsdp2, rel=1e-2)
        assert fsdp2[0] == pytest.approx(6.24, abs=0.2)


def test_compiled_models_have_compiled_blocks() -> None:
    from odc_tools.bench.workloads import build_model, model_config

    config = model_config("tiny")
    for compiled in (False, True):
        model = build_model(config, seed=0, device="cpu", checkpointing=True, compiled=compiled)
        found = {
            type(module).__name__ for module in model.modules() if module._compiled_call_impl is not None
        }
        assert found == ({"Qwen2DecoderLayer"} if compiled else set())


@pytest.mark.soak
def test_training_with_compiled_blocks(tmp_path: Path) -> None:
    """The same losses with and without, by every method."""
    losses = {}
    for option in ([], ["--compile"]):
        file = tmp_path / f"training{len(option)}.json"
        words = ["--device", "cpu", "--workload", "longalign", "--shape", "tiny", "--length-scale", "0.002"]
        words += [
            "--seeds",
            "0",
            "--sequences",
            "2",
            "--rounds",
            "1",
            "--budget-s",
            "800",
            "--no-checkpointing",
        ]
        words += ["--methods", "fsdp2/lb_micro", "odc/lb_mini", "--json", str(file), *option]
        done = bench("training", *words, cwd=tmp_path, timeout_s=800)
        record = result(done, file)
        assert ("blocks compiled" in done.stdout) == bool(option)
        losses[len(option)] = [step["loss"] for step in record["steps"]]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from odc_tools.cli import main\n"
        "try: main(['bench', 'training', '--help'])\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / n) for n in ("", "launcher", "tools"))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert "--workload" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.multi_gpu
@requires_gpus
def test_primitives_on_gpus(tmp_path: Path) -> None:
    file = tmp_path / "primitives.json"
    done = bench(
        "primitives", "--sizes-mib", "1,16", "--rounds", "5", "--json", str(file), cwd=tmp_path, timeout_s=300
    )
    record = result(done, file)
    assert record["transport"] == "CudaP2PTransport"
    assert set(record["overlap"]["beside"]) >= {"alone", "pull", "push_fp32", "push_bf16"}
    assert record["verdicts"]


@pytest.mark.multi_gpu
@requires_gpus
def test_training_on_gpus(tmp_path: Path) -> None:
    file = tmp_path / "training.json"
    words = ["--workload", "longalign", "--shape", "tiny", "--seeds", "0-1", "--profile", str(tmp_path)]
    done = bench("training", *words, "--json", str(file), cwd=tmp_path, timeout_s=300)
    record = result(done, file)
    assert record["complete"]
    assert not record["notes"]
    assert record["profile"]["odc/lb_mini"]["kernels"] > 100
    done = bench("training", *words[:-2], "--memory", "--json", str(file), cwd=tmp_path, timeout_s=300)
    assert result(done, file)["memory"]["odc/lb_mini"]["allocated_bytes"] > 0


@pytest.mark.multi_gpu
@requires_gpus
def test_fsdp2_on_symmetric_memory(tmp_path: Path) -> None:
    """It runs and agrees with FSDP2's default, or the reason is stated."""
    file = tmp_path / "symmetric.json"
    words = ["--workload", "balanced-2k", "--shape", "tiny", "--seeds", "0"]
    words += ["--methods", "fsdp2/lb_micro", "fsdp2-symm/lb_micro"]
    done = bench("training", *words, "--json", str(file), cwd=tmp_path, timeout_s=300)
    record = result(done, file)
    assert "fsdp2-symm/lb_micro" in (record["skipped"] or record["summary"])


@pytest.mark.usefixtures("compiled_deepspeed")
def test_deepspeed_against_itself_on_demand(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    file = tmp_path / "zero3.json"
    words = ["--device", "cpu", "--workload", "longalign", "--shape", "tiny", "--length-scale", "0.002"]
    words += ["--seeds", "0", "--sequences", "3", "--rounds", "2", "--node-size", "1"]
    words += ["--methods", "zero3/lb_micro", "odc-zero3/lb_micro", "odc-zero3/lb_mini", "odc/lb_mini"]
    record = result(bench("training", *words, "--json", str(file), cwd=tmp_path), file)
    assert record["complete"]
    assert record["skipped"] == {}
    for start in range(0, len(record["steps"]), 4):
        turn = record["steps"][start : start + 4]
        assert [s["loss"] for s in turn] == pytest.approx([turn[0]["loss"]] * 4, rel=3e-5)
        assert [s["grad_norm"] for s in turn] == pytest.approx([turn[0]["grad_norm"]] * 4, rel=1e-2)
    assert set(record["summary"]) == set(record["methods"])
