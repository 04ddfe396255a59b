"""What ranks that serve parameters hold: parameters, optimizer states and one gradient of a part.

How many parameters a part has follows from its updates: an APPLY reads and writes ``update_bytes``
for each. Gradients that wait behind the one being applied are not counted.
"""

from __future__ import annotations

import msgspec

from sim.cost.host_links import update_bytes
from sim.plan.passes import expand
from sim.plan.plan import Plan
from sim.plan.program import walk
from sim.plan.servers import serving_chips
from sim.problem import Problem

__all__ = ["Server", "servers_of"]


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that serves.

    Args:
        rank, chip: which, and where; a process of a node sits beside the chip.
        on_chip: whether the chip's own memory holds the part, else its node's.
        terms: "parameters", "gradients", "optimizer" -> [B].
    """

    rank: int
    chip: int
    on_chip: bool
    terms: dict[str, float]


def servers_of(plan: Plan, problem: Problem) -> tuple[Server, ...]:
    """Return the servers of a plan in order of rank; () for plans without extra ranks."""
    placement, job = plan.placement, problem.job
    if not placement.extra_ranks:
        return ()
    programs = expand(plan)
    serving = serving_chips(placement, programs)
    found = []
    for program in programs:
        updates = [op.amount for op in walk(program) if op.kind == "APPLY"]
        nbytes = sum(plan.amounts[a].nbytes for a in updates if a in plan.amounts)
        params = nbytes / update_bytes(job)
        terms = {
            "parameters": params * job.param_bytes,
            "gradients": params * job.gradient_bytes,
            "optimizer": params * job.optimizer_bytes,
        }
        for rank in program.ranks:
            if rank in placement.extra_ranks:
                chip = placement.chips[rank] if placement.chips else rank
                on_chip = rank in serving
                found.append(Server(rank=rank, chip=chip, on_chip=on_chip, terms=terms))
    return tuple(sorted(found, key=lambda s: s.rank))
