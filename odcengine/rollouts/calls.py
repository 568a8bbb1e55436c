"""The engine's calls for samples that are made while training runs."""

from __future__ import annotations

import abc
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from odcengine.balance import Plan
from odcengine.config import Config
from odcengine.control import ControlBlock, Meeting, Phase
from odcengine.data import MicroBatch
from odcengine.data.finite import check_sample_is_finite
from odcengine.data.lengths import is_token_sample
from odcengine.data.vocabulary import check_sample
from odcengine.device import Device
from odcengine.errors import UsageError
from odcengine.models import WithoutAdapters, check_lengths, find_vocabulary, is_transformers_model
from odcengine.rollouts.balance import Balanced, Balancer, Collate
from odcengine.rollouts.generating import generating
from odcengine.rollouts.reference import copy_weights, prepare_for_packing
from odcengine.rollouts.samples import Sample, TensorSample, nested
from odcengine.sharding.base import Changed, Sharding
from odcengine.start import Job
from odcengine.transport.base import Transport

logger = logging.getLogger(__name__)

Annotations = Mapping[str, torch.Tensor]
"""Values by name: ``[1, T]`` of a micro-batch's positions, or ``[num_sequences]``."""
_OF_LOSSES = ("advantages", "old_logprobs", "ref_logprobs")
"""What ``odcengine.losses`` reads. Nobody would miss old log-probabilities that have another length."""


