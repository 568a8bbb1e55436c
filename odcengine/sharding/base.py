"""What the engine needs of a sharded model, whatever moves its parameters and gradients."""

from __future__ import annotations

import abc
import contextlib
import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from odcengine.control import ControlBlock, EventRecorder, Phase
from odcengine.device import Mark
from odcengine.errors import UsageError
from odcengine.sharding.layout import ParamEntry, ParamGroup


class Changed(enum.Enum):
    """Which parameters may differ from the published ones."""

    NONE = "none"
    TRAINABLE = "trainable"
    ALL = "all"

    def of(self, group: ParamGroup) -> list[ParamEntry]:
        """Those parameters of ``group``."""
        if self is Changed.NONE:
            return []
        return group.trainable if self is Changed.TRAINABLE else group.entries


@dataclass
class Blocked:
    """Seconds this rank spent inside communication since the start of the minibatch.

    Attributes:
        gather_s: getting parameters, waiting included.
        push_s: handing over gradients, waiting included.
        wait_s: the part of both that was spent waiting for other ranks (flags, lock-step barriers); for
            collectives waiting and moving data cannot be told apart, so all of it.
        num_gathers: groups of parameters fetched.
        num_pushes: gradients of a group handed over.
        crossed_bytes: pulled and pushed over node boundaries until barrier A; None where nobody counts.
        exchanged_bytes: sent to other nodes at the boundary, and as many received.
        exchanges: when each exchange between nodes began and ended, as marks of the device.
    """

    gather_s: float = 0.0
    push_s: float = 0.0
    wait_s: float = 0.0
    num_gathers: int = 0
    num_pushes: int = 0
    crossed_bytes: int | None = None
    exchanged_bytes: int = 0
    exchanges: list[tuple[Mark, Mark]] = field(default_factory=list)


def squared_norm(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Squared 2-norm of all tensors together, float64 scalar on the device that they are on."""
    found = [tensor for tensor in tensors if tensor.numel()]
    if device.type == "cpu":
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in found]
    else:  # few launches; each tensor is summed pairwise in its own dtype
        norms = [norm.double() for norm in torch._foreach_norm(found)] if found else []
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)


def scale_all(tensors: Sequence[torch.Tensor], scale: float | torch.Tensor) -> None:
    """Multiply tensors in place, in few launches."""
    for dtype in {tensor.dtype for tensor in tensors}:
        factor = scale.to(dtype) if isinstance(scale, torch.Tensor) else scale
        torch._foreach_mul_([tensor for tensor in tensors if tensor.dtype == dtype], factor)


class Sharding(abc.ABC):
    """A model sharded by FSDP2, seen from the minibatch's boundary.

    Order of calls in a minibatch: ``begin``, any number of forwards and backwards, the engine's barrier A,
    ``collect``, ``expose``, the optimizer's step, ``release``, ``publish``.

    Attributes:
        recorder: gets every gather and push while it is set.
        device: where the shards are.

    Args:
        model: the sharded model.
        groups: its groups.
        control: the node's control block.
    """

    def __init__(self, model: nn.Module, groups: Sequence[ParamGroup], control: ControlBlock) -> None:
        self.model = model
        self.control = control
        self.groups = list(groups)
        self.trainable: list[ParamEntry] = [entry for group in groups for entry in group.trainable]
        self.device = self.groups[0].entries[0].local.device
        self.blocked = Blocked()
        self._counted = False
        self.recorder: EventRecorder | None = None
        self._fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self._fsdp_modules:
            # Gradients are summed and divided once, by the minibatch's count; without the explicit factor
            # FSDP2 divides the result by the world size. Neither setter is recursive.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)

    def reshard(self) -> None:
        """Drop every full parameter, so that the next use fetches it anew.

        A root that stays full over the optimizer's step would compute with old weights.
        """
        for module in self._fsdp_modules:
            module.reshard()

    def begin(self) -> None:
        """Start a minibatch: count times and calls from here."""
        self.blocked = Blocked()

    @contextlib.contextmanager
    def counted_backward(self) -> Iterator[None]:
        """Gradients may only arrive inside of this block, where the engine counts what they belong to."""
        self._counted = True
        try:
            yield
        finally:
            self._counted = False

    def check_counted(self) -> None:
        """Called when gradients arrive.

        Raises:
            UsageError: they come from a backward that the engine does not know of, and nobody else would tell
                the other ranks.
        """
        if not self._counted:
            with self.control.phase(Phase.BACKWARD):
                raise UsageError(
                    "a backward outside of engine.backward(loss): its gradients would be summed but not "
                    "counted. Call engine.backward(loss) instead of loss.backward()"
                )

    def check_parameters(self) -> None:
        """Look whether what other ranks see of the parameters is what this rank has.

        Raises:
            UsageError: a parameter changed since it was published, or was frozen or thawed.
        """
        for group in self.groups:
            for entry in group.entries:
                if entry.param.requires_grad != (entry.grad_offset is not None):
                    state = "thawed" if entry.param.requires_grad else "frozen"
                    raise UsageError(
                        f"parameter {entry.name} was {state} after odcengine.initialize; the windows are "
                        "laid out for what was trainable then. Set requires_grad before initialize"
                    )

    @abc.abstractmethod
    def collect(self) -> torch.Tensor:
        """After barrier A: make the sums of this rank's shard ready. Collective between nodes.

        Returns:
            The squared 2-norm of this rank's shard of the gradient sum, float64 scalar on the device.
        """

    def faults(self) -> torch.Tensor:
        """Checks whose outcome is still on the device: float64, 1-D, 0 where nothing is wrong."""
        return torch.zeros(0, dtype=torch.float64, device=self.device)

    def raise_faults(self, faults: Sequence[float]) -> None:  # noqa: B027 - most have none
        """Raise what the values of :meth:`faults`, on the host by now, say is wrong."""

    @abc.abstractmethod
    def used(self) -> torch.Tensor:
        """Which trainable parameters got a gradient here: float64 of 0 and 1, ``[len(trainable)]``."""

    @abc.abstractmethod
    def expose(self, used: torch.Tensor, scale: float | torch.Tensor) -> None:
        """Set ``.grad`` of every trainable parameter to its gradient sum times ``scale``.

        Args:
            used: bool ``[len(trainable)]``; parameters that no rank used get None, on all ranks alike.
            scale: one over the minibatch's count, times the clipping coefficient; a float64 scalar of the
                device where the host does not know it yet.
        """

    def release(self) -> None:
        """Drop all gradients and empty the accumulators; ``.grad`` is None afterwards."""
        for entry in self.trainable:
            entry.param.grad = None

    @abc.abstractmethod
    def publish(self, which: Changed) -> None:
        """Make this rank's current parameters the ones that others fetch from now on.

        The caller has seen to it that no rank fetches while this runs. Collective between nodes.

        Args:
            which: the parameters that may have changed; equal on all ranks.
        """

    def close(self) -> None:
        """Let go of windows' views. The model keeps its sharded parameters."""
        self.groups.clear()
        self.trainable.clear()
