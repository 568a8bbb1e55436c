"""The package as a whole: version, lazy import, entry points, completeness."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import odcengine

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"odcengine": ROOT, "odc_launcher": ROOT / "launcher", "odc_tools": ROOT / "tools"}


def run_python(*words: str) -> str:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PACKAGES.values()))}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_version_is_stated_once() -> None:
    pytest.importorskip("setuptools")
    version = odcengine.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", version)
    assert run_python("setup.py", "--version").splitlines()[-1] == version
    assert run_python("-m", "odc_launcher", "--version") == f"odc-launch {version}"
    for file in ("setup.py", "pyproject.toml", "odcengine/__init__.py"):
        assert f'"{version}"' not in (ROOT / file).read_text(), f"{file} states the version a second time"


def test_import_and_config_need_no_torch() -> None:
    code = (
        "import sys, odcengine, odc_launcher.cli, odc_tools; from odcengine import Config, load_config; "
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    assert run_python("-c", code) == "[]"


def test_no_module_has_a_public_name() -> None:
    """Imported, it would stand in the name's place; a whole run has imported them all."""
    files = {path.stem for path in (ROOT / "odcengine").iterdir()}
    assert not files & {name for name in odcengine.__all__ if not name.startswith("__")}


def test_public_names_resolve_and_others_do_not() -> None:
    assert set(odcengine.__all__) <= set(dir(odcengine))
    for name in odcengine.__all__:
        assert getattr(odcengine, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        odcengine.initialise  # noqa: B018


def test_entry_points_resolve() -> None:
    entries = re.findall(r'"([\w-]+) = ([\w.]+):(\w+)"', (ROOT / "setup.py").read_text())
    assert [name for name, _, _ in entries] == ["odc-launch", "odc"]
    for _, module, function in entries:
        assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_with_code_is_packaged(package: str) -> None:
    """``find_packages`` skips folders without ``__init__.py`` without a word."""
    folder = PACKAGES[package] / package
    missing = {file.parent for file in folder.rglob("*.py") if not (file.parent / "__init__.py").exists()}
    assert not missing
