"""Who is to blame where an awaited rank gives no sign of life: whoever waits itself is a victim."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from odcengine._between_nodes import OtherNodes
from odcengine._hang import RankState, ask_for_stack, report
from odcengine._slots import Slots
from odcengine._words import ACTIVE, Word
from odcengine.errors import DeadlineError
from odcengine.topology import Topology

logger = logging.getLogger(__name__)


class Blame:
    """Watches the signs of life of awaited ranks, and passes them on to those who wait for this rank.

    Args:
        topology: ranks and nodes.
        slots: what the ranks of this node say.
        stack_file: where this rank writes the stacks of its threads; None: nowhere.
    """

    def __init__(self, topology: Topology, slots: Slots, stack_file: Path | None) -> None:
        self._topology = topology
        self._slots = slots
        self._stack_file = stack_file
        self._me = topology.local_rank

    def check(
        self,
        awaited: Sequence[int],
        elsewhere: Sequence[int],
        nodes: OtherNodes | None,
        *,
        everyone: bool,
        start: int,
        limit_s: float,
        what: str,
    ) -> None:
        """Raise where awaited ranks have been silent for too long; to be called now and then while waiting.

        Args:
            awaited: local indices that have not arrived.
            elsewhere: global ranks of other nodes that have not arrived.
            nodes: what is known of the ranks of other nodes.
            everyone: all ranks of the job are awaited and nobody can tell who has arrived; then the limit
                counts from the last progress of any rank.
            start: CLOCK_MONOTONIC (ns) from which silence counts.
            limit_s: longest silence in seconds.
            what: what is awaited, for the message.

        Raises:
            DeadlineError: names the ranks that hold up all others; the first of them is its culprit.
        """
        peers, words = self._topology.peers, self._slots.words
        now = time.monotonic_ns()
        signs = {index: int(words[index, Word.ALIVE_NS]) for index in awaited if index != self._me}
        found: dict[int, tuple[int, bool]] = {}
        if (everyone or elsewhere) and nodes is not None:
            found = nodes.signs_of_life(limit_s)
        remote = {rank: sign for rank, sign in found.items() if everyone or rank in elsewhere}
        by_rank = {peers[index]: sign for index, sign in signs.items()}
        by_rank |= {rank: sign for rank, (sign, _) in remote.items()}
        newest = max(by_rank.values(), default=0)
        # Passing on the sign of the rank waited for keeps victims out of the blame; a circle of waiting
        # ranks only passes the same sign around, and so still ends.
        mine = self._slots.mine
        mine[Word.ALIVE_NS] = max(int(mine[Word.ALIVE_NS]), newest)
        if by_rank:
            mine[Word.LOOKED_NS] = now
            mine[Word.WAITS_FOR] = min(by_rank, key=lambda rank: by_rank[rank]) + 1
        latest = now - int(limit_s * 1e9)
        if start > latest or (everyone and newest > latest):
            return
        silent = [index for index, sign in signs.items() if sign < latest]
        silent_remote = [rank for rank, (sign, _) in remote.items() if sign < latest]
        if not everyone:
            # Nodes pass no signs on, so one that waits itself is given up only when nobody moves any more.
            moved = max([sign for sign, _ in found.values()] + words[:, Word.PROGRESS_NS].tolist())
            silent_remote = [rank for rank in silent_remote if moved < latest or not remote[rank][1]]
        if not silent and not silent_remote:
            return
        # Those who wait for somebody themselves are victims.
        silent = list(dict.fromkeys(self._follow(index, latest) for index in silent))
        stuck = [index for index in silent if not self._slots.is_waiting(index)]
        stuck_remote = [rank for rank in silent_remote if not remote[rank][1]]
        if stuck or stuck_remote:
            silent, silent_remote = stuck, stuck_remote
        describe, where = self._slots.describe, self._slots.where
        names = [f"{describe(index)}, in {where(index)}" for index in silent]
        names += [self._topology.describe(rank) for rank in silent_remote]
        blamed = [*(peers[index] for index in silent), *silent_remote]
        told = self.tell_places(blamed)
        raise DeadlineError(
            f"no sign of life for {limit_s:g} s (odc.timeout_s) from {'; '.join(names)}. "
            f"{describe(self._me)} waited in {where(self._me)} for: {what}",
            blamed[0],
            report=told,
        )

    def tell_places(self, blamed: Sequence[int]) -> str:
        """Log where the ranks of this node are, and have them write their stacks; returns what was logged."""
        states = []
        for index, rank in enumerate(self._topology.peers):
            words = self._slots.words[index]
            if words[Word.STATE] != ACTIVE:
                continue
            states.append(
                RankState(
                    rank,
                    self._slots.place(index),
                    int(words[Word.WAITS_FOR]) - 1 if self._slots.is_waiting(index) else None,
                    (time.monotonic_ns() - int(words[Word.PROGRESS_NS])) / 1e9,
                )
            )
            if words[Word.DUMPS] and self._slots.is_alive(index):
                ask_for_stack(int(words[Word.PID]))
        lines = [report(states, blamed, self._topology.world_size - len(self._topology.peers))]
        if self._stack_file is not None:
            lines.append(
                f"the Python stacks of their threads: {self._stack_file.with_name('stack-rank*.txt')}"
            )
        told = "\n".join(lines)
        logger.error("%s", told)
        return told

    def _follow(self, index: int, latest: int) -> int:
        """The end of the chain of ranks of this node in which each waits for the next; itself in a circle.

        A rank that has not looked around lately may be stopped, or a victim that got no time to look: it is
        one where the rank that it waits for does not wait and gave no sign since ``latest`` (ns).
        """
        end, seen = index, {self._me}
        while end not in seen:
            seen.add(end)
            rank = int(self._slots.words[end, Word.WAITS_FOR]) - 1
            if rank not in self._topology.peers:
                return end
            awaited = self._topology.peers.index(rank)
            words = self._slots.words[awaited]
            no_suspect = awaited == self._me or words[Word.WAITS_FOR] or words[Word.ALIVE_NS] >= latest
            if no_suspect and not self._slots.is_waiting(end):
                return end
            end = awaited
        return index
