"""What pricing a plan on its machine had to assume, in words."""

from __future__ import annotations

from sim.cost.compute import compute_dtype
from sim.cost.measured import MeasuredTimes
from sim.plan.plan import Plan
from sim.problem import Problem

__all__ = ["cost_assumptions"]


def cost_assumptions(plan: Plan, problem: Problem) -> tuple[str, ...]:
    """Return what the times of the plan's accelerators rest on, one text per fact.

    Says in which dtype a chip computes when it lacks the job's, how many of its blocks take
    measured times, and for the others that no efficiency of the chip was measured.

    Args:
        plan, problem: see there; accelerators without a cell are left out.

    Raises:
        InputError: a chip can compute neither in the job's dtype nor in one that may stand in.
    """
    placement, model = plan.placement, problem.model
    measured = MeasuredTimes(model) if model.times else None
    found: dict[str, None] = {}
    for name in dict.fromkeys(c.accelerator for c in placement.cells if c.accelerator):
        accelerator = problem.machine.accelerators[name]
        stages = {c.stage for c in placement.cells if c.accelerator == name}
        blocks = [
            b
            for s in placement.segments
            if s.cell in stages
            for b in model.blocks[s.blocks[0] : s.blocks[1]]
        ]
        note = compute_dtype(accelerator, problem.job.dtype)[1]
        if note:
            found[note] = None
        known = sum((b.name, name) in measured.entries for b in blocks) if measured else 0
        if known:
            found[f"{name}: {known} of its {len(blocks)} blocks take measured times"] = None
        if known < len(blocks) and not accelerator.calibrated:
            found[f"no efficiency of {name} was measured"] = None
    return tuple(found)
