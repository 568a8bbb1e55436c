"""Which minibatches a training benchmark runs, with which methods and plans; knows nothing of torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from odc_tools.bench.workloads import WORKLOADS, Workload
from odcengine.balance import CostModel, Plan, make_plan
from odcengine.balance.plan import EQUAL_COUNT_STRATEGIES, STRATEGIES
from odcengine.errors import ConfigError

COLLECTIVE_KINDS = ("fsdp2", "fsdp2-symm", "zero3")
ZERO3_KINDS = ("zero3", "odc-zero3")
KINDS = {
    "fsdp2": "torch's fully_shard with its own collectives",
    "fsdp2-symm": "the same, with NCCL's symmetric memory and copy-engine all-gathers",
    "odc": "odcengine, on demand",
    "zero3": "DeepSpeed's ZeRO-3 with its own collectives",
    "odc-zero3": "the same engine, attached: on demand",
    "limit": "odcengine with every pull and push left out: right compute, wrong numbers",
}
"""Kind of a method -> what it is."""

_SEQUENCES = 4


@dataclass(frozen=True)
class MethodName:
    """A way to run a minibatch.

    Attributes:
        kind: one of :data:`KINDS`.
        strategy: one of the planner's strategies.
    """

    kind: str
    strategy: str

    @classmethod
    def parse(cls, text: str) -> MethodName:
        """The name written ``kind/strategy``.

        Raises:
            ConfigError: there is no such method.
        """
        kind, _, strategy = text.partition("/")
        if kind not in KINDS or strategy not in STRATEGIES:
            raise ConfigError(
                f"--methods {text}: expected KIND/PLAN with KIND of {', '.join(KINDS)} and PLAN of "
                f"{', '.join(STRATEGIES)}"
            )
        if kind in COLLECTIVE_KINDS and strategy not in EQUAL_COUNT_STRATEGIES:
            raise ConfigError(
                f"--methods {text}: collectives need equal numbers of micro-batches on all ranks; give "
                f"{kind} one of the plans {', '.join(EQUAL_COUNT_STRATEGIES)}"
            )
        if kind == "odc-zero3" and strategy == "dynamic":
            raise ConfigError(
                f"--methods {text}: an attached engine cannot draw work; give it another plan, or use "
                "odc/dynamic"
            )
        return cls(kind, strategy)

    def __str__(self) -> str:
        return f"{self.kind}/{self.strategy}"

    @property
    def collective(self) -> bool:
        """Whether ranks meet in every micro-batch."""
        return self.kind in COLLECTIVE_KINDS

    @property
    def right(self) -> bool:
        """Whether its numbers are right."""
        return self.kind != "limit"

    def predicted_cost(self, plan: Plan) -> float:
        """Duration of a plan with this method's communication, in the planner's unit."""
        return plan.lockstep_cost if self.collective else plan.on_demand_cost


def methods_of(options: argparse.Namespace) -> list[MethodName]:
    """The methods of a command line, the first one the others are compared with.

    Raises:
        ConfigError: a name is wrong or comes twice.
    """
    names = options.methods
    if names is None:
        names = ["fsdp2/lb_micro", "odc/lb_micro"]
        balanced = [WORKLOADS[task.workload].balanced for task in tasks_of(options)]
        if not all(balanced):
            names.append("odc/lb_mini")
        if any(balanced) and not options.memory:
            names.append("limit/lb_micro")
    methods = [MethodName.parse(name) for name in names]
    if len(set(methods)) < len(methods):
        raise ConfigError(f"--methods {' '.join(names)}: a method comes twice; name each once")
    return methods


def tasks_of(options: argparse.Namespace) -> list[argparse.Namespace]:
    """The options of each workload of a command line, as if it were the only one.

    Raises:
        ConfigError: there is no such workload, one comes twice, or its number of sequences is none.
    """
    tasks, problems = [], []
    for text in options.workload:
        name, colon, number = text.partition(":")
        if name not in WORKLOADS:
            problems.append(f"--workload {text}: there is no {name}; expected {', '.join(WORKLOADS)}")
        elif colon and not (number.isdecimal() and int(number)):
            problems.append(f"--workload {text}: after the colon comes a number of sequences, 1 or more")
        else:
            task = argparse.Namespace(**vars(options) | {"workload": name})
            if colon:
                task.sequences = int(number)
            if len(options.workload) > 1:
                file = Path(options.json)
                task.json = str(file.with_stem(f"{file.stem}-{text.replace(':', '-')}"))
            tasks.append(task)
    if len(set(options.workload)) < len(options.workload):
        problems.append(f"--workload {' '.join(options.workload)}: one comes twice; name each once")
    if len(options.workload) > 1 and options.profile:
        problems.append("--profile: traces one workload; give --workload only one name")
    if problems:
        raise ConfigError(*problems)
    return tasks


def wrong_node_size(options: argparse.Namespace, num_ranks: int) -> str | None:
    """What is wrong with ``--node-size`` for so many ranks; None if nothing is."""
    size = options.node_size
    if size is None or num_ranks % size == 0:
        return None
    return f"--node-size {size}: does not divide the {num_ranks} ranks into nodes of equal size"


def check_training(options: argparse.Namespace) -> list[str]:
    """Problems with the options of ``odc bench training``, one line each."""
    problems: list[str] = []
    try:
        tasks = tasks_of(options)
    except ConfigError as error:
        return list(error.problems)
    try:
        if all(name.collective for name in methods_of(options)) and options.node_size is not None:
            problems.append(
                "--node-size: changes nothing, as none of the --methods is on demand; leave it out"
            )
    except ConfigError as error:
        problems += error.problems
    for task in tasks:
        workload = WORKLOADS[task.workload]
        fixed = workload.sequences
        if fixed is not None and task.sequences not in (None, fixed):
            problems.append(
                f"--sequences {task.sequences}: {workload.name} has {fixed} a rank; leave --sequences out"
            )
        longest = workload.token_limit(task.length_scale)
        if task.max_tokens is not None and task.max_tokens < longest:
            problems.append(
                f"--max-tokens {task.max_tokens}: {workload.name} has sequences of up to {longest} tokens, "
                "which must fit into a micro-batch"
            )
    if options.ranks is not None and (problem := wrong_node_size(options, options.ranks)):
        problems.append(problem)
    if options.warm_up is not None and options.memory:
        problems.append("--warm-up: not with --memory, which runs every minibatch only once")
    if options.learn_costs and options.memory:
        problems.append("--learn-costs: not with --memory, which runs every minibatch only once")
    if options.learn_costs and options.methods and not any(m.startswith("odc/") for m in options.methods):
        problems.append("--learn-costs: needs a method odc/PLAN, whose ranks tell how long they were busy")
    if options.memory and options.profile:
        problems.append(
            "--profile: not with --memory, whose methods are gone at the end; run them separately"
        )
    return problems


@dataclass(frozen=True)
class Minibatch:
    """Lengths of one optimizer step.

    Attributes:
        seed: of the benchmark.
        index: number of the minibatch under its seed.
        lengths: tokens of its sequences, over all ranks.
        plans: strategy -> plan.
    """

    seed: int
    index: int
    lengths: tuple[int, ...]
    plans: dict[str, Plan]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences together."""
        return sum(self.lengths)

    @property
    def num_targets(self) -> int:
        """Tokens that are learned: all but the first of each sequence."""
        return self.num_tokens - len(self.lengths)


