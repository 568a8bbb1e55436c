"""The command line of ``odc-launch``: its options, and what is wrong with a script or a module."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Sequence

from odcengine._version import __version__

_USAGE = (
    "odc-launch [options] script.py ARGS...\n"
    "       odc-launch [options] -m module ARGS...\n"
    "       odc-launch doctor [options]"
)
_EPILOG = """\
Everything after the script or module belongs to it. Ranks get torchrun's environment
(RANK, WORLD_SIZE, LOCAL_RANK, ... MASTER_ADDR, MASTER_PORT), and ODC_CONFIG with --config;
their standard input is empty.

Where ranks run (--launcher auto): inside a step of srun or mpirun each task becomes the rank it is,
or, with one task a node, starts --nproc-per-node ranks; inside an allocation of SLURM one step is
started with srun; with --nodes 2 or more elsewhere a job is submitted; else all run on this host.

`odc-launch doctor` checks this machine, or every node of the allocation that it is started in.

Exit code: 2 for mistakes found before any process starts; else that of the rank that
failed first (128 + N for signal N); 0 if all ranks succeeded.
"""


_TASKS = ("SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")

_OTHERS_OPTIONS = {
    "-n": "--nproc-per-node",
    "-np": "--nproc-per-node",
    "-N": "--nodes",
    "--nproc": "--nproc-per-node",
    "--nnodes": "--nodes",
    "--standalone": None,
    "--rdzv-backend": None,
    "--rdzv-endpoint": None,
    "--master-addr": None,
    "--master-port": None,
    "--node-rank": None,
}
"""Options of torchrun and MPI, and what they are here; None: odc-launch finds out by itself."""


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Splits off the launcher's own options and parses them.

    Returns:
        The options, and ``[script, args...]`` or ``["-m", module, args...]``.
    """
    parser = argparse.ArgumentParser(
        prog="odc-launch",
        usage=_USAGE,
        description="Starts the ranks of a training script: on this host, by SLURM or by MPI.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    with_value = [
        parser.add_argument(
            "--nproc-per-node",
            "--nproc_per_node",
            type=int,
            metavar="N",
            help="ranks to start (default: launch.nproc_per_node of the config, else 1)",
        ),
        parser.add_argument(
            "--config",
            metavar="FILE",
            help="config file (YAML or JSON), checked first and given to the ranks as ODC_CONFIG",
        ),
        parser.add_argument(
            "--log-dir",
            metavar="DIR",
            help="where every rank has its log (default: launch.log_dir of the config, else "
            "odc_logs/DATE-TIME-PID)",
        ),
        parser.add_argument(
            "--show",
            choices=("all", "rank0", "none"),
            help="whose output appears on stdout (default: launch.show of the config, else all); "
            "logs have everything",
        ),
        parser.add_argument(
            "--grace-s",
            type=float,
            metavar="S",
            help="seconds that ranks have to end by themselves after another failed, or after INT or "
            "TERM (default: launch.grace_s of the config, else 30)",
        ),
        parser.add_argument(
            "--launcher",
            choices=("auto", "local", "slurm", "mpi"),
            help="how ranks get to their nodes (default: launch.launcher of the config, else auto)",
        ),
        parser.add_argument(
            "--nodes",
            type=int,
            metavar="N",
            help="number of nodes; outside of an allocation of SLURM a job for them is submitted",
        ),
        parser.add_argument(
            "--max-restarts",
            type=int,
            metavar="N",
            help="how often ranks that failed are started again, on the nodes that are left (default: "
            "launch.max_restarts of the config, else 0)",
        ),
        parser.add_argument("--hostfile", metavar="FILE", help="hosts for mpirun, that of rank 0 first"),
        parser.add_argument("--container-image", metavar="IMAGE", help="passed to srun (pyxis)"),
        *(
            parser.add_argument(
                f"--{program}-arg",
                action="append",
                default=[],
                metavar="OPTION",
                help=f"a further option of {program}, such as --{program}-arg=--{example}; may be repeated",
            )
            for program, example in (("sbatch", "time=60"), ("srun", "mpi=none"), ("mpirun", "bind-to=none"))
        ),
    ]
    parser.add_argument(
        "--adopt", action="store_true", help="this process is a task of srun or mpirun (auto finds out)"
    )
    parser.add_argument("--reported-above", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--plan",
        nargs="?",
        const="text",
        choices=("text", "json"),
        help="print hosts, ranks, devices, interfaces, ports, environment and commands; start nothing "
        "(--plan=json for programs)",
    )
    parser.add_argument(
        "--oversubscribe", action="store_true", help="allow more than 4 ranks per usable core"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands (or the batch script) and start nothing"
    )
    parser.add_argument("--version", action="version", version=f"odc-launch {__version__}")
    # Parsed for their own sake only: the split below finds the script and its arguments, because
    # argparse would take options of the script for the launcher's.
    takes_value = {name for action in with_value for name in action.option_strings}
    end = 0
    while end < len(argv) and argv[end].startswith("-") and argv[end] not in ("-m", "--"):
        end += 2 if argv[end] in takes_value else 1
    options, unknown = parser.parse_known_args(argv[:end])
    if unknown:
        parser.error(_unknown_option(unknown[0], [*parser._option_string_actions]))
    for action in with_value:
        given = getattr(options, action.dest)
        if given == "" or (action.dest in ("nodes", "max_restarts") and given is not None and given < 0):
            told = "is empty (a variable of the shell that is not set?)" if given == "" else f"is {given}"
            parser.error(f"{action.option_strings[0]} {told}")
    if options.nodes == 0:
        parser.error("--nodes is 0: it takes at least 1")
    target = argv[end:]
    if target[:1] == ["--"]:
        target = target[1:]
    if not target or target == ["-m"]:
        parser.error("no script given (script.py, or -m module)")
    return options, target


