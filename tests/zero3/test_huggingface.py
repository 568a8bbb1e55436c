"""Accelerate and the Trainer with ``import odcengine.auto``: losses as in one process."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import run_ranks, values

pytest.importorskip("deepspeed")
pytest.importorskip("accelerate")

ROOT = Path(__file__).resolve().parents[2]
STEPS, BATCH, LR = 4, 4, 1e-2
ENV = {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 40},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 10**9,
    "odc": {"enabled": True, "timeout_s": 30, "startup_timeout_s": 60},
}


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    lengths = [3, 25, 7, 18, 4, 5, 30, 6, 12, 3, 3, 21, 9, 28, 4, 10]
    tokens = [torch.randint(1, 32, (length,), generator=generator) for length in lengths]
    return [{"input_ids": t, "labels": t.clone()} for t in tokens]


def prepare(folder: Path) -> str:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    return str(folder / "model")


def load(path: str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def loss_sum(model: Any, sample: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=sample["input_ids"][None]).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits.float(), sample["labels"][1:], reduction="sum")


def _on_cpus() -> None:
    import deepspeed
    from accelerate import PartialState

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")


def _accelerate(rank: int, world_size: int, path: str) -> list[tuple[float, float]]:
    """Minibatches of which rank 0 computes one sample, rank 1 three; in the second rank 0 computes none."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    import odcengine.auto

    _on_cpus()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=dict(CONFIG)))
    model = load(path)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
    assert model.odc_attached.transport is not None
    model.train()
    found = []
    for step in range(STEPS):
        minibatch = samples()[step * BATCH : (step + 1) * BATCH]
        count = sum(len(sample["labels"]) - 1 for sample in minibatch)
        share = [minibatch[:1], minibatch[1:]][rank] if step != 1 else [[], minibatch][rank]
        total = 0.0
        for number, sample in enumerate(share):
            # Either its last micro-batch ends the step, or, without one, the boundary does.
            accelerator.sync_gradients = step % 2 == 0 and number == len(share) - 1
            loss = loss_sum(model, sample)
            accelerator.backward(loss * (world_size / count))
            total += float(loss.detach()) / count
        if step % 2:
            odcengine.boundary(accelerator.deepspeed_engine_wrapped)
        found.append((total, float(model.get_global_grad_norm())))
    return found


def _trainer(rank: int, world_size: int, path: str, folder: str) -> list[tuple[float, float]]:
    """The Trainer's log; on one rank without DeepSpeed."""
    from transformers import Trainer, TrainingArguments

    alone = world_size == 1
    if not alone:
        import odcengine.auto  # noqa: F401

        _on_cpus()
    config = {**CONFIG, "gradient_accumulation_steps": "auto", "optimizer": None}
    del config["optimizer"]
    settings = TrainingArguments(
        output_dir=folder,
        deepspeed=None if alone else config,
        accelerator_config={"use_configured_state": not alone},
        use_cpu=alone,
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=BATCH // world_size,
        learning_rate=LR,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=1,
    )
    trainer = Trainer(model=load(path), args=settings, train_dataset=samples())
    trainer.train()
    if not alone:
        assert trainer.deepspeed.odc_attached.num_boundaries == STEPS
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def _both(rank: int, world_size: int, path: str, folder: str) -> dict[str, list[tuple[float, float]]]:
    """One after the other in the same processes."""
    from accelerate.state import AcceleratorState

    trainer = _trainer(rank, world_size, path, folder)
    AcceleratorState._reset_state()  # else it refuses another plugin
    return {"trainer": trainer, "accelerate": _accelerate(rank, world_size, path)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepare(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def attached(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values(run_ranks(_both, 2, model, str(tmp_path_factory.mktemp("two")), env=ENV, timeout_s=200))


def test_accelerate(attached: list[dict[str, Any]], model: str) -> None:
    ranks = [rank["accelerate"] for rank in attached]
    alone = load(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=LR)
    for step in range(STEPS):
        minibatch = samples()[step * BATCH : (step + 1) * BATCH]
        count = sum(len(sample["labels"]) - 1 for sample in minibatch)
        loss = sum(loss_sum(alone, sample) for sample in minibatch) / count
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0))
        optimizer.step()
        assert ranks[0][step][0] + ranks[1][step][0] == pytest.approx(loss.item(), rel=1e-5)
        assert ranks[0][step][1] == ranks[1][step][1] == pytest.approx(norm, rel=1e-4)


def test_trainer(attached: list[dict[str, Any]], model: str, tmp_path: Path) -> None:
    first, second = (rank["trainer"] for rank in attached)
    (alone,) = values(run_ranks(_trainer, 1, model, str(tmp_path), env=ENV, timeout_s=100))
    assert len(alone) == STEPS
    assert first == second
    for (loss, norm), (right_loss, right_norm) in zip(first, alone, strict=True):
        assert loss == pytest.approx(right_loss, rel=1e-4)
        assert norm == pytest.approx(right_norm, rel=1e-4)


def test_without_deepspeed_the_extra_is_named() -> None:
    code = "import sys; sys.modules['deepspeed'] = None; import odcengine.auto"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, cwd=ROOT)
    assert "ConfigError: odcengine.auto needs DeepSpeed" in done.stderr
    assert "pip install 'odcengine[deepspeed]'" in done.stderr


def test_wrapping_is_opt_in_and_can_be_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import deepspeed

    from odcengine import auto
    from odcengine.errors import ConfigError

    auto.disable()
    calls: list[Any] = []

    class Engine:
        optimizer: Any = object()

    def original(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return Engine(), None, None, None

    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"odc": {"enabled": True, "timeout_s": 9}}))
    text = base64.urlsafe_b64encode(file.read_bytes()).decode()
    with mock.patch.object(deepspeed, "initialize", original), mock.patch.object(auto, "attach") as attach:
        auto.enable()
        auto.enable()
        assert deepspeed.initialize.odc_original is original
        for off in ({}, {"odc": {"enabled": False}}):
            deepspeed.initialize(model=None, config=off)
        deepspeed.initialize()
        assert not attach.called
        for on in ({"config": str(file)}, {"config_params": json.loads(file.read_text())}, {"config": text}):
            engine, *_ = deepspeed.initialize(model=None, **on)
            attach.assert_called_with(engine, {"timeout_s": 9})
        with pytest.raises(ConfigError, match="enabled"):
            deepspeed.initialize(config={"odc": {"timeout_s": 9}})
        for misspelt in ("ocd", "ODC", "odc_engine"):
            with pytest.raises(ConfigError, match=f'{misspelt}: neither .* did you mean "odc"'):
                deepspeed.initialize(config={misspelt: {"enabled": True}})
        assert len(calls) == 6
        attach.reset_mock()
        monkeypatch.setattr(
            Engine, "optimizer", None
        )  # a reference model with the trained one's configuration
        deepspeed.initialize(model=None, config=str(file))
        assert not attach.called
        assert "stays DeepSpeed's own" in caplog.text
        auto.disable()
        assert deepspeed.initialize is original
