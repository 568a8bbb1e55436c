"""Direct preference optimisation with odcengine: prefer the chosen answers more than a reference model does.

    odc-launch --config configs/dpo_cpu.yaml examples/dpo/train.py

The configuration names the model (``model.path``), the pairs that ``odc prepare`` made of ``prompt``,
``chosen`` and ``rejected`` (``data.path``, or ``--data``), and the reference model (``model.reference``),
which is sharded over the ranks like the model. Where adapters are trained (``configs/dpo_lora_cpu.yaml``),
``model.lora.reference`` makes it the model without them. If the pairs know its log-probabilities already
(``precompute.py``), and ``data.fields`` names them, no reference is loaded. Both answers of a pair are in one
micro-batch, and ``train_batch_size`` counts pairs. The share of pairs that the model gets right, and its
rewards, are written by the monitor under ``dpo/``, those of held-out pairs (``data.eval_path``) under the
same names in ``eval/``.
"""

from __future__ import annotations

import argparse
import logging
import math
from pathlib import Path

from torch import nn

import odcengine
from odcengine.data import MicroBatch, TokenDataset
from odcengine.errors import ConfigError
from odcengine.losses import DPO_METRICS, DpoLoss, LossSum

logger = logging.getLogger("dpo")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a causal language model on preference pairs.")
    parser.add_argument("--data", type=Path, help="prepared pairs (default: the configuration's)")
    parser.add_argument("--eval-data", type=Path, help="held-out pairs (default: the configuration's)")
    parser.add_argument("--beta", type=float, default=0.1, help="how near to the reference (default 0.1)")
    parser.add_argument("--kind", choices=("sigmoid", "ipo"), default="sigmoid", help="DPO (default) or IPO")
    parser.add_argument(
        "--label-smoothing", type=float, default=0.0, help="share of wrong labels (default 0)"
    )
    parser.add_argument(
        "--steps", type=int, help="stop after so many optimizer steps (default: all the data)"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    loss = DpoLoss(beta=arguments.beta, kind=arguments.kind, label_smoothing=arguments.label_smoothing)

    def loss_fn(model: nn.Module, micro_batch: MicroBatch) -> LossSum:
        return loss(model, micro_batch, engine.reference)  # None where the pairs know its log-probabilities

    pairs, held_out = (
        None if path is None else TokenDataset.open(path) for path in (arguments.data, arguments.eval_data)
    )
    engine, _, loader, _ = odcengine.initialize(training_data=pairs, eval_data=held_out, loss_fn=loss_fn)
    if loader is None:
        raise ConfigError("no data: give --data DIRECTORY, or data.path in the configuration")
    if engine.reference is None and "ref_logprobs" not in engine.config.data.fields:
        raise ConfigError(
            "no reference: give model.reference in the configuration (usually the same as model.path), with "
            "adapters model: {lora: {reference: true}}, or pairs with log-probabilities and data: {fields: "
            "[ref_logprobs]}"
        )

    evaluates = held_out is not None or engine.config.data.eval_path is not None
    with engine:
        last = arguments.steps or math.inf
        while loader.epoch < engine.config.data.num_epochs and engine.global_steps < last:
            for minibatch in loader:
                totals = dict.fromkeys(DPO_METRICS, 0.0)  # also on a rank that gets no pair
                for micro_batch in minibatch:
                    result = engine(micro_batch)
                    engine.backward(result)
                    totals = {name: value + result.metrics[name] for name, value in totals.items()}
                engine.step()
                report(engine, totals)
                if engine.global_steps >= last:
                    break
        if evaluates and (engine.evaluation is None or engine.evaluation.step != engine.global_steps):
            engine.evaluate()


def report(engine: odcengine.OdcEngine, totals: dict[str, float]) -> None:
    """Have the monitor write what the step's pairs say, as means over all ranks' pairs."""
    sums = engine.sum_over_ranks(totals)
    num_pairs = sums["pairs"]
    means = {name: sums[name] / max(num_pairs, 1) for name in DPO_METRICS if name != "pairs"}
    engine.report({f"dpo/{name}": mean for name, mean in means.items()})
    every = engine.config.steps_per_print
    if engine.topology.rank == 0 and every and engine.global_steps % every == 0:
        words = ", ".join(f"{name} {mean:.4g}" for name, mean in means.items())
        logger.info("dpo in step %d: %s, %d pairs", engine.global_steps, words, num_pairs)


if __name__ == "__main__":
    main()
