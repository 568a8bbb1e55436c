"""Tiny configurations of the families of docs/models.md, those that train and those that are refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_GPT2 = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    **_TOKENS,
    **_NO_DROPOUT,
}
_OWN_HEADS = {"num_key_value_heads": 4}  # no groups of queries
_HEAD = {"head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {  # attention of DeepSeek
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    **_OWN_HEADS,
}
_ROUTED = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
_GEMMA3N = {
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 4,
    "laurel_rank": 2,
    "altup_num_inputs": 2,
    "intermediate_size": 384,  # as in the real ones, all else is small beside it
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True)
class Family:
    """A family that trains.

    Attributes:
        values: what its configuration has beside :data:`SHAPE`, with ``model_type``.
        tied: whether embedding and head are one tensor; for each family as its best known models have it.
        compiles: whether its blocks go through ``torch.compile``; a soak test proves it.
        shape: in place of :data:`SHAPE`.
    """

    values: dict[str, Any]
    tied: bool = False
    compiles: bool = True
    shape: dict[str, Any] = field(default_factory=lambda: SHAPE)

    @property
    def config(self) -> dict[str, Any]:
        """Values for ``model.config``."""
        return {**self.shape, **self.values, "tie_word_embeddings": self.tied}


FAMILIES: dict[str, Family] = {
    "Qwen2, Qwen2.5": Family({"model_type": "qwen2"}, tied=True),
    "Qwen2 MoE": Family({"model_type": "qwen2_moe", **_EXPERTS, "shared_expert_intermediate_size": 16}),
    "Qwen3": Family({"model_type": "qwen3", **_HEAD}, tied=True),
    "Qwen3 MoE": Family({"model_type": "qwen3_moe", **_HEAD, **_EXPERTS}),
    "Llama 2": Family({"model_type": "llama"}),
    "Llama 3.x": Family({"model_type": "llama", "rope_parameters": _LLAMA3}, tied=True),
    "Mistral": Family({"model_type": "mistral", "sliding_window": 4}),
    "Mixtral": Family({"model_type": "mixtral", **_LOCAL_EXPERTS}),
    "Gemma": Family({"model_type": "gemma", **_HEAD}, tied=True),
    "Gemma 2": Family({"model_type": "gemma2", **_HEAD, **_MIXED}, tied=True),
    "Gemma 3 (text)": Family({"model_type": "gemma3_text", **_HEAD, **_MIXED}, tied=True),
    "Gemma 3n (text)": Family({"model_type": "gemma3n_text", **_HEAD, **_MIXED, **_GEMMA3N}, tied=True),
    "Phi-1, Phi-2": Family({"model_type": "phi", **_OWN_HEADS}),
    "Phi-3, Phi-4": Family({"model_type": "phi3", "sliding_window": 4}),
    "GPT-2": Family({"model_type": "gpt2"}, tied=True, shape=_GPT2),
    "GPT-NeoX": Family({"model_type": "gpt_neox", **_OWN_HEADS}),
    "OPT": Family(
        {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, **_OWN_HEADS},
        tied=True,
    ),
    "OLMo 2": Family({"model_type": "olmo2"}),
    "OLMo 3": Family({"model_type": "olmo3", **_MIXED}),
    "OLMoE": Family({"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2}),
    "StarCoder2": Family({"model_type": "starcoder2", "sliding_window": 4}, tied=True),
    "SmolLM3": Family({"model_type": "smollm3"}, tied=True),
    "Granite": Family({"model_type": "granite", "logits_scaling": 8.0}, tied=True),
    "Granite MoE": Family({"model_type": "granitemoe", **_LOCAL_EXPERTS, "logits_scaling": 6.0}, tied=True),
    "Cohere": Family({"model_type": "cohere", "logit_scale": 0.25}, tied=True),
    "Cohere 2": Family({"model_type": "cohere2", **_HEAD, **_MIXED, "logit_scale": 0.25}, tied=True),
    "GLM-4": Family({"model_type": "glm4", **_HEAD}),
    "GLM-4 MoE": Family({"model_type": "glm4_moe", **_HEAD, **_ROUTED}),
    "DeepSeek-V3": Family({"model_type": "deepseek_v3", **_LATENT, **_ROUTED}),
    "gpt-oss": Family({"model_type": "gpt_oss", **_HEAD, **_LOCAL_EXPERTS, **_MIXED}),
}


@dataclass(frozen=True)
class Refused:
    """A family that is refused.

    Attributes:
        values: its configuration.
        reason: for the table.
        message: words of the error.
    """

    values: dict[str, Any]
    reason: str
    message: str


_CANNOT_EXCHANGE = "does not let its attention be exchanged"
_STATE = "carries a state over boundaries"
_ALIBI = "attention of its own (ALiBi)"


def _no_boundaries(kind: str) -> str:
    return rf"layers of type {kind}, which do not stop at boundaries"


REFUSED: dict[str, Refused] = {
    "Mamba": Refused({**SHAPE, "model_type": "mamba"}, _STATE, _CANNOT_EXCHANGE),
    "Mamba 2": Refused(
        {**SHAPE, "model_type": "mamba2", "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
        _STATE,
        _CANNOT_EXCHANGE,
    ),
    "RWKV": Refused({**SHAPE, "model_type": "rwkv", "attention_hidden_size": 32}, _STATE, _CANNOT_EXCHANGE),
    "Falcon-H1": Refused({**SHAPE, "model_type": "falcon_h1"}, _STATE, _CANNOT_EXCHANGE),
    "RecurrentGemma": Refused(
        {**SHAPE, "model_type": "recurrent_gemma", **_HEAD, "lru_width": 32, "num_hidden_layers": 3},
        _STATE,
        _no_boundaries("linear_attention"),
    ),
    "MiniMax": Refused(
        {**SHAPE, "model_type": "minimax", **_LOCAL_EXPERTS}, _STATE, _no_boundaries("linear_attention")
    ),
    "Qwen3-Next": Refused(
        {
            **SHAPE,
            "model_type": "qwen3_next",
            **_HEAD,
            **_EXPERTS,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "shared_expert_intermediate_size": 16,
        },
        _STATE,
        _CANNOT_EXCHANGE,
    ),
    "LFM2": Refused(
        {**SHAPE, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        "convolutions over tokens",
        _no_boundaries("conv"),
    ),
    "Llama 4": Refused(
        {**SHAPE, "model_type": "llama4_text", **_HEAD},
        "chunks counted from the start of a row",
        _no_boundaries("chunked_attention"),
    ),
    "Falcon": Refused({**SHAPE, "model_type": "falcon"}, _ALIBI, _CANNOT_EXCHANGE),
    "BLOOM": Refused({**SHAPE, "model_type": "bloom"}, _ALIBI, _CANNOT_EXCHANGE),
    "MPT": Refused(
        {"model_type": "mpt", "vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2},
        _ALIBI,
        _CANNOT_EXCHANGE,
    ),
    "StableLM": Refused({**SHAPE, "model_type": "stablelm"}, "attention of its own", _CANNOT_EXCHANGE),
    "Nemotron": Refused(
        {**SHAPE, "model_type": "nemotron"}, "attention of its own", "something is carried over boundaries"
    ),
    "T5": Refused({"model_type": "t5"}, "encoder-decoder", "t5 is an encoder-decoder"),
    "BART": Refused({"model_type": "bart"}, "encoder-decoder", "bart is an encoder-decoder"),
    "BERT": Refused({"model_type": "bert"}, "encoder", "bert is an encoder"),
    "Qwen2-VL": Refused({"model_type": "qwen2_vl"}, "images", "qwen2_vl is nothing that predicts"),
    "ViT": Refused({"model_type": "vit"}, "images", "vit is nothing that predicts the next token"),
}

GEMMA3_WITH_VISION: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {**SHAPE, **_HEAD, **_MIXED},
    "vision_config": _VISION,
    "mm_tokens_per_image": 4,
    "image_token_index": 63,
    "boi_token_index": 61,
    "eoi_token_index": 62,
}
FAMILIES["Gemma 3 (whole, on text)"] = Family(GEMMA3_WITH_VISION, tied=True, shape={})
