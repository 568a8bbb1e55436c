"""Parts of examples/grpo that need no rank: the reward, files of rollouts, and the hand-over to vLLM."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from odcengine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the example; one of them has the name of this folder."""
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "rollouts"}
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "grpo"))
    import arithmetic
    import train

    import rollouts

    yield types.SimpleNamespace(arithmetic=arithmetic, rollouts=rollouts, train=train)
    for name in ("arithmetic", "rollouts", "train"):
        del sys.modules[name]
    sys.modules.update(ours)


@pytest.mark.parametrize(
    ("completion", "reward"), [("19", 1.0), ("18", 0.1), ("-7", 0.1), ("1-9", 0.0), ("", 0.0), ("19 ", 0.0)]
)
def test_reward(completion: str, reward: float, example: Any) -> None:
    assert example.arithmetic.reward_of("12+7=", completion) == reward
    assert example.arithmetic.solve("3-12=") == "-9"
    with pytest.raises(ValueError, match="is no problem such as"):
        example.arithmetic.solve("12*7=")


def test_files_of_rollouts(tmp_path: Path, example: Any) -> None:
    tokenizer, path = example.arithmetic.Characters(), tmp_path / "kept.jsonl"
    made = [
        example.rollouts.Rollout(prompt, answer, [], [], reward)
        for prompt, answer, reward in [("1+1=", "2", 1.0), ("1+1=", "3", 0.1), ("2-5=", "", None)]
    ]
    example.rollouts.write_rollouts(path, made[:2])
    example.rollouts.write_rollouts(path, made[2:])
    groups = list(example.rollouts.read_groups([path], tokenizer))
    assert [[rollout.completion for rollout in group] for group in groups] == [["2", "3"], [""]]
    assert groups[0][0].prompt_ids == tokenizer.encode("1+1=")
    assert groups[0][0].completion_ids == [*tokenizer.encode("2"), tokenizer.eos_token_id]
    found = [example.train.with_reward(rollout) for group in groups for rollout in group]
    assert [rollout.reward for rollout in found] == [1.0, 0.1, 0.0]
    samples = example.train.to_samples(found, num_updates=2)
    assert [sample["update"] for sample in samples] == [0, 0, 1]
    assert float(samples[0]["advantages"]) == -float(samples[1]["advantages"]) > 0
    assert float(samples[2]["advantages"]) == 0
    assert samples[0]["loss_mask"] == [0, 0, 0, 0, 1, 1]
    assert example.train.to_samples([], 2) == []
    path.write_text('{"prompt": "1+1="}\n')
    with pytest.raises(ConfigError, match=r"kept.jsonl:1: KeyError\('completion'\); a line is an object"):
        list(example.rollouts.read_groups([path], tokenizer))


class _Engine:
    """As much of an engine as a sampler uses."""

    topology = types.SimpleNamespace(rank=3)
    model = nn.Linear(2, 2)

    @contextlib.contextmanager
    def generating(self) -> Iterator[nn.Module]:
        yield self.model


def test_vllm_gets_the_weights_and_gives_rollouts(monkeypatch: pytest.MonkeyPatch, example: Any) -> None:
    """Against a stand-in with the calls of vLLM that are used; the real one needs a GPU."""
    tokenizer = example.arithmetic.Characters()
    loaded: list[Any] = []

    class LLM:
        def __init__(self, **options: Any) -> None:
            assert (options["model"], options["tensor_parallel_size"], options["seed"]) == ("dir", 1, 3)
            model = types.SimpleNamespace(load_weights=loaded.append)
            runner = types.SimpleNamespace(model_runner=types.SimpleNamespace(model=model))
            executor = types.SimpleNamespace(driver_worker=runner)
            self.llm_engine = types.SimpleNamespace(model_executor=executor)

        def reset_prefix_cache(self) -> None:
            loaded.append("prefixes dropped")

        def generate(self, prompts: list[dict[str, Any]], params: Any) -> list[Any]:
            assert (params.n, params.temperature, params.max_tokens) == (2, 0.7, 5)
            answer = types.SimpleNamespace(token_ids=(*tokenizer.encode("19"), tokenizer.eos_token_id))
            return [types.SimpleNamespace(outputs=[answer] * params.n) for _ in prompts]

    stand_in = types.SimpleNamespace(LLM=LLM, SamplingParams=types.SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    make = example.rollouts.VllmSampler
    sampler = make(_Engine(), tokenizer, "dir", max_tokens=5, temperature=0.7)
    found = sampler(["12+7=", "20-1="], 2)
    assert [rollout.prompt for rollout in found] == ["12+7=", "12+7=", "20-1=", "20-1="]
    assert {rollout.completion for rollout in found} == {"19"}
    assert [name for name, _ in loaded[0]] == ["weight", "bias"]
    assert loaded[1] == "prefixes dropped"
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"vLLM cannot be imported .* use --sampler generate"):
        make(_Engine(), tokenizer, "dir", max_tokens=5, temperature=0.7)
