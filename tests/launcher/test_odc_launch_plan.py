"""The launch plan, without processes."""

from __future__ import annotations

import shlex
import signal
from dataclasses import replace

import pytest
from odc_launcher.plan import Machine, make_plan
from odc_launcher.printing import render
from odc_launcher.request import Request

from odcengine.errors import ConfigError

MACHINE = Machine(
    host="node7",
    cores=8,
    cores_from="CPU affinity",
    master_port=20123,
    python="/opt/py/bin/python",
    cwd="/home/u",
    run_name="20261129-101500-77",
)
REQUEST = Request("train.py", args=("--lr", "2e-5"), nproc=2)


def problems(request: Request, environ: dict[str, str] | None = None, cores: int = 8) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        make_plan(request, environ or {}, replace(MACHINE, cores=cores))
    return caught.value.problems


def test_ranks_get_torchruns_environment() -> None:
    plan = make_plan(replace(REQUEST, config_path="c.yaml"), {}, MACHINE)
    assert [rank.rank for rank in plan.ranks] == [0, 1]
    logs = "/home/u/odc_logs/20261129-101500-77"
    assert plan.ranks[1].env == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "20123",
        "OMP_NUM_THREADS": "4",
        "ODC_CONFIG": "/home/u/c.yaml",
        "ODC_ERROR_FILE": f"{logs}/rank1.error.json",
        "ODC_PLAN_HASH": plan.hash,
    }
    assert plan.ranks[1].argv == ("/opt/py/bin/python", "-u", "train.py", "--lr", "2e-5")
    assert plan.ranks[1].log_path == f"{logs}/rank1.log"


def test_module_and_script_that_looks_like_an_option() -> None:
    assert make_plan(Request("a.b", is_module=True), {}, MACHINE).ranks[0].argv[1:] == ("-u", "-m", "a.b")
    assert make_plan(Request("-x.py"), {}, MACHINE).ranks[0].argv[1:] == ("-u", "./-x.py")


@pytest.mark.parametrize(
    ("nproc", "config_nproc", "count", "told"),
    [
        (3, None, 3, "--nproc-per-node"),
        (None, 2, 2, "in c.yaml"),
        (2, 2, 2, "--nproc"),
        (None, None, 1, "default"),
    ],
)
def test_number_of_ranks(nproc: int | None, config_nproc: int | None, count: int, told: str) -> None:
    request = Request("t.py", nproc=nproc, config_nproc=config_nproc, config_path="c.yaml")
    plan = make_plan(request, {}, MACHINE)
    assert len(plan.ranks) == count
    assert told in plan.summary
    assert "port 20123" in plan.summary


def test_contradictory_numbers_of_ranks() -> None:
    (problem,) = problems(replace(REQUEST, config_nproc=4, config_path="c.yaml"))
    assert "--nproc-per-node 2" in problem
    assert "launch.nproc_per_node: 4 in c.yaml" in problem


@pytest.mark.parametrize("nproc", [0, -3])
def test_no_ranks(nproc: int) -> None:
    (problem,) = problems(replace(REQUEST, nproc=nproc))
    assert str(nproc) in problem
    assert "at least 1" in problem


def test_more_ranks_than_cores() -> None:
    assert not make_plan(replace(REQUEST, nproc=8), {}, MACHINE).warnings
    (warning,) = make_plan(replace(REQUEST, nproc=32), {}, MACHINE).warnings
    assert "32 ranks" in warning
    assert "8 usable cores" in warning
    (problem,) = problems(replace(REQUEST, nproc=33))
    assert "33 ranks on 8 usable cores" in problem
    assert "--oversubscribe" in problem
    forced = make_plan(replace(REQUEST, nproc=33, oversubscribe=True), {}, MACHINE)
    assert len(forced.ranks) == 33
    assert forced.ranks[0].env["OMP_NUM_THREADS"] == "1"


def test_threads_of_the_user_are_kept() -> None:
    plan = make_plan(REQUEST, {"OMP_NUM_THREADS": "3"}, MACHINE)
    assert "OMP_NUM_THREADS" not in plan.ranks[0].env
    assert "OMP_NUM_THREADS=3 (your environment)" in plan.summary


