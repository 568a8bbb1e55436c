"""What is trained in a benchmark: distributions of sequence lengths, and shapes of models.

Everything is a function of its seed. Lengths are drawn with numpy's PCG64, whose streams are the same on all
machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from odcengine.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

Lengths = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

LONGEST = 65536
"""Tokens at which the long distributions are cut."""

_ROLLOUTS = 8  # answers to one prompt
_LONGEST_ANSWER, _LONGEST_PROMPT = 16384, 600


def longalign(dice: np.random.Generator, count: int) -> Lengths:
    """Long instructions, as in LongAlign: ``exp(N(ln 12280, 0.80))``, cut to 512..65536; mean 16.5k."""
    return _cut(dice.lognormal(math.log(12280), 0.80, count), 512, LONGEST)


def swesmith(dice: np.random.Generator, count: int) -> Lengths:
    """Traces of software agents, as in SWE-Smith: ``Gamma(4.5, 7830)``, cut to 2048..65536; mean 34.7k."""
    return _cut(dice.gamma(4.5, 7830.0, count), 2048, LONGEST)


def sharegpt(dice: np.random.Generator, count: int) -> Lengths:
    """Conversations, as in ShareGPT: ``exp(N(ln 1083, 1.42))``, cut to 16..65536; mean 2.9k."""
    return _cut(dice.lognormal(math.log(1083), 1.42, count), 16, LONGEST)


def grpo(dice: np.random.Generator, count: int) -> Lengths:
    """Rollouts of GRPO on competition mathematics: 8 answers to each prompt, in random order; mean 7.8k.

    Of each prompt the length is ``N(150, 60)``, cut to 40..600, and the median answer ``m = exp(N(ln 6500,
    0.55))``. An answer has ``m * exp(N(0, 0.45))`` tokens, at most 16384, and its sequence the prompt's more.
    """
    num_prompts = -(-count // _ROLLOUTS)
    prompts = _cut(dice.normal(150, 60, num_prompts), 40, _LONGEST_PROMPT)
    medians = dice.lognormal(math.log(6500), 0.55, num_prompts)
    answers = np.repeat(medians, _ROLLOUTS) * dice.lognormal(0.0, 0.45, num_prompts * _ROLLOUTS)
    lengths = (np.repeat(prompts, _ROLLOUTS) + _cut(answers, 1, _LONGEST_ANSWER))[:count]
    dice.shuffle(lengths)
    return lengths


def _cut(values: npt.NDArray[np.float64], least: int, most: int) -> Lengths:
    return np.clip(np.rint(values), least, most).astype(np.int64)


@dataclass(frozen=True)
class Workload:
    """Lengths of minibatches.

    Attributes:
        name: as the command line has it.
        draw: lengths of so many sequences; None where all are ``longest``.
        longest: tokens of the longest sequence that can come; by default the limit of a micro-batch.
        sequences: sequences a rank and minibatch; None: the command line's choice.
    """

    name: str
    draw: Callable[[np.random.Generator, int], Lengths] | None
    longest: int
    sequences: int | None = None

    @property
    def balanced(self) -> bool:
        """Whether all sequences are equally long."""
        return self.draw is None

    def lengths(self, seed: int, minibatch: int, count: int, scale: float = 1.0) -> list[int]:
        """Lengths of the sequences of one minibatch.

        Args:
            seed: of the benchmark.
            minibatch: number of the minibatch, from 0.
            count: sequences over all ranks.
            scale: factor on all lengths, for small machines.

        Returns:
            Tokens of each sequence, at least 2.
        """
        dice = np.random.Generator(np.random.PCG64([seed, minibatch]))
        drawn = np.full(count, self.longest) if self.draw is None else self.draw(dice, count)
        return [max(2, round(length * scale)) for length in drawn.tolist()]

    def token_limit(self, scale: float = 1.0) -> int:
        """Tokens of the longest sequence at this scale."""
        return max(2, round(self.longest * scale))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("longalign", longalign, LONGEST),
        Workload("swesmith", swesmith, LONGEST),
        Workload("grpo", grpo, _LONGEST_PROMPT + _LONGEST_ANSWER),
        Workload("sharegpt", sharegpt, LONGEST),
        Workload("balanced-2k", None, 2048, sequences=8),
        Workload("balanced-8k", None, 8192, sequences=4),
        Workload("single-32k", None, 32768, sequences=1),
    )
}


def draw_tokens(
    seed: int, minibatch: int, lengths: Sequence[int], vocab_size: int, text: Bytes | None = None
) -> list[Lengths]:
    """Tokens of the sequences of one minibatch; every rank draws all of them alike.

    Args:
        seed: of the benchmark.
        minibatch: number of the minibatch.
        lengths: tokens of each sequence.
        vocab_size: ids are below.
        text: whose bytes, from a random place on, are a sequence's tokens; None: random numbers.

    Returns:
        For each sequence its token ids, int64 of its length.
    """
    tokens = []
    for position, length in enumerate(lengths):
        dice = np.random.Generator(np.random.PCG64([seed, minibatch, position]))
        if text is None:
            tokens.append(dice.integers(0, vocab_size, length))
        else:
            places = np.arange(length) + dice.integers(len(text))
            tokens.append(text[places % len(text)].astype(np.int64) % vocab_size)
    return tokens


def read_text(folder: str) -> Bytes:
    """The bytes of all Python files of a folder, one after the other in the order of their names.

    Raises:
        ConfigError: there are none.
    """
    files = sorted(Path(folder).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    if not text:
        raise ConfigError(f"--text {folder}: there is no *.py file with text in it")
    return np.frombuffer(text, dtype=np.uint8)


_QWEN = {"vocab_size": 151936, "max_position_embeddings": 131072}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": _QWEN
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": _QWEN
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": _QWEN
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
"""Values of transformers' ``Qwen2Config``; all Qwen2.5 shapes have the tokenizer's 151,936 entries (the
published 7B pads its embeddings to 152,064). Bases of rotary positions are transformers' defaults."""


