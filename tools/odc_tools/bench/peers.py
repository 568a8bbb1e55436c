"""How near to the bound the planners of other trainers come, and how long they take: measured elsewhere.

Run as they are, from their own checkouts (verl b178a3cd, sail-sg/odc 13cfbd35), on one thread of a 2-core
cloud machine, with the costs of a 7B model: verl's Karmarkar-Karp for unequal counts, with the true costs,
and sail-sg's LB-Mini. Their minibatches are draws of the same distributions, other ones than here; their
``sharegpt`` are the lengths of real conversations. Times are those of one ``longalign`` minibatch.
"""

from __future__ import annotations

from dataclasses import dataclass

_SAMPLES = (1, 2, 4, 8, 16)  # a rank and minibatch

# Duration over the bound, mean of the minibatches, at each of _SAMPLES: verl, sail-sg. "-" took too long.
_RATIOS = {
    ("sharegpt", 2): ("1.000 1.024 1.008 1.000 1.000", "1.0000 1.0283 1.0049 1.0001 1.0000"),
    ("sharegpt", 8): ("1.000 1.000 1.000 1.000 1.000", "1.0000 1.0000 1.0000 1.0002 1.0000"),
    ("sharegpt", 32): ("1.000 1.000 1.000 1.000 1.000", "1.0000 1.0000 1.0000 - -"),
    ("sharegpt", 128): ("1.000 1.000 1.000 1.000 1.000", "- - - - -"),
    ("sharegpt", 1024): ("1.000 1.000 1.000 1.000 1.000", "- - - - -"),
    ("longalign", 2): ("1.000 1.034 1.010 1.001 1.000", "1.0000 1.0296 1.0074 1.0002 1.0000"),
    ("longalign", 8): ("1.000 1.000 1.003 1.003 1.000", "1.0000 1.0000 1.0008 1.0006 1.0001"),
    ("longalign", 32): ("1.000 1.000 1.000 1.006 1.001", "1.0000 1.0000 1.0000 1.0002 1.0000"),
    ("longalign", 128): ("1.000 1.000 1.000 1.008 1.002", "1.0000 1.0000 1.0000 1.0001 1.0000"),
    ("longalign", 1024): ("1.000 1.000 1.000 1.007 1.003", "- - - - -"),
    ("swesmith", 2): ("1.000 1.045 1.010 1.001 1.000", "1.0000 1.0426 1.0052 1.0004 1.0000"),
    ("swesmith", 8): ("1.000 1.025 1.022 1.003 1.000", "1.0000 1.0219 1.0066 1.0004 1.0000"),
    ("swesmith", 32): ("1.000 1.005 1.030 1.005 1.000", "1.0000 1.0000 1.0025 1.0002 1.0000"),
    ("swesmith", 128): ("1.000 1.000 1.037 1.007 1.000", "1.0000 1.0000 1.0015 1.0001 1.0000"),
    ("swesmith", 1024): ("1.000 1.000 1.032 1.006 1.002", "- - - - -"),
    ("grpo", 2): ("1.000 1.059 1.012 1.001 1.000", "1.0000 1.0630 1.0073 1.0004 1.0000"),
    ("grpo", 8): ("1.000 1.048 1.025 1.002 1.000", "1.0000 1.0636 1.0042 1.0004 1.0001"),
    ("grpo", 32): ("1.000 1.026 1.035 1.007 1.000", "1.0000 1.0328 1.0028 1.0002 1.0000"),
    ("grpo", 128): ("1.000 1.016 1.028 1.009 1.000", "1.0000 1.0051 1.0009 1.0001 1.0000"),
    ("grpo", 1024): ("1.000 1.000 1.039 1.013 1.000", "- - - - -"),
}

_MILLISECONDS: dict[tuple[int, int], tuple[float, float | None]] = {
    (8, 4): (0.44, 1.2),
    (32, 4): (11.0, 26.0),
    (32, 16): (24.0, 210.0),
    (128, 4): (86.0, 1700.0),
    (128, 16): (490.0, 3800.0),
    (1024, 4): (6000.0, None),  # sail-sg: given up after 180 s
    (1024, 16): (22800.0, None),  # sail-sg: given up after 240 s
}


@dataclass(frozen=True)
class Peer:
    """What a peer's planner reached at one size.

    Attributes:
        name: whose it is.
        above: duration over the bound, less 1; None where it took too long or was not run.
        ms: milliseconds of planning; None where not measured.
    """

    name: str
    above: float | None
    ms: float | None


def peers_at(workload: str, num_ranks: int, samples: int) -> list[Peer]:
    """verl's and sail-sg's figures at a size; empty where there are none."""
    ratios = _RATIOS.get((workload, num_ranks))
    if ratios is None or samples not in _SAMPLES:
        return []
    times = _MILLISECONDS.get((num_ranks, samples), (None, None))
    peers = []
    for name, row, ms in zip(("verl", "sail-sg"), ratios, times, strict=True):
        text = row.split()[_SAMPLES.index(samples)]
        peers.append(Peer(name, None if text == "-" else float(text) - 1, ms))
    return peers
