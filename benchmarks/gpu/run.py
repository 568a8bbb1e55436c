"""Runs the GPU tests and benchmarks unattended, part by part within a limit, and prints short tables.

    python benchmarks/gpu/run.py --list
    python benchmarks/gpu/run.py tests --out results
    python benchmarks/gpu/run.py primitives equal --out results --limit-s 540

On all GPUs of this machine, 2 or more; with ``--share`` also on one, which ranks share: tests, curves and
fidelity mean something then, speeds nothing. Parts run one after the other and share the limit by their
weights; a command that takes longer than its share is ended with its children, and the next begins.
Everything that a command prints is in ``OUT/NAME.log``, raw results are in ``OUT/NAME.json``. The exit code
is the number of commands that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(os.__file__).parent  # of Python: real text that is there


@dataclass(frozen=True)
class Command:
    """What is run.

    Attributes:
        name: of its files.
        words: arguments of Python, as in a shell; ``{out}``, ``{shape}`` and ``{budget}`` are filled in.
        weight: its share of the limit.
        lines: how many of the last lines that it prints to show.
        unset: variables that it must not see.
    """

    name: str
    words: str
    weight: float = 1.0
    lines: int = 12
    unset: tuple[str, ...] = ()


def checked(name: str, paths: str, mark: str = "multi_gpu", unset: tuple[str, ...] = ()) -> Command:
    words = f"-m pytest -q --no-header -p no:cacheprovider -rfE --tb=short -m {mark} {paths}"
    return Command(name, words, lines=4, unset=unset)


def trained(name: str, workload: str, methods: str, options: str, weight: float = 1.0) -> Command:
    words = (
        f"-m odc_tools bench training --workload {workload} --shape {{shape}} --methods {methods} {options}"
    )
    return Command(name, f"{words} --json {{out}}/{name}.json --budget-s {{budget}}", weight)


SAME = "fsdp2/lb_micro odc/lb_micro limit/lb_micro"
MAIN = "fsdp2/lb_micro odc/lb_micro odc/lb_mini"
BEST = "fsdp2/lb_micro odc/lb_mini odc/dynamic"
FAST = "--compile --learn-costs --seeds 0-19 --rounds 1"

# Layouts of tests/engine/test_gpu.py.
NVSHMEM = "nvshmem or unmapped or two_hosts"
WIDE = "4_ranks or 2x2 or 8_ranks"

PARTS: dict[str, tuple[Command, ...]] = {
    "tests": (
        checked("test-transport", "tests/transport/test_cuda_p2p.py"),
        checked("test-nvshmem", "tests/transport/test_nvshmem.py"),
        checked("test-engine", f"tests/engine -k 'one_process and not ({NVSHMEM} or {WIDE})'"),
        checked("test-engine-wide", f"tests/engine -k 'one_process and ({WIDE})'"),
        checked("test-engine-nvshmem", f"tests/engine -k 'one_process and ({NVSHMEM})'"),
        checked("test-engine-rest", "tests/engine -k 'not one_process'"),
        checked("test-rest", "tests/checkpoint tests/adapters tests/rollouts tests/models tests/tools"),
        checked("test-attached", "tests/fsdp2 tests/zero3"),
    ),
    "more-tests": (
        checked(
            "test-heap",
            "tests/launcher/test_odc_launch_doctor.py tests/transport/test_nvshmem_vmm.py",
            unset=("NVSHMEM_DISABLE_CUDA_VMM",),
        ),
        checked("test-one-gpu", "tests/data tests/engine tests/losses tests/models", mark="gpu"),
    ),
    "doctor": (
        Command("doctor", "-m odc_launcher doctor", lines=40),
        trained("nvshmem", "longalign", "odc/lb_mini", "--transport nvshmem --seeds 0 --rounds 1", weight=2),
        trained("two-nodes", "longalign", "odc/lb_mini", "--node-size 1 --seeds 0-1 --rounds 1", weight=2),
    ),
    "primitives": (
        Command("primitives", "-m odc_tools bench primitives --json {out}/primitives.json"),
        Command(
            "push-kernels", "-m torch.distributed.run --nproc-per-node gpu benchmarks/gpu/push_kernels.py"
        ),
        Command("long-sequences", "benchmarks/gpu/long_sequences.py", lines=20),
    ),
    "equal": (
        trained("equal", "balanced-8k single-32k balanced-2k", SAME, "--compile --seeds 0-1 --rounds 6"),
    ),
    # Short minibatches first: what they teach serves the long ones, too.
    "unequal": (trained("unequal", "grpo:4 swesmith longalign", BEST, f"{FAST} --warm-up 5"),),
    "eight": (trained("eight", "longalign:8 swesmith:8", MAIN, f"{FAST} --warm-up 3"),),
    "rl": (trained("rl", "grpo:8", BEST, f"{FAST} --warm-up 5"),),
    "memory": (
        trained("memory", "balanced-8k longalign", MAIN, "--memory --seeds 0-1", weight=2),
        trained("symm", "longalign", "fsdp2/lb_micro fsdp2-symm/lb_micro", "--seeds 0-2"),
    ),
    "curves": (
        trained(
            "curves",
            "sharegpt",
            MAIN,
            f"--seeds 0 --minibatches 50 --rounds 1 --text {shlex.quote(str(SOURCES))}",
            weight=8,
        ),
        Command("picture", "benchmarks/gpu/curves.py {out}/curves.json {out}/curves.png"),
    ),
    "fidelity": tuple(
        Command(
            f"fidelity-{task}",
            f"benchmarks/fidelity/run.py {task} --bf16 --together 4 --out {{out}}/fidelity",
        )
        for task in ("sft", "grpo")
    ),
    "deepspeed": (
        trained(
            "zero3",
            "longalign balanced-8k",
            "zero3/lb_micro odc-zero3/lb_micro odc-zero3/lb_mini odc/lb_mini",
            "--warm-up 2 --seeds 0-9 --rounds 1",
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="GPU tests and benchmarks, part by part. Parts: " + ", ".join(PARTS)
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="which, in this order (default: all)")
    parser.add_argument("--out", default="gpu-results", metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--shape", default="qwen2.5-1.5b", help="of odc bench training (default: %(default)s)"
    )
    parser.add_argument("--commit", metavar="HASH", help="for the results, where the code is no git checkout")
    parser.add_argument("--limit-s", type=float, default=540.0, metavar="S", help="of a part (default: 540)")
    parser.add_argument(
        "--together", action="store_true", help="the commands of a part at the same time: tests only"
    )
    parser.add_argument(
        "--share", action="store_true", help="where there is one GPU, two ranks share it: no speeds"
    )
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    parts = options.parts or list(PARTS)
    if options.together and any(not part.endswith("tests") for part in parts):
        parser.error("--together: only for tests; what is measured has the machine to itself")
    out = Path(options.out).resolve()
    if options.list:
        for part in parts:
            for command, limit_s in limited(PARTS[part], options.limit_s, together=options.together):
                print(f"{part}: {shlex.join(['python', *filled(command, options, out, limit_s)])}")
        return
    check_gpus(parser, share=options.share)
    out.mkdir(parents=True, exist_ok=True)
    failed = sum(run_part(part, options, out) for part in parts)
    sys.exit(min(failed, 100))


def check_gpus(parser: argparse.ArgumentParser, *, share: bool) -> None:
    import torch

    count = torch.cuda.device_count()
    if count == 1 and share:
        os.environ["ODC_SHARE_GPUS"] = "1"
    elif count < 2:
        hint = "; see --share" if count else ""
        parser.error(f"this machine has {count} GPUs for torch, but 2 or more are needed{hint}")


def limited(commands: Sequence[Command], limit_s: float, *, together: bool) -> list[tuple[Command, float]]:
    """Each command with its seconds."""
    whole = sum(command.weight for command in commands)
    return [(command, limit_s if together else limit_s * command.weight / whole) for command in commands]


def filled(command: Command, options: argparse.Namespace, out: Path, limit_s: float) -> list[str]:
    """The words of a command; its own budget leaves a minute to start and to end."""
    values = {"out": out, "shape": options.shape, "budget": round(max(limit_s - 60, 20))}
    words = [word.format(**values) for word in shlex.split(command.words)]
    if options.commit is not None and "bench" in words:
        words += ["--commit", options.commit]
    return words


class Running:
    """A command that runs, with its children in a process group of its own."""

    def __init__(self, command: Command, options: argparse.Namespace, out: Path, limit_s: float) -> None:
        self.command = command
        self._log = out / f"{command.name}.log"
        env = {name: value for name, value in os.environ.items() if name not in command.unset}
        path = [str(ROOT / name) for name in ("", "launcher", "tools")] + [env.get("PYTHONPATH", "")]
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONUNBUFFERED": "1"}
        self._start, self._limit_s = time.monotonic(), limit_s
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *filled(command, options, out, limit_s)],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> bool:
        """Wait until it ends or its time is up, and tell how it went; returns whether it failed."""
        how = ""
        try:
            left = self._start + self._limit_s - time.monotonic()
            how = f"exit code {self._process.wait(max(left, 0.0))}"
        except subprocess.TimeoutExpired:
            how = f"ended after {self._limit_s:.0f} s"
        finally:
            self._end()
        seconds = time.monotonic() - self._start
        print(f"\n== {self.command.name}: {how}, {seconds:.0f} s", flush=True)
        lines = self._log.read_text(errors="replace").rstrip().splitlines()
        print("\n".join(line[:200] for line in lines[-self.command.lines :]), flush=True)
        return how != "exit code 0"

    def _end(self) -> None:
        """End what is left of its process group; odc-launch ends its ranks when it is told to."""
        for number, patience_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 15.0)):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, number)
                self._process.wait(patience_s)


def run_part(part: str, options: argparse.Namespace, out: Path) -> int:
    """Run the commands of a part; returns how many failed."""
    print(f"\n# {part}, {time.strftime('%H:%M:%S')}", flush=True)
    commands = limited(PARTS[part], options.limit_s, together=options.together)
    if options.together:
        running = [Running(command, options, out, limit_s) for command, limit_s in commands]
        return sum(command.wait() for command in running)
    return sum(Running(command, options, out, limit_s).wait() for command, limit_s in commands)


if __name__ == "__main__":
    main()
