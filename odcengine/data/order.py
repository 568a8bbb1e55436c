"""Which samples form a minibatch: a pure function of the data set, the seed, the epoch and a number."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from odcengine.errors import ConfigError


class Order:
    """Cuts a data set into minibatches, in an order of its own for every epoch.

    ``len(order)`` is the number of minibatches of an epoch.

    Args:
        usable: int64 ``[n]``: data set indices of the samples that are used.
        train_batch_size: samples in a minibatch.
        seed: of the order.
        shuffle: a new order every epoch; else that of ``usable``.
        drop_last: leave out an epoch's last minibatch if it is short.

    Raises:
        ConfigError: that leaves no minibatch.
    """

    def __init__(
        self,
        usable: npt.NDArray[np.int64],
        *,
        train_batch_size: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
    ) -> None:
        self._usable = usable
        self._train_batch_size = train_batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._last: tuple[int, npt.NDArray[np.int64]] | None = None  # epoch asked for last, and its order
        if len(self) == 0:
            raise ConfigError(
                f"data: {len(usable)} samples are less than train_batch_size {train_batch_size}, and "
                "drop_last leaves out the short minibatch: nothing to train on; set drop_last to false"
            )

    def __len__(self) -> int:
        full, rest = divmod(len(self._usable), self._train_batch_size)
        return full + (rest > 0 and not self._drop_last)

    def minibatch(self, epoch: int, index: int) -> npt.NDArray[np.int64]:
        """Data set indices of the samples of a minibatch.

        Args:
            epoch: the epoch, from 0.
            index: number of the minibatch within it, from 0.
        """
        start = index * self._train_batch_size
        return self._of_epoch(epoch)[start : start + self._train_batch_size]

    def identity(self) -> dict[str, Any]:
        """What has to be equal for epoch and number to mean the same samples of a data set."""
        return {
            "num_samples": len(self._usable),
            "train_batch_size": self._train_batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
        }

    def _of_epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        last = self._last
        if last is None or last[0] != epoch:
            order = self._usable
            if self._shuffle:
                # Sorting raw bits: of numpy's generators only the raw stream is the same in every version.
                bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch])).random_raw(len(order))
                order = order[np.argsort(bits, kind="stable")]
            last = self._last = (epoch, order)  # another thread may replace it at once
        return last[1]
