"""Evaluation on held-out data between two optimizer steps, and numbers of the script for the monitor."""

from __future__ import annotations

import abc
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from odcengine._collectives import gather_texts
from odcengine._summed_loss import LossFn, SummedLoss
from odcengine.control import ControlBlock, Meeting, Phase
from odcengine.data import MicroBatch, MinibatchLoader
from odcengine.device import Device
from odcengine.errors import UsageError
from odcengine.losses import LossSum
from odcengine.monitor import Monitor
from odcengine.sharding.base import Sharding
from odcengine.topology import Topology

MakeLoader = Callable[[Any], MinibatchLoader]
"""Makes of a data set a loader whose only minibatch has all samples, in their order."""
_MEAN, _UNIT = "mean ", "unit "
"""Before the names of metrics in sums: of those that become means, and of the one that they are over."""


@dataclass(frozen=True)
class Evaluation:
    """The loss of held-out data; equal on all ranks but for ``seconds``.

    Attributes:
        name: of the data, ``eval`` if nobody said otherwise.
        step: optimizer steps done before; the step of this number begins with the same weights.
        loss: sum of the losses over all samples divided by ``count``; nan if there was nothing to count.
        perplexity: ``exp`` of the mean loss of a token; None with a loss that is not the engine's own.
        count: what the loss is divided by: as in training, tokens with a target, or samples; with a loss of
            its own what that one counts, pairs for example.
        num_samples: samples of all ranks.
        num_tokens: tokens of all ranks, padding not counted; None with a ``collate_fn``.
        seconds: how long it took on this rank, waiting for others included.
        means: what a loss tells beside itself (the ``metrics`` of a :class:`~odcengine.losses.LossSum`), sums
            over all samples divided by their number of its ``unit``, or by ``count`` where it names none.
        unit: that unit, ``tokens`` or ``pairs``; None where the loss names none.
        num_units: how many of it there were in all samples; None without a unit.
    """

    name: str
    step: int
    loss: float
    perplexity: float | None
    count: float
    num_samples: int
    num_tokens: int | None
    seconds: float
    means: dict[str, float] = field(default_factory=dict)
    unit: str | None = None
    num_units: int | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """As the monitor writes it."""
        found = {"loss": self.loss, "perplexity": self.perplexity, **self.means}
        found |= {"count": self.count, "num_samples": self.num_samples, "seconds": self.seconds}
        if self.unit is not None:
            found[self.unit] = self.num_units
        return {f"{self.name}/{key}": value for key, value in found.items()}

    def __str__(self) -> str:
        parts = [f"loss {self.loss:.4f}"]
        if self.perplexity is not None:
            parts.append(f"perplexity {self.perplexity:.4g}")
        parts += [f"{name} {value:.4g}" for name, value in self.means.items()]
        over = f"{self.num_samples} samples"
        if self.unit is not None:  # of samples that are a pair each, the pairs say it all
            units = f"{self.num_units} {self.unit}"
            over = units if self.num_units == self.num_samples else f"{over}, {units}"
        parts.append(f"{over} in {self.seconds:.1f} s")
        return f"{self.name} after {self.step} steps: {', '.join(parts)}"


