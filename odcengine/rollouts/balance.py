"""From the samples that ranks have to the micro-batches that they run: lengths, plan, exchange, packing."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from odcengine.balance import CostModel, OnlineCost, Plan, make_plan
from odcengine.balance.online import Work
from odcengine.config import Config
from odcengine.data import MicroBatch, Minibatch, pack_samples
from odcengine.data.lengths import naming
from odcengine.errors import ConfigError, UsageError
from odcengine.rollouts.exchange import Stock, move, take_stock
from odcengine.rollouts.samples import Sample, TensorSample, nested
from odcengine.rollouts.store import SampleStore
from odcengine.start import Job

Collate = Callable[[list[Any]], Any]
OnPacked = Callable[[float, float, int, Sequence[int]], None]
"""From when to when, in seconds of ``time.perf_counter()``, how many samples were packed, and the lengths of
their sequences."""


class Balanced(Minibatch):
    """This rank's share of the samples that ``engine.balance`` was given; iterate over its micro-batches.

    Positions of samples go through the ranks in order: rank 0's first, in the order in which it gave them.

    Attributes:
        samples: the samples of this rank by position; those that others may draw, too, with ``dynamic``.
    """

    samples: Callable[[int], TensorSample]


class Balancer:
    """Plans, exchanges and packs the samples of minibatches that a script makes itself.

    Args:
        job: the ranks.
        config: the configuration.
        costs: of sequences; one that learns is told of steps by :meth:`measured`.
        on_packed: called when a micro-batch is handed out.
        collate_fn: makes micro-batches of samples; None: they are packed.
    """

    def __init__(
        self,
        job: Job,
        config: Config,
        costs: CostModel | OnlineCost,
        on_packed: OnPacked,
        collate_fn: Collate | None,
    ) -> None:
        self.collate_fn = collate_fn
        self._control = job.control
        self._group = job.host_group
        self._topology = job.topology
        self._strategy = config.balance.strategy
        self._max_tokens = config.balance.max_tokens_per_micro_batch
        self._max_samples = config.train_micro_batch_size_per_gpu
        self._run_empty = config.odc.lockstep or config.odc.transport == "collective"
        self._costs = costs
        self._on_packed = on_packed
        self._store = SampleStore(job.control, job.host_group, config.balance.sample_store_mib * 2**20)

    @property
    def draws(self) -> bool:
        """Whether ranks draw their micro-batches."""
        return self._strategy == "dynamic"

    def take_stock(
        self, samples: Sequence[Sample], lengths: Sequence[int] | None, plan: Plan | None = None
    ) -> tuple[list[TensorSample], Stock]:
        """What all ranks have; see :func:`~odcengine.rollouts.exchange.take_stock`. Collective."""
        return take_stock(samples, lengths, self._control, self._group, plan=plan)

    def plan(self, stock: Stock) -> Plan:
        """The plan over the samples of all ranks; the same on every rank."""
        costs, speeds = self._costs, None
        if isinstance(costs, OnlineCost):
            fit = costs.fit()  # no step is running: all that were measured count
            costs, speeds = fit.cost, fit.speeds
        if stock.lengths and max(stock.lengths) > self._max_tokens:
            position = next(at for at, length in enumerate(stock.lengths) if length > self._max_tokens)
            raise ConfigError(
                f"sample {position} has {stock.lengths[position]} tokens, but a micro-batch holds at most "
                f"{self._max_tokens} ({stock.origin(position)}); raise balance.max_tokens_per_micro_batch to "
                f"{max(stock.lengths)} or more, or leave out or truncate what is longer"
            )
        return make_plan(
            stock.lengths,
            num_ranks=self._topology.world_size,
            strategy=self._strategy,
            max_tokens=self._max_tokens,
            max_samples=self._max_samples,
            cost=costs,
            speeds=speeds,
            squares=stock.squares,
        )

    def exchange(
        self, samples: Sequence[TensorSample], stock: Stock, plan: Plan, *, stand_ins: bool = False
    ) -> dict[int, TensorSample]:
        """Move samples to the ranks that a plan has them on. Collective.

        Args:
            samples: this rank's.
            stock: what all ranks have.
            plan: equal on all ranks.
            stand_ins: ranks that get none get the first sample of all, to stand for empty micro-batches.
        """
        wanted = [[position for group in groups for position in group] for groups in plan.micro_batches]
        if stand_ins and stock.lengths:
            wanted = [positions or [0] for positions in wanted]
        return move(samples, stock, wanted, self._control, self._group)

    def minibatch(
        self,
        samples: Sequence[TensorSample],
        stock: Stock,
        fields: Sequence[str] | None,
        collate_fn: Collate | None,
        serial: int,
        draw: Callable[[int, int], int],
        *,
        all_of: Sequence[str] = (),
    ) -> Balanced:
        """This rank's share of a minibatch. Collective.

        Args:
            samples: this rank's.
            stock: what all ranks have.
            fields: what micro-batches take along beside tokens and labels; None: what fits.
            collate_fn: makes micro-batches of samples; None: they are packed.
            serial: number for drawing.
            draw: see :class:`~odcengine.data.MinibatchLoader`.
            all_of: what samples have under these names is packed even if it does not fit, and so refused.
        """
        plan = self.plan(stock)
        if self.draws:
            number = self._store.fill(samples, stock)
            found: Callable[[int], TensorSample] = functools.partial(self._store.read, number)
        else:
            stand_ins = self._run_empty and collate_fn is not None
            moved = self.exchange(samples, stock, plan, stand_ins=stand_ins)
            found = moved.__getitem__
        names = stock.packable if fields is None else tuple(fields)
        if fields is None:
            names += tuple(name for name in all_of if name in stock.leaves and name not in names)

        def load(minibatch: Minibatch) -> Generator[tuple[tuple[int, ...], Any], None, None]:
            planned = minibatch.planned
            for positions in minibatch.drawn() if planned is None else planned:
                start = time.perf_counter()
                batch = make(positions)
                lengths = [length for position in positions for length in stock.sequences[position]]
                self._on_packed(start, time.perf_counter(), len(positions), lengths)
                yield positions, batch

        def make(positions: tuple[int, ...]) -> Any:
            if collate_fn is None:
                return pack(positions)
            chosen = positions or (min(moved),)
            with naming(f"samples {list(positions)} cannot be put together"):
                return collate_fn([nested(found(position)) for position in chosen])

        def pack(positions: Sequence[int]) -> MicroBatch:
            try:
                return pack_samples(
                    [nested(found(position)) for position in positions], sample_ids=positions, fields=names
                )
            except UsageError as error:
                if len(positions) == 1:
                    raise UsageError(f"{error} ({stock.origin(positions[0])})") from error
                for position in positions:
                    pack([position])  # the one that is wrong by itself says whose it is
                raise

        targets = stock.num_targets
        minibatch = Balanced(
            plan=plan,
            rank=self._topology.rank,
            sample_ids=tuple(range(len(stock.lengths))),
            index=serial,
            epoch=0,
            num_targets_global=None if targets is None else sum(targets),
            num_samples_without_targets=None if targets is None else targets.count(0),
            load=load,
            run_empty=self._run_empty,
        )
        minibatch.samples = found
        if self.draws:
            minibatch.draw_from(functools.partial(draw, serial, minibatch.num_to_draw))
        return minibatch

    def measured(
        self, minibatch: Minibatch, busy_s: Sequence[float], num_samples: int | None, work: Work | None
    ) -> str | None:
        """Learn from a step over a minibatch, where it was over all of its samples.

        Args:
            minibatch: from :meth:`minibatch`.
            busy_s: seconds of each rank at work.
            num_samples: samples computed by all ranks together.
            work: of each rank its micro-batches, tokens and sum of squared lengths; None where unknown.

        Returns:
            A line for the log where ranks have turned out to be slow.
        """
        costs = self._costs
        if not isinstance(costs, OnlineCost):
            return None
        if work is not None and num_samples == minibatch.num_samples_global:
            costs.update(work, busy_s)
        return costs.report()

    def close(self) -> None:
        """Let go of shared memory."""
        self._store.close()
