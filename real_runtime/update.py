"""The optimizer of one virtual stage: torch's own, on what this rank updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from real_runtime.buckets import Bucket
from real_runtime.model.weights import Weight
from real_runtime.settings import Recipe

__all__ = ["Part", "StageUpdate"]


class Part:
    """A run of elements that this rank updates.

    Attributes:
        name, spec: of the weight. master: what the optimizer updates, with ``grad`` set. target:
            where the products read the values, None when that is ``master`` itself.
        counted: its squares count towards the global norm on this rank. decays: see ParameterSpec.
        shard, shards: of the rank's part of the weight, see ``buckets.cut``. first: element there.
    """

    def __init__(
        self,
        weight: Weight,
        values: torch.Tensor,
        gradient: torch.Tensor,
        target: torch.Tensor | None,
        counted: bool,
        shard: int = 0,
        shards: int = 1,
        first: int = 0,
    ) -> None:
        self.spec, self.name, self.decays = weight.spec, weight.spec.name, weight.spec.decays
        self.counted, self.shard, self.shards, self.first = counted, shard, shards, first
        self.master = values
        self.master.grad = gradient
        self.target = target


class StageUpdate:
    """Updates a stage's weights after their gradients are whole.

    Args:
        whole: weights this rank updates whole, with whether their squares count.
        buckets: sharded buckets, of which it updates its share (ZeRO-1).
        kind: "adam", "adamw" or "sgd". recipe: numbers.
    """

    def __init__(
        self,
        whole: Sequence[tuple[Weight, bool]],
        buckets: Sequence[Bucket],
        kind: str,
        recipe: Recipe,
    ) -> None:
        self.whole, self.buckets = [w for w, _ in whole], [b for b in buckets if b.sharded]
        self.parts: list[Part] = []
        for weight, counted in whole:
            data, gradient = weight.data.data, weight.gradient
            same = data.dtype == gradient.dtype
            values = data if same else data.to(gradient.dtype)
            self.parts.append(Part(weight, values, gradient, None if same else data, counted))
        for bucket in self.buckets:
            self.parts += _parts_of(bucket)
        self.optimizer = _optimizer(self.parts, kind, recipe)

    def squares(self) -> torch.Tensor:
        """Sum of the squared gradients that count on this rank, fp64 scalar."""
        total = torch.zeros((), dtype=torch.float64)
        for part in self._gradients(counted=True):
            total += part.double().pow(2).sum().cpu()
        return total

    def _gradients(self, counted: bool = False) -> Iterator[torch.Tensor]:
        for part in self.parts:
            if part.master.grad is not None and (part.counted or not counted):
                yield part.master.grad

    def step(self, rate: float, scale: float) -> None:
        """Update.

        Args:
            rate: learning rate. scale: factor on the gradients (clipping).
        """
        if scale != 1.0:
            torch._foreach_mul_(list(self._gradients()), scale)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        for part in self.parts:
            if part.target is not None:
                part.target.copy_(part.master)

    def make_state(self) -> None:
        """Let the optimizer make its moments without changing a value, to be loaded into."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()

    def clear(self, weights: Sequence[Weight]) -> None:
        """Begin the next step's gradients."""
        torch._foreach_zero_([w.gradient for w in weights])


def _parts_of(bucket: Bucket) -> list[Part]:
    """This member's share of a sharded bucket, cut at the borders of weights."""
    assert bucket.gradient is not None and bucket.values is not None
    low = bucket.index * bucket.share
    found = []
    for s in bucket.slices:
        a, b = max(s.first, low), min(s.first + s.size, low + bucket.share)
        if a >= b:
            continue
        gradient, target = bucket.gradient[a - low : b - low], bucket.values[a - low : b - low]
        target.copy_(s.data.reshape(-1)[a - s.first : b - s.first])
        same = target.dtype == gradient.dtype
        values = target if same else target.to(gradient.dtype)
        found.append(
            Part(
                s.weight, values, gradient, None if same else target, s.counted, bucket.number,
                bucket.shards, a - s.first,
            )
        )  # fmt: skip
    return found


def _optimizer(parts: Sequence[Part], kind: str, recipe: Recipe) -> torch.optim.Optimizer:
    groups = [
        {"params": [p.master for p in parts if p.decays], "weight_decay": recipe.weight_decay},
        {"params": [p.master for p in parts if not p.decays], "weight_decay": 0.0},
    ]
    if kind != "adamw":
        groups[0]["weight_decay"] = 0.0
    groups = [g for g in groups if g["params"]]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=recipe.learning_rate, momentum=recipe.momentum)
    return torch.optim.AdamW(
        groups, lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2), eps=recipe.epsilon
    )