class EvaluationCalls(abc.ABC):
    """What ``OdcEngine`` inherits."""

    module: nn.Module
    topology: Topology
    global_steps: int
    evaluation: Evaluation | None
    _control: ControlBlock
    _device: Device
    _held_out: MinibatchLoader | None
    _host_group: dist.ProcessGroup
    _make_held_out: MakeLoader
    _monitor: Monitor
    _sharding: Sharding
    _summed_loss: SummedLoss

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward."""

    @abc.abstractmethod
    def _require_between(self, call: str) -> None:
        """Raise UsageError in the middle of a minibatch, or when the engine is closed."""

    @abc.abstractmethod
    def _begin_anew(self) -> None:
        """Count the minibatch's time from its next forward on, if it has had no backward yet."""

    @abc.abstractmethod
    def _prepare_packing(self, longest: int | None) -> None:
        """Make attention stop between the samples of a row, of which the longest has so many tokens."""

    def hold_out(self, data: Any) -> None:
        """Take ``data`` for what :meth:`evaluate` evaluates when it is given none; ``initialize`` calls it.

        Raises:
            ConfigError: the data does not fit the model or the limits.
        """
        if self._held_out is not None:
            self._held_out.close()
        self._held_out = self._make_held_out(data)

    def evaluate(
        self, data: Any | None = None, *, loss_fn: LossFn | None = None, name: str = "eval"
    ) -> Evaluation:
        """The loss of held-out data with the present weights. Collective, between two minibatches.

        All samples are shared out over the ranks once, by their cost and under the configuration's limits;
        there may be fewer of them than ranks. The model is in evaluation mode, without gradients. Ranks pull
        parameters when they need them and meet once, at the end. Rank 0's monitor shows and writes the
        result.

        Args:
            data: the data set, the same on all ranks (not a part for each); None for the one that
                ``initialize`` was given as ``eval_data``, or that ``data.eval_path`` names.
            loss_fn: in the place of the engine's own, as in :meth:`__call__`; its loss is a
                :class:`~odcengine.losses.LossSum`, or a sum over what the configuration normalises by.
            name: under which the result is written.

        Returns:
            The loss over all samples, as :attr:`evaluation` too.

        Raises:
            UsageError: there is no data, ranks have different data, or the loss is none.
            ConfigError: the data does not fit the model or the limits.
            PeerError: another rank failed, died or gave no sign of life.
        """
        self._require_between("evaluate")
        start = time.perf_counter()
        loader = self._held_out if data is None else self._make_held_out(data)
        if loader is None:
            raise UsageError(
                "evaluate: there is no held-out data; give evaluate(data), initialize(eval_data=...), or "
                "data.eval_path in the configuration"
            )
        modes = [(module, module.training) for module in self.module.modules()]  # parts may differ
        try:
            with self._control.phase(Phase.EVALUATING):
                if loader.packs:
                    self._prepare_packing(loader.longest)
                self.module.eval()
                with torch.no_grad():
                    sums = self._sums_of(loader, loss_fn)
                self._sharding.reshard()
                total = self._add_up(loader, sums)
        finally:
            for module, training in modes:
                module.training = training
            if data is not None:
                loader.close()
        self._begin_anew()
        self.evaluation = _evaluation(name, self.global_steps, total, time.perf_counter() - start)
        self._monitor.note(self.evaluation.step, self.evaluation.facts, str(self.evaluation))
        return self.evaluation

    def report(self, values: Mapping[str, torch.Tensor | float]) -> None:
        """Have rank 0's monitor write numbers of the script beside those of the step that ended last.

        Not collective: other ranks may call it, too, and nothing happens. :meth:`sum_over_ranks` adds up what
        each rank has.

        Args:
            values: scalars by the names of their curves, which have a group: ``dpo/accuracy``.

        Raises:
            UsageError: a name without a group.
        """
        wrong = [name for name in values if not all(name.partition("/")[::2])]
        if wrong:
            raise UsageError(f"report: {wrong[0]!r} has no group; name it like train/{wrong[0].strip('/')}")
        if self.topology.rank == 0:
            numbers = {name: float(value) for name, value in values.items()}
            self._monitor.note(max(0, self.global_steps - 1), numbers)

    def _sums_of(self, loader: MinibatchLoader, loss_fn: LossFn | None) -> dict[str, float]:
        """This rank's sums over its share of the samples."""
        keywords = {} if loss_fn is None else {"loss_fn": loss_fn}
        counts = {"count": 0.0, "targets": 0.0, "tokens": 0.0, "samples": 0.0}
        zero = torch.zeros((), dtype=torch.float64, device=self._device.torch_device)
        sums: dict[str, torch.Tensor] = {"loss": zero}
        minibatch = loader.minibatch(0)
        for micro_batch in minibatch:
            if not self._summed_loss.is_known((micro_batch,), keywords):
                raise UsageError("evaluate: samples that a collate_fn puts together need a loss_fn")
            loss = self(micro_batch, **keywords)
            if minibatch.is_dummy:  # it has kept collectives in step
                continue
            is_packed = isinstance(micro_batch, MicroBatch)
            counts["samples"] += len(minibatch.handed_out)
            counts["targets"] += micro_batch.num_targets if is_packed and not keywords else math.nan
            counts["tokens"] += micro_batch.num_tokens if is_packed else math.nan
            count = self._summed_loss.count_of(loss, micro_batch)
            loss_sum = loss.loss_sum if isinstance(loss, LossSum) else loss
            if count is None or not isinstance(loss_sum, torch.Tensor) or loss_sum.numel() != 1:
                raise UsageError(
                    "evaluate: the loss_fn must return a LossSum(loss_sum, count), which says its count, or "
                    "for packed samples the sum of their losses"
                )
            counts["count"] += count
            of_loss = _named_metrics(loss) if isinstance(loss, LossSum) else {}
            for key, value in {"loss": loss_sum, **of_loss}.items():
                scalar = torch.as_tensor(value).detach().reshape(()).to(zero)
                sums[key] = sums.get(key, zero) + scalar
        if not self._summed_loss.is_own or keywords:
            counts["targets"] = math.nan
        fetched = self._device.start_fetch(torch.stack(list(sums.values())))(self._control)
        return {**counts, **dict(zip(sums, fetched, strict=True))}

    def _add_up(self, loader: MinibatchLoader, sums: dict[str, float]) -> dict[str, float]:
        """The sums of all ranks, in the order of ranks; checks that they are over the same data."""
        self._control.barrier(Meeting.EVALUATE, self.global_steps)
        text = json.dumps({"data": loader.fingerprint, "sums": sums})
        told = [text]
        if self.topology.world_size > 1:
            told = gather_texts(text, self._control, self._host_group, "the sums of the evaluation")
        ranks = [json.loads(line) for line in told]
        odd = next((rank for rank, theirs in enumerate(ranks) if theirs["data"] != ranks[0]["data"]), None)
        if odd is not None:
            raise UsageError(
                f"evaluate: rank {odd} was given other data than rank 0 (numbers or lengths of samples "
                "differ); give all ranks the whole data set, which is shared out here"
            )
        total: dict[str, float] = {}
        for theirs in ranks:
            for key, value in theirs["sums"].items():
                total[key] = total.get(key, 0.0) + value
        return total


