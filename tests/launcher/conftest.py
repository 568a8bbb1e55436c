"""The launcher's tests start odc-launch through the fixture ``launcher``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_helpers import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    own = Launcher(tmp_path)
    yield own
    for process in own.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
