"""Who gets from whom in the trial of MPI's progress; without MPI."""

from __future__ import annotations

import time

import pytest

from odcengine.transport._mpi_progress import ProgressTrial

LAYOUTS = {
    "two": [[0, 1]],
    "three": [[0, 1, 2]],
    "uneven nodes": [[0, 1], [2]],
    "one a node": [[0], [1], [2]],
    "ranks that are not in a row": [[0, 3], [1, 2]],
    "five nodes": [[2 * node, 2 * node + 1] for node in range(5)],
    "an empty node": [[], [0, 1], []],
}


@pytest.mark.parametrize("nodes", LAYOUTS.values(), ids=LAYOUTS)
def test_nobody_gets_while_somebody_gets_from_it(nodes: list[list[int]]) -> None:
    trial = ProgressTrial(0, nodes, meet=lambda value: [value], get=lambda peer: None)
    peers = {peer for node in nodes for peer in node}
    node_of = {peer: number for number, node in enumerate(nodes) for peer in node}
    within, between = set(), set()
    for turns, owners in trial._rounds():
        assert set(turns) == set(owners) == peers
        assert set(turns.values()) <= {0, 1, 2}
        for peer, owner in owners.items():
            if owner != peer:
                assert turns[owner] != turns[peer]
                (within if node_of[owner] == node_of[peer] else between).add(peer)
    assert within == {peer for node in nodes for peer in node if len(node) > 1}
    assert between == (peers if len([node for node in nodes if node]) > 1 else set())


def test_a_get_that_lasts_as_long_as_the_loop_is_told_to_all() -> None:
    """The verdict of each is a number that all meet with."""
    met: list[int] = []

    def meet(value: int) -> list[int]:
        met.append(value)
        return [value, 0]

    slow = ProgressTrial(0, [[0, 1]], meet=meet, get=_sleep)
    assert not slow.is_served(0.02)
    assert met[-1] == 1
    quick = ProgressTrial(0, [[0, 1]], meet=meet, get=lambda peer: None)
    assert any(quick.is_served(0.1) for _ in range(20))  # another process may have the core
    assert met[-1] == 0
    assert not ProgressTrial(1, [[0, 1]], meet=lambda value: [1, value], get=lambda peer: None).is_served(
        0.02
    )


def _sleep(peer: int) -> None:
    time.sleep(0.02)
