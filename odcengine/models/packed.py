"""Causal attention that stops at the boundaries of packed samples, for models of transformers.

transformers lets attention functions be registered by name. The one registered here receives the boundaries
that :meth:`odcengine.data.MicroBatch.model_inputs` passes to the model. On a GPU in 16 bits one launch of
FlashAttention does all samples (``varlen.py``), elsewhere ``scaled_dot_product_attention`` does them one by
one (``sample_attention.py``), and attention that changes its scores is computed block by block
(``scored_attention.py``): no mask of the whole row is ever built, and the work is the sum of the samples'
own. A call without boundaries (evaluation, generation, padded batches) gets transformers' own ``sdpa``
attention and masks.

Not every model can be packed: recurrent layers carry state over a boundary, and some models make their
positions themselves or do not hand the boundaries down to their attention. :func:`prepare_model` refuses what
it knows to be wrong, and proves on a tiny input that samples do not see each other and get the same logits as
alone.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from odcengine.data.batch import Segments
from odcengine.data.pack import pack_samples
from odcengine.errors import UsageError
from odcengine.models._probe import PROBE_SAMPLES, evaluating
from odcengine.models.head import prepare_loss
from odcengine.models.sample_attention import sample_by_sample
from odcengine.models.scored_attention import changes_scores, scored_attention
from odcengine.models.varlen import can_use_varlen, varlen_attention

logger = logging.getLogger(__name__)

PACKED_ATTENTION = "odc_packed"
"""The name under which the attention is registered with transformers."""
_PACKED_ROWS = "odc_packed_rows"
"""Its name while a packed row runs: one for which transformers knows no masks, see :func:`_enter_row`."""

# Layer kinds whose only trace of other tokens is attention with a mask known here.
_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Arguments that change attention in ways that the packed path does not compute.
_REFUSED_ARGUMENTS = ("sinks", "position_bias", "head_mask")


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    odc_segments: Segments | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each segment of a packed row; the signature is transformers'.

    Args:
        module: the attention layer (its ``is_causal`` is respected).
        query: ``[1, heads, T, head_dim]``.
        key: ``[1, kv_heads, T, head_dim]``; ``heads`` is a multiple of ``kv_heads``.
        value: ``[1, kv_heads, T, value_dim]``.
        attention_mask: None for a packed row.
        dropout: probability of dropping an attention weight.
        scaling: factor of the scores; ``head_dim ** -0.5`` if None.
        is_causal: overrides the module's.
        cu_seq_lens_q: boundaries of the segments, int32 ``[segments + 1]``, from 0 to ``T``. None for a row
            that is not packed: then transformers' ``sdpa`` attention runs, with its mask.
        odc_segments: ``cu_seq_lens_q`` for the host. Without it the host waits for the device to tell them.
        sliding_window: tokens that a token sees at most, itself included.
        **kwargs: what else transformers passes.

    Returns:
        The output ``[1, T, heads, value_dim]``, and None for the weights.

    Raises:
        UsageError: a call that this function cannot compute exactly.
    """
    if cu_seq_lens_q is None:
        if changes_scores(kwargs):
            return scored_attention(
                query,
                key,
                value,
                attention_mask=attention_mask,
                dropout=dropout,
                scaling=scaling,
                sliding_window=sliding_window,
                softcap=kwargs.get("softcap"),
                s_aux=kwargs.get("s_aux"),
            ), None
        if attention_mask is None and sliding_window is not None and query.shape[2] > sliding_window:
            # transformers' attention would want a mask of the whole row here, and _packed_mask makes none.
            whole = Segments((0, query.shape[2]))
            _check_causal(module, is_causal)
            _check_arguments(module, kwargs)
            return sample_by_sample(
                query, key, value, whole, dropout=dropout, scaling=scaling, sliding_window=sliding_window
            ), None
        output: tuple[torch.Tensor, None] = _transformers_sdpa()(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
        return output
    if torch.compiler.is_compiling():
        from odcengine.models.compiled import compiled_attention

        return compiled_attention(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            cu_seq_lens_q=cu_seq_lens_q,
            odc_segments=odc_segments,
            sliding_window=sliding_window,
            **kwargs,
        )
    # The tensor has the last word wherever reading it makes nobody wait.
    segments = odc_segments
    if segments is None or not cu_seq_lens_q.is_cuda or len(segments.boundaries) != len(cu_seq_lens_q):
        segments = Segments(cu_seq_lens_q.tolist())
    check_arguments(module, query, key, attention_mask, is_causal, kwargs)
    boundaries = segments.boundaries
    if boundaries[0] != 0 or boundaries[-1] != query.shape[2]:
        raise UsageError(
            f"{type(module).__name__}: boundaries run from {boundaries[0]} to {boundaries[-1]}, but the row "
            f"from 0 to {query.shape[2]}"
        )
    if changes_scores(kwargs):
        return scored_attention(
            query,
            key,
            value,
            segments=segments,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=kwargs.get("softcap"),
            s_aux=kwargs.get("s_aux"),
        ), None
    if can_use_varlen(query, key, value, dropout):
        window = sliding_window if sliding_window is not None and segments.longest > sliding_window else None
        return varlen_attention(
            query, key, value, cu_seq_lens_q, segments.longest, scaling=scaling, sliding_window=window
        ), None
    return sample_by_sample(
        query, key, value, segments, dropout=dropout, scaling=scaling, sliding_window=sliding_window
    ), None


def check_arguments(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    is_causal: bool | None,
    arguments: dict[str, Any],
) -> None:
    """Refuse a call with a packed row that :func:`packed_attention` cannot compute exactly.

    Args:
        module: the attention layer.
        query: as in :func:`packed_attention`, like the following.
        key: as above.
        attention_mask: as above.
        is_causal: as above.
        arguments: what else transformers passes.

    Raises:
        UsageError: names the layer and the argument.
    """
    where = type(module).__name__
    if attention_mask is not None:
        raise UsageError(f"{where}: a packed row takes no attention_mask; its boundaries say what is seen")
    _check_causal(module, is_causal)
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise UsageError(
            f"{where}: a packed row has batch size 1 and no key-value cache, but the query has shape "
            f"{list(query.shape)} and the key {list(key.shape)}; call the model with use_cache=False"
        )
    _check_arguments(module, arguments)


def _check_causal(module: nn.Module, is_causal: bool | None) -> None:
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UsageError(
            f"{type(module).__name__}: attention of packed rows is causal, but this layer's is not"
        )


def _check_arguments(module: nn.Module, arguments: dict[str, Any]) -> None:
    refused = [name for name in _REFUSED_ARGUMENTS if arguments.get(name) is not None]
    if refused:
        raise UsageError(
            f"{type(module).__name__}: attention with {', '.join(refused)} is not supported for packed rows"
        )


def _packed_mask(**kwargs: Any) -> torch.Tensor | None:
    """The mask that transformers asks for: none where causality alone decides, else that of ``sdpa``.

    Of packed rows the boundaries take care; transformers would build a mask of the whole row for them.
    """
    # transformers 4 gives the positions of the queries instead of their number.
    num_queries = kwargs["q_length"] if "q_length" in kwargs else len(kwargs["cache_position"])
    if kwargs.get("attention_mask") is None and num_queries == kwargs["kv_length"]:
        return None
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    mask: torch.Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**kwargs)
    return mask


