"""What each family of models does here, measured: the tables of docs/models.md.

    PYTHONPATH=tests python -m models.matrix --write    # measure, and put the tables into docs/models.md

Every family is measured with a tiny random model. On two CPU ranks with unequal numbers of micro-batches its
gradient is compared with that of one process, which runs transformers' own attention on one sample after the
other; once more with gradient checkpointing; and the weights are exported and loaded by transformers again.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from distributed import run_ranks, values
from torch import nn
from torch.distributed.tensor import DTensor

import odcengine
from models.families import FAMILIES, REFUSED, Family, Refused
from odcengine.balance import CostModel
from odcengine.data import pack_samples
from odcengine.errors import ConfigError, UsageError
from odcengine.losses import causal_lm_loss_sum
from odcengine.losses.fused_head import fuses_loss, mark_fused
from odcengine.models import load_model, prepare_model
from odcengine.sharding.wrap import block_modules

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
SEED = 3
# Two minibatches of five samples. One rank gets the longest, the other the rest in two micro-batches.
LENGTHS = (9, 4, 3, 2, 1) * 2
SAMPLES_A_STEP = 5
LONGEST = 9
# transformers computes norms and softmax in float32 also of float64 models.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Row:
    """What was found of a family; errors are relative to the largest number.

    Attributes:
        logits: a sample in a packed row against the sample alone.
        gradient: two ranks against one process.
        checkpointed: the same, with gradient checkpointing.
        loss: the loss of a packed row against that of all its logits; 0 where these are used.
        fused: the head computes the loss.
        exported: logits of the exported model against those of the trained one.
        tied: embedding and head are one tensor, before and after export.
        cost: FLOP of a token in the cost model over those of the model's matrices.
    """

    logits: float
    gradient: float
    checkpointed: float
    loss: float
    fused: bool
    exported: float
    tied: bool
    cost: float


def samples() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)
    return [
        {"input_ids": torch.randint(3, 60, (length,), generator=generator).tolist()} for length in LENGTHS
    ]


def make(family: Family) -> Any:
    return load_model(_config_of(family), dtype="float64", random_seed=SEED)


def _config_of(family: Family) -> dict[str, Any]:
    # torch has no grouped products of float64.
    mixture = any("expert" in name for name in family.config)
    return {**family.config, **({"experts_implementation": "eager"} if mixture else {})}


# ---- on two ranks --------------------------------------------------------------------------------------


def train(rank: int, world_size: int, names: list[str], folder: str) -> dict[str, Any]:
    return {name: _train(FAMILIES[name], Path(folder) / name) for name in names}


def _train(family: Family, out: Path) -> dict[str, Any]:
    config = {
        "train_batch_size": SAMPLES_A_STEP,
        "seed": SEED,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "data": {"shuffle": False},
        "balance": {"strategy": "lb_mini", "max_tokens_per_micro_batch": LONGEST},
        "odc": {"timeout_s": 100, "startup_timeout_s": 100},
        "model": {"config": _config_of(family), "dtype": "float64"},
    }
    engine, optimizer, loader, _ = odcengine.initialize(config=config, training_data=samples())
    assert loader is not None
    gradients: list[dict[str, torch.Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append({n: _shard(p) for n, p in engine.module.named_parameters()})
    )
    counts = []
    for minibatch in loader:
        number = 0
        for micro_batch in minibatch:
            engine.backward(engine(micro_batch))
            number += 1
        counts.append(number)
        engine.step()
        # The second minibatch is the same, but recomputed in the backward.
        engine.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine.save_pretrained(out)
    engine.close()
    return {"gradients": gradients, "counts": counts}


def _shard(parameter: nn.Parameter) -> torch.Tensor | None:
    gradient = parameter.grad
    return gradient.to_local().clone() if isinstance(gradient, DTensor) else None


# ---- in one process ------------------------------------------------------------------------------------


def reference(model: Any) -> list[dict[str, torch.Tensor]]:
    """Gradients of the minibatches with one forward a sample and transformers' own attention."""
    found, data = [], samples()
    for start in range(0, len(data), SAMPLES_A_STEP):
        model.zero_grad()
        total, count = torch.zeros((), dtype=torch.float64), 0
        for sample in data[start : start + SAMPLES_A_STEP]:
            tokens = torch.tensor(sample["input_ids"])
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
            total = total + F.cross_entropy(logits, tokens[1:], reduction="sum")
            count += len(tokens) - 1
        torch.autograd.backward(total / count)
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    return found


def logits_alone(model: Any) -> torch.Tensor:
    rows = [torch.tensor([sample["input_ids"]]) for sample in samples()]
    with torch.no_grad():
        return torch.cat([model(input_ids=row, use_cache=False).logits[0] for row in rows])


def relative(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).abs().max() / right.abs().max())


def gradient_error(found: dict[str, torch.Tensor | None], right: dict[str, torch.Tensor]) -> float:
    """Largest difference relative to a parameter's largest gradient, with a floor for those that vanish."""
    used = {name for name, gradient in found.items() if gradient is not None}
    if used != right.keys():
        return float("inf")
    largest = max(float(gradient.abs().max()) for gradient in right.values())
    errors = []
    for name, expected in right.items():
        gradient = found[name]
        assert gradient is not None
        scale = max(float(expected.abs().max()), 1e-3 * largest)
        errors.append(float((gradient - expected).abs().max()) / scale)
    return max(errors)


