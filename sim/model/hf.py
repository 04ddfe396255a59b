"""Hugging Face ``config.json`` -> sizes of a transformer, offline and without their library.

A family is one entry of ``FAMILIES``; spellings of a key are one entry of ``ALIASES``. An unknown
``model_type`` is refused with the list of known ones, because a guess would be wrong silently.
"""

from __future__ import annotations

import difflib
from typing import Any, Literal

import msgspec

from sim.errors import InputError
from sim.model.shape import Mla, Moe, Shape
from sim.spec.load import Source

__all__ = ["ALIASES", "FAMILIES", "Family", "is_hf_config", "read_shape"]

ALIASES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab": ("vocab_size",),
    "max_seq": ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token"),
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
    "tied": ("tie_word_embeddings",),
}


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What a ``model_type`` fixes beyond its sizes.

    Args:
        gated: MLP of three matrices. layer_norm: LayerNorm, else RMSNorm.
        attention_norms, mlp_norms: norms per block. qk_norm: per-head norm of queries and keys.
        bias: "none", "qkv" (queries, keys and values), "all" (every product), "key" (as the
            config's attention_bias and mlp_bias say).
        learned_positions: rows of the position table beyond max_seq; None for rotary or ALiBi.
        tied: default of tie_word_embeddings. head_dim: default, 0 for hidden / heads.
        ffn_ratio: default inner width over hidden; 0 makes the key required.
        embedding_norm: a norm follows the embedding. moe: where expert sizes come from. mla: latent
            attention.
    """

    gated: bool = True
    layer_norm: bool = False
    attention_norms: int = 1
    mlp_norms: int = 1
    qk_norm: bool = False
    bias: Literal["none", "qkv", "all", "key"] = "none"
    learned_positions: int | None = None
    tied: bool = False
    head_dim: int = 0
    ffn_ratio: int = 0
    embedding_norm: bool = False
    moe: Literal["none", "mixtral", "qwen", "deepseek"] = "none"
    mla: bool = False


_GPT = Family(gated=False, layer_norm=True, bias="all", tied=True, ffn_ratio=4)

FAMILIES: dict[str, Family] = {
    "llama": Family(bias="key"),
    "mistral": Family(),
    "qwen2": Family(bias="qkv"),
    "qwen3": Family(bias="key", qk_norm=True, head_dim=128),
    "gemma": Family(bias="key", tied=True, head_dim=256),
    "gemma2": Family(bias="key", tied=True, head_dim=256, attention_norms=2, mlp_norms=2),
    "mixtral": Family(moe="mixtral"),
    "qwen2_moe": Family(bias="qkv", moe="qwen"),
    "qwen3_moe": Family(bias="key", qk_norm=True, head_dim=128, moe="qwen"),
    "deepseek_v2": Family(bias="key", moe="deepseek", mla=True),
    "deepseek_v3": Family(bias="key", moe="deepseek", mla=True),
    "gpt2": msgspec.structs.replace(_GPT, learned_positions=0),
    "gpt_neox": msgspec.structs.replace(_GPT, tied=False),
    "opt": msgspec.structs.replace(_GPT, learned_positions=2),
    "bloom": msgspec.structs.replace(_GPT, embedding_norm=True),
}


def is_hf_config(data: dict[str, Any]) -> bool:
    """Return True for a mapping that looks like a Hugging Face config."""
    return "model_type" in data or "text_config" in data or "architectures" in data


def read_shape(source: Source, name: str) -> tuple[Shape, tuple[str, ...]]:
    """Read the sizes of a model.

    Args:
        source: the config; a ``text_config`` inside is used in its place. name: for people.

    Returns:
        The sizes, and in words what had to be assumed.

    Raises:
        InputError: unknown model_type; a missing, non-integer or inconsistent size.
    """
    config = _Config(source)
    model_type = str(config.data.get("model_type", ""))
    family = FAMILIES.get(model_type)
    if family is None:
        close = difflib.get_close_matches(model_type, FAMILIES, n=1)
        raise config.error(
            "unknown model_type" + (f"; the nearest known one is {close[0]}" if close else ""),
            "model_type",
            "one of " + ", ".join(sorted(FAMILIES)),
        )
    hidden, heads = config.size("hidden"), config.size("heads")
    mla = _mla(config) if family.mla else None
    head_dim = mla.nope_dim + mla.rope_dim if mla else _head_dim(config, family, hidden, heads)
    kv_heads = heads if mla else config.size("kv_heads", heads)
    if heads % kv_heads:
        raise config.error(f"{heads} query heads over {kv_heads}", "kv_heads", "a divisor of them")
    layers, max_seq = config.size("layers"), config.size("max_seq", 0)
    ffn = config.size("ffn", family.ffn_ratio * hidden or None)
    attention_bias, mlp_bias = _biases(config, family)
    learned = family.learned_positions
    embedding_dim = config.size("word_embed_proj_dim", hidden)
    post_norm = config.data.get("do_layer_norm_before") is False
    shape = Shape(
        name=name,
        family=model_type,
        num_layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=config.size("v_dim") if mla else head_dim,
        ffn=ffn,
        gated=family.gated,
        vocab=config.size("vocab"),
        max_seq=max_seq,
        tied=config.flag("tied", family.tied),
        layer_norm=family.layer_norm,
        attention_norms=family.attention_norms,
        mlp_norms=family.mlp_norms,
        qk_norm=family.qk_norm,
        qkv_bias=attention_bias,
        out_bias=attention_bias and family.bias != "qkv",
        mlp_bias=mlp_bias,
        positions=config.size("max_seq") + learned if learned is not None else 0,
        embedding_dim=embedding_dim if embedding_dim != hidden else 0,
        embedding_norm=family.embedding_norm,
        final_norm=not post_norm,
        moe=_moe(config, family, layers),
        mla=mla,
    )
    return shape, _assumptions(config)


class _Config:
    """A config with its aliases; errors name the file's own spelling of a key."""

    def __init__(self, source: Source) -> None:
        nested = source.data.get("text_config")
        self.source = source
        self.path: tuple[str, ...] = ("text_config",) if isinstance(nested, dict) else ()
        self.data: dict[str, Any] = nested if isinstance(nested, dict) else source.data

    def key(self, field: str) -> str:
        """Return the spelling of a field that the file uses."""
        names = ALIASES.get(field, (field,))
        return next((n for n in names if self.data.get(n) is not None), names[0])

    def size(self, field: str, default: int | None = None) -> int:
        """Return a positive whole number; a missing one is an error unless there is a default."""
        key = self.key(field)
        value = self.data.get(key)
        if value is None:
            if default is None:
                names = " or ".join(ALIASES[field])
                raise self.error("a required key is missing", field, names)
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error("not a size", field, "a whole number")
        if value == 0 and default is None:
            raise self.error("a size of zero", field, "at least 1")
        return value

    def flag(self, field: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.data.get(self.key(field), default)
        if not isinstance(value, bool):
            raise self.error("not a switch", field, "true or false")
        return value

    def error(self, message: str, field: str, expected: str) -> InputError:
        """Return the error for a field, with file and line."""
        key = (*self.path, self.key(field))
        found = self.data.get(self.key(field))
        return InputError(
            message,
            self.source.file,
            self.source.line(key),
            ".".join(key),
            "" if found is None else str(found)[:80],
            expected,
        )


def _head_dim(config: _Config, family: Family, hidden: int, heads: int) -> int:
    stated = config.size("head_dim", family.head_dim)
    if stated:
        return stated
    if hidden % heads:
        raise config.error(f"hidden size {hidden} over {heads} heads", "heads", "a divisor of it")
    return hidden // heads


def _biases(config: _Config, family: Family) -> tuple[bool, bool]:
    """Return whether attention and MLP products have biases."""
    if family.bias == "all":
        every = config.flag("all_bias", True)
        return config.flag("bias", every), every
    if family.bias == "key":
        return config.flag("bias", False), config.flag("mlp_bias", False)
    return family.bias == "qkv", False


def _mla(config: _Config) -> Mla:
    return Mla(
        q_rank=config.size("q_rank", 0),
        kv_rank=config.size("kv_rank"),
        rope_dim=config.size("rope_dim"),
        nope_dim=config.size("nope_dim"),
    )


def _moe(config: _Config, family: Family, layers: int) -> Moe | None:
    if family.moe == "none" or (family.moe == "deepseek" and not config.size("experts", 0)):
        return None
    experts, top_k = config.size("experts"), config.size("top_k")
    if top_k > experts:
        raise config.error(f"{top_k} experts per token of {experts}", "top_k", f"up to {experts}")
    data = config.data
    ffn = config.size("ffn") if family.moe == "mixtral" else config.size("expert_ffn")
    dense: set[int] = set()
    if family.moe == "qwen":
        step = config.size("decoder_sparse_step", 1) or 1
        dense = {i for i in range(layers) if (i + 1) % step} | set(
            data.get("mlp_only_layers") or ()
        )
    elif family.moe == "deepseek":
        first = config.size("first_k_dense_replace", 0)
        every = config.size("moe_layer_freq", 1) or 1
        dense = {i for i in range(layers) if i < first or i % every}
    shared = config.size("shared_experts", 0) * ffn or config.size("shared_ffn", 0)
    return Moe(
        num_experts=experts,
        top_k=top_k,
        ffn=ffn,
        shared_ffn=shared,
        shared_gate=family.moe == "qwen" and shared > 0,
        selection_bias=data.get("topk_method") == "noaux_tc",
        dense_layers=tuple(sorted(dense)),
    )


def _assumptions(config: _Config) -> tuple[str, ...]:
    data, notes = config.data, []
    window = data.get("sliding_window")
    if window and data.get("use_sliding_window", True):
        notes.append(f"attention is costed over the whole sequence, not a window of {window}")
    if data.get("num_nextn_predict_layers"):
        notes.append("layers that predict further tokens are left out")
    if config.path:
        notes.append("only the text part of the model is read")
    return tuple(notes)