def test_no_number_of_threads_is_not_a_choice_of_the_user() -> None:
    assert make_plan(REQUEST, {"OMP_NUM_THREADS": ""}, MACHINE).ranks[0].env["OMP_NUM_THREADS"] != ""


def test_launch_inside_a_rank() -> None:
    (problem,) = problems(REQUEST, {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"})
    assert "RANK=3" in problem
    assert "WORLD_SIZE=4" in problem
    assert "env -u RANK -u WORLD_SIZE -u LOCAL_RANK odc-launch" in problem


@pytest.mark.parametrize("environ", [{"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "7"}, {"WORLD_SIZE": "8"}])
def test_harmless_rank_variables_are_replaced(environ: dict[str, str]) -> None:
    plan = make_plan(REQUEST, environ, MACHINE)
    assert plan.ranks[1].env["RANK"] == "1"
    assert plan.ranks[1].env["WORLD_SIZE"] == "2"
    assert any("replaced" in warning for warning in plan.warnings)


def test_foreign_rendezvous_host_and_unchecked_config_are_told() -> None:
    plan = make_plan(REQUEST, {"MASTER_ADDR": "node1", "ODC_CONFIG": "/x.yaml"}, MACHINE)
    assert plan.ranks[0].env["MASTER_ADDR"] == "127.0.0.1"
    assert plan.unset == ("ODC_CONFIG",)
    assert any("MASTER_ADDR=node1" in warning for warning in plan.warnings)
    assert any("ODC_CONFIG=/x.yaml" in warning for warning in plan.warnings)


def test_signals() -> None:
    plan = make_plan(replace(REQUEST, signals=("SIGUSR1", "hup")), {}, MACHINE)
    assert set(plan.signals) == {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}
    found = problems(replace(REQUEST, signals=("KILL", "NONE", "_DFL")))
    assert "SIGKILL cannot be passed on" in found[0]
    assert "'NONE' is no signal's name" in found[1]
    assert "'_DFL' is no signal's name" in found[2]


@pytest.mark.parametrize("grace_s", [-1.0, float("inf"), float("nan")])
def test_grace_time_is_a_number_of_seconds(grace_s: float) -> None:
    (problem,) = problems(replace(REQUEST, grace_s=grace_s))
    assert "number of seconds" in problem


def test_all_problems_at_once() -> None:
    found = problems(
        replace(REQUEST, nproc=0, signals=("KILL",), grace_s=-1), {"RANK": "0", "WORLD_SIZE": "2"}
    )
    assert len(found) == 4


@pytest.mark.parametrize(("show", "shown"), [("all", {0, 1}), ("rank0", {0}), ("none", set())])
def test_shown_ranks(show: str, shown: set[int]) -> None:
    assert make_plan(replace(REQUEST, show=show), {}, MACHINE).shown == shown


def test_rendered_commands_can_be_parsed_and_hide_secrets() -> None:
    args = ("two words", 'it\'s "x"', "a\nb", "$HOME", "*", "", "\u00e9")
    environ = {
        "NCCL_DEBUG": "it's $x",
        "WANDB_API_KEY": "geheim",
        "HF_TOKEN": "geheim",
        "ODC_PASSWORD": "geheim",
        "CUDA_SECRET": "geheim",
        "HOME": "/home/u",
        "ODC_CONFIG": "/x.yaml",
    }
    plan = make_plan(replace(REQUEST, args=args), environ, MACHINE)
    words = shlex.split(render(plan, environ), comments=True)
    start = words.index("env", 1)
    second = words[start:]
    assert second[:3] == ["env", "-u", "ODC_CONFIG"]
    split = second.index("/opt/py/bin/python")
    assert tuple(second[split:]) == plan.ranks[1].argv
    shown = dict(word.split("=", 1) for word in second[3:split])
    secrets = dict.fromkeys(("WANDB_API_KEY", "HF_TOKEN", "ODC_PASSWORD", "CUDA_SECRET"), "***")
    assert shown == {"NCCL_DEBUG": "it's $x", **secrets, **plan.ranks[1].env}
    assert "geheim" not in render(plan, environ)
