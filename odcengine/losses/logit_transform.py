"""What some models do to the logits that their head returns: a scale and a soft cap.

With ``y = scale * z``, logits ``z`` become ``y``, or with a cap ``cap * tanh(y / cap)`` as in Gemma 2
(arXiv 2408.00118). Losses computed in the head (``fused_head.py``) apply it to a chunk of logits at a time,
in the precision of the softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from odcengine.errors import UsageError


@dataclass(frozen=True)
class LogitTransform:
    """``scale * z``, or with a cap ``cap * tanh(scale * z / cap)``.

    Attributes:
        scale: any finite number but 0.
        cap: above 0; None for no cap.

    Raises:
        UsageError: one of them is out of range.
    """

    scale: float = 1.0
    cap: float | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale) or self.scale == 0:
            raise UsageError(
                f"LogitTransform: scale is {self.scale}, but must be a finite number other than 0"
            )
        if self.cap is not None and not 0 < self.cap < math.inf:
            raise UsageError(f"LogitTransform: cap is {self.cap}, but must be a number above 0, or None")

    def apply_(self, logits: torch.Tensor, keep: bool) -> torch.Tensor | None:
        """Change logits in place.

        Args:
            logits: any shape, float32 or float64: 16 bits would lose what the cap leaves of large ones.
            keep: whether :meth:`chain_` will follow.

        Returns:
            What :meth:`chain_` needs.
        """
        if self.cap is None:
            if self.scale != 1:
                logits.mul_(self.scale)
            return None
        logits.mul_(self.scale / self.cap).tanh_()
        kept = logits.clone() if keep else None
        logits.mul_(self.cap)
        return kept

    def chain_(self, gradient: torch.Tensor, kept: torch.Tensor | None) -> None:
        """Turn a gradient with respect to changed logits into that with respect to the head's, in place.

        Args:
            gradient: of the shape of the logits.
            kept: what :meth:`apply_` has returned; used up.
        """
        if kept is not None:
            gradient.mul_(kept.square_().neg_().add_(1.0))
        if self.scale != 1:
            gradient.mul_(self.scale)


UNCHANGED = LogitTransform()
"""For models that return what their head returns."""
