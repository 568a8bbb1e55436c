"""A rank of the demo: one model trained by three methods side by side, in turns on the same samples.

Started by ``run.py`` through odc-launch. Each method has an engine and a copy of the model of its own, all in
this process; and this twice, for minibatches cut into packed micro-batches and into micro-batches of one
sequence. They take turns at every minibatch, so that whatever slows the machine down for a while hits all
alike. What each step measured goes to ``steps.jsonl``, a line a step; ``report.py`` makes the tables of it.
The timelines are recorded afterwards, by engines of their own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import (
    COLLECTIVE,
    LOCK_STEP,
    ON_DEMAND,
    PACKED,
    SINGLE,
    TIMELINES,
    Prediction,
    describe,
    plan_costs,
)
from transformers import LlamaConfig, LlamaForCausalLM

import odcengine
from odcengine.data import MinibatchLoader, TokenDataset

HEAD_SIZE = 64
TOUCHED_BYTES = 1 << 30

METHODS: dict[str, dict[str, Any]] = {
    COLLECTIVE: {"odc": {"transport": "collective"}, "balance": {"strategy": "lb_micro"}},
    LOCK_STEP: {"odc": {"transport": "shm", "lockstep": True}, "balance": {"strategy": "lb_micro"}},
    ON_DEMAND: {"odc": {"transport": "shm"}, "balance": {"strategy": "lb_mini"}},
}


# An upper limit of sequences in a micro-batch.
MAX_SEQUENCES: dict[str, dict[str, Any]] = {PACKED: {}, SINGLE: {"train_micro_batch_size_per_gpu": 1}}


@dataclass(frozen=True)
class Contestant:
    """A method with an engine of its own, on minibatches cut in one way."""

    cut: str
    method: str
    engine: odcengine.OdcEngine
    loader: MinibatchLoader
    minibatches: Iterator[Any]


def make_config(
    arguments: argparse.Namespace, cut: str, method: str, timeline_dir: Path | None = None
) -> dict[str, Any]:
    """The configuration of a contestant; methods differ in transport and balance only."""
    monitor = {} if timeline_dir is None else {"timeline_every": 2, "timeline_dir": str(timeline_dir)}
    return {
        "train_batch_size": arguments.sequences * int(os.environ["WORLD_SIZE"]),
        **MAX_SEQUENCES[cut],
        "gradient_clipping": 1.0,
        "steps_per_print": 0,
        "monitor": monitor,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "odc": {"timeout_s": 120, **METHODS[method]["odc"]},
        "balance": {
            "max_tokens_per_micro_batch": arguments.max_tokens,
            "learn_costs": False,  # the plans' predictions are stated before anything is measured
            **METHODS[method]["balance"],
        },
    }


def make_model(arguments: argparse.Namespace) -> LlamaForCausalLM:
    """A small Llama with random weights, the same for every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=arguments.vocab_size,
            hidden_size=arguments.hidden,
            intermediate_size=arguments.hidden * 43 // 16,
            num_hidden_layers=arguments.layers,
            num_attention_heads=arguments.hidden // HEAD_SIZE,
            max_position_embeddings=arguments.max_tokens,
            tie_word_embeddings=True,
        )
    )


def make_contestant(
    arguments: argparse.Namespace,
    dataset: TokenDataset,
    cut: str,
    method: str,
    timeline_dir: Path | None = None,
) -> Contestant:
    """A contestant at the start of its training; with a folder, its second minibatch is recorded."""
    engine, _, loader, _ = odcengine.initialize(
        model=make_model(arguments),
        config=make_config(arguments, cut, method, timeline_dir),
        training_data=dataset,
    )
    assert loader is not None  # there is training data
    return Contestant(cut, method, engine, loader, iter(loader))


def open_dataset(arguments: argparse.Namespace, world_size: int) -> TokenDataset:
    """The data, if there is enough of it."""
    dataset = TokenDataset.open(arguments.out / "tokens")
    batch, num_steps = arguments.sequences * world_size, arguments.minibatches + 1
    if len(dataset) < batch * num_steps:
        sys.exit(
            f"{arguments.out} has only {len(dataset)} samples; {num_steps} minibatches of {batch} "
            f"need {batch * num_steps}"
        )
    return dataset


def pin_to_core() -> str:
    """Keep this rank on a core of its own, if there are enough for all ranks; says what was done."""
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks:
        return f"{ranks} ranks share {len(cores)} cores: the speeds below say little"
    os.sched_setaffinity(0, {cores[rank]})
    return f"{ranks} ranks, each with one thread on a core of its own"


