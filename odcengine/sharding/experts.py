"""Mixtures of experts: of a group of experts only those that this rank's tokens chose are pulled and pushed.

transformers stacks the experts of a layer in one tensor, and FSDP2 cuts it between them: every rank owns
whole experts. Where the module of a layer's experts is a group of its own, its parameters are gathered after
the router has chosen, so a rank knows which rows it needs. Collectives cannot leave any out, since all ranks
must call them with the same sizes; on demand each rank pulls what it needs, and pushes gradients of that.

The rows that were not pulled hold whatever was in the memory. Nobody may read them: transformers' own
implementations (eager, grouped and batched products) read an expert's weights where a token has chosen it.

What is needed is known exactly: before a forward from the choice itself, before the backward of a forward
from what that forward chose. A backward may also be prefetched by FSDP2, before it is known which forward it
belongs to; then the last one's choice is pulled, and if that was wrong, the right one when the backward
begins.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from odcengine.errors import ConfigError, OdcError
from odcengine.sharding.layout import ParamEntry, ParamGroup, without_dynamo
from odcengine.sharding.padding import append_range
from odcengine.transport.base import Range

# transformers' implementations that read the weights of no expert but the chosen ones.
_IMPLEMENTATIONS = frozenset({"eager", "grouped_mm", "batched_mm"})
# With so many choices for each expert all are taken as chosen: a GPU's host need not wait to learn which.
_CHOICES_FOR_ALL = 8


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that hold the experts of a layer, stacked as transformers does it.

    Args:
        model: the model.

    Returns:
        The modules in the order of ``model.modules()``.

    Raises:
        ConfigError: it has none, or computes them in a way that may read experts that nobody chose.
    """
    found = [module for module in model.modules() if _is_stack(module)]
    if not found:
        raise ConfigError(
            f"odc.experts: chosen: {type(model).__name__} has no layer of experts as transformers stacks "
            "them; set it to all (experts that are modules of their own can be groups of their own with "
            "odc.wrap: those, too, are pulled only where they run)"
        )
    for module in found:
        name = getattr(getattr(module, "config", None), "_experts_implementation", None) or "eager"
        if name not in _IMPLEMENTATIONS:
            raise ConfigError(
                f"odc.experts: chosen: {type(module).__name__} computes its experts with {name!r}, which is "
                "not known to read only the chosen ones; expected one of "
                f"{', '.join(sorted(_IMPLEMENTATIONS))} (model.set_experts_implementation)"
            )
    return found


def _is_stack(module: nn.Module) -> bool:
    """Whether transformers has declared the module as stacked experts, which it computes in several ways."""
    declared = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed"))
    size = getattr(module, "num_experts", None)
    own = list(module.parameters(recurse=False))
    return declared and bool(own) and all(parameter.shape[0] == size for parameter in own)


