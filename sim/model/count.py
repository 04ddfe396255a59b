"""Counts over a whole model: parameters and forward work before any splitting."""

from __future__ import annotations

from sim.model.graph import Block, Model

__all__ = ["active_params", "block_flops", "total_params"]


def total_params(model: Model, norms: bool = True) -> int:
    """Return the parameters of a model; a shared parameter counts once.

    Args:
        model: what to count. norms: whether norms, biases and learned positions count.
    """
    total, seen = 0, set()
    for block in model.blocks:
        own = block.params + block.params_replicated + block.params_experts
        if block.shares and block.shares in seen:
            own -= block.params
        seen.add(block.shares)
        total += own - (0 if norms else block.norms)
    return total


def active_params(model: Model) -> int:
    """Return the parameters one token is multiplied with: no embedding, no norms, top_k experts."""
    return sum(
        gemm.n * gemm.k * gemm.count * (block.top_k if gemm.routed else 1)
        for block in model.blocks
        for gemm in block.gemms
    )


def block_flops(block: Block, tokens: float, sequence_length: int) -> float:
    """Return the forward work of a block [FLOP], a multiply and an add counting as two.

    Args:
        block: what. tokens: how many.
        sequence_length: [tokens] keys each query meets; a causal core needs half of them.
    """
    flops = sum(
        2.0 * tokens * g.n * g.k * g.count * (block.top_k if g.routed else 1) for g in block.gemms
    )
    if block.attention is not None:
        a = block.attention
        keys = sequence_length / 2 if a.causal else sequence_length
        flops += 2.0 * tokens * keys * a.heads * (a.head_dim + a.v_head_dim)
    return flops