def _named_metrics(loss: LossSum) -> dict[str, torch.Tensor]:
    """The metrics of a loss, named by what becomes of them."""
    if loss.unit is not None and loss.unit not in loss.metrics:
        raise UsageError(
            f"evaluate: the unit of the LossSum is {loss.unit!r}, but its metrics are "
            f"{', '.join(loss.metrics) or 'empty'}; the unit is one of them, or None"
        )
    return {(_UNIT if name == loss.unit else _MEAN) + name: value for name, value in loss.metrics.items()}


def _evaluation(name: str, step: int, total: Mapping[str, float], seconds: float) -> Evaluation:
    count, targets = total["count"], total["targets"]
    unit = next((key for key in total if key.startswith(_UNIT)), None)
    over = count if unit is None else total[unit]
    perplexity = None
    if targets and not math.isnan(targets):
        mean = total["loss"] / targets
        perplexity = math.exp(mean) if mean < 700 else math.inf  # of what a float holds
    return Evaluation(
        name=name,
        step=step,
        loss=total["loss"] / count if count else math.nan,
        perplexity=perplexity,
        count=count,
        num_samples=round(total["samples"]),
        num_tokens=None if math.isnan(total["tokens"]) else round(total["tokens"]),
        seconds=seconds,
        means={
            key.removeprefix(_MEAN): value / over if over else math.nan
            for key, value in total.items()
            if key.startswith(_MEAN)
        },
        unit=None if unit is None else unit.removeprefix(_UNIT),
        num_units=None if unit is None else round(over),
    )
