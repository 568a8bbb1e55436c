"""Listing GPUs: against a library that answers as NVML does, and drivers that do not answer."""

from __future__ import annotations

import ctypes
import json
import os
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from odcengine.host import nvml

NOT_SUPPORTED = 3
NO_PERMISSION = 4


class Library:
    """Three GPUs: 0 with MIG, 1 without permission, 2 linked with 0."""

    nvmlErrorString = staticmethod(lambda status: f"status {status}".encode())
    PCI: ClassVar = {10: (0, 0x1B), 12: (1, 0xA3)}  # handle -> domain, bus

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlSystemGetDriverVersion(self, buffer: Any, length: int) -> int:
        buffer.value = b"570.86.15"
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, out: Any) -> int:
        out._obj.value = 12080
        return 0

    def nvmlDeviceGetCount_v2(self, out: Any) -> int:
        out._obj.value = 3
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, out: Any) -> int:
        out._obj.value = 10 + index.value
        return NO_PERMISSION if index.value == 1 else 0

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, out: Any) -> int:
        out._obj.domain, out._obj.bus = self.PCI[handle.value]
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, out: Any) -> int:
        out._obj.total = 80 << 30
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, length: int) -> int:
        buffer.value = f"{'MIG' if handle.value >= 100 else 'GPU'}-{handle.value}".encode()
        return 0

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, length: int) -> int:
        buffer.value = b"NVIDIA H100 80GB HBM3"
        return 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, out: Any) -> int:
        out._obj.value = 7
        return 0 if handle.value == 10 else NOT_SUPPORTED

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, out: Any) -> int:
        out._obj.value = 100 + index.value
        return 0 if index.value in (0, 2) else 6  # instances need not be consecutive

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: Any, out: Any) -> int:
        out._obj.value = int(link.value < 2)
        return 0 if link.value < 4 else NOT_SUPPORTED

    def nvmlDeviceGetNvLinkRemotePciInfo_v2(self, handle: Any, link: Any, out: Any) -> int:
        out._obj.domain, out._obj.bus = self.PCI[22 - handle.value]
        return 0

    def nvmlDeviceGetP2PStatus(self, one: Any, other: Any, kind: Any, out: Any) -> int:
        out._obj.value = 5 if kind.value == 3 else 0  # no atomics
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name, **_: made)
    return made


def test_what_the_driver_tells(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    assert nvml.main() == 0
    found = nvml.parse(json.loads(capsys.readouterr().out))
    assert (found.driver, found.cuda, found.error) == ("570.86.15", "12.8", None)
    first, second = found.gpus
    assert (first.index, second.index) == (0, 2)  # one may not be opened
    assert (first.pci, second.pci) == ("0000:1b:00.0", "0001:a3:00.0")
    assert (first.uuid, first.name, first.memory_bytes) == ("GPU-10", "NVIDIA H100 80GB HBM3", 80 << 30)
    assert (first.mig, second.mig) == (("MIG-100", "MIG-102"), ())
    assert first.links == ("0001:a3:00.0",) * 2
    assert first.peers == {"0001:a3:00.0": (True, True, False)}


def test_questions_that_an_old_driver_does_not_know(
    library: Library, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("GetNvLinkState", "GetMaxMigDeviceCount", "GetP2PStatus"):
        monkeypatch.delattr(Library, f"nvmlDevice{name}")
    nvml.main()
    first, _ = nvml.parse(json.loads(capsys.readouterr().out)).gpus
    assert (first.mig, first.links) == ((), ())
    assert first.peers == {}  # not known is not forbidden


def test_a_driver_that_refuses(
    library: Library, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Library, "nvmlInit_v2", lambda self: 9)
    nvml.main()
    found = nvml.parse(json.loads(capsys.readouterr().out))
    assert found.error == "nvmlInit_v2: status 9"


def test_a_host_without_a_driver(tmp_path: Path) -> None:
    assert nvml.read_gpus(tmp_path) == nvml.Gpus()


def test_a_driver_that_hangs_or_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    program.chmod(0o755)
    monkeypatch.setattr(nvml.sys, "executable", os.fspath(program))
    start = time.monotonic()
    assert nvml.read_gpus(tmp_path, 0.3).error == "the driver did not list the GPUs within 0.3 s"
    assert time.monotonic() - start < 28
    program.write_text("#!/bin/sh\necho 'boom' >&2\nexit 3\n")
    assert nvml.read_gpus(tmp_path).error == "the GPUs could not be listed: boom"
    program.write_text("#!/bin/sh\necho no json\n")
    assert "could not be listed" in str(nvml.read_gpus(tmp_path).error)
