"""Handlers of the collectives that sum gradients and gather updated values."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from real_runtime.buckets import Bucket
from real_runtime.groups import Groups
from real_runtime.program import Node
from real_runtime.stage import Stage

__all__ = ["Reductions"]

Handle = tuple[list[dist.Work], Callable[[], None]]
"""What is to be waited for, and what to do then."""


class Reductions:
    """The collectives of a rank's stages; each method begins one op.

    Args:
        stages, groups: of the rank. device: of its tensors.
    """

    def __init__(self, stages: dict[int, Stage], groups: Groups, device: torch.device) -> None:
        self.stages, self.groups, self.device = stages, groups, device

    def _buckets(self, node: Node) -> list[Bucket]:
        mine = (node.number, node.op.label)
        return [b for b in self.stages[node.op.stage].buckets if (b.number, b.label) == mine]

    def reduce(self, node: Node) -> Handle:
        """REDUCE_GRAD: sum over a gradient group; ZeRO-1 leaves each member its share."""
        buckets = self._buckets(node)
        begun = [b.start_reduce() for b in buckets]

        def finish() -> None:
            for bucket, (_, flat) in zip(buckets, begun, strict=True):
                bucket.finish_reduce(flat)

        return [work for work, _ in begun], finish

    def unshard(self, node: Node) -> Handle:
        """UNSHARD: collect the members' updated shares."""
        buckets = [b for b in self._buckets(node) if b.sharded]
        begun = [b.start_gather() for b in buckets]

        def finish() -> None:
            for bucket, (_, flat) in zip(buckets, begun, strict=True):
                bucket.finish_gather(flat)

        return [work for work, _ in begun], finish

    def embed(self, node: Node) -> Handle:
        """ALL_REDUCE[embed]: sum the gradient of a weight that first and last stage share."""
        weight = self.stages[node.op.stage].embed
        assert weight is not None
        rows = weight.gradient.shape[0] // len(self.groups.of("embed"))
        mine = weight.gradient[node.number * rows : (node.number + 1) * rows]
        group = self.groups.handle(node.group)
        return [dist.all_reduce(mine, group=group, async_op=True)], lambda: None

    def barrier(self, node: Node) -> Handle:
        """BARRIER: everyone waits for everyone."""
        one = torch.zeros(1, device=self.device)
        group = self.groups.handle(node.group)
        return [dist.all_reduce(one, group=group, async_op=True)], lambda: None
