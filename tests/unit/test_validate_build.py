"""Plans of measured runs."""

from __future__ import annotations

import pytest

from sim.fidelity.build import draft_of, microbatches_of, problem_of
from sim.fidelity.chips import chips_of
from sim.fidelity.predict import Predictor
from sim.fidelity.runs import read_runs
from sim.fidelity.settings import settings_of
from sim.fidelity.skip import Skip
from sim.hardware.catalog import bundled_catalog
from sim.plan.lower import lower
from sim.plan.plan import Plan
from sim.plan.validate import validate

RUNS = {r.run_id: r for r in read_runs()}


def plan_of(run_id: str) -> Plan:
    s = settings_of(RUNS[run_id])
    m = microbatches_of(s)
    problem = problem_of(s, bundled_catalog(), m)
    plan = lower(problem, draft_of(s, problem, m))
    validate(plan)
    return plan


@pytest.mark.parametrize("run_id", ["amp-homoge-30", "amp-homoge-22", "amp-homoge-52", "sailor-16"])
def test_blocking_pipelines_of_few_microbatches_end(run_id: str) -> None:
    """Fewer microbatches than stages: neighbours that do not exchange keep their order."""
    assert plan_of(run_id).placement.num_stages > 1


def test_stated_cuts_are_taken() -> None:
    """DeepSpeed's list has three modules before the layers and three behind: 8/6/6/10 of 30."""
    stages = plan_of("amp-homoge-30").placement.stages
    layers = [(b - a) // 2 for a, b in (s.blocks for s in stages)]
    assert layers == [5, 6, 6, 7]


def test_layers_that_do_not_divide_leave_the_ends_lighter() -> None:
    """126 layers, embedding and head on 64 virtual stages: two each."""
    stages = plan_of("mlperf50-01").placement.stages
    sizes = [b - a for a, b in (s.blocks for s in stages)]
    assert sizes[0] == sizes[-1] == 3 and set(sizes[1:-1]) == {4}


def test_short_steps_give_the_whole_step() -> None:
    """The step of 64 microbatches from those of 16 and 24 is the simulated one."""
    s = settings_of(RUNS["korth-02-full"])
    predictor = Predictor()
    problem = problem_of(s, bundled_catalog(), 64)
    whole = predictor._sample(s, problem, 64).run.makespan
    assert predictor.predict(s).step_s == pytest.approx(whole, rel=1e-9)


def test_chips_without_a_count_are_skipped() -> None:
    with pytest.raises(Skip, match="type x count"):
        chips_of("H200 x (see recipe)")
    assert chips_of("RTX2080Ti(as named RTX-2080) x 16") == (("RTX2080Ti", 16),)
