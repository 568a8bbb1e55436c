"""The command line: what is refused, what belongs to the script, how fast help is."""

from __future__ import annotations

import json
import os
import resource
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launch_helpers import Launcher, finish

DUMP = """
    import json
    print(json.dumps([[os.fsencode(a).hex() for a in sys.argv[1:]], dict(os.environ)]))
"""


def errors(launcher: Launcher, *words: str) -> list[str]:
    """Runs a launch that must be refused; returns its messages."""
    code, out, err = finish(launcher.start(*words))
    assert code == 2, err
    assert out == ""
    assert not (launcher.folder / "odc_logs").exists(), "something was started"
    lines = err.splitlines()
    assert all(line.startswith("odc-launch: error: ") for line in lines), err
    return [line.removeprefix("odc-launch: error: ") for line in lines]


def test_help_is_quick_and_says_how(launcher: Launcher) -> None:
    def used_s() -> float:  # not the time that passes: other processes may have the cores
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    seconds: list[float] = []
    while not seconds or (min(seconds) >= 0.3 and len(seconds) < 20):
        start = used_s()
        code, out, _ = finish(launcher.start("--help"))
        seconds.append(used_s() - start)
        assert code == 0
        assert "odc-launch [options] script.py" in out
    assert min(seconds) < 0.3, seconds


@pytest.mark.parametrize("words", [["--help"], ["--dry-run", "script.py"], ["script.py"]])
def test_launcher_imports_no_torch_and_no_pydantic(launcher: Launcher, words: list[str]) -> None:
    launcher.write("")
    command = [sys.executable, "-X", "importtime", "-m", "odc_launcher", *words]
    done = subprocess.run(command, env=launcher.env, cwd=launcher.folder, capture_output=True, timeout=60)
    assert done.returncode == 0
    imported = {line.rpartition(b"|")[2].strip() for line in done.stderr.splitlines()}
    assert b"odc_launcher.cli" in imported
    assert not {name for name in imported if name.split(b".")[0] in (b"torch", b"numpy", b"pydantic")}


def test_working_folder_that_is_gone(launcher: Launcher) -> None:
    launcher.write("")
    gone = launcher.folder / "gone"
    gone.mkdir()
    words = map(shlex.quote, (sys.executable, "-m", "odc_launcher", str(launcher.script)))
    command = f'rmdir "{gone}"; exec {" ".join(words)}'
    done = subprocess.run(
        ["sh", "-c", command], cwd=gone, env=launcher.env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("odc-launch: error: the working folder of this shell is gone")


def test_missing_files_are_named_all_at_once(launcher: Launcher) -> None:
    script, config = errors(launcher, "--config", "c.yaml", "nosuch.py")
    assert script.startswith("script nosuch.py does not exist")
    assert config.startswith("config c.yaml does not exist")


def test_directories_and_modules(launcher: Launcher) -> None:
    (launcher.folder / "d").mkdir()
    assert "is a directory" in errors(launcher, "d")[0]
    assert "config d is a directory" in errors(launcher, "--config", "d", "d")[1]
    assert "module 'no_such_module.x' is not found" in errors(launcher, "-m", "no_such_module.x")[0]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["-m"],
        ["--"],
        ["--nproc-per-node", "two", "s.py"],
        ["--nproc", "2", "s.py"],
        ["--show", "some", "s.py"],
    ],
)
def test_wrong_usage(launcher: Launcher, words: list[str]) -> None:
    code, out, err = finish(launcher.start(*words))
    assert code == 2
    assert out == ""
    assert "odc-launch: error: " in err


def test_all_config_problems_are_printed(launcher: Launcher) -> None:
    launcher.write("")
    (launcher.folder / "c.yaml").write_text("gradient_cliping: 1.0\noptimiser: {}\n")
    found = "\n".join(errors(launcher, "--config", "c.yaml", "script.py"))
    assert "gradient_cliping" in found
    assert "optimiser" in found
    (launcher.folder / "c.yaml").write_text("- 1\n- 2\n")
    assert "c.yaml" in errors(launcher, "--config", "c.yaml", "script.py")[0]


def test_config_settles_number_signals_grace_logs_and_what_is_shown(launcher: Launcher) -> None:
    launcher.write("print('hi')")
    (launcher.folder / "c.yaml").write_text(
        "train_batch_size: 8\n"
        "launch: {nproc_per_node: 2, grace_s: 3, signals: [USR1], log_dir: mine, show: rank0}\n"
    )
    code, out, err = finish(launcher.start("--config", "c.yaml", "script.py"))
    assert code == 0, err
    assert out == "[rank 0] hi\n"
    assert "2 ranks" in err
    assert "launch.nproc_per_node in c.yaml" in err
    assert (launcher.folder / "mine/rank1.log").read_text() == "hi\n"
    (problem,) = errors(launcher, "--config", "c.yaml", "--nproc-per-node", "3", "script.py")
    assert "3" in problem
    assert "launch.nproc_per_node: 2" in problem


