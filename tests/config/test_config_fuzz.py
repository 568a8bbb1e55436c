"""Damaged configurations: an exit code of 0 or 2 and lines in the right form, never a traceback."""

from __future__ import annotations

import contextlib
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from odcengine._config_cli import main
from odcengine.config import load_config
from odcengine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
VALID = sorted(path for path in (ROOT / "configs").iterdir() if path.is_file())

# fmt: off
KEYS = [
    "train_batch_size", "optimizer", "type", "params", "lr", "stage", "auto", "odc", "transport",
    "lockstep", "balance", "strategy", "data", "fp16", "enabled", "launch", "signals",
    "zero_optimization", "offload_param", "device", "scheduler", "milestones", "betas", "on", "yes",
    "null", "<<", "~", "1", "1.5", "true", "monitor", "bfloat16", "dataloader_drop_last", "amp",
    "compile", "optimiser", "Lr", "LR", "wrap", "reshard_after_forward", "max_length",
]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**30, -(10**400), 0.5, -0.0, 1e308, float("inf"),
    float("nan"), "", "auto", "AUTO", "2e-5", "yes", "on", "none", "cpu", "shm", "collective", "lb_mini",
    "AdamW", "StepLR", "x" * 500, "\u00e9\u4e2d", "a\nb", "0x10", "1_000", "10:30", "2026-01-01", [], {},
    [1, 2], [[]], [None], {"a": 1}, {"enabled": True}, {"enabled": "auto"}, {"type": "AdamW"},
    {"type": "SGD", "params": {"lr": "auto"}}, {"device": "cpu"}, ["INT", 5],
]
FRAGMENTS = [
    "\t", ":", "- ", "{", "}", "[", "]", "&a ", "*a", "!!str ", "!!python/object:os.x ", "#", "'", '"',
    "|\n", ">\n", "---\n", "...\n", "%YAML 1.1\n", "? ", "<<: ", "\\u0000", "\\ud800", "\ufeff", "\x00",
    "\x85", "\u2028", ",", "\r", "\n", "  ", "1e999", "9" * 5000, "nan", "NaN", "Infinity", ".inf", "/*",
    "//", "\\", "[" * 60, "{a: " * 60, "\U0001f600",
]
# fmt: on


def mutate_text(rng: random.Random, data: bytes) -> bytes:
    """Damages the text: bytes, lines, fragments."""
    for _ in range(rng.randint(1, 4)):
        lines = data.split(b"\n")
        position = rng.randint(0, len(data))
        kind = rng.randrange(7)
        if kind == 0:
            data = data[:position] + bytes([rng.randrange(256)]) + data[position + 1 :]
        elif kind == 1:
            data = data[:position] + rng.choice(FRAGMENTS).encode("utf-8", "surrogatepass") + data[position:]
        elif kind == 2:
            data = data[:position] + data[position + rng.randint(1, 20) :]
        elif kind == 3:
            line = rng.randrange(len(lines))
            data = b"\n".join(lines[: line + 1] + lines[line:])
        elif kind == 4:
            rng.shuffle(lines)
            data = b"\n".join(lines)
        elif kind == 5:
            data = data[:position]
        else:
            line = rng.randrange(len(lines))
            lines[line] = b" " * rng.randint(1, 4) + lines[line]
            data = b"\n".join(lines)
    return data


def mutate_tree(rng: random.Random, node: Any) -> Any:
    """Changes keys and values of a tree that stays writable."""
    if isinstance(node, dict):
        result = {key: mutate_tree(rng, value) for key, value in node.items()}
        for key in list(result):
            choice = rng.random()
            if choice < 0.06:
                result[key] = rng.choice(VALUES)
            elif choice < 0.09:
                result[misspelt(rng, key)] = result.pop(key)
            elif choice < 0.11:
                del result[key]
        if rng.random() < 0.2:
            result[rng.choice(KEYS)] = rng.choice(VALUES)
        return result
    if isinstance(node, list):
        return [mutate_tree(rng, value) for value in node]
    return rng.choice(VALUES) if rng.random() < 0.04 else node


def misspelt(rng: random.Random, key: str) -> str:
    at = rng.randrange(len(key))
    return rng.choice([key[:at] + key[at + 1 :], key[:at] + "x" + key[at:], key.upper(), key + " "])


def fuzzed(rng: random.Random) -> tuple[str, bytes]:
    """Returns an extension and the content of a damaged configuration."""
    path = rng.choice(VALID)
    extension = rng.choice([path.suffix, path.suffix, path.suffix, ".json", ".yaml", ""])
    if rng.random() < 0.4:
        return extension, mutate_text(rng, path.read_bytes())
    tree = mutate_tree(rng, yaml.safe_load(path.read_text()))
    if rng.random() < 0.5:
        text = json.dumps(tree, indent=rng.choice([None, 2]))
    else:
        text = yaml.safe_dump(tree, default_flow_style=rng.choice([None, True, False]))
        extension = ".yaml"
    data = text.encode("utf-8", "surrogatepass")
    return extension, mutate_text(rng, data) if rng.random() < 0.1 else data


def check(seed: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """Runs the command line on one damaged file; returns the exit code."""
    extension, data = fuzzed(random.Random(seed))
    path = folder / f"c{extension}"
    path.write_bytes(data)
    code = main([str(path)])
    out, err = capsys.readouterr()
    if code == 0:
        config = load_config(path)
        (folder / "resolved.yaml").write_text(out)
        assert load_config(folder / "resolved.yaml").resolved() == config.resolved()
        # A warning is of a model that may be a name on the Hub.
        kinds = (f"note: {path}:", f"warning: {path}:")
        assert all(line.startswith(kinds) for line in err.splitlines())
        with contextlib.suppress(ConfigError):
            config.resolve_batch(1)
    else:
        assert code == 2
        assert out == ""
        lines = err.splitlines()
        assert lines
        # YAML 1.1 breaks lines at U+0085, U+2028 and U+2029 as well.
        num_lines = 2 + sum(data.count(end) for end in (b"\n", b"\r", b"\xc2\x85", b"\xe2\x80"))
        place = re.compile(rf"{re.escape(str(path))}:([1-9]\d*): \S")
        for line in lines:
            found = place.match(line)
            assert found is not None, line
            assert int(found[1]) <= num_lines
            assert line.isascii()
            assert len(line) < 1000
    return code


def run_seeds(seeds: range, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes = []
    for seed in seeds:
        try:
            codes.append(check(seed, folder, capsys))
        except BaseException as error:
            raise AssertionError(f"seed {seed} failed: {error!r}") from error
    assert {0, 2} == set(codes)


def test_a_sample_of_damaged_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_seeds(range(600), tmp_path, capsys)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_damaged_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_seeds(range(1_000_000, 1_010_000), tmp_path, capsys)


def test_random_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(0)
    for number in range(200):
        path = tmp_path / f"c{rng.choice(['.yaml', '.json', ''])}"
        alphabet = bytes(range(256)) if number % 2 else b"{}[]:,\"'-&*!|>%@`#? \n\tabc012.\\"
        path.write_bytes(bytes(rng.choices(alphabet, k=rng.randint(0, 300))))
        assert main([str(path)]) in (0, 2)
    capsys.readouterr()
