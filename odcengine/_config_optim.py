"""The sections ``optimizer`` and ``scheduler``: every type, with the parameters that it has."""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeVar, get_args

from pydantic import BaseModel, Field

from odcengine._config_values import Beta, Float, Int, Section


class AdamWParams(Section):
    """Parameters of AdamW; the defaults are DeepSpeed's."""

    lr: Float = Field(default=1e-3, ge=0, description="Learning rate.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="Decay of the two running averages.")
    eps: Float = Field(default=1e-8, ge=0, description="Added to the denominator.")
    weight_decay: Float = Field(
        default=0.0, ge=0, description="Decoupled weight decay (torch's AdamW has 0.01 by default)."
    )
    amsgrad: bool = Field(default=False, description="Use the AMSGrad variant.")
    fused: bool | None = Field(
        default=None, description="torch's fused kernel; null: yes, unless foreach is set."
    )
    foreach: bool | None = Field(default=None, description="torch's multi-tensor code; null: torch decides.")


class AdamParams(AdamWParams):
    """Parameters of Adam; as in DeepSpeed it decouples the weight decay unless told otherwise."""

    weight_decay: Float = Field(default=0.0, ge=0, description="Weight decay; see adam_w_mode.")
    adam_w_mode: bool = Field(
        default=True, description="Decoupled weight decay (AdamW); false: an L2 term, torch's Adam."
    )


class SgdParams(Section):
    """Parameters of SGD; the defaults are torch's."""

    lr: Float = Field(default=1e-3, ge=0, description="Learning rate.")
    momentum: Float = Field(default=0.0, ge=0, description="Momentum.")
    dampening: Float = Field(default=0.0, description="Dampening of the momentum.")
    weight_decay: Float = Field(default=0.0, ge=0, description="L2 weight decay.")
    nesterov: bool = Field(default=False, description="Nesterov momentum; needs momentum > 0, no dampening.")
    fused: bool | None = Field(default=None, description="torch's fused kernel; null lets torch decide.")
    foreach: bool | None = Field(default=None, description="torch's multi-tensor code; null: torch decides.")


class _WarmupParams(Section):
    warmup_num_steps: Int = Field(
        default=1000, ge=0, description="Optimizer steps of warm-up; 0: none; 1 counts as 2, as in DeepSpeed."
    )
    warmup_type: Literal["log", "linear"] = Field(default="log", description="Shape of the warm-up.")


class WarmupLrParams(_WarmupParams):
    """Parameters of DeepSpeed's WarmupLR."""

    warmup_min_lr: Float = Field(default=0.0, ge=0, description="Learning rate of the first step.")
    warmup_max_lr: Float | None = Field(
        default=None, ge=0, description="Learning rate after the warm-up; null: the optimizer's lr."
    )


class WarmupDecayLrParams(WarmupLrParams):
    """Parameters of DeepSpeed's WarmupDecayLR."""

    total_num_steps: Int | None = Field(
        default=None, ge=1, description="Step at which the learning rate reaches 0; null: steps of the run."
    )


class WarmupCosineLrParams(_WarmupParams):
    """Parameters of DeepSpeed's WarmupCosineLR; ratios are relative to the optimizer's lr."""

    warmup_min_ratio: Float = Field(default=0.0, ge=0, le=1, description="Ratio of the first step.")
    cos_min_ratio: Float = Field(default=0.0001, ge=0, le=1, description="Ratio at the end.")
    total_num_steps: Int | None = Field(
        default=None, ge=1, description="Step at which the end is reached; null: steps of the run."
    )


class ConstantLrParams(Section):
    """Parameters of torch's ConstantLR."""

    factor: Float = Field(default=1 / 3, ge=0, le=1, description="Factor on the lr until total_iters.")
    total_iters: Int = Field(default=5, ge=0, description="Steps with the factor.")


class LinearLrParams(Section):
    """Parameters of torch's LinearLR."""

    start_factor: Float = Field(default=1 / 3, gt=0, le=1, description="Factor on the lr at the first step.")
    end_factor: Float = Field(default=1.0, ge=0, le=1, description="Factor on the lr at the end.")
    total_iters: Int = Field(default=5, ge=1, description="Steps until end_factor is reached.")


class CosineAnnealingLrParams(Section):
    """Parameters of torch's CosineAnnealingLR."""

    T_max: Int | None = Field(
        default=None, ge=1, description="Steps from the lr to eta_min; null: steps of the run."
    )
    eta_min: Float = Field(default=0.0, ge=0, description="Smallest learning rate.")


class StepLrParams(Section):
    """Parameters of torch's StepLR."""

    step_size: Int = Field(ge=1, description="Steps between two decays.")
    gamma: Float = Field(default=0.1, ge=0, description="Factor of a decay.")


class MultiStepLrParams(Section):
    """Parameters of torch's MultiStepLR."""

    milestones: tuple[Annotated[Int, Field(ge=0)], ...] = Field(description="Steps of the decays.")
    gamma: Float = Field(default=0.1, ge=0, description="Factor of a decay.")


class ExponentialLrParams(Section):
    """Parameters of torch's ExponentialLR."""

    gamma: Float = Field(ge=0, description="Factor on the lr of every step.")


class PolynomialLrParams(Section):
    """Parameters of torch's PolynomialLR."""

    total_iters: Int = Field(default=5, ge=1, description="Steps until 0 is reached.")
    power: Float = Field(default=1.0, ge=0, description="Power of the polynomial.")


Name = TypeVar("Name", bound=str)
Params = TypeVar("Params", bound=Section)


class Choice(Section, Generic[Name, Params]):
    """An optimizer or schedule by its name, with the parameters that belong to it."""

    type: Name = Field(description="Name, by DeepSpeed's or torch's spelling; case does not matter.")
    params: Params = Field(description="Parameters of the type; {} for the defaults.")


OptimizerConfig = (
    Choice[Literal["Adam"], AdamParams]
    | Choice[Literal["AdamW"], AdamWParams]
    | Choice[Literal["SGD"], SgdParams]
)
SchedulerConfig = (
    Choice[Literal["WarmupLR"], WarmupLrParams]
    | Choice[Literal["WarmupDecayLR"], WarmupDecayLrParams]
    | Choice[Literal["WarmupCosineLR"], WarmupCosineLrParams]
    | Choice[Literal["ConstantLR"], ConstantLrParams]
    | Choice[Literal["LinearLR"], LinearLrParams]
    | Choice[Literal["CosineAnnealingLR"], CosineAnnealingLrParams]
    | Choice[Literal["StepLR"], StepLrParams]
    | Choice[Literal["MultiStepLR"], MultiStepLrParams]
    | Choice[Literal["ExponentialLR"], ExponentialLrParams]
    | Choice[Literal["PolynomialLR"], PolynomialLrParams]
)

PARAMS: dict[str, dict[str, type[BaseModel]]] = {
    section: {
        get_args(choice.model_fields["type"].annotation)[0]: choice.model_fields["params"].annotation
        for choice in get_args(union)
    }
    for section, union in (("optimizer", OptimizerConfig), ("scheduler", SchedulerConfig))
}
"""The parameters' class of every optimizer and scheduler type."""
