"""The parts of ``odc bench`` that need no ranks: workloads, schedules, figures, traces and tables."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from odc_tools.bench import check_options
from odc_tools.bench.figures import Spread, Verdict, plan_verdict, table
from odc_tools.bench.profile import read_trace
from odc_tools.bench.schedule import MethodName, make_minibatches, methods_of, tasks_of
from odc_tools.bench.summary import add_summary, describe_minibatch, format_record
from odc_tools.bench.workloads import SHAPES, WORKLOADS, draw_tokens, model_config
from odc_tools.cli import main

from odcengine.balance import CostModel
from odcengine.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "mean", "spread", "least", "most"),
    [
        ("longalign", 16450, 0.82, 512, 65536),
        ("swesmith", 34660, 0.43, 2048, 65536),
        ("sharegpt", 2890, 2.03, 16, 65536),
        ("grpo", 7780, 0.58, 41, 16984),
    ],
)
def test_moments(name: str, mean: float, spread: float, least: int, most: int) -> None:
    lengths = np.array(WORKLOADS[name].lengths(0, 0, 100_000))
    assert lengths.mean() == pytest.approx(mean, rel=0.02)
    assert lengths.std() / lengths.mean() == pytest.approx(spread, rel=0.03)
    assert least <= lengths.min()
    assert lengths.max() <= most == WORKLOADS[name].longest


def test_rollouts_of_a_prompt_are_alike() -> None:
    few = [np.log(WORKLOADS["grpo"].lengths(seed, 0, 8)) for seed in range(400)]
    within = np.mean([x.var() for x in few])
    between = np.var([x.mean() for x in few])
    assert between > 1.2 * within  # 0.55**2 against 0.45**2, a little less for the cut


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_lengths_are_a_function_of_the_seed(name: str) -> None:
    workload = WORKLOADS[name]
    assert workload.lengths(3, 1, 16) == workload.lengths(3, 1, 16)
    if not workload.balanced:
        assert workload.lengths(3, 1, 16) != workload.lengths(3, 2, 16)
        assert workload.lengths(3, 1, 16) != workload.lengths(4, 1, 16)
    else:
        assert workload.lengths(3, 1, 5) == [workload.longest] * 5
    small = workload.lengths(3, 1, 64, scale=0.001)
    assert 2 <= min(small) <= max(small) <= workload.token_limit(0.001)


def test_known_lengths() -> None:
    """They must not change with numpy's version or by accident: results are compared over time."""
    assert WORKLOADS["longalign"].lengths(0, 0, 4) == LONGALIGN_0
    assert WORKLOADS["swesmith"].lengths(0, 0, 4) == SWESMITH_0


LONGALIGN_0 = [13579, 11048, 20498, 13355]
SWESMITH_0 = [34676, 43969, 24791, 58220]


def test_tokens() -> None:
    tokens = draw_tokens(1, 2, [5, 70], 100)
    again = draw_tokens(1, 2, [5, 70], 100)
    assert [len(ids) for ids in tokens] == [5, 70]
    assert all(np.array_equal(a, b) for a, b in zip(tokens, again, strict=True))
    assert max(ids.max() for ids in tokens) < 100
    assert not np.array_equal(tokens[0], draw_tokens(1, 3, [5], 100)[0])


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        # 7,615,616,512 as published, less 128 rows in each of the two embeddings
        ("qwen2.5-7b", 7_615_616_512 - 2 * 128 * 3584),
    ],
)
def test_shapes_are_the_published_ones(shape: str, parameters: int) -> None:
    from transformers import Qwen2ForCausalLM

    with torch.device("meta"):
        model = Qwen2ForCausalLM(model_config(shape))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def options_of(*words: str) -> argparse.Namespace:
    from odc_tools.bench import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(list(words))


def training(*words: str) -> argparse.Namespace:
    return options_of("training", "--workload", "longalign", "--shape", "tiny", *words)


