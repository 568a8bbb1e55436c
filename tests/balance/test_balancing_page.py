"""The Python code in docs/balancing.md runs, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "balancing.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_plan_is_the_one_that_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    exec(BLOCKS[0], {})
    (shown, *_) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert capsys.readouterr().out == shown


def test_a_loop_of_ones_own_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(BLOCKS) == 2
    exec(BLOCKS[1], {})
    assert capsys.readouterr().out.startswith("Fit(cost=CostModel(")
