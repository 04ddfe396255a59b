"""A plan file stays small: placement and calls, not programs."""

from __future__ import annotations

from sim.plan.io import plan_to_json
from sim.plan.lower import lower
from sim.plan.uniform import uniform
from sim.problem import load_problem
from tests.benchmarks.reference_plan import reference_plan

MOST = 200_000


def test_the_reference_plan() -> None:
    plan = reference_plan(8)
    assert plan.placement.num_ranks == 1024
    assert len(plan_to_json(plan)) < MOST


def test_a_plan_of_1024_chips_with_its_problem_inside() -> None:
    problem = load_problem("h2_1024", "h2_100b", "h2_1024")
    draft = uniform(problem.model, problem.job.global_batch, range(1024), pp=16, tp=8)
    assert len(plan_to_json(lower(problem, draft))) < MOST
