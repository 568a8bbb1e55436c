"""What one sequence costs: ``a * l + b * l**2`` FLOP for a sequence of ``l`` tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# transformers model types whose feed-forward block has two matrices instead of the gated three.
_UNGATED_MODEL_TYPES = frozenset(
    {"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "opt", "phi", "starcoder2"}
)


@dataclass(frozen=True)
class CostModel:
    """Cost of a training step on one sequence of ``l`` tokens: ``linear * l + quadratic * l**2``.

    Packing several sequences into one row adds no cross terms, so costs of sequences add up; every
    micro-batch adds ``per_micro_batch``. Only the ratios of the numbers matter to a plan. The unit is FLOP
    with :meth:`from_shape`, seconds with :class:`~odcengine.balance.OnlineCost`.

    Args:
        linear: cost per token (matrix products with weights).
        quadratic: cost per squared token (causal attention).
        per_micro_batch: cost of a micro-batch whatever is in it (starting kernels, getting parameters). None:
            not known; it counts as 0 then, but ``dynamic`` does not rely on it.
    """

    linear: float
    quadratic: float
    per_micro_batch: float | None = None

    def __post_init__(self) -> None:
        numbers = (self.linear, self.quadratic, self.overhead)
        if not all(0 <= number < math.inf for number in numbers) or not self.linear + self.quadratic > 0:
            raise ValueError(
                f"cost model: linear={self.linear}, quadratic={self.quadratic} and per_micro_batch="
                f"{self.per_micro_batch} must be >= 0 and finite, and the first two not both 0"
            )

    @property
    def overhead(self) -> float:
        """``per_micro_batch``, 0 where it is not known."""
        return self.per_micro_batch or 0.0

    def __call__(self, lengths: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Costs of sequences, without that of their micro-batches.

        Args:
            lengths: tokens of each sequence, shape ``[n]``.

        Returns:
            float64 of shape ``[n]``.
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.of(tokens, tokens * tokens)

    def of(
        self, tokens: npt.NDArray[np.float64], squares: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Costs of samples that may hold several sequences, between which there is no attention.

        Args:
            tokens: of each sample, shape ``[n]``.
            squares: sum of the squared lengths of each sample's sequences, shape ``[n]``.
        """
        return self.linear * tokens + self.quadratic * squares

    @classmethod
    def from_shape(
        cls,
        *,
        num_layers: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        intermediate_size: int,
        vocab_size: int,
        gated: bool = True,
        recompute: bool = False,
        trained: float = 1.0,
    ) -> CostModel:
        """FLOP of forward and backward from the shape of a decoder-only transformer.

        Linear part: 6 FLOP per token and weight of the blocks (2 forward, 4 backward), 8 when blocks are
        recomputed in the backward (activation checkpointing), plus ``6 * hidden * vocab`` for the
        language-model head, which is not recomputed (Kaplan et al., arXiv 2001.08361, section 2.1).
        Attention: the two products of a forward are ``2 * l**2 * H`` FLOP each with ``H = heads * head_dim``,
        halved by the causal mask, so ``2 * layers * H * l**2``; the backward of FlashAttention runs five
        such products instead of two (Dao et al., arXiv 2205.14135, appendix B), so 7 in all,
        9 with recomputation.

        Args:
            num_layers: decoder blocks.
            hidden_size: width of the residual stream.
            num_heads: query heads.
            num_kv_heads: key and value heads (fewer than ``num_heads`` with grouped queries).
            head_dim: width of a head.
            intermediate_size: width of the feed-forward block (of all active experts together).
            vocab_size: rows of the language-model head.
            gated: three matrices in the feed-forward block (SwiGLU) instead of two.
            recompute: activation checkpointing of every block.
            trained: share of the weights that are trained; frozen ones save the product of their gradient,
                2 FLOP per token.

        Returns:
            The cost model in FLOP.
        """
        attention_width = num_heads * head_dim
        block = hidden_size * (
            2 * attention_width + 2 * num_kv_heads * head_dim + (3 if gated else 2) * intermediate_size
        )
        return cls(
            linear=float(
                (4 + 2 * trained + 2 * recompute) * num_layers * block
                + (4 + 2 * trained) * hidden_size * vocab_size
            ),
            quadratic=float((9 if recompute else 7) * num_layers * attention_width),
        )

    @classmethod
    def from_config(cls, config: Any, *, recompute: bool = False, trained: float = 1.0) -> CostModel:
        """:meth:`from_shape` with the numbers of a transformers configuration (read by attribute).

        Args:
            config: an object with ``num_hidden_layers``, ``hidden_size``, ``num_attention_heads`` and
                ``vocab_size``; the rest has the usual defaults. Of a mixture of experts, the active
                experts count.
            recompute: activation checkpointing of every block.
            trained: share of the weights that are trained.

        Returns:
            The cost model in FLOP.

        Raises:
            ValueError: the configuration lacks one of the four numbers.
        """
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        required = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
        missing = [name for name in required if not isinstance(getattr(config, name, None), int)]
        if missing:
            raise ValueError(
                f"cost model: {type(config).__name__} has no {', '.join(missing)}; give the shape "
                "with CostModel.from_shape(...) or the two numbers with CostModel(linear=, quadratic=)"
            )
        hidden_size, num_heads = config.hidden_size, config.num_attention_heads
        intermediate_size = (
            getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden_size
        )
        if isinstance(intermediate_size, (list, tuple)):  # one for each layer (Gemma 3n)
            intermediate_size = round(sum(intermediate_size) / len(intermediate_size))
        if getattr(config, "num_experts_per_tok", None):
            intermediate_size = _active_width(config, intermediate_size)
        return cls.from_shape(
            num_layers=config.num_hidden_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=_head_dim(config) or hidden_size // num_heads,
            intermediate_size=intermediate_size,
            vocab_size=config.vocab_size,
            gated=getattr(config, "model_type", "") not in _UNGATED_MODEL_TYPES,
            recompute=recompute,
            trained=trained,
        )

    @classmethod
    def for_model(cls, model: Any, *, recompute: bool = False, trained: float = 1.0) -> CostModel:
        """:meth:`from_config` of ``model.config``; :meth:`default` where that does not tell the shape.

        Args:
            model: any model.
            recompute: activation checkpointing of every block.
            trained: share of the weights that are trained.
        """
        try:
            return cls.from_config(getattr(model, "config", None), recompute=recompute, trained=trained)
        except ValueError:
            return cls.default()

    @classmethod
    def default(cls) -> CostModel:
        """The cost model where no shape is known: a 7B model (the shape of Qwen2.5-7B), recomputed.

        Its ratio ``linear / quadratic`` is 61 thousand tokens; the ratio is 31 thousand at 1.5B and
        86 thousand at 32B parameters, so a wrong guess changes plans little.
        """
        return cls.from_shape(
            num_layers=28,
            hidden_size=3584,
            num_heads=28,
            num_kv_heads=4,
            head_dim=128,
            intermediate_size=18944,
            vocab_size=152064,
            recompute=True,
        )


def _active_width(config: Any, dense: int) -> int:
    """Width of the feed-forward block that a token meets: mean over layers with experts and without."""
    one: int = getattr(config, "moe_intermediate_size", None) or dense
    shared: int = (getattr(config, "n_shared_experts", None) or 0) * one
    shared = shared or getattr(config, "shared_expert_intermediate_size", None) or 0
    active: int = config.num_experts_per_tok * one + shared
    without: int = getattr(config, "first_k_dense_replace", None) or 0
    without = without or len(getattr(config, "mlp_only_layers", None) or ())
    layers: int = config.num_hidden_layers
    return round((without * dense + (layers - without) * active) / layers)


def _head_dim(config: Any) -> int | None:
    """Width of a head, where the configuration has one for all layers."""
    try:
        found = getattr(config, "head_dim", None)
    except Exception:  # transformers refuses to tell one where layers differ (Gemma 4)
        return None
    return found if isinstance(found, int) else None
