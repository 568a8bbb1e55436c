"""For all tests with DeepSpeed."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _compiled(compiled_deepspeed: None) -> None:
    """No deadline of a test has DeepSpeed's compiling in it."""
