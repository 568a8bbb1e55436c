"""``odc bench training``: minibatches on demand, against FSDP2 and against no communication at all.

Every method has a copy of the model in this process and runs the same minibatches, with the same tokens, in
the same order. One pass over all of them warms up allocators and kernels; then the methods take turns,
minibatch by minibatch. A minibatch is timed from a common start of all ranks until the
slowest one's device is done.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from odc_tools.bench import ranks as bench
from odc_tools.bench import summary
from odc_tools.bench.memory import PeakMemory
from odc_tools.bench.methods import Method, Outcome, make_method, odc_section, why_not
from odc_tools.bench.profile import Profile
from odc_tools.bench.ranks import Ranks
from odc_tools.bench.schedule import (
    MethodName,
    Minibatch,
    make_minibatches,
    make_plans,
    methods_of,
    tasks_of,
    wrong_node_size,
)
from odc_tools.bench.workloads import build_model, draw_tokens, model_config, read_text
from odcengine.balance import CostModel, OnlineCost
from odcengine.data import MicroBatch, pack_samples
from odcengine.errors import ConfigError

_LEARN = 4  # steps from which costs are learned, at least
_WINDOW = 1000  # of these, the newest
_RESERVE_S = 10.0  # of the budget, for closing and writing


def run(options: argparse.Namespace, ranks: Ranks) -> int:
    """Measure, print a table and write the result.

    Returns:
        0 if the methods computed the same, else 1.
    """
    if problem := wrong_node_size(options, ranks.world_size):
        raise ConfigError(problem)
    if options.compile:
        torch._logging.set_logs(recompiles=True)  # type: ignore[attr-defined]  # the reasons, to the ranks' logs
    config = model_config(options.shape)
    wanted = methods_of(options)
    skipped = {str(name): reason for name in wanted if (reason := why_not(name, wanted, ranks))}
    names = [name for name in wanted if str(name) not in skipped]
    if not names:
        raise ConfigError(*(f"--methods {name}: {reason}" for name, reason in skipped.items()))
    run = _Run(options, ranks, config, names, skipped)
    tasks = tasks_of(options)
    right = run.measure_memory(tasks) if options.memory else run.measure_speed(tasks)
    dist.destroy_process_group()
    return 0 if right else 1


class _Run:
    """Methods, minibatches and the clock.

    Args:
        options: of the command line.
        ranks: this rank.
        config: of the model.
        names: methods to run.
        skipped: methods that cannot run here, with the reason.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        ranks: Ranks,
        config: Any,
        names: Sequence[MethodName],
        skipped: dict[str, str],
    ) -> None:
        self._options, self._ranks, self._config = options, ranks, config
        self._cost = CostModel.from_config(config, recompute=not options.no_checkpointing)
        self._learned = OnlineCost(self._cost, num_ranks=ranks.world_size, window=_WINDOW, min_steps=_LEARN)
        self._text = read_text(options.text) if options.text else None
        self._names, self._skipped = list(names), skipped
        self._until_s = 0.0
        self._compiled = False
        self._minibatches: list[Minibatch] = []
        self._record: dict[str, Any] = {}

    def _begin(self, task: argparse.Namespace, tasks_left: int) -> None:
        """Take up a workload, with an equal share of the time that is left."""
        self._options = task
        now = time.perf_counter()
        self._until_s = now + (bench.STARTED + task.budget_s - _RESERVE_S - now) / tasks_left
        self._minibatches = make_minibatches(task, self._names, self._ranks.world_size, self._cost)
        self._record = bench.describe(task, self._ranks) | {
            "complete": False,
            "methods": [str(name) for name in self._names],
            "skipped": self._skipped,
            "minibatches": [],
            "notes": [],
            "steps": [],
        }
        self._describe_minibatches()

    def _describe_minibatches(self) -> None:
        self._record["minibatches"] = [
            summary.describe_minibatch(minibatch, self._names) for minibatch in self._minibatches
        ]

    def _finish(self) -> bool:
        """Write and print what was measured; returns whether the methods computed the same."""
        self._record["complete"] = True
        right = summary.add_summary(self._record, self._names)
        bench.write(self._record, self._options.json, self._ranks)
        if self._ranks.rank == 0:
            print(summary.format_record(self._record), flush=True)
        return right

    # -- speed -----------------------------------------------------------------------------------------

    def measure_speed(self, tasks: Sequence[argparse.Namespace]) -> bool:
        """Warm up, measure and, where asked for, profile; returns whether the methods computed the same."""
        methods, right = self._make_all(), True
        for number, task in enumerate(tasks):
            self._begin(task, len(tasks) - number)
            warm_s = self._warm_up(methods)
            if task.learn_costs:
                self._plan_anew()
            self._measure(methods, warm_s)
            if task.profile:
                self._profile(methods)
            right &= self._finish()
        self._close(methods)
        return right

    def _make_all(self) -> list[Method]:
        methods = []
        for name in self._names:
            self._ranks.say(f"making {name}")
            methods.append(self._make(name))
        return methods

    def _make(self, name: MethodName) -> Method:
        """A method with a model of its own; the seed gives all of them the same weights."""
        options = self._options
        model = build_model(
            self._config,
            seed=0,
            device=str(self._ranks.device),
            checkpointing=not options.no_checkpointing,
            compiled=options.compile,
            stays=not options.memory,
        )
        if self._ranks.on_gpu and options.memory:
            torch.cuda.empty_cache()  # the weights were drawn there
        method = make_method(name, model, self._ranks, odc_section(options))
        if self._ranks.on_gpu and not options.memory:
            torch.cuda.empty_cache()  # of the whole model only the shards are left
        return method

    def _warm_up(self, methods: list[Method]) -> list[float]:
        """Run minibatches once; returns for each of all the seconds that it should take with all methods.

        Leaves out the last minibatches if warming up and measuring them would pass the budget.
        """
        first_task, self._compiled = not self._compiled, True
        count = len(self._minibatches)
        if self._options.warm_up is not None:
            count = min(self._options.warm_up if first_task else 1, count)
        tells = range(1 if first_task else 0, count)  # the very first one compiles kernels and tells nothing
        seconds: list[float] = []

        def expected(minibatch: Minibatch) -> float:
            known = tells[: max(len(seconds) - tells.start, 0)]
            tokens = sum(self._minibatches[i].num_tokens for i in known)
            return sum(seconds[i] for i in known) / tokens * minibatch.num_tokens if tokens else 0.0

        for number, minibatch in enumerate(self._minibatches[:count]):
            measured = sum(expected(m) for m in self._minibatches[: number + 1])
            if number >= 2 and self._over_budget(expected(minibatch) + measured):
                self._leave_out(number)
                break
            start = time.perf_counter()
            self._run_all(methods, minibatch, number, number, round_=-1, first=first_task and number == 0)
            self._ranks.say(f"{self._options.workload}: warm-up {number + 1} of {count}")
            seconds.append(time.perf_counter() - start)
        return [expected(minibatch) for minibatch in self._minibatches]

    def _leave_out(self, first: int) -> None:
        total, budget_s = len(self._minibatches), self._options.budget_s
        self._note(
            f"{total - first} of {total} minibatches were left out, to end within --budget-s {budget_s:g}"
        )
        del self._minibatches[first:]

    def _plan_anew(self) -> None:
        """Plan all minibatches, for all methods, with the costs and speeds that were seen until now."""
        options, size = self._options, self._ranks.world_size
        fit = self._learned.fit()
        self._record["learned"] = dataclasses.asdict(fit)
        if not fit.num_steps:
            self._note(
                f"--learn-costs: fewer than {_LEARN} steps of odc methods to learn from; nothing learned"
            )
            return
        self._minibatches = [
            dataclasses.replace(
                minibatch,
                plans=make_plans(options, self._names, minibatch.lengths, size, fit.cost, fit.speeds),
            )
            for minibatch in self._minibatches
        ]
        self._describe_minibatches()

    def _measure(self, methods: list[Method], warm_s: list[float]) -> None:
        rounds = self._options.rounds
        expected = list(warm_s)
        for round_ in range(rounds):
            for number, minibatch in enumerate(self._minibatches):
                if (round_ or number) and self._over_budget(expected[number]):
                    total = rounds * len(self._minibatches)
                    done = round_ * len(self._minibatches) + number
                    self._note(
                        f"{done} of {total} measurements were made, to end within --budget-s "
                        f"{self._options.budget_s:g}"
                    )
                    return
                for usual_s in (expected[number], math.inf):  # the second time there is no time for a third
                    start, before = time.perf_counter(), len(self._record["steps"])
                    self._run_all(methods, minibatch, number, round_ + number, round_)
                    seconds = time.perf_counter() - start
                    if not self._is_repeated(self._record["steps"][before:], usual_s or seconds):
                        break
                expected[number] = seconds
                self._ranks.say(
                    f"{self._options.workload}: round {round_ + 1} of {rounds}, {number + 1} of "
                    f"{len(self._minibatches)}"
                )
            bench.write(self._record, self._options.json, self._ranks)

    def _is_repeated(self, steps: Sequence[dict[str, Any]], seconds: float) -> bool:
        """Whether a method compiled blocks in these steps, and there is time for the same without."""
        methods = [step["method"] for step in steps if step["compiled"]]
        if not methods:
            return False
        repeat = not self._over_budget(seconds)
        self._note(
            f"{', '.join(methods)} compiled blocks in a measurement of minibatch {steps[0]['minibatch']}, "
            + ("which is repeated" if repeat else "which is too slow by that: no time to repeat it")
        )
        for step in steps if repeat else ():
            step["round"] = -1
        return repeat

    def _over_budget(self, seconds: float) -> bool:
        """Whether so many seconds more would pass the budget; rank 0's clock decides for all."""
        return self._ranks.of_first(self._until_s - time.perf_counter() - seconds) < 0

    def _note(self, text: str) -> None:
        self._record["notes"].append(text)
        self._ranks.say(text)

    def _run_all(
        self,
        methods: list[Method],
        minibatch: Minibatch,
        number: int,
        shift: int,
        round_: int,
        *,
        first: bool = False,
    ) -> None:
        """Run a minibatch with all methods, starting with another one each time."""
        begin = shift % len(methods)
        for method in methods[begin:] + methods[:begin]:
            seconds, compiled, outcome = self._time(method, minibatch)
            if first:
                method.after_first()
            elif not compiled:
                self._learn(method.name, minibatch, outcome)
            self._record["steps"].append(
                {
                    "round": round_,  # -1: warm-up
                    "minibatch": number,
                    "first": first,
                    "method": str(method.name),
                    "wall_s": seconds,
                    "compiled": compiled,
                    **dataclasses.asdict(outcome),
                }
            )

    def _learn(self, name: MethodName, minibatch: Minibatch, outcome: Outcome) -> None:
        """What a planned minibatch teaches; with ``limit`` ranks are busy for less than they need."""
        if name.kind == "odc" and name.strategy != "dynamic" and outcome.busy_s is not None:
            self._learned.update(minibatch.plans[name.strategy], outcome.busy_s)

    def _time(self, method: Method, minibatch: Minibatch) -> tuple[float, int, Outcome]:
        """Seconds and graphs compiled of the rank with most of them, and what came out."""
        micro_batches = self._pack(method.name, minibatch)
        graphs = _num_graphs()
        self._ranks.meet()
        start = time.perf_counter()
        method.run(micro_batches, minibatch.num_targets, self._num_own(method.name, minibatch))
        self._ranks.sync()
        seconds = time.perf_counter() - start
        slowest, compiled = self._ranks.largest([seconds, _num_graphs() - graphs])
        return slowest, int(compiled), method.outcome()

    def _pack(self, name: MethodName, minibatch: Minibatch) -> list[MicroBatch]:
        """This rank's micro-batches, on its device."""
        vocab_size = self._config.vocab_size
        tokens = draw_tokens(minibatch.seed, minibatch.index, minibatch.lengths, vocab_size, self._text)
        plan = minibatch.plans[name.strategy]
        groups = plan.micro_batches[self._ranks.rank]
        if name.strategy == "dynamic":
            groups = groups[:1] + plan.drawn  # these may go to any rank
        return [
            pack_samples([{"input_ids": tokens[i]} for i in group], sample_ids=group).to(self._ranks.device)
            for group in groups
            if group or name.collective  # an empty micro-batch only keeps collectives in step
        ]

    def _num_own(self, name: MethodName, minibatch: Minibatch) -> int | None:
        """How many micro-batches at the beginning this rank does not draw; None for all."""
        drawn = name.strategy == "dynamic"
        return len(minibatch.plans["dynamic"].micro_batches[self._ranks.rank][:1]) if drawn else None

    def _close(self, methods: list[Method]) -> None:
        for method in methods:
            method.close()
        methods.clear()

    # -- memory ----------------------------------------------------------------------------------------

    def measure_memory(self, tasks: Sequence[argparse.Namespace]) -> bool:
        """Take the peaks of all workloads; returns whether the methods computed the same."""
        right = True
        for number, task in enumerate(tasks):
            self._begin(task, len(tasks) - number)
            self._measure_memory()
            right &= self._finish()
        return right

    def _measure_memory(self) -> None:
        """Run every minibatch with one method after the other, and take the peaks."""
        self._record["memory"] = {}
        for name in self._names:
            self._ranks.say(f"making {name}")
            memory = PeakMemory(self._ranks)
            method = self._make(name)
            memory.reset_peak()
            for number, minibatch in enumerate(self._minibatches):
                self._run_all([method], minibatch, number, 0, round_=-1)
                self._ranks.say(f"{name}: {number + 1} of {len(self._minibatches)}")
            self._record["memory"][str(name)] = memory.read() | {"parameters": method.num_parameters}
            self._close([method])
            del method
            gc.collect()
            memory.release()

    # -- profile ---------------------------------------------------------------------------------------

    def _profile(self, methods: list[Method]) -> None:
        """Trace the first minibatch with each method."""
        minibatch = self._minibatches[0]
        layers = self._config.num_hidden_layers
        self._record["profile"] = {}
        for method in methods:
            micro_batches = self._pack(method.name, minibatch)
            self._ranks.say(f"profile of {method.name}")
            profile = Profile(self._ranks, self._options.profile, str(method.name))
            with profile:
                self._ranks.meet()  # rank 0's profiler has started
                profile.begin()
                own = self._num_own(method.name, minibatch)
                method.run(micro_batches, minibatch.num_targets, own)
                profile.host_done()
                self._ranks.sync()
            figures = profile.figures(layers=layers, micro_batches=len(micro_batches))
            method.outcome()
            self._record["profile"][str(method.name)] = figures


def _num_graphs() -> int:
    """Graphs that this process has compiled, also for other sizes of the same blocks."""
    return (
        torch._dynamo.utils.counters["stats"]["unique_graphs"] if "torch._dynamo.utils" in sys.modules else 0
    )
