"""Supervised fine-tuning with odcengine, as short as a training script gets.

    odc-launch --nproc-per-node 2 --config configs/sft_cpu.yaml \\
        examples/sft/train.py --model examples/sft/llama_7m --data demo_out/tokens

``--model`` is a directory of transformers: with weights they are trained further, with only a ``config.json``
training starts from random ones. ``--data`` is a directory that ``odcengine.data.TokenDataset.write`` made.
Everything else (batch size, optimizer, transport, balance) is in the configuration file.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import odcengine
from odcengine.data import TokenDataset


def load_model(path: Path) -> PreTrainedModel:
    """The model of a directory, with random weights where it has none."""
    model: PreTrainedModel
    if any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        model = AutoModelForCausalLM.from_pretrained(path)
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))  # type: ignore
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model.")
    parser.add_argument(
        "--model", type=Path, required=True, help="directory of a transformers model or config"
    )
    parser.add_argument("--data", type=Path, required=True, help="directory of a TokenDataset")
    parser.add_argument(
        "--steps", type=int, help="stop after so many optimizer steps (default: all the data)"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    model = load_model(arguments.model)
    dataset = TokenDataset.open(arguments.data)
    dataset.check_vocabulary(model.config.vocab_size)
    engine, _, loader, _ = odcengine.initialize(model=model, training_data=dataset)
    assert loader is not None  # there is training data

    with engine:
        for _ in range(engine.config.data.num_epochs):
            for minibatch in loader:  # this rank's share of an optimizer step
                for micro_batch in minibatch:
                    engine.backward(engine(micro_batch))
                engine.step()
                if engine.global_steps == arguments.steps:
                    return


if __name__ == "__main__":
    main()