def misplaced(options: argparse.Namespace, target: list[str]) -> str | None:
    """Words on a number of ranks behind the script, where odc-launch does not read it; else None."""
    script, *rest = target[1:] if target[:1] == ["-m"] else target
    names = [word.partition("=")[0] for word in rest]
    found = next((name for name in names if name in ("--nproc-per-node", "--nproc_per_node")), None)
    if found is None or options.nproc_per_node is not None:
        return None
    return f"{found} stands behind {script}, so it is the script's; options of odc-launch stand before it"


def _unknown_option(word: str, known: Sequence[str]) -> str:
    """Names the option that was meant, as far as one can tell."""
    name = word.partition("=")[0]
    if name.replace("_", "-") in _OTHERS_OPTIONS:
        own = _OTHERS_OPTIONS[name.replace("_", "-")]
        if own is None:
            return f"{name} is not needed: odc-launch finds out (MASTER_ADDR and MASTER_PORT win where set)"
        return f"no option {name}; it is {own} here"
    near = difflib.get_close_matches(name, known, 1, 0.7)
    meant = f"; did you mean {near[0]}?" if near else ""
    script = " (a script of this name: write --, then the script)" if os.path.exists(name) else ""
    return f"no option {name}{meant}{script}"


def script_problems(script: str) -> list[str]:
    """Why Python cannot run a script; empty if it can."""
    if not script:
        return ["the script's name is empty (a variable of the shell that is not set?)"]
    if not os.path.exists(script):
        if shutil.which(script) is not None:
            words = (
                "leave it out" if os.path.basename(script).startswith("python") else "give a Python script"
            )
            return [f"{script} is a program; odc-launch starts Python itself: {words}"]
        return [f"script {script} does not exist (looked in {os.getcwd()}){_lost_folder()}"]
    if os.path.isdir(script):
        return [f"script {script} is a directory; give the Python file, or -m and a module"]
    if not os.access(script, os.R_OK):
        return [f"script {script} cannot be read"]
    interpreter = _interpreter(script)
    if interpreter is not None and "python" not in interpreter:
        return [f"script {script} is for {interpreter}, as its first line says; ranks run it by Python"]
    return []


def _lost_folder() -> str:
    """Why SLURM or MPI started this task elsewhere: its host does not have the launch's folder."""
    folder = os.environ.get("PWD", "")
    if not folder or os.path.isdir(folder) or not any(name in os.environ for name in _TASKS):
        return ""
    return (
        f"; {socket.gethostname()} has no {folder}, where the launch was started: it has to be on a file "
        "system that all nodes share"
    )


def _interpreter(script: str) -> str | None:
    """What the first line of a script names (``#!``), if it does."""
    try:
        if not os.path.isfile(script):  # such as <(...) of a shell, which can be read once
            return None
        with open(script, "rb") as file:
            line = file.readline(200)
    except OSError:
        return None
    return line[2:].decode(errors="replace").strip() if line.startswith(b"#!") else None


def module_problems(module: str) -> list[str]:
    """Why Python cannot find a module; empty if it can."""
    top = module.partition(".")[0]
    # Looked up like python -m does: the working folder first, then every finder, as editable installs have
    # one of their own. Only the top-level package, for looking further would import it.
    sys.path.insert(0, os.getcwd())
    try:
        if top and importlib.util.find_spec(top) is not None:
            return []
    except (ImportError, ValueError):  # of a finder; of a loaded module without a spec
        pass
    finally:
        sys.path.pop(0)
    return [f"module {module!r} is not found in {os.getcwd()} nor on Python's path"]
