"""Saves of all ranks together: begun at a minibatch's end, written in the background, ended by agreement.

A save takes three agreements. *Begin*: rank 0 makes the temporary folder, or says on all ranks why it cannot.
*Written*: every rank has its tensors and their record on the disk. *Published*: rank 0 has marked the
checkpoint and renamed it. The last two need no meeting of their own: each rank's votes travel with the sums
that ranks exchange at the end of every step anyway. Only who waits for a save (``wait=True``, the next save,
``close``) exchanges votes without a step.

What goes wrong on a rank is told on all of them, with the rank's name and the reason.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from odcengine._collectives import gather_texts
from odcengine.checkpoint import directory
from odcengine.checkpoint.part import Publication, Task, reason_of, write_part
from odcengine.checkpoint.plain import encode
from odcengine.checkpoint.state import (
    OptimizerState,
    Trained,
    fingerprints,
    model_tensors,
    names_of,
    param_groups,
    random_state,
    scheduler_state,
)
from odcengine.checkpoint.tensors import Chunk, Staging, chunks_of
from odcengine.checkpoint.writer import Writer
from odcengine.config import Config
from odcengine.errors import CheckpointError
from odcengine.start import Job

logger = logging.getLogger(__name__)

_SPARE = 1.02  # of the tensors' bytes: metadata, records
_CANCELLED_S = 20.0


@dataclass
class _Save:
    """One save, from its begin until all ranks know what became of it."""

    tag: str
    root: Path
    folder: Path
    part: Task
    publication: Publication  # of rank 0
    deadline: float
    started: float
    blocked_s: float = 0.0
    publishing: Task | None = None
    reason: str = ""  # why it failed on this rank


class Saver:
    """Writes checkpoints of one engine; the same calls on every rank.

    Attributes:
        blocked_s: seconds in which training waited for saves, in total.
        last_path: the newest complete checkpoint of this run, or None.

    Args:
        trained: what is trained.
        job: ranks, control block and device.
        config: the configuration.
        describe: gives further small files for a checkpoint, by name; called on rank 0.
    """

    def __init__(
        self, trained: Trained, job: Job, config: Config, describe: Callable[[], dict[str, bytes]]
    ) -> None:
        self.blocked_s = 0.0
        self.last_path: Path | None = None
        self._trained = trained
        self._job = job
        self._control = job.control
        self._config = config
        self._options = config.checkpoint
        self._describe = describe
        self._rank, self._world_size = job.topology.rank, job.topology.world_size
        self._writers: dict[Path, Writer] = {}  # on rank 0: the directories that this run writes to
        self._staging = Staging()
        self._save: _Save | None = None  # the one that goes on
        self._last_part: Task | None = None

    # -- beginning -------------------------------------------------------------------------------------

    def begin(
        self,
        root: Path,
        tag: str | None,
        step: int,
        client_state: Any,
        *,
        automatic: bool,
        frozen: bool,
        stage: bool,
        optimizer: bool = True,
    ) -> str | None:
        """Begin a save; the one before is finished first.

        Args:
            root: the directory.
            tag: the checkpoint's name; None for one with the step's number.
            step: optimizer steps done.
            client_state: what the script wants to find again.
            automatic: called for by the configuration's interval: may be removed one day.
            frozen: whether with parameters that are not trained.
            stage: copy the tensors first; else the caller waits for the end before it changes them.
            optimizer: whether with the optimizer's state.

        Returns:
            Why there will be no checkpoint, the same on all ranks; None where it has begun.
        """
        failed = self.settle()
        if failed is not None and self._rank == 0:
            logger.error("%s", failed)
        start = time.perf_counter()
        tag = directory.tag_of(step) if tag is None else tag
        chunks: list[Chunk] = []
        mine: dict[str, Any] = {"root": str(root), "tag": tag, "nbytes": 0, "error": None}
        state: dict[str, Any] = {}
        random: Any = None
        try:
            directory.check_tag(tag)
            self._await_cancelled()
            tensors, state = self._collect(step, client_state, frozen, optimizer)
            random = random_state(self._job.device.torch_device)
            chunks = chunks_of(tensors, self._rank)
            mine["nbytes"] = sum(c.tensor.numel() * c.tensor.element_size() for c in chunks)
            if not frozen:
                mine["frozen"] = fingerprints(self._trained.model)
        except CheckpointError as error:
            mine["error"] = str(error)
        everyone = [json.loads(text) for text in self._gather(json.dumps(mine))]
        if problem := self._problem(everyone):
            return problem
        answer = {}
        if self._rank == 0:
            answer = self._prepare(root, tag, sum(rank["nbytes"] for rank in everyone))
        answer = json.loads(self._gather(json.dumps(answer))[0])
        if answer["error"]:
            return f"checkpoint {tag} was not begun: {answer['error']}"
        if not frozen:
            state["frozen"] = _sum_up([rank["frozen"] for rank in everyone])
        folder = directory.temporary(root, tag, answer["token"])
        part = self._start_part(folder, chunks, random, stage=stage)
        publication = self._publication(folder, root, tag, step, automatic, state, answer["token"])
        deadline = time.monotonic() + self._options.deadline_s
        self._save = _Save(tag, root, folder, part, publication, deadline, start)
        self._save.blocked_s = time.perf_counter() - start
        self.blocked_s += self._save.blocked_s
        return None

    def _start_part(self, folder: Path, chunks: list[Chunk], random: Any, *, stage: bool) -> Task:
        """Copy this rank's tensors, if need be, and have a thread write them."""
        ready: Callable[[], None] = lambda: None  # noqa: E731
        problem: Exception | None = None
        if stage or (chunks and chunks[0].tensor.is_cuda):
            try:
                chunks, ready = self._staging.copy(chunks)
            except (RuntimeError, MemoryError) as error:  # no memory: all ranks have to hear of it
                problem = error

        def write(task: Task) -> None:
            if problem is not None:
                raise CheckpointError(f"no room for copies in the host's memory: {problem}")
            write_part(folder, self._rank, chunks, ready, random, task)

        self._last_part = Task(write, f"odc-save-{folder.name}")
        return self._last_part

    def _collect(
        self, step: int, client_state: Any, frozen: bool, with_optimizer: bool
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The tensors of this rank, and everything else as JSON takes it."""
        trained, names = self._trained, names_of(self._trained.model)
        tensors, optimizer = model_tensors(trained.model, frozen=frozen), None
        if with_optimizer:
            groups = param_groups(trained.optimizer, names)
            found = OptimizerState(trained.optimizer, names, self._rank)
            tensors.update(found.tensors)
            optimizer = {
                "type": type(trained.optimizer).__name__,
                "groups": groups,
                "layout": found.layout,
            }
        data = None if trained.loader is None else trained.loader.state_dict()
        state = {
            "step": step,
            "optimizer": optimizer,
            "scheduler": scheduler_state(trained.scheduler),
            "data": encode(data, "the loader's state"),
            "client_state": encode(client_state, "client_state"),
            "config": encode(self._config.resolved(), "the configuration"),
            "model": {"class": type(trained.model).__name__},
            "frozen": None,
        }
        return tensors, state

    def _publication(
        self, folder: Path, root: Path, tag: str, step: int, automatic: bool, state: Any, token: str
    ) -> Publication:
        return Publication(
            folder=folder,
            root=root,
            tag=tag,
            step=step,
            world_size=self._world_size,
            automatic=automatic,
            state=state,
            token=token,
            keep_last=self._options.keep_last,
            keep_every=self._options.keep_every,
            files=self._describe() if self._rank == 0 else {},
        )

    def _problem(self, everyone: list[dict[str, Any]]) -> str | None:
        first = everyone[0]
        for rank, said in enumerate(everyone):
            if said["error"]:
                return f"checkpoint {first['tag']} was not begun: {self._name(rank)}: {said['error']}"
            if (said["root"], said["tag"]) != (first["root"], first["tag"]):
                return (
                    f"checkpoint {first['tag']} was not begun: {self._name(rank)} saves {said['tag']} to "
                    f"{said['root']}, rank 0 {first['tag']} to {first['root']}; give the same on all ranks"
                )
        return None

    def _prepare(self, root: Path, tag: str, nbytes: int) -> dict[str, Any]:
        """On rank 0: make the temporary folder."""
        token = secrets.token_hex(4)
        try:
            self.claim(root)
            needed, free = int(nbytes * _SPARE), shutil.disk_usage(root).free
            if needed > free:
                raise CheckpointError(
                    f"{root} has {free / 1e9:.2f} GB left, and the checkpoint needs {needed / 1e9:.2f} GB; "
                    "remove old checkpoints or lower checkpoint.keep_last"
                )
            directory.temporary(root, tag, token).mkdir()
        except (CheckpointError, OSError) as error:
            return {"error": reason_of(error)}
        return {"error": None, "token": token}

    def claim(self, root: Path) -> None:
        """On rank 0: be the one run that writes to ``root``.

        Raises:
            CheckpointError: it cannot be written to, or another run does.
        """
        if root in self._writers:
            self._writers[root].check()
            root.mkdir(parents=True, exist_ok=True)
            return
        directory.make_root(root)
        self._writers[root] = Writer(root, beat=self._control.beat)
        for note in directory.clean(root):
            logger.warning("checkpoints in %s: %s", root, note)

    def release(self, root: Path) -> None:
        """Let others write to ``root``."""
        if root in self._writers:
            self._writers.pop(root).close()

    # -- finishing -------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a save has begun whose end is not known yet; the same on all ranks."""
        return self._save is not None

    def votes(self) -> list[float]:
        """What this rank says of the save that goes on: its part is written, it failed, it is published."""
        save = self._save
        if save is None:
            return [0.0, 0.0, 0.0]
        failed = self._has_failed(save)
        published = save.publishing is not None and save.publishing.done and not failed
        return [float(save.part.done and not failed), float(failed), float(published)]

    def advance(self, votes: Sequence[float]) -> str | None:
        """Go on with the save by all ranks' votes.

        Args:
            votes: the sum over ranks of :meth:`votes`.

        Returns:
            Why there will be no checkpoint, the same on all ranks; None where there is hope.
        """
        save = self._save
        if save is None:
            return None
        written, failed, published = votes
        if failed:
            return self._give_up(save)
        if published:
            self._save = None
            self.last_path = save.root / save.tag
            if self._rank == 0:
                seconds = time.perf_counter() - save.started
                logger.info(
                    "checkpoint %s saved in %.1f s (training waited %.2f s)",
                    self.last_path,
                    seconds,
                    save.blocked_s,
                )
        elif written == self._world_size and self._rank == 0 and save.publishing is None:
            check = self._writers[save.root].check
            publication = save.publication
            save.publishing = Task(lambda task: publication.publish(check, task), "odc-publish")
        return None

    def settle(self) -> str | None:
        """Wait until the save that goes on has ended; returns why it failed, the same on all ranks."""
        if self._save is None:
            return None
        start, save = time.perf_counter(), self._save
        failed = None
        while self.busy:
            self._await_own(save)
            message = torch.tensor(self.votes(), dtype=torch.float64)
            if self._world_size > 1:
                work = dist.all_reduce(message, group=self._job.host_group, async_op=True)
                self._control.wait_work(work, f"the end of checkpoint {save.tag}")
            save.blocked_s += time.perf_counter() - start
            self.blocked_s += time.perf_counter() - start
            start = time.perf_counter()
            failed = self.advance(message.tolist())
        return failed

    def _await_own(self, save: _Save) -> None:
        """Wait for what this rank still has to do for the save, giving signs of life until the deadline."""
        tasks = [save.part] if save.publishing is None else [save.part, save.publishing]

        def ready() -> bool:
            if time.monotonic() > save.deadline or all(task.done for task in tasks):
                return True
            self._control.beat()
            return False

        self._control.wait_until(ready, f"writing checkpoint {save.tag}", lambda: ())

    def _await_cancelled(self) -> None:
        """The part of a save that was given up ends at its next write, unless the file system hangs."""
        part, deadline = self._last_part, time.monotonic() + _CANCELLED_S

        def ready() -> bool:
            self._control.beat()
            return part is None or part.done or time.monotonic() > deadline

        self._control.wait_until(ready, "the end of a save that was given up", lambda: ())
        if part is not None and not part.done:
            raise CheckpointError("a save that was given up still hangs in the file system")

    def _has_failed(self, save: _Save) -> bool:
        """Whether this rank's part of the save has failed; notes why."""
        late = time.monotonic() > save.deadline
        for task in (save.part, save.publishing):
            if task is None or save.reason:
                continue
            if task.done and task.error is not None:
                save.reason = reason_of(task.error)
            elif late and not task.done:
                save.reason = f"not written within {self._options.deadline_s:g} s (checkpoint.deadline_s)"
        return bool(save.reason)

    def _give_up(self, save: _Save) -> str:
        save.part.cancel()
        if save.publishing is not None:
            save.publishing.cancel()
        self._save = None
        reasons = self._gather(save.reason)
        told = [f"{self._name(rank)}: {reason}" for rank, reason in enumerate(reasons) if reason]
        if self._rank == 0:
            Task(lambda _: directory.remove(save.folder), "odc-remove")
        return f"checkpoint {save.tag} was not saved to {save.root}: {'; '.join(told)}"

    def close(self) -> str | None:
        """Finish the save that goes on; returns why it failed. Collective."""
        failed = self.settle()
        self.abandon()
        return failed

    def abandon(self) -> None:
        """Let go without meeting the others."""
        if self._save is not None:
            self._save.part.cancel()
            self._save = None
        for root in list(self._writers):
            self.release(root)

    def _gather(self, text: str) -> list[str]:
        return gather_texts(text, self._control, self._job.host_group, "the agreement on a checkpoint")

    def _name(self, rank: int) -> str:
        return self._job.topology.describe(rank)


def _sum_up(shares: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(share[name] for share in shares) % (1 << 40) for name in shares[0]}