class RolloutCalls(abc.ABC):
    """What ``OdcEngine`` inherits. All calls but :meth:`generating` are collective, between two backwards."""

    module: nn.Module
    reference: nn.Module | None
    transport: Transport | None
    config: Config
    global_steps: int
    _balancer: Balancer
    _balanced: Balanced | None
    _control: ControlBlock
    _device: Device
    _job: Job
    _sharding: Sharding
    _unprepared: list[nn.Module]

    @abc.abstractmethod
    def _require_between(self, call: str) -> None:
        """Raise UsageError in the middle of a minibatch, or when the engine is closed."""

    @abc.abstractmethod
    def _require_open(self) -> None:
        """Raise UsageError when the engine is closed."""

    @abc.abstractmethod
    def _next_serial(self) -> int:
        """A number for drawing, the same on all ranks."""

    @abc.abstractmethod
    def _begin_anew(self) -> None:
        """Count the minibatch's time from its next forward on, if it has had no backward yet."""

    def plan(self, samples: Sequence[Sample], *, lengths: Sequence[int] | None = None) -> Plan:
        """Plan who computes which of all ranks' samples. Collective.

        Args:
            samples: this rank's, also none; mappings with 1-D ``input_ids``, unless ``lengths`` are given.
            lengths: cost-relevant length (tokens) of each of this rank's samples.

        Returns:
            The plan, the same on every rank: by ``balance.strategy``, its limits, and the costs and speeds
            that were learned so far. Its positions go through the ranks in order, rank 0's samples first.

        Raises:
            UsageError: a sample without tokens, or one that cannot travel.
            ConfigError: a sample longer than ``balance.max_tokens_per_micro_batch``.
        """
        with self._meeting("plan"):
            return self._balancer.plan(self._balancer.take_stock(samples, lengths)[1])

    def exchange(
        self, samples: Sequence[Sample], plan: Plan, *, lengths: Sequence[int] | None = None
    ) -> dict[int, TensorSample]:
        """Move samples to the ranks that a plan has them on, in one all-to-all. Collective.

        Args:
            samples: this rank's: mappings of names to tensors, arrays, lists of numbers, numbers and texts,
                with the same names on all ranks.
            plan: over the samples of all ranks in the order of ranks (:meth:`plan`); equal on all ranks.
            lengths: as for :meth:`plan`.

        Returns:
            By position the samples of ``plan.micro_batches[rank]``, as CPU tensors (texts stay texts). Those
            that came from other ranks are views of one buffer.

        Raises:
            UsageError: the plan is not of these samples, or ranks have different plans or fields.
        """
        with self._meeting("exchange"):
            tensors, stock = self._balancer.take_stock(samples, lengths, plan)
            if stock.lengths != plan.lengths:
                raise UsageError(
                    f"exchange: the plan is of {plan.num_samples} samples with "
                    f"{sum(plan.lengths)} tokens, but the ranks have {len(stock.lengths)} with "
                    f"{sum(stock.lengths)}, or in another order; make it with engine.plan(samples)"
                )
            found = self._balancer.exchange(tensors, stock, plan)
            return {position: nested(sample) for position, sample in found.items()}

    def balance(
        self,
        samples: Sequence[Sample],
        *,
        lengths: Sequence[int] | None = None,
        fields: Sequence[str] | None = None,
        collate_fn: Collate | None = None,
    ) -> Balanced:
        """Make a minibatch of all ranks' samples and give this rank its share. Collective.

        Gathers lengths, plans, moves each sample to the rank that is to compute it (or, with
        ``balance.strategy: dynamic``, puts all into memory that the ranks of a node share, to be drawn), and
        packs micro-batches: what the loader does for a data set. Train on it and call :meth:`step`.

        Args:
            samples: this rank's, also none: mappings with 1-D ``input_ids``, ``labels`` or ``loss_mask``, and
                whatever the loss needs; see :meth:`exchange`. Ranks may have any numbers of them.
            lengths: as for :meth:`plan`.
            fields: names of what micro-batches take along in ``fields``; by default every number, and every
                1-D tensor with one value a token. ``advantages``, ``old_logprobs`` and ``ref_logprobs`` have
                to be one or the other then.
            collate_fn: makes a micro-batch of a list of samples; by default the one given to ``initialize``,
                else samples are packed.

        Returns:
            The micro-batches of this rank. With ``dynamic`` they can be iterated over once; else again, until
            the next call.

        Raises:
            UsageError: a sample that cannot travel; with ``dynamic``, more than ``balance.sample_store_mib``.
            ConfigError: a sample longer than ``balance.max_tokens_per_micro_batch``.
        """
        collate_fn = collate_fn or self._balancer.collate_fn
        with self._meeting("balance"):
            self._balanced = self._make_minibatch(samples, lengths, fields, collate_fn, all_of=_OF_LOSSES)
        return self._balanced

    def annotate(
        self,
        samples: Sequence[Sample],
        function: Callable[[MicroBatch], Annotations],
        *,
        lengths: Sequence[int] | None = None,
        fields: Sequence[str] | None = None,
    ) -> list[TensorSample]:
        """Compute something of all ranks' samples, balanced, and write it into them. Collective.

        For log-probabilities of the old and the reference policy, values, entropies. The model is in
        evaluation mode and no gradients are kept.

        Args:
            samples: this rank's; see :meth:`balance`.
            function: gets a micro-batch on the model's device and returns values by name: ``[1, T]``, aligned
                with its labels, or ``[num_sequences]``.
            lengths: as for :meth:`plan`.
            fields: as for :meth:`balance`.

        Returns:
            The samples that *this* rank has computed, with the new fields. They stay here: hand them to
            :meth:`balance`, which moves them on.

        Raises:
            UsageError: as :meth:`balance`, or values of another shape.
        """
        with self._meeting("annotate"):
            minibatch = self._make_minibatch(samples, lengths, fields, None)
        training = self.module.training
        done: list[TensorSample] = []
        self.module.eval()
        with self._control.phase(Phase.FORWARD), torch.no_grad(), self._device.computing():
            for micro_batch in minibatch:
                values = function(micro_batch.to(self._device.torch_device))
                found = {name: _cut(name, value, micro_batch) for name, value in values.items()}
                samples_here = [nested(minibatch.samples(position)) for position in micro_batch.sample_ids]
                sequences = [part for sample in samples_here for part in sample.get("sequences", [sample])]
                for number, sequence in enumerate(sequences):
                    sequence.update({name: cut[number] for name, cut in found.items()})
                done += samples_here
        self._sharding.reshard()
        self.module.train(training)
        self._begin_anew()
        return done

    @contextlib.contextmanager
    def generating(self, *, whole: bool = True) -> Iterator[nn.Module]:
        """The model for ``model.generate(...)``: in evaluation mode and without gradients.

        Any rank, any time between steps. Ranks may generate different numbers of tokens, or nothing at all:
        on demand nobody waits for anybody.

        Args:
            whole: fetch all parameters once and keep them until the end of the block, which needs the memory
                of the whole model (in the dtype of the computation); False: fetch each block's for every
                token and drop them again. With ``odc.transport: collective`` it must be whole, and all ranks
                enter the block together.

        Yields:
            The model.

        Raises:
            UsageError: in the middle of a minibatch.
        """
        self._require_between("generating")
        with generating(
            self.module,
            self._sharding,
            self._control,
            self._device,
            whole=whole,
            reshards=self.config.odc.reshard_after_forward,
        ):
            yield self.module
        self._begin_anew()

    def update_reference(self) -> None:
        """Give the reference model the weights that the model has now. Collective, between two minibatches.

        Each rank copies its own shard. Checkpoints do not hold the reference: a run that goes on from one has
        the reference that it gave to ``initialize``.

        Raises:
            UsageError: there is no reference, it has another architecture, or it is the model itself.
        """
        self._require_between("update_reference")
        if self.reference is None:
            raise UsageError("update_reference: give reference=... to odcengine.initialize")
        if isinstance(self.reference, WithoutAdapters):
            raise UsageError(
                "update_reference: the reference is the model without its adapters, which nothing changes; "
                "give a reference model of its own (model.reference) to update it"
            )
        with self._control.phase(Phase.PUBLISH):
            barrier = self._control.barrier if self.transport is None else self.transport.barrier
            barrier(Meeting.REFERENCE, self.global_steps)
            self._sharding.reshard()
            copy_weights(self.module, self.reference)
            self._sharding.publish(Changed.ALL)

    # -- parts -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _meeting(self, call: str) -> Iterator[None]:
        self._require_between(call)
        with self._control.phase(Phase.BALANCING):
            before, self._balanced = self._balanced, None  # its samples may be replaced
            self._control.barrier(Meeting.BALANCE, self.global_steps)
            if before is not None and before.left_early:
                logger.warning(
                    "%s: no engine.step() has followed the last engine.balance(), whose loop rank %d left "
                    "%s: they are in no step",
                    *(call, before.rank, before.explain_left()),
                )
            yield
        self._begin_anew()

    def _make_minibatch(
        self,
        samples: Sequence[Sample],
        lengths: Sequence[int] | None,
        fields: Sequence[str] | None,
        collate_fn: Collate | None,
        all_of: Sequence[str] = (),
    ) -> Balanced:
        tensors, stock = self._balancer.take_stock(samples, lengths)
        if collate_fn is None:
            vocab_size = find_vocabulary(self.module)
            if vocab_size is not None:
                _check_vocabulary(tensors, vocab_size)
            self._prepare_packing(stock.longest if stock.lengths else None)
        else:  # packing looks at the fields that it takes
            rank = self._control.topology.rank
            for number, sample in enumerate(tensors):
                check_sample_is_finite(nested(sample), f"rank {rank}: sample {number}")
        return self._balancer.minibatch(
            tensors, stock, fields, collate_fn, self._next_serial(), self._job.draw, all_of=all_of
        )

    def _prepare_packing(self, longest: int | None) -> None:
        """Several samples share a row: attention must stop between them. All ranks see to it together."""
        while self._unprepared:
            prepare_for_packing(self._unprepared.pop(), low_precision=self.config.bf16.enabled)
            self._sharding.reshard()
        if longest is not None and is_transformers_model(self.module):
            one_a_row = self.config.train_micro_batch_size_per_gpu == 1
            check_lengths(self.module, longest, shared_rows=not one_a_row)


def _check_vocabulary(samples: Sequence[TensorSample], vocab_size: int) -> None:
    """Token ids outside of the vocabulary have a name here; on a GPU they end the process's context."""
    for number, sample in enumerate(samples):
        whole = nested(sample)
        if is_token_sample(whole):
            check_sample(whole, f"sample {number}", vocab_size)


def _cut(name: str, values: Any, micro_batch: MicroBatch) -> list[torch.Tensor]:
    """For each sequence its values."""
    if isinstance(values, torch.Tensor):
        if values.shape[:2] == micro_batch.labels.shape:
            return micro_batch.unpack(values.cpu())
        if values.shape[:1] == (micro_batch.num_sequences,):
            return list(values.detach().cpu().unbind())
    shape = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
    raise UsageError(
        f"annotate: the function gave {name} as {shape}; expected a tensor of "
        f"{list(micro_batch.labels.shape)} (positions) or {[micro_batch.num_sequences]} (sequences)"
    )
