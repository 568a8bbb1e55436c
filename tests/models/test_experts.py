"""Mixtures of experts whose micro-batches pull only the experts that their tokens chose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_ranks, values
from engine.toy import assemble, shard, worst_error

import odcengine
from odcengine.errors import ConfigError
from odcengine.models import load_model, prepare_model
from odcengine.sharding import padding
from odcengine.sharding.layout import PlainMemory, padding_notice
from odcengine.sharding.wrap import group_modules

pytest.importorskip("transformers")

VOCAB, EXPERTS = 64, 8
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 12},
    "mixtral": {"num_local_experts": 5},
    "gpt_oss": {"num_local_experts": 3},
    "two experts": {"model_type": "mixtral", "num_local_experts": 2},
    "qwen2_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 8},
}
STEPS = 2
LENGTHS = ((3, 1, 2), (2,))  # tokens of the micro-batches of each rank; a third one has none


def make(kind: str, implementation: str) -> Any:
    """float64, but for the grouped products, which torch has for at most float32."""
    dtype = "float32" if implementation == "grouped_mm" else "float64"
    model: Any = load_model({**SHAPE, "model_type": kind, **MIXTURES[kind]}, dtype=dtype)
    model.set_experts_implementation(implementation)
    return model


def tokens(step: int, rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + number)
    return torch.randint(VOCAB, (1, LENGTHS[rank][number]), generator=generator)


def loss_of(model: Any, row: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=row, use_cache=False).logits[0]
    return F.cross_entropy(logits, row[0].roll(1), reduction="sum")


def poisoned(self: Any, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that spoils everything if what was not pulled is read."""
    memory = torch.empty(*size, dtype=dtype, device=device)
    return memory.fill_(0xFF) if dtype == torch.uint8 else memory.fill_(float("nan"))


