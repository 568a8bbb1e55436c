"""When a rank draws: late in the work that its device has, so that who is free first gets the next piece.

CUDA is made up: events are places in a stream of work, and done when the device has come past them. What a
device is told, ranks show on the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from distributed import run_ranks, values
from fsdp2 import toy as fsdp2
from torch import nn

import odcengine
from engine.toy import VOCAB, Case, config_for, loss_of, make_model, micro_batches
from odcengine.device import CpuDevice, CudaDevice
from odcengine.errors import UsageError
from odcengine.start import Job


class Gpu:
    """Work that is enqueued, and how much of it is done."""

    def __init__(self) -> None:
        self.enqueued = 0
        self.done = 0
        self.num_events = 0

    def make_event(self) -> Any:
        self.num_events += 1
        event = SimpleNamespace(place=0)
        event.record = lambda: setattr(event, "place", self.enqueued)
        event.query = lambda: self.done >= event.place
        return event


class Control:
    """A control block that lets the GPU work while it waits, and counts what was drawn."""

    def __init__(self, gpu: Gpu) -> None:
        self.topology = SimpleNamespace(peers=(0, 1), local_rank=0)
        self.gpu = gpu
        self.num = 0
        self.meanwhile: Callable[[], None] = lambda: None

    def wait_until(
        self, ready: Callable[[], bool], what: str, awaited: Any, *, everyone: bool, idle: bool
    ) -> float:
        assert not idle  # the GPU computes meanwhile: no rank waits for another
        while not ready():
            assert self.gpu.done < self.gpu.enqueued, f"waits for ever for {what}"
            self.gpu.done += 1
            self.meanwhile()
        return 0.0

    def num_drawn(self, serial: int) -> int:
        return self.num

    def draw(self, serial: int) -> int:
        self.num += 1
        return self.num - 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda index, priority: None)
    monkeypatch.setattr(torch.cuda, "Event", gpu.make_event)
    return gpu


def make_job(gpu: Gpu, world_size: int = 2) -> tuple[Any, Control]:
    control = Control(gpu)
    topology = SimpleNamespace(world_size=world_size)
    job = SimpleNamespace(control=control, device=CudaDevice(0), topology=topology)
    job.draw = lambda serial, total=None: Job.draw(job, serial, total)  # type: ignore[arg-type]
    return job, control


def compute(gpu: Gpu, device: CudaDevice, groups: int) -> None:
    """Forward in one piece of work a group, and backward in two."""
    gpu.enqueued += groups
    for _ in range(groups):
        gpu.enqueued += 2
        device.gradients_enqueued()
    device.micro_batch_enqueued()


@pytest.mark.parametrize("groups", [3, 29])
def test_the_next_draw_comes_when_two_groups_are_left(gpu: Gpu, groups: int) -> None:
    job, _ = make_job(gpu)
    for number in range(4):
        left = gpu.enqueued - gpu.done
        assert left == 0 if number == 0 else left == 3 * groups
        assert job.draw(1) == number
        assert gpu.enqueued - gpu.done == (0 if number == 0 else 2 * 2)
        gpu.done = gpu.enqueued
        compute(gpu, job.device, groups)


def test_with_fewer_groups_it_comes_at_the_end(gpu: Gpu) -> None:
    job, _ = make_job(gpu)
    job.draw(1)
    compute(gpu, job.device, 2)
    job.draw(1)
    assert gpu.done == gpu.enqueued


def test_marks_of_one_micro_batch_are_not_those_of_the_next(gpu: Gpu) -> None:
    job, _ = make_job(gpu)
    job.draw(1)
    compute(gpu, job.device, 5)
    compute(gpu, job.device, 2)  # a number may stand for two backwards
    job.draw(1)
    assert gpu.done == gpu.enqueued


def test_nobody_waits_once_all_is_drawn(gpu: Gpu) -> None:
    job, control = make_job(gpu)
    job.draw(1, 2)
    compute(gpu, job.device, 29)
    done = gpu.done

    def other_rank() -> None:
        if gpu.done == done + 7:
            control.num += 1  # draws the last one

    control.meanwhile = other_rank
    assert job.draw(1, 2) == 2
    assert gpu.done == done + 7


def test_one_rank_has_nobody_to_leave_work_to(gpu: Gpu) -> None:
    job, _ = make_job(gpu, world_size=1)
    for number in range(3):
        assert job.draw(1) == number
        compute(gpu, job.device, 0)  # FSDP2's collectives tell of no group
        gpu.enqueued += 10
    assert gpu.done == 0


def test_who_does_not_draw_records_nothing(gpu: Gpu) -> None:
    device = CudaDevice(0)
    for _ in range(3):
        compute(gpu, device, 29)
    assert gpu.num_events == 0


CASE = Case("untied", {"tied": False})
GROUPS = 4  # three blocks and the rest


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch.input_ids, 2)
    return F.cross_entropy(logits[0], batch.labels[0], ignore_index=-100, reduction="sum")


def _by_engine(way: str, rank: int) -> int:
    """Computes all of two minibatches; returns in how many micro-batches."""
    samples = [{"input_ids": [(7 * number + at) % VOCAB for at in range(9)]} for number in range(12)]
    engine, _, loader, _ = odcengine.initialize(
        model=make_model(CASE),
        loss_fn=_loss,
        training_data=samples if way == "loader" else None,
        config={
            **config_for(CASE),
            "train_batch_size": 6 if way == "loader" else "auto",
            "balance": {"strategy": "lb_mini" if way == "script" else "dynamic"}
            | {"max_tokens_per_micro_batch": 18},
        },
    )
    minibatches = iter(loader) if loader is not None else None
    (share, *_) = micro_batches(CASE.name, 0, 1, equal=True)
    total = 0
    with engine:
        for _ in range(2):
            if way == "script":
                total += 3
                while engine.draw(3) < 3:
                    loss, count = loss_of(engine, share[0])
                    engine.backward(loss, count=count)
            else:
                given = engine.balance(samples[rank::2]) if minibatches is None else next(minibatches)
                own = [given.plan.begins_with(other) for other in range(2)]
                total += len([*filter(None, own), *given.plan.drawn])
                for micro_batch in given:
                    engine.backward(engine(micro_batch))
            engine.step()
    return total


def _attached(rank: int, world_size: int) -> int:
    fsdp2.meet(rank, world_size)
    model = fsdp2.sharded(CASE)
    optimizer = fsdp2.make_optimizer(model)
    (share, *_) = micro_batches(CASE.name, 0, 1, equal=True)
    with odcengine.attach(model, optimizer) as handle:
        for _ in range(2):
            while handle.draw(3) < 3:
                loss_of(model, share[0])[0].backward()
            handle.collect()
            optimizer.step()
    return 3 * 2


def _told(rank: int, world_size: int, *ways: str) -> list[tuple[str, int]]:
    """Letters, and how many ends all have: a draw (D: all is drawn already), a group, a backward's end."""
    letters: list[str] = []
    found = []

    def wait(device: CpuDevice, control: Any, needless: Callable[[], bool]) -> None:
        letters.append("D" if needless() else "d")

    with mock.patch.multiple(
        CpuDevice,
        gradients_enqueued=lambda device: letters.append("g"),
        micro_batch_enqueued=lambda device: letters.append("e"),
        wait_until_nearly_done=wait,
    ):
        for way in ways:
            total = _attached(rank, world_size) if way == "attach" else _by_engine(way, rank)
            found.append(("".join(letters), total))
            letters.clear()
    return found


@pytest.mark.parametrize("ways", [("script", "loader", "balance"), ("attach",)], ids=["engine", "attach"])
def test_the_device_is_told_of_draws_groups_and_micro_batches(ways: tuple[str, ...]) -> None:
    micro_batch = "g" * GROUPS + "e"
    for way, told in zip(ways, zip(*values(run_ranks(_told, 2, *ways)), strict=True), strict=True):
        begun = micro_batch if way in ("loader", "balance") else ""  # with a plan each rank has its first
        for letters, total in told:
            assert re.fullmatch(f"{begun}(?:d{micro_batch})*[dD]" * 2, letters), (way, told)
            assert sum(others.count("e") for others, _ in told) == total >= 6, (way, told)
        # Who drew the last one knows it.
        assert sum(letters.count("D") for letters, _ in told) >= 2, (way, told)


def test_work_itself_instead_of_how_much_there_is(gpu: Gpu) -> None:
    job, control = make_job(gpu)
    with pytest.raises(UsageError, match=r"draw: expected how much work there is, len\(work\).*got a list"):
        job.draw(1, ["work"])
    assert control.num == 0
