"""``odc-launch``: what it starts, where, and with which exit code; its options are in ``arguments.py``."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from odc_launcher.arguments import misplaced, module_problems, parse, script_problems
from odcengine.errors import ConfigError

if TYPE_CHECKING:
    from odc_launcher.early import EarlySignals
    from odc_launcher.failure import Outcome
    from odc_launcher.job import JobPlan
    from odc_launcher.placing import Wish
    from odc_launcher.plan import Machine
    from odc_launcher.request import Request
    from odcengine.config import Config


def main(argv: Sequence[str] | None = None) -> int:
    """Runs odc-launch.

    Args:
        argv: its arguments; the process's own by default.

    Returns:
        The exit code.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["doctor"]:
        from odc_launcher.doctor import command

        return command.main(words[1:])
    from odc_launcher.early import EarlySignals

    options, target = parse(words)
    if (line := misplaced(options, target)) is not None:
        print(f"odc-launch: warning: {line}", file=sys.stderr)
    try:
        with EarlySignals() as early:
            return _launch(options, target, early)
    except ConfigError as error:
        for problem in error.problems:
            print(f"odc-launch: error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the ranks were started
        return 130


def _launch(options: argparse.Namespace, target: list[str], early: EarlySignals) -> int:
    # Imported here, so that --help answers at once.
    from odc_launcher import placing, step
    from odc_launcher.request import DEFAULT_GRACE_S, DEFAULT_SIGNALS, Request

    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the working folder of this shell is gone ({error.strerror}); ranks would start in it: change "
            "to another one (cd)"
        ) from error
    is_module = target[0] == "-m"
    name, *args = target[1:] if is_module else target
    problems = module_problems(name) if is_module else script_problems(name)
    config = settings = None
    if options.config is not None:
        try:
            config = load(options.config)
            settings = config.launch
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

    saves = config is not None and config.checkpoint.dir is not None
    preemption = config.preemption if config is not None and saves else None
    asking = preemption.signals if preemption is not None else ()
    request = Request(
        target=name,
        is_module=is_module,
        args=tuple(args),
        nproc=options.nproc_per_node,
        config_path=options.config,
        config_nproc=choose(None, "nproc_per_node", None),
        log_dir=choose(options.log_dir, "log_dir", None),
        show=choose(options.show, "show", "all"),
        oversubscribe=options.oversubscribe,
        grace_s=choose(options.grace_s, "grace_s", DEFAULT_GRACE_S),
        term_grace_s=preemption.grace_s if preemption is not None and options.grace_s is None else 0.0,
        signals=(
            *choose(None, "signals", DEFAULT_SIGNALS),
            *asking,
        ),
        preemption=asking,
        max_time=preemption.max_time if preemption is not None else None,
        env=assignments(choose(None, "env", ())),
        env_expand=assignments(choose(None, "env_expand", ())),
        interface=choose(None, "interface", None),
        config_hash=file_hash(options.config),
        affinity=choose(None, "affinity", "auto"),
        **communication(config),
    )
    starts = options.plan is None and not options.dry_run
    early.keep(request.preemption_signals if starts else ())
    wish = placing.Wish(
        launcher=choose(options.launcher, "launcher", "auto"),
        adopt=options.adopt,
        nodes=choose(options.nodes, "nodes", None),
        hostfile=choose(options.hostfile, "hostfile", None),
        container_image=choose(options.container_image, "container_image", None),
        sbatch_args=(*choose(None, "sbatch_args", ()), *options.sbatch_arg),
        srun_args=(*choose(None, "srun_args", ()), *options.srun_arg),
        mpirun_args=(*choose(None, "mpirun_args", ()), *options.mpirun_arg),
        max_restarts=choose(options.max_restarts, "max_restarts", 0),
        max_requeues=choose(None, "max_requeues", 0),
        options=_repeated(options),
    )
    has_srun, has_sbatch = (step.find_program(name) is not None for name in ("srun", "sbatch"))
    mode = placing.choose_mode(wish, os.environ, has_srun=has_srun, has_sbatch=has_sbatch)
    if config is not None and (mode == "submit" or options.plan is not None):
        _warn_of_paths(config, options.config)  # elsewhere the ranks say so within seconds
    if mode in ("local", "adopt"):
        return _start_here(request, wish, options, config, early, adopt=mode == "adopt")
    return _start_elsewhere(request, wish, options, config, early, mode)


def _warn_of_paths(config: Config, file: str) -> None:
    """What a job that may wait for hours would not find."""
    from odcengine._config_paths import path_problems
    from odcengine._config_source import read_source

    for line in read_source(file).report(path_problems(config)):
        print(f"odc-launch: warning: {line}", file=sys.stderr)


