"""Optimizers and learning rate schedules from a validated configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from odcengine.config import (
    AdamParams,
    OptimizerConfig,
    SchedulerConfig,
    SgdParams,
    WarmupCosineLrParams,
    WarmupDecayLrParams,
    WarmupLrParams,
)
from odcengine.errors import ConfigError


def build_optimizer(
    config: OptimizerConfig, params: Iterable[torch.Tensor] | Iterable[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Builds the optimizer of a configuration.

    Args:
        config: the section ``optimizer``.
        params: parameters or parameter groups, as torch's optimizers take them.

    Returns:
        torch's Adam, AdamW or SGD. As in DeepSpeed, ``type: Adam`` is AdamW unless ``adam_w_mode: false``.
    """
    options = config.params.model_dump(exclude={"adam_w_mode"})
    given: list[Any] = list(params)
    if isinstance(config.params, SgdParams):
        return torch.optim.SGD(given, **options)
    if options["fused"] is None and options["foreach"] is None and _have_fused(given):
        # Torch's own choice is a loop over parameters on CPUs and "foreach" on GPUs; on sharded parameters
        # the fused kernel takes a quarter of the time (benchmarks/demo-cpu.md). SGD's takes no sharded ones.
        options["fused"] = True
    l2 = isinstance(config.params, AdamParams) and not config.params.adam_w_mode
    return (torch.optim.Adam if l2 else torch.optim.AdamW)(given, **options)


def _have_fused(params: list[Any]) -> bool:
    tensors = [t for p in params for t in (p["params"] if isinstance(p, dict) else [p])]
    return all(t.is_floating_point() and t.device.type in ("cpu", "cuda") for t in tensors)


LENGTHS = ("total_num_steps", "T_max")
"""Parameters that say how many steps a schedule has; by default those of the run."""


def build_scheduler(
    config: SchedulerConfig | None, optimizer: torch.optim.Optimizer, total_num_steps: int | None = None
) -> LRScheduler | None:
    """Builds the learning rate schedule of a configuration; it counts optimizer steps.

    Args:
        config: the section ``scheduler``.
        optimizer: optimizer with its final parameter groups.
        total_num_steps: optimizer steps of the whole run; used where the configuration leaves
            ``total_num_steps`` or ``T_max`` open.

    Returns:
        a scheduler whose ``step()`` follows each ``optimizer.step()``; None for None.

    Raises:
        ConfigError: the length of the schedule is neither in the configuration nor known.
    """
    if config is None:
        return None
    params = config.params
    options = params.model_dump()
    for key in LENGTHS:
        if key in options and options[key] is None:
            if total_num_steps is None:
                raise ConfigError(
                    f"scheduler.params.{key}: missing, and the number of steps of the run is not known; "
                    "expected a whole number >= 1"
                )
            options[key] = max(1, total_num_steps)
    if isinstance(params, WarmupCosineLrParams):
        return WarmupCosineLR(optimizer, **options)
    if isinstance(params, WarmupDecayLrParams):
        return WarmupDecayLR(optimizer, **options)
    if isinstance(params, WarmupLrParams):
        return WarmupLR(optimizer, **options)
    scheduler: LRScheduler = getattr(lr_scheduler, config.type)(optimizer, **options)
    return scheduler


class _DeepSpeedLR(LRScheduler):
    """A schedule with DeepSpeed's warm-up and DeepSpeed's count of steps.

    DeepSpeed's schedulers start at iteration -1, for which they use the first value, and reach iteration 0
    after the first optimizer step. So after n steps the learning rate is that of iteration max(n - 1, 0),
    one step later than torch's own schedulers. Kept, so that a DeepSpeed file gives the same learning rates
    step by step.

    Formulas: deepspeed/runtime/lr_schedules.py (0.19), classes WarmupLR, WarmupDecayLR and WarmupCosineLR.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, warmup_num_steps: int, warmup_type: str) -> None:
        # DeepSpeed raises 1 to 2, for the logarithm below. No warm-up at all (0) is ours.
        self.warmup_num_steps = max(2, warmup_num_steps) if warmup_num_steps else 0
        self.warmup_type = warmup_type
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Returns the learning rate of every parameter group after ``last_epoch`` optimizer steps."""
        iteration = max(self.last_epoch - 1, 0)
        return [self._lr_at(iteration, float(base)) for base in self.base_lrs]

    def _lr_at(self, iteration: int, base_lr: float) -> float:
        raise NotImplementedError

    def _warmup(self, iteration: int) -> float | None:
        """Returns the share of the warm-up, 0 to 1; None after it.

        ``log``: ln(i + 1) / ln(w); ``linear``: i / w; for iteration i of w.
        """
        if iteration >= self.warmup_num_steps:
            return None
        if self.warmup_type == "log":
            return math.log(iteration + 1) / math.log(self.warmup_num_steps)
        return iteration / self.warmup_num_steps


