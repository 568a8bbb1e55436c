"""What one launcher says of this process, and whether what several say fits together.

Launchers are started by one another: those around the innermost one count the same ranks, or only carried it
to the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from odcengine.errors import ConfigError


@dataclass(frozen=True)
class LauncherTable:
    """The environment names that one launcher uses.

    Args:
        name: the launcher, as messages call it.
        required: field of ``RankInfo`` -> name of the variable. The first identifies the launcher, and all
            must be set.
        optional: the same, for variables that may be missing.
        marker: a variable that must be set too, where two launchers share names.
        unless: a variable that must not be set: then the other one of the two has left them.
        job: variables that name the job, equal on all its ranks and different in another.
        starts_mpi: MPI can start in the processes that have these variables.
    """

    name: str
    required: Mapping[str, str]
    optional: Mapping[str, str]
    marker: str | None = None
    unless: str | None = None
    job: tuple[str, ...] = ()
    starts_mpi: bool = True


@dataclass(frozen=True)
class Claim:
    """What one launcher says; ``words`` has the variables and values behind each number, for messages."""

    table: LauncherTable
    numbers: Mapping[str, int]
    words: Mapping[str, str]

    def get(self, key: str) -> int | None:
        return self.numbers.get(key)

    def tell(self) -> str:
        keys = [key for key in ("rank", "world_size") if key in self.numbers]
        return f"{self.table.name} ({', '.join(self.words[key] for key in keys)})"


def counts_the_same(first: Claim, other: Claim, claims: Sequence[Claim], elastic: bool) -> bool:
    """Whether another launcher counts the same ranks; False where it only carried the first to the nodes.

    Raises:
        ConfigError: neither.
    """
    size = other.get("world_size")
    if other.get("rank") == first.get("rank") and size in (None, first.get("world_size")):
        return True
    if size is None:  # PMIx: what is around it may tell
        around = next((c for c in claims if c is not other and c.get("rank") == other.get("rank")), None)
        carries = around is not None and _carries(around, first, elastic)
    else:
        carries = _carries(other, first, elastic)
    if not carries:
        raise ConfigError(
            f"environment: {first.tell()} contradicts {other.tell()}: this process cannot be both; unset "
            f"what is left over from elsewhere ({_unset(first)}, or {_unset(other)}), or start it by one of "
            "them only"
        )
    return False


def _carries(outer: Claim, inner: Claim, elastic: bool) -> bool:
    """Whether a launcher may have started another one once a node (MPI's daemons, odc-launch, torchrun)."""
    size, inner_size = outer.get("world_size"), inner.get("world_size")
    if size is None or inner_size is None or size > inner_size:
        return False
    if inner.table.name == "torchrun":
        if size not in (1, inner.get("num_nodes") or size):
            return False
        if size == inner_size and not elastic:  # one rank a node: only torchrun's agents number them anew
            return False
    if outer.get("num_nodes") is not None:
        return size == outer.get("num_nodes")
    return size == 1 or outer.get("local_world_size") == 1


def _unset(claim: Claim) -> str:
    told = claim.tell()
    return "env " + " ".join(f"-u {name}" for name in claim.table.required.values() if name in told)


def compare_places(claims: Sequence[Claim]) -> None:
    """Launchers that count the same ranks must agree on the node as well."""
    first = claims[0]
    for other in claims[1:]:
        for key in ("local_rank", "local_world_size"):
            if first.get(key) is not None and other.get(key) not in (None, first.get(key)):
                raise ConfigError(
                    f"environment: {first.words[key]} ({first.table.name}) contradicts {other.words[key]} "
                    f"({other.table.name}): both speak of this rank's place on its node"
                )


def whole_number(env: Mapping[str, str], name: str) -> int:
    """The value of a variable that is set.

    Raises:
        ConfigError: it is no whole number of 0 or more.
    """
    try:
        value = int(env[name])
    except ValueError:
        raise ConfigError(
            f"environment: {name}={env[name]!r} is not a whole number; it must be one that the launcher set"
        ) from None
    if value < 0:
        raise ConfigError(f"environment: {name}={value} is negative; it must be 0 or more")
    return value
