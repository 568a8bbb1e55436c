"""The simulator against real minibatches: 2 CPU ranks train a small Llama, half of it teaches the costs.

    python benchmarks/simulator.py

Two engines take turns at minibatches of the same data: on demand with `lb_mini`, and `lb_micro` in lock-step
(the ranks meet at every layer of every micro-batch, as with collectives). After warm-up, the first half of
the minibatches of each gives the costs (`odcengine.balance.OnlineCost`: seconds a micro-batch, a token and a
squared token, speeds of ranks) and the boundary (median); the second half is predicted from its plans and
compared. Also printed: lock-step predicted from the costs of the run on demand; on demand predicted from the
monitor's JSON lines alone, as `odc advise --run` fits them; and, for machines on which other processes take
turns with the ranks, the same with the ranks' CPU time: a step then takes the sum over its micro-batches of
the largest CPU time of a rank in lock-step, and the largest sum on demand.

The ranks need a core each that nobody else uses: the load of the machine is printed. Exit code: 1 if the
total of a method's second half is predicted more than 5% off, else 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from odcengine.balance import CostModel, Fit, OnlineCost, Plan
from odcengine.simulate import Communication, Machine, MeasuredRun, simulate

Seconds = npt.NDArray[np.float64]

ROOT = Path(__file__).resolve().parents[1]
NUM_RANKS, SEQUENCES, MAX_TOKENS = 2, 16, 2048
WARM_UP = 2
GOAL = 0.05
ON_DEMAND, LOCK_STEP = "lb_mini on demand", "lb_micro in lock-step"
METHODS: dict[str, tuple[Communication, dict[str, Any]]] = {
    ON_DEMAND: ("on_demand", {"odc": {"transport": "shm"}, "balance": {"strategy": "lb_mini"}}),
    LOCK_STEP: (
        "collective",
        {"odc": {"transport": "shm", "lockstep": True}, "balance": {"strategy": "lb_micro"}},
    ),
}
# Freed memory stays with the process: else page faults would be measured.
MALLOC = {
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TOP_PAD_": str(64 << 20),
}
MODEL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_TOKENS,
    "tie_word_embeddings": True,
}


def draw_lengths(count: int) -> list[int]:
    """Conversations, shortened: log-normal of median 150 tokens."""
    dice = np.random.Generator(np.random.PCG64(0))
    lengths = np.clip(np.rint(dice.lognormal(np.log(150), 1.1, count)), 8, MAX_TOKENS)
    return [int(length) for length in lengths]


# ---- a rank --------------------------------------------------------------------------------------------


def train(out: Path, minibatches: int) -> None:
    """Train as one of the ranks; rank 0 writes a line a step and method."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    import odcengine
    from odcengine.data import TokenDataset

    pin_to_core(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    steps = WARM_UP + minibatches
    dice = np.random.Generator(np.random.PCG64(1))
    dataset = TokenDataset.from_samples(
        {
            "input_ids": dice.integers(0, MODEL["vocab_size"], length),
            "loss_mask": np.ones(length, dtype=bool),
        }
        for length in draw_lengths(steps * SEQUENCES * NUM_RANKS)
    )
    engines = {}
    for method, (_, options) in METHODS.items():
        torch.manual_seed(0)
        engine, _, loader, _ = odcengine.initialize(
            model=LlamaForCausalLM(LlamaConfig(**MODEL)),
            training_data=dataset,
            config={
                "train_batch_size": SEQUENCES * NUM_RANKS,
                "gradient_clipping": 1.0,
                "steps_per_print": 0,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
                "monitor": {"jsonl": str(monitor_file(out))} if method == ON_DEMAND else {},
                "odc": {"timeout_s": 120, **options["odc"]},
                "balance": {"max_tokens_per_micro_batch": MAX_TOKENS, **options["balance"]},
            },
        )
        assert loader is not None  # there is training data
        engines[method] = engine, iter(loader)
    with out.open("w") if os.environ["RANK"] == "0" else open(os.devnull, "w") as file:
        for step in range(steps):
            for method in METHODS if step % 2 else reversed(METHODS):
                engine, batches = engines[method]
                dist.barrier()
                marks = [time.thread_time()]
                minibatch = next(batches)
                for micro_batch in minibatch:
                    engine.backward(engine(micro_batch))
                    marks.append(time.thread_time())
                metrics = engine.step()
                marks.append(time.thread_time())
                cpu_s: list[list[float]] = [[]] * NUM_RANKS
                dist.all_gather_object(cpu_s, np.diff(marks).tolist())
                line = {
                    "method": method,
                    "plan": minibatch.plan.to_json(),
                    "busy_s": metrics.busy_s,
                    "cpu_s": cpu_s,
                    "boundary_s": metrics.boundary_s,
                    "step_s": metrics.step_s,
                }
                file.write(json.dumps(line) + "\n")
                file.flush()
    for engine, _ in engines.values():
        engine.close()


def monitor_file(out: Path) -> Path:
    """Where the engine on demand writes its steps."""
    return out.with_suffix(".monitor.jsonl")


def pin_to_core(rank: int) -> None:
    """Keep this rank on a core of its own where there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= NUM_RANKS:
        os.sched_setaffinity(0, {cores[rank]})


# ---- the comparison ------------------------------------------------------------------------------------


class Run:
    """The minibatches of a method after warm-up: the first half to learn from, the second to predict."""

    def __init__(self, method: str, lines: list[dict[str, Any]]) -> None:
        lines = [line for line in lines if line["method"] == method][WARM_UP:]
        half = len(lines) // 2
        self.communication = METHODS[method][0]
        self.first, self.second = lines[:half], lines[half:]
        self.plans = [Plan.from_json(line["plan"]) for line in self.second]
        self.step_s = np.array([line["step_s"] for line in self.second])

    def learn(self, key: str) -> Fit:
        """Costs from the seconds of each rank's work: ``busy_s`` or ``cpu_s``."""
        shape = CostModel.from_config(SimpleNamespace(**MODEL))
        learner = OnlineCost(shape, num_ranks=NUM_RANKS, window=len(self.first), min_steps=1)
        for line in self.first:
            seconds = line[key] if key == "busy_s" else [sum(parts) for parts in line[key]]
            learner.update(Plan.from_json(line["plan"]), seconds)
        return learner.fit()

    def cpu_steps(self) -> Seconds:
        """What the steps of the second half would take if the ranks' CPU time were all."""
        if self.communication == "on_demand":
            return np.array([max(sum(parts) for parts in line["cpu_s"]) for line in self.second])
        return np.array(
            [sum(max(parts) for parts in zip(*line["cpu_s"], strict=True)) for line in self.second]
        )

    def predict(self, fit: Fit, *, boundary: bool = True) -> Seconds:
        """Times of the second half, with the boundary of the first unless the costs have it."""
        boundary_s = float(np.median([line["boundary_s"] for line in self.first])) if boundary else 0.0
        machine = Machine(fit.cost, boundary_s=boundary_s, speeds=fit.speeds)
        return np.array(
            [simulate(plan, machine, communication=self.communication).step_s for plan in self.plans]
        )


def compare(what: str, measured: Seconds, predicted: Seconds, *, details: bool = False) -> float:
    """Print predictions of the second half beside what was measured; returns the error of their total."""
    errors = predicted / measured - 1
    for index in range(len(errors) if details else 0):
        print(
            f"    minibatch {WARM_UP + len(errors) + index:3d}: measured {measured[index]:7.3f} s, "
            f"predicted {predicted[index]:7.3f} s, {errors[index]:+6.1%}"
        )
    total = float(predicted.sum() / measured.sum() - 1)
    print(
        f"  {what}: measured {measured.sum():.3f} s, predicted {predicted.sum():.3f} s, {total:+.1%}; "
        f"a minibatch is {np.median(np.abs(errors)):.1%} off (median; the worst {np.abs(errors).max():.1%})"
    )
    return total


def fit_monitor(path: Path, run: Run) -> Fit:
    """Costs as ``odc advise --run`` learns them, from the first half alone."""
    lines = path.read_text().splitlines(keepends=True)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as half:
        half.writelines(lines[: WARM_UP + len(run.first)])
        half.flush()
        measured = MeasuredRun.read(half.name)
    lengths = [length for line in run.first for length in Plan.from_json(line["plan"]).lengths]
    fit = measured.fit(CostModel.from_config(SimpleNamespace(**MODEL)), lengths)
    return Fit(fit.cost, (1.0,) * NUM_RANKS, fit.num_steps, fit.error)


def report(path: Path) -> bool:
    """Print the comparison; whether all totals are near enough."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    runs = {method: Run(method, lines) for method in METHODS}
    fits = {method: run.learn("busy_s") for method, run in runs.items()}
    totals = []
    for method, run in runs.items():
        cost, speeds = fits[method].cost, fits[method].speeds
        print(f"{method}, costs of its first {len(run.first)} minibatches:")
        print(
            f"  {cost.overhead * 1e3:.1f} ms a micro-batch, {cost.linear * 1e6:.0f} us a token, "
            f"{cost.quadratic * 1e9:.0f} ns a squared token, speeds {speeds}"
        )
        totals.append(compare("steps", run.step_s, run.predict(fits[method]), details=True))
        compare("CPU time", run.cpu_steps(), run.predict(run.learn("cpu_s"), boundary=False))
    slow, fast = runs[LOCK_STEP], runs[ON_DEMAND]
    print(f"{ON_DEMAND}, costs of the monitor's lines of its first {len(fast.first)} minibatches:")
    compare("steps", fast.step_s, fast.predict(fit_monitor(monitor_file(path), fast)))
    print(f"{LOCK_STEP}, costs of {ON_DEMAND}:")
    from_other = slow.predict(fits[ON_DEMAND])
    compare("steps", slow.step_s, from_other)
    gain = from_other.sum() / fast.predict(fits[ON_DEMAND]).sum()
    print(
        f"  time over on demand: measured {slow.step_s.sum() / fast.step_s.sum():.3f}, predicted {gain:.3f}"
    )
    good = all(abs(total) <= GOAL for total in totals)
    print(f"goal, steps of each method in total within {GOAL:.0%}: {'met' if good else 'NOT MET'}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minibatches", type=int, default=20, help="measured ones (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON lines of all steps (default: not kept)")
    parser.add_argument("--only-report", action="store_true", help="compare what --out holds from before")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.minibatches < 8 or arguments.minibatches % 2:
        parser.error(f"--minibatches is {arguments.minibatches}; give an even number of 8 or more")
    if arguments.only_report and arguments.out is None:
        parser.error("--only-report needs --out")
    if arguments.as_rank:
        train(arguments.out, arguments.minibatches)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.out or Path(folder) / "steps.jsonl"
        if not arguments.only_report:
            begin = os.getloadavg()[0]
            monitor_file(path.absolute()).unlink(missing_ok=True)
            code = launch(path.absolute(), arguments.minibatches, Path(folder))
            if code:
                return code
            print(
                f"{len(os.sched_getaffinity(0))} cores; load average {begin:.2f} at the start, "
                f"{os.getloadavg()[0]:.2f} at the end, of which {NUM_RANKS} are the ranks' own"
            )
        return 0 if report(path) else 1


def launch(path: Path, minibatches: int, logs: Path) -> int:
    """Run the ranks; returns the exit code."""
    command = [sys.executable, "-m", "odc_launcher", "--nproc-per-node", str(NUM_RANKS), "--show", "rank0"]
    command += ["--log-dir", str(logs), str(Path(__file__).resolve()), "--as-rank", "--out", str(path)]
    paths = [str(ROOT), str(ROOT / "launcher"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | MALLOC | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run([*command, "--minibatches", str(minibatches)], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
