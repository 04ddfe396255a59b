"""Sizes of a model under plain keys, as tables of published models have them.

No ``model_type`` stands behind such sizes, so norms and biases follow from the MLP: those of Llama
where it is gated, of GPT-2 (with rotary positions) where it is not.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field

import hardware_profiles
from sim.errors import InputError
from sim.model.count import total_params
from sim.model.graph import Model
from sim.model.hf import MAX_LAYERS, MAX_SIZE
from sim.model.shape import Mla, Moe, Shape
from sim.model.transformer import build_model
from sim.spec.fields import Count, Doc
from sim.spec.load import Source, validate

__all__ = ["SizesDoc", "is_sizes", "model_from_sizes", "published", "published_names"]

Size = Annotated[Count, Field(ge=1, le=MAX_SIZE)]
Amount = Annotated[Count, Field(ge=0, le=MAX_SIZE)]
Layers = Annotated[Count, Field(ge=1, le=MAX_LAYERS)]
_SAME = 1e-3
"""Relative difference up to which a stated number of parameters is that of the sizes."""


class MlaDoc(Doc):
    """Latent attention: the keys of a DeepSeek config; ``q_lora_rank`` None for whole queries."""

    q_lora_rank: Size | None = None
    kv_lora_rank: Size
    qk_rope_head_dim: Size
    qk_nope_head_dim: Size
    v_head_dim: Size


class SizesDoc(Doc):
    """Sizes of one model; keys as in Hugging Face configs where these have them.

    Args:
        type: routed experts or not. mlp: what lies between its products.
        dense_layers: number of first layers without experts, of width ``dense_intermediate_size``.
        shared_expert_intermediate_size: of all shared experts together. max_seq: longest sequence.
        params_computed: parameters without norms, biases and positions; it must follow from the
            sizes. active_params_computed: of one token, likewise without them; for people.
        source, note: for people.
    """

    name: str = Field(min_length=1)
    type: Literal["dense", "moe"] = "dense"
    num_hidden_layers: Layers
    hidden_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size | None = None
    vocab_size: Size
    mlp: Literal["swiglu", "geglu", "gelu", "relu", "squared relu"] = "swiglu"
    tie_word_embeddings: bool = False
    max_seq: Amount = 0
    num_experts: Size | None = None
    num_experts_per_tok: Size | None = None
    moe_intermediate_size: Size | None = None
    shared_expert_intermediate_size: Amount = 0
    dense_layers: Annotated[Count, Field(ge=0, le=MAX_LAYERS)] = 0
    dense_intermediate_size: Amount = 0
    mla: MlaDoc | None = None
    params_computed: Count | None = None
    active_params_computed: Count | None = None
    source: str = ""
    note: str = ""


def is_sizes(data: dict[str, Any]) -> bool:
    """Return True for a mapping that looks like such sizes."""
    return "num_hidden_layers" in data and ("mlp" in data or data.get("type") in ("dense", "moe"))


def model_from_sizes(
    source: Source, flash: bool = True, dropout: bool = False, name: str = ""
) -> Model:
    """Read a model from its sizes.

    Args:
        source: one mapping of sizes. flash, dropout: see sim.model.load. name: for people.

    Raises:
        InputError: a missing or wrong size, or a stated count that does not follow from them.
    """
    doc = validate(SizesDoc, source)
    style = "Llama" if _gated(doc) else "GPT-2, positions rotary"
    model = build_model(
        _shape(doc, source, name or doc.name), flash, dropout, (f"norms and biases as in {style}",)
    )
    count = total_params(model, norms=False)
    if doc.params_computed and abs(count - doc.params_computed) > _SAME * doc.params_computed:
        raise _error(
            source,
            "params_computed",
            "not what the sizes give",
            str(doc.params_computed),
            f"{count}",
        )
    return model


def _gated(doc: SizesDoc) -> bool:
    return doc.mlp in ("swiglu", "geglu")


def _shape(doc: SizesDoc, source: Source, name: str) -> Shape:
    heads, kv_heads = doc.num_attention_heads, doc.num_key_value_heads or doc.num_attention_heads
    if heads % kv_heads:
        found = f"{heads} query heads over {kv_heads}"
        raise _error(
            source, "num_key_value_heads", "not a divisor", found, "a divisor of the heads"
        )
    if doc.head_dim is None and doc.mla is None and doc.hidden_size % heads:
        found = f"{doc.hidden_size} over {heads} heads"
        raise _error(source, "num_attention_heads", "heads of no whole width", found, "head_dim")
    mla = doc.mla
    head_dim = doc.head_dim or doc.hidden_size // heads
    if mla is not None:
        head_dim, kv_heads = mla.qk_nope_head_dim + mla.qk_rope_head_dim, heads
    gated = _gated(doc)
    moe = _moe(doc, source) if doc.type == "moe" else None
    ffn = doc.intermediate_size or doc.dense_intermediate_size
    if moe is None and not ffn:
        raise _error(source, "intermediate_size", "a required key is missing", "", "a size")
    return Shape(
        name=name,
        family="sizes",
        num_layers=doc.num_hidden_layers,
        hidden=doc.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=mla.v_head_dim if mla is not None else head_dim,
        ffn=ffn,
        gated=gated,
        vocab=doc.vocab_size,
        max_seq=doc.max_seq,
        tied=doc.tie_word_embeddings,
        layer_norm=not gated,
        qkv_bias=not gated,
        out_bias=not gated,
        mlp_bias=not gated,
        moe=moe,
        mla=Mla(
            q_rank=mla.q_lora_rank or 0,
            kv_rank=mla.kv_lora_rank,
            rope_dim=mla.qk_rope_head_dim,
            nope_dim=mla.qk_nope_head_dim,
        )
        if mla is not None
        else None,
    )


def _moe(doc: SizesDoc, source: Source) -> Moe:
    experts, top_k, ffn = doc.num_experts, doc.num_experts_per_tok, doc.moe_intermediate_size
    if experts is None or top_k is None or ffn is None:
        keys = {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": ffn}
        missing = next(k for k, v in keys.items() if v is None)
        raise _error(source, missing, "a required key is missing", "", "a size")
    if top_k > experts:
        found = f"{top_k} experts per token of {experts}"
        raise _error(source, "num_experts_per_tok", "too many", found, f"up to {experts}")
    return Moe(
        num_experts=experts,
        top_k=top_k,
        ffn=ffn,
        shared_ffn=doc.shared_expert_intermediate_size,
        dense_layers=tuple(range(doc.dense_layers)),
    )


def _error(source: Source, key: str, message: str, found: str, expected: str) -> InputError:
    return InputError(message, source.file, source.line((key,)), key, found, expected)


@lru_cache(maxsize=1)
def _published() -> dict[str, dict[str, Any]]:
    text = hardware_profiles.folder().joinpath("model_sizes.json").read_text(encoding="utf-8")
    return {row["name"]: row for row in json.loads(text)["models"]}


def published_names() -> tuple[str, ...]:
    """Return the names of the bundled published models."""
    return tuple(_published())


def published(name: str) -> Source | None:
    """Return the sizes of a bundled published model, None for another name."""
    row = _published().get(name)
    return None if row is None else Source(dict(row), name)
