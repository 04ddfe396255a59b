"""Sizes of a transformer -> blocks with products, saved tensors, traffic and parameters.

A layer is an attention block and an MLP (or MoE) block; each begins with its norm and ends with its
residual addition. What the backward pass keeps follows Korthikanti et al. 2022 (arXiv:2205.05198,
section 4.1): s b h (34 + 5 a s / h) bytes per layer for GPT with dropout and 2-byte elements. Where
we depart: fused attention keeps a 4-byte log-sum-exp per head and token in place of the scores;
dropout masks are left out when the job has no dropout; a gated MLP keeps gate, up and their
product (fused activation); experts keep what a dense MLP keeps, once per routed copy of a token,
and the copy's input and output.
"""

from __future__ import annotations

import itertools

import msgspec

from sim.model.graph import Attention, Block, Edge, Gemm, Model, Saved
from sim.model.shape import Shape

__all__ = ["build_model"]

TIED = "embedding.weight"


class _Projections(msgspec.Struct, frozen=True, kw_only=True):
    """What comes before the attention core: products, parameters, and tensors kept on the way."""

    gemms: tuple[Gemm, ...]
    split: int
    replicated: int
    norms: int
    saved: tuple[Saved, ...]


def build_model(
    shape: Shape,
    flash: bool = True,
    dropout: bool = False,
    assumptions: tuple[str, ...] = (),
) -> Model:
    """Build the chain of blocks of a decoder-only transformer.

    Args:
        shape: sizes. flash: attention scores never reach memory.
        dropout: masks are kept for the backward pass. assumptions: what the reader had to assume.
    """
    blocks = [_embedding(shape, dropout)]
    for layer in range(shape.num_layers):
        blocks.append(_attention(shape, layer, flash, dropout))
        if shape.moe is None or layer in shape.moe.dense_layers:
            blocks.append(_mlp(shape, layer, dropout))
        else:
            blocks.append(_moe(shape, layer, dropout))
    blocks.append(_head(shape))
    edges = [
        Edge(src=a.name, dst=b.name, elements=shape.hidden) for a, b in itertools.pairwise(blocks)
    ]
    return Model(
        name=shape.name,
        family=shape.family,
        blocks=tuple(blocks),
        edges=tuple(edges),
        num_layers=shape.num_layers,
        hidden=shape.hidden,
        max_seq=shape.max_seq,
        assumptions=assumptions,
    )


def _embedding(s: Shape, dropout: bool) -> Block:
    width = s.embedding_dim or s.hidden
    project = (Gemm(n=s.hidden, k=width, split="none"),) if s.embedding_dim else ()
    positions = s.positions * s.hidden
    norm = s.norm_params if s.embedding_norm else 0
    saved = [Saved(elements=1, nbytes=8, split=False)]  # the token ids
    if s.embedding_norm:
        saved.append(Saved(elements=s.hidden, split=False))
    if s.embedding_dim:
        saved.append(Saved(elements=width, split=False))
    return Block(
        name="embedding",
        kind="embedding",
        layer=-1,
        params=s.vocab * width,
        params_replicated=positions + norm + width * s.hidden * bool(s.embedding_dim),
        gemms=project,
        elementwise=2.0 * width + (2.0 * s.hidden if positions or s.embedding_norm else 0.0),
        saved=(*saved, *_mask(s, dropout)),
        tp_collectives=1,
        vocab=s.vocab,
        shares=TIED if s.tied else "",
        norms=positions + norm,
    )


def _head(s: Shape) -> Block:
    width = s.embedding_dim or s.hidden
    project = (Gemm(n=width, k=s.hidden, split="none"),) if s.embedding_dim else ()
    norm = s.norm_params if s.final_norm else 0
    saved = [Saved(elements=width, split=False)]
    if s.final_norm or s.embedding_dim:
        saved.append(Saved(elements=s.hidden, split=False))
    loss = 3.0 * s.vocab  # the logits are read twice and written once by the cross entropy
    around = 2.0 * s.hidden
    return Block(
        name="head",
        kind="head",
        layer=s.num_layers,
        params=s.vocab * width,
        params_replicated=norm + width * s.hidden * bool(s.embedding_dim),
        gemms=(*project, Gemm(n=s.vocab, k=width)),
        elementwise=loss + around,
        elementwise_split=loss / (loss + around),
        saved=tuple(saved),
        input_elements=s.hidden,
        vocab=s.vocab,
        logits_elements=s.vocab,
        shares=TIED if s.tied else "",
        norms=norm,
    )


