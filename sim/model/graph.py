"""A model as a chain or DAG of blocks, with everything planning needs to know about each.

A block knows its parameters, its matrix products and its activations, before any splitting; what
TP, SP, EP and CP do to them is arithmetic on these fields (sim.cost). "Layer" is only a label.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Attention", "Block", "Edge", "Gemm", "MeasuredTime", "Model", "Saved"]

Split = Literal["column", "row", "none"]
BlockKind = Literal["embedding", "attention", "mlp", "moe", "head", "norm", "conv", "measured"]


class Gemm(msgspec.Struct, frozen=True):
    """One matrix product (tokens, k) x (k, n) of a block's forward pass.

    Args:
        n: output features.
        k: input features.
        count: how many equal products run one after another.
        split: which dimension tensor parallelism divides: "column" n, "row" k, "none" neither.
        routed: True when the tokens come through a router: then each of the block's local experts
            sees tokens * top_k / num_experts of them.
    """

    n: int
    k: int
    count: int = 1
    split: Split = "column"
    routed: bool = False


class Attention(msgspec.Struct, frozen=True):
    """Score and value products of an attention block; their cost grows with sequence squared.

    Args:
        heads: query heads. kv_heads: key/value heads.
        head_dim: size of a query/key head. v_head_dim: size of a value head.
        causal: True when only the lower half of the score matrix is needed.
        flash: True when scores are never written to memory.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    causal: bool = True
    flash: bool = True


class Saved(msgspec.Struct, frozen=True):
    """A tensor the forward pass keeps for the backward pass.

    Args:
        elements: per token (for ``per_key`` tensors: per token and per key of the sequence).
        nbytes: [B] per element; 0 means the compute dtype's size.
        split: True when tensor parallelism divides it; otherwise only sequence parallelism does.
        core: True when it is part of the attention core, which selective recomputation drops.
        routed: True when it exists once per routed copy of a token (times top_k).
        per_key: True for score matrices; their size is tokens * sequence length * elements.
    """

    elements: float
    nbytes: float = 0.0
    split: bool = True
    core: bool = False
    routed: bool = False
    per_key: bool = False


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One block of a model (half a transformer layer, an embedding, a head ...).

    Args:
        name: unique, e.g. "layers.3.attention".
        kind: what it is.
        layer: label of the layer it belongs to; -1 for blocks before, num_layers for blocks after.
        params: parameters divided by tensor parallelism (without the routed experts').
        params_replicated: parameters every tensor-parallel rank keeps (norms, row-split biases).
        params_experts: parameters of all routed experts together, divided by ep and by tp.
        num_experts: routed experts; 0 for dense blocks. top_k: experts each token visits.
        gemms: matrix products of the forward pass. attention: score products, or None.
        elementwise: elements read plus written per token by everything that is not a product.
        elementwise_split: share of ``elementwise`` that tensor parallelism divides (0..1).
        saved: tensors kept for the backward pass.
        input_elements: per token, size of the block's input (what full recomputation keeps).
        tp_collectives: all-reduces of the block's output per forward pass under tp > 1 (0, 1 or 2).
        vocab: vocabulary rows of embedding and head, else 0.
        logits_elements: per token, elements of the logits (head only).
        shares: name of the parameter this block shares with another (tied embedding), or "".
        norms: True parameters that are norms, biases or positions (subset of the three sums above).
    """

    name: str
    kind: BlockKind
    layer: int
    params: int = 0
    params_replicated: int = 0
    params_experts: int = 0
    num_experts: int = 0
    top_k: int = 0
    gemms: tuple[Gemm, ...] = ()
    attention: Attention | None = None
    elementwise: float = 0.0
    elementwise_split: float = 0.0
    saved: tuple[Saved, ...] = ()
    input_elements: int = 0
    tp_collectives: int = 0
    vocab: int = 0
    logits_elements: int = 0
    shares: str = ""
    norms: int = 0


class Edge(msgspec.Struct, frozen=True):
    """What flows from one block to another.

    Args:
        src: producing block's name. dst: consuming block's name.
        elements: per token. gradient: True when a cotangent flows back.
    """

    src: str
    dst: str
    elements: int
    gradient: bool = True


class MeasuredTime(msgspec.Struct, frozen=True, kw_only=True):
    """Measured times of one block on one accelerator, which replace the roofline.

    Args:
        block: block name. accelerator: profile name. tp: tensor-parallel size.
        microbatch: [sequences].
        forward: [s]. input_grad: [s], or the whole backward when ``weight_grad`` is 0.
        weight_grad: [s]. recompute: [s], negative means "as forward". update: [s] optimizer step.
        source: where the number was measured.
    """

    block: str
    accelerator: str
    tp: int
    microbatch: int
    forward: float
    input_grad: float
    weight_grad: float = 0.0
    recompute: float = -1.0
    update: float = 0.0
    source: str = ""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A resolved model.

    Args:
        name: for people. family: Hugging Face model_type or "measured".
        blocks: in execution order (a topological order of the DAG).
        edges: what flows between blocks; for a chain, block i to block i + 1.
        num_layers: number of layer labels. hidden: width of the residual stream (0 if unknown).
        max_seq: longest sequence stated by the config, 0 when not stated.
        times: measured times, possibly empty.
        assumptions: what the reader had to assume, in words.
    """

    name: str
    family: str
    blocks: tuple[Block, ...]
    edges: tuple[Edge, ...]
    num_layers: int
    hidden: int = 0
    max_seq: int = 0
    times: tuple[MeasuredTime, ...] = ()
    assumptions: tuple[str, ...] = ()
