"""The demo: on-demand communication against collectives, on this machine's CPU cores.

    make demo        or        python examples/demo/run.py

Data, steps, logs and a picture go to ``demo_out/``. Exit code: 1 if the methods' losses differ, that of
odc-launch if training failed, else 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

try:
    import prepare
    from picture import draw
    from report import LOSS_TOLERANCE, read_lines, summarize
except ModuleNotFoundError as error:
    sys.exit(f"{error}; `make demo` installs what is needed into .venv, `pip install -e '.[dev]'` into yours")

FOLDER = Path(__file__).resolve().parent
NUM_RANKS = 2
# Freed memory stays with the process, for all methods alike: else page faults would be compared.
MALLOC = {
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TOP_PAD_": str(64 << 20),
}
INTRODUCTION = """\
odcengine's demo: does on-demand communication train faster, and the same?
  {ranks} processes train a small language model on functions of Python's own library. Samples have very
  different lengths, so one process often has more to do than the other. Three methods take turns on the
  same minibatches, once packed into few micro-batches and once with one sequence a micro-batch:
    collective  FSDP2 as it comes: processes meet at every layer, gloo moves the data
    lock-step   the same meetings through odcengine's shared memory, as a control
    on demand   odcengine's way: parameters are pulled and gradients pushed when a process needs it; they
                meet once a minibatch, and each has as many micro-batches as its share of the work takes
  Idle is the share of its time that a process waits for the other (collective: all time inside gloo).
  tokens/s are real tokens, by the slower process. Losses must agree to {tolerance:g} at every step.
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare on-demand communication and collectives.")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder (default: %(default)s)")
    parser.add_argument(
        "--minibatches", type=int, default=6, help="measured ones a data order (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=int, default=1, help="data orders to pool, one after the other (default: %(default)s)"
    )
    parser.add_argument(
        "--sequences", type=int, default=16, help="a rank and minibatch (default: %(default)s)"
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=210.0,
        help="a data order; on a slow machine, fewer minibatches (default: %(default)s)",
    )
    parser.add_argument("--max-tokens", type=int, default=2048, help="a micro-batch (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=256, help="size, times 64 (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=prepare.VOCAB_SIZE, help="(default: %(default)s)")
    parser.add_argument(
        "--stdlib", type=Path, help="folder of Python files to learn (default: of this Python)"
    )
    arguments = parser.parse_args()
    if arguments.hidden < 64 or arguments.hidden % 64:
        parser.error(f"--hidden is {arguments.hidden}; heads have size 64, so give a multiple of it")
    for name in ("minibatches", "seeds", "sequences", "layers"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}, but must be at least 1")
    return arguments


def launch(arguments: argparse.Namespace) -> int:
    """Run ``train.py`` on all ranks; returns the exit code."""
    logs = arguments.out / "logs"
    for log in logs.glob("rank*.log"):
        log.unlink()
    command = [sys.executable, "-m", "odc_launcher", "--nproc-per-node", str(NUM_RANKS), "--show", "rank0"]
    command += ["--log-dir", str(logs), str(FOLDER / "train.py"), "--out", str(arguments.out)]
    names = ("vocab_size", "minibatches", "seeds", "sequences", "max_tokens", "layers", "hidden", "budget_s")
    for name in names:
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    process = subprocess.Popen(command, env=os.environ | MALLOC)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the launcher got it too, and ends the ranks
            continue


def main() -> int:
    arguments = parse_arguments()
    start = time.monotonic()
    print(INTRODUCTION.format(ranks=NUM_RANKS, tolerance=LOSS_TOLERANCE))
    summary = prepare.prepare(
        arguments.out,
        stdlib=arguments.stdlib,
        vocab_size=arguments.vocab_size,
        max_tokens=arguments.max_tokens,
    )
    print(summary, flush=True)
    code = launch(arguments)
    if code:
        print(f"\nTraining failed (exit code {code}); logs are in {arguments.out / 'logs'}.", file=sys.stderr)
        return code
    lines = read_lines(arguments.out / "steps.jsonl")
    report = summarize(lines)
    (arguments.out / "summary.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    draw(report, lines, arguments.out)
    print(f"\n{report}\n\n{time.monotonic() - start:.0f} s in all.", end=" ")
    print(f"Picture: {arguments.out / 'demo.png'}; every step: {arguments.out / 'steps.jsonl'}")
    return 0 if report.losses_agree else 1


if __name__ == "__main__":
    sys.exit(main())