def _transformers_sdpa() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS["sdpa"]


# ---- switching a model -------------------------------------------------------------------------------


def prepare_config(config: Any) -> Any:
    """A copy of a configuration whose models attend to packed rows correctly.

    The configuration given stays as it is: models hold a reference to their configuration, so a change in it
    would reach models made from it before and after.

    Args:
        config: configuration of a causal language model of transformers.

    Returns:
        The copy, for ``AutoModelForCausalLM.from_config`` and the like.

    Raises:
        UsageError: the configuration has layers whose boundaries cannot be honoured.
    """
    _register()
    _check_config(config)
    prepared = copy.deepcopy(config)
    prepared._attn_implementation = PACKED_ATTENTION
    return prepared


def prepare_model(model: nn.Module, *, probe: bool | None = None) -> nn.Module:
    """Make a model attend to packed rows correctly, in place; call it before sharding.

    Also finds out whether the model's head may compute the loss (:func:`prepare_loss`), which saves the
    memory of the logits.

    Args:
        model: causal language model of transformers, also wrapped (PEFT, for example).
        probe: prove it with :func:`check_isolation`, a handful of forwards of ten tokens. By default where
            the weights are real; a model on the meta device cannot be proved so: call
            :func:`check_isolation` when it has weights, or prove a small model of the same class.

    Returns:
        The same model. Its configuration is a copy now; the one that it was made from stays as it is.

    Raises:
        UsageError: a model whose boundaries cannot be honoured, or that fails the probe (it is left
            unchanged then).
    """
    _register()
    parts = _transformers_modules(model)
    for part in parts:
        if not getattr(part, "_supports_attention_backend", False):
            raise UsageError(
                f"{type(part).__name__} does not let its attention be exchanged, so boundaries of "
                "packed samples cannot be honoured; train it with one sample a micro-batch "
                "(train_micro_batch_size_per_gpu: 1) and a collate_fn of your own"
            )
        _check_config(part.config)
    before = [(module, module.config) for module in model.modules() if _has_config(module)]
    memo: dict[int, Any] = {}
    for module, config in before:
        module.config = copy.deepcopy(config, memo)
    _set_attention(model, PACKED_ATTENTION)
    hooks = [hook for part in parts if not _is_hooked(part) for hook in _hook(part)]
    has_weights = not any(parameter.is_meta for parameter in model.parameters())
    if probe is None:
        probe = has_weights
    if probe:
        try:
            check_isolation(model)
        except BaseException:
            for module, config in before:
                module.config = config
            for hook in hooks:
                hook.remove()
            raise
    if has_weights:
        prepare_loss(model)
    if any(getattr(part.config, "output_router_logits", False) for part in parts):
        logger.warning(
            "%s: output_router_logits has no effect: the auxiliary loss of a mixture is not added, since it "
            "would depend on how samples are cut into micro-batches",
            type(model).__name__,
        )
    return model


