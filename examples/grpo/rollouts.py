"""Where rollouts come from: the engine's own model, vLLM, or a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from odcengine import OdcEngine
from odcengine.errors import ConfigError


class Rollout(NamedTuple):
    """A prompt with one sampled answer.

    Attributes:
        prompt: text of the question.
        completion: text of the answer.
        prompt_ids: its tokens.
        completion_ids: those of the answer, with the one that ends it, if it came to an end.
        reward: as the file says; None where it has to be computed.
    """

    prompt: str
    completion: str
    prompt_ids: list[int]
    completion_ids: list[int]
    reward: float | None = None


class Tokenizer(Protocol):
    """What is needed of a tokenizer; those of transformers fit."""

    pad_token_id: int
    eos_token_id: int

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...


class Sampler(Protocol):
    """Samples answers with the weights that the engine has now."""

    def __call__(self, prompts: Sequence[str], num_answers: int, *, greedy: bool = False) -> list[Rollout]:
        """``num_answers`` rollouts of each prompt, one prompt after the other."""


class GenerateSampler:
    """Samples with ``model.generate`` of transformers on the engine's own sharded model.

    Each rank samples by itself and as long as it likes; no rank waits for another.

    Args:
        engine: whose model samples.
        tokenizer: of the model.
        max_tokens: limit of an answer.
        temperature: of sampling; log-probabilities of the update are taken at the same.
    """

    def __init__(
        self, engine: OdcEngine, tokenizer: Tokenizer, *, max_tokens: int, temperature: float
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._temperature = temperature

    def __call__(self, prompts: Sequence[str], num_answers: int, *, greedy: bool = False) -> list[Rollout]:
        tokenizer, device = self._tokenizer, next(self._engine.parameters()).device
        asked = [prompt for prompt in prompts for _ in range(num_answers)]
        tokens = [tokenizer.encode(prompt) for prompt in asked]
        width = max(map(len, tokens))
        # Padded on the left: generation goes on at the right.
        rows = [[tokenizer.pad_token_id] * (width - len(row)) + row for row in tokens]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in tokens]
        options: dict[str, Any] = {"do_sample": False}
        if not greedy:  # from the whole distribution: the update computes its log-probabilities
            options = {"do_sample": True, "temperature": self._temperature, "top_k": 0, "top_p": 1.0}
        with self._engine.generating() as model:
            output = model.generate(
                input_ids=torch.tensor(rows, device=device),
                attention_mask=torch.tensor(mask, device=device),
                max_new_tokens=self._max_tokens,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                **options,
            )
        answers = [_up_to_end(row, tokenizer.eos_token_id) for row in output[:, width:].tolist()]
        return [
            Rollout(prompt, _text(tokenizer, answer), prompt_ids, answer)
            for prompt, prompt_ids, answer in zip(asked, tokens, answers, strict=True)
        ]


class VllmSampler:
    """Samples with vLLM, one instance a rank on the rank's own GPU.

    Before each round it gets the weights in memory: inside of ``engine.generating()`` parameters are whole.

    Args:
        engine: whose weights sample.
        tokenizer: of the model.
        model_path: directory of the model, from which vLLM takes its architecture.
        max_tokens: limit of an answer.
        temperature: of sampling.
        memory_share: share of the GPU's memory that vLLM may take.

    Raises:
        ConfigError: vLLM is not installed.
    """

    def __init__(
        self,
        engine: OdcEngine,
        tokenizer: Tokenizer,
        model_path: str,
        *,
        max_tokens: int,
        temperature: float,
        memory_share: float = 0.3,
    ) -> None:
        try:
            from vllm import LLM, SamplingParams
        except ImportError as error:
            raise ConfigError(
                f"--sampler vllm: vLLM cannot be imported ({error}); install it (pip install vllm) into this "
                "environment, or use --sampler generate"
            ) from error
        self._engine = engine
        self._tokenizer = tokenizer
        self._limits = {"max_tokens": max_tokens}
        self._temperature = temperature
        self._params = SamplingParams
        self._llm = LLM(
            model=model_path,
            tensor_parallel_size=1,
            distributed_executor_backend="external_launcher",  # this process is the worker
            gpu_memory_utilization=memory_share,
            enforce_eager=True,
            seed=engine.topology.rank,
        )

    def __call__(self, prompts: Sequence[str], num_answers: int, *, greedy: bool = False) -> list[Rollout]:
        with self._engine.generating() as model:
            worker = self._llm.llm_engine.model_executor.driver_worker
            worker.model_runner.model.load_weights(list(model.named_parameters()))
            self._llm.reset_prefix_cache()
        tokens = [self._tokenizer.encode(prompt) for prompt in prompts]
        params = self._params(
            n=num_answers, temperature=0.0 if greedy else self._temperature, top_p=1.0, **self._limits
        )
        found = self._llm.generate([{"prompt_token_ids": row} for row in tokens], params)
        return [
            Rollout(prompt, _text(self._tokenizer, answer), row, answer)
            for prompt, row, of_prompt in zip(prompts, tokens, found, strict=True)
            for output in of_prompt.outputs
            for answer in (list(output.token_ids),)
        ]


def _up_to_end(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def _text(tokenizer: Tokenizer, answer: list[int]) -> str:
    return tokenizer.decode(answer[:-1] if answer[-1:] == [tokenizer.eos_token_id] else answer)


# ---- files ---------------------------------------------------------------------------------------------


def write_rollouts(path: Path, rollouts: Iterable[Rollout]) -> None:
    """Append rollouts to a JSONL file, a line each with ``prompt``, ``completion`` and ``reward``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for rollout in rollouts:
            line = {"prompt": rollout.prompt, "completion": rollout.completion, "reward": rollout.reward}
            file.write(json.dumps(line) + "\n")


def read_groups(paths: Iterable[Path], tokenizer: Tokenizer) -> Iterator[list[Rollout]]:
    """Groups of answers to one prompt, which stand one after the other in JSONL files.

    A line has ``prompt`` and ``completion``, and may have ``reward``.

    Raises:
        ConfigError: a line that is no rollout; names it.
    """
    group: list[Rollout] = []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                item = json.loads(line)
                prompt, completion = str(item["prompt"]), str(item["completion"])
                reward = None if item.get("reward") is None else float(item["reward"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"{path}:{number}: {error!r}; a line is an object with prompt, completion and perhaps "
                    "reward"
                ) from error
            if group and group[0].prompt != prompt:
                yield group
                group = []
            answer = [*tokenizer.encode(completion), tokenizer.eos_token_id]
            group.append(Rollout(prompt, completion, tokenizer.encode(prompt), answer, reward))
    if group:
        yield group
