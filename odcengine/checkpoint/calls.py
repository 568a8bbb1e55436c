"""The engine's calls for checkpoints and weights, apart from the protocol of a minibatch."""

from __future__ import annotations

import abc
import os
from pathlib import Path
from typing import Any

from odcengine.checkpoint.checkpoints import Checkpoints
from odcengine.checkpoint.export import DTYPES
from odcengine.checkpoint.loader import Loaded
from odcengine.checkpoint.state import Parts
from odcengine.errors import UsageError
from odcengine.models.safetensors_files import parse_size


class CheckpointCalls(abc.ABC):
    """What ``OdcEngine`` inherits. All calls are collective, between two minibatches."""

    global_steps: int
    client_state: dict[str, Any]
    _checkpoints: Checkpoints

    @abc.abstractmethod
    def _require_between(self, call: str) -> None:
        """Raise UsageError in the middle of a minibatch, or when the engine is closed."""

    @abc.abstractmethod
    def _go_on_at(self, step: int) -> None:
        """Publish what was loaded and go on from ``step``."""

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        *,
        exclude_frozen_parameters: bool | None = None,
        wait: bool = True,
    ) -> bool:
        """Save a checkpoint between two minibatches. Collective, with the same arguments on every rank.

        Args:
            save_dir: the directory of checkpoints; the configuration's ``checkpoint.dir`` by default.
            tag: the checkpoint's name; ``step_N`` by default.
            client_state: what the script wants to find again, beside :attr:`client_state`; plain values,
                rank 0's are saved.
            exclude_frozen_parameters: leave out what is not trained; by the configuration if None.
            wait: return when it is complete; else it is written while training goes on, and a failure is
                reported later.

        Returns:
            True, as DeepSpeed does.

        Raises:
            CheckpointError: it failed, on some rank or other; raised on all.
        """
        self._require_between("save_checkpoint")
        self._checkpoints.save(
            None if save_dir is None else os.fspath(save_dir),
            tag,
            self.global_steps,
            {**self.client_state, **(client_state or {})},
            frozen=None if exclude_frozen_parameters is None else not exclude_frozen_parameters,
            wait=wait,
        )
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written, if any, is complete. Collective.

        Raises:
            CheckpointError: it failed; raised on all ranks.
        """
        self._require_between("wait_for_checkpoint")
        self._checkpoints.wait(self.global_steps)

    @property
    def checkpoint_wait_s(self) -> float:
        """Seconds in which this rank's training has waited for saves so far, copying included."""
        return self._checkpoints.saver.blocked_s

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str] | None = None,
        tag: str | None = None,
        *,
        load_module_only: bool = False,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_data_position: bool = True,
        load_random_states: bool = True,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint between two minibatches, saved by any number of ranks. Collective.

        Args:
            load_dir: a directory of checkpoints, or a checkpoint; ``checkpoint.dir`` by default.
            tag: the checkpoint's name; by default the one that ``latest`` names, or the newest complete one.
            load_module_only: the weights only; counters stay, too.
            load_optimizer_states: with the optimizer's state.
            load_lr_scheduler_states: with the schedule's.
            load_data_position: with the loader's position and learned costs.
            load_random_states: with the random generators' states.

        Returns:
            Its path and its client state; None and an empty one where the directory has no checkpoint.

        Raises:
            CheckpointError: it is damaged or does not fit; raised on all ranks, and nothing has changed.
        """
        self._require_between("load_checkpoint")
        everything = Parts(
            load_optimizer_states, load_lr_scheduler_states, load_data_position, load_random_states
        )
        parts = Parts(False, False, False, False) if load_module_only else everything
        folder = None if load_dir is None else os.fspath(load_dir)
        loaded = self._checkpoints.load(folder, tag, parts, self.global_steps)
        return self._continue_from(loaded, counters=not load_module_only)

    def _continue_from(self, loaded: Loaded | None, *, counters: bool) -> tuple[str | None, dict[str, Any]]:
        if loaded is None:
            return None, {}
        if counters:
            self.client_state = dict(loaded.client_state)
        self._go_on_at(loaded.step if counters else self.global_steps)
        return str(loaded.path), loaded.client_state

    def _resume(self) -> None:
        """Begin as ``checkpoint.resume`` says; ``odcengine.initialize`` calls it."""
        self._continue_from(self._checkpoints.resume(), counters=True)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        dtype: str | None = None,
        max_shard_size: str = "5GB",
        tokenizer: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write the weights as transformers does, or of an adapter as peft does. Collective.

        Every rank writes its own part into the files; none holds the model.

        Args:
            save_directory: a new directory, on a file system that all ranks share.
            dtype: of the weights: float32, bfloat16, float16 or float64; by default bfloat16 where the model
                is computed in it (``bf16``), else as they are trained.
            max_shard_size: largest size of a file.
            tokenizer: directory with the tokenizer's files; by default the one the model was loaded from.

        Raises:
            CheckpointError: it failed, on some rank or other; raised on all.
        """
        self._require_between("save_pretrained")
        if dtype not in (None, *DTYPES):
            raise UsageError(f"save_pretrained: dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
        self._checkpoints.save_pretrained(
            Path(save_directory).expanduser(),
            dtype=dtype,
            max_bytes=parse_size(max_shard_size),
            tokenizer=None if tokenizer is None else Path(tokenizer),
            step=self.global_steps,
        )
