"""What each ``model_type`` fixes beyond the sizes in a config, and the spellings of its keys."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["ALIASES", "FAMILIES", "Family"]

ALIASES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim", "d_kv"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "vocab": ("vocab_size",),
    "max_seq": (
        "max_position_embeddings",
        "n_positions",
        "max_sequence_length",
        "max_seq_len",
        "seq_length",
    ),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_ffn": ("shared_expert_intermediate_size",),
    "shared_experts": ("n_shared_experts", "num_shared_experts"),
    "q_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "nope_dim": ("qk_nope_head_dim",),
    "v_dim": ("v_head_dim",),
    "bias": ("attention_bias",),
    "all_bias": ("enable_bias", "use_bias"),
    "mlp_bias": ("mlp_bias",),
    "decoder_layers": ("num_decoder_layers",),
    "buckets": ("relative_attention_num_buckets",),
    "token_types": ("type_vocab_size",),
    "ffn_ratio": ("expansion_ratio",),
    "tied": ("tie_word_embeddings",),
}


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What a ``model_type`` fixes beyond its sizes.

    Args:
        gated: MLP of three matrices. layer_norm: LayerNorm, else a norm without bias.
        attention_norms, mlp_norms: norms per block. qk_norm: per-head norm of queries and keys.
        bias: "none", "qkv" (queries, keys and values), "attention" (these and the output), "rest"
            (all but queries, keys and values), "all" (every product), "key" (as the config's
            attention_bias and mlp_bias say).
        learned_positions: rows of the position table beyond max_seq; None for rotary or ALiBi.
        tied: default of tie_word_embeddings. head_dim: default, 0 for hidden / heads.
        ffn_ratio: default inner width over hidden; 0 makes the key required.
        embedding_norm: a norm follows the embedding. moe: where expert sizes come from. mla: latent
            attention. causal: tokens see earlier ones only. final_norm: one lies behind the layers.
        encoder_decoder: the config has a decoder of its own behind the encoder.
        head_transform: see sim.model.shape.Shape. gate_key: key that says if the MLP is gated.
    """

    gated: bool = True
    layer_norm: bool = False
    attention_norms: int = 1
    mlp_norms: int = 1
    qk_norm: bool = False
    bias: Literal["none", "qkv", "attention", "rest", "all", "key"] = "none"
    learned_positions: int | None = None
    tied: bool = False
    head_dim: int = 0
    ffn_ratio: int = 0
    embedding_norm: bool = False
    moe: Literal["none", "mixtral", "qwen", "deepseek", "gpt_oss"] = "none"
    mla: bool = False
    causal: bool = True
    final_norm: bool = True
    encoder_decoder: bool = False
    head_transform: bool = False
    gate_key: str = ""


_GEMMA = Family(bias="key", tied=True, head_dim=256, attention_norms=2, mlp_norms=2)
_DEEPSEEK = Family(bias="key", moe="deepseek", mla=True)
_BERT = Family(
    gated=False, layer_norm=True, bias="all", tied=True, learned_positions=0, embedding_norm=True,
    causal=False, final_norm=False, head_transform=True,
)  # fmt: skip
_T5 = Family(gated=False, tied=True, encoder_decoder=True, gate_key="feed_forward_proj")
_GPT = Family(gated=False, layer_norm=True, bias="all", tied=True, ffn_ratio=4)

FAMILIES: dict[str, Family] = {
    "llama": Family(bias="key"),
    "mistral": Family(),
    "phi3": Family(),
    "qwen2": Family(bias="qkv"),
    "qwen3": Family(bias="key", qk_norm=True, head_dim=128),
    "gemma": Family(bias="key", tied=True, head_dim=256),
    "gemma2": _GEMMA,
    "gemma3": msgspec.structs.replace(_GEMMA, qk_norm=True),
    "gemma3_text": msgspec.structs.replace(_GEMMA, qk_norm=True),
    "mixtral": Family(moe="mixtral"),
    "qwen2_moe": Family(bias="qkv", moe="qwen"),
    "qwen3_moe": Family(bias="key", qk_norm=True, head_dim=128, moe="qwen"),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "gpt_oss": Family(bias="attention", moe="gpt_oss"),
    "gpt2": msgspec.structs.replace(_GPT, learned_positions=0),
    "gpt_neox": msgspec.structs.replace(_GPT, tied=False),
    "opt": msgspec.structs.replace(_GPT, learned_positions=2),
    "bloom": msgspec.structs.replace(_GPT, embedding_norm=True),
    "gpt_neo": msgspec.structs.replace(_GPT, bias="rest", learned_positions=0),
    "mpt": Family(gated=False, tied=True, ffn_ratio=4),
    "bert": _BERT,
    "roberta": _BERT,
    "t5": _T5,
    "mt5": _T5,
}
