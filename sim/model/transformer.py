"""Sizes of a transformer -> blocks with products, saved tensors, traffic and parameters.

A layer is an attention block and an MLP (or MoE) block; each begins with its norm and ends with its
residual addition. What the backward pass keeps follows Korthikanti et al. 2022 (arXiv:2205.05198,
section 4.1): s b h (34 + 5 a s / h) bytes per layer for GPT with dropout and 2-byte elements. Where
we depart: fused attention keeps a 4-byte log-sum-exp per head and token in place of the scores;
dropout masks are left out when the job has no dropout; a gated MLP keeps gate, up and their
product (fused activation); experts keep what a dense MLP keeps, once per routed copy of a token,
and the copy's input and output.

A model with an encoder and a decoder stays a chain: the encoder's blocks, then the decoder's, and
what flows between the decoder's blocks is their stream and the encoder's output.
"""

from __future__ import annotations

import itertools

from sim.model.attention import attention_block, cross_attention_block
from sim.model.feedforward import mlp_block, moe_block
from sim.model.graph import Block, Edge, Gemm, Model, Saved
from sim.model.kept import dropout_mask
from sim.model.shape import Shape

__all__ = ["build_model"]

TIED = "embedding.weight"


def build_model(
    shape: Shape,
    flash: bool = True,
    dropout: bool = False,
    assumptions: tuple[str, ...] = (),
) -> Model:
    """Build the chain of blocks of a transformer.

    Args:
        shape: sizes. flash: attention scores never reach memory.
        dropout: masks are kept for the backward pass. assumptions: what the reader had to assume.
    """
    blocks = [_embedding(shape, dropout)]
    for layer in range(shape.num_layers):
        bias = shape.relative_buckets * shape.heads * (layer == 0)
        causal = shape.causal and not shape.decoder_layers
        blocks.append(attention_block(shape, layer, flash, dropout, causal=causal, positions=bias))
        if shape.moe is None or layer in shape.moe.dense_layers:
            blocks.append(mlp_block(shape, layer, dropout))
        else:
            blocks.append(moe_block(shape, layer, dropout))
    encoder = len(blocks)
    if shape.decoder_layers:
        blocks += _decoder(shape, flash, dropout)
    blocks.append(_head(shape))
    edges = [
        Edge(src=a.name, dst=b.name, elements=shape.hidden * (2 if i > encoder else 1))
        for i, (a, b) in enumerate(itertools.pairwise(blocks))
    ]
    return Model(
        name=shape.name,
        family=shape.family,
        blocks=tuple(blocks),
        edges=tuple(edges),
        num_layers=shape.num_layers + shape.decoder_layers,
        hidden=shape.hidden,
        max_seq=shape.max_seq,
        assumptions=assumptions,
    )


def _decoder(s: Shape, flash: bool, dropout: bool) -> list[Block]:
    """The encoder's last norm, the decoder's embedding, and its layers."""
    norm = Block(
        name="encoder.norm",
        kind="norm",
        layer=s.num_layers - 1,
        params_replicated=s.norm_params,
        elementwise=2.0 * s.hidden,
        saved=(Saved(elements=s.hidden, split=False),),
        input_elements=s.hidden,
        norms=s.norm_params,
    )
    lookup = _embedding(s, dropout, name="decoder.embedding", layer=s.num_layers)
    blocks = [norm, lookup]
    for layer in range(s.num_layers, s.num_layers + s.decoder_layers):
        bias = s.relative_buckets * s.heads * (layer == s.num_layers)
        blocks += [
            attention_block(s, layer, flash, dropout, positions=bias),
            cross_attention_block(s, layer, flash, dropout),
            mlp_block(s, layer, dropout),
        ]
    return blocks


def _embedding(s: Shape, dropout: bool, name: str = "embedding", layer: int = -1) -> Block:
    """The look-up of tokens; inside the chain (``layer`` >= 0) it also passes on what comes."""
    inside = layer >= 0
    width = s.embedding_dim or s.hidden
    project = (Gemm(n=s.hidden, k=width, split="none"),) if s.embedding_dim else ()
    positions = s.positions * s.hidden
    norm = s.norm_params if s.embedding_norm else 0
    saved = [Saved(elements=1, nbytes=8, split=False)]  # the token ids
    if s.embedding_norm:
        saved.append(Saved(elements=s.hidden, split=False))
    if s.embedding_dim:
        saved.append(Saved(elements=width, split=False))
    if inside:
        saved.append(Saved(elements=s.hidden, split=False))  # the encoder's output, for all layers
    return Block(
        name=name,
        kind="embedding",
        layer=layer,
        params=s.vocab * width,
        params_replicated=positions + norm + width * s.hidden * bool(s.embedding_dim),
        gemms=project,
        elementwise=2.0 * width + (2.0 * s.hidden if positions or s.embedding_norm else 0.0),
        saved=(*saved, *dropout_mask(s, dropout)),
        input_elements=s.hidden * inside,
        tp_collectives=1,
        vocab=s.vocab,
        shares=TIED if s.tied or s.decoder_layers else "",
        norms=positions + norm,
    )


def _head(s: Shape) -> Block:
    width = s.embedding_dim or s.hidden
    transform = s.head_transform or bool(s.embedding_dim)
    project = (Gemm(n=width, k=s.hidden, split="none"),) if transform else ()
    norm = s.norm_params * (s.final_norm + s.head_transform) + width * s.head_transform
    bias = s.vocab * s.head_transform
    saved = [Saved(elements=width, split=False)]
    if s.final_norm or transform:
        saved.append(Saved(elements=s.hidden, split=False))
    if s.head_transform:
        saved.append(Saved(elements=2 * width, split=False))  # into the activation and the norm
    loss = 3.0 * s.vocab  # the logits are read twice and written once by the cross entropy
    around = 2.0 * s.hidden
    return Block(
        name="head",
        kind="head",
        layer=s.num_layers + s.decoder_layers,
        params=s.vocab * width,
        params_replicated=norm + bias + width * s.hidden * transform,
        gemms=(*project, Gemm(n=s.vocab, k=width)),
        elementwise=loss + around,
        elementwise_split=loss / (loss + around),
        saved=tuple(saved),
        input_elements=s.hidden,
        vocab=s.vocab,
        logits_elements=s.vocab,
        shares=TIED if s.tied else "",
        norms=norm + bias,
    )
