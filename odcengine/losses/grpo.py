"""Policy-gradient losses with clipped ratios and group advantages: GRPO and what became of it.

With ``r`` the ratio of a token's probability under the model to that under the model that drew it, and ``A``
the advantage of its answer, the loss of a token is

    - min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) + kl_coef KL(model || reference) - entropy_coef H

and how the losses of tokens become one number is the matter of ``normalize_by`` (``normalize.py``). Published
methods by their options (advantages are :func:`~odcengine.losses.group_advantages`):

- GRPO, DeepSeekMath, arXiv 2402.03300: ``normalize_by="sequence"``, ``kl_coef=0.04``, k3.
- DAPO, arXiv 2503.14476: ``normalize_by="token"``, ``eps_low=0.2``, ``eps_high=0.28``, no KL.
- Dr. GRPO, arXiv 2503.20783: ``normalize_by="dr_grpo"``, advantages with ``scale="none"``, no KL.
- GSPO, arXiv 2507.18071: ``ratio="sequence"``, ``normalize_by="sequence"``, ``eps_low=3e-4``,
  ``eps_high=4e-4``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from odcengine.data.batch import IGNORE_INDEX, MicroBatch
from odcengine.errors import UsageError
from odcengine.losses.kl import KL_ESTIMATORS, KlEstimator, kl_estimates
from odcengine.losses.linear_logprobs import Entropy, TokenLogprobs, check_options
from odcengine.losses.logprobs import causal_lm_logprobs
from odcengine.losses.loss_sum import LossSum
from odcengine.losses.normalize import Normalization, check_normalization, mean_per_sequence, weighted_sum

GRPO_METRICS = ("tokens", "clipped_high", "clipped_low", "clipped_dual", "approx_kl", "kl", "entropy")
"""Sums over the tokens with a target: of 1; of tokens whose ratio was clipped above, below, and by
``dual_clip``; of ``r - 1 - log r``, an estimate of KL(old || model); of the KL in the loss, before its
coefficient; of entropies. What was not computed is 0."""

_OTHER_NAMES = ("old_log_probs", "old_log_prob", "old_logprob", "old_logps", "old_per_token_logps")
"""What other libraries, and slips, call ``old_logprobs``."""


@dataclass(frozen=True)
class GrpoLoss:
    """The clipped policy-gradient loss of a micro-batch; a ``loss_fn`` for ``odcengine.initialize``.

    It needs these fields of the micro-batch (``pack_samples(..., fields=...)``):

    - ``advantages``, one number for each sequence or token;
    - ``old_logprobs``, of each token, by the model as it was when the minibatches of this round began.
      Without the field the present model's are used: right for a single update after each sampling;
    - ``ref_logprobs``, of each token, by the reference model; only where ``kl_coef`` is not 0.

    ``r`` may overflow where the two models have nothing in common; the loss then is not finite, and the
    engine skips the step on all ranks and says so. ``dual_clip`` prevents it.

    Args:
        eps_low: ratios are clipped below ``1 - eps_low``.
        eps_high: ratios are clipped above ``1 + eps_high``; infinity for no limit.
        dual_clip: limit of the ratio where the advantage is negative, above 1; None for none. (Dual-clip PPO,
            arXiv 1912.09729.)
        ratio: ``token``: each token has its own ratio; ``sequence``: the geometric mean over the tokens of
            its sequence (GSPO).
        kl_coef: of the divergence from the reference model.
        kl: its estimator, ``k1``, ``k2`` or ``k3``: :func:`~odcengine.losses.kl_estimates`.
        entropy_coef: of the entropy, which the loss favours.
        normalize_by: ``token``, ``sequence`` or ``dr_grpo``.
        max_completion_length: the divisor of ``dr_grpo``, in tokens.
        temperature: that of sampling: log-probabilities are those of ``softmax(logits / temperature)``.
        report_entropy: whether the entropy is computed for the metrics although it is not in the loss.

    Raises:
        UsageError: an argument out of range.
    """

    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None
    ratio: Literal["token", "sequence"] = "token"
    kl_coef: float = 0.0
    kl: KlEstimator = "k3"
    entropy_coef: float = 0.0
    normalize_by: Normalization = "token"
    max_completion_length: int | None = None
    temperature: float = 1.0
    report_entropy: bool = True

    def __post_init__(self) -> None:
        check_options("GrpoLoss", self.temperature, "none")
        check_normalization("GrpoLoss", self.normalize_by, self.max_completion_length)
        wrong = {
            "eps_low": (self.eps_low, 0 <= self.eps_low <= 1, "in 0 to 1"),
            "eps_high": (self.eps_high, self.eps_high >= 0, "0 or more"),
            "dual_clip": (self.dual_clip, self.dual_clip is None or self.dual_clip > 1, "above 1, or None"),
            "ratio": (self.ratio, self.ratio in ("token", "sequence"), "token or sequence"),
            "kl_coef": (self.kl_coef, 0 <= self.kl_coef < math.inf, "0 or more"),
            "kl": (self.kl, self.kl in KL_ESTIMATORS, f"one of {', '.join(KL_ESTIMATORS)}"),
            "entropy_coef": (self.entropy_coef, math.isfinite(self.entropy_coef), "finite"),
        }
        for name, (value, right, must) in wrong.items():
            if not right:
                raise UsageError(f"GrpoLoss: {name} is {value!r}, but must be {must}")

    def __call__(self, model: nn.Module, micro_batch: MicroBatch) -> LossSum:
        """The loss of a micro-batch, from a forward of the model."""
        return self.of(self.logprobs(model, micro_batch), micro_batch)

    def logprobs(self, model: nn.Module, micro_batch: MicroBatch) -> TokenLogprobs:
        """Log-probabilities of the micro-batch's labels at this loss's temperature, with what else it needs.

        The same for the old and the reference model: ``engine(micro_batch, loss_fn=loss.logprobs)`` under
        ``torch.no_grad()``; ``micro_batch.unpack(found.logprobs)`` gives each sequence's own.
        """
        entropy: Entropy = "none"
        if torch.is_grad_enabled() and (self.entropy_coef or self.report_entropy):
            entropy = "differentiable" if self.entropy_coef else "detached"
        return causal_lm_logprobs(model, micro_batch, temperature=self.temperature, entropy=entropy)

    def of(self, found: TokenLogprobs, micro_batch: MicroBatch) -> LossSum:
        """The loss of log-probabilities that are there already.

        Args:
            found: of the micro-batch's labels.
            micro_batch: with the fields.

        Returns:
            Metrics: :data:`GRPO_METRICS`.

        Raises:
            UsageError: a field is missing or has another shape.
        """
        # Whatever stands where there is no target: it takes no part, not even as 0 times a NaN.
        has_target = micro_batch.labels != IGNORE_INDEX
        logprobs = torch.where(has_target, found.logprobs, 0)
        advantages = self._field(micro_batch, "advantages", logprobs)
        if advantages.ndim == 1:
            advantages = micro_batch.spread(advantages)
        old = logprobs.detach()
        if "old_logprobs" in micro_batch.fields:
            old = self._field(micro_batch, "old_logprobs", logprobs)
        else:
            self._refuse_other_names(micro_batch)
        log_ratio = torch.where(has_target, logprobs - old, 0)
        if self.ratio == "sequence":
            means = micro_batch.spread(mean_per_sequence(log_ratio, micro_batch))
            log_ratio = torch.where(has_target, means, 0)
        advantages = torch.where(has_target, advantages, 0)
        losses, clipped = self._surrogate(log_ratio, advantages)
        kl = torch.zeros_like(losses)
        if self.kl_coef:
            reference = self._field(micro_batch, "ref_logprobs", logprobs)
            kl = kl_estimates(logprobs, torch.where(has_target, reference, 0), self.kl)
            losses = losses + self.kl_coef * kl
        if self.entropy_coef:
            if found.entropies is None:
                raise UsageError(
                    "GrpoLoss: entropy_coef needs entropies; compute them with GrpoLoss.logprobs"
                )
            losses = losses - self.entropy_coef * torch.where(has_target, found.entropies, 0)
        loss_sum, count = weighted_sum(losses, micro_batch, self.normalize_by, self.max_completion_length)
        drift = (torch.expm1(log_ratio) - log_ratio).detach()
        entropies = torch.zeros_like(drift) if found.entropies is None else found.entropies.detach()
        sums = [has_target, *clipped, drift, kl.detach(), entropies]
        metrics = torch.stack([values.to(drift.dtype).sum() for values in sums])
        return LossSum(loss_sum, count, dict(zip(GRPO_METRICS, metrics, strict=True)), unit="tokens")

    def _surrogate(
        self, log_ratio: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Losses of tokens, and which were clipped above, below and by ``dual_clip``.

        The minimum of the two products is chosen before the exponential is taken, so that a ratio that
        overflows and is clipped has a gradient of 0, not of 0 times infinity.
        """
        with torch.no_grad():
            ratio = log_ratio.exp()
            gains, loses = advantages > 0, advantages < 0
            high = gains & (ratio > 1 + self.eps_high)
            low = loses & (ratio < 1 - self.eps_low)
            dual = loses & (ratio > (math.inf if self.dual_clip is None else self.dual_clip))
            limit = 1 - self.eps_low * low.to(ratio.dtype)
            limit = torch.where(high, 1 + self.eps_high, limit)
            limit = torch.where(dual, self.dual_clip or 1.0, limit)
            is_fixed = high | low | dual | (advantages == 0)
        ratio = torch.where(is_fixed, limit, torch.where(is_fixed, 0, log_ratio).exp())
        return -ratio * advantages, (high, low, dual)

    def _refuse_other_names(self, micro_batch: MicroBatch) -> None:
        """Old log-probabilities under another library's name would be left out, and every ratio be 1."""
        for name in _OTHER_NAMES:
            if name in micro_batch.fields:
                raise UsageError(
                    f"GrpoLoss: the micro-batch has a field {name}, but no old_logprobs, so every ratio "
                    "would be 1; call it old_logprobs, or leave it out if that is meant"
                )

    def _field(self, micro_batch: MicroBatch, name: str, like: torch.Tensor) -> torch.Tensor:
        """A field in the dtype of the log-probabilities: of tokens, or for advantages of sequences."""
        if micro_batch.is_dummy:
            return torch.zeros_like(like)
        field = micro_batch.field(name, "GrpoLoss").to(like.dtype)
        if field.shape != like.shape and name != "advantages":
            raise UsageError(
                f"GrpoLoss: the field {name} has one number for each sequence; give one for each token"
            )
        return field