def test_seeds() -> None:
    assert training("--seeds", "0-2,7").seeds == [0, 1, 2, 7]
    assert training().seeds == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--methods", "odc"), "expected KIND/PLAN"),
        (("--methods", "nccl/lb_micro"), "expected KIND/PLAN"),
        (("--methods", "fsdp2/lb_mini"), "collectives need equal numbers"),
        (("--methods", "odc/lb_mini", "odc/lb_mini"), "comes twice"),
        (("--max-tokens", "100"), "sequences of up to 65536 tokens"),
        (("--ranks", "1"), "--ranks 1: it must be 2 or more"),
        (("--rounds", "0"), "--rounds 0: it must be 1 or more"),
        (("--length-scale", "nan"), "--length-scale nan"),
        (("--memory", "--profile", "x"), "not with --memory"),
        (("--json", "no/such/folder.json"), "there is no folder"),
        (("--workload", "balanced-8k", "--sequences", "8"), "balanced-8k has 4 a rank"),
        (("--workload", "balanced-8k:8"), "balanced-8k has 4 a rank"),
        (("--workload", "longaling"), "there is no longaling; expected longalign, swesmith"),
        (("--workload", "grpo", "swesmith:0"), "after the colon comes a number of sequences, 1 or more"),
        (("--workload", "grpo", "grpo"), "one comes twice"),
        (("--workload", "grpo", "swesmith", "--profile", "x"), "traces one workload"),
        (("--warm-up", "2", "--memory"), "runs every minibatch only once"),
        (("--node-size", "0"), "--node-size 0: it must be 1 or more"),
        (("--node-size", "3", "--ranks", "4"), "does not divide the 4 ranks"),
        (("--node-size", "2", "--methods", "fsdp2/lb_micro"), "none of the --methods is on demand"),
    ],
)
def test_mistakes(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_options(training(*words))


def test_mistakes_end_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "training", "--workload", "grpo", "--shape", "tiny"]
    assert main([*words, "--max-tokens", "9", "--methods", "fsdp2/lb_mini"]) == 2
    told = capsys.readouterr().err
    assert "odc bench: error: --methods fsdp2/lb_mini: collectives need equal numbers" in told
    assert "odc bench: error: --max-tokens 9" in told
    assert main(["bench", "primitives", "--sizes-mib", "1,0", "--rounds", "0"]) == 2
    told = capsys.readouterr().err
    assert "--sizes-mib 0.0" in told
    assert "--rounds 0" in told


def test_default_methods() -> None:
    unequal, equal = training(), training("--workload", "balanced-2k")
    assert [str(name) for name in methods_of(equal)] == ["fsdp2/lb_micro", "odc/lb_micro", "limit/lb_micro"]
    assert [str(name) for name in methods_of(unequal)] == ["fsdp2/lb_micro", "odc/lb_micro", "odc/lb_mini"]
    both = [str(name) for name in methods_of(training("--workload", "balanced-2k", "grpo:8"))]
    assert both == ["fsdp2/lb_micro", "odc/lb_micro", "odc/lb_mini", "limit/lb_micro"]
    memory = methods_of(training("--workload", "balanced-2k", "--memory"))
    assert [str(name) for name in memory] == ["fsdp2/lb_micro", "odc/lb_micro"]


def test_balanced_workloads_have_one_sequence_a_micro_batch() -> None:
    for name, count in (("balanced-2k", 8), ("balanced-8k", 4), ("single-32k", 1)):
        options = training("--workload", name, "--seeds", "0")
        (minibatch,) = make_minibatches(tasks_of(options)[0], methods_of(options), 2, CostModel.default())
        assert len(minibatch.lengths) == 2 * count
        for plan in minibatch.plans.values():
            assert [[len(group) for group in rank] for rank in plan.micro_batches] == [[1] * count] * 2


# -- figures -------------------------------------------------------------------------------------------


def test_spread() -> None:
    spread = Spread.of([float(value) for value in range(11)])
    assert spread == Spread(5.0, 1.0, 9.0)
    assert spread.scaled(2.0) == Spread(10.0, 2.0, 18.0)


def test_verdict_of_a_plan() -> None:
    """0.97 x (predicted lb_micro / predicted plan) x (speed-up with the same plan)."""
    verdict = plan_verdict(
        plan="odc/lb_mini",
        base_s=12.0,
        plan_s=8.0,
        same_plan_s=10.0,
        base_predicted=1.3,
        plan_predicted=1.0,
        prediction="p",
    )
    assert verdict.value == pytest.approx(1.5)
    assert verdict.target == pytest.approx(0.97 * 1.3 * 1.2)
    assert not verdict.met  # 1.5 < 1.5132
    assert dict(verdict.factors) == {
        "predicted gain of the plan": pytest.approx(1.3),
        "speed-up with the same plan": pytest.approx(1.2),
    }
    assert "NOT MET" in str(verdict)
    assert "1.300" in str(verdict)


