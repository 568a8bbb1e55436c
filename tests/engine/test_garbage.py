"""When Python's garbage collector runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from odcengine._garbage import QuietGarbage


class _Node:
    other: _Node


def _cycle() -> weakref.ref[_Node]:
    a, b = _Node(), _Node()
    a.other, b.other = b, a
    return weakref.ref(a)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    frozen = gc.get_freeze_count()
    yield
    gc.enable()
    if not frozen:
        gc.unfreeze()


def test_young_cycles_are_collected_at_the_boundary_only() -> None:
    garbage = QuietGarbage(True)
    for step in range(5):
        garbage.pause()
        assert not gc.isenabled()
        dead = _cycle()
        assert dead() is not None, step
        garbage.collect()
        assert gc.isenabled()
        assert dead() is None, step
    assert gc.get_freeze_count() > 0
    garbage.close()
    assert gc.get_freeze_count() == 0


def test_what_the_script_has_set_stays() -> None:
    garbage = QuietGarbage(True)
    gc.disable()
    for _ in range(5):
        garbage.pause()
        garbage.collect()
        assert not gc.isenabled()
    assert gc.get_freeze_count() == 0
    garbage.close()
    assert not gc.isenabled()


def test_what_the_script_has_frozen_stays_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    garbage = QuietGarbage(True)
    for _ in range(5):
        garbage.pause()
        garbage.collect()
    garbage.close()
    assert gc.get_freeze_count() >= before > 0
    gc.unfreeze()


def test_left_in_the_middle() -> None:
    garbage = QuietGarbage(True)
    garbage.pause()
    garbage.close()
    assert gc.isenabled()


def test_switched_off() -> None:
    garbage = QuietGarbage(False)
    garbage.pause()
    assert gc.isenabled()
    garbage.collect()
    garbage.close()
