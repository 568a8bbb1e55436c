"""Damaged and hostile checkpoints: the error names what is wrong, nothing runs or is overwritten."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import pickle
import random
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, values

from checkpoint.toy import config_for, start, train
from odcengine.checkpoint import directory
from odcengine.checkpoint.directory import MARK, METADATA, STATE
from odcengine.checkpoint.metadata import StorageInfo, read_metadata
from odcengine.checkpoint.plain import decode, encode
from odcengine.errors import CheckpointError

WITNESS = "hostile-code-ran"


class Hostile:
    """A pickle of it runs a command when it is read."""

    def __init__(self, folder: Path) -> None:
        self.command = f"touch {folder / WITNESS}"

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


# ---- kinds of damage: each changes the checkpoint in `folder` and returns what the error should name ---

Damage = Callable[[Path, Path, random.Random], str]


def _file(folder: Path, chance: random.Random, *, big: bool = False) -> Path:
    names = sorted(path.name for path in folder.iterdir())
    if big:
        names = [name for name in names if name.endswith(".distcp")]
    return folder / chance.choice(names)


def truncated(folder: Path, other: Path, chance: random.Random) -> str:
    path = _file(folder, chance)
    with open(path, "r+b") as file:
        file.truncate(chance.randrange(path.stat().st_size))
    return path.name


def missing(folder: Path, other: Path, chance: random.Random) -> str:
    path = _file(folder, chance)
    path.unlink()
    return path.name


def emptied(folder: Path, other: Path, chance: random.Random) -> str:
    path = _file(folder, chance)
    path.write_bytes(b"")
    return path.name


def flipped(folder: Path, other: Path, chance: random.Random) -> str:
    path = _file(folder, chance)
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return path.name


def zeroed(folder: Path, other: Path, chance: random.Random) -> str:
    path = _file(folder, chance)
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data) // 2)
    data[start : start + len(data) // 3] = bytes(len(data) // 3)
    path.write_bytes(data)
    return path.name


def swapped(folder: Path, other: Path, chance: random.Random) -> str:
    a, b = chance.sample(sorted(folder.glob("*.distcp")), 2)
    kept = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(kept)
    return "distcp"


def of_another_step(folder: Path, other: Path, chance: random.Random) -> str:
    path = _file(folder, chance, big=True)
    shutil.copyfile(other / path.name, path)
    return path.name


def duplicated(folder: Path, other: Path, chance: random.Random) -> str:
    path = _file(folder, chance)
    path.write_bytes(path.read_bytes() * 2)
    return path.name


# Those that follow have their checksums made right: only what they say is wrong.


def _sign(folder: Path, *names: str) -> None:
    record = json.loads((folder / MARK).read_bytes())
    for name in names:
        data = (folder / name).read_bytes()
        record["files"][name] = [len(data), record["files"][name][1] and directory.sha256(data)]
    record.pop("sha256")
    (folder / MARK).write_text(json.dumps({**record, "sha256": directory._checksum(record)}))


def hostile_metadata(folder: Path, other: Path, chance: random.Random) -> str:
    kinds: list[bytes] = [
        pickle.dumps(Hostile(folder.parent), protocol=chance.randrange(5)),
        pickle.dumps({"state_dict_metadata": Hostile(folder.parent)}),
        b"cos\nsystem\n(S'touch " + str(folder.parent / WITNESS).encode() + b"'\ntR.",
        b"cbuiltins\neval\n(S'__import__(\"os\").abort()'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"ctorch.distributed.checkpoint.metadata\nos\n.",
        pickle.dumps([1, 2, 3]),
        b"",
        bytes(chance.randrange(256) for _ in range(200)),
    ]
    (folder / METADATA).write_bytes(chance.choice(kinds))
    _sign(folder, METADATA)
    return METADATA


def _change_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = read_metadata((folder / METADATA).read_bytes(), METADATA)
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    _sign(folder, METADATA)


def wrong_dtype(folder: Path, other: Path, chance: random.Random) -> str:
    name = ""

    def change(metadata: Any) -> None:
        nonlocal name
        name = chance.choice(sorted(metadata.state_dict_metadata))
        entry = metadata.state_dict_metadata[name]
        entry.properties.dtype = chance.choice([torch.bfloat16, torch.int64, torch.float16])

    _change_metadata(folder, change)
    return name


def wrong_shape(folder: Path, other: Path, chance: random.Random) -> str:
    name = ""

    def change(metadata: Any) -> None:
        nonlocal name
        name = chance.choice([n for n, e in sorted(metadata.state_dict_metadata.items()) if len(e.size)])
        entry = metadata.state_dict_metadata[name]
        entry.size = torch.Size([entry.size[0] + 1, *entry.size[1:]])

    _change_metadata(folder, change)
    return name


def lost_chunk(folder: Path, other: Path, chance: random.Random) -> str:
    name = ""

    def change(metadata: Any) -> None:
        nonlocal name
        several = [n for n, e in sorted(metadata.state_dict_metadata.items()) if len(e.chunks) > 1]
        name = chance.choice(several)
        metadata.state_dict_metadata[name].chunks.pop(chance.randrange(2))

    _change_metadata(folder, change)
    return name


def lost_tensor(folder: Path, other: Path, chance: random.Random) -> str:
    name = ""

    def change(metadata: Any) -> None:
        nonlocal name
        name = chance.choice(sorted(metadata.state_dict_metadata))
        del metadata.state_dict_metadata[name]

    _change_metadata(folder, change)
    return name


def exchanged_places(folder: Path, other: Path, chance: random.Random) -> str:
    """Two tensors' places, of different sizes."""

    def change(metadata: Any) -> None:
        indices = list(metadata.storage_data)
        a = chance.choice(indices)
        lengths = {index: metadata.storage_data[index].length for index in indices}
        b = chance.choice([index for index in indices if lengths[index] != lengths[a]])
        table = metadata.storage_data
        table[a], table[b] = table[b], table[a]

    _change_metadata(folder, change)
    return "distcp"


