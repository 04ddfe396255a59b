"""Cross entropy over a vocabulary that is split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from real_runtime.model.parallel import TensorParallel

__all__ = ["cross_entropy"]


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, vocab: int, tp: TensorParallel
) -> torch.Tensor:
    """Return the sum over tokens of the cross entropy (Shoeybi et al. 2019, section 3).

    Args:
        logits: this rank's columns, (tokens, columns). targets: (tokens,).
        vocab: real columns; the padded ones behind them are left out. tp: the split.
    """
    found: torch.Tensor = _CrossEntropy.apply(logits, targets, vocab, tp)
    return found


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, vocab: int, tp: TensorParallel
    ) -> torch.Tensor:
        columns = logits.shape[-1]
        first = tp.index * columns
        wide = logits.double() if logits.dtype == torch.float64 else logits.float()
        if first + columns > vocab:
            wide = wide.clone()
            wide[:, max(vocab - first, 0) :] = float("-inf")
        highest = tp.reduce(wide.amax(-1), dist.ReduceOp.MAX)
        shifted = wide - highest.unsqueeze(-1)
        share = shifted.exp()
        local = targets - first
        inside = (local >= 0) & (local < columns)
        local = local.where(inside, 0)
        picked = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).where(inside, 0.0)
        both = tp.reduce(torch.stack([share.sum(-1), picked]))
        share /= both[0].unsqueeze(-1)
        ctx.save_for_backward(share, local, inside)
        ctx.dtype = logits.dtype
        return (both[0].log() - both[1]).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        share, local, inside = ctx.saved_tensors
        out = share.clone()
        out[torch.arange(len(local), device=local.device), local] -= inside.to(out.dtype)
        return (out * gradient).to(ctx.dtype), None, None, None
