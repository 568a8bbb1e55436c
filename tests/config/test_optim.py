"""Optimizers and schedules built from a configuration, against values worked out by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from odcengine.config import Config, load_config
from odcengine.errors import ConfigError
from odcengine.optim import build_optimizer, build_scheduler


def config_of(scheduler: dict[str, Any] | None = None, **optimizer: Any) -> Config:
    optimizer.setdefault("type", "SGD")
    return load_config({"train_batch_size": 8, "optimizer": optimizer, "scheduler": scheduler})


def optimizer_of(tensors: list[torch.Tensor], **optimizer: Any) -> torch.optim.Optimizer:
    config = config_of(**optimizer)
    assert config.optimizer is not None
    return build_optimizer(config.optimizer, tensors)


def learning_rates(
    scheduler: dict[str, Any], num_steps: int, lr: float = 1.0, total: int | None = None
) -> list[float]:
    """Returns the learning rates of optimizer steps 1 .. ``num_steps``."""
    optimizer, schedule = build(scheduler, lr, total)
    return run(optimizer, schedule, num_steps)


def build(
    scheduler: dict[str, Any], lr: float = 1.0, total: int | None = None
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    config = config_of(scheduler, params={"lr": lr})
    assert config.optimizer is not None
    optimizer = build_optimizer(config.optimizer, [torch.zeros(1, requires_grad=True)])
    schedule = build_scheduler(config.scheduler, optimizer, total)
    assert schedule is not None
    return optimizer, schedule


def run(optimizer: torch.optim.Optimizer, schedule: LRScheduler, num_steps: int) -> list[float]:
    rates = []
    for _ in range(num_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return rates


# DeepSpeed takes the first two steps at iteration 0 (deepspeed/runtime/lr_schedules.py starts at -1).
LINEAR = {"warmup_num_steps": 4, "warmup_type": "linear"}
LOG = {"warmup_num_steps": 4, "warmup_type": "log"}
SCHEDULES: list[tuple[str, dict[str, Any], float, list[float]]] = [
    (
        "WarmupLR",
        LINEAR | {"warmup_min_lr": 0.1, "warmup_max_lr": 0.9},
        7.0,
        [0.1, 0.1, 0.3, 0.5, 0.7, 0.9, 0.9, 0.9],
    ),
    # ln(i + 1) / ln(4) for i = 0, 1, 2, 3
    ("WarmupLR", LOG | {"warmup_max_lr": 2.0}, 7.0, [0.0, 0.0, 1.0, 1.5849625007211562, 2.0, 2.0, 2.0]),
    ("WarmupLR", LINEAR, 8.0, [0.0, 0.0, 2.0, 4.0, 6.0, 8.0, 8.0]),
    ("WarmupLR", {"warmup_num_steps": 1}, 8.0, [0.0, 0.0, 8.0, 8.0]),
    ("WarmupLR", {"warmup_num_steps": 0}, 8.0, [8.0, 8.0, 8.0]),
    (
        "WarmupDecayLR",
        {"warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": 6},
        1.0,
        [0.0, 0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0],
    ),
    (
        "WarmupDecayLR",
        {
            "warmup_num_steps": 2,
            "warmup_type": "linear",
            "total_num_steps": 4,
            "warmup_min_lr": 0.2,
            "warmup_max_lr": 1.0,
        },
        9.0,
        [0.2, 0.2, 0.6, 1.0, 0.6, 0.2, 0.2],
    ),
    (
        "WarmupCosineLR",
        {
            "warmup_num_steps": 2,
            "warmup_type": "linear",
            "warmup_min_ratio": 0.5,
            "cos_min_ratio": 0.1,
            "total_num_steps": 6,
        },
        2.0,
        [1.0, 1.0, 1.5, 1.7363961030678928, 1.1, 0.46360389693210728, 0.2, 0.2, 0.2],
    ),
    ("ConstantLR", {"factor": 0.5, "total_iters": 2}, 4.0, [2.0, 2.0, 4.0, 4.0]),
    ("LinearLR", {"start_factor": 0.25, "total_iters": 3}, 4.0, [1.0, 2.0, 3.0, 4.0, 4.0]),
    ("CosineAnnealingLR", {"T_max": 2, "eta_min": 1.0}, 3.0, [3.0, 2.0, 1.0]),
    ("StepLR", {"step_size": 2}, 1.0, [1.0, 1.0, 0.1, 0.1, 0.01]),
    ("MultiStepLR", {"milestones": [1, 3], "gamma": 0.5}, 1.0, [1.0, 0.5, 0.5, 0.25]),
    ("ExponentialLR", {"gamma": 0.5}, 1.0, [1.0, 0.5, 0.25]),
    ("PolynomialLR", {"total_iters": 4}, 1.0, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
]
IDS = [f"{kind}-{number}" for number, (kind, *_) in enumerate(SCHEDULES)]


@pytest.mark.parametrize(("kind", "params", "lr", "expected"), SCHEDULES, ids=IDS)
def test_learning_rates(kind: str, params: dict[str, Any], lr: float, expected: list[float]) -> None:
    rates = learning_rates({"type": kind, "params": params}, len(expected), lr)
    assert rates == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(("kind", "params", "lr", "expected"), SCHEDULES, ids=IDS)
def test_schedule_goes_on_from_its_state(
    kind: str, params: dict[str, Any], lr: float, expected: list[float]
) -> None:
    """Saved after every possible number of steps and loaded into fresh objects."""
    scheduler = {"type": kind, "params": params}
    for steps in range(len(expected)):
        optimizer, schedule = build(scheduler, lr)
        run(optimizer, schedule, steps)
        saved = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
        optimizer, schedule = build(scheduler, lr)
        optimizer.load_state_dict(saved[0])
        schedule.load_state_dict(saved[1])
        rates = run(optimizer, schedule, len(expected) - steps)
        assert rates == pytest.approx(expected[steps:], rel=1e-12, abs=1e-15)


def test_state_is_plain_data() -> None:
    _, schedule = build({"type": "WarmupDecayLR", "params": {"total_num_steps": 5}})
    flat = [
        x for value in schedule.state_dict().values() for x in (value if isinstance(value, list) else [value])
    ]
    assert all(value is None or isinstance(value, (int, float, str)) for value in flat)


def test_length_of_the_run_is_used_where_the_schedule_leaves_it_open() -> None:
    params = {"warmup_num_steps": 2, "warmup_type": "linear"}
    open_end = {"type": "WarmupDecayLR", "params": params}
    given = {"type": "WarmupDecayLR", "params": params | {"total_num_steps": 6}}
    assert learning_rates(open_end, 9, total=6) == learning_rates(given, 9, total=100)
    cosine = learning_rates({"type": "CosineAnnealingLR"}, 3, lr=3.0, total=2)
    assert cosine == pytest.approx([3.0, 1.5, 0.0])
    for kind, key in (("WarmupCosineLR", "total_num_steps"), ("CosineAnnealingLR", "T_max")):
        with pytest.raises(ConfigError, match=f"scheduler.params.{key}: missing"):
            learning_rates({"type": kind}, 1)


def test_every_group_keeps_its_own_learning_rate() -> None:
    config = config_of({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, params={"lr": 1.0})
    assert config.optimizer is not None
    groups: list[dict[str, Any]] = [
        {"params": [torch.zeros(1, requires_grad=True)]},
        {"params": [torch.zeros(1, requires_grad=True)], "lr": 0.1},
    ]
    optimizer = build_optimizer(config.optimizer, groups)
    schedule = build_scheduler(config.scheduler, optimizer)
    assert schedule is not None
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.1]


def test_no_scheduler() -> None:
    optimizer = optimizer_of([torch.zeros(1, requires_grad=True)])
    assert build_scheduler(None, optimizer) is None


def step_from_one(**optimizer: Any) -> float:
    """Returns the parameter 1.0 after one step with gradient 2.0."""
    param = torch.ones(1, dtype=torch.float64, requires_grad=True)
    built = optimizer_of([param], **optimizer)
    param.grad = torch.full_like(param, 2.0)
    built.step()
    return float(param.detach())


def test_optimizers_by_one_step() -> None:
    # Adam's first update is lr x g / (|g| + eps), whatever g.
    assert step_from_one(type="AdamW", params={"lr": 0.1, "eps": 0.0}) == pytest.approx(0.9)
    decay = {"lr": 0.1, "eps": 0.0, "weight_decay": 0.5}
    # decoupled: 1 x (1 - lr x wd) - lr
    assert step_from_one(type="AdamW", params=decay) == pytest.approx(0.85)
    assert step_from_one(type="Adam", params=decay) == pytest.approx(0.85)
    # L2: the decay only changes g, which the first step normalises away
    assert step_from_one(type="Adam", params=decay | {"adam_w_mode": False}) == pytest.approx(0.9)
    # SGD: 1 - lr x (g + wd)
    assert step_from_one(type="SGD", params={"lr": 0.1, "weight_decay": 0.5}) == pytest.approx(0.75)
    # nesterov, first step: 1 - lr x (g + momentum x g)
    nesterov = {"lr": 0.1, "momentum": 0.5, "nesterov": True}
    assert step_from_one(type="SGD", params=nesterov) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"type": "Adam"}, torch.optim.AdamW),
        ({"type": "FusedAdam"}, torch.optim.AdamW),
        ({"type": "adamw"}, torch.optim.AdamW),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, torch.optim.Adam),
        ({"type": "sgd"}, torch.optim.SGD),
    ],
)
def test_optimizer_class_and_options(optimizer: dict[str, Any], expected: type) -> None:
    params = {"lr": 3e-4, "weight_decay": 0.2, "fused": False, "foreach": True}
    given = optimizer | {"params": optimizer.get("params", {}) | params}
    built = optimizer_of([torch.zeros(1, requires_grad=True)], **given)
    assert type(built) is expected
    assert {key: built.param_groups[0][key] for key in params} == params


def test_default_weight_decay_is_deepspeeds() -> None:
    built = optimizer_of([torch.zeros(1, requires_grad=True)], type="AdamW")
    assert built.param_groups[0]["weight_decay"] == 0.0
    assert built.param_groups[0]["lr"] == 1e-3
    assert built.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD"])
def test_optimizer_state_round_trip(kind: str) -> None:
    params = {"lr": 0.1} | ({"momentum": 0.9} if kind == "SGD" else {"amsgrad": True})

    def steps(param: torch.Tensor, built: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            param.grad = torch.full_like(param, float(number % 3) - 0.5)
            built.step()

    straight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    built = optimizer_of([straight], type=kind, params=params)
    steps(straight, built, range(6))
    broken = torch.ones(3, dtype=torch.float64, requires_grad=True)
    first = optimizer_of([broken], type=kind, params=params)
    steps(broken, first, range(3))
    second = optimizer_of([broken], type=kind, params=params)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(broken, second, range(3, 6))
    assert torch.equal(straight, broken)