def outside(folder: Path, other: Path, chance: random.Random) -> str:
    (folder.parent / "secret").write_bytes(bytes(4096))
    path = chance.choice(["../secret", "/etc/passwd", "..", "a/../../secret", STATE])

    def change(metadata: Any) -> None:
        index = chance.choice(list(metadata.storage_data))
        metadata.storage_data[index] = StorageInfo(path, 0, 64)

    _change_metadata(folder, change)
    return "none of this checkpoint's" if path == STATE else "outside"


def hostile_tensor(folder: Path, other: Path, chance: random.Random) -> str:
    """A chunk whose archive is another one, with a pickle that would run a command."""
    path = _file(folder, chance, big=True)
    record_path = folder / f"rank_{path.name.split('_')[2]}.json"
    record = json.loads(record_path.read_bytes())
    entry = chance.choice(record["tensors"])
    data = bytearray(path.read_bytes())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Hostile(folder.parent)))
        archive.writestr("archive/data/0", b"abc")
    forged = buffer.getvalue()[: entry["length"]].ljust(entry["length"], b"\0")
    data[entry["at"] : entry["at"] + entry["length"]] = forged
    path.write_bytes(data)
    entry["crc32"] = zlib.crc32(forged)
    record_path.write_text(json.dumps(record))
    _sign(folder, record_path.name)
    return str(entry["name"])


def wrong_state(folder: Path, other: Path, chance: random.Random) -> str:
    state = decode(json.loads((folder / STATE).read_bytes()))
    changes: list[Callable[[], None]] = [
        lambda: state.pop("step"),
        lambda: state.pop("optimizer"),
        lambda: state["optimizer"].update(type="SGD"),
        lambda: state["optimizer"]["groups"][0]["params"].append("model.more"),
        lambda: state["optimizer"].update(groups=[]),
        lambda: state["optimizer"].update(layout={"nothing.of.it": {"step": "equal"}}),
        lambda: state["optimizer"].update(layout=7),
        lambda: state.update(scheduler={"type": "StepLR", "values": {}}),
        lambda: state.update(scheduler=None),
        lambda: state["scheduler"].update(values=3),
        lambda: state["optimizer"]["groups"][0].pop("values"),
        lambda: state["data"].update(num_samples=3),
        lambda: state["data"].update(index=10**6),
        lambda: state.update(client_state=[1]),
    ]
    chance.choice(changes)()
    (folder / STATE).write_text(json.dumps(encode(state, "state")))
    _sign(folder, STATE)
    return "step_2"


def no_json(folder: Path, other: Path, chance: random.Random) -> str:
    texts = [
        b"[" * 5000,
        b"{",
        b"null",
        b"[1]",
        b'{"$tensor": {}}',
        b'{"$dict": 3}',
        b"\xff\xfe",
        b'{"a": NaN}',
    ]
    path = folder / chance.choice([STATE, "rank_0.json"])
    path.write_bytes(chance.choice(texts))
    _sign(folder, path.name)
    return path.name