class ChosenExperts:
    """Which experts of a group are needed, kept up to date by hooks on the module of the experts.

    Attributes:
        wanted: what the next gather is to pull.

    Args:
        group: a group whose module is one of :func:`expert_modules`.
        world_size: number of shards.
    """

    def __init__(self, group: ParamGroup, world_size: int) -> None:
        module: Any = group.module
        self._module = module
        self._world_size = world_size
        self._all = frozenset(range(module.num_experts))
        self._stacked = {id(parameter) for parameter in module.parameters(recurse=False)}
        self.wanted = self._all
        self._pulled: frozenset[int] | None = None  # what full parameters hold; None: there are none
        self._last_pull: frozenset[int] = frozenset()  # what they hold if there are any
        self._unpushed: frozenset[int] = frozenset()  # chosen in forwards whose backward has begun
        module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        # Before FSDP2's own hook, so that a backward comes here before it gathers parameters.
        module.register_forward_hook(self._watch_output, prepend=True, with_kwargs=True)
        # After FSDP2's own: what is needed is there now.
        module.register_forward_pre_hook(self._prove_forward, with_kwargs=True)
        module.register_forward_hook(self._after_forward)

    @classmethod
    def of(cls, group: ParamGroup, world_size: int) -> ChosenExperts | None:
        """Of a group of experts; None for any other."""
        module = group.module
        return cls(group, world_size) if isinstance(module, nn.Module) and _is_stack(module) else None

    # -- which experts ---------------------------------------------------------------------------------

    @without_dynamo
    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._need(self._chosen(args, kwargs))

    @without_dynamo
    def _watch_output(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        chosen = self.wanted
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                hook = functools.partial(self._begin_backward, chosen)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    @without_dynamo
    def _prove_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._prove(self.wanted)

    @without_dynamo
    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        chosen = self.wanted
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._prove(chosen))  # type: ignore[no-untyped-call]
        self._forget_if_sharded()
        if not torch.is_grad_enabled():
            self.wanted = self._all

    def _begin_backward(self, chosen: frozenset[int], gradient: torch.Tensor) -> None:
        self._unpushed |= chosen
        self._need(self._unpushed)

    def _chosen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        """The experts in the arguments of a call: its only tensor of integers; all where there is none."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and not value.is_floating_point():
                if value.is_cuda and value.numel() >= _CHOICES_FOR_ALL * len(self._all):
                    return self._all
                # One transfer to the host. A number past the last expert stands for none.
                hit = torch.zeros(len(self._all) + 1, dtype=torch.bool, device=value.device)
                hit[value.detach().reshape(-1).clamp(max=len(self._all))] = True
                return frozenset(number for number, flag in enumerate(hit.tolist()[:-1]) if flag)
        return self._all

    def _need(self, experts: frozenset[int]) -> None:
        """See to it that the module computes with these, whether its parameters are full now or later."""
        if self._pulled is None or experts <= self._pulled:
            self.wanted = experts
            return
        # Perhaps they are full, perhaps a gather is on its way, perhaps neither: make it one state, at no
        # traffic.
        self.wanted = frozenset()
        self._module.unshard()
        self._module.reshard()
        self.wanted = experts
        self._module.unshard()

    def _prove(self, experts: frozenset[int]) -> None:
        """Whatever FSDP2 has done: nothing is computed with memory that was not filled."""
        if not experts <= self._last_pull:
            raise OdcError(
                f"torch {torch.__version__} has gathered {type(self._module).__name__} at a moment that this "
                "version of odcengine does not expect; set odc.experts: all, and please report it"
            )

    def note_pull(self) -> None:
        """A gather has pulled what was wanted."""
        self._pulled = self._last_pull = self.wanted

    def take_unpushed(self) -> frozenset[int]:
        """The experts that gradients may be for; from now on they count as pushed."""
        experts, self._unpushed = self._unpushed or self._all, frozenset()
        self._forget_if_sharded()
        return experts

    def reset(self) -> None:
        """The parameters are sharded again, and no backward is to come."""
        self._pulled, self._unpushed, self.wanted = None, frozenset(), self._all

    def _forget_if_sharded(self) -> None:
        if isinstance(next(self._module.parameters(recurse=False)), DTensor):
            self._pulled = None

    # -- where they lie --------------------------------------------------------------------------------

    def parts_to_pull(self, group: ParamGroup) -> list[list[Range]]:
        """For each shard the bytes of the wanted experts, and of all that is no expert's."""
        return self._parts(
            (
                (entry.byte_offset, entry.numel * entry.dtype.itemsize, self._rows(entry))
                for entry in group.entries
            ),
            self.wanted,
        )

    def parts_to_push(
        self, entries: Sequence[ParamEntry], experts: frozenset[int], first: int
    ) -> list[list[Range]]:
        """For each shard the elements of these experts, and of all that is no expert's.

        Args:
            entries: trainable parameters.
            experts: the experts.
            first: where the group's gradients begin in a row of the accumulator.
        """
        return self._parts(
            ((first + (entry.grad_offset or 0), entry.numel, self._rows(entry)) for entry in entries), experts
        )

    def _rows(self, entry: ParamEntry) -> int | None:
        """Experts in a shard of a parameter; None for one that is not stacked."""
        return math.ceil(len(self._all) / self._world_size) if id(entry.param) in self._stacked else None

    def _parts(
        self, segments: Iterable[tuple[int, int, int | None]], experts: frozenset[int]
    ) -> list[list[Range]]:
        parts: list[list[Range]] = [[] for _ in range(self._world_size)]
        for offset, length, rows in segments:
            if rows is None:
                for ranges in parts:
                    append_range(ranges, offset, offset + length)
                continue
            size = length // rows
            for expert in sorted(experts):
                start = offset + expert % rows * size
                append_range(parts[expert // rows], start, start + size)
        return parts