def _start_here(
    request: Request,
    wish: Wish,
    options: argparse.Namespace,
    config: Config | None,
    early: EarlySignals,
    *,
    adopt: bool,
) -> int:
    """Starts all ranks of the job, or those of this task of srun or mpirun."""
    from odc_launcher import local, memory, placing, printing, restart, step
    from odc_launcher import plan as planning
    from odc_launcher.caution import placed_warnings
    from odcengine.host import host

    place = None
    with_gpus = request.device != "cpu" and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    if adopt:
        info = placing.outer_rank(os.environ)
        place = placing.adopted_place(request, info, os.environ, above=options.reported_above)
        place = dataclasses.replace(place, master_addr=address_of(place.master_addr))
        machine = _machine(os.environ, place.master_port, has_rank0=0 in place.ranks)
        machine = dataclasses.replace(
            machine,
            run_name=placing.run_name(os.environ, machine.run_name),
            node=host.read_host(place.master_addr, with_gpus=with_gpus),
        )
        plan = planning.make_plan(request, os.environ, machine, place)
        own = () if options.reported_above else placed_warnings(request, os.environ, place.local_world_size)
        plan = dataclasses.replace(plan, warnings=(*info.warnings, *own, *plan.warnings))
    else:
        node = host.read_host("127.0.0.1", with_gpus=with_gpus)
        machine = dataclasses.replace(_machine(os.environ), node=node)
        plan = planning.make_plan(request, os.environ, machine)
    first = place is None or 0 in place.ranks
    only_shown = options.plan is not None or options.dry_run
    if machine.port_problem is not None and not only_shown:
        raise ConfigError(machine.port_problem)
    for warning in plan.warnings if first and options.plan != "text" else ():  # it has them
        print(f"odc-launch: warning: {warning}", file=sys.stderr)
    if only_shown:
        if options.plan is None:
            return _print(printing.render(plan, os.environ))
        env = plan.ranks[0].env
        num_nodes = 1 if place is None else place.num_nodes or 1
        gpus = machine.node.gpus.gpus if machine.node is not None else ()
        needed = memory.describe_memory(
            config,
            request.config_path,
            int(env["WORLD_SIZE"]),
            num_nodes,
            {**os.environ, **env},
            min((gpu.memory_bytes for gpu in gpus), default=None) if request.device != "cpu" else None,
        )
        return _print(printing.render_plan(plan, os.environ, options.plan, needed))
    if first and not options.reported_above:
        print(f"odc-launch: {plan.summary}", file=sys.stderr, flush=True)
    if place is not None:
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # until the ranks run, they would kill the launcher
            if number not in request.preemption_signals:
                signal.signal(number, signal.SIG_IGN)
        if first and place.reported_above:
            step.announce(plan.log_dir, os.environ)
    if place is not None:
        code = local.run(plan, early).code
        if first and not place.reported_above:
            step.requeue(os.environ, code, wish.max_requeues)
        return code

    begun = time.monotonic()

    def start(done: int) -> Outcome:
        if not done:
            return local.run(plan, early)
        port = _machine(os.environ)
        if port.port_problem is not None:
            raise ConfigError(port.port_problem)
        again = dataclasses.replace(machine, master_port=port.master_port)
        wanted = _again(request, plan.log_dir, done, begun)
        return local.run(planning.make_plan(wanted, os.environ, again), early)

    code = restart.run(start, wish.max_restarts)
    step.requeue(os.environ, code, wish.max_requeues)
    return code


def _again(request: Request, log_dir: str, done: int, begun: float) -> Request:
    """What is asked for once more, of a job that began at ``begun`` (monotonic seconds)."""
    from odc_launcher import restart

    elapsed = f"{time.monotonic() - begun:.1f}"  # preemption.max_time goes on from there
    env = {**request.env, "ODC_RESTART_COUNT": str(done), "ODC_LAUNCH_ELAPSED_S": elapsed}
    return dataclasses.replace(request, log_dir=restart.log_folder(log_dir, done), env=env)


