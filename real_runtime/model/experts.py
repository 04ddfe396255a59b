"""Routed experts: each token goes through its top-k experts (Shazeer et al. 2017, section 2.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from real_runtime.model.config import DecoderConfig
from real_runtime.model.parallel import TensorParallel

__all__ = ["experts"]


def experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    one: Callable[[int, torch.Tensor], torch.Tensor],
    config: DecoderConfig,
    tp: TensorParallel,
) -> torch.Tensor:
    """Send every token through its experts and add up what they return, weighted.

    Args:
        x: (S, b, h), normalised. logits: of the router, (S, b, experts).
        one: (expert, rows) -> rows; a part of the result where experts are split over tp.
        config: the decoder. tp: of the cell.
    """
    assert config.shape.moe is not None
    k = config.shape.moe.top_k
    wide = logits if logits.dtype == torch.float64 else logits.float()
    share, chosen = wide.softmax(-1).flatten(0, 1).topk(k, -1)
    if config.normalise_top_k:
        share = share / share.sum(-1, keepdim=True)
    # The ranks' results are parts of a sum, so the router's gradients are parts, too.
    share = tp.copy(share.to(x.dtype))
    rows = tp.enter(x)
    flat = rows.flatten(0, 1)
    out = torch.zeros_like(flat)
    for expert in range(config.shape.moe.num_experts):
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        part = one(expert, flat[token]) * share[token, slot].unsqueeze(-1)
        out = out.index_add(0, token, part)
    return tp.leave(out.view_as(rows))
