"""What the steps of a training benchmark say: speeds, agreement, goals, a table. Pure functions of data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from odc_tools.bench.figures import (
    MEMORY_TOLERANCE,
    SHARE_GOAL,
    UTILISATION_GOAL,
    Spread,
    Verdict,
    plan_verdict,
    table,
)
from odc_tools.bench.schedule import COLLECTIVE_KINDS, KINDS, MethodName, Minibatch
from odc_tools.bench.workloads import WORKLOADS

LOSS_TOLERANCE, NORM_TOLERANCE = 1e-2, 0.1
"""Relative differences between methods that bf16 and the order of sums do not explain any more."""

_HOST_ROWS = 8
_BASE = "fsdp2/lb_micro"
_SAME_PLAN = "odc/lb_micro"


def describe_minibatch(minibatch: Minibatch, names: Sequence[MethodName]) -> dict[str, Any]:
    """Lengths and plans as plain data; costs are in the planner's unit."""
    plans = {}
    for strategy, plan in minibatch.plans.items():
        lockstep = plan.lockstep_cost
        plans[strategy] = {
            "micro_batches": plan.micro_batches,
            "on_demand_cost": plan.on_demand_cost,
            "lockstep_cost": lockstep if math.isfinite(lockstep) else None,
            "bound": plan.bound,
            "idle_share_of_bound": plan.idle_share_of_bound,
        }
    predicted = {str(name): name.predicted_cost(minibatch.plans[name.strategy]) for name in names}
    return {
        "seed": minibatch.seed,
        "index": minibatch.index,
        "lengths": minibatch.lengths,
        "tokens": minibatch.num_tokens,
        "plans": plans,
        "predicted": predicted,
    }


def add_summary(record: dict[str, Any], names: Sequence[MethodName]) -> bool:
    """Add ``summary``, ``agreement``, ``wrong`` and ``verdicts`` to a record.

    Args:
        record: with ``minibatches`` and ``steps``.
        names: the methods.

    Returns:
        Whether the methods computed the same.
    """
    record["agreement"], record["wrong"] = _agreement(record, names)
    for method in {step["method"] for step in record["steps"]}:
        steps = [step for step in record["steps"] if step["method"] == method]
        if method.startswith("limit") and any(step["loss"] is None for step in steps):
            record["notes"].append(
                f"{method} computed with numbers that are not finite, which may change its speed"
            )
    verdicts: list[Verdict] = []
    if "memory" in record:
        verdicts += _memory_verdicts(record)
    else:
        record["summary"] = _speeds(record, names)
        verdicts += _speed_verdicts(record)
    record["verdicts"] = [verdict.to_json() | {"text": str(verdict)} for verdict in verdicts]
    return not record["wrong"]


def _by_step(record: dict[str, Any]) -> Iterator[dict[str, dict[str, Any]]]:
    """For each time that a minibatch was run, method -> its step."""
    found: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for step in record["steps"]:
        found.setdefault((step["round"], step["minibatch"]), {})[step["method"]] = step
    yield from found.values()


def _agreement(
    record: dict[str, Any], names: Sequence[MethodName]
) -> tuple[dict[str, dict[str, float | None]], list[str]]:
    """Largest relative differences of losses and norms from the first method whose numbers are right."""
    right = [str(name) for name in names if name.right]
    agreement: dict[str, dict[str, float | None]] = {}
    wrong = []
    for name in right:
        largest = {"loss": 0.0, "grad_norm": 0.0}
        for steps in _by_step(record):
            for key in largest:
                value, expected = steps[name][key], steps[right[0]][key]
                if value is None or expected is None:
                    largest[key] = math.inf
                elif expected:
                    largest[key] = max(largest[key], abs(value - expected) / abs(expected))
        for key, tolerance in (("loss", LOSS_TOLERANCE), ("grad_norm", NORM_TOLERANCE)):
            if not largest[key] <= tolerance:
                wrong.append(
                    f"{name}: its {key} differs from that of {right[0]} by {largest[key]:.1e}; more than "
                    f"{tolerance:g} is no rounding"
                )
        agreement[name] = {key: value if math.isfinite(value) else None for key, value in largest.items()}
    return agreement, wrong


