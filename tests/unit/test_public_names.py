"""The public face of ``sim``: complete, and cheap to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sim


def test_every_public_name_loads() -> None:
    for name in sim.__all__:
        assert getattr(sim, name).__module__.startswith("sim."), name
    assert set(sim.__all__) == set(sim._HOME)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sim.nothing  # noqa: B018


def test_the_documented_study_runs() -> None:
    problem = sim.load_problem("v100_t4", "gpt2_355m", "v100_t4")
    chips = range(problem.machine.num_chips)
    plan = sim.lower(problem, sim.uniform(problem.model, problem.job.global_batch, chips, pp=4))
    sim.validate(plan)
    report = sim.report_of(sim.simulate(plan, problem), problem)
    assert report.metrics.step_time_s == pytest.approx(report.run.makespan)
    assert 0.0 < report.metrics.mfu < 1.0


def test_importing_is_cheap() -> None:
    code = "import sim, sys; print([m for m in ('numpy', 'simpy', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