def loss_error(model: Any) -> float:
    """The head's loss and its gradients, against those of all logits."""
    batch = pack_samples(samples()[:3])
    found = []
    for fused in (True, False):
        mark_fused(model, fused)
        model.zero_grad()
        loss = causal_lm_loss_sum(model, batch)
        torch.autograd.backward(loss)
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((loss.detach(), gradients))
    mark_fused(model, True)
    (loss, gradients), (right_loss, right) = found
    return max(relative(loss, right_loss), gradient_error(dict(gradients), right))


def cost_ratio(model: Any) -> float:
    """FLOP of a token in the cost model over six for each number of a matrix that the token meets."""
    config = model.config.get_text_config()
    count, embeddings = 0.0, model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("vision", "multi_modal", "wpe", "positions", "per_layer.weight")):
            continue
        if parameter.dim() < 2 or (parameter is embeddings and parameter is not head):
            continue
        stacked = parameter.dim() == 3 and "experts" in name
        count += parameter.numel() * (config.num_experts_per_tok / len(parameter) if stacked else 1)
    return CostModel.from_config(model.config).linear / (6 * count)


def measure_family(family: Family, ranks: list[dict[str, Any]], exported: Path) -> Row:
    """One row.

    Args:
        family: the family.
        ranks: what :func:`train` returned for it on each rank.
        exported: where the ranks exported it to.
    """
    import transformers

    model = make(family).eval()
    alone, right = logits_alone(model), reference(model)
    again: Any = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    if hasattr(again, "set_experts_implementation"):
        again.set_experts_implementation("eager")
    gradients = [
        {
            name: None if shards[0][name] is None else torch.cat([s[name] for s in shards])
            for name in shards[0]
        }
        for shards in zip(*(rank["gradients"] for rank in ranks), strict=True)
    ]
    prepare_model(model)
    fused = fuses_loss(model)
    with torch.no_grad():
        inputs = pack_samples(samples()).model_inputs()
        packed = model(**inputs, use_cache=False).logits[0]
    return Row(
        logits=relative(packed, alone),
        gradient=gradient_error(gradients[0], right[0]),
        checkpointed=gradient_error(gradients[1], right[1]),
        loss=loss_error(model) if fused else 0.0,
        fused=fused,
        exported=relative(logits_alone(again), alone),
        tied=_is_tied(model) and _is_tied(again),
        cost=cost_ratio(model),
    )


def _is_tied(model: Any) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def measure(names: list[str]) -> tuple[dict[str, Row], list[list[list[int]]]]:
    """Rows of families, and the micro-batches of each rank, family and minibatch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small only wait for threads
    try:
        with tempfile.TemporaryDirectory() as folder:
            ranks = values(run_ranks(train, 2, names, folder, timeout_s=100.0 + 20 * len(names)))
            rows = {
                name: measure_family(FAMILIES[name], [rank[name] for rank in ranks], Path(folder) / name)
                for name in names
            }
    finally:
        torch.set_num_threads(threads)
    return rows, [[rank[name]["counts"] for name in names] for rank in ranks]


def compiled_error(family: Family, backend: str) -> float:
    """Gradients of two packed rows through compiled blocks against those without, in one process."""
    from odcengine.models.compiled import compile_blocks  # imports dynamo

    gradients = []
    for compiled in (False, True):
        model = prepare_model(make(family))
        if compiled:
            torch._dynamo.reset()
            compile_blocks(block_modules(model), backend=backend)
        for part in (slice(0, 3), slice(3, 5)):
            torch.autograd.backward(causal_lm_loss_sum(model, pack_samples(samples()[part])))
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    return gradient_error(dict(gradients[1]), gradients[0])


def message_of(refused: Refused) -> str | None:
    """The error of a family that should be refused; None if it is not."""
    try:
        prepare_model(load_model(refused.values))
    except (ConfigError, UsageError) as error:
        return str(error)
    return None


# ---- the tables ----------------------------------------------------------------------------------------


def _yes(error: float) -> str:
    return "yes" if error <= TOLERANCE else "**no**"


def line_of(name: str, row: Row) -> str:
    cells = [
        name,
        f"`{FAMILIES[name].values['model_type']}`",
        _yes(row.logits),
        _yes(row.gradient),
        _yes(row.checkpointed),
        "yes" if row.tied else "own head",
        "in the head" if row.fused else "all logits",
        "yes" if FAMILIES[name].compiles else "**no**",
        _yes(row.exported),
        "yes" if abs(row.cost - 1) < 0.05 else f"{row.cost:.0%}",
    ]
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| family | `model_type` | packing | gradient | checkpointing | tied | loss | compile | export | cost |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def tables(rows: dict[str, Row]) -> str:
    """Both tables as they stand in docs/models.md."""
    refused = [f"| {n} | `{r.values['model_type']}` | {r.reason} |" for n, r in REFUSED.items()]
    lines = [HEADER, *(line_of(name, row) for name, row in rows.items())]
    return "\n".join([*lines, "", "| refused | `model_type` | why |", "|---|---|---|", *refused]) + "\n"


def tables_of_page(page: str) -> str:
    """The lines of the page from the first table's on, as long as they are a table's or empty."""
    lines = page[page.index("| family | `model_type` |") :].splitlines(keepends=True)
    return "".join(itertools.takewhile(lambda line: line[:1] in ("|", "\n"), lines)).rstrip("\n") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/models.md")
    arguments = parser.parse_args()
    rows, _ = measure(list(FAMILIES))
    for name, row in rows.items():
        sys.stderr.write(f"{name}: {row}\n")
    text = tables(rows)
    if arguments.write:
        page = PAGE.read_text()
        PAGE.write_text(page.replace(tables_of_page(page), text))
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
