"""Ways to run a minibatch, each with a model and an optimizer of its own."""

from __future__ import annotations

import abc
import argparse
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import odcengine
from odc_tools.bench.ranks import Ranks
from odc_tools.bench.schedule import ZERO3_KINDS, MethodName
from odcengine.data.batch import MicroBatch
from odcengine.errors import OdcError
from odcengine.losses import causal_lm_loss_sum
from odcengine.metrics import StepMetrics
from odcengine.transport.base import Traffic, Window

_LR = 1e-5
CLIP = 1.0


@dataclass(frozen=True)
class Outcome:
    """What a minibatch gave, equal on all ranks.

    Attributes:
        loss: mean over its targets; None if it is not finite.
        grad_norm: before clipping; None if it is not finite.
        busy_s: for each rank its seconds of work up to barrier A; None where ranks meet in every layer and
            work cannot be told from waiting.
    """

    loss: float | None
    grad_norm: float | None
    busy_s: tuple[float, ...] | None

    @classmethod
    def of(cls, loss: float, grad_norm: float, busy_s: tuple[float, ...] | None) -> Outcome:
        """With None for what is not finite, as JSON has no such numbers."""
        return cls(
            loss if math.isfinite(loss) else None, grad_norm if math.isfinite(grad_norm) else None, busy_s
        )


class Method(abc.ABC):
    """A sharded model with an optimizer.

    Attributes:
        name: of the method.
        num_parameters: of the whole model.
    """

    name: MethodName
    num_parameters: int

    @abc.abstractmethod
    def run(self, micro_batches: Sequence[MicroBatch], num_targets: int, num_own: int | None = None) -> None:
        """A whole optimizer step; may return before the device is done.

        Args:
            micro_batches: of this rank, on its device.
            num_targets: tokens to learn of all ranks together.
            num_own: so many of them are this rank's for certain; the others go to the ranks that draw them.
                None: all.
        """

    @abc.abstractmethod
    def outcome(self) -> Outcome:
        """What the last :meth:`run` gave. Collective."""

    def after_first(self) -> None:  # noqa: B027
        """Called once, when the first minibatch has been run."""

    def close(self) -> None:  # noqa: B027
        """Let go of what is shared with other ranks. Collective."""


def why_not(name: MethodName, others: Sequence[MethodName], ranks: Ranks) -> str | None:
    """Why a method cannot run here; None if it can."""
    if name.kind in ZERO3_KINDS:
        from odc_tools.bench.zero3 import why_no_deepspeed

        return why_no_deepspeed()
    if name.kind != "fsdp2-symm":
        return None
    if not ranks.on_gpu:
        return "symmetric memory needs GPUs"
    if not hasattr(FSDPModule, "set_symm_mem_for_comm"):
        return f"torch {torch.__version__} has no set_symm_mem_for_comm"
    if not hasattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO"):
        return f"torch {torch.__version__} is built with an NCCL without the zero-CTA policy"
    if any(other.kind in ("odc", "limit", "odc-zero3") for other in others):
        return (
            "torch has one back end of symmetric memory a process, and odcengine's transport uses another "
            "than FSDP2; compare it with fsdp2 in a run of its own"
        )
    return None


def make_method(name: MethodName, model: nn.Module, ranks: Ranks, odc: Mapping[str, Any]) -> Method:
    """Shard a model. Collective.

    Args:
        name: the method.
        model: on the CPU, equal on all ranks; is taken over.
        ranks: this rank.
        odc: keys of the ``odc`` section for the methods on demand; :func:`odc_section` makes it.
    """
    if name.kind in ZERO3_KINDS:
        from odc_tools.bench.zero3 import OnDemandZero3, Zero3

        return Zero3(name, model, ranks) if name.collective else OnDemandZero3(name, model, ranks, odc)
    if name.collective:
        return Fsdp2(name, model, ranks)
    return (Limit if name.kind == "limit" else OnDemand)(name, model, ranks, odc)


