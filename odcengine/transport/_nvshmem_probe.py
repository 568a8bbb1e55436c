"""Does NVSHMEM's heap work here? A process of its own finds out, because a failure may end it or hang it.

``python -m odcengine.transport._nvshmem_probe RANK WORLD_SIZE GPU FD``: the process of rank 0 writes a unique
id to the descriptor, those of all other ranks read it from theirs. All start NVSHMEM together, allocate, map
each other's memory and read from a neighbour. Exit code 0: it works.
"""

from __future__ import annotations

import os
import sys

import numpy as np

PROBE_NBYTES = 1 << 20


def main() -> None:
    """Runs the probe and ends the process."""
    from cuda.core import Device
    from nvshmem import bindings, core

    rank, world_size, gpu, descriptor = map(int, sys.argv[1:])
    device = Device(gpu)
    device.set_current()
    unique_id = core.get_unique_id(empty=rank != 0)
    content = unique_id._data.view("u1").reshape(-1)
    with os.fdopen(descriptor, "wb" if rank == 0 else "rb") as pipe:
        if rank == 0:
            pipe.write(content.tobytes())
        else:
            content[:] = np.frombuffer(pipe.read(), dtype=np.uint8)
    core.init(device=device, uid=unique_id, rank=rank, nranks=world_size, initializer_method="uid")
    memory = bindings.malloc(PROBE_NBYTES)
    target = bindings.malloc(PROBE_NBYTES)
    if not memory or not target:
        raise MemoryError(f"NVSHMEM allocated no {PROBE_NBYTES} bytes")
    for other in range(world_size):
        bindings.ptr(memory, other)  # maps it where it can be mapped
    bindings.barrier_all()
    stream = device.create_stream()
    neighbour = (rank + 1) % world_size
    bindings.getmem_on_stream(target, memory, PROBE_NBYTES, neighbour, int(stream.handle))
    stream.sync()
    bindings.barrier_all()
    os._exit(0)  # without the library's own end, which has nothing to add


if __name__ == "__main__":
    main()
