"""Compiled blocks (``model.compile``): the same numbers, and nothing is compiled again for other samples."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from distributed import run_ranks, values
from torch import nn

import odcengine
from engine.test_exactness import BY_NAME
from engine.toy import Case, TinyLM, compare, config_for, reference, shard, train, worst_error
from odcengine.data import MicroBatch, pack_samples
from odcengine.errors import ConfigError
from odcengine.models import compiled, enable_checkpointing, prepare_model, varlen

STEPS = 3
_COMPILE_BLOCKS = compiled.compile_blocks


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    yield
    torch._dynamo.reset()


Kernels = Literal["none", "stand-in", "real"]
"""FlashAttention's for variable lengths: none of them, what stands in for them on CPUs, or they."""


def _use(backend: str) -> None:
    """In a rank: what makes kernels of the graphs; "aot_eager" runs them one operation after the other."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled.compile_blocks = functools.partial(_COMPILE_BLOCKS, backend=backend)  # type: ignore[assignment]


# ---- a model of the script: every feature that sharding must survive ----------------------------------

QUICK = ("checkpointing", "lora", "conditional_wrapped", "bf16")


def _with_compile(name: str) -> Case:
    case = BY_NAME[name]
    return Case(**{**vars(case), "config": {**case.config, "model": {"compile": True}}})


def _train_cases(rank: int, world_size: int, names: tuple[str, ...], backend: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in names:
        _use(backend)
        results[name] = train(rank, world_size, _with_compile(name), steps=STEPS)
        results[name]["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return results


@functools.cache
def _quick() -> list[dict[str, Any]]:
    return values(run_ranks(_train_cases, 2, QUICK, "aot_eager", timeout_s=280))


@pytest.mark.parametrize("name", QUICK)
def test_equals_one_process(name: str) -> None:
    _check_case(name, _quick())


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_all_features_with_inductor() -> None:
    names = tuple(name for name in BY_NAME if name != "one_group")  # it has no blocks
    ranks = values(run_ranks(_train_cases, 2, names, "inductor", timeout_s=1100))
    for name in names:
        # What inductor fuses stays in float32, where the reference rounds to bf16 after each operation.
        _check_case(name, ranks, rounding=5e-2 if name == "bf16" else 0.0)


def _check_case(name: str, ranks: list[dict[str, Any]], rounding: float = 0.0) -> None:
    case = BY_NAME[name]
    assert all(rank[name]["graphs"] > 0 for rank in ranks)
    errors = compare(case, [rank[name] for rank in ranks], reference(case, 2, steps=STEPS))
    assert errors["gradient"] <= max(case.grad_tolerance, rounding)
    assert errors["weights"] <= max(case.weight_tolerance, rounding)
    assert errors["evaluation"] <= 1e-10


def test_a_model_without_blocks_is_refused() -> None:
    config = config_for(Case("none", config={"model": {"compile": True}}), wrap="auto")
    with pytest.raises(
        ConfigError, match=r"model.compile: only blocks are compiled, and none .* Linear; name"
    ):
        odcengine.initialize(model=nn.Linear(3, 2), config=config)


def test_only_blocks_are_compiled() -> None:
    model = TinyLM()
    names = set(model.state_dict())
    compiled.compile_blocks(model.blocks, backend="eager")
    assert [m for m in model.modules() if m._compiled_call_impl is not None] == list(model.blocks)
    assert set(model.state_dict()) == names


# ---- packed rows --------------------------------------------------------------------------------------

# Lengths of the samples of each micro-batch, for each minibatch and rank.
ROWS: list[list[list[tuple[int, ...]]]] = [
    [[(5, 3, 7), (11,), (2, 9, 1, 1, 8)], [(6, 3), (1, 1, 1, 19), (12,), (3, 4, 5)]],
    [[(4, 4)], []],
    [[(23, 2), (2, 2, 2, 2, 2, 2)], [(9, 9, 9), (30,)]],
]


def _row(step: int, rank: int, number: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + number)
    lengths = ROWS[step][rank][number]
    return pack_samples(
        [{"input_ids": torch.randint(64, (length,), generator=generator).numpy()} for length in lengths]
    )


def _qwen2(checkpointing: bool, **changes: int) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    config = transformers.Qwen2Config(**sizes | changes, tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if checkpointing:
        enable_checkpointing(model)
    return prepare_model(model)


def _train_packed(
    rank: int, world_size: int, compile_: bool, checkpointing: bool, kernels: Kernels, backend: str
) -> dict[str, Any]:
    _use(backend)
    if kernels == "stand-in":
        _stand_in_for_kernels()
    engine, optimizer, _, _ = odcengine.initialize(
        model=_qwen2(checkpointing),
        config={
            "train_batch_size": "auto",
            "bf16": {"enabled": kernels != "none"},
            # AdamW divides by small second moments, which would blow the last bits of fp32 up.
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "model": {"compile": compile_},
            "odc": {"timeout_s": 100, "startup_timeout_s": 120},
        },
    )
    gradients: list[dict[str, torch.Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append({n: shard(p.grad) for n, p in engine.module.named_parameters()})
    )
    counters = torch._dynamo.utils.counters
    losses, frames, evaluations = [], [], []
    for step, rows in enumerate(ROWS):
        for number in range(len(rows[rank])):
            loss = engine(_row(step, rank, number))
            engine.backward(loss)
            losses.append(loss.item())
            frames.append(counters["frames"]["total"])
        engine.step()
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    engine.eval()
    with torch.no_grad():
        for number in range(0 if kernels == "none" else 3):
            evaluations.append(float(engine(_row(0, 0, number))))
    engine.close()
    return {
        "losses": losses,
        "gradients": gradients,
        "frames": frames,
        "graphs": graphs,
        "breaks": breaks,
        "evaluations": evaluations,
    }


def _stand_in_for_kernels() -> None:
    """torch's operator of FlashAttention's kernels, computed on CPUs with explicit scores."""
    from torch.nn.attention import varlen as torch_varlen

    def probabilities(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
        hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
        return (scale * q @ k.transpose(1, 2)).masked_fill(hidden, -torch.inf).softmax(-1)

    def samples(boundaries: torch.Tensor, groups: int, *rows: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Of each sample ``[heads, tokens, dim]`` in float32."""
        heads = rows[0].shape[1]
        for start, stop in itertools.pairwise(boundaries.tolist()):
            yield [
                row[start:stop]
                .float()
                .repeat_interleave(1 if row.shape[1] == heads else groups, 1)
                .transpose(0, 1)
                for row in rows
            ]

    @torch_varlen._varlen_attn.register_kernel("cpu")
    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        boundaries: torch.Tensor,
        _: torch.Tensor,
        longest: int,
        __: int,
        is_causal: bool,
        scale: float,
        *rest: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert is_causal
        assert longest == int(boundaries.diff().max())
        groups = query.shape[1] // key.shape[1]
        pieces = [
            (probabilities(q, k, scale) @ v).transpose(0, 1)
            for q, k, v in samples(boundaries, groups, query, key, value)
        ]
        unused = torch.zeros(2, dtype=torch.uint64)
        return torch.cat(pieces).to(query.dtype), torch.zeros(query.shape[1], query.shape[0]), unused

    @torch_varlen._varlen_attn_backward.register_kernel("cpu")
    def backward(
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        _: torch.Tensor,
        boundaries: torch.Tensor,
        __: torch.Tensor,
        longest: int,
        ___: int,
        is_causal: bool,
        ____: torch.Tensor,
        scale: float,
        *rest: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        groups = query.shape[1] // key.shape[1]
        found: list[list[torch.Tensor]] = []
        for g, q, k, v in samples(boundaries, groups, grad, query, key, value):
            p = probabilities(q, k, scale)
            from_p = g @ v.transpose(1, 2)
            scores = scale * p * (from_p - (from_p * p).sum(-1, keepdim=True))
            of_heads = [scores @ k, scores.transpose(1, 2) @ q, p.transpose(1, 2) @ g]
            of_heads[1:] = [t.unflatten(0, (-1, groups)).sum(1) for t in of_heads[1:]]
            found.append([t.transpose(0, 1) for t in of_heads])
        dq, dk, dv = (torch.cat(pieces).to(query.dtype) for pieces in zip(*found, strict=True))
        return dq, dk, dv

    function = torch_varlen.varlen_attn
    found = (function, frozenset(inspect.signature(function).parameters))
    varlen.varlen_kernels = lambda: found  # type: ignore[assignment]
    varlen.kernels_run_on = torch.compiler.assume_constant_result(lambda device: True)
    compiled._KERNELS = found


@pytest.mark.parametrize(("kernels", "checkpointing"), [("stand-in", True), ("none", False)])
def test_other_samples(kernels: Kernels, checkpointing: bool) -> None:
    _check_packed(kernels, checkpointing, "aot_eager", world_size=1 if kernels == "none" else 2)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kernels", ["none", "stand-in"])
def test_other_samples_with_inductor(kernels: Kernels, checkpointing: bool) -> None:
    _check_packed(kernels, checkpointing, "inductor", world_size=2)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_other_samples_on_gpus(checkpointing: bool) -> None:
    _check_packed("real", checkpointing, "inductor", world_size=2)


def _check_packed(kernels: Kernels, checkpointing: bool, backend: str, world_size: int) -> None:
    plain, fast = (
        values(
            run_ranks(
                _train_packed,
                world_size,
                on,
                checkpointing,
                kernels,
                backend,
                timeout_s=500,
                gpus=kernels == "real",
            )
        )
        for on in (False, True)
    )
    for result in plain:
        assert result["frames"] == [0] * len(result["frames"])
    for result in fast:
        # The first row's sizes may be 1, or equal by chance; no later row may bring anything new.
        assert len(set(result["frames"][1:])) == 1
        assert result["frames"][0] > 0
        if kernels != "none":
            # One graph for all blocks; a second where transformers checkpoints around a block's hooks, since
            # FSDP2 gives it views as inputs, but not when it is computed again.
            assert result["graphs"] in (1, 2)
            assert result["breaks"] == 0
    # In 16 bits inductor rounds less: it keeps what it fuses in float32.
    tolerance = 1e-5 if kernels == "none" else 5e-2
    found, right = (
        [
            {name: torch.cat([s[name] for s in shards]) for name in shards[0]}
            for shards in zip(*(r["gradients"] for r in ranks), strict=True)
        ]
        for ranks in (fast, plain)
    )
    assert worst_error(found, right) <= tolerance
    for a, b in zip(fast, plain, strict=True):
        assert a["losses"] == pytest.approx(b["losses"], rel=tolerance)
        assert a["evaluations"] == pytest.approx(b["evaluations"], rel=tolerance)


@pytest.mark.gpu
def test_no_length_compiles_again_on_a_gpu() -> None:
    """Inductor has other ways for long rows than for short ones, and would guard the bounds."""
    (found,) = values(run_ranks(_lengths_on_a_gpu, 1, gpus=True, timeout_s=280))
    first, *later = found
    assert first > 0
    assert later == [first] * len(later)


def _lengths_on_a_gpu(rank: int, world_size: int) -> list[int]:
    """Graphs that there are after rows of several lengths."""
    model = _qwen2(True, hidden_size=1024, intermediate_size=2048, max_position_embeddings=16384)
    model = model.to("cuda", torch.bfloat16)
    compiled.compile_blocks(model.model.layers)
    graphs = []
    for length in (12000, 5000, 3000, 1500, 300, 16000):
        row = pack_samples([{"input_ids": torch.zeros(length, dtype=torch.int64).numpy()}]).to("cuda")
        model(**row.model_inputs()).logits.float().sum().backward()
        torch.cuda.synchronize()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return graphs
