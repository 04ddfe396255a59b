"""Stale synchronous parallel: no worker ever leads by more than its bound, whatever the speeds."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sim.engine.faults import ChipLoss, Straggler
from sim.engine.simulate import Run, simulate
from sim.errors import PlanError
from sim.plan.passes import expand
from sim.plan.plan import Plan, ProgramText
from sim.plan.program import format_program, parse_program
from sim.plan.validate import validate
from sim.problem import Problem
from strategies.data.delayed_runs import delays_of, order_of
from tests.unit.delayed_cases import plan_of, problem_of


@cache
def made(workers: int, slack: int) -> tuple[Plan, Problem]:
    """Equal workers of 1 s on fast links; stragglers make them unlike."""
    problem = problem_of([1.0] * workers, rate=4e8, update=0.01)
    rule = {"rule": "ssp", "bound": slack} if slack >= 0 else {}
    return plan_of(problem, **rule), problem


def run_of(speeds: tuple[float, ...], slack: int, steps: int = 8) -> Run:
    plan, problem = made(len(speeds), slack)
    slow = [Straggler(ranks=(r,), factor=f) for r, f in enumerate(speeds) if f != 1.0]
    return simulate(plan, problem, steps=steps, faults=slow)


def leads(run: Run, steps: int) -> list[tuple[str, int]]:
    """(what, lead over the slowest unfinished worker) of every write and read, as they came."""
    clock = Counter({h.sender: 0 for h in run.handled})
    found = []
    for h in run.handled:
        clock[h.sender] += h.op.kind == "APPLY"
        left = [n for n in clock.values() if n < steps]
        if left:
            found.append((h.op.kind, clock[h.sender] - min(left)))
    return found


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from([1.0, 1.1, 1.7, 2.5, 4.0, 9.0]), min_size=2, max_size=5).map(tuple),
    st.integers(0, 3),
)
def test_the_bound_holds(speeds: tuple[float, ...], slack: int) -> None:
    run = run_of(speeds, slack)
    assert len(order_of(run)) == 8 * len(speeds)
    for kind, lead in leads(run, 8):
        assert lead <= slack + (kind == "APPLY")


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([1.0, 1.1, 1.7, 2.5, 4.0, 9.0]), min_size=2, max_size=4).map(tuple))
def test_enough_slack_is_none(speeds: tuple[float, ...]) -> None:
    assert order_of(run_of(speeds, 8)) == order_of(run_of(speeds, -1))


@pytest.mark.parametrize("slack", [0, 1, 3])
def test_the_slowest_sets_the_pace(slack: int) -> None:
    # Three workers of 1 s wait for one of 3 s; without a bound they write three times as often.
    run = run_of((1.0, 1.0, 1.0, 3.0), slack, steps=20)
    found = delays_of(run, start=15.0, stop=50.0)
    period = 3.0 + 2 * 0.01 + 0.01
    assert found.updates_per_s == pytest.approx(4 / period, rel=0.05)
    free = delays_of(run_of((1.0, 1.0, 1.0, 3.0), -1, steps=20), start=3.0, stop=20.0)
    assert free.updates_per_s == pytest.approx(3 / 1.05 + 1 / 3.05, rel=0.05)
    # Whoever is waited for sees the others' writes of its own step only.
    assert found.max <= 3 * (slack + 1) and free.worker_mean[3] > 6


def test_less_slack_less_delay() -> None:
    late = [delays_of(run_of((1.0, 1.1, 1.7, 4.0), s, 20), start=0.0).max for s in (0, 1, 2, 4)]
    assert late == sorted(late) and late[0] < late[-1]


def test_a_lost_worker_holds_nobody_back() -> None:
    plan, problem = made(3, 1)
    slow = Straggler(ranks=(2,), factor=5.0)
    run = simulate(plan, problem, steps=10, faults=[slow, ChipLoss(rank=2, at=22.0)])
    order = order_of(run)
    count = Counter(a.worker for a in order)
    assert (count[0], count[1], count[2]) == (10, 10, 4)
    # After the loss the two others write once a second each.
    after = [a for a in order if a.time > 22.0]
    assert after[-1].time - 22.0 == pytest.approx(len(after) / 2 * 1.05, rel=0.05)


def test_slack_is_written_in_the_plan() -> None:
    plan, _ = made(3, 2)
    server = expand(plan)[-1]
    text = format_program(server)
    assert "slack=2" in text and parse_program(text, server.ranks) == server
    assert "waits" in plan.reason


def test_slack_belongs_to_an_answer() -> None:
    plan, problem = made(2, 1)
    programs = [ProgramText(p.ranks, format_program(p)) for p in expand(plan)]
    broken = replace(programs[0], text=programs[0].text.replace("0B0", "0B0{slack=1}", 1))
    with pytest.raises(PlanError, match="answers no PULL"):
        validate(replace(plan, lowering=(), programs=(broken, *programs[1:])), problem)
