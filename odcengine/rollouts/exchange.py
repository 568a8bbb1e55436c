"""Moves samples to the ranks that they are planned for: one all-to-all, before the minibatch.

Two small all-gathers come first (:func:`take_stock`), in which all ranks learn the lengths and sizes of all
samples. So every rank computes the same plan, and knows how many bytes it gets from whom.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from odcengine._collectives import gather_bytes
from odcengine.balance import Plan
from odcengine.control import ControlBlock
from odcengine.data.pack import num_targets_of, sequences_of
from odcengine.errors import UsageError
from odcengine.rollouts.samples import (
    Field,
    Sample,
    Schema,
    TensorSample,
    convert,
    leaf_of,
    merge,
    nbytes,
    nested,
    numels,
    packable,
    read,
    schema_of,
    to_tensors,
    write,
)

_UNKNOWN = -1
_COLUMNS = 2  # length, targets; behind them the elements of each field
_SEQUENCE = re.compile(r"sequences/\d+/input_ids")


@dataclass(frozen=True)
class Stock:
    """What every rank knows of the samples of all ranks; their positions go through the ranks in order.

    Attributes:
        schema: of all samples.
        lengths: tokens of each sample.
        sequences: tokens of each sequence of each sample. One that was given another length than its tokens
            counts as one sequence of that length.
        longest: tokens of the longest sequence.
        num_targets: positions with a target of each; None where samples have no ``input_ids``.
        nbytes: bytes of each when it travels.
        homes: the rank that each was given on.
        rank: this rank.
        packable: fields that a packed row can take along: numbers, and what has one value a token in all
            samples.
    """

    schema: Schema
    lengths: tuple[int, ...]
    sequences: tuple[tuple[int, ...], ...]
    longest: int
    num_targets: tuple[int, ...] | None
    nbytes: tuple[int, ...]
    homes: tuple[int, ...]
    rank: int
    packable: tuple[str, ...] = ()

    @property
    def squares(self) -> npt.NDArray[np.float64] | None:
        """Sum of the squares of the lengths of each sample's sequences; None where each is one sequence."""
        if all(len(parts) == 1 for parts in self.sequences):
            return None
        return np.array([sum([part * part for part in parts]) for parts in self.sequences], np.float64)

    @property
    def first(self) -> int:
        """Position of this rank's first sample."""
        return sum(home < self.rank for home in self.homes)

    @property
    def own(self) -> range:
        """Positions of this rank's samples."""
        return range(self.first, self.first + self.homes.count(self.rank))

    @property
    def leaves(self) -> frozenset[str]:
        """Names of fields, also of those in lists of mappings, without the names of the lists."""
        return frozenset(map(leaf_of, self.schema))

    def origin(self, position: int) -> str:
        """Who gave a sample, for messages: positions are nothing that a rank could look up."""
        home = self.homes[position]
        return f"sample {position - self.homes.index(home)} of those that rank {home} gave"


def take_stock(
    samples: Sequence[Sample],
    lengths: Sequence[int] | None,
    control: ControlBlock,
    group: dist.ProcessGroup,
    *,
    plan: Plan | None = None,
) -> tuple[list[TensorSample], Stock]:
    """Tell all ranks of this rank's samples, and hear of theirs. Collective over all ranks.

    Args:
        samples: this rank's, also none.
        lengths: tokens of each; None: the number of its ``input_ids``.
        control: watches the waits.
        group: gloo group of all ranks.
        plan: that the ranks move samples by; must be equal on all.

    Returns:
        This rank's samples as tensors; what all ranks have.

    Raises:
        UsageError: a sample that cannot travel, samples of different fields, or ranks with different plans.
        PeerError: another rank failed.
    """
    rank = control.topology.rank
    tensors = [to_tensors(sample, f"rank {rank}: sample {number}") for number, sample in enumerate(samples)]
    schema = schema_of(tensors, f"rank {rank}")
    if lengths is not None and len(lengths) != len(samples):
        raise UsageError(f"{len(samples)} samples, but {len(lengths)} lengths; give one for each")
    rows = []
    for number, sample in enumerate(tensors):
        has_tokens = "input_ids" in sample or any(map(_SEQUENCE.fullmatch, sample))
        targets = num_targets_of(nested(sample), number) if has_tokens else _UNKNOWN
        length = _length_of(sample, number, has_tokens) if lengths is None else int(lengths[number])
        if length < 1:
            raise UsageError(f"sample {number} has length {length}, but must have at least 1")
        rows.append([length, targets, *numels(sample, schema or ())])
    header = {
        "fields": None if schema is None else [[field.name, field.dtype, field.ndim] for field in schema],
        "plan": None if plan is None else hashlib.sha256(plan.to_json().encode()).hexdigest(),
        "count": len(rows),
    }
    message = json.dumps(header).encode() + b"\n" + np.array(rows, dtype=np.int64).tobytes()
    told = [_Told.of(data) for data in gather_bytes(message, control, group, "lengths of samples")]
    return tensors, _add_up(told, rank)


def _length_of(sample: TensorSample, number: int, has_tokens: bool) -> int:
    if not has_tokens:
        raise UsageError(
            f"sample {number} has no input_ids, whose number is its length; it has {', '.join(sample)}. Give "
            "lengths=..., one for each sample"
        )
    return sum(len(sequence["input_ids"]) for _, sequence in sequences_of(nested(sample), f"sample {number}"))