def _speeds(record: dict[str, Any], names: Sequence[MethodName]) -> dict[str, dict[str, Any]]:
    """For each method its speed over all measured minibatches, and how it compares."""
    methods = [str(name) for name in names]
    base = _BASE if _BASE in methods else methods[0]
    walls: dict[str, dict[int, list[float]]] = {method: {} for method in methods}
    busy = dict.fromkeys(methods, 0.0)
    ratios: dict[str, list[float]] = {method: [] for method in methods}
    shares: dict[str, list[float]] = {method: [] for method in methods}
    limits = {str(name): f"limit/{name.strategy}" for name in names}
    for steps in _by_step(record):
        if steps[base]["round"] < 0:
            continue
        for method in methods:
            step = steps[method]
            walls[method].setdefault(step["minibatch"], []).append(step["wall_s"])
            ratios[method].append(steps[base]["wall_s"] / step["wall_s"])
            busy[method] += sum(step["busy_s"] or ())
            if limits[method] in steps:
                shares[method].append(steps[limits[method]]["wall_s"] / step["wall_s"])
    minibatches, number = record["minibatches"], record["ranks"]
    measured = sorted(walls[base])
    tokens = sum(minibatches[i]["tokens"] for i in measured)
    totals = {m: sum(Spread.of(walls[m][i]).median for i in measured) for m in methods}
    predicted = {m: sum(minibatches[i]["predicted"][m] for i in measured) for m in methods}
    result = {}
    for method in methods:
        speeds = [minibatches[i]["tokens"] / wall for i in measured for wall in walls[method][i]]
        limit = limits[method]
        wall = sum(sum(values) for values in walls[method].values())
        result[method] = {
            "total_s": totals[method],
            "tokens_per_s": tokens / totals[method],
            "tokens_per_s_spread": asdict(Spread.of(speeds)),
            "speedup": totals[base] / totals[method],
            "speedup_spread": asdict(Spread.of(ratios[method])),
            "predicted_speedup": predicted[base] / predicted[method],
            "share_of_limit": totals[limit] / totals[method] if limit in totals else None,
            "share_of_limit_spread": asdict(Spread.of(shares[method])) if limit in totals else None,
            "utilisation": busy[method] / (number * wall) if busy[method] else None,
        }
    return result


def _speed_verdicts(record: dict[str, Any]) -> list[Verdict]:
    summary, workload = record["summary"], WORKLOADS[record["arguments"]["workload"]]
    verdicts = []
    on_demand = [name for name in summary if name.startswith("odc/")]
    if not workload.balanced and _BASE in summary and _SAME_PLAN in summary:
        best = min(on_demand, key=lambda name: summary[name]["total_s"])
        for prediction, cost in (("on-demand prediction", "on_demand"), ("lock-step prediction", "lockstep")):
            verdicts.append(
                plan_verdict(
                    plan=best,
                    base_s=summary[_BASE]["total_s"],
                    plan_s=summary[best]["total_s"],
                    same_plan_s=summary[_SAME_PLAN]["total_s"],
                    base_predicted=_predicted(record, "lb_micro", cost),
                    plan_predicted=_predicted(record, best.partition("/")[2], "on_demand"),
                    prediction=prediction,
                )
            )
    if workload.balanced:
        for name in on_demand:
            share, strategy = summary[name]["share_of_limit"], name.partition("/")[2]
            if share is None:
                continue
            verdicts.append(Verdict(f"share of the limit, {name}", share, SHARE_GOAL))
            theirs = [
                summary[other]["share_of_limit"]
                for kind in COLLECTIVE_KINDS
                if (other := f"{kind}/{strategy}") in summary
            ]
            if theirs:
                verdicts.append(Verdict(f"share of the limit, {name} over FSDP2's", share, max(theirs)))
    if workload.name == "longalign" and "odc/lb_mini" in summary:
        value = summary["odc/lb_mini"]["utilisation"]
        possible = ("possible, as the longest sequences set the step", _possible_utilisation(record))
        verdicts.append(Verdict("utilisation, odc/lb_mini", value, UTILISATION_GOAL, factors=(possible,)))
    return verdicts


def _predicted(record: dict[str, Any], strategy: str, cost: str) -> float:
    """Predicted duration of all measured minibatches."""
    measured = {step["minibatch"] for step in record["steps"] if step["round"] >= 0}
    return sum(float(record["minibatches"][i]["plans"][strategy][f"{cost}_cost"]) for i in measured)


def _possible_utilisation(record: dict[str, Any]) -> float:
    """Of plans at their bound, which no plan can be below, by predicted costs."""
    measured = {step["minibatch"] for step in record["steps"] if step["round"] >= 0}
    plans = [record["minibatches"][i]["plans"]["lb_mini"] for i in sorted(measured)]
    work = sum(plan["bound"] * (1 - plan["idle_share_of_bound"]) for plan in plans)
    return float(work / sum(plan["bound"] for plan in plans))


