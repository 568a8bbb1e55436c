"""The command line of odc: one sub-command a task, each in a module of its own that is loaded when used."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from odcengine._version import __version__
from odcengine.errors import ConfigError

COMMANDS = {
    "advise": ("odc_tools.advise", "predict what balancing gains for given data, model and GPUs"),
    "bench": ("odc_tools.bench", "measure communication and training against torch's own, and planning"),
    "export": ("odc_tools.export", "write a checkpoint's weights as transformers or peft store them"),
    "prepare": ("odc_tools.prepare", "turn text and conversations into tokens with loss masks"),
    "report": ("odc_tools.report", "draw pictures of what a run has written"),
    "selftest": ("odc_tools.selftest", "test odcengine on this machine: transport, leaks, failures"),
}
"""Name -> module with ``add_arguments(parser)`` and ``run(options) -> exit code``, and one line of help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs odc.

    Args:
        argv: its arguments; the process's own by default.

    Returns:
        The exit code: 0, 1 where the task failed, 2 for mistakes in the arguments.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="odc", description="Tools around odcengine.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"odc {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name in words[:1]:
            importlib.import_module(module).add_arguments(command)
    options = parser.parse_args(words)
    try:
        code: int = importlib.import_module(COMMANDS[options.command][0]).run(options)
        sys.stdout.flush()  # here, where a reader that has gone is expected
    except ConfigError as error:
        for problem in error.problems:
            print(f"odc {options.command}: error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output, such as head, has gone
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # or Python complains again at its exit
        return 128 + signal.SIGPIPE
    return code
