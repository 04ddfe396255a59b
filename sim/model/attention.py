"""Attention blocks: grouped queries, latent attention, and attention over an encoder's output."""

from __future__ import annotations

import msgspec

from sim.model.graph import Attention, Block, Gemm, Saved
from sim.model.kept import dropout_mask, norm_inputs
from sim.model.shape import Shape

__all__ = ["attention_block", "cross_attention_block"]


class _Projections(msgspec.Struct, frozen=True, kw_only=True):
    """What comes before the attention core: products, parameters, and tensors kept on the way."""

    gemms: tuple[Gemm, ...]
    split: int
    replicated: int
    norms: int
    saved: tuple[Saved, ...]


def attention_block(
    s: Shape, layer: int, flash: bool, dropout: bool, *, causal: bool = True, positions: int = 0
) -> Block:
    """Return the self-attention half of a layer.

    Args:
        s: sizes. layer: label. flash: scores never reach memory. dropout: masks are kept.
        causal: only earlier tokens are seen. positions: parameters of a learned position bias.
    """
    queries, keys, values = s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.v_head_dim
    output = s.heads * s.v_head_dim
    core = Attention(
        heads=s.heads,
        kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        v_head_dim=s.v_head_dim,
        causal=causal,
        flash=flash,
    )
    parts = _mla_projections(s) if s.mla else _plain_projections(s)
    norms = s.attention_norms * s.norm_params
    replicated = norms + parts.replicated + s.hidden * s.out_bias
    rotary = 2.0 * (queries + keys)
    around = 5.0 * s.hidden + 2.0 * s.hidden * (s.attention_norms - 1)
    saved = (
        *norm_inputs(s, s.attention_norms),
        Saved(elements=s.hidden, split=False),
        *parts.saved,
        Saved(elements=queries + keys + values),
        *_core_saved(s, flash, dropout),
        Saved(elements=output),
        *dropout_mask(s, dropout),
    )
    return Block(
        name=f"layers.{layer}.attention",
        kind="attention",
        layer=layer,
        params=parts.split + output * s.hidden + positions,
        params_replicated=replicated,
        gemms=(*parts.gemms, Gemm(n=s.hidden, k=output, split="row")),
        attention=core,
        elementwise=around + rotary,
        elementwise_split=rotary / (around + rotary),
        saved=saved,
        input_elements=s.hidden,
        tp_collectives=1,
        norms=norms + parts.norms + s.hidden * s.out_bias + positions,
    )


def cross_attention_block(s: Shape, layer: int, flash: bool, dropout: bool) -> Block:
    """Return the block in which a decoder's tokens look at all of an encoder's output.

    Keys and values are made from as many tokens as queries: the encoder's sequences are taken to
    be as long as the decoder's.

    Args:
        s: sizes. layer: label. flash: scores never reach memory. dropout: masks are kept.
    """
    queries, pairs = s.heads * s.head_dim, s.kv_heads * (s.head_dim + s.v_head_dim)
    output = s.heads * s.v_head_dim
    bias = (queries + pairs) * s.qkv_bias
    norms = s.norm_params + s.hidden * s.out_bias
    return Block(
        name=f"layers.{layer}.cross",
        kind="attention",
        layer=layer,
        params=(queries + pairs) * s.hidden + output * s.hidden + bias,
        params_replicated=norms,
        gemms=(
            Gemm(n=queries, k=s.hidden),
            Gemm(n=pairs, k=s.hidden),
            Gemm(n=s.hidden, k=output, split="row"),
        ),
        attention=Attention(
            heads=s.heads,
            kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            v_head_dim=s.v_head_dim,
            causal=False,
            flash=flash,
        ),
        elementwise=5.0 * s.hidden,
        saved=(
            *norm_inputs(s, 1),
            Saved(elements=s.hidden, split=False),
            Saved(elements=queries + pairs),
            *_core_saved(s, flash, dropout),
            Saved(elements=output),
            *dropout_mask(s, dropout),
        ),
        input_elements=s.hidden,
        tp_collectives=1,
        norms=norms + bias,
    )


def _plain_projections(s: Shape) -> _Projections:
    width = (s.heads + s.kv_heads) * s.head_dim + s.kv_heads * s.v_head_dim
    bias = width * s.qkv_bias
    qk_norms = 2 * s.head_dim * s.qk_norm
    before_norm = (s.heads + s.kv_heads) * s.head_dim
    return _Projections(
        gemms=(Gemm(n=width, k=s.hidden),),
        split=width * s.hidden + bias,
        replicated=qk_norms,
        norms=bias + qk_norms,
        saved=(Saved(elements=before_norm),) if s.qk_norm else (),
    )


def _mla_projections(s: Shape) -> _Projections:
    """DeepSeek-V2 section 2.1: down-projections are replicated, up-projections split by head."""
    assert s.mla is not None
    m = s.mla
    queries = s.heads * s.head_dim
    keys_values = s.heads * (m.nope_dim + s.v_head_dim)
    down = m.q_rank + m.kv_rank + m.rope_dim
    latent_norms = m.q_rank + m.kv_rank
    bias = down * s.qkv_bias
    up_query = Gemm(n=queries, k=m.q_rank or s.hidden)
    return _Projections(
        gemms=(
            Gemm(n=down, k=s.hidden, split="none"),
            up_query,
            Gemm(n=keys_values, k=m.kv_rank),
        ),
        split=up_query.n * up_query.k + keys_values * m.kv_rank,
        replicated=down * s.hidden + latent_norms + bias,
        norms=latent_norms + bias,
        saved=(Saved(elements=2 * latent_norms + m.rope_dim, split=False),),
    )


def _core_saved(s: Shape, flash: bool, dropout: bool) -> tuple[Saved, ...]:
    if flash:
        return (Saved(elements=s.heads, nbytes=4, core=True),)
    softmax = Saved(elements=s.heads, core=True, per_key=True)
    if not dropout:
        return (softmax,)
    mask = Saved(elements=s.heads, nbytes=1, core=True, per_key=True)
    return (softmax, mask, softmax)
