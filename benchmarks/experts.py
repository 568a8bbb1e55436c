"""What pulling only the chosen experts of a mixture saves: bytes and seconds, both ways in turn.

    python benchmarks/experts.py --ranks 2 --experts 64 --chosen 4 --tokens 8,64,512

Two engines with the same Qwen3-MoE shape and random weights, odc.experts: all and chosen, take turns
minibatch by minibatch on the same random tokens, in the other order each time, after one warm-up round.
Printed for each length of micro-batch: bytes that rank 0 pulled and pushed in a minibatch and milliseconds
that it took (medians), and the ratio of times (median and range over rounds); the same for the forward of a
single token without gradients, as in generation.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

METHODS = ("all", "chosen")


def make_engine(method: str, options: argparse.Namespace) -> Any:
    import odcengine
    from odcengine.models import load_model

    shape = {
        "model_type": "qwen3_moe",
        "vocab_size": 512,
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": options.hidden // 4,
        "num_experts": options.experts,
        "num_experts_per_tok": options.chosen,
        "moe_intermediate_size": options.hidden // 2,
        "max_position_embeddings": 65536,
    }
    config = {
        "train_batch_size": "auto",
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "bf16": {"enabled": options.bf16},
        "odc": {"experts": method},
    }
    return odcengine.initialize(model=load_model(shape), config=config)[0]


def moved(engine: Any) -> tuple[int, int]:
    traffic = engine.transport.traffic
    return traffic.pulled_bytes, traffic.pushed_bytes


def run(options: argparse.Namespace) -> None:
    import torch

    rank = int(os.environ["RANK"])
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    engines = {method: make_engine(method, options) for method in METHODS}
    device = next(engines["all"].module.parameters()).device
    generator = torch.Generator().manual_seed(rank)

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def minibatch(engine: Any, rows: list[torch.Tensor]) -> tuple[float, int, int]:
        before, start = moved(engine), time.perf_counter()
        for row in rows:
            logits = engine(input_ids=row, use_cache=False).logits[0]
            engine.backward(
                torch.nn.functional.cross_entropy(logits, row[0], reduction="sum"), count=row.numel()
            )
        engine.step()
        synchronize()
        seconds, after = time.perf_counter() - start, moved(engine)
        return seconds, after[0] - before[0], after[1] - before[1]

    def one_token(engine: Any, row: torch.Tensor) -> tuple[float, int, int]:
        before, start = moved(engine), time.perf_counter()
        with torch.no_grad():
            engine(input_ids=row[:, :1], use_cache=False)
        synchronize()
        seconds, after = time.perf_counter() - start, moved(engine)
        engine.step()  # nothing was trained; the ranks meet, and the root is dropped
        return seconds, after[0] - before[0], after[1] - before[1]

    def compare(title: str, work: Any, length: int, count: int) -> None:
        found: dict[str, list[tuple[float, int, int]]] = {method: [] for method in METHODS}
        for number in range(options.rounds + 1):
            rows = [
                torch.randint(512, (1, length), generator=generator).to(device) for _ in range(max(count, 1))
            ]
            for method in METHODS if number % 2 else reversed(METHODS):
                result = work(engines[method], rows if count else rows[0])
                if number:
                    found[method].append(result)
        if rank == 0:
            ratios = [b[0] / a[0] for a, b in zip(found["all"], found["chosen"], strict=True)]
            median = {
                m: [statistics.median(column) for column in zip(*found[m], strict=True)] for m in METHODS
            }
            cells = [
                f"{median[m][1] / 1e6:.1f} + {median[m][2] / 1e6:.1f} | {median[m][0] * 1e3:.1f}"
                for m in METHODS
            ]
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"| {title} | {cells[0]} | {cells[1]} | {ratio} |", flush=True)

    if rank == 0:
        print("| micro-batches | all: MB pulled + pushed | ms | chosen: MB | ms | time, chosen / all |")
        print("|---|---|---|---|---|---|")
    for length in options.tokens:
        compare(f"{options.micro_batches} of {length} tokens", minibatch, length, options.micro_batches)
    compare("forward of one token", one_token, 1, 0)
    for engine in engines.values():
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--chosen", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[8, 64, 512]
    )
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run(options)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(options.ranks), "LOCAL_WORLD_SIZE": str(options.ranks)}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:]],
            env={**os.environ, **shared, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(options.ranks)
    ]
    sys.exit(max(abs(process.wait()) for process in ranks))


if __name__ == "__main__":
    main()
