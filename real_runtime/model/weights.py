"""Trained tensors with their gradients, and products that can put off the weight gradient.

The backward pass of a product always computes the gradient of its input. The gradient of its weight
is added at once (B), or kept as a closure until W asks for it: the split of zero-bubble schedules
(Qi et al. 2023, section 2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from real_runtime.model.parameters import ParameterSpec

__all__ = ["Deferral", "Weight", "embed", "product"]


class Weight:
    """A rank's part of one parameter.

    Attributes:
        spec: the parameter. data: values the products read. gradient: accumulated, in the
            reduction dtype.
    """

    def __init__(self, spec: ParameterSpec, data: torch.Tensor, gradient: torch.Tensor) -> None:
        self.spec, self.gradient = spec, gradient
        self.data = torch.nn.Parameter(data)
        # Weights of products never reach autograd; norms do, and leave their gradient here.
        self.data.register_post_accumulate_grad_hook(self._take)

    def _take(self, data: torch.Tensor) -> None:
        assert data.grad is not None
        self.gradient.add_(data.grad)
        data.grad = None

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add left^T right to the gradient."""
        if left.dtype == self.gradient.dtype:
            self.gradient.addmm_(left.t(), right)
        else:
            self.gradient.add_(left.t() @ right)


class Deferral:
    """Where weight gradients go: added at once, or kept while ``kept`` is a list."""

    def __init__(self) -> None:
        self.kept: list[Callable[[], None]] | None = None

    def add(self, compute: Callable[[], None]) -> None:
        """Do it now, or keep it."""
        if self.kept is None:
            compute()
        else:
            self.kept.append(compute)


def product(
    x: torch.Tensor, weight: Weight, bias: Weight | None, deferral: Deferral
) -> torch.Tensor:
    """Return x W^T (+ bias), shape (..., n)."""
    found: torch.Tensor = _Product.apply(x, weight, bias, deferral)
    return found


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Weight, bias: Weight | None, deferral: Deferral
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.parts = weight, bias, deferral
        return torch.nn.functional.linear(x, weight.data, None if bias is None else bias.data)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        weight, bias, deferral = ctx.parts
        rows = gradient.reshape(-1, gradient.shape[-1])

        def compute() -> None:
            weight.add_product(rows, x.reshape(-1, x.shape[-1]))
            if bias is not None:
                bias.gradient.add_(rows.sum(0))

        deferral.add(compute)
        return gradient @ weight.data, None, None, None


def embed(
    ids: torch.Tensor, weight: Weight, first: int, anchor: torch.Tensor, deferral: Deferral
) -> torch.Tensor:
    """Return the rows of ids, zeros for ids outside this rank's rows.

    Args:
        ids: (s, b). weight: rows from ``first`` on. anchor: any tensor that requires a gradient, so
            that autograd visits this op. deferral: where the weight gradient goes.
    """
    found: torch.Tensor = _Embed.apply(anchor, ids, weight, first, deferral)
    return found


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        ids: torch.Tensor,
        weight: Weight,
        first: int,
        deferral: Deferral,
    ) -> torch.Tensor:
        local = ids - first
        inside = (local >= 0) & (local < weight.data.shape[0])
        local = local.where(inside, 0)
        ctx.parts = local, inside, weight, deferral
        return weight.data[local] * inside.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        local, inside, weight, deferral = ctx.parts

        def compute() -> None:
            rows = gradient[inside].to(weight.gradient.dtype)
            weight.gradient.index_add_(0, local[inside], rows)

        deferral.add(compute)
        return None, None, None, None, None