def model_config(shape: str) -> Any:
    """The ``Qwen2Config`` of a shape.

    Args:
        shape: one of :data:`SHAPES`.

    Raises:
        ConfigError: transformers is missing.
    """
    try:
        from transformers import Qwen2Config
    except ImportError as error:
        raise ConfigError(
            f"odc bench training needs transformers, which is missing here ({error}); "
            "pip install 'odcengine[hf]'"
        ) from error
    return Qwen2Config(**SHAPES[shape])


def build_model(
    config: Any, *, seed: int, device: str, checkpointing: bool, compiled: bool = False, stays: bool = False
) -> nn.Module:
    """A model with random fp32 weights, ready for packed rows.

    The weights are numbers that bf16 has, too: DeepSpeed's masters begin at those, and so must all methods'
    for a comparison of losses.

    Args:
        config: from :func:`model_config`.
        seed: of the weights.
        device: where they are drawn; a GPU takes seconds where a CPU takes minutes.
        checkpointing: recompute every block in the backward.
        compiled: compile every block, as ``model.compile`` does.
        stays: leave the weights on ``device``, which is faster; else they go to the CPU, so that nothing of
            the whole model is left there.

    Returns:
        The model in training mode. Its attention and loss are odcengine's (``odcengine.models``).
    """
    import torch
    from transformers import AutoModelForCausalLM

    from odcengine.models import enable_checkpointing, prepare_model
    from odcengine.sharding.wrap import block_modules

    torch.manual_seed(seed)
    with torch.device(device):
        make: Any = AutoModelForCausalLM.from_config
        model: nn.Module = make(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    prepare_model(model if stays else model.to("cpu"))
    if checkpointing:
        enable_checkpointing(model)
    if compiled:
        from odcengine.models.compiled import compile_blocks

        compile_blocks(block_modules(model))
    return model.train()
