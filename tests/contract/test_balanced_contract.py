"""Lent experts over many steps: nothing is left behind, and every balancer keeps to its room."""

from __future__ import annotations

import numpy as np
import pytest

from sim.cost.occupancy import memory_over_time
from sim.engine.simulate import simulate
from strategies.expert.balanced import BALANCED, BalancedKnobs
from strategies.expert.balancers import balancer_names
from strategies.testing import Case
from tests.contract.test_strategies import small


@pytest.mark.parametrize("name", balancer_names())
def test_many_steps_leak_nothing(name: str) -> None:
    problem = small()
    plan = Case(BALANCED, problem, BalancedKnobs(balancer=name, slots=1)).plan
    run = simulate(plan, problem, steps=9)
    lay, out = run.layout, run.outcome
    rows = memory_over_time(lay.graph, lay.wiring, plan, problem, out.start, out.end)
    for times, nbytes in rows:
        early = times <= out.makespan / 3
        assert nbytes.min() >= 0 and nbytes[-1] == pytest.approx(nbytes[0])
        assert nbytes[~early].max() <= nbytes[early].max() * (1 + 1e-9)
    for row in lay.tables.rows["lent"]:
        for layer in ("l0", "l3"):
            held = np.sum(row[f"{layer}.hosts"], axis=0)
            own = len(row[f"{layer}.home"]) // plan.placement.ep
            assert held.max() <= own + 1
            assert set(np.bincount(row[f"{layer}.home"]).tolist()) == {own}