def make_minibatches(
    options: argparse.Namespace, methods: Sequence[MethodName], world_size: int, cost: CostModel
) -> list[Minibatch]:
    """All minibatches of a command line, planned.

    Args:
        options: of ``odc bench training``.
        methods: what will run them.
        world_size: number of ranks.
        cost: cost of a sequence.
    """
    workload: Workload = WORKLOADS[options.workload]
    count = (workload.sequences or options.sequences or _SEQUENCES) * world_size
    minibatches = []
    for seed in options.seeds:
        for index in range(options.minibatches):
            lengths = tuple(workload.lengths(seed, index, count, options.length_scale))
            plans = make_plans(options, methods, lengths, world_size, cost)
            minibatches.append(Minibatch(seed, index, lengths, plans))
    return minibatches


def make_plans(
    options: argparse.Namespace,
    methods: Sequence[MethodName],
    lengths: Sequence[int],
    world_size: int,
    cost: CostModel,
    speeds: Sequence[float] | None = None,
) -> dict[str, Plan]:
    """The plans of one minibatch, by strategy.

    Args:
        options: of ``odc bench training``.
        methods: what will run it.
        lengths: tokens of its sequences.
        world_size: number of ranks.
        cost: cost of a sequence.
        speeds: of each rank; None: all alike.
    """
    limit = WORKLOADS[options.workload].token_limit(options.length_scale)
    return {
        strategy: make_plan(
            lengths,
            num_ranks=world_size,
            strategy=strategy,
            max_tokens=options.max_tokens or limit,
            max_samples=options.max_samples,
            cost=cost,
            speeds=speeds,
        )
        for strategy in sorted({method.strategy for method in methods})
    }
