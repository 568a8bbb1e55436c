"""``odc bench``: how fast communication, training and planning are on this machine, against others.

``odc bench primitives`` measures pulls and pushes, ``odc bench training`` whole minibatches. Both run on the
ranks that torchrun or odc-launch has started, or start them on this machine. All that is compared lies in one
process and takes turns, warm: what runs first on a fresh allocator is up to 20% slower. ``odc bench balance``
measures the planner, in this process. See ``docs/benchmarking.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from odcengine.errors import ConfigError
from odcengine.ranks import read_rank_info

TASKS = ("primitives", "training", "balance")
_MODULE = "odc_tools.bench.ranks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    tasks = parser.add_subparsers(dest="task", metavar="TASK", required=True)
    text = "pulls and pushes against all-gather and reduce-scatter, and a matrix product beside them"
    _add_primitives(tasks.add_parser("primitives", help=text, description=text, allow_abbrev=False))
    text = "minibatches of a model on demand, against FSDP2 and against no communication at all"
    _add_training(tasks.add_parser("training", help=text, description=text, allow_abbrev=False))

    from odc_tools.bench import balance

    text = "plans of minibatches on 8 to 1024 ranks: how near to the bound, how fast; no GPU and no torch"
    balance.add_arguments(
        tasks.add_parser("balance", help=text, description=text, allow_abbrev=False), _list_of(int)
    )


def _add_common(parser: argparse.ArgumentParser, task: str) -> None:
    add = parser.add_argument
    add("--ranks", type=int, metavar="N", help="ranks to start here (default: one a GPU; 2 without GPUs)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto, GPUs if any")
    add("--json", default=f"bench-{task}.json", metavar="FILE", help="raw results (default: %(default)s)")
    add("--commit", metavar="HASH", help="for the results, where the code is no git checkout")
    add("--timeout-s", type=float, default=300.0, metavar="S", help="limit of every wait (default: 300)")


def _add_primitives(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, "primitives")
    add = parser.add_argument
    add("--transport", metavar="NAME", help="shm or cuda_p2p (default: by the device)")
    add(
        "--sizes-mib",
        type=_list_of(float),
        default=[1.0, 4.0, 16.0, 64.0, 128.0],
        metavar="LIST",
        help="MiB of a rank's shard (default: 1,4,16,64,128)",
    )
    add("--rounds", type=int, metavar="N", help="measured rounds (default: 30; 5 on CPUs)")
    add("--repeats", type=int, metavar="N", help="calls in one measurement (default: 10; 1 on CPUs)")
    add("--matrix", type=int, default=8192, metavar="N", help="of the product on GPUs (default: 8192)")


def _add_training(parser: argparse.ArgumentParser) -> None:
    from odc_tools.bench.workloads import SHAPES, WORKLOADS

    _add_common(parser, "training")
    add = parser.add_argument
    add(
        "--workload",
        nargs="+",
        required=True,
        metavar="NAME[:N]",
        help=f"lengths of the sequences: {', '.join(WORKLOADS)}; N sequences a rank and minibatch instead of "
        "--sequences. Several are measured one after the other with the same models, each with a result file "
        "of its own, FILE-NAME[-N].json",
    )
    add("--shape", choices=tuple(SHAPES), required=True, help="the model, with random weights")
    add("--sequences", type=int, metavar="N", help="sequences a rank and minibatch (default: 4)")
    add("--seeds", type=_seeds, default=list(range(5)), metavar="A-B", help="(default: 0-4)")
    add("--minibatches", type=int, default=1, metavar="N", help="minibatches a seed (default: 1)")
    add("--rounds", type=int, default=2, metavar="N", help="measured passes over all of them (default: 2)")
    add(
        "--methods",
        nargs="+",
        metavar="KIND/PLAN",
        help="of fsdp2, fsdp2-symm, zero3, odc, odc-zero3, limit with local_sort, lb_micro, lb_mini, "
        "dynamic (default: fsdp2/lb_micro odc/lb_micro, and odc/lb_mini for unequal lengths, limit/lb_micro "
        "for equal ones)",
    )
    add(
        "--learn-costs",
        action="store_true",
        help="plan with costs and speeds fitted to the warm-up pass and to the workloads before, as "
        "balance.learn_costs does",
    )
    add(
        "--warm-up",
        type=int,
        metavar="N",
        help="minibatches that are run once before they are measured (default: all); one for later workloads",
    )
    add("--max-tokens", type=int, metavar="N", help="limit of a micro-batch (default: the longest sequence)")
    add("--max-samples", type=int, metavar="N", help="limit of sequences in a micro-batch (default: none)")
    add("--length-scale", type=float, default=1.0, metavar="F", help="factor on all lengths (default: 1)")
    add("--text", metavar="DIR", help="train on the bytes of its *.py files (default: random tokens)")
    add("--transport", default="auto", metavar="NAME", help="odc.transport (default: auto)")
    add(
        "--node-size",
        type=int,
        metavar="N",
        help="on demand with hybrid sharding over emulated nodes of N ranks (default: one node)",
    )
    add("--no-checkpointing", action="store_true", help="keep activations instead of recomputing blocks")
    add("--compile", action="store_true", help="every method with compiled blocks (model.compile)")
    add(
        "--budget-s",
        type=float,
        default=500.0,
        metavar="S",
        help="measures less to keep it (default: 500)",
    )
    add("--memory", action="store_true", help="one method after the other: peak memory instead of speed")
    add("--profile", metavar="DIR", help="also trace one minibatch of each method with torch.profiler")


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    parse.__name__ = "list of numbers"  # argparse's messages have it
    return parse


def _seeds(text: str) -> list[int]:
    """``0-4`` or ``0,3,5-7``."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    if not seeds:
        raise ValueError
    return seeds


