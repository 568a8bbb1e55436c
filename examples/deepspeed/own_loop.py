"""A loop of one's own around a DeepSpeed engine, with ranks that run different numbers of micro-batches.

odc-launch --nproc-per-node 2 examples/deepspeed/own_loop.py     # or torchrun, or deepspeed

Against stock DeepSpeed it has two lines more: ``odcengine.attach`` and ``odcengine.boundary``.
"""

from __future__ import annotations

import deepspeed
import torch.distributed as dist
from workload import Shares, arguments, loss_sum, make_model, without_extension

import odcengine


def main() -> None:
    options = arguments(__doc__ or "", "configs/deepspeed/own_loop.json")
    without_extension()
    deepspeed.init_distributed()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model(options.model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=options.config)
    attached = odcengine.attach(engine)

    shares = Shares(options.data, options.batch, world_size)
    for step in range(options.steps):
        micro_batches, num_targets = shares.minibatch(step, rank)
        total = 0.0
        for micro_batch in micro_batches:
            loss = loss_sum(engine, micro_batch)
            # DeepSpeed averages over ranks: so the gradient is that of the mean over all ranks' tokens.
            engine.backward(loss * (world_size / num_targets))
            total += float(loss.detach())
        odcengine.boundary(engine)  # every rank, also one without a micro-batch
        print(
            f"step {step} rank {rank}: {len(micro_batches)} micro-batches, its part of the loss "
            f"{total / num_targets:.4f}, gradient norm {float(engine.get_global_grad_norm()):.4f}",
            flush=True,
        )
    attached.close()


if __name__ == "__main__":
    main()
