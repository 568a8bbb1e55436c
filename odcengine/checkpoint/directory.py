"""The rules of a directory of checkpoints: names, the completion mark, ``latest``, and what is removed.

::

    DIR/
      latest                     the name of a complete checkpoint, one line
      step_200/                  a checkpoint; its name is its tag
        complete.json            the completion mark: what belongs to it, with sizes and checksums
        .metadata, __R_0.distcp  torch.distributed.checkpoint: which tensor lies where; tensors of rank R
        rank_R.json              checksums of what rank R wrote, and its random state
        state.json               everything that is no tensor
      .step_300.1f0c9a2b.new     being written, or left by a run that was killed
      .writer                    who writes here (writer.py)

A checkpoint is written under its temporary name, gets its mark last, and is renamed once. So a directory
without a valid mark is no checkpoint, whatever its name. Only rank 0 renames, marks and removes. Nothing here
needs torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from odcengine._version import __version__
from odcengine.errors import CheckpointError

LATEST = "latest"
MARK = "complete.json"
STATE = "state.json"
METADATA = ".metadata"
FORMAT = 1
"""Version of the layout; readers refuse newer ones."""

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,127}")
_STEP = re.compile(r"step_(\d{1,12})")
_HIDDEN = re.compile(r"\.(?P<tag>.+)\.[0-9a-f]{8}\.(?P<kind>new|old|gone)")


@dataclass(frozen=True)
class Mark:
    """What the completion mark says.

    Attributes:
        tag: the checkpoint's name when it was written.
        step: optimizer steps done.
        world_size: ranks that wrote it.
        serial: one more than that of any checkpoint that was in the directory.
        automatic: saved by the configuration's interval; only such ones are ever removed.
        files: for each file its size in bytes, and SHA-256 or "" (tensors have checksums of their own).
    """

    tag: str
    step: int
    world_size: int
    serial: int
    automatic: bool
    files: dict[str, tuple[int, str]]


@dataclass
class Found:
    """A search's result.

    Attributes:
        path: the checkpoint to load, or None.
        notes: why others were not taken, a line each.
    """

    path: Path | None = None
    notes: list[str] = field(default_factory=list)


def tag_of(step: int) -> str:
    """The name of a checkpoint that was given none."""
    return f"step_{step}"


def check_tag(tag: str) -> None:
    """Raise CheckpointError unless ``tag`` can name a checkpoint."""
    if not _TAG.fullmatch(tag) or tag == LATEST:
        raise CheckpointError(
            f"checkpoint tag {tag!r}: expected letters, digits and any of . _ + = - (not {LATEST!r}, no "
            "folders)"
        )


def temporary(root: Path, tag: str, token: str, kind: str = "new") -> Path:
    """The name under which a checkpoint is written, moved aside (``old``) or removed (``gone``)."""
    return root / f".{tag}.{token}.{kind}"


def make_root(root: Path) -> None:
    """Make the directory if it is missing, and try to write into it.

    Raises:
        CheckpointError: it cannot be made or written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe.{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(f"checkpoints cannot be written to {root}: {explain(error)}") from error


def explain(error: OSError) -> str:
    """An operating system's error in its own words, without the errno."""
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}"


# ---- writing -------------------------------------------------------------------------------------------


def write_file(path: Path, data: bytes) -> None:
    """Write a small file so that it is there in full or not at all, also after a power cut."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def sync_folder(folder: Path) -> None:
    """Make names in a folder outlive a power cut, where its file system can."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def sha256(data: bytes) -> str:
    """Checksum of a small file."""
    return hashlib.sha256(data).hexdigest()


