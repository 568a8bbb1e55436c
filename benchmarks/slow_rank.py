"""A rank that is slower than anybody knows: a plan, a plan that learns, and drawn work, on two CPU ranks.

    python benchmarks/slow_rank.py --minibatches 12

Rank 1 is stopped and continued in slices of a tenth of a second, so that it gets 70% of its core. Three
engines with the same model and the same data take turns at every minibatch: `lb_mini` with costs from the
shape, `lb_mini` with learned costs, and `dynamic`. Printed: tokens/s over the first, median and range over
the minibatches after `--warm`. Needs two cores that are otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

METHODS = {
    "lb_mini": {"strategy": "lb_mini", "learn_costs": False},
    "lb_mini, learning": {"strategy": "lb_mini", "learn_costs": True},
    "dynamic": {"strategy": "dynamic"},
}
SLICER = """
import os, signal, sys, time
pid, share = int(sys.argv[1]), float(sys.argv[2])
while os.getppid() == pid:
    time.sleep(0.1 * (1 - share))
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.1 * share)
    os.kill(pid, signal.SIGCONT)
"""


def train(arguments: argparse.Namespace) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import odcengine

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % 2]})
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(4096, generator=generator).mul(0.8).add(5.0).exp().clamp(16, 2000).int().tolist()
    samples = [{"input_ids": torch.randint(4096, (n,), generator=generator).tolist()} for n in lengths]
    engines = {}
    for name, balance in METHODS.items():
        torch.manual_seed(0)
        shape = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 4096}
        model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=4))
        config = {
            "train_batch_size": 32,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "odc": {"transport": "shm"},
            "balance": {"max_tokens_per_micro_batch": 2048, **balance},
            "monitor": {"progress": "off"},
        }
        engine, _, loader, _ = odcengine.initialize(model=model, training_data=samples, config=config)
        engines[name] = (engine, iter(loader))
    slicer = None
    if rank == 1:
        slicer = subprocess.Popen([sys.executable, "-c", SLICER, str(os.getpid()), str(arguments.stopped)])
    rows = []
    for number in range(arguments.warm + arguments.minibatches):
        order = list(METHODS)[number % 3 :] + list(METHODS)[: number % 3]
        row = {}
        for name in order:
            engine, minibatches = engines[name]
            minibatch, start = next(minibatches), time.perf_counter()
            for micro_batch in minibatch:
                engine.backward(engine(micro_batch))
            metrics = engine.step()
            row[name] = {
                "seconds": time.perf_counter() - start,
                "tokens": metrics.num_tokens,
                "idle": metrics.idle_shares,
                "loss": metrics.loss,
            }
        rows.append(row)
    if slicer is not None:
        slicer.kill()
        slicer.wait()
    for engine, _ in engines.values():
        engine.close()
    if rank == 0:
        arguments.result.write_text(json.dumps(rows[arguments.warm :]))


def report(rows: list[dict[str, dict[str, object]]]) -> None:
    for name in METHODS:
        ratios = [row["lb_mini"]["seconds"] / row[name]["seconds"] for row in rows]
        pooled = sum(row["lb_mini"]["seconds"] for row in rows) / sum(row[name]["seconds"] for row in rows)
        idle = [statistics.mean(row[name]["idle"][rank] for row in rows) for rank in range(2)]
        losses = max(abs(row[name]["loss"] / row["lb_mini"]["loss"] - 1) for row in rows)
        print(
            f"{name:18s} {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), pooled "
            f"{pooled:.3f}; idle {idle[0]:.1%}, {idle[1]:.1%}; losses differ by {losses:.0e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minibatches", type=int, default=12, help="measured ones")
    parser.add_argument("--warm", type=int, default=12, help="before, while costs are learned")
    parser.add_argument("--stopped", type=float, default=0.3, help="share of its time that rank 1 is stopped")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        train(arguments)
        return
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "odc_launcher", "--nproc-per-node", "2", "--log-dir", folder]
        command += [__file__, "--result", str(result), "--warm", str(arguments.warm)]
        command += ["--minibatches", str(arguments.minibatches), "--stopped", str(arguments.stopped)]
        subprocess.run(command, check=True)
        report(json.loads(result.read_text()))
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
