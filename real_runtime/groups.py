"""Process groups of a plan, made by every process in the plan's one global order."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from real_runtime.model.experts import ExpertParallel
from real_runtime.model.parallel import TensorParallel
from sim.plan.placement import pieces
from sim.plan.plan import Plan
from sim.plan.wiring import Wiring

__all__ = ["Groups"]


class Groups:
    """The groups of ``sim.plan.placement.derive_groups``, same members made once.

    Args:
        plan: the plan. wiring: of its placement. rank: of this process.
        deadline: [s] after which a collective fails.
        pairs: every directed rank pair gets a group of its own (see devices.pairs_need_groups).

    Attributes:
        handles: group index -> torch's group, None where this rank is no member.
        tp: tensor parallelism of this rank's cell. ep: expert parallelism of its replica.
    """

    def __init__(
        self, plan: Plan, wiring: Wiring, rank: int, deadline: float, pairs: bool = False
    ) -> None:
        self.wiring, self.rank = wiring, rank
        self.handles: list[dist.ProcessGroup | None] = []
        for ranks in wiring.groups:
            # Every process makes every group, in the same order, or creation would hang.
            handle = dist.new_group(list(ranks), timeout=timedelta(seconds=deadline))
            self.handles.append(handle if rank in ranks else None)
        self._pairs: dict[tuple[int, int, int], dist.ProcessGroup] = {}
        for src, dst, channel in _directed(plan) if pairs else ():
            handle = dist.new_group([src, dst], timeout=timedelta(seconds=deadline))
            if rank in (src, dst):
                self._pairs[src, dst, channel] = handle
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

    def pair(self, src: int, dst: int, channel: int) -> dist.ProcessGroup | None:
        """Return the group of a directed pair and channel, None for the default one."""
        return self._pairs.get((src, dst, channel))

    def handle(self, index: int) -> dist.ProcessGroup:
        """Return a group that this rank belongs to."""
        found = self.handles[index]
        assert found is not None
        return found

    def close(self) -> None:
        """Give the groups back, where a process goes on to run another plan."""
        for handle in (*self.handles, *self._pairs.values()):
            if handle is not None:
                dist.destroy_process_group(handle)

    def members(self, index: int) -> tuple[int, ...]:
        """Ranks of a group."""
        return self.wiring.groups[index]


def _directed(plan: Plan) -> list[tuple[int, int, int]]:
    """(sender, receiver, channel) of a plan's transfers, in one order on all ranks.

    With several chunks per position gradients use a second channel (see sim.plan.p2p).
    """
    placement = plan.placement
    position = {s.stage: s.cell for s in placement.segments}
    chunked = len(placement.stages) > placement.num_stages
    found: set[tuple[int, int, int]] = set()
    for b in placement.boundaries:
        for replica in range(placement.num_replicas):
            first, last = (placement.cell(position[stage], replica) for stage in (b.src, b.dst))
            if first is last:
                continue
            for producer, consumer, channel in ((first, last, 0), (last, first, int(chunked))):
                for p in pieces(producer, consumer, placement.whole_boundaries):
                    found.add((p.src, p.dst, channel))
    return sorted(found)