KINDS: tuple[Damage, ...] = (
    *(truncated, missing, emptied, flipped, zeroed, swapped, of_another_step, duplicated),
    *(hostile_metadata, wrong_dtype, wrong_shape, lost_chunk, lost_tensor, exchanged_places, outside),
    *(hostile_tensor, wrong_state, no_json),
)


def _digest(folder: Path) -> str:
    state = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        state.update(f"{path.relative_to(folder)}".encode())
        if path.is_file():
            state.update(path.read_bytes())
    return state.hexdigest()


def _everything(engine: Any, loader: Any) -> str:
    state = hashlib.sha256()
    for _, tensor in sorted([*engine.module.named_parameters(), *engine.module.named_buffers()]):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        state.update(local.detach().contiguous().numpy().tobytes())
    for values_ in engine.optimizer.state.values():
        for tensor in values_.values():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            state.update(local.contiguous().numpy().tobytes())
    state.update(repr((engine.global_steps, loader.epoch, loader.index)).encode())
    state.update(repr(engine.scheduler.state_dict()).encode())
    state.update(torch.get_rng_state().numpy().tobytes())
    return state.hexdigest()


def _try_all(rank: int, world_size: int, pristine: str, scratch: str, count: int, seed: int) -> list[str]:
    """Load ``count`` damaged copies; returns what went otherwise than it should."""
    engine, loader = start(config_for(None))
    chance, wrong = random.Random(seed), []
    before = _everything(engine, loader)
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        folder = Path(scratch) / "step_2"
        shutil.copytree(Path(pristine) / "step_2", folder)
        expected = kind(folder, Path(pristine) / "step_1", chance)
        on_disk = _digest(Path(scratch))
        try:
            engine.load_checkpoint(folder if number % 2 else scratch, tag=None if number % 2 else "step_2")
            wrong.append(f"{number}: {kind.__name__} ({expected}) was loaded")
        except CheckpointError as error:
            if not re.search(re.escape(expected), str(error)):
                wrong.append(f"{number}: {kind.__name__}: {expected!r} is not in: {error}")
        except Exception as error:
            wrong.append(f"{number}: {kind.__name__}: {type(error).__name__}: {error}")
        if _digest(Path(scratch)) != on_disk:
            wrong.append(f"{number}: {kind.__name__}: the directory changed")
        if _everything(engine, loader) != before:
            wrong.append(f"{number}: {kind.__name__}: the run changed")
            before = _everything(engine, loader)
        if (Path(scratch) / WITNESS).exists():
            wrong.append(f"{number}: {kind.__name__}: hostile code ran")
        shutil.rmtree(scratch)
        Path(scratch).mkdir()
    engine.load_checkpoint(pristine)  # and an undamaged one is loaded
    if engine.global_steps != 2:
        wrong.append("the undamaged one")
    engine.close()
    return wrong


@functools.cache
def _pristine(folder: str) -> str:
    values(run_ranks(functools.partial(train, before=1, save=True), 2, folder))
    values(run_ranks(functools.partial(train, before=1, save=True), 2, folder))
    assert {"step_1", "step_2"} <= set(os.listdir(folder))
    return folder


@pytest.mark.parametrize(
    "count", [2 * len(KINDS), pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
def test_damaged(count: int, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    pristine = _pristine(str(tmp_path / "pristine"))
    (wrong,) = values(
        run_ranks(_try_all, 1, pristine, str(scratch), count, 7, timeout_s=250 if count < 100 else 800)
    )
    assert not wrong, "\n".join(wrong)


def _on_two(rank: int, world_size: int, folder: str) -> str:
    engine, _ = start(config_for(None))
    if rank == 1:  # only it reads this part
        path = Path(folder) / "__1_0.distcp"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    torch.distributed.barrier()  # no rank looks at the folder while the file is written
    try:
        engine.load_checkpoint(folder)
        return "loaded"
    except CheckpointError as error:
        engine.close()
        return str(error)


def test_damage_that_one_rank_sees_is_told_on_all(tmp_path: Path) -> None:
    pristine = _pristine(str(tmp_path / "pristine"))
    told = values(run_ranks(_on_two, 2, str(Path(pristine) / "step_2")))
    assert told[0] == told[1]
    assert re.search(r"__1_0.distcp: \S+ \(bytes .* is damaged: its checksum", told[0])


def test_what_json_cannot_hold_is_refused_when_it_is_saved() -> None:
    with pytest.raises(CheckpointError, match=r"client_state.a\[1\] is a \S+Hostile"):
        encode({"a": [1, Hostile(Path("x"))]}, "client_state")
