"""Is training on demand the same training? Curves of the shipped examples by three methods and several seeds.

    python benchmarks/fidelity/run.py sft  --out fidelity_out
    python benchmarks/fidelity/run.py grpo --out fidelity_out
    python benchmarks/fidelity/run.py sft  --out fidelity_gpu --bf16 --together 4    # on a machine with GPUs

``sft`` trains a small Llama on the functions of Python's own library (``examples/sft/train.py``), ``grpo`` a
smaller one on arithmetic (``examples/grpo/train.py``), each for ``--minibatches`` optimizer steps and
``--seeds`` seeds (weights, order of data, sampling), with collectives and `lb_micro`, on demand with
`lb_mini`, and on demand with `dynamic`. Methods take turns, or run at the same time with ``--together``. Runs
are on the GPUs of the machine if it has any. A run that is in ``--out`` is not repeated, so an interrupted
benchmark goes on.

Printed, and written as JSON and PNG: the losses (for ``grpo`` the rewards) of every method; how far a curve
is from that of collectives with the same seed, as root mean square of moving means; the same between seeds of
collectives, which is the noise that a user lives with in any case; and the means over the last quarter with
their standard errors over seeds. Exit code 1 if a method is further from collectives than the two seeds that
are furthest from each other, or its mean differs by more than two standard errors of the difference.

With ``grpo`` a rounding difference changes a sampled token sooner or later, and from then on a run is as far
from the other as one with another seed; until then they are equal. Printed is for how many rounds.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odcengine._version import __version__
from odcengine.config import load_config
from odcengine.monitor.figure import new_figure, save

Curve = npt.NDArray[np.float64]

ROOT = Path(__file__).resolve().parents[2]
BASELINE = "collectives, lb_micro"
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    BASELINE: {"odc": {"transport": "collective"}, "balance": {"strategy": "lb_micro"}},
    "on demand, lb_mini": {"odc": {"transport": "auto"}, "balance": {"strategy": "lb_mini"}},
    "on demand, dynamic": {"odc": {"transport": "auto"}, "balance": {"strategy": "dynamic"}},
}
SFT: dict[str, Any] = {
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
    "steps_per_print": 0,
    "model": {
        "config": {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 4096,
            "hidden_size": 64,
            "intermediate_size": 176,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
        }
    },
    "data": {"max_length": 256, "too_long": "truncate", "num_epochs": 100},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95]}},
    "balance": {"max_tokens_per_micro_batch": 1024},
    "launch": {"nproc_per_node": 2},
}
SMOOTHED_OVER = 10  # minibatches


def main() -> int:
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.task == "sft":
        prepare_tokens(arguments)
    keys = [(name, seed) for seed, name in itertools.product(range(arguments.seeds), METHODS)]
    with ThreadPoolExecutor(arguments.together) as pool:
        records = list(pool.map(lambda key: run_once(*key, arguments), keys))
    runs = dict(zip(keys, records, strict=True))
    report = compare(runs, arguments)
    (arguments.out / f"{arguments.task}.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(runs, report, arguments)
    print("\n".join(table(report)))
    return 0 if report["within_seed_noise"] else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Curves by method and seed.")
    parser.add_argument("task", choices=sorted(RUN))
    parser.add_argument("--out", type=Path, default=Path("fidelity_out"), help="folder of runs and results")
    parser.add_argument("--minibatches", type=int, default=300, help="optimizer steps a run (default 300)")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds (default 3)")
    parser.add_argument("--limit-s", type=float, default=900.0, help="longest time of a run (default 900)")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, with fp32 master weights")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="runs at a time (default 1)")
    return parser.parse_args()


# ---- runs ----------------------------------------------------------------------------------------------


def run_once(method: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The curves of a method with a seed, of now or of an earlier time."""
    name = f"{arguments.task}-{method.replace(', ', '-').replace(' ', '_')}-{seed}"
    file, folder = arguments.out / f"{name}.json", arguments.out / name
    if not file.exists():
        folder.mkdir(exist_ok=True)
        record = RUN[arguments.task](method, seed, folder, arguments)
        file.write_text(json.dumps(record) + "\n")
        print(f"seed {seed}, {method}: {record['wall_s']:.0f} s", flush=True)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def tokens_of(arguments: argparse.Namespace) -> Path:
    return Path(arguments.out) / "data" / "tokens"


