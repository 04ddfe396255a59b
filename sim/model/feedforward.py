"""Feed-forward blocks: dense, and routed experts with shared ones beside them."""

from __future__ import annotations

from sim.model.graph import Block, Gemm, Saved
from sim.model.kept import dropout_mask, norm_inputs
from sim.model.shape import Shape

__all__ = ["mlp_block", "moe_block"]


def mlp_block(s: Shape, layer: int, dropout: bool) -> Block:
    """Return the dense half of a layer."""
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
            *norm_inputs(s, s.mlp_norms),
            Saved(elements=s.hidden, split=False),
            Saved(elements=inner),
            Saved(elements=s.ffn),
            *dropout_mask(s, dropout),
        ),
        input_elements=s.hidden,
        tp_collectives=1,
        norms=norms + bias + out_bias,
    )


def moe_block(s: Shape, layer: int, dropout: bool) -> Block:
    """Return the half of a layer that routes tokens to experts."""
    assert s.moe is not None
    m = s.moe
    sides = 2 if s.gated else 1
    norms = s.mlp_norms * s.norm_params
    router_bias = m.num_experts * m.selection_bias
    expert_bias = m.num_experts * (sides * m.ffn + s.hidden) * m.expert_bias
    gemms = [
        Gemm(n=m.num_experts, k=s.hidden, split="none"),
        Gemm(n=sides * m.ffn, k=s.hidden, routed=True),
        Gemm(n=s.hidden, k=m.ffn, split="row", routed=True),
    ]
    saved = [
        *norm_inputs(s, s.mlp_norms),
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
        params_experts=m.num_experts * (sides + 1) * s.hidden * m.ffn + expert_bias,
        num_experts=m.num_experts,
        top_k=m.top_k,
        gemms=tuple(gemms),
        elementwise=around + activation,
        elementwise_split=activation / (around + activation),
        saved=(*saved, *dropout_mask(s, dropout)),
        input_elements=s.hidden,
        tp_collectives=1,
        norms=norms + router_bias + expert_bias,
    )