_seeds.__name__ = "list of seeds"


def run(options: argparse.Namespace) -> int:  # noqa: RET503
    """Starts the ranks with odc-launch, or is one of them.

    Returns:
        0 if everything was measured and right.
    """
    check_options(options)
    if options.task == "balance":
        from odc_tools.bench import balance

        return balance.run(options)
    if read_rank_info().source != "single process":
        from odc_tools.bench import ranks

        return ranks.run(options)
    _start_ranks(options)


def _start_ranks(options: argparse.Namespace) -> NoReturn:
    number = options.ranks or _default_ranks(options.device)
    words = ["-m", "odc_launcher", "--nproc-per-node", str(number), "--show", "rank0", "-m", _MODULE]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *words, json.dumps(vars(options))])


def _default_ranks(device: str) -> int:
    import torch

    from odcengine.device import SHARE_VARIABLE, shares_gpus

    if device == "cpu" or not torch.cuda.is_available():
        return 2
    if torch.cuda.device_count() < 2 and not shares_gpus():
        raise ConfigError(
            "odc bench needs 2 GPUs or more, and there is 1; add --device cpu to measure CPUs (with "
            f"{SHARE_VARIABLE}=1 two ranks share the GPU: losses mean something then, speeds nothing)"
        )
    return max(torch.cuda.device_count(), 2)


def check_options(options: argparse.Namespace) -> None:
    """Refuses what cannot be measured, before anything is started.

    Raises:
        ConfigError: all problems at once.
    """
    problems = [
        f"--{name.replace('_', '-')} {value}: it must be {least:g} or more"
        for name, least in _LEAST.items()
        if (value := getattr(options, name, None)) is not None
        and not all(least <= number < math.inf for number in (value if isinstance(value, list) else [value]))
    ]
    folder = Path(options.json).absolute().parent
    if not folder.is_dir():
        problems.append(f"--json {options.json}: there is no folder {folder}; make it first")
    if options.task == "primitives":
        problems += [
            f"--sizes-mib {size}: it must be above 0 and at most 512"
            for size in options.sizes_mib
            if not 0 < size <= 512
        ]
    elif options.task == "balance":
        from odc_tools.bench import balance

        problems += balance.problems_of(options)
    elif not problems:
        from odc_tools.bench.schedule import check_training

        problems += check_training(options)
    if problems:
        raise ConfigError(*problems)


_LEAST = {
    "ranks": 2,
    "node_size": 1,
    "timeout_s": 1,
    "rounds": 1,
    "repeats": 1,
    "matrix": 16,
    "sequences": 1,
    "samples": 1,
    "minibatches": 1,
    "warm_up": 1,
    "max_tokens": 1,
    "max_samples": 1,
    "length_scale": 1e-6,
    "budget_s": 1,
}