def test_everything_after_the_script_is_the_scripts(launcher: Launcher) -> None:
    launcher.write(DUMP)
    args = [
        b"--nproc-per-node",
        b"7",
        b"--help",
        b"--",
        b"-m",
        b"two words",
        b'it\'s "x" $HOME `id` \\',
        b"a\nb\t",
        b"",
        "gr\u00f6\u00dfe\u2192".encode(),
        b"\xff\xfe",
    ]
    code, out, err = finish(launcher.start("--nproc-per-node=1", "script.py", *args))
    assert code == 0, err
    assert [bytes.fromhex(arg) for arg in json.loads(out.removeprefix("[rank 0] "))[0]] == args
    assert "stands behind" not in err
    code, _, err = finish(launcher.start("--dry-run", "script.py", "--nproc-per-node", "7"))
    assert code == 0, err
    assert "warning: --nproc-per-node stands behind script.py, so it is the script's" in err


@pytest.mark.parametrize("words", [["-m", "pkg.mod"], ["--", "script.py"]])
def test_module_and_end_of_options(launcher: Launcher, words: list[str]) -> None:
    launcher.write("print(*sys.argv[1:])")
    package = launcher.folder / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "mod.py").write_text(launcher.script.read_text())
    code, out, _ = finish(launcher.start(*words, "--config", "x"))
    assert (code, out) == (0, "[rank 0] --config x\n")


def test_module_that_only_a_finder_of_its_own_knows(launcher: Launcher) -> None:
    """As after ``pip install -e``, whose packages are on no path."""
    hidden = launcher.folder / "hidden" / "project"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("import os\nopen(os.environ['RANK'], 'w')\n")  # no rank, no RANK
    (hidden / "train.py").write_text("print('trained')")
    site = launcher.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib.util import spec_from_file_location\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'project':\n"
        f"            where = {str(hidden)!r}\n"
        "            return spec_from_file_location(\n"
        "                name, where + '/__init__.py', submodule_search_locations=[where])\n"
        "sys.meta_path.append(Finder)\n"
    )
    launcher.env["PYTHONPATH"] += os.pathsep + str(site)
    code, out, err = finish(launcher.start("-m", "project.train"))
    assert (code, out) == (0, "[rank 0] trained\n"), err
    code, _, err = finish(launcher.start("-m", "projekt"))
    assert code == 2
    assert "module 'projekt' is not found" in err


def test_working_folder_comes_first_as_for_python_m(launcher: Launcher) -> None:
    (launcher.folder / "mine.py").write_text("print('mine')")
    assert finish(launcher.start("-m", "mine"))[:2] == (0, "[rank 0] mine\n")


