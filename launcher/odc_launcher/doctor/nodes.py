"""One task on every node: what it does, how it is started, and how its facts come back."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odc_launcher import cli, mpi, slurm, step
from odc_launcher.doctor import facts as gathering
from odc_launcher.doctor import probe
from odc_launcher.doctor.facts import NodeFacts
from odc_launcher.doctor.finding import ERROR, Finding
from odc_launcher.placing import Wish, outer_rank
from odc_launcher.plan import SHOWN_PREFIXES
from odcengine.errors import ConfigError
from odcengine.host.nvshmem_env import Job
from odcengine.ranks import job_port

if TYPE_CHECKING:
    from odcengine.config import Config

_MARK = "@odc-node"
_CHUNK = 160  # srun may cut or join long lines of several tasks
_STOP_S = 15.0
# One task a node needs no order of ranks, and has the cores and GPUs of all.
_OF_RANKS = (
    "SLURM_HOSTFILE",
    "SLURM_DISTRIBUTION",
    "SLURM_CPUS_PER_TASK",
    "SRUN_CPUS_PER_TASK",
    "SLURM_GPUS_PER_TASK",
    "SLURM_TRES_PER_TASK",
    "SLURM_NTASKS_PER_GPU",
    *slurm.CORE_MASK,
)


def be_a_node(
    config_path: str | None, num_nodes: int, address: str, port: int, token: str, timeout_s: float
) -> int:
    """One task of the step that runs on every node: prints its facts."""
    config, config_hash = None, None
    if config_path is not None:
        with contextlib.suppress(ConfigError, OSError):
            config, config_hash = cli.load(config_path), cli.file_hash(config_path)
    found = gathering.gather(
        environ_of(config),
        job_of_config(config, several_nodes=num_nodes > 1),
        master_addr=address,
        config_hash=config_hash,
        token=token,
    )
    index = outer_rank(os.environ).rank
    found.probe = probe.run(index, num_nodes, address, port, timeout_s)
    sys.stdout.write(encode(index, gathering.to_json(found)))
    sys.stdout.flush()
    return 0


def encode(index: int, data: Mapping[str, Any]) -> str:
    """Facts as short lines that survive beside those of other tasks."""
    text = base64.b64encode(json.dumps(data).encode()).decode()
    parts = [text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK)]
    return "".join(f"{_MARK} {index} {number} {len(parts)} {part}\n" for number, part in enumerate(parts))


def decode(output: str) -> dict[int, dict[str, Any]]:
    """The facts of all nodes whose lines are complete, by index."""
    parts: dict[int, dict[int, str]] = {}
    counts: dict[int, int] = {}
    for line in output.splitlines():
        words = line[line.find(_MARK) :].split() if _MARK in line else []
        if len(words) == 5:
            index, number, count = map(int, words[1:4])
            parts.setdefault(index, {})[number] = words[4]
            counts[index] = count
    return {
        index: json.loads(base64.b64decode("".join(found[number] for number in sorted(found))))
        for index, found in sorted(parts.items())
        if len(found) == counts[index]
    }


def ask_nodes(
    mode: str,
    wish: Wish,
    hosts: Sequence[str],
    *,
    config_path: str | None,
    folder: Path,
    timeout_s: float,
) -> tuple[list[NodeFacts], list[Finding]]:
    """Facts of all nodes that answer, and findings about those that do not.

    Args:
        mode: ``slurm`` or ``mpi``.
        wish: how ranks would be started.
        hosts: the nodes.
        config_path: configuration of the job.
        folder: where logs go; the nodes look for a file in it.
        timeout_s: longest time for all answers.

    Raises:
        ConfigError: no node answers at all.
    """
    address = os.environ.get("MASTER_ADDR") or cli.address_of(hosts[0])
    port = os.environ.get("MASTER_PORT") or str(job_port(f"doctor {uuid.uuid4()}"))
    token = folder / "token"
    token.write_text("the log folder is shared with the nodes that see this\n")
    inner = [sys.executable, "-u", "-m", "odc_launcher", "doctor"]
    if config_path is not None:
        inner += ["--config", os.path.abspath(config_path)]
    inner += ["--node", str(len(hosts)), address, port, os.path.abspath(token), str(0.8 * timeout_s)]
    environ = environ_of_node(os.environ)
    if mode == "slurm":
        shape = slurm.Shape(tuple(hosts), (1,) * len(hosts), len(hosts), 1, "doctor")
        argv = slurm.srun_argv(
            shape,
            environ,
            inner,
            container_image=wish.container_image,
            srun_args=wish.srun_args,
            inside_step=environ.get("SLURM_STEP_ID") is not None,
        )
    else:
        program = step.find_program("mpirun", "mpiexec")
        if program is None:
            raise ConfigError("--launcher mpi: neither mpirun nor mpiexec is installed here")
        argv = mpi.mpirun_argv(
            mpi.flavor_of(step.version_of(program)),
            inner,
            nodes=len(hosts),
            nproc=1,
            names=mpi.exported_names(environ, (), SHOWN_PREFIXES),
            hostfile=wish.hostfile,
            mpirun_args=wish.mpirun_args,
            program=program,
        )
    code, output, errors = run_command(argv, timeout_s, environ)
    answers = decode(output)
    nodes = [gathering.from_json(data) for data in answers.values()]
    silent = [host for index, host in enumerate(hosts) if index not in answers]
    if not nodes:
        raise ConfigError(
            f"no node answered ({argv[0]} ended with {code}): {last_line(errors) or 'no message'}"
        )
    if not silent:
        return nodes, []
    told = last_line(errors)
    return nodes, [
        Finding(
            ERROR,
            "nodes",
            f"no answer within {timeout_s:g} s{f' ({told})' if told else ''}",
            "see whether Python and odcengine are at the same path on them, and whether they hang "
            "(`sinfo`, `scontrol show node`)",
            tuple(silent),
        )
    ]


def job_of_config(config: Config | None, *, several_nodes: bool) -> Job:
    if config is None:
        return Job(several_nodes=several_nodes)
    return Job(config.odc.transport, config.odc.sharding, several_nodes, config.launch.interface)


def environ_of(config: Config | None) -> dict[str, str]:
    """What ranks would inherit, ``launch.env`` included."""
    return {**os.environ, **cli.assignments(() if config is None else config.launch.env)}


def environ_of_node(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in _OF_RANKS}


def run_command(
    argv: Sequence[str], timeout_s: float, environ: Mapping[str, str]
) -> tuple[int | None, str, str]:
    """Runs a command, with a deadline; returns its exit code (None: it was ended), stdout and stderr."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        code: int | None
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # a second one stops at once
                if process.poll() is not None:
                    break
                process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_S)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return code, texts[0], texts[1]


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
