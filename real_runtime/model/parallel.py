"""Tensor parallelism of one cell: its group, and what its ranks exchange around split products.

The conjugate pairs are those of Megatron-LM (Shoeybi et al. 2019, section 3) and, along the
sequence, of Korthikanti et al. 2022 (section 4.2.2). Legend: s sequence, b batch, h hidden; hidden
states are (s, b, h), so that a part of the sequence is contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["TensorParallel"]


class TensorParallel:
    """The tensor-parallel side of one rank.

    Args:
        size: ranks of the cell. index: of this rank. group: None when size is 1.
        sequence: activations between split products are divided along the sequence.
    """

    def __init__(
        self,
        size: int = 1,
        index: int = 0,
        group: dist.ProcessGroup | None = None,
        sequence: bool = False,
    ) -> None:
        self.size, self.index, self.group = size, index, group
        self.sequence = sequence and size > 1

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Into column-split products: identity or gathered sequence; gradients are summed."""
        if self.size == 1:
            return x
        found: torch.Tensor = (_Gather if self.sequence else _Copy).apply(x, self)
        return found

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Out of row-split products: partial results are summed (and the sequence divided)."""
        if self.size == 1:
            return x
        found: torch.Tensor = (_Scatter if self.sequence else _Reduce).apply(x, self)
        return found

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """Identity whose gradients are summed, whatever happens to the sequence."""
        if self.size == 1:
            return x
        found: torch.Tensor = _Copy.apply(x, self)
        return found

    def reduce(self, x: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """All-reduce in place, outside autograd."""
        if self.size > 1:
            dist.all_reduce(x, op=op, group=self.group)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Join the ranks' parts along the first dimension, outside autograd."""
        out = x.new_empty((x.shape[0] * self.size, *x.shape[1:]))
        dist.all_gather_single(out, x.contiguous(), group=self.group)
        return out

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Sum, and keep this rank's part of the first dimension, outside autograd."""
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        dist.reduce_scatter_single(out, x.contiguous(), group=self.group)
        return out


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.tp.reduce(gradient.contiguous().clone()), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        return tp.reduce(x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        ctx.tp = tp
        return tp.gather(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.tp.scatter(gradient), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        ctx.tp = tp
        return tp.scatter(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.tp.gather(gradient), None
