"""Steps that overlap: no plan of the contract suite leaks memory over 50 of them."""

from __future__ import annotations

import msgspec
import pytest

from sim.cost.occupancy import memory_over_time
from sim.engine.simulate import simulate
from sim.plan.validate import validate
from strategies.registry import get, names
from strategies.testing import Case, companions_of
from tests.contract.test_strategies import small

STEPS = 50


@pytest.mark.parametrize("name", names())
def test_fifty_steps_without_a_barrier_leak_nothing(name: str) -> None:
    # Without BARRIER a step's first forward waits for its own updates of the step before, @1.
    problem, strategy = small(), get(name)
    values = strategy.space(problem, companions_of(strategy, problem, before=True)).values
    for knobs in dict.fromkeys((values[0], values[len(values) // 2], values[-1])):
        plan = msgspec.structs.replace(Case(strategy, problem, knobs).plan, barrier=False)
        validate(plan)
        run = simulate(plan, problem, steps=STEPS)
        layout, out = run.layout, run.outcome
        rows = memory_over_time(layout.graph, layout.wiring, plan, problem, out.start, out.end)
        for times, nbytes in rows:
            assert nbytes.min() >= 0
            assert nbytes[-1] == pytest.approx(nbytes[0])
            early = times <= out.makespan / 5
            assert nbytes[~early].max() <= nbytes[early].max() * (1 + 1e-9)
