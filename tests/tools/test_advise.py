"""``odc advise``: what it reads, predicts, concludes and refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from odc_tools.advise_inputs import Sequences, read_lengths, read_model
from odc_tools.advise_predict import DYNAMIC, LB_MICRO, LB_MINI, LOCAL_SORT, Limits, advise, predict
from odc_tools.bench.workloads import SHAPES
from odc_tools.cli import main
from scripts import load_script

from odcengine.balance import STRATEGIES, CostModel, make_plan
from odcengine.data import TokenDataset
from odcengine.simulate import Machine, simulate

ROOT = Path(__file__).resolve().parents[2]
COST = CostModel(linear=1e-4, quadratic=2e-9)
QUICK = ["--minibatches", "2"]


def source_of(lengths: list[int]) -> Sequences:
    pool = np.array(lengths)

    def draw(number: int, count: int) -> list[int]:
        return [int(x) for x in np.random.Generator(np.random.PCG64(number)).choice(pool, count)]

    return Sequences("test", pool, draw, len(pool))


def long_tailed(count: int = 2000) -> list[int]:
    dice = np.random.Generator(np.random.PCG64(0))
    return [int(x) for x in np.clip(dice.lognormal(9.4, 0.8, count), 512, 65536)]


def write_lengths(folder: Path, lengths: list[int]) -> str:
    path = folder / "lengths.txt"
    path.write_text("# tokens\n\n" + "".join(f"{length}\n" for length in lengths))
    return str(path)


# ---- predictions ---------------------------------------------------------------------------------------


def test_predictions_are_those_of_the_simulator() -> None:
    source = source_of(long_tailed())
    machine = Machine(COST, boundary_s=0.5)
    size = predict(source, machine, gpus=8, count=64, minibatches=3, limits=Limits(65536, None))
    steps = []
    for number in range(3):
        plan = make_plan(
            source.draw(number, 64), num_ranks=8, strategy="lb_micro", max_tokens=65536, cost=COST
        )
        steps.append(simulate(plan, machine, communication="collective").step_s)
    assert size.minibatches == 3
    assert size.of[LB_MICRO].step_s == pytest.approx(np.mean(steps))
    assert size.of[LB_MICRO].tokens_per_s == pytest.approx(size.tokens / np.mean(steps))
    assert size.speed_up(LB_MICRO) == 1.0
    assert size.speed_up(LB_MINI) > 1.1 > 1.0 > size.speed_up(LOCAL_SORT)
    for prediction in size.of.values():
        assert prediction.step_s >= size.bound.step_s * (1 - 1e-9)
        assert prediction.idle_share >= size.bound.idle_share - 1e-3
        assert prediction.idle_shares.shape == (3, 8)
        assert prediction.idle_share == pytest.approx(prediction.idle_shares.mean(), abs=0.02)


def test_equal_lengths_gain_nothing() -> None:
    machine = Machine(COST)
    source = source_of([1000])
    size = predict(source, machine, gpus=4, count=16, minibatches=2, limits=Limits(4000, None))
    assert [size.speed_up(method) for method in size.of] == pytest.approx([1, 1, 1, 1])
    assert size.bound.idle_share == pytest.approx(0, abs=1e-9)
    assert size.longest_sets == 0
    sentences = advise(size, [size], machine, Limits(4000, None))
    assert "near the bound" in sentences[0]


def test_the_longest_sequence_is_named() -> None:
    machine = Machine(COST)
    source = source_of([10_000] + [10] * 30)
    sizes = [
        predict(source, machine, gpus=8, count=count, minibatches=20, limits=Limits(10_000, None))
        for count in (8, 32)
    ]
    assert sizes[1].longest_sets > 0.5
    text = " ".join(advise(sizes[1], sizes, machine, Limits(10_000, None)))
    assert "The longest sequence sets the step" in text
    assert "Even 32 sequences (4 a GPU) leave" in text


def test_what_is_worth_it() -> None:
    machine, limits = Machine(COST), Limits(65536, None)
    source = source_of(long_tailed())
    sizes = [
        predict(source, machine, gpus=32, count=32 * each, minibatches=4, limits=limits)
        for each in (1, 2, 4, 8, 16)
    ]
    small = advise(sizes[1], sizes, machine, limits)
    assert "256 sequences (8 a GPU) are worth it" in small[-1]
    assert "Collectives with lb_micro" in small[-1]
    fine = advise(sizes[3], sizes, machine, limits)
    assert fine[0].startswith("Use lb_mini on demand: 1.")
    assert "are large enough" in fine[-1]
    assert "need not be larger" in advise(sizes[4], sizes, machine, limits)[-1]
    assert (
        "waits for nobody"
        in advise(
            predict(source, machine, gpus=1, count=8, minibatches=2, limits=limits), sizes, machine, limits
        )[0]
    )


def test_short_micro_batches_are_pointed_out() -> None:
    machine, limits = Machine(COST, traffic_s=0.3), Limits(4096, None)
    source = source_of([500, 900, 3000])
    size = predict(source, machine, gpus=4, count=48, minibatches=4, limits=limits)
    text = " ".join(advise(size, [size], machine, limits))
    assert "Micro-batches are short: 4,096 tokens" in text
    assert "to 12,288 if memory permits" in text
    roomy = Limits(12_288, None)
    assert "are short" not in " ".join(advise(size, [size], machine, roomy))


def test_drawing_helps_where_times_cannot_be_predicted() -> None:
    machine, limits = Machine(COST, noise=0.3), Limits(65536, None)
    size = predict(source_of(long_tailed()), machine, gpus=64, count=512, minibatches=4, limits=limits)
    assert size.of[DYNAMIC].step_s < 0.95 * size.of[LB_MINI].step_s
    assert any(sentence.startswith("dynamic gains") for sentence in advise(size, [size], machine, limits))


# ---- inputs --------------------------------------------------------------------------------------------


def test_lengths_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("12\n\n# a comment\n 7 # another\n300\n")
    assert read_lengths(path).tolist() == [12, 7, 300]


def test_models(tmp_path: Path) -> None:
    named = read_model("qwen2.5-7b", recompute=True)
    assert named.num_parameters == pytest.approx(7.61e9, rel=0.01)
    assert read_model(None, recompute=True) == named
    assert read_model("qwen2.5-0.5b", recompute=False).num_parameters == pytest.approx(0.494e9, rel=0.01)
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen2.5-7b"]))
    assert read_model(str(tmp_path), recompute=True).cost == named.cost
    assert read_model(str(tmp_path / "config.json"), recompute=True).cost == named.cost
    assert read_model(str(tmp_path), recompute=False).cost.linear < named.cost.linear
    (tmp_path / "config.json").write_text(json.dumps({"text_config": SHAPES["qwen2.5-7b"]}))
    assert read_model(str(tmp_path), recompute=True).cost == named.cost


def test_experts_that_rest_have_parameters_too(tmp_path: Path) -> None:
    # The numbers of Mixtral 8x7B: 46.7G parameters, 12.9G active.
    values = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = read_model(str(tmp_path), recompute=False)
    assert model.num_parameters == pytest.approx(46.7e9, rel=0.01)
    assert model.cost.linear / 6 == pytest.approx(12.75e9, rel=0.01)  # without the input embedding


def test_families_with_names_of_their_own(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(n_layer=3, n_embd=48, n_head=4).save_pretrained(tmp_path)
    transformers_cost = CostModel.from_config(transformers.GPT2Config(n_layer=3, n_embd=48, n_head=4))
    assert read_model(str(tmp_path), recompute=False).cost == transformers_cost


# ---- the command ---------------------------------------------------------------------------------------


def test_report_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    lengths = long_tailed(500)
    out, picture = tmp_path / "advice.json", tmp_path / "advice.png"
    words = ["advise", "--lengths", write_lengths(tmp_path, lengths), "--gpus", "1,4,16", "--sequences", "4"]
    words += ["--model", "qwen2.5-1.5b", "--boundary-s", "0.1", "--slow", "0.9", "--noise", "0.02"]
    assert main([*words, *QUICK, "--json", str(out), "--png", str(picture)]) == 0
    text = capsys.readouterr().out
    assert f"Sequences: 500 of {tmp_path}/lengths.txt" in text
    for expected in ("collective lb_micro", "on demand lb_mini", "on demand dynamic", "bound: "):
        assert expected in text
    assert "Not modelled:" in text
    assert "16 GPUs, minibatches of 64 sequences (4 a GPU" in text
    document = json.loads(out.read_text())
    assert [result["gpus"] for result in document["results"]] == [1, 4, 16]
    assert document["sequences"]["mean"] == pytest.approx(np.mean(lengths))
    assert document["machine"]["slow"] == 0.9
    last = document["results"][-1]
    assert [size["sequences"] for size in last["sizes"]] == [16, 32, 64, 128, 256]  # 512 there are not
    assert [method["strategy"] for method in last["asked"]["methods"]] == list(STRATEGIES)
    for method in last["asked"]["methods"]:
        assert method["step_s"] >= last["asked"]["bound"]["step_s"] * 0.9  # noise may make them faster
    assert last["advice"]
    assert all(sentence in text for sentence in last["advice"])
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_a_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "tokens"
    samples = [{"input_ids": [1] * length, "loss_mask": [1] * length} for length in (5, 9, 60, 100)]
    TokenDataset.write(data, samples)
    words = ["advise", "--data", str(data), "--gpus", "2", "--train-batch-size", "3", *QUICK]
    assert main(words) == 0
    assert "minibatches of 3 sequences (1.5 a GPU" in capsys.readouterr().out
    assert main([*words, "--max-tokens", "50"]) == 2
    assert "2 of 4 sequences have more than --max-tokens 50; the longest has 100" in capsys.readouterr().err
    assert main([*words, "--max-tokens", "50", "--too-long", "truncate"]) == 0
    assert "2 of 4 sequences cut to 50 tokens" in capsys.readouterr().out
    assert main([*words, "--max-tokens", "50", "--too-long", "skip"]) == 0
    text = capsys.readouterr().out
    assert "2 of 4 sequences over 50 tokens left out" in text
    assert "more than the 2 there are: they are drawn with replacement" in text


def test_a_measured_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = load_script(ROOT / "tests" / "simulate" / "test_measured.py", "written_run")
    lengths = module.write_run(tmp_path / "metrics.jsonl")
    words = ["advise", "--lengths", write_lengths(tmp_path, lengths), "--gpus", "4", *QUICK]
    words += ["--run", str(tmp_path / "metrics.jsonl"), "--json", str(tmp_path / "advice.json")]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "fitted to 38 steps" in text
    assert "boundary 125 ms" in text
    assert "assumed" not in text
    document = json.loads((tmp_path / "advice.json").read_text())
    assert document["machine"]["boundary_s"] == 0.125
    assert document["machine"]["traffic_s"] == 0
    # The run's own minibatches: 32 sequences on 4 ranks with lb_mini.
    asked = document["results"][0]["asked"]
    measured = np.mean(
        [json.loads(line)["step_s"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()[3:20]]
    )
    assert asked["methods"][2]["step_s"] == pytest.approx(measured, rel=0.15)  # of other sequences
    other = ["advise", "--workload", "swesmith", "--gpus", "4", *QUICK]
    assert main([*other, "--run", str(tmp_path / "metrics.jsonl")]) == 0
    assert "give its data for a good fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workload", "grpo", "--gpus", "0"], "--gpus 0: expected numbers from 1 to 4096"),
        (["--workload", "grpo", "--gpus", "5000"], "--gpus 5000"),
        (["--workload", "grpo", "--sequences", "0"], "--sequences 0: it must be 1 or more"),
        (["--workload", "grpo", "--sequences", "9999999"], "--sequences: minibatches of 639,999,936"),
        (["--workload", "grpo", "--too-long", "skip"], "--too-long skip: not with --workload"),
        (["--workload", "grpo", "--noise", "nan"], "--noise nan"),
        (["--workload", "grpo", "--slow", "0"], "--slow 0: it must be above 0"),
        (["--workload", "grpo", "--tflops", "1", "--run", "x"], "--tflops: not with --run"),
        (["--workload", "grpo", "--png", "x.pdf"], "--png x.pdf: it must end in .png"),
        (["--workload", "grpo", "--json", "missing/x.json"], "--json missing/x.json: there is no folder"),
        (
            ["--workload", "grpo", "--max-tokens", "100"],
            "--max-tokens 100: grpo has sequences of up to 16984",
        ),
        (["--workload", "grpo", "--model", "missing"], "--model missing: it does not exist"),
        (["--workload", "grpo", "--model", "."], "--model .: it has no config.json"),
        (["--workload", "grpo", "--model", "bad.json"], "--model bad.json: bad.json cannot be read"),
        (["--workload", "grpo", "--model", "list.json"], "list.json is no configuration"),
        (["--workload", "grpo", "--model", "little.json"], "--model little.json: "),
        (["--workload", "grpo", "--run", "missing.jsonl"], "missing.jsonl cannot be read"),
        (["--workload", "grpo", "--run", "bad.json"], "bad.json, line 1: no step of a run"),
        (["--lengths", "missing.txt"], "--lengths missing.txt: it cannot be read: No such file"),
        (["--lengths", "empty.txt"], "--lengths empty.txt: it has no sequences"),
        (["--lengths", "words.txt"], "--lengths words.txt, line 2: '3.5' is no length"),
        (["--data", "missing"], "--data: "),
    ],
)
def test_mistakes(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "little.json").write_text('{"hidden_size": 64}')
    (tmp_path / "empty.txt").write_text("# nothing\n")
    (tmp_path / "words.txt").write_text("12\n3.5\n")
    assert main(["advise", *words, *QUICK]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_all_problems_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--workload", "grpo", "--gpus", "0,8", "--minibatches", "0", "--seed", "-1"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[2].split()[0] for line in errors] == ["--minibatches", "--seed", "--gpus"]


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--workload", "grpo", "--lengths", "x"], ["--workload", "grpo", "--gpus", "8,x"]):
        with pytest.raises(SystemExit) as caught:
            main(["advise", *words])
        assert caught.value.code == 2
        assert "odc advise: error:" in capsys.readouterr().err


def test_commands_of_the_page_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    import odc_tools.advise

    seen: list[str] = []

    def check(options: Any) -> int:
        odc_tools.advise.check_options(options)
        seen.append(options.command)
        return 0

    monkeypatch.setattr(odc_tools.advise, "run", check)
    page = (ROOT / "docs" / "advice.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^odc (advise .*)$", page, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        assert main(shlex.split(command, comments=True)) == 0
    assert seen == ["advise"] * len(commands)


def test_the_example_in_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "advice.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "docs/advice.md", "exec"), {})
    assert capsys.readouterr().out