def odc_section(options: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of the ``odc`` section."""
    section = {
        "transport": options.transport,
        "timeout_s": options.timeout_s,
        "startup_timeout_s": options.timeout_s,
    }
    if options.node_size is not None:
        section |= {"sharding": "hybrid", "node_size": options.node_size}
    return section


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """What every method steps."""
    return torch.optim.AdamW(parameters, lr=_LR, fused=True)


class Fsdp2(Method):
    """Plain torch: ``fully_shard`` of every block, and its own collectives.

    Of odcengine there are only the attention and the loss of packed rows, as in all methods.
    """

    def __init__(self, name: MethodName, model: nn.Module, ranks: Ranks) -> None:
        self.name = name
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._ranks = ranks
        self._model = model
        symmetric = name.kind == "fsdp2-symm"
        mesh = _zero_cta_mesh() if symmetric else init_device_mesh(ranks.device.type, (ranks.world_size,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        classes: Any = model._no_split_modules
        for module in list(model.modules()):
            if type(module).__name__ in classes:
                fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        if symmetric:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_symm_mem_for_comm()
        self._parameters = list(model.parameters())
        self._optimizer = make_optimizer(self._parameters)
        self._loss = torch.zeros((), device=ranks.device)
        self._norm: torch.Tensor = self._loss

    def run(self, micro_batches: Sequence[MicroBatch], num_targets: int, num_own: int | None = None) -> None:
        total = torch.zeros((), device=self._ranks.device)
        # FSDP2 takes the mean over ranks.
        scale = self._ranks.world_size / num_targets
        for micro_batch in micro_batches:
            loss_sum = causal_lm_loss_sum(self._model, micro_batch)
            (loss_sum * scale).backward()  # type: ignore[no-untyped-call]
            total += loss_sum.detach()
        self._norm = nn.utils.clip_grad_norm_(self._parameters, CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._loss = total / num_targets

    def outcome(self) -> Outcome:
        norm = self._norm.full_tensor() if isinstance(self._norm, DTensor) else self._norm
        (loss,) = self._ranks.total([float(self._loss)])
        return Outcome.of(loss, float(norm), None)


def _zero_cta_mesh() -> DeviceMesh:
    """All ranks, on a communicator that leaves copying to the copy engines."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]
    group = dist.new_group(backend="nccl", pg_options=options)
    return DeviceMesh.from_group(group, "cuda")


class OnDemand(Method):
    """odcengine with a one-sided transport."""

    def __init__(self, name: MethodName, model: nn.Module, ranks: Ranks, odc: Mapping[str, Any]) -> None:
        self.name = name
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._ranks = ranks
        config = {
            "train_batch_size": ranks.world_size,  # without effect: the script brings its batches
            "bf16": {"enabled": True},
            "gradient_clipping": CLIP,
            "steps_per_print": 0,
            "odc": {"device": ranks.device.type, **odc},
        }
        self.engine, *_ = odcengine.initialize(config=config, model=model, optimizer=make_optimizer)
        self._metrics: StepMetrics | None = None

    def run(self, micro_batches: Sequence[MicroBatch], num_targets: int, num_own: int | None = None) -> None:
        for micro_batch in itertools.chain(micro_batches[:num_own], self._drawn(micro_batches, num_own)):
            self.engine.backward(self.engine(micro_batch))
        self._metrics = self.engine.step()

    def _drawn(self, micro_batches: Sequence[MicroBatch], num_own: int | None) -> Iterator[MicroBatch]:
        """Of all micro-batches but its own those that this rank draws."""
        total = 0 if num_own is None else len(micro_batches) - num_own
        while total and (number := self.engine.draw(total)) < total:
            yield micro_batches[len(micro_batches) - total + number]

    def outcome(self) -> Outcome:
        assert self._metrics is not None  # run() has been called
        return Outcome.of(self._metrics.loss, self._metrics.grad_norm, self._metrics.busy_s)

    def close(self) -> None:
        self.engine.close()


class Limit(OnDemand):
    """The same engine with every pull and push left out: what no communication could be faster than.

    The first minibatch is a real one. After it a GPU's buffers, which are not filled any more, hold earlier
    parameters, since FSDP2 takes them from a stream of their own; that matters, as the speed of a GPU depends
    on the numbers. On a CPU they could hold anything, so they are zeroed. Gradients are zero, and the
    optimizer steps.
    """

    def after_first(self) -> None:
        transport = self.engine.transport
        if transport is None:
            raise OdcError("limit: the engine has no transport whose operations could be left out")
        transport.gather = _left_out if self._ranks.on_gpu else _zeroed  # type: ignore[method-assign]
        transport.scatter_add = _left_out  # type: ignore[method-assign]
        transport.traffic = Traffic()

    def outcome(self) -> Outcome:
        transport = self.engine.transport
        if transport is not None and "gather" in vars(transport):
            moved = transport.traffic
            if moved.num_pulls or moved.num_pushes:
                raise OdcError(
                    f"limit: {moved.num_pulls} pulls and {moved.num_pushes} pushes were done by other calls "
                    "than Transport.gather and scatter_add; the limit measures nothing"
                )
        return super().outcome()


def _left_out(*args: Any, **kwargs: Any) -> float:
    return 0.0


def _zeroed(window: Window, out: torch.Tensor, epoch: int) -> float:
    out.zero_()
    return 0.0
