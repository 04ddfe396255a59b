"""Process groups of a plan, made by every process in the plan's one global order."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from real_runtime.model.experts import ExpertParallel
from real_runtime.model.parallel import TensorParallel
from sim.plan.plan import Plan
from sim.plan.wiring import Wiring

__all__ = ["Groups"]


class Groups:
    """The groups of ``sim.plan.placement.derive_groups``, same members made once.

    Args:
        plan: the plan. wiring: of its placement. rank: of this process.
        deadline: [s] after which a collective fails.

    Attributes:
        handles: group index -> torch's group, None where this rank is no member.
        tp: tensor parallelism of this rank's cell. ep: expert parallelism of its replica.
    """

    def __init__(self, plan: Plan, wiring: Wiring, rank: int, deadline: float) -> None:
        self.wiring, self.rank = wiring, rank
        self.handles: list[dist.ProcessGroup | None] = []
        for ranks in wiring.groups:
            # Every process makes every group, in the same order, or creation would hang.
            handle = dist.new_group(list(ranks), timeout=timedelta(seconds=deadline))
            self.handles.append(handle if rank in ranks else None)
        cell = wiring.cell_of.get(rank)
        self.tp = TensorParallel()
        if cell is not None and cell.tp > 1:
            index = wiring.of_rank[rank, "tp"][0]
            ranks = wiring.groups[index]
            self.tp = TensorParallel(
                cell.tp,
                ranks.index(rank),
                self.handles[index],
                plan.mathematics.sequence_parallel,
            )
        self.ep = ExpertParallel()
        shared = wiring.of_rank.get((rank, "ep"))
        if shared:
            ranks = wiring.groups[shared[0]]
            handle = self.handles[shared[0]]
            self.ep = ExpertParallel(len(ranks), ranks.index(rank), handle)

    def of(self, role: str) -> list[int]:
        """Indices of this rank's groups of a role, in shard order."""
        return self.wiring.of_rank.get((self.rank, role), [])

    def handle(self, index: int) -> dist.ProcessGroup:
        """Return a group that this rank belongs to."""
        found = self.handles[index]
        assert found is not None
        return found

    def members(self, index: int) -> tuple[int, ...]:
        """Ranks of a group."""
        return self.wiring.groups[index]
