"""``odcengine.initialize`` with ``odc.backend: deepspeed``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.optim import Optimizer

from odcengine import build as parts
from odcengine._summed_loss import LossFn
from odcengine.config import Config
from odcengine.control import Phase
from odcengine.data import MinibatchLoader
from odcengine.deepspeed.attach import attach_in_job
from odcengine.deepspeed.engine import NoGroups, ZeroEngine
from odcengine.errors import ConfigError
from odcengine.monitor import Monitor
from odcengine.optim import build_scheduler
from odcengine.ranks import read_rank_info
from odcengine.start import Job, join

logger = logging.getLogger(__name__)


def initialize_deepspeed(
    settings: Config,
    *,
    model: nn.Module | None,
    training_data: Any | None,
    optimizer: Any | None,
    lr_scheduler: Any | None,
    loss_fn: LossFn | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    length_fn: Callable[[Any], int] | None,
) -> tuple[ZeroEngine, Any, MinibatchLoader | None, Any | None]:
    """As ``odcengine.initialize``, which calls it. Collective."""
    info = read_rank_info()
    if info.world_size < 2:
        raise ConfigError("odc.backend: deepspeed needs two ranks or more; one rank trains with fsdp2")
    job = join(info, settings)
    job.control.install_excepthook()
    try:
        with job.control.phase(Phase.STARTING):
            if info.rank == 0:
                for notice in settings.notices:
                    logger.warning("config: %s", notice)
            model = parts._build_model(settings, model)
            if settings.bf16.enabled and any(p.dtype == torch.bfloat16 for p in model.parameters()):
                model.float()  # DeepSpeed makes its fp32 masters of these
            loader, data = None, parts._open_data("path", settings.data.path, training_data, "training_data")
            if data is not None:
                costs = parts._costs(model, settings, job)
                loader = parts._build_loader(
                    model, data, settings, job, costs, collate_fn, length_fn, loss_fn
                )
            flops_of = parts._flops_of(model)
            model.train()
            engine = _make_engine(settings, job, model, optimizer, lr_scheduler, loader)
            attached, odc = attach_in_job(engine, settings, job)
            monitor = Monitor(settings, job, NoGroups(), loader, flops_of=flops_of)
    except BaseException:
        job.control.close()  # the others have been told
        raise
    made = ZeroEngine(attached, odc, job, settings, monitor, loader, loss_fn)
    job.control.enter(Phase.BETWEEN, step=0, micro_batch=0)
    return made, made.optimizer, loader, made.scheduler


def _make_engine(
    settings: Config,
    job: Job,
    model: nn.Module,
    optimizer: Any | None,
    lr_scheduler: Any | None,
    loader: MinibatchLoader | None,
) -> Any:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = parts._build_optimizer(
        settings, None if isinstance(optimizer, Optimizer) else optimizer, [{"params": trained}]
    )
    if isinstance(optimizer, Optimizer):
        made = optimizer
    schedule = lr_scheduler
    if schedule is None and settings.scheduler is not None:
        total = None if loader is None else len(loader) * settings.data.num_epochs

        def schedule(basic: Optimizer) -> Any:
            return build_scheduler(settings.scheduler, basic, total)

    if job.device.type == "cpu":
        # DeepSpeed would compile its extension for CPUs first, which serves inference only.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=made,
        lr_scheduler=schedule,
        config=deepspeed_config(settings),
        dist_init_required=False,
    )
    return engine


def deepspeed_config(settings: Config) -> dict[str, Any]:
    """DeepSpeed's configuration: the ``deepspeed`` section, with what odcengine's own keys say."""
    given = settings.deepspeed or {}
    return {
        **given,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.gradient_clipping,
        "bf16": {**given.get("bf16", {}), "enabled": settings.bf16.enabled},
        "zero_optimization": {**given.get("zero_optimization", {}), "stage": 3},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }
