"""A plan with one knob changed: recomputation, microbatch, ZeRO-1, optimizer on the host.

An edit gives a plan of its own, or None where the knob does not apply; ``sound`` says whether that
plan can run. Names and hashes of edited plans are not shown, so the plan's name stays.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from sim.errors import HetlabError
from sim.plan.layers import SEGMENTS, cut_layers
from sim.plan.lower import amounts_of
from sim.plan.placement import Cell, Recompute
from sim.plan.plan import Call, Plan
from sim.plan.validate import validate
from sim.problem import Problem

__all__ = ["offloaded", "placed", "recomputing", "smaller_microbatch", "sound", "zero_one"]

CellAt = tuple[int, int]
_STRENGTH = {"none": 0, "selective": 1, "full": 2}


def sound(plan: Plan, problem: Problem) -> bool:
    """Whether an edited plan is well formed."""
    try:
        validate(plan, problem)
    except HetlabError:
        return False
    return True


def recomputing(plan: Plan, mode: Recompute, cells: Collection[CellAt] = ()) -> Plan | None:
    """Return the plan with cells that recompute as ``mode`` says, if any recomputes less now.

    Segments that say what they recompute keep it.

    Args:
        plan: to change. mode: of the cells. cells: (stage, replica); () for all.
    """

    def again(cell: Cell) -> Cell:
        mine = not cells or (cell.stage, cell.replica) in cells
        more = _STRENGTH[cell.recompute] < _STRENGTH[mode]
        return msgspec.structs.replace(cell, recompute=mode) if mine and more else cell

    changed = tuple(again(c) for c in plan.placement.cells)
    if changed == plan.placement.cells or any(s.recompute for s in plan.placement.segments):
        return None
    return placed(plan, cells=changed)


def smaller_microbatch(plan: Plan, problem: Problem, microbatch: int) -> Plan | None:
    """Return the plan with smaller microbatches, and more of them.

    Args:
        plan, problem: see there. microbatch: [sequences], a divisor of the plan's.
    """
    maths, call = plan.mathematics, _schedule(plan)
    if call is None or call.args.get("order") or maths.microbatch % microbatch:
        return None
    if microbatch >= maths.microbatch or plan.tables:
        return None
    times = maths.microbatch // microbatch
    counts = tuple(n * times for n in plan.placement.microbatches)
    own = amounts_of(problem, plan.placement, microbatch)
    return msgspec.structs.replace(
        placed(plan, microbatches=counts),
        mathematics=msgspec.structs.replace(maths, microbatch=microbatch),
        amounts=plan.amounts | own,
    )


def zero_one(plan: Plan) -> Plan | None:
    """Return the plan with optimizer states divided over replicas, if none is divided yet."""
    maths, placement = plan.mathematics, plan.placement
    shared = placement.num_replicas > 1 or any(c.cp > 1 for c in placement.cells)
    if maths.zero or not shared or placement.workers or placement.extra_ranks:
        return None
    return msgspec.structs.replace(plan, mathematics=msgspec.structs.replace(maths, zero=1))


def offloaded(plan: Plan, problem: Problem) -> Plan | None:
    """Return the plan with all optimizer states and updates on the hosts, layer by layer.

    As ZeRO-Offload does (Ren et al. 2021); with fp16 updates wait for the check of all gradients.
    None where stages are cut into segments already or experts are shared.
    """
    placement = plan.placement
    if any(s.name for s in placement.segments) or placement.ep > 1 or placement.extra_ranks:
        return None
    if _schedule(plan) is None or placement.workers:
        return None
    late = problem.job.dtype == "fp16"
    args = {"clipping": "global" if late else "none"}
    masters = {} if problem.job.master_weights else {"masters": False}
    segments = tuple(
        msgspec.structs.replace(s, offload=("optimizer",))
        for s in cut_layers(problem.model, placement.stages)
    )
    return msgspec.structs.replace(
        placed(plan, segments=segments, late_updates=late),
        lowering=(*plan.lowering, Call(SEGMENTS, 1, args | masters)),
    )


def placed(plan: Plan, **fields: object) -> Plan:
    """Return the plan with fields of its placement replaced."""
    return msgspec.structs.replace(
        plan, placement=msgspec.structs.replace(plan.placement, **fields)
    )


def _schedule(plan: Plan) -> Call | None:
    return next((c for c in plan.lowering if c.name == "schedule"), None)
