"""The plans of the prediction study run, differ enough, and are ranked by what they take."""

from __future__ import annotations

import pytest

from tests.validation.emulated_prediction import emulated_cases, emulated_problem
from tests.validation.runtime_prediction import cases, predicted_s, problem_on, summary

PROBLEM = problem_on("two_processes")


def test_the_plans_run_and_differ_by_more_than_a_quarter() -> None:
    pytest.importorskip("torch", reason="the runtime needs PyTorch")
    from real_runtime.support import check_supported

    found = cases(PROBLEM)
    times = {}
    for name, case in found.items():
        check_supported(case.plan)
        assert case.plan.placement.num_ranks == 2
        times[name] = predicted_s(case, PROBLEM)
    distinct = {round(t, 6) for t in times.values()}
    assert len(distinct) >= 5 and max(distinct) > 1.25 * min(distinct)
    # Half the speed of one replica: the step takes twice as long, up to the gradients' sum.
    assert 1.8 < times["dp2 slowed"] / times["dp2"] <= 2.0
    assert times["pp2 m8"] < times["pp2 m8 uneven"] < times["dp2 slowed"]


def test_the_emulated_plans_run_on_three_and_four_ranks_and_unlike_chips() -> None:
    pytest.importorskip("torch", reason="the runtime needs PyTorch")
    from real_runtime.emulate import emulation
    from real_runtime.support import check_supported

    problem = emulated_problem(PROBLEM)
    found = emulated_cases(problem)
    steps = {}
    for name, plan in found.items():
        check_supported(plan)
        assert plan.placement.num_ranks in (3, 4)
        what = emulation(plan, problem)
        steps[name] = what.step_s
        assert max(what.factors) == pytest.approx(2.0 if "unlike" in name else 1.0)
    assert max(steps.values()) > 1.25 * min(steps.values())
    assert steps["pp4"] < steps["pp3"] < steps["pp3 uneven"]


def test_summary_by_hand() -> None:
    found = summary({"a": 1.0, "b": 2.2, "c": 2.0}, {"a": 1.0, "b": 2.0, "c": 4.0})
    assert found["median_absolute_error"] == pytest.approx(0.1)
    assert found["largest_absolute_error"] == pytest.approx(0.5)
    assert found["predicted_order"] == ["a", "c", "b"]
    assert found["measured_order"] == ["a", "b", "c"]
    assert found["rank_correlation"] == pytest.approx(0.5)
    assert found["measured_spread"] == pytest.approx(3.0)
