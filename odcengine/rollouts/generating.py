"""Generation with a sharded model.

``model.generate`` calls the model once a token. FSDP2 fetches the parameters of every block in each of these
calls and drops them behind it: on demand that works, whatever the other ranks do, but moves the whole model
for every token. So by default the parameters are fetched once and stay whole until the end.

transformers sees that FSDP2 shards the model, takes its communication for collectives, and lets all ranks go
on until the last one is done, with an all-reduce for every token (``synced_gpus``). Neither way needs that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from odcengine.control import ControlBlock, Phase
from odcengine.device import Device
from odcengine.errors import UsageError
from odcengine.sharding.base import Sharding
from odcengine.sharding.collective import CollectiveSharding


@contextlib.contextmanager
def generating(
    model: nn.Module,
    sharding: Sharding,
    control: ControlBlock,
    device: Device,
    *,
    whole: bool,
    reshards: bool,
) -> Iterator[None]:
    """Evaluation mode without gradients, and, where asked for, whole parameters.

    Args:
        model: the sharded model.
        sharding: of the model.
        control: gets a sign of life with every token.
        device: where it computes.
        whole: keep the parameters whole.
        reshards: whether blocks drop parameters after their forward in training.
    """
    collective = isinstance(sharding, CollectiveSharding) and control.topology.world_size > 1
    if collective and not whole:
        raise UsageError(
            "generating: with odc.transport: collective all ranks would have to generate equally many "
            "tokens; leave whole=False away, or use an on-demand transport"
        )
    modules: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    training = model.training
    beat = model.register_forward_pre_hook(lambda *_: control.beat())
    with control.phase(Phase.GENERATING):
        try:
            sharding.check_parameters()
            model.eval()
            with torch.no_grad(), device.computing():
                if whole:
                    _set_reshard(model, False)
                    for module in modules:
                        module.unshard()
                with _unsynchronized(model):
                    yield
        finally:
            beat.remove()
            if whole:
                _set_reshard(model, reshards)
            sharding.reshard()
            model.train(training)


@contextlib.contextmanager
def _unsynchronized(model: Any) -> Iterator[None]:
    """``model.generate`` waits for no other rank."""
    generate = getattr(model, "generate", None)
    if generate is None:
        yield
        return
    model.generate = functools.partial(generate, synced_gpus=False)  # hides the class's own for the moment
    try:
        yield
    finally:
        del model.generate


def _set_reshard(model: nn.Module, reshards: bool) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # FSDP2 keeps its root whole between forward and backward, so training does not change.
            module.set_reshard_after_forward(reshards and module is not model, recurse=False)
