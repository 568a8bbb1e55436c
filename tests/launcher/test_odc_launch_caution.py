"""What is warned of before ranks start on other nodes, and what is told where they could not tell."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from launch_helpers import Launcher, finish
from odc_launcher.arguments import script_problems
from odc_launcher.caution import placed_warnings, step_warnings, submission_warnings
from odc_launcher.job import Wish, plan_submission
from odc_launcher.output import LogFile
from odc_launcher.plan import Machine
from odc_launcher.request import Request
from odc_launcher.slurm import Shape

REQUEST = Request("train.py")
NODES = tuple(f"gpu{number:03d}" for number in range(1, 9))


def shape(tasks: int, nproc: int = 1) -> Shape:
    return Shape(NODES, (tasks,) * 8, tasks * 8, nproc, f"SLURM_NTASKS={tasks * 8}")


@pytest.mark.parametrize(
    ("request_", "environ", "shape_", "parts"),
    [
        (REQUEST, {"SLURM_GPUS_PER_NODE": "h200:8"}, shape(8), []),
        (REQUEST, {"SLURM_GPUS_PER_NODE": "8"}, shape(1, 8), []),
        (
            REQUEST,
            {"SLURM_GPUS_ON_NODE": "8"},
            shape(4),
            ["4 of 8 GPUs of a node (SLURM_GPUS_ON_NODE=8) stay idle: 4 ranks a node (SLURM_NTASKS=32)"],
        ),
        (replace(REQUEST, device="cpu"), {"SLURM_GPUS_ON_NODE": "8"}, shape(4), []),
        (REQUEST, {"SLURM_GPUS_ON_NODE": "4"}, shape(8), ["8 ranks a node (SLURM_NTASKS=64) share 4 GPUs"]),
        (REQUEST, {"SLURM_GPUS_ON_NODE": "4", "ODC_SHARE_GPUS": "1"}, shape(8), []),
        (REQUEST, {"SLURM_GPUS_ON_NODE": "4"}, Shape(NODES, None, 5, 1, ""), []),
        (
            REQUEST,
            {"SLURM_HET_SIZE": "2"},
            shape(8),
            ["2 components (SLURM_HET_SIZE): ranks run on", "gpu008, only"],
        ),
        (REQUEST, {"SLURM_HET_SIZE": "1"}, shape(8), []),
    ],
)
def test_of_an_allocation(
    request_: Request, environ: dict[str, str], shape_: Shape, parts: list[str]
) -> None:
    lines = list(step_warnings(request_, environ, shape_))
    assert len(lines) == bool(parts)
    assert all(part in lines[0] for part in parts)


def test_of_tasks_that_see_one_gpu_each() -> None:
    task = {"SLURM_STEP_ID": "0", "CUDA_VISIBLE_DEVICES": "0"}
    (line,) = placed_warnings(REQUEST, task, 8)
    assert "CUDA_VISIBLE_DEVICES=0 shows this rank one GPU" in line
    assert "--gpu-bind=none" in line
    assert not list(placed_warnings(REQUEST, task, 1))
    assert not list(placed_warnings(replace(REQUEST, device="cpu"), task, 8))
    assert not list(placed_warnings(REQUEST, {**task, "CUDA_VISIBLE_DEVICES": "0,1"}, 2))
    assert not list(placed_warnings(REQUEST, {"CUDA_VISIBLE_DEVICES": "0"}, 8))


def test_of_a_job_that_is_to_run_again() -> None:
    saves = replace(REQUEST, preemption=("USR1", "TERM"))
    assert not list(submission_warnings(REQUEST, (), 0))
    assert not list(submission_warnings(saves, ("--signal=USR1@600",), 3))
    assert not list(submission_warnings(replace(saves, max_time=3600.0), (), 3))
    (line,) = submission_warnings(saves, ("--time=60",), 3)
    assert "nothing warns the ranks before the time limit: add --signal=USR1@600" in line
    (line,) = submission_warnings(REQUEST, ("--signal=USR1@600",), 3)
    assert "without checkpoint.dir" in line


def test_a_job_that_is_to_run_again_may_and_keeps_its_output() -> None:
    machine = Machine("login1", 8, "", 20123, "/opt/py/bin/python", "/home/u", "now")
    wish = Wish(nodes=8, max_requeues=3, max_restarts=1, sbatch_args=("--open-mode=truncate",))
    script = plan_submission(REQUEST, wish, {}, machine).stdin or ""
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert lines[-4:] == [
        "#SBATCH --no-kill",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --open-mode=truncate",  # the user's comes last, and wins
    ]


def test_a_node_without_the_folder_of_the_launch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", "/none/project")
    assert "/none/project" not in script_problems("gone.py")[0]
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    (line,) = script_problems("gone.py")
    assert line.startswith(f"script gone.py does not exist (looked in {os.getcwd()}); ")
    assert "has no /none/project, where the launch was started" in line


def test_logs_that_two_launches_write_are_told(launcher: Launcher) -> None:
    launcher.logs.mkdir()
    other = LogFile(str(launcher.logs / "rank0.log"))
    assert not other.shared
    code, _, err = finish(launcher.ranks(1, "print('mine')"))
    assert code == 0
    assert f"warning: another launch that runs writes into {launcher.logs}, too" in err
    other.close()
    again = LogFile(str(launcher.logs / "rank0.log"))
    assert not again.shared
    again.close()


PROGRAMS = {
    "srun": "#!/bin/sh\necho 'srun: error: execve' >&2\nexit 2\n",
    "sbatch": "#!/bin/sh\ncat > script\nexit 0\n",
}


def test_what_could_not_be_told_or_submitted(launcher: Launcher, tmp_path: Path) -> None:
    for name, text in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    launcher.env["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{launcher.env['PATH']}"
    launcher.write("")
    code, out, err = finish(launcher.start("--nodes", "2", str(launcher.script)))
    assert (code, out) == (0, "")
    assert "sbatch has submitted nothing" in err
    launcher.env |= {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NTASKS": "4",
        "MASTER_ADDR": "n1",
    }
    launcher.env |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)"}
    code, _, err = finish(launcher.start("--log-dir", "logs", str(launcher.script)))
    assert code == 2
    assert "odc-launch: srun ended with exit code 2; it says why above" in err
    assert f"no word of ranks 0-3 in {launcher.logs}: they ended before they could tell, or" in err