def _token_columns(schema: Schema) -> list[int]:
    """Which fields are the tokens of a sample's sequences, in any order."""
    names = [field.name for field in schema]
    of_several = [column for column, name in enumerate(names) if _SEQUENCE.fullmatch(name)]
    return of_several or [column for column, name in enumerate(names) if name == "input_ids"]


@dataclass(frozen=True)
class _Told:
    """What a rank tells: a digest of its plan, its schema, and numbers of each sample (``take_stock``)."""

    plan: str | None
    schema: Schema | None
    table: list[list[int]]

    @classmethod
    def of(cls, data: bytes) -> _Told:
        line, _, rest = data.partition(b"\n")
        header = json.loads(line)
        fields = header["fields"]
        schema = None if fields is None else tuple(Field(*field) for field in fields)
        columns = _COLUMNS + len(schema or ())
        table = np.frombuffer(rest, dtype=np.int64).reshape(header["count"], columns).tolist()
        return cls(header["plan"], schema, table)


def _add_up(told: Sequence[_Told], rank: int) -> Stock:
    odd = [number for number, theirs in enumerate(told) if theirs.plan != told[0].plan]
    if odd:
        raise UsageError(
            f"exchange: the plan of ranks {odd} differs from rank 0's; make it from the lengths of all "
            "ranks' samples, alike on every rank (engine.plan does)"
        )
    merged: Schema | None = None
    first = 0
    for number, theirs in enumerate(told):
        if theirs.schema is not None and merged is None:
            merged, first = theirs.schema, number
        elif theirs.schema is not None and merged is not None:
            merged = merge(merged, theirs.schema, f"rank {first}", f"rank {number}")
    schema = merged or ()
    rows = [row for theirs in told for row in theirs.table]
    columns = _token_columns(schema)
    parts = [tuple([row[_COLUMNS + column] for column in columns]) for row in rows]
    sequences = [own if sum(own) == row[0] else (row[0],) for own, row in zip(parts, rows, strict=True)]
    return Stock(
        schema=schema,
        lengths=tuple([row[0] for row in rows]),
        sequences=tuple(sequences),
        longest=max(itertools.chain.from_iterable(parts if columns else sequences), default=0),
        num_targets=None if any(row[1] == _UNKNOWN for row in rows) else tuple([row[1] for row in rows]),
        nbytes=tuple([nbytes(schema, row[_COLUMNS:]) for row in rows]),
        homes=tuple([number for number, theirs in enumerate(told) for _ in theirs.table]),
        rank=rank,
        packable=packable(schema, [row[_COLUMNS:] for row in rows]),
    )


def move(
    samples: Sequence[TensorSample],
    stock: Stock,
    wanted: Sequence[Sequence[int]],
    control: ControlBlock,
    group: dist.ProcessGroup,
) -> dict[int, TensorSample]:
    """Give every rank the samples that it wants. Collective over all ranks.

    Args:
        samples: this rank's, from :func:`take_stock`.
        stock: what all ranks have.
        wanted: for each rank the positions of the samples that it wants; equal on all ranks.
        control: watches the wait.
        group: gloo group of all ranks.

    Returns:
        By position the samples that this rank wants; those of others are views of one buffer.
    """
    rank, first = stock.rank, stock.first
    found = {
        position: convert(samples[position - first], stock.schema)
        for position in wanted[rank]
        if stock.homes[position] == rank
    }
    send, sent = pack(
        samples,
        stock,
        [
            [] if other == rank else [position for position in positions if stock.homes[position] == rank]
            for other, positions in enumerate(wanted)
        ],
    )
    coming = [
        [] if home == rank else [position for position in wanted[rank] if stock.homes[position] == home]
        for home in range(len(wanted))
    ]
    if all(
        stock.homes[position] == other for other, positions in enumerate(wanted) for position in positions
    ):
        return found  # nobody has anything for anybody
    received = trade(send, sent, [_size(stock, positions) for positions in coming], control, group)
    start = 0
    for position in itertools.chain(*coming):
        found[position] = read(received[start:], stock.schema, copy=False)
        start += stock.nbytes[position]
    return found


def pack(
    samples: Sequence[TensorSample], stock: Stock, for_ranks: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, list[int]]:
    """Bytes of this rank's samples for each rank.

    Args:
        samples: this rank's.
        stock: what all ranks have.
        for_ranks: for each rank positions of samples of this rank.

    Returns:
        The bytes one after the other, 1-D uint8; how many are for each rank.
    """
    sizes = [_size(stock, positions) for positions in for_ranks]
    send = torch.empty(sum(sizes), dtype=torch.uint8)
    start = 0
    for position in itertools.chain(*for_ranks):
        start += write(samples[position - stock.first], stock.schema, send[start:])
    return send, sizes


def trade(
    send: torch.Tensor,
    sent: Sequence[int],
    coming: Sequence[int],
    control: ControlBlock,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """An all-to-all of bytes. Collective over all ranks.

    Args:
        send: what goes to each rank, one after the other.
        sent: bytes for each rank.
        coming: bytes from each rank.
        control: watches the wait.
        group: gloo group of all ranks.

    Returns:
        What came, in the order of ranks.
    """
    received = torch.empty(sum(coming), dtype=torch.uint8)
    work = dist.all_to_all_single(received, send, list(coming), list(sent), group=group, async_op=True)
    control.wait_work(work, "the exchange of samples")
    return received


def _size(stock: Stock, positions: Sequence[int]) -> int:
    return sum(stock.nbytes[position] for position in positions)
