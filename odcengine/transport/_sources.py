"""Memory of gradients on their way: freed in the order of streams, not when the host sees a push done.

A host is far ahead of its GPU. Memory that torch's allocator may only reuse once an event has been *seen* to
pass (``Tensor.record_stream``) piles up by as much as the host is ahead: gradients of all layers of a
micro-batch. So what a push reads is lent out here, and given back when the stream that it was taken on has
been told to wait for the push.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_LENT = 2  # at once: one is being filled while another one is pushed


@dataclass
class _Lent:
    source: torch.Tensor
    start: int  # addresses
    stop: int
    stream: torch.cuda.Stream
    done: torch.cuda.Event | None = None  # of the last push out of it


class PushSources:
    """Lends memory to those who push.

    Args:
        push_stream: the stream on which pushes read their sources.
    """

    def __init__(self, push_stream: torch.cuda.Stream) -> None:
        self._push_stream = push_stream
        self._lent: deque[_Lent] = deque()

    def lend(
        self, size: Sequence[int | torch.SymInt], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Uninitialised memory, in the order of the current stream."""
        self.reclaim(_LENT - 1)
        source = torch.empty(*size, dtype=dtype, device=device)
        start = source.data_ptr()
        self._lent.append(_Lent(source, start, start + source.nbytes, torch.cuda.current_stream(device)))
        return source

    def holds(self, rows: torch.Tensor) -> bool:
        """Whether ``rows`` lies in memory that was lent."""
        return self._find(rows) is not None

    def pushed(self, rows: torch.Tensor, done: torch.cuda.Event) -> None:
        """A push of ``rows`` was enqueued.

        Args:
            rows: what it reads, lent or not.
            done: recorded behind it. It may be recorded again behind a later push.
        """
        lent = self._find(rows)
        if lent is None:
            rows.record_stream(self._push_stream)
        else:
            lent.done = done

    def reclaim(self, keep: int = 0) -> None:
        """Give all back but the last ``keep``; the streams that they were taken on wait for their pushes."""
        while len(self._lent) > keep:
            lent = self._lent.popleft()
            if lent.done is not None:  # something was pushed out of it
                lent.stream.wait_event(lent.done)

    def _find(self, rows: torch.Tensor) -> _Lent | None:
        address = rows.data_ptr()
        return next((lent for lent in self._lent if lent.start <= address < lent.stop), None)