def touch_heap() -> None:
    """Have the system hand out memory before anything is timed; ``run.py`` makes malloc keep it."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    torch.empty(min(TOUCHED_BYTES, available // 8), dtype=torch.uint8).fill_(1)


def order_of(step: int, contestants: Sequence[Contestant]) -> list[Contestant]:
    """All contestants in the order of this minibatch: those of a cut side by side, in changing order."""
    names = list(METHODS)
    block, first = divmod(step - 1, len(names))
    if block % 2:
        names[1:] = names[:0:-1]  # so that nobody always follows the same one
    names = names[first:] + names[:first]
    cuts = list(MAX_SEQUENCES)
    return sorted(contestants, key=lambda one: (cuts.index(one.cut), names.index(one.method)))


def run_minibatch(contestant: Contestant, seed: int) -> dict[str, Any]:
    """One optimizer step of one method, timed from a common start; returns its line, equal on all ranks."""
    engine, loader = contestant.engine, contestant.loader
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.thread_time()
    minibatch = next(contestant.minibatches)
    for micro_batch in minibatch:
        engine.backward(engine(micro_batch))
    metrics = engine.step()
    mine = {
        "wall_s": time.perf_counter() - start,
        "cpu_s": time.thread_time() - cpu_start,
        "boundary_s": metrics.boundary_s,
        "gather_s": metrics.gather_s,
        "push_s": metrics.push_s,
        "load_s": metrics.load_s,
    }
    ranks: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, mine)
    times = {name: [times[name] for times in ranks] for name in mine}
    tokens = int(loader.lengths[list(minibatch.sample_ids)].sum())
    return {
        "step": metrics.step,
        "seed": seed,
        "warm_up": metrics.step == 0,
        "cut": contestant.cut,
        "method": contestant.method,
        "loss": metrics.loss,
        "tokens": tokens,
        "tokens_per_s": tokens / max(times["wall_s"]),
        "idle_shares": metrics.idle_shares,
        "busy_s": metrics.busy_s,
        "wait_s": metrics.wait_s,
        **times,
        "num_micro_batches": metrics.num_micro_batches,
        "plan": plan_costs(minibatch.plan),
        "samples": minibatch.sample_ids,
    }


def out_of_time(begun: float, num_done: int, budget_s: float) -> bool:
    """Whether one more minibatch would take longer than allowed; rank 0 decides for all."""
    elapsed = time.perf_counter() - begun
    decision = torch.tensor(elapsed * (num_done + 1) / num_done > budget_s)
    dist.broadcast(decision, src=0)
    return bool(decision)


def predict(contestants: Sequence[Contestant], arguments: argparse.Namespace) -> None:
    """Print what the plans of all minibatches to be measured say."""
    for cut in MAX_SEQUENCES:
        plans = {
            one.method: [
                plan_costs(one.loader.minibatch(number + (seed == 0), seed).plan)
                for seed in range(arguments.seeds)
                for number in range(arguments.minibatches)
            ]
            for one in contestants
            if one.cut == cut
        }
        print(
            f"{cut}: on demand / lock-step: {Prediction.of(plans[LOCK_STEP], plans[ON_DEMAND])}", flush=True
        )


def record_timelines(arguments: argparse.Namespace, dataset: TokenDataset) -> None:
    """Record what the ranks do in one warm minibatch of one sequence a micro-batch, with each method.

    By engines of their own and after all that is measured, so that recording disturbs nothing.
    """
    contestants = [
        make_contestant(arguments, dataset, SINGLE, method, arguments.out / TIMELINES[method])
        for method in TIMELINES
    ]
    for _ in range(2):
        for contestant in contestants:
            run_minibatch(contestant, seed=0)
    for contestant in contestants:
        contestant.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="A rank of the demo; examples/demo/run.py starts it.")
    parser.add_argument("--out", type=Path, required=True, help="folder with the data, and for steps.jsonl")
    for name in ("--vocab-size", "--minibatches", "--seeds", "--sequences", "--max-tokens", "--layers"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--budget-s", type=float, required=True)
    arguments = parser.parse_args()
    placement = pin_to_core()
    world_size, leads = int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"

    dataset = open_dataset(arguments, world_size)
    contestants = [
        make_contestant(arguments, dataset, cut, method)
        for cut, method in itertools.product(MAX_SEQUENCES, METHODS)
    ]
    if leads:
        parameters = sum(parameter.numel() for parameter in contestants[0].engine.parameters())
        print(f"model: Llama shape, {parameters / 1e6:.1f}M parameters, fp32; {placement}", flush=True)
        predict(contestants, arguments)
    touch_heap()

    begun = time.perf_counter()
    with open(arguments.out / "steps.jsonl" if leads else os.devnull, "w", encoding="utf-8") as file:
        for step in range(1 + arguments.seeds * arguments.minibatches):  # the first is the warm-up
            if step > 1 and out_of_time(begun, step, arguments.budget_s * arguments.seeds):
                break
            seed, number = divmod(max(step - 1, 0), arguments.minibatches)
            for contestant in order_of(step, contestants):
                if seed and not number:
                    contestant.loader.set_epoch(seed)  # a seed of its own for the order of the samples
                line = run_minibatch(contestant, seed)
                file.write(json.dumps(line) + "\n")
                file.flush()
                if leads:
                    print(describe(line), flush=True)
    for contestant in contestants:
        contestant.engine.close()
    record_timelines(arguments, dataset)


if __name__ == "__main__":
    main()
