"""odcengine: LLM post-training with on-demand communication (ODC, arXiv 2601.19362).

The names below are loaded when they are first used, so that ``import odcengine`` and the configuration
alone need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from odcengine._version import __version__

if TYPE_CHECKING:
    from odcengine._attach import attach, boundary
    from odcengine.build import initialize
    from odcengine.config import Config, load_config
    from odcengine.engine import OdcEngine
    from odcengine.preemption import Preempted

_LAZY = {
    "Config": "odcengine.config",
    "load_config": "odcengine.config",
    "OdcEngine": "odcengine.engine",
    "Preempted": "odcengine.preemption",
    "attach": "odcengine._attach",
    "boundary": "odcengine._attach",
    "initialize": "odcengine.build",
}

__all__ = [
    "Config",
    "OdcEngine",
    "Preempted",
    "__version__",
    "attach",
    "boundary",
    "initialize",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'odcengine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