def complete(folder: Path, root: Path, mark: Mark, token: str) -> Path:
    """Mark what has been written as complete and give it its name; ``latest`` names it then.

    Args:
        folder: the temporary folder, with all of ``mark.files`` in it.
        root: the directory of checkpoints.
        mark: what the mark says.
        token: of this save; for the name of a checkpoint of the same tag while it is replaced.

    Returns:
        The checkpoint's path.
    """
    write_file(folder / MARK, dump_mark(mark))
    sync_folder(folder)
    final = root / mark.tag
    replaced = temporary(root, mark.tag, token, "old")
    if final.exists():
        os.rename(final, replaced)  # clean() undoes this where the next line is never reached
    os.rename(folder, final)
    sync_folder(root)
    write_file(root / LATEST, f"{mark.tag}\n".encode())
    sync_folder(root)
    remove(replaced)
    return final


def dump_mark(mark: Mark) -> bytes:
    """The contents of a completion mark."""
    record = {"format": FORMAT, "odcengine": __version__, "written": time.time(), **asdict(mark)}
    return json.dumps({**record, "sha256": _checksum(record)}, indent=1).encode()


def _checksum(record: dict[str, Any]) -> str:
    return sha256(json.dumps(record, sort_keys=True).encode())


def remove(path: Path) -> None:
    """Delete a folder of any state, as far as possible."""
    shutil.rmtree(path, ignore_errors=True)


def clean(root: Path) -> list[str]:
    """Remove what killed runs have left. Only for the one who writes here (``writer.py``).

    Returns:
        What was found, a line each.
    """
    notes = []
    for path in sorted(root.iterdir()):
        found = _HIDDEN.fullmatch(path.name)
        if found is None:
            continue
        original = root / found["tag"]
        if found["kind"] == "old" and not original.exists():
            os.rename(path, original)  # its successor never got the name
            notes.append(f"{original.name} was about to be replaced when its run ended; it is back")
        else:
            remove(path)
            if found["kind"] == "new":
                notes.append(f"{original.name} was never finished; what was written of it is removed")
    return notes


def thin_out(root: Path, keep_last: int | None, keep_every: int | None, token: str) -> list[str]:
    """Remove automatic checkpoints that need not be kept.

    Args:
        root: the directory of checkpoints.
        keep_last: how many of the newest automatic ones stay; None: all.
        keep_every: those whose step is a multiple of it stay for ever; None: none.
        token: any 8 hex digits, for the names of what is being removed.

    Returns:
        The removed ones' names.
    """
    if keep_last is None:
        return []
    latest = read_latest(root)
    marks = [(path, mark) for path, mark in _complete_ones(root) if mark.automatic]
    marks.sort(key=lambda item: item[1].serial, reverse=True)
    removed = []
    for path, mark in marks[keep_last:]:
        if path.name == latest or (keep_every and mark.step % keep_every == 0):
            continue
        gone = temporary(root, path.name, token, "gone")
        os.rename(path, gone)  # at once: half a checkpoint never bears its name
        remove(gone)
        removed.append(path.name)
    return removed


def next_serial(root: Path) -> int:
    """One more than the largest serial number of the directory's checkpoints."""
    return max((mark.serial for _, mark in _complete_ones(root)), default=0) + 1


# ---- reading -------------------------------------------------------------------------------------------


def read_latest(root: Path) -> str | None:
    """What ``latest`` says, or None where there is no such file."""
    try:
        text = (root / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{root / LATEST} cannot be read: {explain(error)}") from error
    return text


def read_mark(folder: Path) -> Mark:
    """The completion mark of a checkpoint, with all that it lists in place.

    Raises:
        CheckpointError: says what is missing or wrong.
    """
    try:
        record = json.loads((folder / MARK).read_bytes())
    except FileNotFoundError:
        if not folder.is_dir():
            raise CheckpointError(f"{folder} does not exist") from None
        raise CheckpointError(f"{folder} has no completion mark ({MARK}): it was never finished") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / MARK} is damaged: {error}") from error
    mark = _mark_of(record, folder)
    for name, (size, _) in mark.files.items():
        try:
            found = os.stat(folder / name).st_size
        except OSError as error:
            raise CheckpointError(f"{folder} is not complete: {name}: {error.strerror}") from error
        if found != size:
            raise CheckpointError(f"{folder} is damaged: {name} has {found} bytes instead of {size}")
    return mark


