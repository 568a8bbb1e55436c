"""Work ahead of the loop over a loader: threads plan the next minibatch and read micro-batches.

What comes of it is the same as without: what was planned or read for anything but what is asked for next is
dropped.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from odcengine.data.minibatch import Minibatch
from odcengine.data.prefetch import Reader, Reading

Load = Callable[[Minibatch, "tuple[int, ...]"], Any]
"""Reads the micro-batch of some samples of a minibatch, given their data set indices."""


class Ahead:
    """Plans a loader's next minibatch, and reads the micro-batches that come after the one in use.

    Args:
        reader: the thread that reads.
        prefetch: micro-batches that are read ahead of the one in use, also those of the next minibatch.
    """

    def __init__(self, reader: Reader, prefetch: int) -> None:
        self.prefetch = prefetch
        self._reader = reader
        self._planner: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="odc-plan")
        self._planned: tuple[tuple[int, int], Future[Minibatch]] | None = None
        self._read_of_planned: deque[Reading] = deque()  # the first micro-batches of the planned minibatch
        self._read_of_current: deque[Reading] = deque()  # the same, of the minibatch taken last

    def plan(self, position: tuple[int, int], make: Callable[[], Minibatch]) -> None:
        """Have the next minibatch planned; no effect after :meth:`close`.

        Args:
            position: its epoch, and its number there.
            make: plans it; called in the thread.
        """
        if self._planner is not None:
            self._planned = (position, self._planner.submit(make))

    def take(self, position: tuple[int, int]) -> Minibatch | None:
        """The minibatch that was planned, if it is the one at ``position``; it is current from now on."""
        planned, self._planned = self._planned, None
        _cancel(self._read_of_current)
        self._read_of_current, self._read_of_planned = self._read_of_planned, deque()
        if planned is not None and planned[0] == position:
            return planned[1].result()  # of a thread of this process that only computes
        _cancel(self._read_of_current)
        return None

    def drop(self) -> None:
        """Forget what was planned, as another minibatch will be asked for."""
        self._planned = None
        _cancel(self._read_of_planned)

    @contextlib.contextmanager
    def reading(
        self, minibatch: Minibatch, load: Load, *, current: bool
    ) -> Iterator[Callable[[tuple[int, ...]], Any]]:
        """Inside the block, read ahead what a minibatch holds.

        Args:
            minibatch: the minibatch.
            load: reads a micro-batch, in the thread or here.
            current: it is the one taken last, so that what is planned comes after it.

        Yields:
            What gives the micro-batches, to be called with the indices of each, in their order.
        """
        planned = minibatch.planned
        if not self.prefetch:
            yield functools.partial(load, minibatch)
            return
        if planned is None:
            with self._reading_drawn(minibatch, load, current=current) as read_drawn:
                yield read_drawn
            return
        begun: deque[Reading] = deque()
        if current:
            begun, self._read_of_current = self._read_of_current, begun
            if not planned:
                self._read_next(self.prefetch, load)
        numbers = itertools.count()

        def read(sample_ids: tuple[int, ...]) -> Any:
            number = next(numbers)
            for ahead in planned[number + len(begun) : number + self.prefetch + 1]:
                begun.append(self._begin(load, minibatch, ahead))
            if current:
                self._read_next(self.prefetch + number + 1 - len(planned), load)
            return self._result(begun.popleft(), load, minibatch, sample_ids)

        try:
            yield read
        finally:
            _cancel(begun)

    @contextlib.contextmanager
    def _reading_drawn(
        self, minibatch: Minibatch, load: Load, *, current: bool
    ) -> Iterator[Callable[[tuple[int, ...]], Any]]:
        """The same where bundles are drawn: read ahead is the one that the plan expects next.

        Numbers are drawn in rising order, so an expected one that was passed over is with another rank.
        """
        expected = deque(minibatch.expected())
        begun: deque[Reading] = deque()  # of the first of ``expected``, or none
        if current:
            begun, self._read_of_current = self._read_of_current, begun
            if not expected or expected[0][0] >= 0:
                _cancel(begun)  # it was read for a rank that begins

        def read(sample_ids: tuple[int, ...]) -> Any:
            if not self.prefetch:  # closed
                return load(minibatch, sample_ids)
            reading, number = None, minibatch.drawn_last
            if begun and expected[0][0] == number:
                reading = begun.popleft()
            elif begun and (begun[0].future.cancel() or expected[0][0] < number):
                begun.clear()  # gone, or not begun yet: what is needed now comes first
            while expected and expected[0][0] <= number:
                expected.popleft()
            reading = reading or self._begin(load, minibatch, sample_ids)
            if expected and not begun:
                begun.append(self._begin(load, minibatch, expected[0][1]))
            if current and not expected:
                self._read_next(1, load)
            return self._result(reading, load, minibatch, sample_ids)

        try:
            yield read
        finally:
            _cancel(begun)

    def _begin(self, load: Load, minibatch: Minibatch, sample_ids: tuple[int, ...]) -> Reading:
        return self._reader.submit(
            f"samples {list(sample_ids)}", functools.partial(load, minibatch, sample_ids)
        )

    def _result(self, reading: Reading, load: Load, minibatch: Minibatch, sample_ids: tuple[int, ...]) -> Any:
        """What was read; read here where the thread was ended before it came to it."""
        closed = reading.future.cancelled()
        return load(minibatch, sample_ids) if closed else self._reader.wait(reading)

    def _read_next(self, count: int, load: Load) -> None:
        """Have the first ``count`` micro-batches read of the minibatch that is being planned."""
        if self._planned is None:
            return
        future = self._planned[1]

        def read(number: int) -> Any:
            minibatch = future.result()
            # Drawn from, if it is the current one by now; its first micro-batch is this rank's all the same.
            return load(minibatch, minibatch.share[number]) if number < len(minibatch.share) else None

        for number in range(len(self._read_of_planned), count):
            self._read_of_planned.append(
                self._reader.submit("the next minibatch", functools.partial(read, number))
            )

    def close(self, timeout_s: float) -> None:
        """End both threads; what is asked for later is done by who asks.

        Args:
            timeout_s: so long a reading is waited for that has begun.
        """
        self.prefetch = 0
        self.drop()
        _cancel(self._read_of_current)
        planner, self._planner = self._planner, None
        if planner is not None:
            planner.shutdown(wait=False, cancel_futures=True)
        self._reader.close(timeout_s)


def _cancel(readings: deque[Reading]) -> None:
    for reading in readings:
        reading.future.cancel()
    readings.clear()
