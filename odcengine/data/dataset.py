"""Tokenised samples, in memory or memory-mapped from disk.

On disk a data set is a directory:

``meta.json``        format, version, number of samples and tokens, type of the tokens, largest token id
``tokens.bin``       the tokens of all samples one after the other, little endian
``loss_mask.bin``    one byte a token: 1 where the token is to be learned
``offsets.npy``      int64 ``[num_samples + 1]``: where each sample starts in the two files
``num_targets.npy``  int64 ``[num_samples]``: how many positions of each sample have a target

It is written under a temporary name and renamed at the end, so an interrupted write leaves no half data set.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odcengine.errors import ConfigError, UsageError

_FORMAT = "odcengine-tokens"
_VERSION = 1
_DTYPE = np.dtype("<u4")


class TokenDataset:
    """A map-style data set of token sequences with loss masks.

    ``dataset[i]`` is ``{"input_ids": uint32 [l], "loss_mask": bool [l]}``, read-only views. A target is a
    token that is to be learned and that another token of the same sample precedes.

    Args:
        tokens: the tokens of all samples one after the other, 1-D integers.
        loss_mask: same length, true where the token is to be learned.
        offsets: int64 ``[num_samples + 1]``, where each sample starts.
        num_targets: int64 ``[num_samples]``, as counted; counted here if None.
    """

    def __init__(
        self,
        tokens: npt.NDArray[Any],
        loss_mask: npt.NDArray[Any],
        offsets: npt.NDArray[np.int64],
        num_targets: npt.NDArray[np.int64] | None = None,
    ) -> None:
        if len(offsets) < 1 or offsets[0] != 0 or not len(tokens) == len(loss_mask) == offsets[-1]:
            raise UsageError(
                f"TokenDataset: {len(tokens)} tokens, {len(loss_mask)} mask entries and offsets "
                f"{offsets[:1]}...{offsets[-1:]} do not fit together; offsets run "
                "from 0 to the number of tokens"
            )
        self._tokens = tokens
        self._loss_mask = loss_mask
        self._offsets = offsets
        self.lengths: npt.NDArray[np.int64] = np.diff(offsets)
        """Tokens of each sample, int64 ``[num_samples]``."""
        if len(self.lengths) and self.lengths.min() < 1:
            raise UsageError(f"TokenDataset: sample {int(np.argmin(self.lengths))} has no tokens")
        self.num_targets: npt.NDArray[np.int64] = (
            _count_targets(loss_mask, offsets) if num_targets is None else num_targets
        )
        """Positions with a target of each sample, int64 ``[num_samples]``."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[Any]]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
        index %= len(self)
        piece = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        return {"input_ids": self._tokens[piece], "loss_mask": self._loss_mask[piece].astype(bool)}

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self._offsets[-1])

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that a model with so many token embeddings can read every sample.

        Args:
            vocab_size: rows of the model's embedding.

        Raises:
            ConfigError: a token id is outside the vocabulary; names the sample and both numbers.
        """
        if not len(self._tokens):
            return
        position = int(np.argmax(self._tokens))
        if int(self._tokens[position]) >= vocab_size:
            sample = int(np.searchsorted(self._offsets, position, side="right")) - 1
            raise ConfigError(
                f"data: sample {sample} has the token id {int(self._tokens[position])}, but the model's "
                f"vocabulary ends at {vocab_size - 1}; tokenise with the model's own tokenizer"
            )

    @classmethod
    def from_samples(cls, samples: Iterable[Mapping[str, Any]]) -> TokenDataset:
        """A data set in memory.

        Args:
            samples: as :meth:`write` takes them.
        """
        tokens: list[npt.NDArray[Any]] = []
        masks: list[npt.NDArray[np.uint8]] = []
        for sample_tokens, sample_mask in _checked(samples):
            tokens.append(sample_tokens)
            masks.append(sample_mask)
        return cls(
            np.concatenate([np.zeros(0, _DTYPE), *tokens]),
            np.concatenate([np.zeros(0, np.uint8), *masks]),
            np.cumsum([0, *map(len, tokens)], dtype=np.int64),
        )

    @classmethod
    def write(cls, path: str | os.PathLike[str], samples: Iterable[Mapping[str, Any]]) -> TokenDataset:
        """Write samples to a directory, one at a time, and open it.

        An existing data set of that name is replaced; anything else is not touched.

        Args:
            path: the directory to make.
            samples: mappings with ``input_ids`` (1-D integers >= 0, at least one) and optionally
                ``loss_mask`` (same length) or ``labels`` (same length, equal to ``input_ids`` or -100).
                Without either, every token is to be learned.

        Returns:
            The data set as :meth:`open` gives it.

        Raises:
            UsageError: a sample that does not fit the above (named by its index), or a ``path`` that exists
                and is no data set.
        """
        path = Path(path)
        if path.exists() and not (path / "meta.json").is_file():
            raise UsageError(f"{path} exists and is no data set of odcengine; choose another name")
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.mkdir(parents=True)
        try:
            lengths: list[int] = []
            num_targets: list[int] = []
            max_token_id = -1
            with (
                open(temporary / "tokens.bin", "wb") as tokens_file,
                open(temporary / "loss_mask.bin", "wb") as mask_file,
            ):
                for tokens, mask in _checked(samples):
                    tokens_file.write(tokens.tobytes())
                    mask_file.write(mask.tobytes())
                    lengths.append(len(tokens))
                    num_targets.append(int(mask[1:].sum()))
                    max_token_id = max(max_token_id, int(tokens.max()))
            np.save(temporary / "offsets.npy", np.cumsum([0, *lengths], dtype=np.int64))
            np.save(temporary / "num_targets.npy", np.asarray(num_targets, dtype=np.int64))
            meta = {
                "format": _FORMAT,
                "version": _VERSION,
                "num_samples": len(lengths),
                "num_tokens": sum(lengths),
                "max_token_id": max_token_id,
                "token_dtype": _DTYPE.str,
            }
            (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
            if path.exists():
                shutil.rmtree(path)
            temporary.rename(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return cls.open(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TokenDataset:
        """Open a directory that :meth:`write` made; tokens stay on disk and are mapped into memory.

        Raises:
            ConfigError: no such directory, another format or version, or files of the wrong size.
        """
        path = Path(path)
        try:
            meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: not a data set of odcengine ({error})") from error
        if not isinstance(meta, dict) or (meta.get("format"), meta.get("version")) != (_FORMAT, _VERSION):
            raise ConfigError(f"{path}: meta.json is not of format {_FORMAT}, version {_VERSION}")
        try:
            offsets = np.load(path / "offsets.npy")
            num_targets = np.load(path / "num_targets.npy")
            tokens = _map(path / "tokens.bin", np.dtype(meta["token_dtype"]), meta["num_tokens"])
            loss_mask = _map(path / "loss_mask.bin", np.dtype(np.uint8), meta["num_tokens"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: damaged data set ({error}); prepare it again") from error
        if len(offsets) != meta["num_samples"] + 1 or len(num_targets) != meta["num_samples"]:
            raise ConfigError(f"{path}: damaged data set (offsets do not fit meta.json); prepare it again")
        return cls(tokens, loss_mask, offsets, num_targets)


def _map(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    if path.stat().st_size != count * dtype.itemsize:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes instead of {count * dtype.itemsize}")
    # A mapping of an empty file is an error of the operating system.
    return np.memmap(path, dtype=dtype, mode="r") if count else np.zeros(0, dtype)


def _count_targets(loss_mask: npt.NDArray[Any], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Tokens to be learned of each sample, without the sample's first token."""
    if len(offsets) == 1:
        return np.zeros(0, dtype=np.int64)
    learned = (np.asarray(loss_mask) != 0).astype(np.int64)
    counts: npt.NDArray[np.int64] = np.add.reduceat(learned, offsets[:-1]) - learned[offsets[:-1]]
    return counts