def _train(rank: int, world_size: int, cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    PlainMemory.allocate = poisoned  # type: ignore[method-assign]
    tolerated, found = padding._TOLERATED, []
    for kind, options in cases:
        padding._TOLERATED = options.get("tolerated", tolerated)
        found.append(_train_case(rank, kind, options))
    return found


def _train_case(rank: int, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    model = make(kind, options.get("implementation", "eager"))
    if options.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    config = {
        "train_batch_size": "auto",
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "odc": {"timeout_s": 100, "startup_timeout_s": 100, "experts": "chosen", **options.get("odc", {})},
    }
    config["model"] = {"compile": options.get("compile", False)}
    engine, optimizer, _, _ = odcengine.initialize(model=model, config=config)
    gradients: list[dict[str, torch.Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(
            {n: shard(p.grad) for n, p in engine.module.named_parameters() if p.grad is not None}
        )
    )
    device = next(engine.parameters()).device
    traffic, losses = [], []
    for step in range(STEPS):
        before = (engine.transport.traffic.pulled_bytes, engine.transport.traffic.pushed_bytes)
        count = len(LENGTHS[rank]) if rank < len(LENGTHS) else 0
        rows = [tokens(step, rank, number).to(device) for number in range(count)]
        if options.get("evaluate"):
            with torch.no_grad():
                engine(input_ids=rows[0], use_cache=False)
        if options.get("order") == "stack":  # backwards in the reverse order of the forwards
            made = [loss_of(engine, row) for row in rows]
            for loss, row in reversed(list(zip(made, rows, strict=True))):
                engine.backward(loss, count=row.numel())
        elif options.get("order") == "queue":
            made = [loss_of(engine, row) for row in rows]
            for loss, row in zip(made, rows, strict=True):
                engine.backward(loss, count=row.numel())
        elif options.get("order") == "together":
            made = [loss_of(engine, row) for row in rows]
            engine.backward(torch.stack(made).sum(), count=sum(row.numel() for row in rows))
        else:
            for row in rows:
                engine.backward(loss_of(engine, row), count=row.numel())
        losses.append(engine.step().loss)
        after = engine.transport.traffic
        traffic.append((after.pulled_bytes - before[0], after.pushed_bytes - before[1]))
    weights = {name: shard(p) for name, p in engine.module.named_parameters()}
    engine.close()
    return {"gradients": gradients, "weights": weights, "losses": losses, "traffic": traffic}


def reference(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    model = make(kind, options.get("implementation", "eager"))
    model.set_experts_implementation("eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    for step in range(STEPS):
        optimizer.zero_grad()
        count = sum(map(sum, LENGTHS))
        for rank, lengths in enumerate(LENGTHS):
            for number in range(len(lengths)):
                (loss_of(model, tokens(step, rank, number)) / count).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return {"gradients": gradients, "weights": {n: p.detach() for n, p in model.named_parameters()}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("qwen3_moe", {"odc": {"experts": "all"}}),
    "plain": ("qwen3_moe", {}),
    "grouped": ("qwen3_moe", {"implementation": "grouped_mm"}),
    "checkpointing": ("qwen3_moe", {"checkpointing": True}),
    "evaluation, last forward first": ("qwen3_moe", {"order": "stack", "evaluate": True}),
    "first forward first": ("qwen3_moe", {"order": "queue", "implementation": "batched_mm"}),
    "one backward, kept": ("qwen3_moe", {"order": "together", "odc": {"reshard_after_forward": False}}),
    "5 experts on 2 ranks": ("mixtral", {"order": "together"}),
    "shared expert": ("qwen2_moe", {"checkpointing": True}),
    "3 experts with biases": ("gpt_oss", {}),
    "slots of ranks": ("qwen3_moe", {"order": "together", "odc": {"deterministic": True}}),
    "windows of two levels": ("qwen3_moe", {"odc": {"sharding": "hybrid", "node_size": 1}}),
}


def errors(results: list[dict[str, Any]], right: dict[str, Any]) -> tuple[float, float]:
    """Of gradients and weights."""
    found = [assemble(list(shards)) for shards in zip(*(r["gradients"] for r in results), strict=True)]
    weights = assemble([r["weights"] for r in results])
    return worst_error(found, right["gradients"]), worst_error([weights], [right["weights"]])


def test_gradients_are_those_of_one_process() -> None:
    """With memory in which whatever was not pulled is NaN."""
    ranks = values(run_ranks(_train, 2, list(CASES.values()), timeout_s=500))
    results = dict(zip(CASES, zip(*ranks, strict=True), strict=True))
    for name, (kind, options) in CASES.items():
        right = reference(kind, options)
        gradient, weights = errors(list(results[name]), right)
        # transformers computes norms and the router's softmax in float32.
        allowed = 1e-4 if options.get("implementation") == "grouped_mm" else 2e-6
        assert gradient < allowed, name
        assert weights < allowed, name
        used = {n for n in right["gradients"][0] if "experts" in n}
        assert used, name
    # An expert that no token of the minibatch chose has a gradient, of zeros, as in one process.
    first = reference(*CASES["plain"])["gradients"][0]["model.layers.0.mlp.experts.down_proj"]
    assert any(not bool(expert.any()) for expert in first)
    check_traffic(list(results["all"]), list(results["plain"]))


def _train_compiled(rank: int, world_size: int, cases: list[tuple[str, dict[str, Any]]]) -> Any:
    from odcengine.models import compiled

    compiled.compile_blocks.__kwdefaults__["backend"] = "aot_eager"  # inductor takes minutes
    return _train(rank, world_size, cases)


@pytest.mark.soak
def test_compiled_blocks() -> None:
    cases = [("qwen3_moe", {"compile": True, "checkpointing": again}) for again in (False, True)]
    ranks = values(run_ranks(_train_compiled, 2, cases, timeout_s=500))
    for number, case in enumerate(cases):
        gradient, weights = errors([rank[number] for rank in ranks], reference(*case))
        assert gradient < 2e-6
        assert weights < 2e-6


@pytest.mark.multi_gpu
def test_on_gpus() -> None:
    """float64 through transformers' loop, and float32 through grouped products."""
    cases = {
        name: CASES[name] for name in ("all", "plain", "grouped", "checkpointing", "first forward first")
    }
    ranks = values(run_ranks(_train, 2, list(cases.values()), timeout_s=300, gpus=True))
    results = dict(zip(cases, zip(*ranks, strict=True), strict=True))
    for name, (kind, options) in cases.items():
        gradient, weights = errors(list(results[name]), reference(kind, options))
        allowed = 1e-2 if options.get("implementation") == "grouped_mm" else 2e-6  # TF32, perhaps
        assert gradient < allowed, name
        assert weights < allowed, name
    check_traffic(list(results["all"]), list(results["plain"]))


def check_traffic(whole: list[dict[str, Any]], chosen: list[dict[str, Any]]) -> None:
    """Of 8 experts micro-batches of 3, 1 and 2 tokens choose at most 6, 2 and 4; that of rank 1 at most 4.

    Experts are 80% of the model's numbers.
    """
    for every, some in zip(whole, chosen, strict=True):
        for (all_pulled, all_pushed), (pulled, pushed) in zip(every["traffic"], some["traffic"], strict=True):
            assert pulled < 0.75 * all_pulled
            assert pushed < 0.75 * all_pushed


def test_three_ranks() -> None:
    """The third rank runs no micro-batch, and owns one of 5 experts, or none of 2 (all padding)."""
    every: dict[str, Any] = {"odc": {"experts": "all"}}
    cases = [
        ("mixtral", {"checkpointing": True}),
        ("two experts", every),
        ("two experts", {"checkpointing": True, "odc": {"experts": "all", "deterministic": True}}),
        ("two experts", {**every, "tolerated": float("inf")}),
        ("two experts", {}),
    ]
    ranks = values(run_ranks(_train, 3, cases, timeout_s=240))
    for number, case in enumerate(cases):
        gradient, weights = errors([rank[number] for rank in ranks], reference(*case))
        assert gradient < 2e-6, case
        assert weights < 2e-6, case
    for rank in ranks[:2]:  # what is real, and what it would be with the padding
        for real, padded in zip(rank[1]["traffic"], rank[3]["traffic"], strict=True):
            assert all(0 < some < 0.8 * more for some, more in zip(real, padded, strict=True))


def test_refused() -> None:
    dense: Any = load_model({**SHAPE, "model_type": "qwen3"})
    with pytest.raises(ConfigError, match=r"odc.experts: chosen: Qwen3ForCausalLM has no layer of experts"):
        group_modules(dense, "auto", "chosen")
    mixture = make("qwen3_moe", "eager")
    mixture.config._experts_implementation_internal = "sonicmoe"
    with pytest.raises(ConfigError, match="Qwen3MoeExperts computes its experts with 'sonicmoe'"):
        group_modules(mixture, "auto", "chosen")
    wrong = {"train_batch_size": 2, "odc": {"experts": "chosen", "transport": "collective"}}
    with pytest.raises(ConfigError, match="chosen needs a one-sided transport"):
        odcengine.load_config(wrong)


def test_groups() -> None:
    mixture = make("qwen3_moe", "eager")
    names = {id(module): name for name, module in mixture.named_modules()}
    assert [names[id(m)] for m in group_modules(mixture, "auto", "chosen")] == [
        *("model.layers.0", "model.layers.0.mlp.experts"),
        *("model.layers.1", "model.layers.1.mlp.experts"),
    ]
    assert len(group_modules(mixture, "auto", "all")) == 2


def test_padding_is_told_of() -> None:
    """8 experts on 64 ranks; 128 are cut without padding."""

    def groups(num_experts: int) -> Any:
        param = torch.empty(num_experts, 4, 3)
        entry = SimpleNamespace(name="experts.up", param=param, numel=-(-num_experts // 64) * 12)
        return [SimpleNamespace(entries=[entry])]

    assert padding_notice(groups(128), 64) is None
    notice = padding_notice(groups(8), 64)
    assert notice is not None
    assert "8.00 times its parameters: experts.up of shape [8, 4, 3]" in notice


def test_auxiliary_loss_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    prepare_model(load_model({**SHAPE, **MIXTURES["mixtral"], "model_type": "mixtral"}))
    assert "output_router_logits" not in caplog.text
    values_ = {**SHAPE, **MIXTURES["mixtral"], "model_type": "mixtral", "output_router_logits": True}
    prepare_model(load_model(values_))
    assert "output_router_logits has no effect: the auxiliary loss of a mixture is not added" in caplog.text