def _memory_verdicts(record: dict[str, Any]) -> list[Verdict]:
    """At most FSDP2's peak, the published copy (2 bytes a parameter) and 2%."""
    memory = record["memory"]
    if _BASE not in memory:
        return []
    verdicts = []
    for name, peaks in memory.items():
        if name.startswith("odc/"):
            base, published = memory[_BASE]["peak_bytes"], 2 * peaks["parameters"] / record["ranks"]
            verdicts.append(
                Verdict(
                    f"peak memory in GiB, {name}",
                    peaks["peak_bytes"] / 2**30,
                    (base + published) * MEMORY_TOLERANCE / 2**30,
                    at_most=True,
                    factors=((f"peak of {_BASE}", base / 2**30), ("published copy", published / 2**30)),
                )
            )
    return verdicts


# ---- the table ---------------------------------------------------------------------------------------


def format_record(record: dict[str, Any]) -> str:
    """The result in short."""
    arguments = record["arguments"]
    measured = {(step["minibatch"], step["round"]) for step in record["steps"] if step["round"] >= 0}
    lengths = record["minibatches"][0]["lengths"]
    lines = [
        f"{arguments['workload']}, {arguments['shape']}, {record['ranks']} ranks, {record['device']}, "
        f"{len(lengths) // record['ranks']} sequences a rank, {len({m for m, _ in measured})} minibatches, "
        f"{len(measured)} measurements of each method"
    ]
    if arguments.get("compile"):  # results made before there was the option do not have it
        lines[0] += ", blocks compiled"
    if arguments["length_scale"] != 1:
        lines[0] += f", lengths times {arguments['length_scale']:g}"
    if "summary" in record:
        lines.append(_speed_table(record))
    if "memory" in record:
        lines.append(_memory_table(record["memory"]))
    if "profile" in record:
        lines += [_profile_table(record["profile"]), _host_table(record["profile"])]
    if any(name.startswith("limit") for name in record["methods"]):
        lines.append(f"limit: {KINDS['limit']}")
    lines += [f"left out: {name}: {reason}" for name, reason in record["skipped"].items()]
    lines += [f"note: {note}" for note in record["notes"]]
    lines += [f"WRONG: {problem}" for problem in record["wrong"]]
    lines += [verdict["text"] for verdict in record["verdicts"]]
    return "\n".join(lines)


def _speed_table(record: dict[str, Any]) -> str:
    head = ["method", "tokens/s", "speed-up", "p10", "p90", "predicted", "of limit", "p10", "p90", "busy"]
    rows = [[*head, "loss", "norm"]]
    for name, figures in record["summary"].items():
        shares = figures["share_of_limit_spread"] or {}
        spread, agreement = figures["speedup_spread"], record["agreement"].get(name)
        differences = [_number(agreement and agreement[key], ".0e") for key in ("loss", "grad_norm")]
        rows.append(
            [
                name,
                f"{figures['tokens_per_s']:,.0f}",
                *(f"{value:.3f}" for value in (figures["speedup"], spread["p10"], spread["p90"])),
                f"{figures['predicted_speedup']:.3f}",
                *(
                    _number(v, ".1%")
                    for v in (figures["share_of_limit"], shares.get("p10"), shares.get("p90"))
                ),
                _number(figures["utilisation"], ".1%"),
                *differences,
            ]
        )
    return table(rows)


def _memory_table(memory: dict[str, dict[str, float]]) -> str:
    keys = ("peak_bytes", "allocated_bytes", "outside_bytes", "reserved_bytes")
    rows = [["method", *(f"{key.removesuffix('_bytes')} GiB" for key in keys)]]
    for name, peaks in memory.items():
        gib = [peaks[key] / 2**30 if key in peaks else None for key in keys]
        rows.append([name, *(_number(value, ".3f") for value in gib)])
    return table(rows)


def _profile_table(profiles: dict[str, dict[str, Any]]) -> str:
    head = ["profile", "host ms", "wall ms", "busy ms", "idle ms", "in gaps > 10 us", "launches", "a layer"]
    rows = [[*head, "us a launch", "operators"]]
    for name, figures in profiles.items():
        launches = figures["launches"]
        times = ("host_s", "wall_s", "device_busy_s", "device_idle_s", "long_gaps_s")
        rows.append(
            [
                name,
                *(f"{figures[key] * 1e3:.1f}" for key in times),
                f"{launches}",
                f"{figures['launches_per_layer']:.1f}",
                f"{figures['host_s'] / launches * 1e6:.1f}" if launches else "-",
                f"{figures['operators']}",
            ]
        )
    return table(rows)


def _host_table(profiles: dict[str, dict[str, Any]]) -> str:
    """What the host spent most time on itself, of the first method on demand."""
    name = next((name for name in profiles if name.startswith("odc/")), next(iter(profiles)))
    spent = list(profiles[name]["host_self_s"].items())[:_HOST_ROWS]
    return table([[f"host, {name}", "ms"], *([what, f"{seconds * 1e3:.2f}"] for what, seconds in spent)])


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
