"""Supervised fine-tuning with odcengine, as short as a training script gets.

    odc-launch --nproc-per-node 2 --config configs/sft_cpu.yaml \\
        examples/sft/train.py --model examples/sft/llama_7m --data demo_out/tokens

``--model`` is a directory of transformers (with weights they are trained further, with only a ``config.json``
training starts from random ones) or a name on the Hugging Face Hub; without it, the configuration's ``model``
section says what is trained. ``--data`` is a directory that ``odc prepare`` or
``odcengine.data.TokenDataset.write`` made; without it, the configuration's ``data.path``. ``--eval-data`` is
held-out data of the same kind (``data.eval_path``): its loss is shown before the first step, every
``data.eval_every_n_steps``, after each epoch and at the end. Everything else (batch size, optimizer,
transport, balance, checkpoints) is in the configuration file.
"""

from __future__ import annotations

import argparse
import logging
import math
from pathlib import Path

import odcengine
from odcengine.data import TokenDataset
from odcengine.errors import ConfigError
from odcengine.models import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model.")
    parser.add_argument("--model", help="directory or name of a model (default: the configuration's)")
    parser.add_argument("--data", type=Path, help="prepared data set (default: the configuration's)")
    parser.add_argument("--eval-data", type=Path, help="held-out data set (default: the configuration's)")
    parser.add_argument(
        "--steps", type=int, help="stop after so many optimizer steps (default: all the data)"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    model = load_model(arguments.model) if arguments.model else None
    dataset = TokenDataset.open(arguments.data) if arguments.data else None
    held_out = TokenDataset.open(arguments.eval_data) if arguments.eval_data else None
    engine, _, loader, _ = odcengine.initialize(model=model, training_data=dataset, eval_data=held_out)
    if loader is None:
        raise ConfigError("no data: give --data DIRECTORY, or data.path in the configuration")

    evaluates = held_out is not None or engine.config.data.eval_path is not None
    with engine:
        if evaluates and engine.global_steps == 0:
            engine.evaluate()  # what the model knew before; later engine.step() does it
        last = arguments.steps or math.inf
        # A run that goes on from a checkpoint begins in a later epoch, at a later step.
        while loader.epoch < engine.config.data.num_epochs and engine.global_steps < last:
            for minibatch in loader:  # this rank's share of an optimizer step
                for micro_batch in minibatch:
                    engine.backward(engine(micro_batch))
                engine.step()
                if engine.global_steps >= last:
                    break
        if evaluates and (engine.evaluation is None or engine.evaluation.step != engine.global_steps):
            engine.evaluate()


if __name__ == "__main__":
    main()
