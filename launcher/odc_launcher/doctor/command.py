"""The command ``odc-launch doctor``: gathers facts on every node, runs a small job, and reports."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odc_launcher import cli, slurm, step
from odc_launcher.doctor import facts as gathering
from odc_launcher.doctor import probe
from odc_launcher.doctor.checks import check_all
from odc_launcher.doctor.facts import NodeFacts
from odc_launcher.doctor.finding import ERROR, LEVELS, OK, WARNING, Context, Finding
from odc_launcher.doctor.nodes import (
    ask_nodes,
    be_a_node,
    environ_of,
    environ_of_node,
    job_of_config,
    run_command,
)
from odc_launcher.job import hosts_for_mpi
from odc_launcher.placing import Wish, choose_mode
from odcengine.errors import ConfigError

if TYPE_CHECKING:
    from odcengine.config import Config

_RANKS_MARK = "@odc-ranks "
_RANKS_MODULE = "odc_launcher.doctor.ranks"
_CPU_RANKS = 2
_RAISED = re.compile(r"((?:\w+\.)*\w*(?:Error|Exception): .*)")


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: what follows ``odc-launch doctor``.

    Returns:
        0; 1 where a finding is an error; 2 for mistakes in the use.
    """
    options = _parse(argv)
    if options.node is not None:
        num_nodes, address, port, token, timeout_s = options.node
        return be_a_node(options.config, int(num_nodes), address, int(port), token, float(timeout_s))
    try:
        nodes, findings = _examine(options)
    except ConfigError as error:
        for problem in error.problems:
            print(f"odc-launch: error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    failed = any(finding.level == ERROR for finding in findings)
    if options.json:
        data = {
            "ok": not failed,
            "findings": [dataclasses.asdict(finding) for finding in findings],
            "nodes": [gathering.to_json(node) for node in nodes],
        }
        print(json.dumps(data, indent=2))
    else:
        print("\n".join(render(nodes, findings)))
    return 1 if failed else 0


def render(nodes: Sequence[NodeFacts], findings: Sequence[Finding]) -> Iterable[str]:
    """The report as lines of text."""
    names = ", ".join(node.host for node in nodes)
    yield f"odc-launch doctor: {len(nodes)} node{'s' * (len(nodes) != 1)} ({names})"
    width = max((len(finding.check) for finding in findings), default=0)
    for finding in findings:
        where = f"{', '.join(finding.hosts)}: " if finding.hosts else ""
        yield f"{finding.level:<8} {finding.check:<{width}}  {where}{finding.text}"
        if finding.level != OK and finding.remedy:
            yield f"{'':<8} {'':<{width}}  -> {finding.remedy}"
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    yield (
        f"{counts[OK]} ok, {counts[WARNING]} warning{'s' * (counts[WARNING] != 1)}, "
        f"{counts[ERROR]} error{'s' * (counts[ERROR] != 1)}"
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="odc-launch doctor",
        description="Checks this machine, or every node of the allocation that it is started in: versions, "
        "GPUs, network, limits, variables, a meeting of all nodes, and a small real job. Each line is ok, "
        "warning or error, with the remedy. Exit code 1 where there is an error.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="configuration of the job that is planned")
    parser.add_argument("--nproc-per-node", type=int, metavar="N", help="ranks a node of the small job")
    parser.add_argument(
        "--launcher", choices=("auto", "local", "slurm", "mpi"), default=None, help="as for a launch"
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes (for --launcher mpi)")
    parser.add_argument("--hostfile", metavar="FILE", help="hosts for mpirun, that of rank 0 first")
    parser.add_argument("--container-image", metavar="IMAGE", help="passed to srun (pyxis)")
    parser.add_argument("--srun-arg", action="append", default=[], metavar="OPTION", help="for srun")
    parser.add_argument("--mpirun-arg", action="append", default=[], metavar="OPTION", help="for mpirun")
    parser.add_argument("--log-dir", metavar="DIR", help="where the small job logs (default: odc_logs)")
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=300.0,
        metavar="S",
        help="longest time of each of the two parts, in seconds (default: 300)",
    )
    parser.add_argument(
        "--node", nargs=5, metavar=("NODES", "ADDRESS", "PORT", "TOKEN", "S"), help=argparse.SUPPRESS
    )
    return parser.parse_args(argv)


def _examine(options: argparse.Namespace) -> tuple[list[NodeFacts], list[Finding]]:
    config = None if options.config is None else cli.load(options.config)
    wish = _wish(options, config)
    has_srun, has_sbatch = (step.find_program(name) is not None for name in ("srun", "sbatch"))
    mode = choose_mode(wish, os.environ, has_srun=has_srun, has_sbatch=has_sbatch)
    if mode == "submit":
        raise ConfigError(
            "doctor runs inside an allocation: salloc --nodes=2 --gpus-per-node=8 odc-launch doctor (or in a "
            "batch script); without --nodes it checks this machine"
        )
    folder = Path(options.log_dir or "odc_logs", f"doctor-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write {folder}: {error.strerror}; choose another with --log-dir"
        ) from error
    findings: list[Finding] = []
    hosts = _hosts(mode, wish)
    several = len(hosts) > 1
    context = Context(
        job_of_config(config, several_nodes=several),
        cli.communication(config).get("device", "auto"),
        has_config=config is not None,
    )
    if hosts:  # a shell of salloc's may be on a login node
        nodes, findings = ask_nodes(
            mode, wish, hosts, config_path=options.config, folder=folder, timeout_s=options.timeout_s
        )
    else:
        config_hash = None if options.config is None else cli.file_hash(options.config)
        found = gathering.gather(environ_of(config), context.job, config_hash=config_hash)
        found.probe = probe.run(0, 1, "127.0.0.1", 1, options.timeout_s)
        nodes = [found]
    findings = [*check_all(nodes, context), *findings]
    blocked = [f for f in findings if f.level == ERROR]
    if blocked:
        findings.append(Finding(WARNING, "small job", "not tried, because of the errors above"))
    else:
        findings += _try_job(mode, wish, options, config, nodes, folder)
    if not any(finding.level == ERROR for finding in findings):
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # others' logs are in it
            folder.parent.rmdir()
    return nodes, findings


def _wish(options: argparse.Namespace, config: Config | None) -> Wish:
    launch = None if config is None else config.launch

    def choose(option: Any, key: str) -> Any:
        return option if option is not None or launch is None else getattr(launch, key)

    return Wish(
        launcher=choose(options.launcher, "launcher") or "auto",
        nodes=options.nodes,
        hostfile=choose(options.hostfile, "hostfile"),
        container_image=choose(options.container_image, "container_image"),
        srun_args=(*(() if launch is None else launch.srun_args), *options.srun_arg),
        mpirun_args=(*(() if launch is None else launch.mpirun_args), *options.mpirun_arg),
    )


def _hosts(mode: str, wish: Wish) -> tuple[str, ...]:
    if mode == "slurm":
        return slurm.allocation_shape(environ_of_node(os.environ), None, "").hosts
    return tuple(hosts_for_mpi(wish, os.environ))[: wish.nodes] if mode == "mpi" else ()


def _try_job(
    mode: str,
    wish: Wish,
    options: argparse.Namespace,
    config: Config | None,
    nodes: Sequence[NodeFacts],
    folder: Path,
) -> list[Finding]:
    """A real job of one small minibatch, by the path of every other."""
    odc: dict[str, Any] = {"startup_timeout_s": 120.0, "timeout_s": 60.0}
    configured = None
    if config is not None:
        odc |= config.odc.model_dump(mode="json", include={"transport", "sharding", "node_size", "device"})
        configured = config.launch.nproc_per_node
    nproc = _ranks_a_node(mode, options.nproc_per_node or configured, nodes, odc.get("device") == "cpu")
    if nproc == 1 and len(nodes) == 1:
        return [Finding(OK, "small job", "not tried: one rank alone exchanges nothing")]
    where = "local" if mode == "adopt" else mode
    words = [sys.executable, "-u", "-m", "odc_launcher", "--launcher", where, "--log-dir", str(folder)]
    words += ["--show", "rank0", "--grace-s", "5", "--oversubscribe"]
    words += [] if nproc is None else ["--nproc-per-node", str(nproc)]
    if options.config is not None and configured in (None, nproc):
        words += ["--config", options.config]
    words += [] if wish.hostfile is None else ["--hostfile", wish.hostfile]
    words += [] if wish.nodes is None or mode != "mpi" else ["--nodes", str(wish.nodes)]
    words += [] if wish.container_image is None else ["--container-image", wish.container_image]
    words += [f"--srun-arg={arg}" for arg in options.srun_arg]
    words += [f"--mpirun-arg={arg}" for arg in options.mpirun_arg]
    words += ["-m", _RANKS_MODULE, json.dumps(odc)]
    code, output, errors = run_command(words, options.timeout_s, dict(os.environ))
    (folder / "launcher.log").write_text(output + errors)
    for line in output.splitlines():
        if _RANKS_MARK in line:
            result = json.loads(line.partition(_RANKS_MARK)[2])
            if result["pulled"] and result["pushed"] and code == 0:
                return [Finding(OK, "small job", _told(result))]
    remedy = f"the logs are in {folder}"
    if code is None:
        return [Finding(ERROR, "small job", f"did not end within {options.timeout_s:g} s", remedy)]
    return [Finding(ERROR, "small job", f"exit code {code}: {_cause(errors)}", remedy)]


def _told(result: Mapping[str, Any]) -> str:
    between = f", {result['num_nodes']} nodes with two-level windows" if result["num_nodes"] > 1 else ""
    how = "collectives" if result["transport"] == "none" else result["transport"]
    return (
        f"{result['world_size']} {result['device']} ranks over {how}{between} pulled and pushed exactly "
        f"(start {result['start_s']:.1f} s)"
    )


def _ranks_a_node(mode: str, asked: int | None, nodes: Sequence[NodeFacts], on_cpu: bool) -> int | None:
    """None where the allocation has a task for every rank."""
    if asked is not None:
        return asked
    if mode == "slurm":
        shape = slurm.allocation_shape(os.environ, None, "")
        if shape.tasks is None or set(shape.tasks) != {1}:
            return None
    gpus = min(len(node.gpus) for node in nodes)
    return gpus if gpus and not on_cpu else _CPU_RANKS


def _cause(errors: str) -> str:
    """The line that names the first failure, and its exception where there is one; else the last line."""
    lines = [line.removeprefix("odc-launch: ").strip() for line in errors.splitlines() if line.strip()]
    signs = ("failed first", " hangs; ")
    first = next((line for line in lines if any(s in line for s in signs) or line.startswith("error:")), "")
    raised = next((match[1] for line in lines if (match := _RAISED.search(line))), "")
    told = "; ".join(text for text in (first, raised) if text)
    return told or (lines[-1] if lines else "no message")
