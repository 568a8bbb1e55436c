"""What a minibatch's times count: from its start, not from the end of the last one."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import torch
from distributed import run_ranks, values
from torch import nn

import odcengine
from odcengine.metrics import StepMetrics

PAUSE_S = 0.6
LOAD_S = 0.15


class _SlowData:
    """Samples of one number; reading one takes its time."""

    lengths = np.ones(4, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(LOAD_S)
        return torch.full((3,), float(index))


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(batch).square().sum()
    return result


def _two_engines(rank: int, world_size: int) -> list[tuple[StepMetrics, StepMetrics]]:
    """An engine with a loader and one without, in turns, with a pause before each minibatch."""
    config: dict[str, Any] = {
        "train_batch_size": world_size,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    first, _, loader, _ = odcengine.initialize(
        model=nn.Linear(3, 2), config=config, training_data=_SlowData(), loss_fn=_loss
    )
    second, *_ = odcengine.initialize(model=nn.Linear(3, 2), config=config)
    assert loader is not None
    minibatches = itertools.chain.from_iterable(itertools.repeat(loader))
    steps: list[tuple[StepMetrics, StepMetrics]] = []
    # Until the machine has held up no rank for long; all ranks see the same times.
    while len(steps) < 2 or (len(steps) < 10 and not _is_nobodys(*steps[-1])):
        time.sleep(PAUSE_S)
        for micro_batch in next(minibatches):
            first.backward(first(micro_batch), count=1)
        of_first = first.step()
        time.sleep(PAUSE_S)
        second.backward(second(torch.ones(1, 3)).sum(), count=1)
        steps.append((of_first, second.step()))
    first.close()
    second.close()
    return steps


def test_time_between_minibatches_is_nobodys() -> None:
    for steps in values(run_ranks(_two_engines, 2)):
        for with_loader, _ in steps:
            assert all(busy >= LOAD_S for busy in with_loader.busy_s)
        assert _is_nobodys(*steps[-1]), steps


def _is_nobodys(with_loader: StepMetrics, without: StepMetrics) -> bool:
    loaded = all(LOAD_S <= busy < LOAD_S + PAUSE_S for busy in with_loader.busy_s)
    return loaded and all(busy < PAUSE_S for busy in without.busy_s)
