"""``odcengine.attach`` and ``odcengine.boundary``: on-demand communication for what others have sharded."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from odcengine.config import Config
from odcengine.errors import UsageError


def attach(target: Any, config: Config | Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Give an engine that another library has made on-demand communication. Collective.

    Args:
        target: the engine of ``deepspeed.initialize`` (ZeRO stage 3), before its first forward.
        config: a configuration whose ``odc`` section counts, or such a section as a mapping.
        options: keys of that section instead, such as ``transport`` or ``timeout_s``.

    Returns:
        A handle with ``close()`` and ``boundary()``: :class:`odcengine.deepspeed.attach.AttachedDeepSpeed`.
        The target is used as before.

    Raises:
        ConfigError: what cannot work, with the reason; nothing has changed then.
        UsageError: the target is of no kind that can be attached, or is attached already.
        PeerError: another rank failed or did not come in time.
    """
    if _is_deepspeed(target):
        from odcengine.deepspeed.attach import attach_deepspeed

        return attach_deepspeed(target, config, **options)
    raise UsageError(
        f"odcengine.attach: got a {type(target).__name__}; expected the engine that deepspeed.initialize "
        "returns first (for a model of your own, odcengine.initialize)"
    )


def boundary(engine: Any) -> None:
    """End the minibatch of a DeepSpeed engine on a rank that has no micro-batch, or none left.

    Args:
        engine: DeepSpeed's engine, or Accelerate's wrapper of it.
    """
    from odcengine.deepspeed.attach import boundary as end

    end(engine)


def _is_deepspeed(target: Any) -> bool:
    """Without importing DeepSpeed: who has one of its engines has imported it."""
    module = sys.modules.get("deepspeed.runtime.engine")
    return module is not None and isinstance(target, module.DeepSpeedEngine)
