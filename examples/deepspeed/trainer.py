"""Hugging Face's Trainer on demand: one import, and a section in DeepSpeed's configuration.

odc-launch --nproc-per-node 2 examples/deepspeed/trainer.py     # or accelerate launch, or torchrun

The Trainer gives every rank equally many micro-batches; their lengths differ, and no rank waits for another's
inside of an optimizer step.
"""

from __future__ import annotations

from transformers import Trainer, TrainingArguments
from workload import Shares, accelerate_on_cpus, arguments, make_model

import odcengine.auto  # noqa: F401 - attaches the Trainer's engine


def main() -> None:
    options = arguments(__doc__ or "", "configs/deepspeed/trainer.json")
    on_gpus = not accelerate_on_cpus()
    settings = TrainingArguments(
        output_dir="demo_out/trainer",
        deepspeed=options.config,
        max_steps=options.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        learning_rate=1e-4,
        bf16=on_gpus,
        accelerator_config={"use_configured_state": not on_gpus},
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    shares = Shares(options.data, options.batch, settings.world_size)
    samples = [
        {name: value[0] for name, value in shares.sample(index).items()} for index in range(len(shares.data))
    ]
    trainer = Trainer(model=make_model(options.model), args=settings, train_dataset=samples)
    trainer.train()


if __name__ == "__main__":
    main()
