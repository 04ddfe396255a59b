"""The contract suite on plans that are not exact: delayed SGD where the job allows it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from sim.cost.occupancy import memory_over_time
from sim.engine.simulate import simulate
from sim.problem import Problem, load_problem
from strategies.base import Strategy
from strategies.registry import get
from strategies.testing import Case, StrategyContract, companions_of
from tests.contract.test_strategies import MOE, small

NAMES = ("delayed_sgd", "local_sgd")


@cache
def allowed() -> Problem:
    """The small problem of the contract suite, inexact plans allowed."""
    job = small().documents["job"] | {"limits": {"allow_inexact": True}}
    return load_problem("v100_t4", MOE, job)


@pytest.mark.parametrize("strategy", NAMES, indirect=True)
class TestInexact(StrategyContract):
    @pytest.fixture
    def strategy(self, request: pytest.FixtureRequest) -> Strategy[Any]:
        return get(request.param)

    @pytest.fixture
    def problem(self) -> Problem:
        return allowed()


@pytest.mark.parametrize("name", NAMES)
def test_many_steps_leak_nothing(name: str) -> None:
    strategy = get(name)
    space = strategy.space(allowed(), companions_of(strategy, allowed(), before=True))
    for knobs in space.values[1:]:
        plan = Case(strategy, allowed(), knobs).plan
        layout, out = (run := simulate(plan, allowed(), steps=12)).layout, run.outcome
        rows = memory_over_time(layout.graph, layout.wiring, plan, allowed(), out.start, out.end)
        for times, nbytes in rows:
            if len(times):
                early = times <= out.makespan / 3
                assert nbytes.min() >= 0 and nbytes[-1] == pytest.approx(nbytes[0])
                assert nbytes[~early].max() <= nbytes[early].max() * (1 + 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_the_space_follows_the_job(name: str) -> None:
    strategy = get(name)
    for problem, more in ((small(), False), (allowed(), True)):
        space = strategy.space(problem, companions_of(strategy, problem, before=True))
        drafts = [
            strategy.apply(problem, companions_of(strategy, problem, before=True), k) for k in space
        ]
        assert any(not d.exact for d in drafts) == more
        assert any(d.exact for d in drafts)