def test_verdict_directions() -> None:
    assert Verdict("a", 1.5, 1.5).met
    assert not Verdict("a", 1.49, 1.5).met
    assert Verdict("a", 1.1, 1.1, at_most=True).met
    assert not Verdict("a", 1.11, 1.1, at_most=True).met
    assert json.loads(json.dumps(Verdict("a", 1.0, 2.0).to_json()))["met"] is False


def test_table() -> None:
    assert table([["a", "bb"], ["ccc", "d"]]) == "a    bb\nccc   d"


# -- summary -------------------------------------------------------------------------------------------

WALLS = {"fsdp2/lb_micro": 4.0, "odc/lb_micro": 3.0, "limit/lb_micro": 2.7, "odc/lb_mini": 2.5}


def record_of(walls: dict[str, float] = WALLS, workload: str = "longalign") -> tuple[dict[str, Any], Any]:
    """Two minibatches, the second with twice the times; a slow warm-up and two rounds."""
    options = training("--workload", workload, "--seeds", "0-1", "--methods", *walls)
    names = methods_of(options)
    minibatches = make_minibatches(tasks_of(options)[0], names, 2, CostModel.default())
    steps = []
    for round_ in (-1, 0, 1):
        for number in range(2):
            for method, wall in walls.items():
                seconds = 100.0 if round_ < 0 else wall * (1 + number) * (1.0 if round_ else 1.1)
                steps.append(
                    {
                        "round": round_,
                        "minibatch": number,
                        "method": method,
                        "wall_s": seconds,
                        "loss": 3.0,
                        "grad_norm": 1.0,
                        "busy_s": None if method.startswith("fsdp2") else [0.9 * seconds, 0.7 * seconds],
                    }
                )
    record = {
        "arguments": {"workload": workload, "shape": "tiny", "length_scale": 1.0},
        "ranks": 2,
        "device": "test",
        "methods": list(walls),
        "skipped": {},
        "notes": [],
        "minibatches": [describe_minibatch(minibatch, names) for minibatch in minibatches],
        "steps": steps,
    }
    return record, names


def test_speeds() -> None:
    record, names = record_of()
    assert add_summary(record, names)
    tokens = sum(sum(minibatch["lengths"]) for minibatch in record["minibatches"])
    base, plan = record["summary"]["fsdp2/lb_micro"], record["summary"]["odc/lb_mini"]
    assert base["total_s"] == pytest.approx(3 * 4.0 * 1.05)  # medians of two rounds
    assert base["tokens_per_s"] == pytest.approx(tokens / base["total_s"])
    assert plan["speedup"] == pytest.approx(1.6)
    assert plan["speedup_spread"]["p10"] == pytest.approx(1.6)
    assert plan["utilisation"] == pytest.approx(0.8)
    assert base["utilisation"] is None
    assert record["summary"]["odc/lb_micro"]["share_of_limit"] == pytest.approx(0.9)
    assert record["summary"]["odc/lb_micro"]["share_of_limit_spread"]["p10"] == pytest.approx(0.9)
    assert plan["share_of_limit"] is None  # its plan was not run without communication
    costs = [minibatch["plans"] for minibatch in record["minibatches"]]
    lockstep = sum(plans["lb_micro"]["lockstep_cost"] for plans in costs)
    on_demand = sum(plans["lb_mini"]["on_demand_cost"] for plans in costs)
    assert plan["predicted_speedup"] == pytest.approx(lockstep / on_demand)
    assert lockstep >= on_demand


def test_goals_of_unequal_lengths() -> None:
    record, names = record_of()
    add_summary(record, names)
    on_demand, lockstep, utilisation = record["verdicts"]
    plans = [minibatch["plans"] for minibatch in record["minibatches"]]
    best = sum(plan["lb_mini"]["on_demand_cost"] for plan in plans)
    for verdict, key in ((on_demand, "on_demand_cost"), (lockstep, "lockstep_cost")):
        predicted = sum(plan["lb_micro"][key] for plan in plans) / best
        assert verdict["goal"].startswith("odc/lb_mini over")
        assert verdict["target"] == pytest.approx(0.97 * predicted * 4 / 3)
        assert verdict["met"] is (verdict["target"] <= 1.6)
    assert utilisation["value"] == pytest.approx(0.8)
    assert not utilisation["met"]