def test_environment_of_a_rank(launcher: Launcher) -> None:
    launcher.write(DUMP)
    config = launcher.folder / "c.json"
    config.write_text('{"train_batch_size": 8}')
    launcher.env |= {"NVSHMEM_SYMMETRIC_SIZE": "8G", "B": 'it\'s "x"', "ODC_ERROR_FILE": "/old"}
    words = ["--config", "c.json", "--nproc-per-node", "2", "--log-dir", "logs"]
    code, _, err = finish(launcher.start(*words, "script.py"))
    assert code == 0, err
    environ = json.loads(launcher.log(1))[1]
    assert environ["RANK"] == environ["LOCAL_RANK"] == "1"
    assert environ["WORLD_SIZE"] == environ["LOCAL_WORLD_SIZE"] == "2"
    assert environ["ODC_CONFIG"] == str(config)
    assert environ["ODC_ERROR_FILE"] == str(launcher.logs / "rank1.error.json")
    assert environ["MASTER_ADDR"] == "127.0.0.1"
    assert environ["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert environ["NVSHMEM_SYMMETRIC_SIZE"] == "8G"
    assert environ["B"] == 'it\'s "x"'
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert not int(low) <= int(environ["MASTER_PORT"]) <= int(high)


def test_port_of_the_user(launcher: Launcher) -> None:
    launcher.write("print(os.environ['MASTER_PORT'])")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        port = str(server.getsockname()[1])
        launcher.env["MASTER_PORT"] = port
        assert port in errors(launcher, "script.py")[0]
    assert finish(launcher.start("script.py"))[:2] == (0, f"[rank 0] {port}\n")


def test_nested_launch_is_refused(launcher: Launcher) -> None:
    launcher.write("")
    launcher.env |= {"RANK": "1", "WORLD_SIZE": "2"}
    assert "RANK=1, WORLD_SIZE=2" in errors(launcher, "script.py")[0]


def test_dry_run_starts_nothing_and_its_lines_run_in_a_shell(launcher: Launcher) -> None:
    launcher.write(DUMP)
    launcher.env |= {"WANDB_API_KEY": "geheim", "NCCL_DEBUG": "a 'b' \"c\"\nd", "NOT_SHOWN": "1"}
    args = [b"a b", b"it's", b"\n", b"$(id)", b"\xff"]
    options = ["--dry-run", "--nproc-per-node", "2"]
    process = launcher.start(*options, "script.py", *args)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert not (launcher.folder / "odc_logs").exists()
    assert b"geheim" not in out + err
    bare = {"PATH": launcher.env["PATH"]}
    shell = subprocess.run(["sh"], input=out, env=bare, cwd=launcher.folder, capture_output=True, timeout=60)
    assert shell.returncode == 0, shell.stderr
    for rank, line in enumerate(shell.stdout.splitlines()):
        argv, environ = json.loads(line)
        assert [bytes.fromhex(arg) for arg in argv] == args
        assert environ["RANK"] == str(rank)
        assert environ["NCCL_DEBUG"] == launcher.env["NCCL_DEBUG"]
        assert environ["WANDB_API_KEY"] == "***"
        assert "NOT_SHOWN" not in environ


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-n", "2", "script.py"], "no option -n; it is --nproc-per-node here"),
        (["--nnodes=2", "script.py"], "no option --nnodes; it is --nodes here"),
        (["--standalone", "script.py"], "--standalone is not needed"),
        (["--master_port", "1", "script.py"], "--master_port is not needed"),
        (["--max-restart", "1", "script.py"], "no option --max-restart; did you mean --max-restarts?"),
        (["--zzz", "script.py"], "no option --zzz\n"),
        (["-x.py"], "no option -x.py (a script of this name: write --, then the script)"),
        (["--config", "", "script.py"], "--config is empty (a variable of the shell"),
        (["--log-dir=", "script.py"], "--log-dir is empty"),
        (["--nodes", "0", "script.py"], "--nodes is 0"),
        (["--nodes", "-3", "script.py"], "--nodes is -3"),
        (["--max-restarts", "-1", "script.py"], "--max-restarts is -1"),
        ([""], "the script's name is empty"),
        (["python3", "script.py"], "python3 is a program; odc-launch starts Python itself: leave it out"),
        (["sh", "run.sh"], "sh is a program; odc-launch starts Python itself: give a Python script"),
        (["run.sh"], "script run.sh is for /bin/bash -e, as its first line says"),
    ],
)
def test_what_a_new_user_tries(launcher: Launcher, words: list[str], told: str) -> None:
    launcher.write("open('started', 'w')")
    (launcher.folder / "-x.py").touch()
    (launcher.folder / "run.sh").write_text("#!/bin/bash -e\necho\n")
    code, out, err = finish(launcher.start(*words))
    assert (code, out) == (2, "")
    assert told in err
    assert not (launcher.folder / "started").exists()


def test_scripts_that_say_python_in_their_first_line(launcher: Launcher) -> None:
    (launcher.folder / "script.py").write_text("#!/usr/bin/env python3\nprint('ran')\n")
    assert finish(launcher.start("script.py"))[:2] == (0, "[rank 0] ran\n")


def test_log_folder_that_cannot_be_written(launcher: Launcher) -> None:
    launcher.write("open('started', 'w')")
    (launcher.folder / "file").touch()
    process = launcher.start("--log-dir", "file/logs", "script.py")
    code, _, err = finish(process)
    assert code == 2
    assert "cannot write logs" in err
    assert "Not a directory" in err
    assert "--log-dir" in err
    assert not (launcher.folder / "started").exists()


def test_plan_of_this_host_as_json(launcher: Launcher) -> None:
    launcher.write("open('started', 'w')")
    launcher.env |= {"CUDA_VISIBLE_DEVICES": "3", "HF_TOKEN": "geheim"}
    code, out, err = finish(launcher.start("--nproc-per-node", "2", "--plan=json", "script.py"))
    assert code == 0, err
    plan = json.loads(out)
    assert (plan["mode"], plan["world_size"]) == ("local", 2)
    assert plan["hosts"] == [{"host": socket.gethostname(), "ranks": [0, 1]}]
    assert plan["devices"] == {"CUDA_VISIBLE_DEVICES": "3"}
    assert plan["ranks"][1]["env"]["RANK"] == "1"
    assert plan["ranks"][1]["env"]["HF_TOKEN"] == "***"
    assert not (launcher.folder / "started").exists()
    code, out, _ = finish(launcher.start("--nproc-per-node", "2", "--plan", "script.py"))
    assert f"host {socket.gethostname()}: ranks 0-1" in out
    assert "geheim" not in out