class WarmupLR(_DeepSpeedLR):
    """Warm-up from ``warmup_min_lr`` to ``warmup_max_lr``, then constant.

    lr(i) = min + (max - min) x warm-up(i).

    Args:
        optimizer: optimizer whose groups' learning rates are set.
        warmup_min_lr: learning rate at iteration 0.
        warmup_max_lr: learning rate after the warm-up; None: the group's own.
        warmup_num_steps: length w of the warm-up; 0 for none, 1 counts as 2.
        warmup_type: ``log`` or ``linear``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: float = 0.0,
        warmup_max_lr: float | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self.warmup_min_lr = warmup_min_lr
        self.warmup_max_lr = warmup_max_lr
        super().__init__(optimizer, warmup_num_steps, warmup_type)

    def _lr_at(self, iteration: int, base_lr: float) -> float:
        top = base_lr if self.warmup_max_lr is None else self.warmup_max_lr
        warmup = self._warmup(iteration)
        share = self._after_warmup(iteration) if warmup is None else warmup
        return self.warmup_min_lr + (top - self.warmup_min_lr) * share

    def _after_warmup(self, iteration: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Warm-up as :class:`WarmupLR`, then linear decay to ``warmup_min_lr`` at ``total_num_steps``.

    After the warm-up lr(i) = min + (max - min) x max(0, (T - i) / max(1, T - w)).

    Args:
        optimizer: optimizer whose groups' learning rates are set.
        total_num_steps: T, iteration at which the end is reached.
        warmup_min_lr: learning rate at iteration 0 and at the end.
        warmup_max_lr: learning rate after the warm-up; None: the group's own.
        warmup_num_steps: length w of the warm-up; 0 for none, 1 counts as 2.
        warmup_type: ``log`` or ``linear``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: float = 0.0,
        warmup_max_lr: float | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)

    def _after_warmup(self, iteration: int) -> float:
        decay_steps = max(1, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, (self.total_num_steps - iteration) / decay_steps)


class WarmupCosineLR(_DeepSpeedLR):
    """Warm-up to the group's learning rate, then half a cosine down to a share of it.

    During the warm-up lr(i) = lr x (r + (1 - r) x warm-up(i)) with r = ``warmup_min_ratio``; after it
    lr(i) = lr x (c + (1 - c) x (1 + cos(pi x min(1, (i - w + 1) / max(1, T - w)))) / 2) with
    c = ``cos_min_ratio``.

    Args:
        optimizer: optimizer whose groups' learning rates are set.
        total_num_steps: T, iteration at which the end is reached.
        warmup_min_ratio: share of the learning rate at iteration 0.
        warmup_num_steps: length w of the warm-up; 0 for none, 1 counts as 2.
        cos_min_ratio: share of the learning rate at the end.
        warmup_type: ``log`` or ``linear``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
    ) -> None:
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        super().__init__(optimizer, warmup_num_steps, warmup_type)

    def _lr_at(self, iteration: int, base_lr: float) -> float:
        warmup = self._warmup(iteration)
        if warmup is not None:
            return base_lr * (self.warmup_min_ratio + (1 - self.warmup_min_ratio) * warmup)
        steps = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (iteration - self.warmup_num_steps + 1) / steps)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return base_lr * (self.cos_min_ratio + (1 - self.cos_min_ratio) * cosine)
