"""As many steps as a run needs for its pace to settle."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np

from sim.engine.simulate import Run, simulate
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.report.delays import SETTLED_STEPS, SETTLED_WRITES
from sim.report.writes import Writes, common_window, fewest_in, server_of_run, writes_of

__all__ = ["MOST_STEPS", "simulate_settled"]

MOST_STEPS = 128 * SETTLED_STEPS
"""Of any worker; where the slowest is slower still, its pace rests on fewer steps."""


def simulate_settled(plan: Plan, problem: Problem | None = None, **more: Any) -> Run:
    """Simulate one step, or ``SETTLED_STEPS`` where steps overlap or tables make them differ.

    Where ranks serve messages, workers go on until the slowest has written that often in the time
    in which all do, and the run ends there: a worker that is alone says nothing about the pace. It
    goes on no longer where the time does not grow, as behind a lost chip.

    Args:
        plan: a validated plan. problem: None reads the one the plan carries.
        more: as for ``simulate``, without ``steps`` and ``until``.

    Raises:
        InputError, SimulationError: see ``simulate``.
    """
    steps = 1 if plan.barrier and not plan.tables else SETTLED_STEPS
    run = simulate(plan, problem, steps=steps, **more)
    if server_of_run(run) is None:
        return run
    before = -1.0
    while True:
        writes, (start, stop) = writes_of(run), common_window(run)
        if fewest_in(writes, start, stop) >= SETTLED_WRITES:
            break
        if stop <= before or steps >= MOST_STEPS:
            return run
        before, steps = stop, _steps(writes, start, stop, steps)
        run = simulate(plan, problem, steps=steps, **more)
    if steps == SETTLED_STEPS:
        return run
    return simulate(plan, problem, steps=steps, until=stop, **more)


def _steps(writes: Writes, start: float, stop: float, steps: int) -> int:
    """After how many steps the first to end has let the slowest write often enough."""
    slowest = max(float(np.diff(t, prepend=0.0).mean()) for t in writes.times().values())
    needed = start + SETTLED_STEPS * slowest
    return min(MOST_STEPS, max(steps + 1, ceil(1.05 * steps * needed / stop)))
