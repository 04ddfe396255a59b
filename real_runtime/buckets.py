"""Gradient groups: which slices of a stage's weights each of a rank's groups reduces.

Replicas of a stage may have unlike TP sizes that divide one another. Its weights are cut in as many
fine shards as the largest size has ranks; a rank reduces one bucket per fine shard it owns. Weights
that every rank keeps whole are in every bucket, and every group finds the same sum for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from real_runtime.model.weights import Weight

__all__ = ["Bucket", "Slice", "cut"]


class Slice:
    """A fine shard of one weight on this rank: views of its values and of its gradient.

    Attributes:
        weight: whose. data, gradient: views. first: in the bucket. size: [elements].
        counted: its squares count towards the global norm in this bucket.
    """

    def __init__(self, weight: Weight, shard: int, shards: int, first: int, counted: bool) -> None:
        self.weight = weight
        self.data = cut(weight.data.data, weight.spec.split, shard, shards)
        self.gradient = cut(weight.gradient, weight.spec.split, shard, shards)
        self.first, self.size, self.counted = first, self.data.numel(), counted


def cut(whole: torch.Tensor, split: int | None, shard: int, shards: int) -> torch.Tensor:
    """Return one of the equal parts of a tensor along its split dimension (a view)."""
    if split is None or shards == 1:
        return whole
    size = whole.shape[split] // shards
    return whole.narrow(split, shard * size, size)


class Bucket:
    """What one gradient group of a stage reduces.

    Args:
        weights: of the stage, in one order on all members. shard, shards: of this rank's part.
        group, members, index: torch's group, its size and this rank's place in it.
        sharded: each member keeps and updates an equal share (ZeRO-1).
        first_shard: this is the stage's first fine shard.
        label: of the ops that reduce it, "experts" for routed experts.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        shard: int,
        shards: int,
        group: dist.ProcessGroup,
        members: int,
        index: int,
        sharded: bool,
        first_shard: bool,
        label: str = "",
    ) -> None:
        self.number, self.shards, self.label = shard, shards, label
        self.group, self.members, self.index, self.sharded = group, members, index, sharded
        self.slices: list[Slice] = []
        first = 0
        for weight in weights:
            counted = first_shard or weight.spec.split is not None
            self.slices.append(Slice(weight, shard, shards, first, counted))
            first += self.slices[-1].size
        self.size = -(-first // members) * members if sharded else first
        self.share = self.size // members if sharded else self.size
        self.gradient: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        if sharded and self.slices:
            self.gradient = self.slices[0].gradient.new_zeros(self.share)
            self.values = self.slices[0].data.new_zeros(self.share)

    @property
    def nbytes(self) -> int:
        """[B] of the gradient that goes into the reduction."""
        return self.size * self.slices[0].gradient.element_size() if self.slices else 0

    def _pack(self) -> torch.Tensor:
        flat = self.slices[0].gradient.new_zeros(self.size)
        for s in self.slices:
            flat[s.first : s.first + s.size].view(s.gradient.shape).copy_(s.gradient)
        return flat

    def start_reduce(self) -> tuple[dist.Work, torch.Tensor]:
        """Begin to sum gradients over the group; the tensor is what ``finish_reduce`` takes."""
        flat = self._pack()
        if self.sharded:
            assert self.gradient is not None
            work = dist.reduce_scatter_single(self.gradient, flat, group=self.group, async_op=True)
        else:
            work = dist.all_reduce(flat, group=self.group, async_op=True)
        return work, flat

    def finish_reduce(self, flat: torch.Tensor) -> None:
        """Write sums back to the weights' gradients; a sharded bucket keeps its share."""
        if not self.sharded:
            for s in self.slices:
                s.gradient.copy_(flat[s.first : s.first + s.size].view(s.gradient.shape))

    def start_gather(self) -> tuple[dist.Work, torch.Tensor]:
        """Begin to collect updated values from all members (ZeRO-1)."""
        assert self.values is not None
        flat = self.values.new_empty(self.size)
        return dist.all_gather_single(flat, self.values, group=self.group, async_op=True), flat

    def finish_gather(self, flat: torch.Tensor) -> None:
        """Write the values to the weights."""
        for s in self.slices:
            s.data.copy_(flat[s.first : s.first + s.size].view(s.data.shape))