def _is_hooked(part: nn.Module) -> bool:
    return _enter_row in part._forward_pre_hooks.values()


def _hook(part: nn.Module) -> list[RemovableHandle]:
    return [
        part.register_forward_pre_hook(_enter_row, with_kwargs=True),
        part.register_forward_hook(_leave_row, always_call=True),
    ]


def _enter_row(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Before a model runs on a packed row: no masks, please.

    transformers looks at the positions of every row to find out whether it is packed, and the host waits
    until the device has told. With an attention that it knows no masks for it does not look. Only the model
    itself, which makes the masks, gets the other name: its layers keep their configuration, because those
    that are compiled were compiled for it, and are recomputed when the row has been left.
    """
    config: Any = module.config
    is_row = kwargs.get("cu_seq_lens_q") is not None and kwargs.get("attention_mask") is None
    if is_row and config._attn_implementation == PACKED_ATTENTION:
        row_config = copy.copy(config)
        for name in config.sub_configs:  # the name is passed on to them
            setattr(row_config, name, copy.copy(getattr(config, name, None)))
        row_config._attn_implementation = _PACKED_ROWS
        row_config._odc_outside = config
        module.config = row_config


def _leave_row(module: nn.Module, args: Any, output: Any) -> None:
    config: Any = module.config
    if config._attn_implementation == _PACKED_ROWS:
        module.config = config._odc_outside


@torch.no_grad()
def check_isolation(model: nn.Module, tolerance: float = 1e-5) -> None:
    """Prove on tiny inputs that packed samples do not see each other.

    Three samples of 5, 4 and 1 tokens are packed. Each must get the logits that it gets alone with
    transformers' own (eager) attention, and other tokens in the first must not change those of the others.

    Args:
        model: a prepared model, with its weights, not sharded.
        tolerance: largest difference, relative to the largest logit; for 16-bit weights at least 0.05.

    Raises:
        UsageError: a logit differs by more; or the model is on the meta device.
    """
    weights = next(model.parameters())
    if weights.is_meta:
        raise UsageError(
            "the probe needs real weights; this model is on the meta device: probe a small one instead"
        )
    if weights.dtype in (torch.bfloat16, torch.float16):
        tolerance = max(tolerance, 0.05)
    vocab_size = _transformers_modules(model)[0].get_input_embeddings().weight.shape[0]
    samples = [[token % vocab_size for token in tokens] for tokens in PROBE_SAMPLES]
    changed = [[(token + 1) % vocab_size for token in samples[0]], *samples[1:]]
    refusal = f"{type(model).__name__} cannot be trained on packed rows"
    allowed = f"allowed: {tolerance:.0e}"
    with evaluating(model):
        packed, other = (
            model(
                **pack_samples([{"input_ids": tokens} for tokens in row]).to(weights.device).model_inputs(),
                use_cache=False,
            ).logits[0]
            for row in (samples, changed)
        )
        with _attention(model, "eager"):
            alone = torch.cat(
                [
                    model(torch.tensor([tokens], device=weights.device), use_cache=False).logits[0]
                    for tokens in samples
                ]
            )
    scale = float(alone.abs().max()) or 1.0
    leak = float((packed[5:] - other[5:]).abs().max()) / scale
    if not leak <= tolerance:
        raise UsageError(
            f"{refusal}: changing the first sample changes the logits of the others by {leak:.1e} of the "
            f"largest ({allowed}); something is carried over boundaries"
        )
    difference = float((packed - alone).abs().max()) / scale
    if not difference <= tolerance:
        raise UsageError(
            f"{refusal}: a packed sample gets logits that differ by {difference:.1e} of the largest from "
            f"those it gets alone ({allowed}); the model may ignore position_ids, or have attention that the "
            "packed one does not compute"
        )


def _register() -> None:
    """Register the attention and its mask with transformers; doing it again changes nothing."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise UsageError(
            f"models of transformers need a recent transformers ({error}); pip install 'odcengine[hf]'"
        ) from error
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionInterface.register(_PACKED_ROWS, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, _packed_mask)


