"""What saving a checkpoint costs a run: blocks of steps without a save, with one in the background, with one
that is waited for.

    python benchmarks/checkpointing.py --dir /path/on/the/file/system --ranks 2 --rounds 6

One engine; the three kinds of blocks take turns, in another order in every round, with the same numbers of
samples and tokens in every step. The save is begun at the end of a block's first step. Printed: seconds of a
block over those of the round's block without a save (median and range), seconds of training lost to one save,
and how long a save took until it was complete. On GPUs it uses as many as there are ranks. Needs cores (or
GPUs) that are otherwise idle, and room for two checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

METHODS = ("none", "background", "waiting")


def train(arguments: argparse.Namespace) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import odcengine

    rank = int(os.environ["RANK"])
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    samples = [
        {"input_ids": torch.randint(arguments.vocabulary, (arguments.tokens,), generator=generator).tolist()}
        for _ in range(64)
    ]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=arguments.hidden,
            intermediate_size=arguments.hidden * 11 // 4,
            num_hidden_layers=arguments.layers,
            num_attention_heads=arguments.hidden // 64,
            num_key_value_heads=arguments.hidden // 64,
            vocab_size=arguments.vocabulary,
        )
    )
    config = {
        "train_batch_size": 2 * arguments.ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "bf16": {"enabled": on_gpu},
        "balance": {"max_tokens_per_micro_batch": arguments.tokens},
        "data": {"max_length": arguments.tokens, "num_epochs": 1_000_000},
        "monitor": {"progress": "off"},
    }
    engine, _, loader, _ = odcengine.initialize(model=model, training_data=samples, config=config)
    assert loader is not None
    minibatches = _for_ever(loader)

    def step() -> None:
        for micro_batch in next(minibatches):
            engine.backward(engine(micro_batch))
        engine.step()

    def block(method: str) -> dict[str, float]:
        step()  # not measured: the block before may have left something in the caches
        start, waited = time.perf_counter(), engine.checkpoint_wait_s
        step()
        begun = time.perf_counter()
        if method != "none":
            engine.save_checkpoint(arguments.dir, tag=method, wait=method == "waiting")
        for _ in range(arguments.steps - 1):
            step()
        seconds, waited = time.perf_counter() - start, engine.checkpoint_wait_s - waited
        engine.wait_for_checkpoint()
        return {"seconds": seconds, "waited": waited, "complete": time.perf_counter() - begun}

    rows = []
    for number in range(1 + arguments.rounds):  # the first one warms up
        order = METHODS[number % 3 :] + METHODS[: number % 3]
        rows.append({method: block(method) for method in order})
    size = sum(path.stat().st_size for path in Path(arguments.dir, "waiting").iterdir())
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    engine.close()
    if rank == 0:
        found = {"rows": rows[1:], "size": size, "parameters": parameters, "gpu": on_gpu}
        arguments.result.write_text(json.dumps(found))


def _for_ever(loader):  # type: ignore[no-untyped-def]
    while True:
        yield from loader


def report(found: dict, arguments: argparse.Namespace) -> None:  # type: ignore[type-arg]
    rows, size = found["rows"], found["size"]
    print(
        f"{found['parameters'] / 1e6:.0f}M parameters, {arguments.ranks} "
        f"{'GPUs' if found['gpu'] else 'CPU ranks'}, "
        f"checkpoint {size / 1e9:.2f} GB; blocks of {arguments.steps} steps, {len(rows)} rounds; a step "
        f"{statistics.median(row['none']['seconds'] for row in rows) / arguments.steps:.3f} s"
    )
    for method in METHODS[1:]:
        ratios = [row[method]["seconds"] / row["none"]["seconds"] for row in rows]
        lost = statistics.median(row[method]["seconds"] - row["none"]["seconds"] for row in rows)
        line = (
            f"{method:11s} block {statistics.median(ratios):.3f} of one without "
            f"({min(ratios):.3f} to {max(ratios):.3f}); {lost:.2f} s lost to a save, of which the engine "
            "waited "
            f"{statistics.median(row[method]['waited'] for row in rows):.2f} s"
        )
        if method == "waiting":
            line += f"; {size / 1e9 / statistics.median(row[method]['waited'] for row in rows):.2f} GB/s"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where to save (default: a temporary directory)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6, help="measured ones, after one that warms up")
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=256, help="of a sample; a rank has two a step")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        train(arguments)
        return
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(tempfile.mkdtemp(dir=arguments.dir, prefix="checkpointing-"))
        result = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "odc_launcher", "--nproc-per-node", str(arguments.ranks)]
        command += ["--log-dir", folder, __file__, "--result", str(result), "--dir", str(root)]
        for name in ("ranks", "rounds", "steps", "hidden", "layers", "vocabulary", "tokens"):
            command += [f"--{name}", str(getattr(arguments, name))]
        try:
            subprocess.run(command, check=True)
            report(json.loads(result.read_text()), arguments)
        finally:
            shutil.rmtree(root)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
