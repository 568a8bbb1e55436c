"""Checkpoints of one engine: what the engine's calls and the configuration ask for."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from odcengine._collectives import gather_texts
from odcengine.checkpoint import directory
from odcengine.checkpoint.export import Export, begin_export, check_out, export_checkpoint
from odcengine.checkpoint.hf import LAYOUT, Layout, layout_of
from odcengine.checkpoint.loader import Loaded, agree_on, choose, load
from odcengine.checkpoint.part import Task, reason_of
from odcengine.checkpoint.saver import Saver
from odcengine.checkpoint.state import MODEL, Parts, Trained, model_tensors
from odcengine.checkpoint.tensors import chunks_of
from odcengine.config import Config
from odcengine.control import Meeting, Phase
from odcengine.errors import CheckpointError, UsageError
from odcengine.models.adapter import is_adapted
from odcengine.start import Job

logger = logging.getLogger(__name__)


class Checkpoints:
    """Saves and loads, on all ranks alike; every method but :meth:`votes` and :meth:`abandon` is collective.

    Attributes:
        saver: writes.

    Args:
        trained: what is trained.
        job: ranks, control block and device.
        config: the configuration; ``checkpoint`` is the section of this class.
    """

    def __init__(self, trained: Trained, job: Job, config: Config) -> None:
        self._trained = trained
        self._job = job
        self._config = config
        self._options = config.checkpoint
        self.saver = Saver(trained, job, config, self._describe)

    @functools.cached_property
    def layout(self) -> Layout:
        """How transformers or peft store the model."""
        dtype = "bfloat16" if self._config.bf16.enabled else None
        try:
            return layout_of(self._trained.model, source=self._config.model.path, dtype=dtype)
        except Exception as error:  # transformers and peft have no class for what they cannot do
            raise CheckpointError(
                f"how {type(self._trained.model).__name__} is stored cannot be told: {error}"
            ) from error

    @property
    def _saves_frozen(self) -> bool:
        """The base of an adapter is where it came from; a checkpoint without it says by a sum which."""
        wanted = self._options.save_frozen
        return not is_adapted(self._trained.model) if wanted is None else wanted

    def _describe(self) -> dict[str, bytes]:
        """What a checkpoint holds for ``odc export``."""
        try:
            return {LAYOUT: self.layout.to_json()}
        except CheckpointError as error:
            logger.warning("checkpoints: odc export will not be able to read them: %s", error)
            return {}

    @contextlib.contextmanager
    def _phase(self, phase: Phase) -> Iterator[None]:
        """Be in ``phase``. A CheckpointError, which all ranks get, does not end the job by itself."""
        failed: CheckpointError | None = None
        with self._job.control.phase(phase):
            try:
                yield
            except CheckpointError as error:
                failed = error
        if failed is not None:
            raise failed

    # -- saving ----------------------------------------------------------------------------------------

    def votes(self) -> list[float]:
        """Numbers for the sums that ranks exchange at the end of every step."""
        return self.saver.votes()

    def after_step(self, votes: Sequence[float], step: int, client_state: dict[str, Any]) -> None:
        """Go on with a save by all ranks' votes, and begin one if it is time.

        Args:
            votes: the sums over ranks of :meth:`votes`.
            step: optimizer steps done.
            client_state: the script's.

        Raises:
            CheckpointError: a save failed and ``checkpoint.on_failure`` is stop.
        """
        every = self._options.every_n_steps
        due = every > 0 and step % every == 0
        if not due and not self.saver.busy:
            return
        with self._phase(Phase.SAVING):
            self._report(self.saver.advance(votes))
            if due:
                self._save_automatically(step, client_state)

    def _save_automatically(self, step: int, client_state: dict[str, Any]) -> None:
        if self.saver.busy and self._job.topology.rank == 0:
            logger.warning(
                "checkpoint of step %d: the one before is still being written; training waits for it (raise "
                "checkpoint.every_n_steps, or write to a faster file system)",
                step,
            )
        self._report(self.saver.settle())
        failed = self.saver.begin(
            self._root(None),
            None,
            step,
            client_state,
            automatic=True,
            frozen=self._saves_frozen,
            stage=self._options.background,
        )
        if failed is None and not self._options.background:
            failed = self.saver.settle()
        self._report(failed)

    def _report(self, failed: str | None) -> None:
        """A save that nobody waits for has failed."""
        if failed is None:
            return
        if self._options.on_failure == "stop":
            raise CheckpointError(failed)
        if self._job.topology.rank == 0:
            logger.error("%s", failed)

    def save(
        self,
        folder: str | None,
        tag: str | None,
        step: int,
        client_state: dict[str, Any],
        *,
        frozen: bool | None,
        wait: bool,
        automatic: bool = False,
    ) -> None:
        """Save now; see ``OdcEngine.save_checkpoint``. One that is ``automatic`` may be removed one day."""
        with self._phase(Phase.SAVING):
            self._job.control.barrier(Meeting.SAVE, step)
            failed = self.saver.begin(
                self._root(folder),
                tag,
                step,
                client_state,
                automatic=automatic,
                frozen=self._saves_frozen if frozen is None else frozen,
                stage=not wait,
            )
            if failed is None and wait:
                failed = self.saver.settle()
            if failed is not None:
                raise CheckpointError(failed)

    def save_last(self, step: int, client_state: dict[str, Any]) -> None:
        """Save now, unless the save that goes on, or has just ended, is of this step; then the job ends.

        Raises:
            CheckpointError: it failed.
        """
        with self._phase(Phase.SAVING):
            root = self._root(None)
            failed = self.saver.settle()
            if failed is not None and self._job.topology.rank == 0:
                logger.error("%s", failed)
            if failed is None and self.saver.last_path == root / directory.tag_of(step):
                return
        # Nobody asked for this one by name: a run of many allocations would fill the disk with them.
        self.save(None, None, step, client_state, frozen=None, wait=True, automatic=True)

    def wait(self, step: int) -> None:
        """Wait until the save that goes on, if any, is complete.

        Raises:
            CheckpointError: it failed.
        """
        with self._phase(Phase.SAVING):
            self._job.control.barrier(Meeting.SAVE, step)
            failed = self.saver.settle()
            if failed is not None:
                raise CheckpointError(failed)

    def _root(self, folder: str | None) -> Path:
        chosen = folder if folder is not None else self._options.dir
        if chosen is None:
            raise UsageError("checkpoints: give a directory, or set checkpoint.dir in the configuration")
        return Path(chosen).expanduser()

    # -- loading ---------------------------------------------------------------------------------------

    def load(self, folder: str | None, tag: str | None, parts: Parts, step: int) -> Loaded | None:
        """Load; see ``OdcEngine.load_checkpoint``. None where the directory has no checkpoint."""
        root = self._root(folder)
        with self._phase(Phase.LOADING):
            self._job.control.barrier(Meeting.LOAD, step)
            failed = self.saver.settle()
            if failed is not None and self._job.topology.rank == 0:
                logger.error("%s", failed)
            path = agree_on(self._job, lambda: choose(root, tag))
            return None if path is None else self._load(path, parts)

    def _load(self, path: Path, parts: Parts) -> Loaded:
        loaded = load(path, self._trained, self._job, parts)
        self.saver.last_path = None  # of a state that this run has no longer
        if self._job.topology.rank == 0:
            logger.info("checkpoint %s loaded: %d steps done", path, loaded.step)
        return loaded

    def resume(self) -> Loaded | None:
        """Begin as ``checkpoint.resume`` says, and be the one run that writes to ``checkpoint.dir``."""
        option = self._options
        if option.dir is None and option.resume in ("auto", "none"):
            return None
        try:
            with self._phase(Phase.LOADING):
                path = agree_on(self._job, self._first)
                return None if path is None else self._load(path, Parts())
        except BaseException:
            self.abandon()  # a notebook may try again, and then the directory must be free
            raise

    def _first(self) -> directory.Found:
        """On rank 0: the checkpoint to begin from."""
        option = self._options
        found = directory.Found()
        if option.dir is not None:
            root = Path(option.dir).expanduser()
            self.saver.claim(root)
            found = directory.find(root)
            if found.path is not None and option.resume == "none":
                raise CheckpointError(
                    f"checkpoint.resume is none, but {root} has checkpoints ({found.path.name}) that this "
                    "run would replace; choose another checkpoint.dir, or set resume to auto"
                )
        if option.resume in ("auto", "none"):
            return found
        if found.path is not None:
            found.notes.append(
                f"going on from {found.path}, not from {option.resume} (checkpoint.resume), where the run "
                "began"
            )
            return found
        first = choose(Path(option.resume).expanduser(), None)
        if first.path is None:
            raise CheckpointError(f"checkpoint.resume: {option.resume} is or has no complete checkpoint")
        return first

    # -- weights out -----------------------------------------------------------------------------------

    def save_pretrained(
        self, out: Path, *, dtype: str | None, max_bytes: int, tokenizer: Path | None, step: int
    ) -> None:
        """Write the weights as transformers or peft store them; see ``OdcEngine.save_pretrained``."""
        with self._phase(Phase.SAVING):
            self._job.control.barrier(Meeting.SAVE, step)
            if self.layout.convert:
                self._export_by_checkpoint(out, dtype, max_bytes, tokenizer, step)
            else:
                self._export_together(out, dtype, max_bytes, tokenizer)

    def _export_together(self, out: Path, dtype: str | None, max_bytes: int, tokenizer: Path | None) -> None:
        """Every rank writes its rows of every tensor into the same files."""
        rank, control = self._job.topology.rank, self._job.control
        tensors = model_tensors(self._trained.model)
        shapes = {name[len(MODEL) :]: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
        token = self._tell(secrets.token_hex(4) if rank == 0 else "")

        def begin(create: bool) -> Export:
            return begin_export(
                out,
                self.layout,
                shapes,
                dtype=dtype,
                max_bytes=max_bytes,
                tokenizer=tokenizer,
                token=token,
                create=create,
            )

        def pieces() -> Iterator[tuple[str, int, torch.Tensor]]:
            for chunk in chunks_of(tensors, rank):
                control.beat()
                yield chunk.name[len(MODEL) :], chunk.offsets[0] if chunk.offsets else 0, chunk.tensor

        export = begin(create=False)
        try:
            self._together(lambda: begin(create=True), only=0)
            self._together(lambda: export.write(pieces()))
            self._together(export.finish, only=0)
        except CheckpointError:
            if rank == 0:
                directory.remove(export.folder)
            raise

    def _export_by_checkpoint(
        self, out: Path, dtype: str | None, max_bytes: int, tokenizer: Path | None, step: int
    ) -> None:
        """Where whole tensors are needed to make the file's: rank 0 makes them, from a checkpoint's."""
        rank, root = self._job.topology.rank, out.with_name(f".{out.name}.weights")
        self._together(lambda: check_out(out), only=0)
        failed = self.saver.begin(
            root, None, step, {}, automatic=False, frozen=True, stage=False, optimizer=False
        )
        failed = self.saver.settle() if failed is None else failed
        if failed is not None:
            raise CheckpointError(failed)

        def export() -> None:
            task = Task(
                lambda _: export_checkpoint(
                    root / directory.tag_of(step), out, dtype=dtype, max_bytes=max_bytes, tokenizer=tokenizer
                ),
                "odc-export",
            )

            def ready() -> bool:
                self._job.control.beat()
                return task.done

            self._job.control.wait_until(ready, f"the export to {out}", lambda: ())
            if task.error is not None:
                raise CheckpointError(reason_of(task.error)) from task.error

        try:
            self._together(export, only=0)
        finally:
            self.saver.release(root)
            if rank == 0:
                directory.remove(root)

    def _tell(self, text: str) -> str:
        """What rank 0 says."""
        return self._gather(text)[0]

    def _together(self, action: Callable[[], object], *, only: int | None = None) -> None:
        """Do something on every rank, or on one; a failure on one is raised on all."""
        mine = ""
        try:
            if only in (None, self._job.topology.rank):
                action()
        except (CheckpointError, OSError) as error:
            mine = reason_of(error)
        told = [
            f"{self._job.topology.describe(rank)}: {error}"
            for rank, error in enumerate(json.loads(text) for text in self._gather(json.dumps(mine)))
            if error
        ]
        if told:
            raise CheckpointError("; ".join(told))

    def _gather(self, text: str) -> list[str]:
        return gather_texts(text, self._job.control, self._job.host_group, "the export of weights")

    # -- the end ---------------------------------------------------------------------------------------

    def close(self, meeting: Meeting) -> str | None:
        """Finish the save that goes on, let go of directories; returns why the save failed, if it did.

        Args:
            meeting: where ranks close; who is elsewhere is named before anything is waited for.
        """
        with self._job.control.phase(Phase.SAVING):
            if self.saver.busy:
                self._job.control.barrier(meeting)
            return self.saver.close()

    def abandon(self) -> None:
        """Let go without meeting the other ranks."""
        self.saver.abandon()
