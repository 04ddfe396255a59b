"""All-reduce applied late: closed forms of the step time, memory, and what validation proves."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sim.cost.ledger import peak_memory
from sim.engine.simulate import simulate
from sim.errors import InputError, PlanError
from sim.plan.passes import expand
from sim.plan.plan import Plan, ProgramText
from sim.plan.program import format_program
from sim.plan.validate import validate
from sim.problem import Problem
from sim.report.metrics import pace_of
from sim.report.record import spans_of_run
from tests.unit.delayed_cases import NBYTES, machine_of, plan_of, problem_of

WORKERS = 4


def late(compute: float, comm: float, tau: int) -> tuple[Plan, Problem]:
    """Equal workers whose all-reduce alone takes ``comm`` [s]."""
    times = [compute] * WORKERS
    rate = 2 * (WORKERS - 1) / WORKERS * NBYTES / comm
    problem = problem_of(times, machine_of(times, rate=rate))
    return plan_of(problem, variant="allreduce", tau=tau), problem


def step_time(compute: float, comm: float, tau: int, **more: Any) -> float:
    plan, problem = late(compute, comm, tau)
    run = simulate(plan, problem, steps=20, **more)
    return pace_of(spans_of_run(run), barrier=plan.barrier).step_time_s


@pytest.mark.parametrize(("compute", "comm"), [(3.0, 2.0), (3.0, 3.0), (3.0, 7.0)])
def test_step_time(compute: float, comm: float) -> None:
    assert step_time(compute, comm, 0) == pytest.approx(compute + comm)
    for tau in (1, 2, 3):
        assert step_time(compute, comm, tau) == pytest.approx(max(compute, comm))


@pytest.mark.parametrize("tau", [0, 1, 3])
def test_folding_changes_nothing(tau: int) -> None:
    assert step_time(3.0, 2.0, tau, fold=False) == pytest.approx(step_time(3.0, 2.0, tau))
    plan, problem = late(3.0, 2.0, tau)
    one, each = (simulate(plan, problem, steps=6, fold=f).makespan for f in (True, False))
    assert one == pytest.approx(each, rel=1e-9)


def test_no_delay_is_ordinary_data_parallelism() -> None:
    plan, _ = late(3.0, 2.0, 0)
    assert plan.exact and plan.barrier and not [c for c in plan.lowering if c.name == "delayed"]


def test_the_update_stands_tau_steps_behind_its_gradient() -> None:
    plan, problem = late(3.0, 2.0, 2)
    assert "REDUCE_GRAD ; ^2 0OPT" in format_program(expand(plan)[0])
    assert not plan.exact and "2 steps late" in plan.reason
    run = simulate(plan, problem, steps=6, fold=False)
    graph, out = run.layout.graph, run.outcome
    mine = [n for n in range(graph.num_nodes) if graph.actor[n] == 0]
    at = {(graph.ops[n].kind, int(graph.step[n])): n for n in mine}
    for step in range(4):
        update = at["OPT", step]
        assert out.start[update] >= out.end[at["REDUCE_GRAD", step]]
        # Steps up to step + 2 were computed without it, step + 3 was not.
        assert out.end[at["B", step + 2]] <= out.start[update]
        if step < 3:
            assert out.start[at["F", step + 3]] >= out.end[update]
    # Those of the last two steps are not applied.
    assert ("OPT", 4) not in at and ("OPT", 5) not in at


@pytest.mark.parametrize("tau", [1, 4])
def test_gradients_in_flight_are_in_the_ledger(tau: int) -> None:
    plan, problem = late(3.0, 2.0, tau)
    now = peak_memory(plan, problem)[0, 0].terms
    plain = peak_memory(late(3.0, 2.0, 0)[0], problem)[0, 0].terms
    assert now["gradients"] == (1 + tau) * plain["gradients"] == (1 + tau) * NBYTES
    same = set(now) - {"gradients"}
    assert {k: now[k] for k in same} == {k: plain[k] for k in same}


def test_validation_reads_far_enough_to_see_a_late_update() -> None:
    plan, _ = late(3.0, 2.0, 3)
    ranks = tuple(range(WORKERS))
    text = "0F0 0B0 0REDUCE_GRAD ^3 0OPT <- ^3 {}"
    whole, broken = (
        msgspec.structs.replace(plan, lowering=(), programs=(ProgramText(ranks, text.format(x)),))
        for x in ("0REDUCE_GRAD", "0B0")
    )
    validate(whole)
    with pytest.raises(PlanError, match="never reduced"):
        validate(broken)


def test_one_replica_reduces_nothing() -> None:
    problem = problem_of([3.0])
    with pytest.raises(InputError, match="reduces nothing"):
        plan_of(problem, variant="allreduce", tau=1)


def test_a_late_update_is_not_exact() -> None:
    plan, _ = late(3.0, 2.0, 1)
    with pytest.raises(PlanError, match="so that update is late"):
        validate(msgspec.structs.replace(plan, exact=True, reason=""))
    validate(late(3.0, 2.0, 0)[0])
