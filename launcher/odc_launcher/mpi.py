"""MPI's launchers: the command that starts the ranks through ``mpirun``. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from odcengine.errors import ConfigError

_PLAIN_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# Beyond what concerns the run: what Python needs to start alike on another host.
_ALSO = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Flavor:
    """How one implementation spells its options.

    Attributes:
        name: the implementation.
        signs: parts of what ``mpirun --version`` prints, any of them.
        export_all: options that carry the whole environment; empty: every name is listed.
        per_node: its option for ranks on a node.
        hostfile: its option for a file of hosts.
    """

    name: str
    signs: tuple[str, ...]
    export_all: tuple[str, ...]
    per_node: tuple[str, ...]
    hostfile: str


FLAVORS = (
    Flavor("Open MPI", ("Open MPI", "OpenRTE", "PRRTE"), (), ("--map-by", "ppr:{}:node"), "--hostfile"),
    Flavor("Intel MPI", ("Intel(R) MPI",), ("-genvall",), ("-ppn", "{}"), "-f"),
    Flavor("MPICH (Hydra)", ("HYDRA",), ("-genvall",), ("-ppn", "{}"), "-f"),
    Flavor("Cray PALS", ("PALS", "mpiexec version"), ("--envall",), ("--ppn", "{}"), "--hostfile"),
)


def flavor_of(version: str) -> Flavor:
    """The implementation, from what its launcher prints for ``--version``.

    Raises:
        ConfigError: it is none that is known.
    """
    for flavor in FLAVORS:
        if any(sign.lower() in version.lower() for sign in flavor.signs):
            return flavor
    known = ", ".join(sorted({flavor.name for flavor in FLAVORS}))
    raise ConfigError(
        f"mpirun is none of {known} (its --version: {version.strip().partition(chr(10))[0]!r}); start the "
        "ranks by it yourself, with odc-launch --adopt before the script"
    )


def mpirun_argv(
    flavor: Flavor,
    inner: Sequence[str],
    *,
    nodes: int,
    nproc: int,
    names: Sequence[str],
    hostfile: str | None = None,
    oversubscribe: bool = False,
    mpirun_args: Sequence[str] = (),
    program: str = "mpirun",
) -> tuple[str, ...]:
    """The command that starts every rank.

    Values are in no argument: MPI takes them from its own environment, byte for byte.

    Args:
        flavor: the implementation.
        inner: the command of each rank.
        nodes: number of nodes.
        nproc: ranks on each.
        names: variables that ranks on other hosts must get.
        hostfile: a file of hosts.
        oversubscribe: more ranks than slots (Open MPI).
        mpirun_args: the user's further options.
        program: ``mpirun`` or ``mpiexec``.
    """
    words = [program, "-np" if flavor.name == "Open MPI" else "-n", str(nodes * nproc)]
    if hostfile is not None:
        words += [flavor.hostfile, hostfile]
    if nodes > 1:
        words += [word.format(nproc) for word in flavor.per_node]
    if oversubscribe and flavor.name == "Open MPI":
        words.append("--oversubscribe")
    words += flavor.export_all
    if not flavor.export_all:
        for name in names:
            words += ["-x", name]
    return (*words, *mpirun_args, *inner)


def exported_names(environ: Mapping[str, str], wanted: Sequence[str], prefixes: tuple[str, ...]) -> list[str]:
    """Names of variables for ranks on other hosts; such as bash's functions have are left out."""
    chosen = {name for name in environ if name.startswith(prefixes) or name in _ALSO} | set(wanted)
    return sorted(name for name in chosen if _PLAIN_NAME.fullmatch(name))
