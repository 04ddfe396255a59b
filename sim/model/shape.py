"""The sizes of a transformer, whatever family they come from."""

from __future__ import annotations

import msgspec

__all__ = ["Mla", "Moe", "Shape"]


class Mla(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Args:
        q_rank: width of the compressed query, 0 when queries are not compressed.
        kv_rank: width of the compressed key and value. rope_dim: rotary part of a query/key head.
        nope_dim: other part of it.
    """

    q_rank: int
    kv_rank: int
    rope_dim: int
    nope_dim: int


class Moe(msgspec.Struct, frozen=True, kw_only=True):
    """Routed experts.

    Args:
        num_experts: routed experts per layer. top_k: experts each token visits.
        ffn: inner width of a routed expert. shared_ffn: of all shared experts together, 0 for none.
        shared_gate: the shared expert's output is scaled by a learned gate.
        selection_bias: the router has a bias per expert. expert_bias: the experts' products do.
        dense_layers: layers that have an ordinary MLP instead.
    """

    num_experts: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False
    selection_bias: bool = False
    expert_bias: bool = False
    dense_layers: tuple[int, ...] = ()


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a transformer: a decoder, an encoder, or both.

    Args:
        name, family: for people. num_layers, hidden, heads, kv_heads, head_dim: as usual.
        v_head_dim: width of a value head. ffn: inner width of the dense MLP.
        gated: the MLP multiplies two products (SwiGLU, GeGLU). vocab: rows of the embedding.
        max_seq: longest sequence, 0 when not stated. tied: embedding and head share their weight.
        layer_norm: norms have a bias (LayerNorm) or not (RMSNorm).
        attention_norms, mlp_norms: norms per block. qk_norm: queries and keys are normalised.
        qkv_bias, out_bias, mlp_bias: which products have a bias.
        positions: rows of a learned position table, 0 for none.
        embedding_dim: width of the embedding if it is projected to ``hidden``, else 0.
        embedding_norm, final_norm: whether there is one.
        causal: the layers see earlier tokens only. decoder_layers: layers of a decoder behind
            these, which then are an encoder; 0 for none.
        relative_buckets: rows of a position bias that all layers of a stack share, per head.
        head_transform: a product, a norm and biases lie before and behind the vocabulary product.
        moe, mla: variants.
    """

    name: str
    family: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    ffn: int
    gated: bool
    vocab: int
    max_seq: int = 0
    tied: bool = False
    layer_norm: bool = False
    attention_norms: int = 1
    mlp_norms: int = 1
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    positions: int = 0
    embedding_dim: int = 0
    embedding_norm: bool = False
    final_norm: bool = True
    causal: bool = True
    decoder_layers: int = 0
    relative_buckets: int = 0
    head_transform: bool = False
    moe: Moe | None = None
    mla: Mla | None = None

    @property
    def norm_params(self) -> int:
        """Parameters of one norm over the residual stream."""
        return self.hidden * (2 if self.layer_norm else 1)
