"""torch's all-gather and reduce-scatter of one tensor, under the names that the installed torch prefers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def _newest(*names: str) -> Callable[..., Any]:
    for name in names:
        function: Callable[..., Any] | None = getattr(dist, name, None)
        if function is not None:
            return function
    raise ImportError(f"torch.distributed has none of {names}")


# torch 2.13 renamed both and warns about the old names.
all_gather = _newest("all_gather_single", "all_gather_into_tensor")
reduce_scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor")