def prepare_tokens(arguments: argparse.Namespace) -> None:
    tokens = tokens_of(arguments)
    if not tokens.exists():
        prepare = [sys.executable, str(ROOT / "examples" / "demo" / "prepare.py")]
        subprocess.run([*prepare, "--out", str(tokens.parent)], check=True, timeout=arguments.limit_s)


def run_sft(method: str, seed: int, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The losses and gradient norms of every step."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    config = merged(SFT, METHODS[method], {"seed": seed, "monitor": {"jsonl": str(metrics)}})
    words = ["--data", str(tokens_of(arguments)), "--steps", str(arguments.minibatches)]
    wall_s = launch(config, ["examples/sft/train.py", *words], folder, arguments)
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [step for step in steps if "loss" in step]
    if len(steps) != arguments.minibatches:
        raise SystemExit(f"{method}, seed {seed}: {len(steps)} steps, expected {arguments.minibatches}")
    return {
        "loss": [step["loss"] for step in steps],
        "grad_norm": [step["grad_norm"] for step in steps],
        "wall_s": wall_s,
    }


def run_grpo(method: str, seed: int, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The mean reward of every round of sampling; there are four optimizer steps in a round."""
    updates = 4
    base = load_config(ROOT / "configs" / "grpo_cpu.yaml").resolved()
    config = merged(base, METHODS[method], {"seed": seed})
    rounds = arguments.minibatches // updates
    words = ["examples/grpo/train.py", "--out", str(folder), "--iterations", str(rounds)]
    wall_s = launch(config, [*words, "--updates", str(updates)], folder, arguments)
    lines = [json.loads(line) for line in (folder / "rewards.jsonl").read_text().splitlines()]
    if len(lines) != rounds:
        raise SystemExit(f"{method}, seed {seed}: {len(lines)} rounds, expected {rounds}")
    return {
        "reward": [line["reward"] for line in lines],
        "accuracy": [line["accuracy"] for line in lines],
        "grad_norm": [line["grad_norm"] for line in lines],
        "wall_s": wall_s,
    }


RUN = {"sft": run_sft, "grpo": run_grpo}


def merged(*layers: dict[str, Any]) -> dict[str, Any]:
    """Sections of later layers over those of earlier ones, key by key."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = {**result[key], **value} if both else value
    return result


def launch(config: dict[str, Any], words: list[str], folder: Path, arguments: argparse.Namespace) -> float:
    """Run an example under odc-launch; returns its seconds."""
    file, log = folder / "config.json", folder / "log.txt"
    file.write_text(json.dumps(merged(config, {"bf16": {"enabled": True}} if arguments.bf16 else {})))
    code = "import sys; from odc_launcher.cli import main; sys.exit(main())"
    words = [str(ROOT / words[0]), *words[1:]]
    logs = ["--log-dir", str(folder / "logs")]
    start = time.monotonic()
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, "-c", code, "--config", str(file), *logs, *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=arguments.limit_s,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"a run failed with code {done.returncode}; see {log}")
    return time.monotonic() - start


# ---- comparison ----------------------------------------------------------------------------------------


def compare(runs: dict[tuple[str, int], dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Differences between methods, against those between seeds."""
    what = "loss" if arguments.task == "sft" else "reward"
    seeds = range(arguments.seeds)
    curves = {key: smoothed(np.asarray(run[what])) for key, run in runs.items()}
    between_seeds = [
        rms(curves[BASELINE, one], curves[BASELINE, other]) for one, other in itertools.combinations(seeds, 2)
    ]
    methods: dict[str, Any] = {}
    for name in METHODS:
        ends = [float(np.mean(runs[name, seed][what][-len(runs[name, seed][what]) // 4 :])) for seed in seeds]
        methods[name] = {
            "from_collectives": [rms(curves[name, seed], curves[BASELINE, seed]) for seed in seeds],
            "equal_at_first": [
                equal_at_first(runs[name, seed][what], runs[BASELINE, seed][what]) for seed in seeds
            ],
            "last_quarter": ends,
            "mean": float(np.mean(ends)),
            "standard_error": float(np.std(ends, ddof=1) / math.sqrt(len(ends))) if len(ends) > 1 else None,
            "wall_s": [runs[name, seed]["wall_s"] for seed in seeds],
        }
    base = methods[BASELINE]
    within = bool(between_seeds) and all(
        max(method["from_collectives"]) <= max(between_seeds)
        and abs(method["mean"] - base["mean"])
        <= 2 * math.hypot(method["standard_error"], base["standard_error"])
        for method in methods.values()
    )
    return {
        "task": arguments.task,
        "curve": what,
        "date": datetime.date.today().isoformat(),
        "odcengine": __version__,
        "minibatches": arguments.minibatches,
        "bf16": arguments.bf16,
        "device": device(),
        "between_seeds": between_seeds,
        "methods": methods,
        "within_seed_noise": within,
    }


def device() -> str:
    """What the runs were on."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"


def smoothed(values: Curve) -> Curve:
    width = min(SMOOTHED_OVER, len(values))
    return np.convolve(values, np.full(width, 1 / width), mode="valid")


def equal_at_first(one: list[float], other: list[float]) -> int:
    """Leading values that are equal up to rounding."""
    same = np.isclose(one, other, rtol=1e-5, atol=0)
    return len(same) if same.all() else int(np.argmin(same))


def rms(one: Curve, other: Curve) -> float:
    return float(np.sqrt(np.mean((one - other) ** 2)))


def table(report: dict[str, Any]) -> list[str]:
    what = report["curve"]
    lines = [
        f"{report['task']}, {report['minibatches']} minibatches, {report['device']}"
        f"{', bf16' if report['bf16'] else ''}, {what}: root mean square between the curves "
        f"of two seeds with collectives: {spread(report['between_seeds'])}",
        "",
        "| method | from collectives, same seed | equal at first | "
        f"{what}, last quarter (standard error over seeds) |",
        "|---|---|---|---|",
    ]
    for name, found in report["methods"].items():
        first = found["equal_at_first"]
        far, equal = spread(found["from_collectives"]), f"{min(first)} to {max(first)}"
        if name == BASELINE:
            far = equal = "-"
        error = "-" if found["standard_error"] is None else f"{found['standard_error']:.4f}"
        lines.append(f"| {name} | {far} | {equal} | {found['mean']:.4f} ({error}) |")
    verdict = "within" if report["within_seed_noise"] else "NOT within"
    return [*lines, "", f"Differences between methods are {verdict} those between seeds."]


def spread(values: list[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}" if values else "-"


def draw(
    runs: dict[tuple[str, int], dict[str, Any]], report: dict[str, Any], arguments: argparse.Namespace
) -> None:
    figure = new_figure(10, 3.8)
    left, right = figure.subplots(1, 2)
    styles = dict(zip(METHODS, ("-", "--", ":"), strict=True))
    for (name, seed), run in runs.items():
        curve = smoothed(np.asarray(run[report["curve"]]))
        label = name if seed == 0 else None
        left.plot(curve, styles[name], color=f"C{seed}", label=label, linewidth=1)
        if name != BASELINE:
            base = smoothed(np.asarray(runs[BASELINE, seed][report["curve"]]))
            right.semilogy(np.abs(curve - base) + 1e-12, styles[name], color=f"C{seed}", linewidth=1)
    for one, other in itertools.combinations(range(arguments.seeds), 2):
        difference = [smoothed(np.asarray(runs[BASELINE, seed][report["curve"]])) for seed in (one, other)]
        label = "two seeds, collectives" if (one, other) == (0, 1) else None
        right.semilogy(np.abs(difference[0] - difference[1]) + 1e-12, color="0.6", label=label, linewidth=1)
    step = "minibatch" if arguments.task == "sft" else "round of sampling"
    left.set(xlabel=step, ylabel=report["curve"], title="colours: seeds")
    right.set(xlabel=step, ylabel="distance from collectives", title="colours: seeds, as on the left")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    save(figure, arguments.out / f"{arguments.task}.png")


if __name__ == "__main__":
    sys.exit(main())
