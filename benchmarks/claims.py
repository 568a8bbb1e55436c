"""The speed-ups that the paper reports on 8 to 32 GPUs, as our simulator predicts them for 2 to 1024.

    python benchmarks/claims.py

Prints the tables of benchmarks/claims.md: on demand with `lb_mini` over collectives with `lb_micro` (the best
that collectives can use) and over collectives with `local_sort`, in brackets the share of time that ranks
wait with collectives. Each cell is one `odc advise`; see there for what is not modelled.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WORKLOADS = {"longalign": 65536, "swesmith": 65536, "grpo": 16984}  # tokens of a micro-batch, at most
GPUS = (2, 8, 32, 128, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulated speed-ups by workload and number of GPUs.")
    parser.add_argument("--model", default="qwen2.5-7b", help="as of odc advise (default: qwen2.5-7b)")
    parser.add_argument("--sequences", default="4,8", help="a GPU and minibatch (default: 4,8)")
    parser.add_argument("--minibatches", default="20", help="to simulate (default: 20)")
    arguments = parser.parse_args()
    print(f"| {arguments.model} | sequences a GPU | over | " + " | ".join(f"{n} GPUs" for n in GPUS) + " |")
    print("|---" * (3 + len(GPUS)) + "|")
    for workload, limit in WORKLOADS.items():
        for sequences in arguments.sequences.split(","):
            found = advise(arguments, workload, limit, sequences)
            for base in ("lb_micro", "local_sort"):
                cells = [cell(result["asked"]["methods"], base) for result in found]
                print(f"| {workload} | {sequences} | `{base}` | " + " | ".join(cells) + " |", flush=True)


def advise(arguments: argparse.Namespace, workload: str, limit: int, sequences: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "advice.json"
        words = ["--workload", workload, "--model", arguments.model, "--max-tokens", str(limit)]
        words += ["--gpus", ",".join(map(str, GPUS)), "--sequences", sequences, "--json", str(file)]
        command = [sys.executable, "-m", "odc_tools", "advise", "--minibatches", arguments.minibatches]
        subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL)
        results: list[dict[str, Any]] = json.loads(file.read_text())["results"]
        return results


def cell(methods: list[dict[str, Any]], base: str) -> str:
    by_name = {method["strategy"]: method for method in methods}
    speed_up = by_name[base]["step_s"] / by_name["lb_mini"]["step_s"]
    return f"{speed_up:.2f}x ({100 * by_name[base]['idle_share']:.0f}%)"


if __name__ == "__main__":
    main()
