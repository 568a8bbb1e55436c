"""What a rank holds of its models before anything is computed, in words for the log."""

from __future__ import annotations

from collections.abc import Sequence

from odcengine.sharding.layout import ParamGroup
from odcengine.transport.base import WindowPlan
from odcengine.transport.heap import aligned


def describe_shards(groups: Sequence[ParamGroup], num_own: int, windows: WindowPlan | None) -> str:
    """One sentence with the bytes of this rank's shards and windows.

    Args:
        groups: those of the model, then those of the reference model, if there is one.
        num_own: how many are the model's.
        windows: two for each group, in their order; None where there are none.
    """
    weights = [sum(entry.local.nbytes for entry in group.entries) for group in groups]
    parts, of_reference = [f"weights {_gib(sum(weights))}"], [_gib(sum(weights[num_own:]))]
    if windows is not None:
        sizes = [aligned(spec.nbytes) for spec in windows.specs]
        parts.append(f"windows {_gib(sum(sizes))}")
        of_reference.append(_gib(sum(sizes[2 * num_own :])))
    text = f"memory of rank 0 before training: {', '.join(parts)}"
    if num_own < len(groups):
        text += f" (of these the reference model has {' and '.join(of_reference)})"
    return f"{text}; gathered blocks, states of the optimizer and activations come on top"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3g} GiB"