def _attention(s: Shape, layer: int, flash: bool, dropout: bool) -> Block:
    queries, keys, values = s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.v_head_dim
    output = s.heads * s.v_head_dim
    core = Attention(
        heads=s.heads,
        kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        v_head_dim=s.v_head_dim,
        flash=flash,
    )
    parts = _mla_projections(s) if s.mla else _plain_projections(s)
    norms = s.attention_norms * s.norm_params
    replicated = norms + parts.replicated + s.hidden * s.out_bias
    rotary = 2.0 * (queries + keys)
    around = 5.0 * s.hidden + 2.0 * s.hidden * (s.attention_norms - 1)
    saved = (
        *_norm_inputs(s, s.attention_norms),
        Saved(elements=s.hidden, split=False),
        *parts.saved,
        Saved(elements=queries + keys + values),
        *_core_saved(s, flash, dropout),
        Saved(elements=output),
        *_mask(s, dropout),
    )
    return Block(
        name=f"layers.{layer}.attention",
        kind="attention",
        layer=layer,
        params=parts.split + output * s.hidden,
        params_replicated=replicated,
        gemms=(*parts.gemms, Gemm(n=s.hidden, k=output, split="row")),
        attention=core,
        elementwise=around + rotary,
        elementwise_split=rotary / (around + rotary),
        saved=saved,
        input_elements=s.hidden,
        tp_collectives=1,
        norms=norms + parts.norms + s.hidden * s.out_bias,
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


def _mlp(s: Shape, layer: int, dropout: bool) -> Block:
    inner = (2 if s.gated else 1) * s.ffn
    bias = s.ffn * s.mlp_bias
    out_bias = s.hidden * s.mlp_bias
    norms = s.mlp_norms * s.norm_params
    activation = float(inner + s.ffn)
    around = 5.0 * s.hidden + 2.0 * s.hidden * (s.mlp_norms - 1)
    return Block(
        name=f"layers.{layer}.mlp",
        kind="mlp",
        layer=layer,
        params=inner * s.hidden + s.ffn * s.hidden + bias,
        params_replicated=norms + out_bias,
        gemms=(Gemm(n=inner, k=s.hidden), Gemm(n=s.hidden, k=s.ffn, split="row")),
        elementwise=around + activation,
        elementwise_split=activation / (around + activation),
        saved=(
            *_norm_inputs(s, s.mlp_norms),
            Saved(elements=s.hidden, split=False),
            Saved(elements=inner),
            Saved(elements=s.ffn),
            *_mask(s, dropout),
        ),
        input_elements=s.hidden,
        tp_collectives=1,
        norms=norms + bias + out_bias,
    )


def _moe(s: Shape, layer: int, dropout: bool) -> Block:
    assert s.moe is not None
    m = s.moe
    sides = 2 if s.gated else 1
    norms = s.mlp_norms * s.norm_params
    router_bias = m.num_experts * m.selection_bias
    gemms = [
        Gemm(n=m.num_experts, k=s.hidden, split="none"),
        Gemm(n=sides * m.ffn, k=s.hidden, routed=True),
        Gemm(n=s.hidden, k=m.ffn, split="row", routed=True),
    ]
    saved = [
        *_norm_inputs(s, s.mlp_norms),
        Saved(elements=s.hidden, split=False),
        Saved(elements=m.num_experts, nbytes=4, split=False),
        Saved(elements=2 * s.hidden, split=False, routed=True),
        Saved(elements=(sides + 1) * m.ffn, routed=True),
    ]
    if m.shared_ffn:
        gemms += [
            Gemm(n=sides * m.shared_ffn, k=s.hidden),
            Gemm(n=s.hidden, k=m.shared_ffn, split="row"),
        ]
        saved.append(Saved(elements=(sides + 1) * m.shared_ffn))
    activation = (sides + 1.0) * (m.top_k * m.ffn + m.shared_ffn)
    # Norm and residual, then the permutation to experts and back: every copy is read and written.
    around = 5.0 * s.hidden + (3.0 * m.top_k + 2.0) * s.hidden + 3.0 * m.num_experts
    return Block(
        name=f"layers.{layer}.moe",
        kind="moe",
        layer=layer,
        params=(sides + 1) * s.hidden * m.shared_ffn,
        params_replicated=norms + s.hidden * m.num_experts + router_bias + s.hidden * m.shared_gate,
        params_experts=m.num_experts * (sides + 1) * s.hidden * m.ffn,
        num_experts=m.num_experts,
        top_k=m.top_k,
        gemms=tuple(gemms),
        elementwise=around + activation,
        elementwise_split=activation / (around + activation),
        saved=(*saved, *_mask(s, dropout)),
        input_elements=s.hidden,
        tp_collectives=1,
        norms=norms + router_bias,
    )


def _norm_inputs(s: Shape, count: int) -> tuple[Saved, ...]:
    return (Saved(elements=s.hidden * count, split=False),)


def _mask(s: Shape, dropout: bool) -> tuple[Saved, ...]:
    return (Saved(elements=s.hidden, nbytes=1, split=False),) if dropout else ()
