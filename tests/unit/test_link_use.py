"""Bytes and busy time of links, against a sum over every node."""

from __future__ import annotations

import numpy as np
import pytest

from sim.engine.simulate import Run, simulate
from sim.plan.lower import lower
from sim.plan.uniform import uniform
from sim.report.links import link_use
from tests.property.cost_cases import machine, problem, small


def one_by_one(run: Run) -> tuple[list[float], list[float]]:
    nbytes, busy = list(run.outcome.link_bytes), list(run.outcome.link_busy)
    on: dict[int, list[tuple[float, float]]] = {}
    for node, carried in run.prices.carried.items():
        for link, size in carried:
            nbytes[link] += size
            on.setdefault(link, []).append((run.outcome.start[node], run.outcome.end[node]))
    for link, intervals in on.items():
        until = -np.inf
        for start, end in sorted(intervals):
            busy[link] += max(0.0, end - max(start, until))
            until = max(until, end)
    return nbytes, busy


@pytest.mark.parametrize("sizes", [{"pp": 4}, {"pp": 2, "tp": 2}, {"tp": 2, "ep": 2}])
@pytest.mark.parametrize("fold", [True, False])
def test_against_every_node(sizes: dict[str, int], fold: bool) -> None:
    p = problem(machine(4, 2, nics=2), small(moe=True), batch=8)
    run = simulate(lower(p, uniform(p.model, 8, range(8), **sizes)), p, fold=fold, steps=2)
    found, expected = link_use(run), one_by_one(run)
    assert sum(expected[0]) > 0
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-12)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-12)


def test_folded_runs_put_every_byte_on_its_link() -> None:
    p = problem(machine(4, 2, nics=2), small(moe=True), batch=8)
    plan = lower(p, uniform(p.model, 8, range(8), pp=2, ep=2))
    apart, folded = (link_use(simulate(plan, p, fold=fold)) for fold in (False, True))
    np.testing.assert_allclose(folded[0], apart[0], rtol=1e-9)
