# ruff: noqa: SIM102 - conditions on constants of the compiler stand alone
"""The GPU kernels of one-sided communication, in Triton: adding into peers' memory, flags, bounded waits.

Addresses of peers' memory are int64 tensors on the device. All stores and additions to them have system
scope: they go over NVLink or PCIe to another GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor as TensorDescriptor

WAITING, DONE, ABORTED, TOO_LATE = 0, 1, 2, 3
"""How a wait on the device ended; WAITING and DONE are no failure."""


@triton.jit(do_not_specialize=["rows", "offset", "first"])
def scatter_add_kernel(
    addresses,  # int64 [rows]: where row r is added to
    source,  # [rows, count] with contiguous rows
    row_stride,  # elements between rows of source
    count,  # elements of a row
    rows,  # number of rows
    offset,  # first element in the memory of each row
    first,  # row to start with, another on each rank
    element: tl.constexpr,  # dtype of the accumulator
    BLOCK: tl.constexpr,
):
    """Add each row of ``source`` to the memory at its address, each element once and atomically.

    A grid of any size covers all blocks. Neighbouring blocks belong to different rows, so that at any moment
    the additions of a launch are spread over all owners.
    """
    blocks = tl.cdiv(count, BLOCK)
    index = tl.program_id(0)
    while index < blocks * rows:
        row = (index + first) % rows
        offsets = (index // rows).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < count
        values = tl.load(source + row.to(tl.int64) * row_stride + offsets, mask=inside).to(element)
        target = tl.load(addresses + row).to(tl.pointer_type(element))
        tl.atomic_add(target + offset + offsets, values, mask=inside, sem="relaxed", scope="sys")
        index += tl.num_programs(0)


@triton.jit(do_not_specialize=["count", "offset"], do_not_specialize_on_alignment=["addresses", "source"])
def add_message_kernel(addresses, source, count, offset, element: tl.constexpr, BLOCK: tl.constexpr):
    """Add ``source`` [count] to the memory at ``addresses[0]``, from element ``offset`` on.

    One compiled kernel for messages of any size: to load another while kernels wait could wait for them.
    """
    index = tl.program_id(0)
    while index * BLOCK < count:
        offsets = index.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < count
        values = tl.load(source + offsets, mask=inside).to(element)
        target = tl.load(addresses).to(tl.pointer_type(element))
        tl.atomic_add(target + offset + offsets, values, mask=inside, sem="relaxed", scope="sys")
        index += tl.num_programs(0)


MAX_BULK_ROWS = 8
"""Descriptors that :func:`bulk_add_kernel` takes."""


@triton.jit(do_not_specialize=["first"])
def bulk_add_kernel(
    lines0,
    lines1,
    lines2,
    lines3,
    lines4,
    lines5,
    lines6,
    lines7,
    addresses,  # int64 [ROWS], for the elements after the last whole line
    source,  # [ROWS, count], contiguous
    count,  # elements of a row
    first,  # row to start with, another on each rank
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,  # elements of a line
    HEIGHT: tl.constexpr,  # lines added at once
):
    """Add each row of ``source`` to the memory of its owner by the tensor memory accelerator's reductions.

    ``lines0`` and so on are descriptors of the owners' memory as float32 [count // WIDTH, WIDTH] in blocks of
    HEIGHT lines; those past ROWS are None. A few programs of this kernel move as much as very many of
    :func:`scatter_add_kernel`, and take less from a computation beside them. Neighbouring blocks belong to
    different rows, as there; for each program to come to all rows, their number and that of the programs have
    no common divisor.
    """
    height = count // WIDTH
    columns = tl.arange(0, WIDTH)
    heights = tl.arange(0, HEIGHT)[:, None]
    elements = heights * WIDTH + columns[None, :]
    for index in tl.range(tl.program_id(0), tl.cdiv(height, HEIGHT) * ROWS, tl.num_programs(0), num_stages=3):
        row = (index + first) % ROWS
        line = (index // ROWS) * HEIGHT
        block = source + row.to(tl.int64) * count + line.to(tl.int64) * WIDTH
        # Lines past the end are loaded as zeros, and left out by the descriptor.
        values = tl.load(block + elements, mask=heights < height - line, other=0.0).to(tl.float32)
        if row == 0:
            lines0.atomic_add([line, 0], values)
        if ROWS > 1:
            if row == 1:
                lines1.atomic_add([line, 0], values)
        if ROWS > 2:
            if row == 2:
                lines2.atomic_add([line, 0], values)
        if ROWS > 3:
            if row == 3:
                lines3.atomic_add([line, 0], values)
        if ROWS > 4:
            if row == 4:
                lines4.atomic_add([line, 0], values)
        if ROWS > 5:
            if row == 5:
                lines5.atomic_add([line, 0], values)
        if ROWS > 6:
            if row == 6:
                lines6.atomic_add([line, 0], values)
        if ROWS > 7:
            if row == 7:
                lines7.atomic_add([line, 0], values)
    if tl.program_id(0) < ROWS:
        row = tl.program_id(0)
        rest = height.to(tl.int64) * WIDTH + columns
        values = tl.load(source + row.to(tl.int64) * count + rest, mask=rest < count).to(tl.float32)
        target = tl.load(addresses + row).to(tl.pointer_type(tl.float32))
        tl.atomic_add(target + rest, values, mask=rest < count, sem="relaxed", scope="sys")


@triton.jit(do_not_specialize=["value", "count"])
def signal_kernel(addresses, value, count, LANES: tl.constexpr):
    """Store ``value`` into the int64 words at all addresses, after everything enqueued before it.

    Args:
        addresses: int64 [count]: this rank's word in the memory of each peer.
        value: the number; it only grows.
        count: how many.
        LANES: a power of two, at least ``count``.
    """
    lanes = tl.arange(0, LANES)
    inside = lanes < count
    words = tl.load(addresses + lanes, mask=inside, other=0).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(words, tl.zeros([LANES], tl.int64) + value, mask=inside, sem="release", scope="sys")


@triton.jit(do_not_specialize=["value", "count", "limit_ns"], do_not_specialize_on_alignment=["words"])
def wait_kernel(words, value, count, abort, status, limit_ns, LANES: tl.constexpr):
    """Wait until ``count`` int64 words of this rank's own memory are at least ``value``, or give up.

    Ends early when the host raises ``abort``, or after ``limit_ns``; then it says so in ``status``. It never
    spins for ever and never traps.

    Args:
        words: the first word; peers store into them.
        value: what each must reach.
        count: how many words.
        abort: int64 in mapped host memory.
        status: int64 in mapped host memory, see :data:`ABORTED` and :data:`TOO_LATE`.
        limit_ns: nanoseconds of the device's global timer.
        LANES: a power of two, at least ``count``.
    """
    lanes = tl.arange(0, LANES)
    inside = lanes < count
    begun = _now()
    state = 0
    while state == 0:
        seen = tl.atomic_add(
            words + lanes, tl.zeros([LANES], tl.int64), mask=inside, sem="acquire", scope="sys"
        )
        missing = tl.sum(tl.where(inside & (seen < value), 1, 0))
        if missing == 0:
            state = 1
        else:
            if tl.load(abort, volatile=True) != 0:
                state = 2
            else:
                if _now() - begun > limit_ns:
                    state = 3
    if state > 1:
        tl.store(status, tl.full([], 0, tl.int64) + state)


@triton.jit
def _now():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )
