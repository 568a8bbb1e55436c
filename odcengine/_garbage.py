"""Keeps Python's cyclic garbage collector out of minibatches.

A full collection of a process with torch.compile and a few models in it takes half a second (seen on two
GPUs, in the middle of a step of 1.3 s), at another moment on each rank. What is young is collected at the
minibatch's boundary instead, while the GPU is at the update; what has survived the first steps (modules,
compiled code) is not looked at any more until the engine is closed.
"""

from __future__ import annotations

import gc

_SETTLED_AFTER = 3  # steps; by then kernels are compiled and caches are filled


class QuietGarbage:
    """The process's garbage collector, as one engine uses it. Does nothing where the script has disabled it.

    Args:
        enabled: ``odc.manage_gc``.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._paused = False
        self._steps = 0
        self._frozen = False

    def pause(self) -> None:
        """A minibatch begins."""
        if self._enabled and gc.isenabled():
            gc.disable()
            self._paused = True

    def collect(self) -> None:
        """At the boundary of the minibatch, while the device is busy."""
        if not self._paused:
            return
        self._steps += 1
        if self._steps == _SETTLED_AFTER:
            gc.collect()
            # What the script has frozen itself must stay so, and cannot be told apart afterwards.
            self._frozen = gc.get_freeze_count() == 0
            gc.freeze()
        else:
            gc.collect(1)
        self.resume()

    def resume(self) -> None:
        """The minibatch has ended, or was left."""
        if self._paused:
            gc.enable()
            self._paused = False

    def close(self) -> None:
        """Leave the collector as it was found."""
        self.resume()
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