def _checked(
    samples: Iterable[Mapping[str, Any]],
) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]]:
    """Tokens and loss mask of each sample, checked."""
    for index, sample in enumerate(samples):
        tokens = np.asarray(sample["input_ids"])
        if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
            raise UsageError(
                f"sample {index}: input_ids has shape {list(tokens.shape)} and type {tokens.dtype}, "
                "but must be 1-D integers, at least one"
            )
        if tokens.min() < 0 or tokens.max() > np.iinfo(_DTYPE).max:
            raise UsageError(
                f"sample {index}: token ids run from {tokens.min()} to {tokens.max()}; not storable"
            )
        if sample.get("labels") is not None:
            labels = np.asarray(sample["labels"])
            mask = labels != -100
            if labels.shape != tokens.shape or (labels[mask] != tokens[mask]).any():
                raise UsageError(
                    f"sample {index}: labels must have the shape of input_ids and hold the same token or -100"
                )
        elif sample.get("loss_mask") is not None:
            mask = np.asarray(sample["loss_mask"]) != 0
            if mask.shape != tokens.shape:
                raise UsageError(
                    f"sample {index}: loss_mask has shape {list(mask.shape)}, "
                    f"but input_ids has {list(tokens.shape)}"
                )
        else:
            mask = np.ones(len(tokens), dtype=bool)
        yield tokens.astype(_DTYPE), mask.astype(np.uint8)
