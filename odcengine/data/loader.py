"""The loader: cuts a data set into minibatches and gives every rank its micro-batches of each.

Which samples form a minibatch (``order.py``) depends on seed, epoch and ``train_batch_size`` only, not on the
number of ranks, the strategy or the limits. Who computes which of them is the plan's matter
(``odcengine.balance``). Both are pure functions that every rank evaluates for itself; the loader communicates
nothing.

What samples there are and how micro-batches are made of them is in ``samples.py``. The next minibatch is
planned in a thread while the present one is computed, and another thread reads some micro-batches ahead
(``ahead.py``).

With an :class:`~odcengine.balance.OnlineCost` a minibatch is planned with what was measured in the steps up
to the last but one before it: the last one is still running then. That holds for every minibatch, also for
the first after a position was loaded, so it does not depend on when a thread got its turn, and all ranks plan
alike.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from odcengine.balance import Fit, OnlineCost
from odcengine.balance.online import Work
from odcengine.balance.plan import EQUAL_COUNT_STRATEGIES, STRATEGIES, Costs, make_plan
from odcengine.data.ahead import Ahead
from odcengine.data.dataset import TokenDataset
from odcengine.data.lengths import MapDataset
from odcengine.data.minibatch import LocalCounter, Minibatch
from odcengine.data.order import Order
from odcengine.data.prefetch import Reader
from odcengine.data.samples import TOO_LONG, Samples, hash_of_lengths
from odcengine.errors import ConfigError, UsageError

logger = logging.getLogger(__name__)

PREFETCH = 2
"""Micro-batches that are read ahead of the one in use, of data sets that are known to bear it."""

OnLoad = Callable[[float, float, "tuple[int, ...] | None"], None]
"""From when to when, in seconds of ``time.perf_counter()``, a micro-batch was read or waited for; data set
indices of its samples, none for a stand-in; None for the planning of a minibatch."""


class MinibatchLoader:
    """Iterates over the minibatches of an epoch, the same number on every rank.

    ``for minibatch in loader`` runs from the present position to the end of the epoch and then stands at
    the start of the next one. A loop that was left early goes on behind the last minibatch it got, so that
    no sample is used twice; :meth:`set_epoch` starts another epoch.

    The samples are dictionaries with ``input_ids`` and ``labels`` or ``loss_mask``, or with ``sequences``
    of these that stay together, which are packed (see :func:`~odcengine.data.pack_samples`), or anything
    else: then ``collate_fn`` makes the micro-batch (torch's ``default_collate`` if None).

    The length of a sample is, in this order: ``length_fn(sample)``; the data set's attribute ``lengths``;
    the number of its ``input_ids``; 1. The first and the third read the whole data set once. The number of
    targets of a sample is the data set's attribute ``num_targets``, or is counted where the ``input_ids``
    are; it lets every rank know the global count of a minibatch beforehand.

    Attributes: ``lengths`` (int64, of each sample, after truncation), ``num_targets`` (int64, positions with
    a target of each sample, or None where unknown), ``packs`` (whether samples are packed
    here, into :class:`~odcengine.data.MicroBatch`), ``epoch`` and ``index`` (the minibatch that iterating
    gives next), ``asked_at`` (``time.perf_counter()`` when iterating was last asked for one), ``on_load``
    (called, if set, with start and end of every planning and reading), ``knows_lengths`` (whether ``lengths``
    are tokens, not just 1 each), and the arguments under their names.

    Args:
        dataset: map-style data set (``len`` and indexing).
        train_batch_size: samples in a minibatch, over all ranks.
        rank: this rank.
        world_size: number of ranks.
        strategy: ``local_sort``, ``lb_micro``, ``lb_mini`` or ``dynamic`` (``odcengine.balance``).
        max_tokens: limit of tokens in a micro-batch (of the sum of lengths); None for no limit.
        max_samples: limit of samples in a micro-batch; None for no limit.
        seed: of the order of samples.
        shuffle: a new order every epoch; else the data set's order.
        drop_last: leave out an epoch's last minibatch if it is short; else it counts fully.
        cost: costs of sequences from their lengths; :meth:`odcengine.balance.CostModel.default` if None. An
            :class:`~odcengine.balance.OnlineCost` learns costs and speeds from what :meth:`measured` is told.
        max_length: limit of tokens in a sample; ``max_tokens`` if None, and never more than that.
        too_long: what to do with samples longer than the limit: ``error``, ``truncate`` (only samples
            that the loader packs itself) or ``skip``.
        length_fn: length of a sample.
        collate_fn: makes a micro-batch from a list of samples.
        pad_to_multiple_of: length of packed rows (see :func:`~odcengine.data.pack_samples`).
        fields: of the samples that packed micro-batches take along (see there).
        run_empty: give a dummy for every empty micro-batch of a plan, so that all ranks run the same number
            of forwards; needed where communication is collective or in lock-step, waste elsewhere.
        draw: for ``dynamic``: called with the serial number of a minibatch and with how many bundles of it
            are drawn, gives the next number that no rank has drawn yet, from 0. Needed with several ranks.
        prefetch: micro-batches that a thread reads ahead of the one in use, also those of the next minibatch;
            0 to read in the caller's thread. None: 2 for a :class:`~odcengine.data.TokenDataset`, 0 for
            other data sets, whose code may not bear a thread (or draws random numbers that the model draws,
            too). With ``dynamic`` it is one, which the plan expects next.
        device: where micro-batches will go; what was read ahead for a GPU lies in pinned memory.
        timeout_s: limit of waiting for one micro-batch that is read ahead; None for no limit.
        vocab_size: tokens of the model, which those of packed samples have to be of; None where unknown.

    Raises:
        ConfigError: an argument out of range, an empty data set, a sample over the limit.
        UsageError: a data set that is not map-style, or lengths that do not fit it.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        train_batch_size: int,
        rank: int,
        world_size: int,
        strategy: str,
        max_tokens: int | None,
        max_samples: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        cost: Costs | OnlineCost | None = None,
        max_length: int | None = None,
        too_long: str = "error",
        length_fn: Callable[[Any], int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pad_to_multiple_of: int = 1,
        fields: Sequence[str] = (),
        run_empty: bool = True,
        draw: Callable[[int, int], int] | None = None,
        prefetch: int | None = None,
        device: torch.device | None = None,
        timeout_s: float | None = None,
        vocab_size: int | None = None,
    ) -> None:
        _check_arguments(
            dataset,
            strategy=strategy,
            too_long=too_long,
            at_least_one={
                "train_batch_size": train_batch_size,
                "world_size": world_size,
                "max_tokens": max_tokens,
                "max_length": max_length,
                "max_samples": max_samples,
                "pad_to_multiple_of": pad_to_multiple_of,
            },
        )
        if prefetch is not None and prefetch < 0:
            raise ConfigError(f"data: prefetch is {prefetch}, but must be at least 0")
        if not 0 <= rank < world_size:
            raise ConfigError(f"data: rank {rank} is not in 0 to {world_size - 1}")
        self.dataset = dataset
        self.train_batch_size = train_batch_size
        self.rank = rank
        self.world_size = world_size
        self.strategy = strategy
        self.max_tokens = max_tokens
        self.max_samples = max_samples
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.cost = cost
        self.collate_fn = collate_fn
        if draw is None and strategy == "dynamic" and world_size > 1:
            raise UsageError("balance.strategy dynamic: several ranks draw from one counter; give draw=...")
        self._draw = draw or LocalCounter()
        # Counts whatever is drawn from; the same on all ranks. The engine puts its own here.
        self.next_serial: Callable[[], int] = functools.partial(next, itertools.count(1))
        self.pad_to_multiple_of = pad_to_multiple_of
        self.fields = tuple(fields)
        self.run_empty = run_empty and strategy in EQUAL_COUNT_STRATEGIES
        self.vocab_size = vocab_size
        self._samples = Samples(
            dataset,
            max_length=max_length,
            max_tokens=max_tokens,
            too_long=too_long,
            length_fn=length_fn,
            collate_fn=collate_fn,
            pad_to_multiple_of=pad_to_multiple_of,
            fields=self.fields,
            vocab_size=vocab_size,
            warn=rank == 0,
        )
        self.packs = self._samples.packs
        self.knows_lengths = self._samples.knows_lengths
        self.lengths, self.num_targets = self._samples.lengths, self._samples.num_targets
        self.epoch = 0
        self.index = 0
        self.asked_at = -math.inf
        self.on_load: OnLoad | None = None
        self._current: Minibatch | None = None
        self._unmeasured: Minibatch | None = None  # handed out by iterating, and its step has not ended
        if prefetch is None:
            prefetch = PREFETCH if isinstance(dataset, TokenDataset) and collate_fn is None else 0
        self._ahead = Ahead(Reader(device, timeout_s), prefetch)
        self._order = Order(
            self._samples.usable,
            train_batch_size=train_batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
        )

    @property
    def is_dummy(self) -> bool:
        """Whether the micro-batch handed out last only stands for an empty one (:class:`Minibatch`)."""
        return self._current is not None and self._current.is_dummy

    @property
    def current(self) -> Minibatch | None:
        """The minibatch handed out last."""
        return self._current

    @property
    def in_step(self) -> Minibatch | None:
        """The minibatch that iterating gave last, where its step has not ended; that of the present step."""
        return self._unmeasured

    @property
    def at_epoch_end(self) -> bool:
        """Whether the minibatch handed out last is the last of its epoch."""
        return self.index >= len(self)

    @property
    def fingerprint(self) -> str:
        """Equal for data of the same lengths under the same limits."""
        return hash_of_lengths(self.lengths[self._samples.usable])

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence in the samples that are used, after truncation."""
        return self._samples.longest

    @property
    def sequences(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """Tokens of each sequence, each sample's first one and the end; None where samples are one each."""
        return self._samples.sequences

    @property
    def prefetch(self) -> int:
        """Micro-batches that are read ahead of the one in use; none after :meth:`close`."""
        return self._ahead.prefetch

    def __len__(self) -> int:
        """Minibatches of a whole epoch."""
        return len(self._order)

    def __iter__(self) -> Iterator[Minibatch]:
        while self.index < len(self):
            self.asked_at = time.perf_counter()
            # Counted when it is handed out: state is saved after the step that uses it.
            self.index += 1
            self._current = self._unmeasured = self._take(self.epoch, self.index - 1)
            if self.strategy == "dynamic":
                total = self._current.num_to_draw
                self._current.draw_from(functools.partial(self._draw, self.next_serial(), total))
            self._plan_next()
            if self.on_load is not None:
                self.on_load(self.asked_at, time.perf_counter(), None)
            yield self._current
        self.epoch += 1
        self.index = 0

    def _take(self, epoch: int, index: int) -> Minibatch:
        """The minibatch that was planned in the background, or one planned now."""
        planned = self._ahead.take((epoch, index))
        if planned is not None:
            return planned
        return self._make_minibatch(epoch, index, self._freeze_fit(skip_last=1))

    def _plan_next(self) -> None:
        """Plan in the background what iterating gives next, with what has been measured up to now."""
        following = (self.epoch, self.index) if self.index < len(self) else (self.epoch + 1, 0)
        fit = self._freeze_fit(skip_last=0)
        self._ahead.plan(following, functools.partial(self._make_minibatch, *following, fit))

    def _freeze_fit(self, skip_last: int) -> Callable[[], Fit] | None:
        return self.cost.freeze(skip_last=skip_last) if isinstance(self.cost, OnlineCost) else None

    def measured(self, busy_s: Sequence[float], num_samples: int | None, work: Work | None = None) -> None:
        """Tell how long the step took that ended just now, where ``cost`` learns from it.

        Every rank calls it after each step with the same numbers. A step over anything but all samples of the
        minibatch that iterating gave last teaches nothing.

        Args:
            busy_s: seconds of each rank at work, without waiting for others.
            num_samples: samples computed by all ranks together; None where unknown.
            work: of each rank its micro-batches, tokens and sum of squared lengths. By default what the plan
                says; a step whose work was drawn (``dynamic``) teaches nothing without it.
        """
        minibatch, self._unmeasured = self._unmeasured, None
        if not isinstance(self.cost, OnlineCost):
            return
        if minibatch is not None and num_samples == minibatch.num_samples_global:
            if work is not None:
                self.cost.update(work, busy_s)
            elif self.strategy != "dynamic":  # its plan does not say who did what
                self.cost.update(minibatch.plan, busy_s)
        line = self.cost.report() if self.rank == 0 else None
        if line is not None:
            logger.warning(line)

    def set_epoch(self, epoch: int) -> None:
        """Continue at the start of an epoch; at the present position if it is the present epoch.

        Args:
            epoch: number of the epoch, from 0.
        """
        if epoch < 0:
            raise UsageError(f"set_epoch: epoch is {epoch}, but must not be negative")
        self._go_to_next_epoch_at_end()
        if epoch != self.epoch:
            self.epoch = epoch
            self.index = 0

    def minibatch(self, index: int, epoch: int | None = None) -> Minibatch:
        """Any minibatch by its number, without moving the position; for replay.

        Its plan is the one that iterating gives, but for a ``cost`` that has learned something in between.

        Args:
            index: number within the epoch, 0 to ``len(loader) - 1``.
            epoch: the epoch; the present one if None.
        """
        if not 0 <= index < len(self):
            raise UsageError(f"minibatch {index} of an epoch of {len(self)}")
        epoch = self.epoch if epoch is None else epoch
        return self._make_minibatch(epoch, index, self._freeze_fit(skip_last=1))

    def _make_minibatch(self, epoch: int, index: int, make_fit: Callable[[], Fit] | None) -> Minibatch:
        fit = None if make_fit is None else make_fit()
        cost = fit.cost if fit is not None else self.cost
        samples = self._order.minibatch(epoch, index)
        plan = make_plan(
            self.lengths[samples].tolist(),
            num_ranks=self.world_size,
            strategy=self.strategy,
            max_tokens=self.max_tokens,
            max_samples=self.max_samples,
            cost=None if isinstance(cost, OnlineCost) else cost,
            speeds=None if fit is None else fit.speeds,
            squares=None if self._samples.squares is None else self._samples.squares[samples],
        )
        targets = None if self.num_targets is None else self.num_targets[samples]
        ids = tuple(samples.tolist())
        return Minibatch(
            plan=plan,
            rank=self.rank,
            sample_ids=ids,
            index=index,
            epoch=epoch,
            num_targets_global=None if targets is None else int(targets.sum()),
            num_samples_without_targets=None if targets is None else int((targets == 0).sum()),
            load=self._load_all,
            run_empty=self.run_empty,
        )

    def state_dict(self) -> dict[str, Any]:
        """The position, and what ``cost`` has learned; to be saved between a step and the next minibatch.

        A minibatch counts as used as soon as it was handed out. The position does not depend on the number of
        ranks, so another number may load it.
        """
        at_end = self.at_epoch_end
        state = {
            "epoch": self.epoch + at_end,
            "index": 0 if at_end else self.index,
            **self._identity(),
        }
        if isinstance(self.cost, OnlineCost):
            state["cost"] = self.cost.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position.

        Raises:
            UsageError: the position belongs to another data set, batch size, seed or order: samples would be
                repeated or lost. Names each difference.
        """
        wrong = [
            f"{name} was {state.get(name)!r}, is {value!r}"
            for name, value in self._identity().items()
            if state.get(name) != value
        ]
        epoch, index = state.get("epoch"), state.get("index")
        if not (isinstance(epoch, int) and epoch >= 0):
            wrong.append(f"epoch is {epoch!r}")
        if not (isinstance(index, int) and 0 <= index < len(self)):
            wrong.append(f"index is {index!r}, but an epoch has {len(self)} minibatches")
        if wrong:
            raise UsageError(
                f"the saved data position does not fit this loader: {'; '.join(wrong)}; go on with what was "
                "saved, or begin anew in another checkpoint.dir"
            )
        self.epoch, self.index = int(state["epoch"]), int(state["index"])
        self._unmeasured = None
        self._ahead.drop()
        if isinstance(self.cost, OnlineCost) and "cost" in state:
            self.cost.load_state_dict(state["cost"])

    def _identity(self) -> dict[str, Any]:
        """What has to be equal for a position to mean the same samples."""
        return {**self._order.identity(), "lengths_sha256": self._samples.contents}

    def _go_to_next_epoch_at_end(self) -> None:
        # A loop that was left after the last minibatch has not seen the end of the epoch.
        if self.at_epoch_end:
            self.epoch += 1
            self.index = 0

    def _load_all(self, minibatch: Minibatch) -> Generator[tuple[tuple[int, ...], Any], None, None]:
        """The micro-batches of a minibatch in turn, each behind the data set indices of its samples."""
        planned, current = minibatch.planned, minibatch is self._current
        with self._ahead.reading(minibatch, self._load, current=current) as read:
            for sample_ids in minibatch.drawn() if planned is None else planned:
                start = time.perf_counter()
                batch = read(sample_ids)
                self._current = minibatch
                if self.on_load is not None:
                    self.on_load(start, time.perf_counter(), sample_ids)
                yield sample_ids, batch

    def close(self, timeout_s: float = 10.0) -> None:
        """End the threads that plan and read ahead; what is asked for later is done by who asks.

        Args:
            timeout_s: so long a reading is waited for that has begun.
        """
        self._ahead.close(timeout_s)

    def _load(self, minibatch: Minibatch, sample_ids: tuple[int, ...]) -> Any:
        """The micro-batch of some samples of a minibatch; a dummy for none."""
        try:
            return self._samples.micro_batch(sample_ids, stand_in=minibatch.sample_ids[:1])
        except UsageError as error:
            raise UsageError(f"{error} (in a micro-batch of rank {self.rank})") from error


def _check_arguments(
    dataset: MapDataset, *, strategy: str, too_long: str, at_least_one: dict[str, int | None]
) -> None:
    if isinstance(dataset, (str, os.PathLike)):
        raise UsageError(
            f"the data set is the path {os.fspath(dataset)}; give TokenDataset.open(...) of it, or name it "
            "in the configuration: data: {path: ...}"
        )
    if not (hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)):
        raise UsageError(
            f"the data set is a {type(dataset).__name__}; the loader needs a map-style data set, with "
            "__len__ and __getitem__, as the order and the plans need every length beforehand"
        )
    problems = [
        f"data: {name} is {value}, but must be at least 1"
        for name, value in at_least_one.items()
        if value is not None and value < 1
    ]
    if strategy not in STRATEGIES:
        problems.append(f"balance: strategy {strategy!r} is unknown; choose one of {', '.join(STRATEGIES)}")
    if too_long not in TOO_LONG:
        problems.append(f"data: too_long is {too_long!r}; choose one of {', '.join(TOO_LONG)}")
    if len(dataset) == 0:
        problems.append("data: the data set has no samples")
    if problems:
        raise ConfigError(*problems)
