"""When a rank draws: late in the work that its device has, so that who is free first gets the next piece.

CUDA is made up: events are places in a stream of work, and done when the device has come past them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from odcengine.device import CudaDevice
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

    def wait_until(self, ready: Callable[[], bool], what: str, awaited: Any, *, everyone: bool) -> float:
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


def make_job(gpu: Gpu) -> tuple[Any, Control]:
    control = Control(gpu)
    job = SimpleNamespace(control=control, device=CudaDevice(0))
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


def test_who_does_not_draw_records_nothing(gpu: Gpu) -> None:
    device = CudaDevice(0)
    for _ in range(3):
        compute(gpu, device, 29)
    assert gpu.num_events == 0
