"""The command line of odc-launch."""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from odcengine._version import __version__
from odcengine.errors import ConfigError

if TYPE_CHECKING:
    from odc_launcher.plan import Machine
    from odcengine.config import Launch

_USAGE = "odc-launch [options] script.py ARGS...\n       odc-launch [options] -m module ARGS..."
_EPILOG = """\
Everything after the script or module belongs to it. Ranks get torchrun's environment
(RANK, WORLD_SIZE, LOCAL_RANK, ... MASTER_ADDR, MASTER_PORT), and ODC_CONFIG with --config.

Exit code: 2 for mistakes found before any process starts; else that of the rank that
failed first (128 + N for signal N); 0 if all ranks succeeded.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs odc-launch.

    Args:
        argv: its arguments; the process's own by default.

    Returns:
        The exit code.
    """
    options, target = _parse(sys.argv[1:] if argv is None else list(argv))
    try:
        return _launch(options, target)
    except ConfigError as error:
        for problem in error.problems:
            print(f"odc-launch: error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the ranks were started
        return 130


def _launch(options: argparse.Namespace, target: list[str]) -> int:
    # Imported here, so that --help answers at once.
    from odc_launcher import plan as planning

    is_module = target[0] == "-m"
    name, *args = target[1:] if is_module else target
    problems = _module_problems(name) if is_module else _script_problems(name)
    settings = None
    if options.config is not None:
        try:
            settings = _launch_settings(options.config)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)

    def choose(option: Any, key: str, default: Any) -> Any:
        """The command line wins over the config file, which wins over the default."""
        if option is not None:
            return option
        configured = getattr(settings, key, None)
        return default if configured is None else configured

    request = planning.Request(
        target=name,
        is_module=is_module,
        args=tuple(args),
        nproc=options.nproc_per_node,
        config_path=options.config,
        config_nproc=choose(None, "nproc_per_node", None),
        log_dir=choose(options.log_dir, "log_dir", None),
        show=choose(options.show, "show", "all"),
        oversubscribe=options.oversubscribe,
        grace_s=choose(options.grace_s, "grace_s", planning.DEFAULT_GRACE_S),
        signals=choose(None, "signals", planning.DEFAULT_SIGNALS),
    )
    plan = planning.make_plan(request, os.environ, _machine(os.environ))
    for warning in plan.warnings:
        print(f"odc-launch: warning: {warning}", file=sys.stderr)
    if options.dry_run:
        sys.stdout.flush()
        sys.stdout.buffer.write(os.fsencode(planning.render(plan, os.environ)))
        return 0
    print(f"odc-launch: {plan.summary}", file=sys.stderr, flush=True)
    from odc_launcher import local

    return local.run(plan)


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Splits off the launcher's own options and parses them.

    Returns:
        The options, and ``[script, args...]`` or ``["-m", module, args...]``.
    """
    parser = argparse.ArgumentParser(
        prog="odc-launch",
        usage=_USAGE,
        description="Starts the ranks of a training script on this host.",
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
    ]
    parser.add_argument(
        "--oversubscribe", action="store_true", help="allow more than 4 ranks per usable core"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands of the ranks and start nothing"
    )
    parser.add_argument("--version", action="version", version=f"odc-launch {__version__}")
    # Parsed for their own sake only: the split below finds the script and its arguments, because
    # argparse would take options of the script for the launcher's.
    takes_value = {name for action in with_value for name in action.option_strings}
    end = 0
    while end < len(argv) and argv[end].startswith("-") and argv[end] not in ("-m", "--"):
        end += 2 if argv[end] in takes_value else 1
    options = parser.parse_args(argv[:end])
    target = argv[end:]
    if target[:1] == ["--"]:
        target = target[1:]
    if not target or target == ["-m"]:
        parser.error("no script given (script.py, or -m module)")
    return options, target


def _script_problems(script: str) -> list[str]:
    if not os.path.exists(script):
        return [f"script {script} does not exist (looked in {os.getcwd()})"]
    if os.path.isdir(script):
        return [f"script {script} is a directory; give the Python file, or -m and a module"]
    if not os.access(script, os.R_OK):
        return [f"script {script} cannot be read"]
    return []


def _module_problems(module: str) -> list[str]:
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


def _launch_settings(path: str) -> Launch:
    """Checks the whole config file; returns what it says about launching."""
    if not os.path.exists(path):
        raise ConfigError(f"config {path} does not exist (looked in {os.getcwd()})")
    if os.path.isdir(path):
        raise ConfigError(f"config {path} is a directory; give a YAML or JSON file")
    from odcengine.config import load_config

    try:
        return load_config(path).launch
    except OSError as error:
        raise ConfigError(f"config {path} cannot be read: {error.strerror}") from error


def _machine(environ: Mapping[str, str]) -> Machine:
    from odc_launcher import machine, plan

    cores, cores_from = machine.usable_cores()
    return plan.Machine(
        host=socket.gethostname(),
        cores=cores,
        cores_from=cores_from,
        master_port=machine.master_port(environ.get("MASTER_PORT")),
        python=sys.executable,
        cwd=os.getcwd(),
        run_name=f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
    )