def test_goals_of_equal_lengths() -> None:
    walls = {name: WALLS[name] for name in ("fsdp2/lb_micro", "odc/lb_micro", "limit/lb_micro")}
    record, names = record_of(walls, "balanced-8k")
    add_summary(record, names)
    goals = {verdict["goal"]: verdict for verdict in record["verdicts"]}
    share = goals["share of the limit, odc/lb_micro"]
    assert share["value"] == pytest.approx(0.9)
    assert not share["met"]
    over = goals["share of the limit, odc/lb_micro over FSDP2's"]
    assert over["target"] == pytest.approx(2.7 / 4.0)
    assert over["met"]


def test_different_numbers_are_found() -> None:
    record, names = record_of()
    for key, value, text in (("loss", 3.1, "its loss differs"), ("grad_norm", None, "its grad_norm differs")):
        changed = copy.deepcopy(record)
        step = next(step for step in changed["steps"] if step["method"] == "odc/lb_mini")
        step[key] = value
        assert not add_summary(changed, names)
        assert len(changed["wrong"]) == 1
        assert text in changed["wrong"][0]
        assert "WRONG: odc/lb_mini" in format_record(changed)
        json.dumps(changed, allow_nan=False)
    next(step for step in record["steps"] if step["method"].startswith("limit"))["loss"] = None
    assert add_summary(record, names)  # its numbers are wrong anyway
    assert "not finite" in record["notes"][0]


def test_memory_goal() -> None:
    record, names = record_of()
    gib = 2**30
    record["memory"] = {
        "fsdp2/lb_micro": {"peak_bytes": 10.0 * gib, "parameters": gib},
        "odc/lb_micro": {"peak_bytes": 11.2 * gib, "parameters": gib},
        "odc/lb_mini": {"peak_bytes": 11.3 * gib, "parameters": gib},
    }
    add_summary(record, names)
    good, bad = record["verdicts"]
    assert good["target"] == pytest.approx(11.0 * 1.02)
    assert good["met"]
    assert not bad["met"]
    assert "allocated GiB" in format_record(record)


def test_method_names() -> None:
    name = MethodName.parse("odc/lb_mini")
    assert (name.kind, name.strategy, str(name)) == ("odc", "lb_mini", "odc/lb_mini")
    assert MethodName.parse("fsdp2/local_sort").collective
    assert not MethodName.parse("limit/lb_micro").right


# -- traces --------------------------------------------------------------------------------------------


def event(category: str, name: str, start: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}


def test_read_trace() -> None:
    found = read_trace(
        [
            {"ph": "M", "name": "process_name"},
            event("cpu_op", "aten::mm", 0, 50),
            event("cpu_op", "aten::add", 60, 5),
            event("cuda_runtime", "cudaLaunchKernel", 1, 2),
            event("cuda_driver", "cuLaunchKernelEx", 5, 2),
            event("cuda_runtime", "cudaMemcpyAsync", 8, 2),
            event("cuda_runtime", "cudaEventRecord", 9, 1),
            event("kernel", "first", 100, 50),
            event("kernel", "on another stream", 120, 60),  # to 180
            event("gpu_memcpy", "copy", 185, 15),  # 5 us later, to 200
            event("kernel", "inside of nothing", 230, 20),  # 30 us later
        ]
    )
    assert found == {
        "operators": 2,
        "launches": 3,
        "kernels": 4,
        "device_busy_s": pytest.approx(115e-6),
        "device_idle_s": pytest.approx(35e-6),
        "long_gaps": 1,
        "long_gaps_s": pytest.approx(30e-6),
        "host_self_s": {
            "aten::mm": pytest.approx(44e-6),  # less the launches in it
            "aten::add": pytest.approx(5e-6),
            "cudaLaunchKernel": pytest.approx(2e-6),
            "cuLaunchKernelEx": pytest.approx(2e-6),
            "cudaMemcpyAsync": pytest.approx(1e-6),
            "cudaEventRecord": pytest.approx(1e-6),
        },
    }
    assert read_trace([])["device_idle_s"] == 0


def test_every_shape_and_workload_is_in_the_docs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "benchmarking.md").read_text(encoding="utf-8")
    for name in [*SHAPES, *WORKLOADS]:
        assert f"`{name}`" in page, name