def test_a_port_in_use_is_told_by_the_plan_and_refused_by_the_start(launcher: Launcher) -> None:
    """A plan may be looked at while the job runs; also by a task of srun or mpirun, whose port is derived."""
    launcher.write("open('started', 'w')")
    job = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_NAMESPACE": "job.7"}
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen(1)
        port = server.getsockname()[1]
        told = f"port {port} (MASTER_PORT in the environment) is already in use on {socket.gethostname()}"
        for env in ({}, job):
            launcher.env |= env | {"MASTER_PORT": str(port)}
            code, out, err = finish(launcher.start("--plan=json", "script.py"))
            assert code == 0, err
            assert told in json.loads(out)["warnings"][0]
            assert told in err
            code, out, _ = finish(launcher.start("--plan", "script.py"))
            assert code == 0
            assert f"warning: {told}" in out
            (error,) = errors(launcher, "script.py")
            assert told in error


def test_submission_from_a_config(launcher: Launcher) -> None:
    """With a program in sbatch's place that keeps what it is given."""
    launcher.write("")
    (launcher.folder / "c.yaml").write_text(
        "train_batch_size: 8\n"
        "launch:\n"
        "  nodes: 2\n"
        "  nproc_per_node: 4\n"
        "  env: ['NVSHMEM_SYMMETRIC_SIZE=8G', 'B=two words']\n"
        "  interface: ib0\n"
        "  sbatch_args: [--time=60]\n"
    )
    programs = launcher.folder / "bin"
    programs.mkdir()
    sbatch = programs / "sbatch"
    sbatch.write_text(
        "#!/bin/sh\ncat > script.sh\n"
        'printf "%s\\n" "$@" "$B" "$NCCL_SOCKET_IFNAME" > given\necho "42;cluster"\n'
    )
    sbatch.chmod(0o755)
    launcher.env["PATH"] = f"{programs}{os.pathsep}{launcher.env['PATH']}"
    options = ["--config", "c.yaml", "--sbatch-arg=--partition=gpu", "--srun-arg=--mpi=none"]
    options += ["--container-image", "/images/my odc.sqsh"]
    code, out, err = finish(launcher.start(*options, "script.py", "two words"))
    assert (code, out) == (0, "42\n"), err
    assert "job 42 submitted: a job of 2 nodes with 4 ranks each" in err
    given = (launcher.folder / "given").read_text().splitlines()
    assert given == ["--parsable", "--export=ALL", "two words", "ib0"]
    script = (launcher.folder / "script.sh").read_text()
    for line in ("--nodes=2", "--ntasks-per-node=4", "--time=60", "--partition=gpu"):
        assert f"#SBATCH {line}\n" in script
    assert "--launcher slurm '--container-image=/images/my odc.sqsh' --srun-arg=--mpi=none" in script
    assert script.endswith("script.py 'two words'\n")
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: no such partition' >&2\nexit 3\n")
    code, out, err = finish(launcher.start(*options, "script.py"))
    assert (code, out) == (3, "")
    assert "no such partition" in err


def test_container_image_of_the_configuration_reaches_srun(launcher: Launcher) -> None:
    """The command line wins; the rest of the step is as without a container."""
    launcher.write("")
    (launcher.folder / "c.yaml").write_text(
        "train_batch_size: 8\n"
        "launch: {container_image: /images/a.sqsh, srun_args: [--container-mounts=/d:/d]}\n"
    )
    programs = launcher.folder / "bin"
    programs.mkdir()
    (programs / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > given\n')
    (programs / "srun").chmod(0o755)
    launcher.env |= {"PATH": f"{programs}{os.pathsep}{launcher.env['PATH']}", "MASTER_ADDR": "127.0.0.1"}
    launcher.env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    launcher.env |= {"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_CPUS_PER_TASK": "3"}
    for extra, image in (([], "/images/a.sqsh"), (["--container-image", "/images/b.sqsh"], "/images/b.sqsh")):
        code, _, err = finish(launcher.start("--config", "c.yaml", *extra, "script.py"))
        assert code == 0, err
        given = (launcher.folder / "given").read_text().splitlines()
        end = given.index(sys.executable)
        assert given[:end] == [
            "--nodes=2",
            "--ntasks=8",
            "--ntasks-per-node=4",
            "--cpus-per-task=3",
            "--kill-on-bad-exit=1",
            "--wait=0",
            "--export=ALL",
            f"--container-image={image}",
            "--container-mounts=/d:/d",
        ]


def test_nodes_without_a_scheduler(launcher: Launcher) -> None:
    launcher.write("")
    launcher.env["PATH"] = "/nowhere"
    assert "sbatch is not installed" in errors(launcher, "--nodes", "2", "script.py")[0]
    assert "neither mpirun nor mpiexec" in errors(launcher, "--launcher", "mpi", "script.py")[0]
    assert "--nodes is 2" in errors(launcher, "--launcher", "local", "--nodes", "2", "script.py")[0]