def _mark_of(record: Any, folder: Path) -> Mark:
    where = folder / MARK
    if isinstance(record, dict) and isinstance(record.get("format"), int) and record["format"] > FORMAT:
        raise CheckpointError(
            f"{where}: format {record['format']} is newer than this odcengine {__version__} reads ({FORMAT})"
        )
    checksum = record.pop("sha256", None) if isinstance(record, dict) else None
    if checksum is None or checksum != _checksum(record):
        raise CheckpointError(f"{where} is damaged: its checksum is wrong")
    try:
        files = {str(name): (int(size), str(sum_)) for name, (size, sum_) in record["files"].items()}
        numbers = {name: int(record[name]) for name in ("step", "world_size", "serial")}
        mark = Mark(str(record["tag"]), files=files, automatic=record["automatic"] is True, **numbers)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where} is damaged: {type(error).__name__}: {error}") from error
    odd = [name for name in files if Path(name).name != name or name in ("", ".", "..")]
    if odd or not {STATE, METADATA} <= files.keys() or mark.world_size < 1:
        raise CheckpointError(f"{where} is damaged: its list of files is not one of a checkpoint")
    return mark


def read_listed(folder: Path, mark: Mark, name: str) -> bytes:
    """The contents of a small file, compared with the mark.

    Raises:
        CheckpointError: it cannot be read, or is another one than was written.
    """
    path = folder / name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if name not in mark.files or sha256(data) != mark.files[name][1]:
        raise CheckpointError(f"{path} is damaged: its checksum is not the one in {MARK}")
    return data


def find(root: Path) -> Found:
    """The checkpoint to go on from: what ``latest`` names, if it is complete, else the newest that is.

    Raises:
        CheckpointError: ``latest`` names one, but none is complete.
    """
    found = Found()
    if not root.is_dir():
        return found
    named = read_latest(root)
    candidates = _by_age(root)
    if named is not None and _TAG.fullmatch(named):
        candidates.sort(key=lambda path: path.name != named)  # it comes first, the order of others stays
        if not (root / named).is_dir():
            candidates.insert(0, root / named)
    elif named is not None:
        found.notes.append(f"{root / LATEST} does not name a checkpoint")
    for path in candidates:
        try:
            read_mark(path)
        except CheckpointError as error:
            suffix = f" (although {LATEST} names it)" if path.name == named else ""
            found.notes.append(f"skipped: {error}{suffix}")
            continue
        found.path = path
        break
    if found.path is None:
        if named is not None:
            raise CheckpointError(
                f"{root} has no complete checkpoint, although {LATEST} names {named!r}: "
                f"{'; '.join(found.notes)}. To begin anew, choose another directory or remove it"
            )
        return found
    if found.path.name == named:
        found.notes += _newer_notes(root, found.path)
    return found


def _newer_notes(root: Path, taken: Path) -> list[str]:
    """Why not one of a later step than the one that ``latest`` names?"""
    notes, step = [], _step(taken)
    for path in _by_age(root):
        if step is None or (_step(path) or 0) <= step:
            continue
        try:
            read_mark(path)
            notes.append(
                f"{path.name} is complete, too, but {LATEST} names {taken.name} (write {path.name} into it "
                "to go on from there)"
            )
        except CheckpointError as error:
            notes.append(f"skipped: {error}")
    return notes


def _step(path: Path) -> int | None:
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def _folders(root: Path) -> Iterable[Path]:
    return [path for path in root.iterdir() if _TAG.fullmatch(path.name) and path.is_dir()]


def _by_age(root: Path) -> list[Path]:
    """Folders that may be checkpoints, those of the latest step first, those with other names last."""
    likely = [path for path in _folders(root) if _step(path) is not None or (path / MARK).exists()]
    return sorted(
        likely, key=lambda path: (-1 if _step(path) is None else _step(path), path.name), reverse=True
    )


def _complete_ones(root: Path) -> list[tuple[Path, Mark]]:
    found = []
    for path in _folders(root):
        with contextlib.suppress(CheckpointError):
            found.append((path, read_mark(path)))
    return found
