"""Whether the files that a configuration names are there, and the folders it writes to can be written."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from odcengine._config_source import Problem
from odcengine.config import Config

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def path_problems(config: Config) -> list[Problem]:
    """What of the paths in a configuration is not as the ranks will need it, seen from this machine.

    Args:
        config: the configuration; its relative paths count from the working directory.
    """
    return list(_problems(config))


def _problems(config: Config) -> Iterator[Problem]:
    model, monitor, launch, checkpoint = config.model, config.monitor, config.launch, config.checkpoint
    for key, name in (("path", model.path), ("reference", model.reference)):
        if name is not None and (message := _model(name)):
            yield Problem(("model", key), message)
    if model.lora is not None and model.lora.path is not None:
        message = _folder_with(model.lora.path, "adapter_config.json", "an adapter as peft saves it")
        yield from _told(("model", "lora", "path"), message)
    for key, name in (("path", config.data.path), ("eval_path", config.data.eval_path)):
        if name is not None:
            message = _folder_with(name, "meta.json", "a directory that odc prepare made")
            yield from _told(("data", key), message)
    if checkpoint.resume not in ("auto", "none") and not _expand(checkpoint.resume).is_dir():
        yield Problem(("checkpoint", "resume"), _missing(checkpoint.resume))
    folders = {
        ("checkpoint", "dir"): checkpoint.dir,
        ("monitor", "tensorboard"): monitor.tensorboard,
        ("monitor", "timeline_dir"): monitor.timeline_dir,
        ("launch", "log_dir"): launch.log_dir,
    }
    for where, name in folders.items():
        yield from _told(where, None if name is None else _writable(_expand(name)))
    if monitor.jsonl is not None:
        yield from _told(("monitor", "jsonl"), _appendable(_expand(monitor.jsonl)))
    if launch.hostfile is not None and not os.access(launch.hostfile, os.R_OK):
        yield Problem(("launch", "hostfile"), _missing(launch.hostfile))
    image = launch.container_image
    if image is not None and (image[0] in "/." or image.endswith(".sqsh")) and not os.path.exists(image):
        yield Problem(("launch", "container_image"), _missing(image))


def _told(where: tuple[str, ...], message: str | None) -> Iterator[Problem]:
    if message is not None:
        yield Problem(where, message)


def _expand(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~somebody
        return Path(name)


def _missing(name: str) -> str:
    return f"{name} does not exist (looked for {_expand(name).absolute()} on {socket.gethostname()})"


def _model(name: str) -> str | None:
    path = _expand(name)
    if path.is_file() or (path / "config.json").is_file():
        return None
    if path.is_dir():
        return f"{name} has no config.json; expected a directory made by save_pretrained() of transformers"
    if not _HUB_NAME.fullmatch(name) or name.startswith("."):
        return _missing(name)
    if (_hub_cache() / f"models--{name.replace('/', '--')}").is_dir():
        return None
    return (
        f"{_missing(name)}; as a name on the Hugging Face Hub it is not downloaded yet ({_hub_cache()}), "
        "which the ranks would have to do"
    )


def _hub_cache() -> Path:
    """Where huggingface_hub keeps what it has downloaded."""
    environ = os.environ
    if given := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return _expand(given)
    if home := environ.get("HF_HOME"):
        return _expand(home) / "hub"
    return _expand(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def _folder_with(name: str, file: str, expected: str) -> str | None:
    path = _expand(name)
    if not path.exists():
        return _missing(name)
    return None if (path / file).is_file() else f"{name} has no {file}; expected {expected}"


def _writable(folder: Path) -> str | None:
    """Why a folder cannot be written, or made where it is not there yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return f"{folder} cannot be a folder: {there} is a file"
    if not os.access(there, os.W_OK | os.X_OK):
        what = "" if there == folder.absolute() else f"cannot be made: {there} "
        return f"{folder} {what}is not writable for this user on {socket.gethostname()}"
    return None


def _appendable(file: Path) -> str | None:
    if file.is_dir():
        return f"{file} is a folder; expected a file"
    if file.exists():
        return None if os.access(file, os.W_OK) else f"{file} is not writable for this user"
    return _writable(file.parent)
