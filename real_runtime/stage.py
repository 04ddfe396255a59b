"""One virtual stage on one rank: forward, recomputation, and the backward pass whole or split."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from real_runtime.buckets import Bucket
from real_runtime.model.decoder import Decoder
from real_runtime.model.weights import Deferral, Weight
from real_runtime.update import StageUpdate

__all__ = ["Stage"]


class _Live:
    """What one microbatch keeps between its passes."""

    def __init__(self, x: torch.Tensor, targets: torch.Tensor | None) -> None:
        self.x, self.targets = x, targets
        self.y: torch.Tensor | None = None
        self.kept: list[Callable[[], None]] = []


class Stage:
    """A virtual stage.

    Args:
        number: of the stage. decoder: its blocks. weights: that it owns. deferral: of the decoder.
        scale: of the loss: one over the tokens of the global batch.
        first, last: it begins with the embedding, ends with the loss.
        buckets, update: how its gradients are reduced and applied.
        embed: the weight that it shares with another stage, or None.
    """

    def __init__(
        self,
        number: int,
        decoder: Decoder,
        weights: Sequence[Weight],
        deferral: Deferral,
        scale: float,
        first: bool,
        last: bool,
        buckets: Sequence[Bucket],
        update: StageUpdate,
        embed: Weight | None,
    ) -> None:
        self.number, self.decoder, self.weights = number, decoder, list(weights)
        self.deferral, self.scale, self.first, self.last = deferral, scale, first, last
        self.buckets, self.update, self.embed = list(buckets), update, embed
        self.live: dict[int, _Live] = {}
        device = self.weights[0].gradient.device if self.weights else torch.device("cpu")
        self._anchor = torch.zeros((), requires_grad=True, device=device)

    def forward(
        self, mb: int, x: torch.Tensor, targets: torch.Tensor | None, keep: bool
    ) -> torch.Tensor:
        """F: return the boundary tensor (detached), or the scaled loss.

        Args:
            mb: microbatch. x: ids or hidden states. targets: for the last stage.
            keep: False keeps only the input, for recomputation.
        """
        live = self.live[mb] = _Live(x if self.first else x.detach().requires_grad_(), targets)
        if keep:
            self.recompute(mb)
            assert live.y is not None
            return live.y.detach()
        with torch.no_grad():
            return self._run(live)

    def recompute(self, mb: int) -> None:
        """R: run the forward pass and keep what the backward pass needs."""
        live = self.live[mb]
        with torch.enable_grad():
            live.y = self._run(live)

    def _run(self, live: _Live) -> torch.Tensor:
        y = self.decoder.forward(live.x, live.targets, self._anchor)
        return y * self.scale if self.last else y

    def backward(self, mb: int, gradient: torch.Tensor | None, split: bool) -> torch.Tensor | None:
        """B, or I when ``split``: return the gradient of the input, None for the first stage.

        Args:
            mb: microbatch. gradient: of the output, None for the last stage.
            split: weight gradients of products wait for ``weight_gradients``.
        """
        live = self.live[mb]
        if live.y is None:
            self.recompute(mb)
        assert live.y is not None
        self.deferral.kept = live.kept if split else None
        torch.autograd.backward(live.y, gradient)
        self.deferral.kept = None
        live.y = None
        found = None if self.first else live.x.grad
        live.x = live.x.new_empty(0)
        if not split:
            del self.live[mb]
        return found

    def weight_gradients(self, mb: int) -> None:
        """W: add the weight gradients that I put off."""
        with torch.no_grad():
            for compute in self.live.pop(mb).kept:
                compute()

    def complete_gradients(self) -> None:
        """After a step's last backward: add up gradients of which each TP rank has a part."""
        tp = self.decoder.tp
        partial = [w.gradient for w in self.weights if w.spec.partial]
        if tp.size == 1 or not partial:
            return
        flat = torch.cat([g.reshape(-1) for g in partial])
        dist.all_reduce(flat, group=tp.group)
        parts = flat.split([g.numel() for g in partial])
        for gradient, total in zip(partial, parts, strict=True):
            gradient.copy_(total.view(gradient.shape))
