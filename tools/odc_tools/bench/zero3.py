"""DeepSpeed's ZeRO-3 as a method of the training benchmark: as it is, and attached."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import odcengine
from odc_tools.bench.methods import CLIP, Method, Outcome, make_optimizer
from odc_tools.bench.ranks import Ranks
from odc_tools.bench.schedule import MethodName
from odcengine.data.batch import MicroBatch
from odcengine.losses import causal_lm_loss_sum


def why_no_deepspeed() -> str | None:
    """Why DeepSpeed cannot run here; None if it can."""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed (pip install 'odcengine[deepspeed]')"
    return None


def _config() -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # engine.step() is the boundary
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": 3, "overlap_comm": True},
        "zero_allow_untested_optimizer": True,  # torch's fused AdamW, as all methods have
        "steps_per_print": 10**9,
    }


class Zero3(Method):
    """``deepspeed.initialize`` with ZeRO stage 3, its defaults otherwise; gradients are reduced in fp32.

    Of odcengine there are only the attention and the loss of packed rows, as in all methods.
    """

    def __init__(self, name: MethodName, model: nn.Module, ranks: Ranks) -> None:
        import deepspeed

        self.name = name
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._ranks = ranks
        deepspeed.logger.setLevel("WARNING")
        if not ranks.on_gpu:
            # Its extension for CPUs would be compiled first, for a minute, and serves inference only.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        make: Callable[..., torch.optim.Optimizer] = make_optimizer
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=make(model.parameters()), config=_config(), dist_init_required=False
        )
        self._loss = torch.zeros((), device=ranks.device)

    def run(self, micro_batches: Sequence[MicroBatch], num_targets: int, num_own: int | None = None) -> None:
        total = torch.zeros((), device=self._ranks.device)
        # DeepSpeed takes the mean over ranks.
        scale = self._ranks.world_size / num_targets
        for micro_batch in micro_batches:
            loss_sum = causal_lm_loss_sum(self.engine, micro_batch)
            self.engine.backward(loss_sum * scale)
            total += loss_sum.detach()
        self.engine.step()
        self._loss = total / num_targets

    def outcome(self) -> Outcome:
        (loss,) = self._ranks.total([float(self._loss)])
        return Outcome.of(loss, float(self.engine.get_global_grad_norm()), None)

    def close(self) -> None:
        self.engine.destroy()


class OnDemandZero3(Zero3):
    """The same engine with ``odcengine.attach``."""

    def __init__(self, name: MethodName, model: nn.Module, ranks: Ranks, odc: Mapping[str, Any]) -> None:
        super().__init__(name, model, ranks)
        self._attached = odcengine.attach(self.engine, **odc)

    def close(self) -> None:
        self._attached.close()
        super().close()