def _start_elsewhere(
    request: Request,
    wish: Wish,
    options: argparse.Namespace,
    config: Config | None,
    early: EarlySignals,
    mode: str,
) -> int:
    """Has srun, mpirun or sbatch start the ranks."""
    from odc_launcher import job, memory, mpi, placing, printing, restart, step
    from odcengine.ranks import job_port

    machine = _machine(os.environ, 0, has_rank0=False)
    seed = f"{os.environ.get('SLURM_JOB_ID')} {machine.run_name} {machine.host}"
    port = job_port(seed) if "MASTER_PORT" not in os.environ else _port(os.environ["MASTER_PORT"])
    outside = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_STEP")}
    name = placing.run_name(outside, machine.run_name)  # not after the step of a shell of srun
    machine = dataclasses.replace(machine, master_port=port, run_name=name)

    def make_plan(request: Request, wish: Wish, environ: Mapping[str, str], machine: Machine) -> JobPlan:
        if mode == "submit":
            return job.plan_submission(request, wish, environ, machine)
        if mode == "slurm":
            return job.plan_step(request, wish, environ, machine, address_of)
        program = step.find_program("mpirun", "mpiexec")
        if program is None:
            raise ConfigError("--launcher mpi: neither mpirun nor mpiexec is installed here")
        flavor = mpi.flavor_of(step.version_of(program))
        return job.plan_mpi(request, wish, environ, machine, flavor, program, address_of)

    plan = make_plan(request, wish, os.environ, machine)
    for warning in plan.warnings if options.plan != "text" else ():  # it has them
        print(f"odc-launch: warning: {warning}", file=sys.stderr)
    if options.plan is not None:
        env = {**os.environ, **plan.env}
        needed = memory.describe_memory(config, request.config_path, plan.world_size, plan.num_nodes, env)
        return _print(printing.render_plan(plan, os.environ, options.plan, needed))
    if options.dry_run:
        return _print(printing.render_job(plan, os.environ))
    if mode == "submit":
        return step.submit(plan)
    print(f"odc-launch: {plan.summary}", file=sys.stderr, flush=True)

    begun = time.monotonic()

    def start(done: int) -> Outcome:
        if not done:
            return step.run(plan, early=early)
        environ, ask = dict(os.environ), wish
        if mode == "slurm":
            ask = dataclasses.replace(wish, srun_args=restart.srun_args(wish.srun_args, os.environ))
            states = restart.node_states(plan.hosts, os.environ["SLURM_JOB_ID"])
            environ, missing = restart.healthy_environ(environ, plan.hosts, states)
            if missing:
                print(f"odc-launch: without {', '.join(missing)}, which SLURM calls down", file=sys.stderr)
                nodelist = f"--nodelist={environ['SLURM_JOB_NODELIST']}"
                ask = dataclasses.replace(ask, nodes=None, srun_args=(*ask.srun_args, nodelist))
        assert plan.log_dir is not None  # only a submission has none
        other = job_port(f"{seed} restart {done}") if "MASTER_PORT" not in os.environ else port
        again = dataclasses.replace(machine, master_port=other)
        wanted = make_plan(_again(request, plan.log_dir, done, begun), ask, environ, again)
        return step.run(wanted, environ, early)

    code = restart.run(start, wish.max_restarts)
    step.requeue(os.environ, code, wish.max_requeues)
    return code


def _print(text: str) -> int:
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(text))
    return 0


def load(path: str) -> Config:
    """Reads and checks the whole config file."""
    if not os.path.exists(path):
        raise ConfigError(f"config {path} does not exist (looked in {os.getcwd()})")
    if os.path.isdir(path):
        raise ConfigError(f"config {path} is a directory; give a YAML or JSON file")
    from odcengine.config import load_config

    try:
        return load_config(path)
    except OSError as error:
        raise ConfigError(f"config {path} cannot be read: {error.strerror}") from error


def communication(config: Config | None) -> dict[str, str]:
    """Of ``odc`` what the launch depends on."""
    if config is None:
        return {}
    from odcengine.config import DEVICE_OF_TRANSPORT

    device = DEVICE_OF_TRANSPORT.get(config.odc.transport, config.odc.device)
    return {"transport": config.odc.transport, "sharding": config.odc.sharding, "device": device}


def _repeated(options: argparse.Namespace) -> tuple[str, ...]:
    """What a submitted job cannot read from the config file."""
    image = options.container_image
    words = [] if image is None else [f"--container-image={image}"]
    words += [] if options.max_restarts is None else [f"--max-restarts={options.max_restarts}"]
    return (*words, *(f"--srun-arg={arg}" for arg in options.srun_arg))


def file_hash(path: str | None) -> str | None:
    if path is None:
        return None
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()[:16]


def assignments(items: Sequence[str]) -> dict[str, str]:
    pairs = (item.partition("=") for item in items)
    return {name: value for name, _, value in pairs}


def address_of(host: str) -> str:
    """A name that this host resolves, or the address that SLURM has for the node.

    Raises:
        ConfigError: neither.
    """
    from odc_launcher import machine, step

    if machine.resolves(host):
        return host
    address = step.node_address(host) if "SLURM_JOB_ID" in os.environ else None
    if address is None or not machine.resolves(address):
        raise ConfigError(
            f"rank 0 runs on {host}, a name that {socket.gethostname()} does not resolve; set MASTER_ADDR to "
            "an address that every node reaches"
        )
    return address


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ConfigError(f"MASTER_PORT={text!r} in the environment is no port (1 to 65535)")
    return int(text)


def _machine(environ: Mapping[str, str], port: int | None = None, *, has_rank0: bool = True) -> Machine:
    """This host.

    Args:
        environ: the environment.
        port: the port that all nodes derived; None: one is chosen.
        has_rank0: rank 0 will listen here.
    """
    from odc_launcher import machine, plan

    cores, cores_from = machine.usable_cores()
    given = environ.get("MASTER_PORT")
    port = machine.master_port(given) if port is None else port
    return plan.Machine(
        host=environ.get("SLURMD_NODENAME", socket.gethostname()),
        cores=cores,
        cores_from=cores_from,
        master_port=port,
        python=sys.executable,
        cwd=os.getcwd(),
        run_name=f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
        bound=cores < (os.cpu_count() or 1),
        port_problem=machine.port_problem(port, given) if has_rank0 else None,
    )
