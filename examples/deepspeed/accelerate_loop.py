"""The same loop with Accelerate, which calls ``deepspeed.initialize`` itself.

odc-launch --nproc-per-node 2 examples/deepspeed/accelerate_loop.py     # or accelerate launch, or torchrun

``import odcengine.auto`` and ``"odc": {"enabled": true}`` in DeepSpeed's configuration attach the engine.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from workload import Shares, accelerate_on_cpus, arguments, loss_sum, make_model

import odcengine.auto


def main() -> None:
    options = arguments(__doc__ or "", "configs/deepspeed/accelerate.json")
    accelerate_on_cpus()
    plugin = DeepSpeedPlugin(hf_ds_config=options.config)
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16")
    rank, world_size = accelerator.process_index, accelerator.num_processes
    model = make_model(options.model)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    shares = Shares(options.data, options.batch, world_size)
    for step in range(options.steps):
        micro_batches, num_targets = shares.minibatch(step, rank)
        total = 0.0
        accelerator.sync_gradients = False  # no micro-batch ends the step; the boundary does
        for micro_batch in micro_batches:
            loss = loss_sum(model, micro_batch)
            accelerator.backward(loss * (world_size / num_targets))
            total += float(loss.detach())
        odcengine.boundary(model)  # every rank, also one without a micro-batch
        print(
            f"step {step} rank {rank}: {len(micro_batches)} micro-batches, its part of the loss "
            f"{total / num_targets:.4f}, gradient norm {float(model.get_global_grad_norm()):.4f}",
            flush=True,
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
