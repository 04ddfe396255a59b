"""Rates and delays of runs with servers and of late all-reduces, in the report: closed forms."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from sim.engine.faults import ChipLoss
from sim.engine.simulate import Run, simulate
from sim.errors import SimulationError
from sim.plan.plan import Plan
from sim.problem import Problem
from sim.report.delays import SETTLED_STEPS, SETTLED_WRITES, settled_delays
from sim.report.report import Report, report_of
from sim.report.settled import MOST_STEPS, simulate_settled
from sim.report.table import print_simulation
from strategies.data.delayed_runs import common_window, delays_of, order_of
from tests.unit.delayed_cases import NBYTES, machine_of, plan_of, problem_of

FAST = {"rate": 1e15, "update": 1e-9}
"""Messages and updates that take no time."""


def given(compute: list[float], **knobs: Any) -> tuple[Plan, Problem]:
    problem = problem_of(compute, **FAST)
    return plan_of(problem, **knobs), problem


def reported(compute: list[float], steps: int, **more: Any) -> Report:
    plan, problem = given(compute)
    return report_of(simulate(plan, problem, steps=steps, **more), problem, memory={})


def text_of(report: Report) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_simulation(console, report.simulate_document())
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("steps", [1, 2, 3, 8, 40])
def test_equal_workers_write_their_number_in_a_computation(workers: int, steps: int) -> None:
    report = reported([3.0] * workers, steps)
    m = report.metrics
    assert m.updates_per_s == pytest.approx(workers / 3.0)
    assert m.tokens_per_s == pytest.approx(workers / 3.0) and m.mfu is not None
    assert m.bubble_fraction == pytest.approx(0.0, abs=1e-6)
    assert report.delays is not None
    assert ("empty" in report.delays.note) == (steps == 1)
    assert (report.delays.note == "") == (steps >= SETTLED_STEPS)


def test_a_slow_worker_does_not_set_the_pace() -> None:
    plan, problem = given([3.0, 3.0, 3.0, 30.0])
    run = simulate_settled(plan, problem)
    report = report_of(run, problem, memory={})
    assert report.metrics.updates_per_s == pytest.approx(3 / 3 + 1 / 30, rel=1e-3)
    assert report.metrics.bubble_fraction == pytest.approx(0.0, abs=1e-6)
    found = report.delays
    assert found is not None and found.note == "" and found == settled_delays(run)
    assert found == delays_of(run)
    assert found.worker_updates[3] >= SETTLED_WRITES
    assert found.worker_rates == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3, 3: 1 / 30}, rel=1e-3)
    # The run ends with the time in which all write.
    assert run.makespan < 1.2 * (SETTLED_STEPS + 1) * 30.0


def test_too_few_steps_are_of_the_whole_run_and_say_so() -> None:
    report = reported([3.0, 3.0, 30.0], 2)
    assert report.delays is not None and "is empty" in report.delays.note
    assert report.metrics.updates_per_s == pytest.approx(6 / 60)
    text = text_of(report)
    assert "warning" in text and "take more steps" in text and "while every" not in text


def test_a_worker_beyond_the_most_steps_says_so() -> None:
    plan, problem = given([0.01, 1000.0])
    run = simulate_settled(plan, problem)
    assert run.layout.steps == MOST_STEPS
    found = settled_delays(run)
    assert found is not None and "take more steps" in found.note


def test_equal_workers_need_no_more_steps() -> None:
    plan, problem = given([3.0, 3.0])
    assert simulate_settled(plan, problem).layout.steps == SETTLED_STEPS
    late, problem = given([3.0, 3.0], variant="allreduce", tau=1)
    assert simulate_settled(late, problem).layout.steps == SETTLED_STEPS
    sync, problem = given([3.0, 3.0], variant="allreduce")
    assert simulate_settled(sync, problem).layout.steps == 1


def test_rates_behind_a_loss_count_what_was_written() -> None:
    plan, problem = given([3.0, 4.0, 5.0])
    run = simulate(plan, problem, steps=200, faults=[ChipLoss(rank=0, at=60.5)])
    assert common_window(run)[1] <= 60.5
    found = delays_of(run, stop=500.0)
    inside = [a for a in order_of(run) if found.start < a.time <= 500.0]
    assert found.updates == len(inside)
    assert found.updates_per_s == pytest.approx(len(inside) / (500.0 - found.start), abs=3 / 495)
    # Worker 0 wrote until 60 s, the others all the time.
    lost = (60.0 - found.start) / 3.0 / (500.0 - found.start)
    assert found.worker_rates == pytest.approx({0: lost, 1: 1 / 4, 2: 1 / 5}, rel=1e-6)


def test_a_worker_lost_at_once_is_missed() -> None:
    report = reported([3.0] * 4, 10, faults=[ChipLoss(rank=3, at=0.0)])
    assert report.metrics.updates_per_s == pytest.approx(1.0)
    # Its own forwards are behind no update.
    assert report.basis.tokens_per_step == pytest.approx(1.0)
    assert report.delays is not None and "1 of 4 workers write nothing" in report.delays.note


def test_all_workers_lost_stop_the_run() -> None:
    plan, problem = given([3.0, 4.0])
    faults = [ChipLoss(rank=0, at=10.0), ChipLoss(rank=1, at=20.0)]
    with pytest.raises(SimulationError, match="lost rank 0 at 10 s, rank 1 at 20 s"):
        simulate(plan, problem, steps=8, faults=faults)
    # Lost behind its last step is not lost.
    done = simulate(plan, problem, steps=4, faults=[faults[0], ChipLoss(rank=1, at=20.0)])
    assert len(order_of(done)) == 3 + 4


def test_egress_is_that_of_the_window() -> None:
    problem = problem_of([3.0, 3.0, 30.0])
    links = tuple(
        msgspec.structs.replace(x, price_per_byte=1e-9) if x.name == "node3/nic0/out" else x
        for x in problem.machine.links
    )
    machine = msgspec.structs.replace(problem.machine, links=links)
    problem = msgspec.structs.replace(problem, machine=machine)
    plan = plan_of(problem)
    for steps in (40, 60):  # however long the slow worker is alone
        report = report_of(simulate(plan, problem, steps=steps), problem, memory={})
        assert report.delays is not None
        share = report.delays.worker_rates[2] / report.metrics.updates_per_s
        assert report.basis.egress_per_step == pytest.approx(share * NBYTES * 1e-9)


@pytest.mark.parametrize("tau", [1, 2])
def test_a_late_allreduce_has_a_fixed_delay_and_no_more_exposed_than_its_step(tau: int) -> None:
    compute, comm = 3.0, 7.0
    problem = problem_of([compute] * 4, machine_of([compute] * 4, rate=1.5 * NBYTES / comm))
    plan = plan_of(problem, variant="allreduce", tau=tau)
    for steps in (8, 200):
        report = report_of(simulate(plan, problem, steps=steps), problem, memory={})
        m, found = report.metrics, report.delays
        assert m.step_time_s == pytest.approx(comm)
        assert m.exposed_comm_s <= comm
        assert found is not None and (found.unit, found.mean, found.max) == ("steps", tau, tau)
        assert found.histogram == {tau: steps - tau}
        assert found.updates_per_s == pytest.approx(1 / comm)
    assert m.exposed_comm_s == pytest.approx(comm - compute, rel=0.02)
    assert f"every update is {tau} step" in text_of(report)


def test_synchronous_plans_have_no_delays() -> None:
    plan, problem = given([3.0, 3.0], variant="allreduce")
    report = report_of(simulate(plan, problem, steps=3), problem, memory={})
    assert report.delays is None and report.simulate_document().delays is None


def test_the_document_carries_the_delays() -> None:
    report = reported([3.0] * 3, 8)
    found = msgspec.json.decode(msgspec.json.encode(report.simulate_document()))["delays"]
    assert (found["mean"], found["p50"], found["p95"], found["max"]) == (2, 2, 2, 2)
    # Of 24 writes the first of each and the last of two are outside the window.
    assert found["histogram"] == {"2": 19} and found["worker_mean"] == {"0": 2, "1": 2, "2": 2}
    assert found["updates_per_s"] == found["samples_per_s"] == pytest.approx(1.0)
    text = text_of(report)
    assert "mean 2 updates" in text and "1 updates/s" in text and "while every worker" in text


@pytest.mark.parametrize("current", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 8])
@pytest.mark.parametrize("compute", [[1.1, 1.0, 1.1, 1.7], [1.7, 1.7, 1.0, 1.0]])
def test_no_chip_is_above_its_peak(compute: list[float], steps: int, current: bool) -> None:
    """Workers at their chips' peaks, whose writes queue for different times in short windows."""
    plain = problem_of(compute, rate=1e15)
    plan = plan_of(plain, current=current)
    run = simulate(plan, plain, steps=steps)
    basis = report_of(run, plain, memory={}).basis
    flops = (basis.model_flops_per_step or 0.0) / basis.tokens_per_step
    kinds = {
        name: msgspec.structs.replace(kind, peak_flops_per_s={"bf16": flops / seconds})
        for (name, kind), seconds in zip(
            sorted((n, k) for n, k in plain.machine.accelerators.items() if n != "server"),
            compute,
            strict=True,
        )
    }
    machine = msgspec.structs.replace(
        plain.machine, accelerators=plain.machine.accelerators | kinds
    )
    problem = msgspec.structs.replace(plain, machine=machine)
    report = report_of(run, problem, memory={})
    assert report.metrics.mfu is not None and 0.3 < report.metrics.mfu <= 1 + 1e-9
    assert report.delays is not None
    window, peak = common_window(run), sum(1 / s for s in compute)
    if window[1] > window[0] and delays_of(run).updates_per_s > peak * (1 + 1e-9):
        assert current and "too short" in report.delays.note


def test_memory_over_time_of_a_run_that_was_ended(tmp_path: Any) -> None:
    plan, problem = given([3.0, 4.0])
    run: Run = simulate(plan, problem, steps=20, until=20.0)
    report = report_of(run, problem, memory={})
    assert report.save_trace(tmp_path / "trace.json").stat().st_size > 0