def is_transformers_model(model: nn.Module) -> bool:
    """Whether a model is, or wraps, one of transformers."""
    module_of_models = sys.modules.get("transformers.modeling_utils")
    if module_of_models is None:  # then no object of it can exist, and importing it takes seconds
        return False
    return any(isinstance(module, module_of_models.PreTrainedModel) for module in model.modules())


def _transformers_modules(model: nn.Module) -> list[Any]:
    from transformers import PreTrainedModel

    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not parts:
        raise UsageError(
            f"{type(model).__name__} is no model of transformers; honour cu_seq_lens_q in its own attention, "
            "or train it with one sample a micro-batch"
        )
    return parts


def _check_config(config: Any) -> None:
    name = type(config).__name__
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES)
    if unknown:
        raise UsageError(
            f"{name} has layers of type {', '.join(unknown)}, which do not stop at boundaries of packed "
            "samples"
        )
    if getattr(config, "is_causal", True) is False or getattr(config, "is_encoder_decoder", False):
        raise UsageError(f"{name} is not of a causal language model; attention of packed rows is causal")


def _has_config(module: nn.Module) -> bool:
    from transformers import PretrainedConfig

    return isinstance(getattr(module, "config", None), PretrainedConfig)


def _set_attention(model: nn.Module, name: str) -> None:
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if _has_config(module):
            config._attn_implementation = name


@contextmanager
def _attention(model: nn.Module, name: str) -> Iterator[None]:
    _set_attention(model, name)
    try:
        yield
    finally:
        _set_attention(model, PACKED_ATTENTION)
