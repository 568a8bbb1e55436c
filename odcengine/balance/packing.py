"""Cut each rank's samples into micro-batches.

A micro-batch takes a rank at least as long as its parameters and gradients travel, so few are better than
many, and even ones better than full ones with a small rest behind them. First fit decreasing says how many
there are (Johnson 1973: at most 11/9 of the fewest possible, and a few more); then the heaviest sample that
is left goes to the lightest of them that has room.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
Group = list[int]

_RANKS_FOR_NUMPY = 128
_LARGEST_ARRAY = 1 << 22
_COLUMNS = 8
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Limits:
    """What fits into one micro-batch.

    Attributes:
        lengths: tokens of each sample.
        max_tokens: of a micro-batch; None for no limit.
        max_samples: of a micro-batch; None for no limit.
    """

    lengths: list[int]
    max_tokens: int | None
    max_samples: int | None

    @property
    def most_tokens(self) -> int:
        """The limit of tokens as a number."""
        return _NO_LIMIT if self.max_tokens is None else self.max_tokens

    @property
    def most_samples(self) -> int:
        """The limit of samples as a number."""
        return _NO_LIMIT if self.max_samples is None else self.max_samples

    def allow(self, num_tokens: int, num_samples: int) -> bool:
        """Whether a micro-batch may be so large."""
        return num_tokens <= self.most_tokens and num_samples <= self.most_samples

    def min_groups(self) -> int:
        """At least so many micro-batches are needed for all samples; 1 for no samples."""
        by_tokens = -(-sum(self.lengths) // self.max_tokens) if self.max_tokens else 1
        by_samples = -(-len(self.lengths) // self.max_samples) if self.max_samples else 1
        return max(1, by_tokens, by_samples)

    def share_of_group(self) -> npt.NDArray[np.float64]:
        """How much of a micro-batch each sample takes up; shape ``[n]``."""
        shares = np.zeros(len(self.lengths))
        if self.max_tokens is not None:
            shares = np.asarray(self.lengths, dtype=np.float64) / self.max_tokens
        if self.max_samples is not None:
            shares = np.maximum(shares, 1.0 / self.max_samples)
        return shares


def pack(
    shares: Sequence[Group], weights: Sequence[int], limits: Limits, *, use_numpy: bool | None = None
) -> list[list[Group]]:
    """Cut the samples of every rank into micro-batches.

    Args:
        shares: of each rank its samples, heaviest first.
        weights: of the samples.
        limits: of a micro-batch; a sample alone fits.
        use_numpy: None to use it where that is faster. The result is the same.

    Returns:
        For each rank its micro-batches, heaviest first; each of them rising.
    """
    if use_numpy is None:
        size = len(shares) * max(map(len, shares))
        use_numpy = len(shares) >= _RANKS_FOR_NUMPY and size <= _LARGEST_ARRAY
    if use_numpy and any(shares):
        return _pack_with_numpy(shares, weights, limits)
    return [_pack_in_python(share, weights, limits) for share in shares]


def _pack_in_python(samples: Group, weights: Sequence[int], limits: Limits) -> list[Group]:
    """:func:`pack` for one rank."""
    groups = first_fit(samples, limits)
    if len(groups) > 1:
        groups, loads = _evened(samples, len(groups), weights, limits) or (
            groups,
            [sum([weights[sample] for sample in group]) for group in groups],
        )
        groups = [groups[index] for index in sorted(range(len(groups)), key=loads.__getitem__, reverse=True)]
    return [sorted(group) for group in groups]


def first_fit(samples: Group, limits: Limits) -> list[Group]:
    """Each sample into the first micro-batch that has room for it."""
    groups: list[Group] = []
    num_tokens: list[int] = []
    has_room: list[int] = []
    max_tokens, max_samples = limits.most_tokens, limits.most_samples
    shortest = min([limits.lengths[sample] for sample in samples], default=0)
    for sample in samples:
        length = limits.lengths[sample]
        for index in has_room:
            if num_tokens[index] + length <= max_tokens:
                groups[index].append(sample)
                num_tokens[index] += length
                break
        else:
            index = len(groups)
            groups.append([sample])
            num_tokens.append(length)
            has_room.append(index)
        if num_tokens[index] + shortest > max_tokens or len(groups[index]) >= max_samples:
            has_room.remove(index)
    return groups


def _evened(
    samples: Group, count: int, weights: Sequence[int], limits: Limits
) -> tuple[list[Group], list[int]] | None:
    """Each sample into the lightest of ``count`` micro-batches that has room; None where none has.

    Returns:
        The micro-batches and their weights.
    """
    groups: list[Group] = [[] for _ in range(count)]
    num_tokens, loads = [0] * count, [0] * count
    max_tokens, max_samples = limits.most_tokens, limits.most_samples
    shortest = min([limits.lengths[sample] for sample in samples])
    by_load = [(0, index) for index in range(count)]  # a heap
    for sample in samples:
        length = limits.lengths[sample]
        full = []
        while by_load:
            index = by_load[0][1]
            if num_tokens[index] + length <= max_tokens and len(groups[index]) < max_samples:
                break
            full.append(heapq.heappop(by_load))
        else:
            return None
        groups[index].append(sample)
        num_tokens[index] += length
        loads[index] += weights[sample]
        heapq.heapreplace(by_load, (loads[index], index))
        for entry in full:
            if num_tokens[entry[1]] + shortest <= max_tokens:  # else it is full for good
                heapq.heappush(by_load, entry)
    return groups, loads


# ---- all ranks at once ---------------------------------------------------------------------------------


def _pack_with_numpy(shares: Sequence[Group], weights: Sequence[int], limits: Limits) -> list[list[Group]]:
    """:func:`pack` for all ranks at once, a sample of each at a time: the same micro-batches."""
    # Ranks with many samples first: those that have a j-th one are the first rows.
    order = sorted(range(len(shares)), key=lambda rank: len(shares[rank]), reverse=True)
    rows = _Rows([shares[rank] for rank in order], weights, limits)
    index, counts = rows.first_fit()
    evened, done = rows.evened(counts)
    index[done] = evened[done]
    packed: list[list[Group]] = [[] for _ in shares]
    for rank, groups in zip(order, rows.groups(index, counts), strict=True):
        packed[rank] = groups
    return packed


class _Rows:
    """Samples of ranks as rows; arrays are ``[ranks, samples of the first]`` where not said otherwise."""

    def __init__(self, shares: Sequence[Group], weights: Sequence[int], limits: Limits) -> None:
        self._counts = np.array([len(share) for share in shares])
        self._present = np.arange(len(shares[0])) < self._counts[:, None]
        self._num_samples = len(limits.lengths)
        self._samples: Array = np.zeros(self._present.shape, dtype=np.int64)
        self._samples[self._present] = np.fromiter(
            itertools.chain.from_iterable(shares), dtype=np.int64, count=int(self._counts.sum())
        )
        self._lengths: Array = np.array(limits.lengths, dtype=np.int64)[self._samples]
        self._weights: Array = np.array(weights, dtype=np.int64)[self._samples]
        self._max_tokens, self._max_samples = limits.most_tokens, limits.most_samples

    def _columns(self) -> list[int]:
        """For each column how many ranks have a sample there: the first ones."""
        return self._present.sum(axis=0).tolist()  # type: ignore[no-any-return]

    def first_fit(self) -> tuple[Array, Array]:
        """The number of each sample's micro-batch, and how many each rank has, ``[ranks]``."""
        index = np.zeros_like(self._samples)
        tokens: Array = np.full((len(index), _COLUMNS), self._max_tokens, dtype=np.int64)  # that have room
        places: Array = np.full_like(tokens, self._max_samples)
        for column, active in enumerate(self._columns()):
            lengths = self._lengths[:active, column]
            # A micro-batch that is not begun has room for everything: the first of these is the next one.
            fits = (tokens[:active] >= lengths[:, None]) & (places[:active] > 0)
            chosen = np.arange(active), fits.argmax(axis=1)
            index[:active, column] = chosen[1]
            tokens[chosen] -= lengths
            places[chosen] -= 1
            if chosen[1].max() + 1 == tokens.shape[1]:
                more = ((0, 0), (0, tokens.shape[1]))
                tokens = np.pad(tokens, more, constant_values=self._max_tokens)
                places = np.pad(places, more, constant_values=self._max_samples)
        return index, index.max(axis=1) + 1

    def evened(self, counts: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
        """The number of each sample's micro-batch where these are even, and which ranks' samples fit so."""
        index = np.zeros_like(self._samples)
        begun = np.arange(counts.max()) < counts[:, None]
        tokens: Array = np.where(begun, self._max_tokens, -1)
        places: Array = np.full_like(tokens, self._max_samples)
        loads: Array = np.zeros_like(tokens)
        done = np.ones(len(index), dtype=bool)
        for column, active in enumerate(self._columns()):
            lengths = self._lengths[:active, column]
            fits = (tokens[:active] >= lengths[:, None]) & (places[:active] > 0)
            chosen = np.arange(active), np.where(fits, loads[:active], _NO_LIMIT).argmin(axis=1)
            done[:active] &= fits[chosen]
            index[:active, column] = chosen[1]
            tokens[chosen] -= lengths
            places[chosen] -= 1
            loads[chosen] += self._weights[:active, column]
        return index, done

    def groups(self, index: Array, counts: Array) -> list[list[Group]]:
        """Of each rank its micro-batches, heaviest first."""
        most = int(counts.max())
        flat = (np.arange(len(index))[:, None] * most + index)[self._present]
        loads = np.bincount(flat, weights=self._weights[self._present], minlength=len(index) * most)
        place = np.empty((len(index), most), dtype=np.int64)
        by_load = np.argsort(-loads.reshape(place.shape), axis=1, kind="stable")
        np.put_along_axis(place, by_load, np.arange(most)[None, :], axis=1)
        # One sort: by rank, by the place of the micro-batch, by the number of the sample.
        keys = (flat // most * most + place.ravel()[flat]) * self._num_samples + self._samples[self._present]
        keys.sort()
        of_group, samples = np.divmod(keys, self._num_samples)
        stops = np.append(np.flatnonzero(np.diff(of_group)) + 1, len(keys)).tolist()
        of_all = samples.tolist()
        cut = [of_all[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
        ends = np.cumsum(np.where(self._counts > 0, counts, 0)).tolist()
        return [cut[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]
