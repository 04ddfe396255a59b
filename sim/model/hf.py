"""Hugging Face ``config.json`` -> sizes of a transformer, offline and without their library.

A family is one entry of ``families.FAMILIES``, spellings of a key one of ``families.ALIASES``. An
unknown ``model_type`` is refused with the list of known ones: a guess would be wrong silently.
"""

from __future__ import annotations

import difflib
from typing import Any

from sim.errors import InputError
from sim.model.families import ALIASES, FAMILIES, Family
from sim.model.shape import Mla, Moe, Shape
from sim.spec.load import Source

__all__ = ["MAX_LAYERS", "MAX_SIZE", "is_hf_config", "read_shape"]

MAX_SIZE = 2**40
"""Largest size of a config: products of a few stay exact in floating point."""
MAX_LAYERS = 10_000
"""Most layers: a file must not be able to exhaust memory."""


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
            "one of " + ", ".join(sorted(FAMILIES)) + "; nothing is assumed of an unknown one: "
            "where its layers are those of a known one, write that model_type",
        )
    hidden, heads = config.size("hidden"), config.size("heads")
    mla = _mla(config) if family.mla else None
    head_dim = mla.nope_dim + mla.rope_dim if mla else _head_dim(config, family, hidden, heads)
    kv_heads = heads if mla else config.size("kv_heads", heads)
    if heads % kv_heads:
        raise config.error(f"{heads} query heads over {kv_heads}", "kv_heads", "a divisor of them")
    layers, max_seq = config.layers("layers"), config.size("max_seq", 0)
    ffn = config.size("ffn", config.size("ffn_ratio", family.ffn_ratio) * hidden or None)
    attention_bias, mlp_bias = _biases(config, family)
    learned = family.learned_positions
    embedding_dim = config.size("word_embed_proj_dim", hidden)
    post_norm = config.data.get("do_layer_norm_before") is False or not family.final_norm
    types = config.size("token_types", 0)
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
        gated=_gated(config, family),
        vocab=config.size("vocab"),
        max_seq=max_seq,
        tied=config.flag("tied", family.tied),
        layer_norm=family.layer_norm,
        attention_norms=family.attention_norms,
        mlp_norms=family.mlp_norms,
        qk_norm=family.qk_norm,
        qkv_bias=attention_bias,
        out_bias=family.bias == "rest" or (attention_bias and family.bias != "qkv"),
        mlp_bias=mlp_bias,
        positions=config.size("max_seq") + learned + types if learned is not None else 0,
        embedding_dim=embedding_dim if embedding_dim != hidden else 0,
        embedding_norm=family.embedding_norm,
        final_norm=not post_norm,
        causal=family.causal,
        decoder_layers=config.layers("decoder_layers", layers) if family.encoder_decoder else 0,
        relative_buckets=config.size("buckets", 32) if family.encoder_decoder else 0,
        head_transform=family.head_transform,
        moe=_moe(config, family, layers),
        mla=mla,
    )
    return shape, _assumptions(config, shape)


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
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SIZE:
            raise self.error("not a size", field, f"a whole number up to {MAX_SIZE}")
        if value == 0 and default is None:
            raise self.error("a size of zero", field, "at least 1")
        return value

    def layers(self, field: str, default: int | None = None) -> int:
        """Return a number of layers."""
        found = self.size(field, default)
        if found > MAX_LAYERS:
            raise self.error("too many layers", field, f"at most {MAX_LAYERS}")
        return found

    def indices(self, field: str) -> set[int]:
        """Return a list of layers as a set; a missing one is empty."""
        found = self.data.get(field) or []
        if not isinstance(found, list) or any(type(i) is not int for i in found):
            raise self.error("not a list of layers", field, "whole numbers")
        return set(found)

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
    if family.bias == "rest":
        return False, True
    return family.bias in ("qkv", "attention"), False


def _gated(config: _Config, family: Family) -> bool:
    """Whether the MLP multiplies two products, e.g. ``feed_forward_proj: gated-gelu``."""
    if not family.gate_key:
        return family.gated
    return str(config.data.get(family.gate_key, "")).startswith("gated")


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
    whole = family.moe in ("mixtral", "gpt_oss")  # all layers alike: one width
    ffn = config.size("ffn" if whole else "expert_ffn")
    dense: set[int] = set()
    if family.moe == "qwen":
        step = config.size("decoder_sparse_step", 1) or 1
        dense = {i for i in range(layers) if (i + 1) % step} | config.indices("mlp_only_layers")
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
        selection_bias=data.get("topk_method") == "noaux_tc" or family.moe == "gpt_oss",
        expert_bias=family.moe == "gpt_oss",
        dense_layers=tuple(sorted(dense)),
    )


def _assumptions(config: _Config, shape: Shape) -> tuple[str, ...]:
    data, notes = config.data, []
    window = data.get("sliding_window")
    if window and data.get("use_sliding_window", True):
        notes.append(f"attention is costed over the whole sequence, not a window of {window}")
    if data.get("num_nextn_predict_layers"):
        notes.append("layers that predict further tokens are left out")
    if shape.decoder_layers:
        notes.append("the decoder's sequences are taken to be as long as the encoder's")
        notes.append("gradients of the shared embedding meet between first and last stage only")
    if not shape.causal:
        notes.append("every token is predicted, where a masked model predicts some")
    if config.path:
        notes.append("only the text part of the model is read")
    return tuple(notes)
