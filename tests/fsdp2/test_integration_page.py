"""docs/integration.md and the example that it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, values
from programs import run_program
from torch.distributed.fsdp import fully_shard

from .toy import meet

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/integration.md").read_text()
COMMANDS = re.findall(r"^\.venv/bin/odc-launch (.*)$", PAGE, re.MULTILINE)
MODEL = """{
  "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16,
  "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "dtype": "float32"
}"""
Found = dict[tuple[str, str], tuple[int, str]]


def _run(command: str, folder: Path) -> Found:
    """For each step and rank the number of micro-batches and the gradient norm."""
    words = ["-m", "odc_launcher", *command.split(), "--model", "model", "--steps", "2"]
    done = run_program(*words, folder=folder, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"step (\d) rank (\d): (\d+) micro-batches.*gradient norm (\S+),", done.stdout)
    return {(step, rank): (int(count), norm) for step, rank, count, norm in rows}


def test_example_with_and_without(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(MODEL)
    stock, attached = (_run(command, tmp_path) for command in COMMANDS)
    assert len(stock) == len(attached) == 4
    for key, (count, norm) in attached.items():
        assert float(norm) == pytest.approx(float(stock[key][1]), rel=1e-4)
        assert count <= stock[key][0]
    # Collectives need equal numbers; on demand ranks have their own.
    pairs = [[runs[step, rank][0] for rank in "01"] for runs in (stock, attached) for step in "01"]
    assert all(first == second for first, second in pairs[:2])
    assert any(first != second for first, second in pairs[2:])


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 4)
        self.head = torch.nn.Linear(4, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(tokens))
        return out


def _page(rank: int, world_size: int) -> list[float]:
    """The page's programs, one after the other."""
    import odcengine

    meet(rank, world_size)
    own, packed, drawn, attached = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    generator = torch.Generator().manual_seed(rank)

    def rows(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (torch.randint(11, (5,), generator=generator), torch.randint(11, (5,), generator=generator))
            for _ in range(count)
        ]

    def loss_of(model: Any, row: Any) -> Any:
        loss = torch.nn.functional.cross_entropy(model(row[0]), row[1], reduction="sum")
        return (loss, row[1].numel()) if isinstance(model, odcengine.OdcEngine) else loss

    torch.manual_seed(3)
    names: dict[str, Any] = {
        "model": Tiny(),
        "config": {"train_batch_size": "auto", "optimizer": {"type": "SGD"}, "odc": {"timeout_s": 60}},
        "my_micro_batches": lambda step, rank: rows(2 * rank),
        "work": rows(5),
        "loss_of": loss_of,
        "torch": torch,
        "odcengine": odcengine,
    }
    exec(compile(own, "docs/integration.md", "exec"), names)
    losses = [names["metrics"].loss]
    transformers = pytest.importorskip("transformers")
    names["model"] = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**json.loads(MODEL))
    )
    names["my_samples"] = lambda rank: [[{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]] * rank
    exec(compile(packed, "docs/integration.md", "exec"), names)
    assert names["metrics"].count == 3  # two targets of one sample, one of the other, on rank 1 only
    names["engine"].close()
    names["engine"] = odcengine.initialize(model=Tiny(), config=names["config"])[0]
    exec(compile(drawn, "docs/integration.md", "exec"), names)
    names["engine"].close()
    model = fully_shard(Tiny())
    names |= {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "minibatches": [rows(rank), rows(2)],
    }
    exec(compile(attached, "docs/integration.md", "exec"), names)
    losses.append(float(model.head.weight.full_tensor().sum()))
    return losses


def test_programs_run() -> None:
    first, second = values(run_ranks(_page, 2))
    assert first == second
